"""The combination of the losses of microbatches into that of a batch, L = Σ wₘ·Lₘ / total, and of gradients alike.

A term of a loss is N / (B^p · g(C / B^q)): a numerator N and a count C that add up over samples, the number of samples
B, and a guard g against counts of zero. With wₘ = Bₘ^p · g(Cₘ / Bₘ^q) every wₘ·Lₘ is Nₘ, and B^p · g(C / B^q) of the
whole batch divides their sum: this is exact, whatever the counts are. A sum has no count and p = 0; a mean has p = 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shardwright.core.errors import ShardwrightError

AGREEMENT = 1e-6
"""The relative difference below which two shares are the same: far below what a gradient in fp32 is good for."""


@dataclass(frozen=True, slots=True)
class Guard:
    """A step from a count to the number that divides: + eps, at least 1, or times a number."""

    how: Literal["add", "at_least", "scale"]
    number: float

    def __call__(self, count: float) -> float:
        if self.how == "add":
            return count + self.number
        return max(count, self.number) if self.how == "at_least" else count * self.number


@dataclass(frozen=True, slots=True)
class Count:
    """A number that samples add to, by which a loss is divided.

    Attributes:
        value: the value of the program, of one entry, that holds C / B^power and that a runtime has to compute.
        power: 1 where the program takes the mean of a mask, say, in place of its sum.
        guards: the steps from it to the number that divides.
    """

    value: int
    power: int = 0
    guards: tuple[Guard, ...] = ()

    def divisor(self, count: float, samples: float) -> float:
        """The number that the loss of so many samples is divided by; ``count`` is C."""
        found = count / samples**self.power
        for guard in self.guards:
            found = guard(found)
        return found


@dataclass(frozen=True, slots=True)
class Combination:
    """One way in which the losses of microbatches add up.

    Attributes:
        power: the loss is divided by the number of samples to this power.
        count: the loss is also divided by this count; None: by none.
    """

    power: int
    count: Count | None = None

    @property
    def reduction(self) -> str:
        if self.count is not None:
            return "weighted mean" if self.is_normalized else "a sum over a count"
        return {0: "sum", 1: "mean"}.get(self.power, f"sum over the number of samples to the power of {self.power}")

    @property
    def is_normalized(self) -> bool:
        """Whether the shares of microbatches add up to 1, but for guards."""
        return self.power == 1 if self.count is None else self.power == self.count.power

    def divisor(self, samples: float, count: float | None) -> float:
        """The number that the loss of so many samples was divided by."""
        found = float(samples**self.power)
        if self.count is not None and count is not None:
            found *= self.count.divisor(count, samples)
        return found

    def shares(self, samples: Sequence[float], values: Sequence[float] | None) -> list[float]:
        """The share of each microbatch's loss in that of the batch, from the value of ``count.value`` in each.

        Raises ShardwrightError when there is nothing to divide by.
        """
        every: list[float | None] = [None] * len(samples)
        total = self.divisor(sum(samples), None)
        if self.count is not None:
            assert values is not None
            counts = [v * b**self.count.power for v, b in zip(values, samples, strict=True)]
            every, total = [*counts], self.divisor(sum(samples), sum(counts))
        if total == 0.0:
            raise ShardwrightError(
                f"the count that the loss is divided by is 0 in all {len(samples)} microbatches: there is nothing to "
                f"take the mean of; leave such batches out"
            )
        return [self.divisor(b, c) / total for b, c in zip(samples, every, strict=True)]


def shares_of_microbatches(
    combinations: Sequence[Combination], constant: bool, samples: Sequence[float], counts: Mapping[int, Sequence[float]]
) -> list[float]:
    """The factor of each microbatch's loss, and of its gradient, in the sum that is the whole batch's.

    Args:
        combinations: the combinations of a verdict.
        constant: whether a term of the loss does not depend on samples: shares must then add up to 1.
        samples: the number of samples in every microbatch of every replica.
        counts: the value of each count (`Count.value`) in every microbatch.

    Raises:
        ShardwrightError: the terms of the loss have different shares in this batch; says which.
    """
    if not combinations or len(samples) == 1:
        return [b / sum(samples) for b in samples]
    found = [c.shares(samples, None if c.count is None else counts[c.count.value]) for c in combinations]
    first = found[0]
    for combination, other in zip(combinations[1:], found[1:], strict=True):
        m = _first_apart(first, other)
        if m is not None:
            raise ShardwrightError(
                f"the loss adds a {combinations[0].reduction} and a {combination.reduction} whose counts differ: "
                f"microbatch {m} has a share of {first[m]:.6g} in the one and {other[m]:.6g} in the other, so that no "
                f"weight gives the gradient of the whole batch: give each term to model.backward by itself, or divide "
                f"sums by the counts of the whole batch"
            )
    if constant and _first_apart([sum(first)], [1.0]) is not None:
        raise ShardwrightError(
            f"the loss adds a {combinations[0].reduction} and a term that does not depend on the samples, and the "
            f"shares of the microbatches add up to {sum(first):.6g} in this batch, not to 1: a microbatch with nothing "
            f"to count is divided by its guard; leave such samples out, or give each term to model.backward by itself"
        )
    return first


def _first_apart(a: Sequence[float], b: Sequence[float]) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if not abs(x - y) <= AGREEMENT), None)
