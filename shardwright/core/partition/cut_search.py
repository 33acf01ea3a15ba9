"""The cuts with the least of any figure: all cuts of few units, a beam search over those of many.

A cut of n units into s stages is the row of the first units of its stages; a figure is a function of many such rows.
Cuts that it calls infinite are out of the question.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

from shardwright.core.partition.exact import require_units

Starts = NDArray[np.int64]
Figure = Callable[[Starts], NDArray[np.float64]]

MOST_LISTED = 5_000
"""The number of cuts up to which all are looked at: a few milliseconds for each hundred actions of a schedule."""
BEAM = 8
"""The number of cuts whose neighbours are looked at next."""
MOST_BESIDE = 6
"""The number of borders beside each other that move together: more would make a round of deep pipelines long."""
MOST_ROUNDS = 32
"""The number of rounds of the beam search."""
STEPS = (-4, -2, -1, 1, 2, 4)
"""The numbers of units by which a single border moves in a round."""


def searched_cuts(
    figure: Figure, units: int, stages: int, known: Iterable[Sequence[int]]
) -> tuple[Starts, NDArray[np.float64]]:
    """Cuts of ``units`` into ``stages`` runs of at least one unit each, and their figures.

    Where there are at most `MOST_LISTED`, these are all cuts. Else a beam search starts at the ``known`` cuts and moves
    borders, some beside each other by one unit or one by `STEPS`, for as long as one of the best cuts is new.

    Raises PlanError for fewer units than stages.
    """
    require_units(stages, units)
    if comb(units - 1, stages - 1) <= MOST_LISTED:
        cuts = every_cut(units, stages)
        return cuts, figure(cuts)
    moves = _moves(stages)
    rows = {tuple(cut): np.array(cut, dtype=np.int64) for cut in known}
    cuts = np.stack(list(rows.values()))
    figures = figure(cuts)
    opened: set[tuple[int, ...]] = set()
    for _ in range(MOST_ROUNDS):
        best = list(map(tuple, cuts[np.argsort(figures, kind="stable")[:BEAM]].tolist()))
        near = [_legal(np.array(cut) + moves, units) for cut in best if cut not in opened]
        opened.update(best)
        new = {key: row for of_one in near for row in of_one if (key := tuple(row.tolist())) not in rows}
        if not new:
            break
        rows.update(new)
        found = np.stack(list(new.values()))
        cuts, figures = np.concatenate([cuts, found]), np.concatenate([figures, figure(found)])
    return cuts, figures


def every_cut(units: int, stages: int) -> Starts:
    """All cuts of ``units`` into ``stages`` runs of at least one unit each, in order, of shape (cuts, stages)."""
    listed = list(combinations(range(1, units), stages - 1))
    borders = np.array(listed, dtype=np.int64).reshape(len(listed), stages - 1)
    return np.concatenate([np.zeros((len(borders), 1), dtype=np.int64), borders], axis=1)


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


def _legal(cuts: Starts, units: int) -> Starts:
    """The rows that cut the units into stages of at least one unit each."""
    rising = (np.diff(cuts, axis=1) > 0).all(axis=1)
    legal: Starts = cuts[rising & (cuts[:, -1] < units)]
    return legal
