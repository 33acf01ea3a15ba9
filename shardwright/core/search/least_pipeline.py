"""The seconds below which no pipeline of equal ranks gets, however its units are cut into stages.

Units are not divided, and a rank begins when the first microbatch has passed the stages before its first one; where
backwards are whole, its last backward then passes back over them. Bounds that take units as a fluid miss both: of 80
layers and a head on 16 ranks one rank has a layer more than its share, or the head beside it.

Each of these is a bisection between a bound that is known and a time within which the work can be done. What they say
is at most what `predict.least_makespan_s` says of any one cut.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

from shardwright.core.tables.unit_table import UnitTable

CLOSE = 1e-4
"""The relative width at which a bisection ends."""
ROUNDED = 1 + 1e-9
"""The factor by which what fits is taken to be larger, so that rounding makes no time too short."""


def least_of_one_stage_each(
    table: UnitTable, ranks: int, microbatches: int, known_s: float, *, splits_backward: bool
) -> float:
    """Seconds below which no pipeline gets of which each rank has one run of units, as in `least_of_any_stages`.

    A rank that begins with unit a and ends before unit b takes p(a) + m · (w(b) − w(a)) seconds: w is the work of a
    microbatch before a unit, p what of it is waited for. The farther ranks come, the farther those after them do, so
    that each takes as many units as it can.
    """
    waited, work = _before_units(table, splits_backward=splits_backward)

    def is_enough(seconds: float) -> bool:
        first = 0
        for _ in range(ranks):
            end = bisect_right(work, (work[first] + (seconds - waited[first]) / microbatches) * ROUNDED) - 1
            if end >= len(work) - 1:
                return True
            if end <= first:
                return False
            first = end
        return False

    return _least(is_enough, known_s, waited[-1] + microbatches * work[-1])


def least_of_any_stages(
    table: UnitTable, ranks: int, microbatches: int, known_s: float, *, splits_backward: bool
) -> float:
    """Seconds below which no pipeline gets whose ranks have as many stages as they like.

    The k-th rank to begin has k stages before its first one, of a unit each at least. So it has room for so many of the
    units that are alike, and one rank has the largest of the others beside.

    Args:
        table: the units, as they cost on every rank.
        known_s: seconds that are known to be a bound.
        splits_backward: whether weight gradients may come after all else.
    """
    waited, work = _before_units(table, splits_backward=splits_backward)
    if ranks > len(table.units):
        return known_s
    most, found = waited[ranks - 1] + microbatches * work[-1], known_s
    counts = Counter(map(id, table.units))
    each: dict[int, float] = {}
    for unit, seconds in zip(table.units, table.seconds.tolist(), strict=True):
        each[id(unit)] = min(seconds, each.get(id(unit), seconds))
    for kind, count in counts.items():
        if count == 1 or each[kind] <= 0:
            continue
        beside = max((-(-counts[other] // ranks) * s for other, s in each.items() if other != kind), default=0.0)
        own, other = each[kind] * microbatches / ROUNDED, beside * microbatches / ROUNDED
        found = _least(partial(_is_enough, waited[:ranks], own, other, count), found, most)
    return found


def _is_enough(waited: Sequence[float], own_s: float, other_s: float, count: int, within_s: float) -> bool:
    """Whether ranks that wait so long have time for so many units that take ``own_s`` each, one of them for another
    unit beside."""
    room, least_lost = 0, -1
    for wait in waited:
        left = within_s - wait
        if left < 0:
            break
        units = int(left / own_s)
        room += units
        if left >= other_s:
            lost = units - int((left - other_s) / own_s)
            least_lost = lost if least_lost < 0 else min(least_lost, lost)
    return least_lost >= 0 and room - least_lost >= count


def _before_units(table: UnitTable, *, splits_backward: bool) -> tuple[list[float], list[float]]:
    """For each unit, and behind the last one, the seconds of the units before it that a rank waits for which begins
    there, and all their seconds of a microbatch."""
    seconds = table.seconds.tolist()
    passed = [unit.forward_s for unit in table.units] if splits_backward else seconds
    return [0.0, *accumulate(passed)], [0.0, *accumulate(seconds)]


def _least(is_enough: Callable[[float], bool], known_s: float, most_s: float) -> float:
    """The least time that is enough, from below; ``known_s`` where that is, or where ``most_s`` is not."""
    if known_s >= most_s or is_enough(known_s):
        return known_s
    low, high = known_s, most_s
    while high - low > CLOSE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return low
