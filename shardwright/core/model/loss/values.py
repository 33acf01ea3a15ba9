"""The known facts of one value of a loss program: the place of its batch, and its sums over samples."""

from dataclasses import dataclass, replace
from typing import Literal

from shardwright.core.model.loss.combination import Count, Guard
from shardwright.core.model.loss.verdict import Finding

TermKind = Literal["constant", "sample", "sum", "position", "guarded"]


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of a value, N / (B^power · count).

    Attributes:
        kind: what N is: "constant": the same for every batch; "sample": in every entry a function of the entry's own
            sample; "sum": a sum over samples of such functions; "position": the number of the sample in its batch;
            "guarded": a count that was kept from zero, which is good for nothing but to divide by.
        power: the power of the batch size B that divides.
        count: the count that divides as well.
    """

    kind: TermKind
    power: int = 0
    count: Count | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the term holds nothing of the batch as a whole."""
        return self.kind in ("constant", "sample", "position") and self.power == 0 and self.count is None


CONSTANT = Term("constant")
SAMPLE = Term("sample")


@dataclass(frozen=True, slots=True)
class Place:
    """The place of the batch: dim ``dim`` has outer · B · inner entries, in this order.

    Attributes:
        free: whether any order will do, since all samples have the same or independent random entries.
    """

    dim: int
    outer: int
    inner: int
    free: bool = False


@dataclass(frozen=True, slots=True)
class Value:
    """The known facts of one value.

    Attributes:
        place: the place of the batch; None where no dim grows with the batch.
        gradient: whether the value depends on trained parameters in a way that gradients take.
        guarded: the count that the value is after it was kept from zero, with its guards.
        number: the value of a constant of one entry at both batch sizes, where it is known.
        finding: the reason why nothing is known.
    """

    terms: frozenset[Term] = frozenset({CONSTANT})
    place: Place | None = None
    gradient: bool = False
    guarded: Count | None = None
    number: tuple[float, float] | None = None
    finding: Finding | None = None

    @property
    def is_constant(self) -> bool:
        return all(term.kind == "constant" and term.power == 0 and term.count is None for term in self.terms)

    @property
    def is_plain(self) -> bool:
        """Whether every entry is a constant or a function of its own sample."""
        return all(term.is_plain for term in self.terms)

    def with_terms(self, terms: frozenset[Term]) -> "Value":
        return replace(self, terms=normalized(terms), guarded=None, number=None)

    def guarded_by(self, guard: Guard, number: int) -> "Value":
        """This value, number ``number`` of its program, after one more guard."""
        before = self.guarded or self.as_count(number)
        if before is None:
            return replace(self, guarded=None)
        return replace(self, guarded=replace(before, guards=(*before.guards, guard)))

    def as_count(self, number: int) -> Count | None:
        """The value as the count that divides a mean, to which samples add whatever the parameters are; else None."""
        if self.guarded is not None:
            return self.guarded
        if self.place is not None or self.gradient or len(self.terms) != 1:
            return None
        (term,) = self.terms
        return Count(number, term.power) if term.kind == "sum" and term.count is None else None


def normalized(terms: frozenset[Term]) -> frozenset[Term]:
    """The terms without the constants that a function of the sample takes in."""
    taken = {(t.power, t.count) for t in terms if t.kind == "sample"}
    return frozenset(t for t in terms if t.kind != "constant" or (t.power, t.count) not in taken)


def power_of(number: tuple[float, float], sizes: tuple[int, int]) -> int | None:
    """The power r for which a number is a constant times B^r; None where there is none."""
    first, second = number
    if first == second or (first != first and second != second):
        return 0  # NaN is one too, by which JAX fills what an index outside of an array looks up
    if first == 0.0 or second == 0.0:
        return None
    for power in (1, -1, 2, -2):
        expected = first * (sizes[1] / sizes[0]) ** power
        if abs(second - expected) <= 1e-6 * abs(expected):  # numbers may have been rounded to float32
            return power
    return None


def follows(one: object, pair: tuple[object, object], sizes: tuple[int, int]) -> bool:
    """Whether a number at one sample agrees with its values at two batch sizes; True where these say nothing."""
    if pair[0] == pair[1]:
        return one == pair[0] or (one != one and pair[0] != pair[0])
    if not all(isinstance(n, (int, float)) for n in (one, *pair)):
        return False
    first, second, alone = float(pair[0]), float(pair[1]), float(one)  # type: ignore[arg-type]
    power = power_of((first, second), sizes)
    if power is None:
        return True
    expected: float = first * (1.0 / sizes[0]) ** power
    return abs(alone - expected) <= 1e-6 * abs(expected)
