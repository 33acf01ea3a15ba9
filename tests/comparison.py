"""The comparer of all suites and benchmarks: what a split run gives, held against what the unsplit model gives.

    same = Comparison("gpt2 under zb-h1")
    same.losses(found, expected.losses)
    same.gradients({n: p.grad for n, p in model.named_parameters()}, expected.gradients)
    same.values(model.state_dict(), expected.state, relative=1e-4, absolute=1e-5, what="weights")
    same.require()

Values are numbers, arrays of NumPy, PyTorch or JAX, and mappings and sequences of them, one inside the other. The set
of names, the shapes and the dtypes must be equal, and NaN is never near anything. Figures are in units of what is
allowed: 1 is at the bound, and what is not a number counts as infinitely far off. ``require`` refuses a comparison of
nothing.

Where each rank holds a part of the names, it compares with ``part=True`` and hands on its ``report()``, which is JSON;
``Comparison.of_ranks(reports)`` then also requires that every name was compared by some rank.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np

GRADIENT, OF_ALL, LOSS = 1e-4, 1e-6, 1e-5
"""A gradient may be off by ``GRADIENT`` of its norm and ``OF_ALL`` of the norm of all; a loss by ``LOSS`` of itself."""
SHOWN = 8
"""How many differences a message names."""
LOW_PRECISION = ("bfloat16", "float16", "float8")


@dataclass
class Tally:
    """What was compared of one kind (losses, gradients, weights).

    Attributes:
        worst: the largest difference, in units of what is allowed; infinite where something is not a number.
        elements: how many numbers were compared.
        named: names that were compared, those that have no value on either side included.
        wanted: names that should be.
        off: what differs, in words.
    """

    worst: float = 0.0
    elements: int = 0
    named: set[str] = field(default_factory=set)
    wanted: set[str] = field(default_factory=set)
    off: list[str] = field(default_factory=list)

    def add(self, name: str, elements: int, distance: float, why: str = "") -> None:
        """Note a difference in units of what is allowed."""
        self.named.add(name)
        self.elements += elements
        distance = distance if distance == distance else float("inf")
        self.worst = max(self.worst, distance)
        if not distance <= 1.0:
            self.off.append(f"{name}: {why or f'{distance:.3g} times what is allowed'}")


class Comparison:
    """Differences between what was found and what was wanted, by kind. Nothing raises before ``require``.

    Attributes:
        where: stands before the names from now on (``step 3``), so that each step is compared and named by itself.
    """

    def __init__(self, title: str = "") -> None:
        self.title = title
        self.where = ""
        self.tallies: dict[str, Tally] = {}

    def losses(
        self, found: Any, wanted: Any, *, relative: float = LOSS, what: str = "losses", moving: float | None = None
    ) -> Self:
        """Compare losses, each by ``relative`` of itself; those wanted must span more than ``moving``, if given."""
        tally, pairs = self._pairs(found, wanted, what, part=False, same_dtype=False)
        for name, one, other in pairs:
            with np.errstate(all="ignore"):
                off = np.abs(one.values - other.values) / (relative * np.maximum(np.abs(other.values), 1e-12))
            tally.add(name, one.values.size, _largest(off), f"{one.text} for {other.text}")
        if moving is not None:
            spread = np.ptp([other.values for _, _, other in pairs]) if pairs else 0.0
            if not spread > moving:
                tally.off.append(f"the losses wanted span {spread:.3g}, so that a run that trains nothing would pass")
        return self

    def gradients(
        self,
        found: Any,
        wanted: Any,
        *,
        part: bool = False,
        relative: float | None = None,
        of_all: float | None = None,
        none_is_zero: bool = False,
        same_dtype: bool = True,
        what: str = "gradients",
    ) -> Self:
        """Compare ‖g − g_ref‖ with ``relative``·‖g_ref‖ + ``of_all``·‖all g_ref‖, for each name.

        Args:
            part: ``found`` has some of the names of ``wanted``, as one rank of several holds them.
            relative, of_all: ``GRADIENT`` and ``OF_ALL``; to be given where a dtype has fewer than 24 bits.
            none_is_zero: no gradient is as good as one of zeros.
        """
        tally, pairs = self._pairs(found, wanted, what, part=part, same_dtype=same_dtype, none_is_zero=none_is_zero)
        everything = float(np.sqrt(sum(_norm(_array(g).values) ** 2 for g in _flat(wanted).values() if g is not None)))
        if not 0.0 < everything < float("inf"):
            tally.off.append(f"the norm of all gradients wanted is {everything:g}: nothing can be compared with them")
        for name, one, other in pairs:
            if relative is None and (one.is_rough or other.is_rough):
                tally.add(name, 0, float("inf"), f"{one.dtype} for {other.dtype} needs a bound: give relative=")
                continue
            allowed = (GRADIENT if relative is None else relative) * _norm(other.values)
            allowed += (OF_ALL if of_all is None else of_all) * everything
            with np.errstate(all="ignore"):
                distance = np.float64(_norm(one.values - other.values)) / allowed
            tally.add(name, one.values.size, _largest(distance))
        return self

    def values(
        self,
        found: Any,
        wanted: Any,
        *,
        relative: float,
        absolute: float,
        part: bool = False,
        same_dtype: bool = True,
        nan_is_nan: bool = False,
        what: str = "values",
    ) -> Self:
        """Compare every element with ``absolute`` + ``relative``·|wanted|; infinities, integers and truth values are
        equal or not. ``nan_is_nan`` where a NaN that the plain model has too is meant."""
        tally, pairs = self._pairs(found, wanted, what, part=part, same_dtype=same_dtype)
        for name, one, other in pairs:
            exact = other.values.dtype.kind in "biu"
            with np.errstate(all="ignore"):
                allowed = np.zeros(()) if exact else absolute + relative * np.abs(other.values)
                off = np.where(one.values == other.values, 0.0, np.abs(one.values * 1.0 - other.values) / allowed)
            if nan_is_nan:
                off = np.where(np.isnan(one.values) & np.isnan(other.values), 0.0, off)
            tally.add(name, one.values.size, _largest(off))
        return self

    def equal(
        self, found: Any, wanted: Any, *, part: bool = False, nan_is_nan: bool = False, what: str = "equal"
    ) -> Self:
        """Compare to the last bit; zeros of both signs are equal."""
        return self.values(found, wanted, relative=0.0, absolute=0.0, part=part, nan_is_nan=nan_is_nan, what=what)

    def __getitem__(self, what: str) -> Tally:
        """What was compared of one kind."""
        return self.tallies[what]

    @property
    def worst(self) -> float:
        """Of all kinds, in units of what is allowed."""
        return max((tally.worst for tally in self.tallies.values()), default=float("inf"))

    def failures(self) -> list[str]:
        """What differs, and what was not compared, in words; empty where all is equal."""
        found = [] if self.tallies else ["nothing was compared"]
        for what, tally in self.tallies.items():
            lacking = sorted(set(tally.wanted) - set(tally.named))
            found += [f"{what}: {one}" for one in tally.off]
            if lacking:
                found.append(f"{what}: {len(lacking)} never compared, {', '.join(lacking[:SHOWN])} among them")
            elif not tally.off and not tally.elements:
                found.append(f"{what}: nothing was compared, as all is empty")
        return found

    def require(self, *kinds: str) -> Self:
        """Raise AssertionError unless all is equal, something was compared, and ``kinds`` are among it."""
        found = self.failures() + [f"{kind}: nothing was compared" for kind in kinds if kind not in self.tallies]
        if found:
            more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
            raise AssertionError("\n  ".join([f"{self.title or 'what was found'} differs:", *found[:SHOWN], *more]))
        return self

    def summary(self) -> str:
        """How much was compared, and how far apart it is."""
        return "; ".join(
            f"{what}: {len(t.named)} names, {t.elements} numbers, {t.worst:.3g} of what is allowed at most"
            for what, t in self.tallies.items()
        )

    def report(self) -> dict[str, Any]:
        """What was found, as JSON has it."""
        kinds = {
            what: asdict(tally) | {"named": sorted(tally.named), "wanted": sorted(tally.wanted)}
            for what, tally in self.tallies.items()
        }
        return {"title": self.title, "kinds": kinds}

    @classmethod
    def of_ranks(cls, reports: Iterable[Mapping[str, Any]]) -> Self:
        """What all ranks found together. A kind that only some ranks compared is an error in what runs them."""
        reports = list(reports)
        together = cls(next((report["title"] for report in reports), ""))
        for rank, report in enumerate(reports):
            lacking = {what for one in reports for what in one["kinds"]} - set(report["kinds"])
            for what in lacking:
                together.tallies.setdefault(what, Tally()).off.append(f"rank {rank} compared none")
            for what, kind in report["kinds"].items():
                tally = together.tallies.setdefault(what, Tally())
                tally.worst = max(tally.worst, kind["worst"])  # never NaN: `Tally.add`
                tally.elements += kind["elements"]
                tally.named |= set(kind["named"])
                tally.wanted |= set(kind["wanted"])
                tally.off += [f"{one} (rank {rank})" for one in kind["off"]]
        return together

    def _pairs(
        self, found: Any, wanted: Any, what: str, *, part: bool, same_dtype: bool, none_is_zero: bool = False
    ) -> "tuple[Tally, list[tuple[str, _Array, _Array]]]":
        """What can be compared, by name; all else is noted as different."""
        tally = self.tallies.setdefault(what, Tally())
        ours, theirs = ({f"{self.where} {name}".strip(): x for name, x in _flat(v).items()} for v in (found, wanted))
        tally.wanted |= set(theirs)
        pairs = []
        for name in [*theirs, *(name for name in ours if name not in theirs)]:
            if name not in ours:
                if not part:
                    tally.add(name, 0, float("inf"), "missing")
                continue
            if name not in theirs:
                tally.add(name, 0, float("inf"), "found, and not wanted")
                continue
            one, other = (None if side[name] is None else _array(side[name]) for side in (ours, theirs))
            if one is None or other is None:
                only = one or other
                if only is None or (none_is_zero and not only.values.any()):
                    tally.add(name, 0, 0.0)
                else:
                    tally.add(name, 0, float("inf"), "found, and none wanted" if other is None else "none found")
            elif one.values.shape != other.values.shape:
                tally.add(name, 0, float("inf"), f"shape {one.values.shape} for {other.values.shape}")
            elif same_dtype and None not in (one.dtype, other.dtype) and one.dtype != other.dtype:
                tally.add(name, 0, float("inf"), f"{one.dtype} for {other.dtype}")
            else:
                pairs.append((name, one, other))
        return tally, pairs


@dataclass(frozen=True, slots=True)
class _Array:
    values: np.ndarray
    """In double precision, or integers and truth values as they are."""
    dtype: str | None
    """As it was; None of a number of Python."""

    @property
    def is_rough(self) -> bool:
        return self.dtype is not None and self.dtype.startswith(LOW_PRECISION)

    @property
    def text(self) -> str:
        return f"{float(self.values):.8g}" if self.values.size == 1 else f"{self.values.shape}"


def _array(value: Any) -> _Array:
    if isinstance(value, (bool, int, float, complex)):
        return _Array(np.asarray(value, np.complex128 if isinstance(value, complex) else np.float64), None)
    value = value.get_value() if hasattr(value, "get_value") else value  # a variable of Flax
    dtype = str(value.dtype).removeprefix("torch.")
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.double() if dtype.startswith(LOW_PRECISION) else value  # NumPy has not all of them
    array = np.asarray(value)
    if array.dtype.kind not in "biu":
        array = array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
    return _Array(array, dtype)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Arrays, numbers and None by dotted names."""
    if isinstance(value, Mapping):
        inner = list(value.items())
    elif isinstance(value, (list, tuple)):
        inner = list(enumerate(value))
    else:
        return {prefix or "value": value}
    found: dict[str, Any] = {}
    for key, one in inner:
        for name, leaf in _flat(one, f"{prefix}.{key}" if prefix else str(key)).items():
            if name in found:
                raise ValueError(f"two values are called {name}")
            found[name] = leaf
    return found


def _norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(values.astype(np.complex128 if values.dtype.kind == "c" else np.float64).ravel()))


def _largest(distances: Any) -> float:
    """Infinite where one is not a number, as ``max`` may drop it."""
    distances = np.asarray(distances, np.float64)
    return float(np.where(np.isnan(distances), np.inf, distances).max(initial=0.0))
