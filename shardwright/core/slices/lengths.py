"""The lengths of the slices in which a sequence goes through a pipeline, shortest step first (TeraPipe, section 3.3).

A slice of length l behind a context of c tokens takes t(l, c) on each of K stages. The slices of a sequence follow each
other, so that the step takes the sum of t over the slices, and (K - 1) times the longest. With the longest bounded, the
least sum is a shortest path over the places where the sequence may be cut. The bounds worth trying are the entries of
the table of t. The sum falls as the bound grows; so the sum at the upper end of a range of bounds and the bound at its
lower end are together below all inside, and most of the table is never tried.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from typing import Annotated

import numpy as np
import numpy.typing as npt
from annotated_types import Ge

from shardwright.core.errors import PlanError
from shardwright.core.slices.fitted_cost import FittedCost
from shardwright.core.values.fields import Count, require_fields

MOST_PLACES = 4096
"""The most grid steps in a sequence: a table of all slices has half the square of it."""
NEAR = 1e-12
"""Steps that differ by this share of themselves are as good as each other: sums differ so by rounding alone."""

Seconds = Callable[[int, int], float]
"""The seconds of a slice on one stage, forward and backward, by its length and the tokens before it."""


@dataclass(frozen=True, slots=True)
class _Asked:
    tokens: Count
    stages: Count
    slices: Count | None
    step: Count
    microbatches: Count


@dataclass(frozen=True, slots=True)
class SliceLengths:
    """The lengths of the slices of one sequence, first tokens first, and the seconds of its step."""

    lengths: tuple[int, ...]
    step_s: Annotated[float, Ge(0)]


def slice_lengths(cost: Seconds, tokens: int, stages: int, slices: int | None = None, step: int = 1) -> tuple[int, ...]:
    """The lengths of the slices of a sequence that make its step through a pipeline shortest; see `best_lengths`.

    Example:
        >>> slice_lengths(lambda length, context: 16 + length * (1 + context / 64), tokens=64, stages=4, step=8)
        (32, 16, 16)
    """
    return best_lengths(cost, tokens, stages, slices, step).lengths


def best_lengths(
    cost: Seconds, tokens: int, stages: int, slices: int | None = None, step: int = 1, *, microbatches: int = 1
) -> SliceLengths:
    """The lengths of the slices of a sequence that make its step shortest: M·Σt + (stages − 1)·max t of M microbatches,
    exactly, among all lengths that are multiples of ``step`` (the last takes what is left). Of equal steps the one of
    fewest slices is taken, and of these the one of most equal lengths.

    Args:
        cost: the seconds of a slice on one stage, of (its length, the tokens before it); infinite where there can be no
            such slice. It is asked once for each of the n(n + 1)/2 slices of n grid steps.
        tokens: of the sequence.
        stages: of the pipeline.
        slices: how many; by default as many as are fastest.
        step: tokens between places where the sequence may be cut.
        microbatches: that follow each other, each in these slices.

    Raises:
        PlanError: a number is not whole or below 1, the grid is too fine, ``cost`` gives what is no number of at least
            0, or there are no such lengths.
    """
    require_fields(_Asked(tokens, stages, slices, step, microbatches), PlanError)
    places = [*range(0, tokens, step), tokens]
    count = len(places) - 1
    if count > MOST_PLACES:
        finest = -(-tokens // MOST_PLACES)
        raise PlanError(
            f"step={step} gives {count} places to cut {tokens} tokens: expected at most {MOST_PLACES}, as with "
            f"step={finest}"
        )
    if slices is not None and slices > count:
        raise PlanError(
            f"slices={slices} of {tokens} tokens in steps of {step}: expected at most {count}, or a smaller step="
        )
    return _Search(_table(cost, places), places, stages, slices, microbatches).best()


def _table(cost: Seconds, places: list[int]) -> npt.NDArray[np.float64]:
    """The seconds of the slice that ends at place i and begins at place j, at [i, j]; infinite where j is not before i.

    Raises PlanError where ``cost`` gives what is no number of at least 0.
    """
    if isinstance(cost, FittedCost):
        return cost.table(places)
    table = np.full((len(places), len(places)), math.inf)
    for i, end in enumerate(places):
        for j, start in enumerate(places[:i]):
            seconds = cost(end - start, start)
            is_right = isinstance(seconds, Real) and not isinstance(seconds, bool) and float(seconds) >= 0
            if not is_right:
                raise PlanError(
                    f"cost({end - start}, {start}) gave {seconds!r}, for {end - start} tokens after {start}: expected "
                    f"the slice's seconds, 0 or more, or infinity where there can be no such slice"
                )
            table[i, j] = seconds
    return table


@dataclass(frozen=True, slots=True)
class _Path:
    """The places at which a sequence is cut, the sum of its slices' seconds, and the longest."""

    cuts: tuple[int, ...]
    sum_s: float
    longest_s: float


class _Search:
    """The search for the best bound of the longest slice."""

    def __init__(
        self, table: npt.NDArray[np.float64], places: list[int], stages: int, slices: int | None, microbatches: int
    ) -> None:
        self.table, self.places, self.slices = table, places, slices
        self.microbatches, self.reach = microbatches, (stages - 1) / microbatches
        """How often the longest slice counts beside the sum."""
        lengths = np.array(places, dtype=np.float64)
        self.squares = (lengths[:, None] - lengths[None, :]) ** 2 + (lengths[-1] + 1) ** 2
        """What decides between equal sums: the number of slices before all, then the squares of their lengths."""
        self.bounds = np.unique(table[np.isfinite(table)])

    def best(self) -> SliceLengths:
        whole = self._path(math.inf)
        if whole is None:
            wanted = "" if self.slices is None else f"{self.slices} "
            raise PlanError(
                f"no {wanted}slices of {self.places[-1]} tokens are possible: every way to cut the sequence has one of "
                f"which cost says that it takes infinitely long; expected a finer step=, or another slices="
            )
        found, reach = [whole], self.reach
        best_s = self._step_s(whole)
        last = int(np.searchsorted(self.bounds, whole.longest_s))
        # (what no bound inside can be below, first bound inside, last bound inside, the least sum there)
        open_: list[tuple[float, int, int, float]] = []

        def note(first: int, last: int, sum_s: float) -> None:
            """The bounds from ``first`` to ``last``, whose sums are not below ``sum_s``."""
            if first <= last:
                heapq.heappush(open_, (sum_s + reach * float(self.bounds[first]), first, last, sum_s))

        note(0, last - 1, whole.sum_s)
        while open_ and reach:
            least_s, first, last, sum_s = heapq.heappop(open_)
            if least_s >= best_s * (1 - NEAR):
                break
            middle = (first + last) // 2
            path = self._path(float(self.bounds[middle]))
            if path is None:  # nor has any smaller bound one
                note(middle + 1, last, sum_s)
                continue
            found.append(path)
            best_s = min(best_s, self._step_s(path))
            note(first, int(np.searchsorted(self.bounds, path.longest_s)) - 1, path.sum_s)
            note(middle + 1, last, sum_s)
        near = [path for path in found if self._step_s(path) <= best_s * (1 + NEAR)]
        path = min(near, key=lambda one: sum(self.squares[i, j] for j, i in pairwise(one.cuts)))
        cuts = [self.places[cut] for cut in path.cuts]
        return SliceLengths(tuple(b - a for a, b in pairwise(cuts)), self.microbatches * self._step_s(path))

    def _step_s(self, path: _Path) -> float:
        return path.sum_s + self.reach * path.longest_s

    def _path(self, longest_s: float) -> _Path | None:
        """The path of least sum whose slices take at most ``longest_s``; None where there is none."""
        seconds = self.table if longest_s == math.inf else np.where(self.table <= longest_s, self.table, math.inf)
        came = self._shortest(seconds) if self.slices is None else self._shortest_of(seconds, self.slices)
        if came is None:
            return None
        taken = [float(self.table[i, j]) for j, i in pairwise(came)]
        return _Path(came, math.fsum(taken), max(taken))

    def _shortest(self, seconds: npt.NDArray[np.float64]) -> tuple[int, ...] | None:
        """The cuts of the path of least sum, of any number of slices."""
        ends = len(self.places)
        least, second = np.full(ends, math.inf), np.full(ends, math.inf)
        least[0] = second[0] = 0.0
        came = np.zeros(ends, dtype=np.int64)
        for i in range(1, ends):
            sums = least[:i] + seconds[i, :i]
            limit = sums.min()
            if limit < math.inf:
                near = np.flatnonzero(sums <= limit * (1 + NEAR))
                other = second[near] + self.squares[i, near]
                at = int(near[other.argmin()])
                least[i], second[i], came[i] = sums[at], other.min(), at
        if least[-1] == math.inf:
            return None
        cuts = [ends - 1]
        while cuts[-1]:
            cuts.append(int(came[cuts[-1]]))
        return tuple(reversed(cuts))

    def _shortest_of(self, seconds: npt.NDArray[np.float64], slices: int) -> tuple[int, ...] | None:
        """The cuts of the path of least sum, of so many slices."""
        ends = len(self.places)
        least, second = np.full(ends, math.inf), np.full(ends, math.inf)
        least[0] = second[0] = 0.0
        came: list[npt.NDArray[np.int64]] = []
        for _ in range(slices):
            sums = least[None, :] + seconds
            limit = sums.min(axis=1)
            with np.errstate(invalid="ignore"):
                other = np.where(sums <= (limit * (1 + NEAR))[:, None], second[None, :] + self.squares, math.inf)
            at = other.argmin(axis=1)
            came.append(at)
            least, second = np.take_along_axis(sums, at[:, None], 1)[:, 0], other.min(axis=1)
            least[np.isinf(limit)] = math.inf
        if least[-1] == math.inf:
            return None
        cuts = [ends - 1]
        for at in reversed(came):
            cuts.append(int(at[cuts[-1]]))
        return tuple(reversed(cuts))
