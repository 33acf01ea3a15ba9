"""The cuts with the least of any figure: all cuts of few units, a beam search over those of many.

A cut of n units into s stages is the row of the first units of its stages; a figure is a function of many such rows.
"""

from collections.abc import Callable, Sequence
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

from shardwright.core.partition.exact import require_units

Starts = NDArray[np.int64]
Figure = Callable[[Starts], NDArray[np.float64]]

MOST_LISTED = 5_000
"""The number of cuts up to which all are looked at: a few milliseconds for each hundred actions of a schedule."""
BEAM = 6
"""The number of cuts whose neighbours are looked at next, unless another is given."""
MOST_BESIDE = 6
"""The number of borders beside each other that move together: more would make a round of deep pipelines long."""
MOST_ROUNDS = 32
"""The number of rounds of the beam search."""
STEPS = (-4, -2, -1, 1, 2, 4)
"""The numbers of units by which a single border moves in a round."""


def searched_cuts(
    figure: Figure, units: int, stages: int, start: Sequence[int], beam: int = BEAM
) -> tuple[Starts, NDArray[np.float64]]:
    """Cuts of ``units`` into ``stages`` runs of at least one unit each, and their figures.

    Where there are at most `MOST_LISTED`, these are all cuts. Else a beam search begins at the cut ``start`` and moves
    borders, one by `STEPS` or some beside each other by one unit, for as long as one of the best cuts is new.

    Raises PlanError for fewer units than stages.
    """
    require_units(stages, units)
    if comb(units - 1, stages - 1) <= MOST_LISTED:
        cuts = every_cut(units, stages)
        return cuts, figure(cuts)
    moves, cuts = _moves(stages), np.array([start], dtype=np.int64)
    figures, opened = figure(cuts), set[tuple[int, ...]]()
    for _ in range(MOST_ROUNDS):
        best = [
            cut for cut in map(tuple, cuts[np.argsort(figures, kind="stable")[:beam]].tolist()) if cut not in opened
        ]
        if not best:
            break
        opened.update(best)
        near = np.concatenate([np.array(cut) + moves for cut in best])
        near = near[(np.diff(near, axis=1) > 0).all(axis=1) & (near[:, -1] < units)]
        near = near[_first_of_equals(near)]
        both, figures = np.concatenate([cuts, near]), np.concatenate([figures, figure(near)])
        first = _first_of_equals(both)
        cuts, figures = both[first], figures[first]
    return cuts, figures


def every_cut(units: int, stages: int) -> Starts:
    """All cuts of ``units`` into ``stages`` runs of at least one unit each, in order, of shape (cuts, stages)."""
    listed = list(combinations(range(1, units), stages - 1))
    borders = np.array(listed, dtype=np.int64).reshape(len(listed), stages - 1)
    return np.concatenate([np.zeros((len(borders), 1), dtype=np.int64), borders], axis=1)


def _first_of_equals(cuts: Starts) -> NDArray[np.int64]:
    """The index of the first of each set of equal cuts, in the order of the cuts. Rows of bytes, the highest of each
    number first, have the order of the numbers, and are sorted many times as fast as rows of numbers."""
    rows = np.ascontiguousarray(cuts.astype(">u4")).view(np.dtype((np.void, 4 * cuts.shape[1])))[:, 0]
    first: NDArray[np.int64] = np.unique(rows, return_index=True)[1]
    return first


def _moves(stages: int) -> Starts:
    """The moves to the neighbours of a cut: of one border by `STEPS`, of several beside each other by one unit, where
    these are at most `MOST_BESIDE` or all behind one."""
    found = []
    for first in range(1, stages):
        for last in {*range(first + 1, min(first + MOST_BESIDE, stages) + 1), stages}:
            for step in (-1, 1) if last > first + 1 else STEPS:
                move = np.zeros(stages, dtype=np.int64)
                move[first:last] = step
                found.append(move)
    return np.array(found)
