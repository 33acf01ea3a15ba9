"""The exact cut of a sequence of units into contiguous stages: least largest stage time, then least largest weight."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.core.errors import PlanError

Matrix = NDArray[np.float64]


def range_sums(values: Sequence[float] | NDArray[np.float64]) -> Matrix:
    """The sums ``sums[a, b]`` of ``values[a:b]`` for a < b; infinity elsewhere."""
    prefix = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
    sums: Matrix = prefix[None, :] - prefix[:, None]
    sums[np.tril_indices(len(prefix))] = np.inf
    return sums


def require_units(stages: int, units: int) -> None:
    """Raise PlanError for fewer units than stages."""
    if stages > units:
        raise PlanError(f"{stages} stages need at least {stages} units: the model has {units}; use at most pp={units}")


def min_max_cut(
    times: Matrix | Sequence[Matrix], weights: Matrix, stages: int, fits: NDArray[np.bool_] | None = None
) -> list[int] | None:
    """Cut units 0 … n-1 into ``stages`` runs of at least one unit each.

    Args:
        times: (n+1, n+1); ``times[a, b]`` is the time of a stage that holds units a … b-1, infinity unless a < b. One
            matrix for all stages, or one for each where devices differ.
        weights: a matrix of the same form; ties in time are broken by the largest weight (bytes of parameters).
        stages: the number of runs.
        fits: (stages, n+1, n+1), whether that stage may hold those units; None when all may.

    Returns:
        The first unit of every stage, or None when no cut fits. Exact: dynamic programming over (stage, first unit),
        c(k, i) = min over j of max(c(k-1, j), cost of units j … i-1).

    Raises:
        PlanError: fewer units than stages.
    """
    each = [times] * stages if isinstance(times, np.ndarray) else list(times)
    units = len(weights) - 1
    require_units(stages, units)
    places = [_reachable(k, stages, units) for k in range(stages)]
    spare = units - stages + 1
    costs = np.empty((2, stages, spare, spare))  # in one block: small ones go back to the system again and again
    for stage, (matrix, at) in enumerate(zip(each, places, strict=True)):
        costs[0, stage] = matrix[at].T
        if fits is not None:
            np.copyto(costs[0, stage], np.inf, where=~fits[stage][at].T)
    best, _ = _solve(costs[0])
    if not np.isfinite(best):
        return None
    bound = best * (1 + 1e-9)
    for stage, at in enumerate(places):
        costs[1, stage] = weights[at].T
        np.copyto(costs[1, stage], np.inf, where=costs[0, stage] > bound)
    _, cut = _solve(costs[1])
    return cut


def may_be_cut(fits: Sequence[NDArray[np.bool_]]) -> bool:
    """Whether any cut fits; ``fits`` has a matrix for each stage, as in `min_max_cut`."""
    reached: NDArray[np.bool_] = np.zeros(len(fits[0]), dtype=np.bool_)
    reached[0] = True
    for each in fits:
        reached = np.any(each[reached], axis=0)
    return bool(reached[-1])


def _reachable(stage: int, stages: int, units: int) -> tuple[slice, slice]:
    """The entries of a matrix that a stage may take: the stages before and after it hold at least one unit each."""
    spare = units - stages + 1
    return slice(stage, stage + spare), slice(stage + 1, stage + 1 + spare)


def spread_cut(times: Sequence[Matrix], longest: float, fits: NDArray[np.bool_] | None = None) -> list[int] | None:
    """The cut with the least sum of squared stage times among those whose stages take at most ``longest``: the work
    that one unit leaves to the other stages is spread evenly over them.

    Arguments and result are as in `min_max_cut`, with one matrix for each stage.
    """
    stages, units = len(times), len(times[0]) - 1
    costs = []
    for stage, matrix in enumerate(times):
        at = _reachable(stage, stages, units)
        may = matrix[at] <= longest * (1 + 1e-9)
        may = may if fits is None else may & fits[stage][at]
        costs.append((np.where(may, matrix[at], np.inf) ** 2).T.copy())
    least, cut = _solve(costs, np.add, 0.0)
    return cut if np.isfinite(least) else None


def _solve(
    costs: Sequence[Matrix] | NDArray[np.float64],
    together: Callable[[Matrix, Matrix], Matrix] = np.maximum,
    nothing: float = -np.inf,
) -> tuple[float, list[int]]:
    """The least cost over all cuts, and the first unit of every stage of a cut that reaches it. ``costs`` are the
    entries ``[end, first unit]`` that each stage may take, of which column 0 is the unit with the stage's number;
    ``together`` gives the cost of some stages and one more, the largest by default, and ``nothing`` that of no
    stage."""
    reached = np.full(len(costs[0]), np.inf)
    reached[0] = nothing
    came_from = []
    ends = np.arange(len(reached))
    for cost in costs:
        table = together(cost, reached)
        came_from.append(np.argmin(table, axis=1))
        reached = table[ends, came_from[-1]]
    firsts: list[int] = []
    last = len(reached) - 1
    for stage in reversed(range(len(costs))):
        last = int(came_from[stage][last])
        firsts.append(stage + last)
    return float(reached[-1]), firsts[::-1]
