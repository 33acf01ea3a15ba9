"""Text files that users give and get: read within a limit, written whole or not at all."""

import contextlib
import os
import re
import secrets
from pathlib import Path

from shardwright.core.errors import ShardwrightError

MOST_BYTES = 64 << 20
"""The most bytes of any file that is read: the plan of a model with tens of thousands of parameters has less."""
_LONG_KEY = re.compile(r"""(?:(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){32}""")
"""A pattern for a dotted key of more than 32 parts: a reader of TOML takes time in the square of their number."""


UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""A pattern for control characters (escape codes move cursors and set titles), marks that turn the direction of text
around, and halves of characters, which no terminal can be sent. Tabs and line ends are not among them."""


def printable(text: str) -> str:
    """The text. Raises ValueError when it holds what a terminal would take for a command."""
    if (found := UNPRINTABLE.search(text)) is not None:
        raise ValueError(f"holds the control character {found.group()!r}")
    return text


def visible(text: str) -> str:
    """The text with what a terminal would take for a command written out, as \\x1b."""
    return UNPRINTABLE.sub(lambda found: ascii(found.group())[1:-1], text)


def path_of(path: object, error: type[ShardwrightError]) -> Path:
    """The path that a user gave. Raises ``error`` when it is none."""
    if not isinstance(path, str | os.PathLike):
        raise error(f"{path!r} is not the path of a file: expected text, or a Path")
    found = os.fspath(path)
    if not isinstance(found, str) or "\0" in found:
        raise error(f"{found!r} is not the path of a file")
    return Path(found)


def read_text(path: Path, error: type[ShardwrightError], what: str = "file", most_bytes: int = MOST_BYTES) -> str:
    """The text of a file in UTF-8. Raises ``error`` when it cannot be read, or is larger than ``most_bytes``."""
    try:
        with path.open("rb") as file:
            read = file.read(most_bytes + 1)
    except (OSError, ValueError) as failed:
        said = getattr(failed, "strerror", None) or failed
        raise error(f"cannot read the {what} {path}: {said}") from failed
    if len(read) > most_bytes:
        raise error(f"{path}: the {what} is larger than {most_bytes >> 20} MiB, and no {what} is: is it another file?")
    try:
        return read.decode("utf-8")
    except UnicodeDecodeError as failed:
        raise error(f"cannot read the {what} {path}: it is not text in UTF-8: {failed}") from failed


def write_text(path: Path, text: str, error: type[ShardwrightError]) -> None:
    """Write a file, whole or not at all. What stood there before stays until the new text is on the disk.

    Raises ``error`` when the system does not let it; then the file is as it was.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        _write(path, text, error)  # a terminal or a pipe is written to, not replaced
        return
    target = Path(os.path.realpath(path))  # of a link, the file that it names
    if os.path.exists(target) and not os.access(target, os.W_OK):
        raise error(f"{path} cannot be written: Permission denied")
    beside = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.part")
    try:
        _write(beside, text, error, named=path)
        with contextlib.suppress(OSError):
            beside.chmod(target.stat().st_mode)
        try:
            beside.replace(target)
        except OSError as failed:
            raise error(f"{path} cannot be written: {failed.strerror}") from failed
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def _write(path: Path, text: str, error: type[ShardwrightError], named: Path | None = None) -> None:
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            if named is not None:
                os.fsync(file.fileno())
    except (OSError, ValueError) as failed:
        said = getattr(failed, "strerror", None) or failed
        raise error(f"{named or path} cannot be written: {said}") from failed


def require_short_keys(text: str, source: str, error: type[ShardwrightError]) -> None:
    """Raise ``error`` for TOML with a dotted key of more than 32 parts."""
    if (found := _LONG_KEY.search(text)) is not None:
        line = text.count("\n", 0, found.start()) + 1
        raise error(f"{source}: line {line} has a key of more than 32 parts, and no file here has such")
