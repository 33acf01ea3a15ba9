"""The exact cut for the objective largest forward + largest backward, over devices that differ and stages of any width.

RaNNC's dynamic programme (arXiv 2103.16063, section 3.3) runs over (stages, units covered, devices used) and keeps one
state for each. That is not exact: a prefix with the smaller sum may have the larger forward, which costs more once a
later stage has a large backward. Here a cell keeps every pair (largest forward, largest backward) that no other pair
beats in both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.core.partition.exact import Matrix, require_units


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The times of a stage on certain devices: matrices of shape (units + 1, units + 1), entry [a, b] for units a …
    b-1; infinity where those units may not be a stage there."""

    forward_s: Matrix
    backward_s: Matrix


@dataclass(frozen=True, slots=True)
class WideCut:
    """A cut with the devices of every stage."""

    starts: tuple[int, ...]
    """The first unit of every stage."""
    widths: tuple[int, ...]
    """The number of devices of each stage; they are handed out in order."""
    forward_s: float
    """The forward seconds of the stage with the longest forward."""
    backward_s: float

    @property
    def objective_s(self) -> float:
        """The seconds that one more microbatch takes."""
        return self.forward_s + self.backward_s


_State = tuple[float, float, int, int, int]
"""The state: largest forward, largest backward, first unit and width of the last stage, index of the previous state."""


def pareto_cut(
    times: Callable[[int, int], StageTimes],
    units: int,
    stages: int,
    devices: int,
    widths: Sequence[int] = (1,),
    *,
    one_state: bool = False,
    bound_s: float = np.inf,
) -> WideCut | None:
    """The cut of ``units`` into ``stages`` runs over all ``devices`` with the least largest forward + largest backward.

    Args:
        times: the stage times for (first device, width); called once for each pair.
        widths: the numbers of devices that a stage may have; each stage takes the next devices in order.
        one_state: whether only the best pair of each cell is kept, as RaNNC does.
        bound_s: the objective that a cut must be below; None is returned when no cut is.

    Raises PlanError for fewer units than stages.
    """
    require_units(stages, units)
    known: dict[tuple[int, int], StageTimes] = {}
    # cells[k][devices used, units covered]: the states of k stages.
    cells: list[dict[tuple[int, int], list[_State]]] = [{(0, 0): [(0.0, 0.0, 0, 0, 0)]}]
    for stage in range(1, stages + 1):
        later = stages - stage
        found: dict[tuple[int, int], list[_State]] = {}
        for (used, covered), states in cells[-1].items():
            for width in widths:
                at = used + width
                if at > devices - later * min(widths) or (not later and at != devices):
                    continue
                if (used, width) not in known:
                    known[used, width] = times(used, width)
                ahead, back = known[used, width].forward_s[covered], known[used, width].backward_s[covered]
                ends = range(covered + 1, units - later + 1) if later else (units,)
                for end in ends:
                    f, b = float(ahead[end]), float(back[end])
                    if f + b >= bound_s:
                        continue
                    cell = found.setdefault((at, end), [])
                    for index, (most_f, most_b, *_) in enumerate(states):
                        pair = (max(most_f, f), max(most_b, b))
                        if pair[0] + pair[1] < bound_s:
                            cell.append((*pair, covered, width, index))
        cells.append({place: _undominated(states, one_state) for place, states in found.items() if states})
    last = cells[-1].get((devices, units))
    if not last:
        return None
    return _traced(cells, devices, units, min(range(len(last)), key=lambda i: last[i][0] + last[i][1]))


def _undominated(states: list[_State], one_state: bool) -> list[_State]:
    """The states that no other beats in both; only the one with the least sum where one is to be kept."""
    if one_state:
        return [min(states, key=lambda s: (s[0] + s[1], s[0]))]
    kept: list[_State] = []
    least = np.inf
    for state in sorted(states):
        if state[1] < least:
            kept.append(state)
            least = state[1]
    return kept


def _traced(cells: list[dict[tuple[int, int], list[_State]]], used: int, covered: int, index: int) -> WideCut:
    best = cells[-1][used, covered][index]
    starts: list[int] = []
    widths: list[int] = []
    for states in reversed(cells[1:]):
        _, _, first, width, before = states[used, covered][index]
        starts.append(first)
        widths.append(width)
        used, covered, index = used - width, first, before
    return WideCut(tuple(starts[::-1]), tuple(widths[::-1]), best[0], best[1])


def masked(times: StageTimes, fits: NDArray[np.bool_]) -> StageTimes:
    """The times with infinity where a stage does not fit."""
    return StageTimes(np.where(fits, times.forward_s, np.inf), np.where(fits, times.backward_s, np.inf))
