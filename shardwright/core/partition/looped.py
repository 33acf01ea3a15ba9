"""The exact cut for ranks that hold several stages: the least work of the busiest rank.

What limits a pipeline with virtual stages is the work of a rank over all its stages: one long stage may be evened out
by a short one on the same rank. A state is the work of every rank so far; states that another beats on every rank go.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.core.errors import PlanError
from shardwright.core.partition.exact import Matrix, min_max_cut

MOST_STATES = 4096
"""Of one (stage, unit). Beyond these the ones with the least work on their busiest rank are kept, and the cut is no
longer proved to be the best."""


def busiest_rank_cut(
    times: Matrix, placement: Sequence[int], fits: NDArray[np.bool_] | None = None
) -> tuple[list[int], bool] | None:
    """The cut into ``len(placement)`` stages whose busiest rank has the least work.

    Args:
        times: (n+1, n+1), ``times[a, b]`` the time of a stage of units a … b-1.
        placement: for every stage the rank that holds it.
        fits: (stages, n+1, n+1), whether that stage may hold those units; None when all may.

    Returns:
        The first unit of every stage, and whether it is proved that no cut is better; None when no cut fits.

    Raises PlanError: fewer units than stages.
    """
    stages, units, ranks = len(placement), len(times) - 1, max(placement) + 1
    even = min_max_cut(times, times, stages, fits)
    if even is None:
        return None
    if stages == ranks:
        return even, True
    bound = busiest(times, even, placement)
    proved = True
    # states[unit]: work of every rank, shape (states, ranks), and the way there.
    states: dict[int, tuple[NDArray[np.float64], list[tuple[int, ...]]]] = {0: (np.zeros((1, ranks)), [()])}
    for stage in range(stages):
        later = stages - stage - 1
        grown: dict[int, list[tuple[NDArray[np.float64], tuple[int, ...]]]] = {}
        for unit, (loads, ways) in states.items():
            ends = range(unit + 1, units - later + 1) if later else (units,)
            for end in ends:
                took = times[unit, end] if fits is None or fits[stage, unit, end] else np.inf
                if took > bound:
                    continue
                added = loads.copy()
                added[:, placement[stage]] += took
                # What is left must go somewhere: the ranks' room below the bound has to hold it.
                good = added.max(axis=1) <= bound * (1 + 1e-12)
                grown.setdefault(end, []).extend((added[i], (*ways[i], unit)) for i in np.flatnonzero(good))
        states = {}
        for end, found in grown.items():
            kept, all_kept = _undominated(found)
            proved = proved and all_kept
            if kept:
                states[end] = (np.array([load for load, _ in kept]), [way for _, way in kept])
    if units not in states:
        return even, proved
    loads, ways = states[units]
    best = int(np.argmin(loads.max(axis=1)))
    return list(ways[best]), proved


def busiest(times: Matrix, starts: Sequence[int], placement: Sequence[int]) -> float:
    """The work of the busiest rank."""
    if len(starts) != len(placement):
        raise PlanError(f"{len(starts)} stages for a placement of {len(placement)}")
    loads = [0.0] * (max(placement) + 1)
    for stage, (a, b) in enumerate(zip(starts, (*starts[1:], len(times) - 1), strict=True)):
        loads[placement[stage]] += float(times[a, b])
    return max(loads)


def _undominated(
    found: list[tuple[NDArray[np.float64], tuple[int, ...]]],
) -> tuple[list[tuple[NDArray[np.float64], tuple[int, ...]]], bool]:
    """The states that no other beats on every rank, and whether they are all kept."""
    found.sort(key=lambda state: (float(state[0].max()), tuple(state[0])))
    whole = len(found) <= MOST_STATES
    kept: list[tuple[NDArray[np.float64], tuple[int, ...]]] = []
    table = np.empty((min(len(found), MOST_STATES), len(found[0][0]))) if found else np.empty((0, 0))
    for load, way in found[:MOST_STATES]:
        if not np.any(np.all(table[: len(kept)] <= load, axis=1)):
            table[len(kept)] = load
            kept.append((load, way))
    return kept, whole
