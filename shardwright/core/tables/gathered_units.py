"""The bytes of sharded parameters, and of their gradients, that are whole for a while in the passes of units.

A stage runs call by call. In a forward pass the parameters of one call are whole, and those of the next one, which are
gathered ahead; in a backward pass those of one call and of the one before it. Tables of which a call reads rows are not
gathered for its backward pass. The gradients of a call stay as they are made until all of them are there. Then they are
packed into one bucket, whose sum over the ranks is under way until the next bucket is sent: the last one until the next
backward pass sends one. Buckets leave in the reverse of the model's order, so that some wait for others.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cost.op_kinds import PRECISION_BYTES
from shardwright.core.tables.call_entries import CallEntries
from shardwright.core.tables.memory_request import MemoryRequest
from shardwright.core.tables.stage_working import working_of
from shardwright.core.tables.unit_table import UnitTable


@dataclass(frozen=True, slots=True, eq=False)
class StagePasses:
    """The most bytes of one microbatch's passes over a stage: its activations, what passes hold for a while, and what
    is whole for a while of what is sharded."""

    forward: int
    tail: int
    """Of the backward until it has sent its first bucket, which is when that of the backward before has arrived."""
    backward: int
    """Of the backward from then on. Where gradients add up whole: of the last one, in which they leave, beside them."""
    first: int
    """Of the first backward, which is also the last one where gradients add up whole, with the sums that are there."""
    by_unit: NDArray[np.float64]
    """Of the backward of each unit, where gradients add up whole, beside these."""
    weighing: int
    """Of a weight gradient that runs by itself, beside activations."""
    under_way: int
    """One bucket whose sum is under way from the end of the backward on."""


class _Call(NamedTuple):
    """The bytes of one call's parameters and gradients."""

    ahead: int
    """Its parameters, whole in the forward."""
    back: int
    """Those of them that are whole in the backward."""
    buckets: tuple["_Bucket", ...]


class _Bucket(NamedTuple):
    """Gradients that leave together."""

    made: int
    """The bytes of the gradients as they were made."""
    size: int
    is_copied: bool
    """Whether they are copied into the bucket: it is there beside them."""
    waits: bool
    """Whether they wait for those of earlier uses: what waits is counted by itself."""
    place: int
    """The place of the last of them in the model's order."""


def stage_passes(table: UnitTable, ends: tuple[int, int], request: MemoryRequest) -> StagePasses:
    """The bytes of the passes over a stage, given by its first unit and its end, of a runtime that gathers units."""
    known = table.stage_passes.setdefault(request.of_passes, {})
    if ends not in known:
        alike = content_number(table, ends)
        if alike is None:
            known[ends] = _passes(table, ends, request)
        else:  # stages of the same units, elsewhere in the model
            content = alike, request.of_passes
            if content not in table.passes_by_content:
                table.passes_by_content[content] = _passes(table, ends, request)
            known[ends] = table.passes_by_content[content]
    found = known[ends]
    assert isinstance(found, StagePasses)
    return found


def content_number(table: UnitTable, ends: tuple[int, int]) -> int | None:
    """A number for all that the passes of a stage depend on, the same wherever such units are in the model; None where
    they use parameters that others use too, or in another order than the model has them."""
    if ends not in table.stage_contents:
        content = _content(table, ends)
        numbers = table.content_numbers
        table.stage_contents[ends] = None if content is None else numbers.setdefault(content, len(numbers))
    return table.stage_contents[ends]


def _content(table: UnitTable, ends: tuple[int, int]) -> tuple[object, ...] | None:
    first, end = ends
    kinds = table.call_kinds[first:end]
    if None in kinds:
        return None
    kept = table.range_kept[first, first + 1 : end + 1] + working_of(table).beside_at(first, end)
    return kinds, _base(table, ends).tobytes(), kept.tobytes()


def least_made_bytes(table: UnitTable, units: Sequence[int], request: MemoryRequest) -> int:
    """The least bytes of gradients that the backward of one of some units makes and sends, as they are made; of
    parameters that no other unit uses."""

    def made(unit: int) -> int:
        width, gathers = PRECISION_BYTES[request.precision], request.shard == 3 and request.gathered_stages is None
        return sum(call.trained * width for call in table.calls[unit] if not (gathers and _stays(call, request)))

    return _least_of(table, units, "made", request, made)


def least_passes_bytes(table: UnitTable, units: Sequence[int], request: MemoryRequest) -> int:
    """Bytes beside activations below which the passes of no stage get that has one of some units: its activations and
    these are at least those of the units up to the last such one, and these bytes.

    They are what passes over one unit by itself hold. With more units behind it more is gathered ahead and under way;
    the sums of these that have left already are among the rank's gradients. 0 where other units use its parameters, or
    where these leave in another order than the units have."""
    return _least_of(table, units, "passes", request, lambda unit: _passes_bytes(table, unit, request))


def _least_of(
    table: UnitTable, units: Sequence[int], name: str, request: MemoryRequest, find: Callable[[int], int]
) -> int:
    """The least that is found for any of some units, all of one kind, found once."""
    key = name, units[0], request.of_passes
    if key not in table.least_of_alike:
        table.least_of_alike[key] = min(map(find, _unlike(table, units)))
    return table.least_of_alike[key]


def _unlike(table: UnitTable, units: Sequence[int]) -> list[int]:
    """One of each of some units, all of one kind, whose passes by themselves hold the same."""
    if units[0] not in table.unlike_units:
        found: dict[object, int] = {}
        for unit in units:
            alone = unit, unit + 1
            number = content_number(table, alone)
            held = float(table.range_kept[alone]), float(working_of(table).given_bytes(*alone)[0])
            found.setdefault(unit if number is None else (number, held), unit)
        table.unlike_units[units[0]] = [*found.values()]
    return table.unlike_units[units[0]]


def _passes_bytes(table: UnitTable, unit: int, request: MemoryRequest) -> int:
    if table.call_kinds[unit] is None:
        return 0
    own, alone = stage_passes(table, (unit, unit + 1), request), (unit, unit + 1)
    most = own.forward
    if not any(call.looked_up for call in table.calls[unit]):
        # The last unit of a stage reads what stays of the gradients from the next stage.
        most = max(most, max(own.tail, own.backward) - int(working_of(table).given_bytes(*alone)[0]))
    return max(0, most - int(table.range_kept[alone]))


def staying_bytes(table: UnitTable, stages: Iterable[tuple[int, int]], request: MemoryRequest) -> int:
    """The bytes on a rank, beside its shards, of the calls whose parameters stay whole all through a step with their
    gradients (`Decision.whole_below_bytes`)."""
    whole, shared, width = 0, 0, PRECISION_BYTES[request.precision]
    if request.whole_below_bytes:
        for first, end in stages:
            for call in (one for unit in range(first, end) for one in table.calls[unit]):
                if _stays(call, request):
                    trained = call.trained + sum(entries for _, entries, _ in call.tied)
                    whole += call.entries * width + trained * request.gradient_width
                    shared += trained * width * request.masters_alone
    return int(whole * (1 - request.own_share) + shared * request.own_share)


def sharing_bytes(table: UnitTable, stages: Sequence[tuple[int, int]], request: MemoryRequest) -> int:
    """The most bytes that passes hold for a while on a rank that shares what it has of its stages."""
    every = [(stage_passes(table, ends, request), int(table.range_kept[ends])) for ends in stages]
    most = max(max(one.forward, one.tail, one.backward) - kept for one, kept in every)
    if request.shard < 2:
        return most
    width, under_way = PRECISION_BYTES[request.precision], max(one.under_way for one, _ in every)
    most = max(most, *(one.weighing for one, _ in every)) + under_way
    if request.gathered_stages is not None:
        sizes = sorted((int(table.range_elements[ends]) for ends in stages), reverse=True)
        most += width * sum(sizes[: request.gathered_stages])
    if not request.reduces_each:
        most += sum(int(table.range_trained[ends]) for ends in stages) * request.gradient_width
    return most


def _stays(call: CallEntries, request: MemoryRequest) -> bool:
    return call.entries * PRECISION_BYTES[request.precision] < request.whole_below_bytes


def _passes(table: UnitTable, ends: tuple[int, int], request: MemoryRequest) -> StagePasses:
    units = range(*ends)
    of_unit = {unit: [_call(one, unit, ends, request) for one in table.calls[unit]] for unit in units}
    calls = [call for unit in units for call in of_unit[unit]]
    base = {unit: float(size) for unit, size in zip(units, _base(table, ends), strict=True)}
    # A rank's shards of what is gathered, as it computes with them, until all others have read them.
    is_other = PRECISION_BYTES[request.precision] < PRECISION_BYTES["fp32"] or (request.on_host and not request.on_cpus)
    copied = 1 / request.ways if is_other and not (request.on_host and request.ways == 1) else 0.0
    tail, backward, once, by_unit = _backward(table, of_unit, base, copied, request)
    each = request.reduces_each and request.shard >= 2
    buckets = _in_order(calls)
    return StagePasses(
        int(_forward(table, of_unit, copied, ends)),
        int(tail),
        int(backward),
        int(once),
        by_unit,
        int(_weighing(buckets, request) if each else max((bucket.made for bucket in buckets), default=0)),
        int(buckets[-1].size * (1 + request.coming_share)) if each and buckets else 0,
    )


def _in_order(calls: Sequence[_Call]) -> list[_Bucket]:
    """The buckets in the order in which they leave."""
    return sorted((bucket for call in calls for bucket in call.buckets), key=lambda bucket: -bucket.place)


def _weighing(buckets: Sequence[_Bucket], request: MemoryRequest) -> float:
    """The bytes of a weight gradient by itself: all gradients are there before the first leaves."""
    most, made, under_way = 0.0, sum(bucket.made for bucket in buckets), 0.0
    for bucket in buckets:
        most = max(most, made + max(under_way, bucket.size * bucket.is_copied))
        made, under_way = made - bucket.made, bucket.size * (1 + request.coming_share)
    return most


def _call(call: CallEntries, unit: int, ends: tuple[int, int], request: MemoryRequest) -> _Call:
    width, wide = PRECISION_BYTES[request.precision], request.gradient_width
    gathers = request.shard == 3 and request.gathered_stages is None
    if gathers and _stays(call, request):
        return _Call(0, 0, ())
    is_copied = not call.is_single or wide != width
    buckets = [_Bucket(call.trained * width, call.trained * wide, is_copied, False, call.last)]
    for users, entries, place in call.tied:
        here = [user for user in users if ends[0] <= user < ends[1]]
        if here[0] == unit:  # else its gradient leaves with those of the uses before
            buckets.append(_Bucket(entries * width, entries * wide, wide != width, len(here) > 1, place))
    ahead = call.entries * width * gathers
    back = (call.entries - call.looked_up) * width * gathers
    return _Call(ahead, back, tuple(bucket for bucket in buckets if bucket.size))


def _base(table: UnitTable, ends: tuple[int, int]) -> NDArray[np.float64]:
    """The bytes at each unit's backward beside those of its phases: activations, what is computed again, gradients that
    wait."""
    (first, end), working = ends, working_of(table)
    passing = np.array([unit.passing_bytes for unit in table.units[first:end]], dtype=np.float64)
    base: NDArray[np.float64] = table.range_kept[first, first + 1 : end + 1] + working.beside_at(first, end) - passing
    return base + working.given_bytes(first, end) + working.tie_sums(first, end) + working.ties_waiting(first, end)


def _forward(table: UnitTable, of_unit: dict[int, list[_Call]], copied: float, ends: tuple[int, int]) -> float:
    most, following = 0.0, 0
    sizes = [call.ahead for unit in of_unit for call in of_unit[unit]]
    ended = _last(sizes) * copied
    for unit in reversed(range(*ends)):
        whole = following * (1 + copied) + ended
        for call in reversed(of_unit[unit]):
            whole = max(whole, (call.ahead + following) * (1 + copied))
            following, ended = call.ahead or following, 0.0 if call.ahead else ended
        here = table.units[unit]
        beside = working_of(table).beside_at(*ends)[unit - ends[0]] - here.passing_bytes + here.forward_beside_bytes
        most = max(most, float(table.range_kept[ends[0], unit + 1] + beside) + whole)
    return most


def _last(sizes: Sequence[int]) -> int:
    """The last size above 0; 0 where there is none."""
    return next((size for size in reversed(sizes) if size), 0)


def _backward(
    table: UnitTable, of_unit: dict[int, list[_Call]], base: dict[int, float], copied: float, request: MemoryRequest
) -> tuple[float, float, float, NDArray[np.float64]]:
    """The bytes of `StagePasses` of the same names."""
    calls = [call for unit in of_unit for call in of_unit[unit]]
    before = [0.0]
    for held in calls:
        before.append(held.back * (1 + copied) or before[-1])
    # The last call's parameters stay for the backward, where it reads them.
    before[-1] = _last([held.back for held in calls]) + _last([held.ahead for held in calls]) * copied
    """The parameters that are whole, or are gathered ahead, where the first so many calls are left."""
    each, share, coming = request.reduces_each and request.shard >= 2, 1 - request.own_share, request.coming_share
    tail = backward = first = 0.0
    by_unit: dict[int, float] = {}
    left, has_sent = len(calls), False
    under_way = arrived = made = 0  # the bucket whose sum is under way, those that have arrived, and all of them so far
    queue, ready = _in_order(calls), list[_Bucket]()
    for unit in reversed(of_unit):
        own = len(of_unit[unit])
        for number, phase in enumerate(table.units[unit].phases):
            call = calls[left - 1] if 0 < number <= own else None
            left -= call is not None
            here = base[unit] + before[left] + (call.back * (1 + copied) if call is not None else 0.0)
            by_unit[unit] = max(by_unit.get(unit, 0.0), here + phase.passing)
            if each:
                most = here + phase.collecting + (1 + coming) * under_way + _waiting(ready)
                tail, backward = (tail, max(backward, most)) if has_sent else (max(tail, most), backward)
                first = max(first, most + (1 - share) * arrived)
            else:
                made += sum(bucket.size for bucket in call.buckets) if call is not None else 0
                most = here + phase.passing + coming * under_way - share * arrived
                backward, first = max(backward, most), max(first, most + made)
            ready += call.buckets if call is not None else ()
            while queue and queue[0] in ready:
                if each:
                    ending = here + phase.ending + _waiting(ready)
                    most = ending + max(queue[0].size * queue[0].is_copied, (1 + coming) * under_way)
                    tail, backward = tail if has_sent else max(tail, ending), max(backward, most)
                    first = max(first, most + (1 - share) * (arrived + under_way))
                arrived += under_way
                ready.remove(queue[0])
                under_way, has_sent = queue.pop(0).size, True
    return tail, backward, first, np.array([by_unit[unit] for unit in of_unit])


def _waiting(buckets: Iterable[_Bucket]) -> int:
    """The bytes of gradients that are made and have not left, where nothing else counts them."""
    return sum(bucket.made for bucket in buckets if not bucket.waits)
