"""The seconds of a slice from few measurements (TeraPipe, section 3.3): t(l, c) = t(l, 0) + a0 + a1·l + a2·c + a3·l·c.

t(l, 0) is measured for some lengths, and linear between them; the rest is fitted to slices with tokens before them, by
the least squares of errors as shares of what was measured: else the longest slices decide, and short ones, which are
many, are wrong by most of their time.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np
import numpy.typing as npt

from shardwright.core.errors import PlanError

TERMS = 4


@dataclass(frozen=True, slots=True)
class FittedCost:
    """The seconds of a slice by its length and the tokens before it; call it as `slice_lengths` does.

    Attributes:
        lengths: that were measured with nothing before them, in order.
        seconds: of these.
        added: a0 to a3, in seconds, per token, per token, and per pair of tokens.
        error: the mean of the fit's errors over the seconds measured, of slices with tokens before them.
        worst: the largest of them.
    """

    lengths: tuple[int, ...]
    seconds: tuple[float, ...]
    added: tuple[float, float, float, float]
    error: float
    worst: float

    @classmethod
    def of(cls, measured: Mapping[tuple[int, int], float]) -> "FittedCost":
        """The fit of measurements: (length, tokens before) → seconds.

        Raises PlanError for what are no seconds of slices, without slices that have nothing before them, or with fewer
        others than the fit has terms, or none that tell them apart.
        """
        for key, value in measured.items():
            is_slice = isinstance(key, tuple) and len(key) == 2 and all(type(n) is int for n in key)
            if not is_slice or key[0] < 1 or key[1] < 0:
                raise PlanError(f"{key!r} is no slice: expected (its length, the tokens before it), as in (128, 0)")
            if not isinstance(value, Real) or isinstance(value, bool) or not 0 <= value < math.inf:
                raise PlanError(f"the slice {key} took {value!r}: expected seconds, 0 or more")
        alone = sorted((length, float(s)) for (length, before), s in measured.items() if before == 0)
        behind = sorted((length, before, float(s)) for (length, before), s in measured.items() if before)
        if not alone or len(behind) < TERMS:
            raise PlanError(
                f"{len(alone)} slices with nothing before them and {len(behind)} others were measured: expected at "
                f"least 1 and {TERMS}"
            )
        lengths, seconds = tuple(n for n, _ in alone), tuple(s for _, s in alone)
        rows = np.array([[1.0, length, before, length * before] for length, before, _ in behind])
        rest = np.array([s - float(np.interp(length, lengths, seconds)) for length, _, s in behind])
        taken = np.array([s for _, _, s in behind])
        shares = 1 / np.maximum(taken, max(1e-6 * float(taken.max()), 1e-12))
        rows, rest = rows * shares[:, None], rest * shares
        scale = np.abs(rows).max(axis=0)
        if np.linalg.matrix_rank(rows / scale) < TERMS:
            raise PlanError(
                "the slices measured do not tell the terms apart: measure two lengths or more, each behind two numbers "
                "of tokens or more"
            )
        found = np.linalg.lstsq(rows / scale, rest, rcond=None)[0] / scale
        a0, a1, a2, a3 = (float(term) for term in found)
        fit = cls(lengths, seconds, (a0, a1, a2, a3), 0.0, 0.0)
        off = [abs(fit(length, before) - s) / max(s, 1e-12) for length, before, s in behind]
        return cls(lengths, seconds, fit.added, sum(off) / len(off), max(off))

    def __call__(self, length: int, context: int) -> float:
        """The seconds of a slice, 0 or more."""
        alone = self._alone(length)
        if not context:
            return alone
        a0, a1, a2, a3 = self.added
        return max(0.0, alone + a0 + a1 * length + a2 * context + a3 * length * context)

    def table(self, places: Sequence[int]) -> npt.NDArray[np.float64]:
        """The seconds of the slice from place j to place i at [i, j], for all places at once; infinite where j is not
        before i."""
        ends = np.array(places, dtype=np.float64)
        length, context = ends[:, None] - ends[None, :], ends[None, :]
        longest, last = self.lengths[-1], self.seconds[-1]
        alone = np.interp(length, self.lengths, self.seconds)
        alone = np.where(length > longest, last * length / longest, alone)
        a0, a1, a2, a3 = self.added
        behind = np.maximum(0.0, alone + a0 + a1 * length + a2 * context + a3 * length * context)
        found: npt.NDArray[np.float64] = np.where(length > 0, np.where(context > 0, behind, alone), math.inf)
        return found

    def _alone(self, length: int) -> float:
        """t(length, 0): linear between measured lengths, in proportion beyond the longest, as the shortest below it."""
        if length > self.lengths[-1]:
            return self.seconds[-1] * length / self.lengths[-1]
        return float(np.interp(length, self.lengths, self.seconds))
