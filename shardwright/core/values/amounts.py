"""Bytes, seconds and counts as people read them: three digits and a unit."""


def bytes_text(size: float) -> str:
    """A size as text: ``1.5 GiB``."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{_three_digits(size / unit)} {name}"
    return f"{size:.0f} B"


def seconds_text(seconds: float) -> str:
    """A time as text: ``12.3 ms``."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= unit:
            return f"{_three_digits(seconds / unit)} {name}"
    return f"{_three_digits(seconds * 1e9)} ns" if seconds else "0"


def count_text(count: int) -> str:
    """A count as text: ``1.56 B``, in thousands, millions, billions or trillions."""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{_three_digits(count / unit)} {name}"
    return str(count)


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
