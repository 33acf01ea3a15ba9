"""The traffic of one rank over the data axis beside its computing: what of it is hidden, and what is exposed.

A rank's passes are laid on lanes (`core.schedule.lanes`): the compute stream, the gathers of sharded parameters, the
sums of gradients, and the sums between shard groups. A unit's parameters are gathered at most so many units ahead of
their use as the system does (`core.execution`); gradients leave as their unit's backward, or a bucket of several, is
done. What a step takes longer than its computing alone is exposed, the rest of the traffic is hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardwright.core.execution import Execution
from shardwright.core.schedule.lanes import COMPUTE, Task, run_lanes

GATHER, SUM, ACROSS = 1, 2, 3
PORTS = (0, 1, 1, 1)
"""All messages of the data axis leave by one port."""
FEW_ALIKE, MOST_ALIKE = 6, 10
"""The numbers of units of one run, alike and neighbours, that are laid on lanes; what more of them take follows from
the difference, as lanes settle into a period of one unit or of two."""
MOST_MICROBATCHES = 3
"""The number of microbatches that are laid on lanes; what more of them take follows from the last one."""


@dataclass(frozen=True, slots=True)
class UnitTraffic:
    """One unit of a rank in one microbatch, in seconds: its passes, and its own traffic over the data axis when that
    runs alone."""

    forward_s: float
    backward_s: float
    gather_s: float = 0.0
    """Of its parameters, before each pass."""
    sum_s: float = 0.0
    """Of its gradients, or of the bucket that they complete, among the ranks that share them."""
    across_s: float = 0.0
    """Of its share of the sums between shard groups, in the last microbatch."""
    update_gather_s: float = 0.0
    """Of its parameters once a step, after the optimizer has updated them."""
    again_gather_s: float = 0.0
    """Of those of its parameters that are released once it has been computed again, before its backward."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """The traffic of a rank's step over the data axis, in seconds."""

    forward_s: float = 0.0
    """What a forward pass of each microbatch waits for traffic."""
    backward_s: float = 0.0
    """The same of a backward pass."""
    tail_s: float = 0.0
    """What the step waits once, before its first pass or after its last one."""
    hidden_s: float = 0.0
    """What computing hides of the whole step's traffic."""

    def exposed_s(self, microbatches: int) -> float:
        """All that the step waits for."""
        return microbatches * (self.forward_s + self.backward_s) + self.tail_s


NONE = Exchange()


def with_buckets(
    units: Sequence[UnitTraffic], bytes_of: Sequence[float], bucket_bytes: float, sum_s: Callable[[float], float]
) -> tuple[UnitTraffic, ...]:
    """The units with their gradients in buckets. They are filled from the last unit to the first; a bucket leaves with
    the unit that makes it full, and the rest with the first one.

    Args:
        bytes_of: the bytes of each unit's gradients.
        bucket_bytes: the size of a full bucket; 0: each unit's are one.
        sum_s: the seconds to sum a bucket of so many bytes.
    """
    found, filled = list(units), 0.0
    for number in reversed(range(len(units))):
        filled += bytes_of[number]
        if filled and (filled >= bucket_bytes or number == 0):
            found[number] = replace(found[number], sum_s=sum_s(filled))
            filled = 0.0
    return tuple(found)


def with_across(
    units: Sequence[UnitTraffic], bytes_of: Sequence[float], bucket_bytes: float, across_s: Callable[[float], float]
) -> tuple[UnitTraffic, ...]:
    """The units with the sums between shard groups, in the buckets of `with_buckets`."""
    plain = tuple(replace(unit, sum_s=0.0) for unit in units)
    made = with_buckets(plain, bytes_of, bucket_bytes, across_s)
    return tuple(replace(unit, across_s=each.sum_s) for unit, each in zip(units, made, strict=True))


def whole_step(
    units: Sequence[UnitTraffic], microbatches: int, execution: Execution, slowed: float, *, sums_each: bool
) -> Exchange:
    """The exchange of a rank that runs one stage: forward and backward of each microbatch in turn.

    Args:
        slowed: as in `run_lanes`.
        sums_each: whether gradients are summed after each microbatch, or after the last one.
    """
    if not any(unit.gather_s or unit.sum_s or unit.update_gather_s for unit in units):
        return NONE

    in_passes = any(unit.gather_s for unit in units) or (sums_each and microbatches > 1)
    laid = microbatches if in_passes else 1  # the others have no traffic

    def shortened(own: Sequence[UnitTraffic]) -> tuple[float, float]:
        if laid <= MOST_MICROBATCHES:
            return _laid(own, laid, execution, slowed, sums_each=sums_each)
        few, more = (_laid(own, m, execution, slowed, sums_each=sums_each) for m in (2, 3))
        return few[0] + (laid - 2) * (more[0] - few[0]), more[1]

    end_s, tail_s = _folded(units, shortened)
    compute = sum(unit.forward_s + unit.backward_s for unit in units) * laid
    exposed = max(0.0, end_s - compute)
    traffic = _traffic_s(units, microbatches, sums_each=sums_each)
    tail = min(exposed, tail_s) if in_passes else exposed
    return Exchange(0.0, (exposed - tail) / microbatches, tail, max(0.0, traffic - exposed))


def one_stage_of_several(
    units: Sequence[UnitTraffic], microbatches: int, execution: Execution, slowed: float, *, sums_each: bool
) -> Exchange:
    """The exchange of one stage in a pipeline, whose passes have those of other microbatches and stages between them.

    Each pass begins with a gather that nothing hides. Where the traffic of a backward takes longer than its computing,
    so does the backward. Arguments as in `whole_step`.
    """
    if not any(unit.gather_s or unit.sum_s or unit.update_gather_s for unit in units):
        return NONE
    forward = backward = 0.0
    compute = sum(unit.forward_s for unit in units), sum(unit.backward_s for unit in units)
    gathers = any(unit.gather_s for unit in units)
    if gathers:
        plain = [replace(unit, sum_s=0.0, across_s=0.0, update_gather_s=0.0, backward_s=0.0) for unit in units]
        end_s, _ = _folded(plain, lambda own: _passes(own, execution, slowed, backward=False))
        forward = max(0.0, end_s - compute[0])
    hides = execution.gradients or (gathers and execution.prefetched_units > 0)
    waited = 0.0
    if gathers or sums_each:
        own = [replace(unit, across_s=0.0, sum_s=unit.sum_s if sums_each else 0.0) for unit in units]
        end_s, tail_s = _folded(own, lambda own: _passes(own, execution, slowed, backward=True))
        moved = sum(unit.gather_s + unit.again_gather_s + unit.sum_s for unit in own)
        backward = max(0.0, end_s - (tail_s if hides else 0.0) - compute[1], moved - compute[1])
        waited = 0.0 if hides else tail_s
    last_end_s, last_tail_s = _folded(units, lambda own: _passes(own, execution, slowed, backward=True))
    tail = max(0.0, last_tail_s - waited) if gathers or sums_each else max(0.0, last_end_s - compute[1])
    if any(unit.update_gather_s for unit in units):
        tail += _updated_s(units, execution, slowed)
    found = Exchange(forward, backward, tail)
    traffic = _traffic_s(units, microbatches, sums_each=sums_each)
    return replace(found, hidden_s=max(0.0, traffic - found.exposed_s(microbatches)))


def _traffic_s(units: Sequence[UnitTraffic], microbatches: int, *, sums_each: bool) -> float:
    """Seconds of all traffic of a step, one message after the other."""
    gathers = sum(2 * unit.gather_s + unit.again_gather_s for unit in units) * microbatches
    sums = sum(unit.sum_s for unit in units) * (microbatches if sums_each else 1)
    return gathers + sums + sum(unit.across_s + unit.update_gather_s for unit in units)


def _folded(
    units: Sequence[UnitTraffic], run: Callable[[Sequence[UnitTraffic]], tuple[float, float]]
) -> tuple[float, float]:
    """The times of ``run`` for units of which the longest run of equal ones may be long: from two shorter ones."""
    begin, length, start = 0, 0, 0
    for end in range(1, len(units) + 1):
        if end == len(units) or units[end] != units[start]:
            if end - start > length:
                begin, length = start, end - start
            start = end
    if length <= MOST_ALIKE:
        return run(units)
    short, longer = (
        run([*units[:begin], *[units[begin]] * many, *units[begin + length :]]) for many in (FEW_ALIKE, MOST_ALIKE)
    )
    further = (length - MOST_ALIKE) / (MOST_ALIKE - FEW_ALIKE)
    end_s, tail_s = (more + further * (more - less) for less, more in zip(short, longer, strict=True))
    return end_s, max(0.0, tail_s)


class _Lanes:
    """The tasks of one rank, as they are issued."""

    def __init__(self, execution: Execution) -> None:
        self.execution = execution
        self.tasks: list[Task] = []
        self.last_compute = -1
        self.gathered: list[int] = []
        """The compute tasks that read gathered parameters, in their order."""
        self.awaited: list[int] = []
        """The messages that the next compute task waits for."""

    def add(self, lane: int, seconds: float, after: Sequence[int] = ()) -> int:
        self.tasks.append(Task(lane, seconds, tuple(after)))
        return len(self.tasks) - 1

    def compute(self, seconds: float, gather_s: float, *, is_gathered: bool = False) -> int:
        """Issue a unit's pass, after the gather of its parameters unless these are there already."""
        after = self.awaited
        self.awaited = []
        if gather_s:
            ahead = self.execution.prefetched_units
            freed = self.gathered[-1 - ahead :][:1] if len(self.gathered) > ahead else []
            after = [*after, self.add(GATHER, gather_s, freed)]
        number = self.add(COMPUTE, seconds, after)
        if gather_s or is_gathered:
            self.gathered.append(number)
        self.last_compute = number
        return number

    def send(self, lane: int, seconds: float, after: int, *, hides: bool) -> int:
        """Issue a message; where the system hides none of its kind, computing waits for it."""
        number = self.add(lane, seconds, (after,))
        if not hides:
            self.awaited.append(number)
        return number


def _forward(lanes: _Lanes, units: Sequence[UnitTraffic]) -> None:
    for unit in units:
        lanes.compute(unit.forward_s, unit.gather_s)


def _backward(lanes: _Lanes, units: Sequence[UnitTraffic], *, after_forward: bool, sums: bool, last: bool) -> None:
    """Issue a backward pass. ``after_forward``: whether the last unit's parameters are still there."""
    waits: list[UnitTraffic] = []
    kept = max((n for n, unit in enumerate(units) if unit.gather_s), default=-1) if after_forward else -1
    for number in reversed(range(len(units))):
        unit = units[number]
        is_there = number == kept
        gather_s = unit.again_gather_s + (0.0 if is_there else unit.gather_s)
        done = lanes.compute(unit.backward_s, gather_s, is_gathered=is_there)
        if sums and (unit.sum_s or unit.across_s):
            if lanes.execution.gradients or (unit.gather_s and lanes.execution.prefetched_units):
                _sum(lanes, unit, done, last=last, hides=True)
            else:
                waits.append(unit)
    for unit in waits:  # where nothing is hidden, gradients leave after the pass
        _sum(lanes, unit, lanes.last_compute, last=last, hides=False)


def _sum(lanes: _Lanes, unit: UnitTraffic, done: int, *, last: bool, hides: bool) -> None:
    summed = lanes.send(SUM, unit.sum_s, done, hides=hides)
    if last and unit.across_s:
        lanes.send(ACROSS, unit.across_s, summed, hides=hides)


def _laid(
    units: Sequence[UnitTraffic], microbatches: int, execution: Execution, slowed: float, *, sums_each: bool
) -> tuple[float, float]:
    """The end of a step of so many microbatches, and how long before it the last pass ended."""
    lanes = _Lanes(execution)
    updates = [lanes.add(GATHER, unit.update_gather_s) if unit.update_gather_s else None for unit in units]
    hidden = execution.updated_parameters
    for microbatch in range(microbatches):
        last = microbatch == microbatches - 1
        for number, unit in enumerate(units):
            if microbatch == 0 and updates[number] is not None:
                lanes.awaited += [n for n in (updates[number : number + 1] if hidden else updates) if n is not None]
            lanes.compute(unit.forward_s, unit.gather_s)
        _backward(lanes, units, after_forward=True, sums=sums_each or last, last=last)
    return _ended(lanes, slowed)


def _passes(
    units: Sequence[UnitTraffic], execution: Execution, slowed: float, *, backward: bool
) -> tuple[float, float]:
    """The end of one pass with its traffic, and how long before that the computing ended."""
    lanes = _Lanes(execution)
    if backward:
        _backward(lanes, units, after_forward=False, sums=True, last=True)
    else:
        _forward(lanes, units)
    return _ended(lanes, slowed)


def _updated_s(units: Sequence[UnitTraffic], execution: Execution, slowed: float) -> float:
    """Seconds that the first forward waits for updated parameters."""
    if not execution.updated_parameters:
        return sum(unit.update_gather_s for unit in units)
    plain = [UnitTraffic(u.forward_s, 0.0, update_gather_s=u.update_gather_s) for u in units]

    def first(own: Sequence[UnitTraffic]) -> tuple[float, float]:
        lanes = _Lanes(execution)
        for unit in own:
            if unit.update_gather_s:
                lanes.awaited.append(lanes.add(GATHER, unit.update_gather_s))
            lanes.compute(unit.forward_s, 0.0)
        return _ended(lanes, slowed)

    end_s, _ = _folded(plain, first)
    return max(0.0, end_s - sum(unit.forward_s for unit in units))


def _ended(lanes: _Lanes, slowed: float) -> tuple[float, float]:
    times = run_lanes(lanes.tasks, slowed, PORTS)
    end = max((end for _, end in times), default=0.0)
    computed = max(
        (end for (_, end), task in zip(times, lanes.tasks, strict=True) if task.lane == COMPUTE), default=0.0
    )
    return end, end - computed
