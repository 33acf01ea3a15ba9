"""Passes: what they insert, and that the work stays the same."""

import itertools
from collections import Counter

import pytest

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule import Kind, Schedule, StageCosts, schedule_names
from shardwright.core.schedule.checks import check, check_ends
from shardwright.core.schedule.passes import (
    bound_buffers,
    insert_sharding,
    insert_transfers,
    merge_backward,
    split_backward,
    strip_sharding,
    strip_transfers,
)
from shardwright.core.schedule.simulate import simulate

NAMES = (*schedule_names(), "auto")


def build(name: str, ranks: int = 3, m: int = 6) -> Schedule:
    v = 2 if name in ("zbv", "v-half", "v-min", "dualpipev", "interleaved-1f1b", "looped-bfs", "interleaved-zb") else 1
    return Schedule.build(name, ranks=ranks, microbatches=m, virtual_stages=v)


@pytest.mark.parametrize("name", NAMES)
def test_every_boundary_between_ranks_gets_its_sends_and_receives(name: str) -> None:
    schedule = build(name)
    full = insert_transfers(schedule)
    check(full)
    assert strip_transfers(full) == schedule
    crossings = sum(schedule.placement[s] != schedule.placement[s + 1] for s in range(schedule.stages - 1))
    count = Counter(action.kind for order in full.table for action in order)
    expected = crossings * schedule.microbatches
    assert count[Kind.SEND_FORWARD] == count[Kind.RECV_FORWARD] == expected
    backward = 0 if name == "forward-only" else expected
    assert count[Kind.SEND_BACKWARD] == count[Kind.RECV_BACKWARD] == backward
    with pytest.raises(ScheduleError, match="already"):
        insert_transfers(full)


@pytest.mark.parametrize("name", NAMES)
def test_inserted_transfers_do_not_change_asynchronous_times(name: str) -> None:
    schedule = build(name)
    costs = StageCosts.uniform(schedule.stages, 1.0, 1.3, 0.8, 0.3)
    times = simulate(schedule, costs)
    full = simulate(insert_transfers(schedule, costs), costs)
    assert full.makespan_s == pytest.approx(times.makespan_s)
    assert len(full.transfers) == len(times.transfers)


def test_costs_of_zero_still_give_a_legal_order() -> None:
    for name in NAMES:
        schedule = build(name)
        check(insert_transfers(schedule, StageCosts.uniform(schedule.stages, 0.0, 0.0, 0.0)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("room", [2, 3])
@pytest.mark.parametrize("weights_read", [True, False])
def test_parameters_are_gathered_when_read_and_gradients_reduced_once(name: str, room: int, weights_read: bool) -> None:
    schedule = build(name)
    sharded = insert_sharding(schedule, room, weights_read=weights_read)
    check(sharded)
    assert strip_sharding(sharded) == schedule
    for rank, order in enumerate(sharded.table):
        gathered: set[int] = set()
        reduced: list[int] = []
        for action in order:
            if action.kind is Kind.UNSHARD:
                gathered.add(action.stage)
            elif action.kind is Kind.RESHARD:
                gathered.remove(action.stage)
            elif action.kind is Kind.REDUCE_GRAD:
                reduced.append(action.stage)
            else:
                read = {part.stage for part in action.flat if weights_read or part.kind is not Kind.WEIGHT_GRAD}
                assert read <= gathered
                assert not {part.stage for part in action.flat} & set(reduced)
            assert len(gathered) <= room
        assert sorted(reduced) == ([] if name == "forward-only" else list(schedule.stages_of(rank)))


@pytest.mark.parametrize("name", NAMES)
def test_no_order_of_frees_gathers_less_often(name: str) -> None:
    schedule = Schedule.build(name, ranks=2, microbatches=4, virtual_stages=build(name).virtual_stages)
    if schedule.virtual_stages > 1 and name in ("interleaved-1f1b", "looped-bfs", "interleaved-zb"):
        schedule = Schedule.build(name, ranks=2, microbatches=4, virtual_stages=4)
    room = 2 if schedule.virtual_stages > 1 else 1
    sharded = insert_sharding(schedule, room, look_ahead=0)
    for order, plain in zip(sharded.table, schedule.table, strict=True):
        made = sum(action.kind is Kind.UNSHARD for action in order)
        assert made == _fewest_gathers([{part.stage for part in action.flat} for action in plain], room)


def _fewest_gathers(read: list[set[int]], room: int) -> int:
    """The least number of gathers over all choices of what is kept, by trying every one."""
    kept: dict[frozenset[int], int] = {frozenset(): 0}
    for wanted in read:
        after: dict[frozenset[int], int] = {}
        for held, count in kept.items():
            spare = sorted(held - wanted)
            for size in range(min(len(spare), room - len(wanted)) + 1):
                for stay in itertools.combinations(spare, size):
                    now = frozenset(wanted | set(stay))
                    after[now] = min(after.get(now, 1 << 30), count + len(wanted - held))
        kept = after
    return min(kept.values())


def test_gathers_run_ahead_no_further_than_allowed() -> None:
    schedule = Schedule.build("looped-bfs", ranks=2, microbatches=4, virtual_stages=4)
    rows = [[a.text for a in insert_sharding(schedule, 2, look_ahead=n).table[0][:7]] for n in (0, 1)]
    assert rows[0] == ["0UNSHARD", "0F0", "0F1", "0F2", "0F3", "2UNSHARD", "2F0"]
    assert rows[1] == ["0UNSHARD", "2UNSHARD", "0F0", "0F1", "0F2", "0F3", "0RESHARD"]
    with pytest.raises(ScheduleError, match="expected from 0 to gathered_stages - 1"):
        insert_sharding(schedule, 2, look_ahead=2)


def test_gradients_may_leave_after_each_microbatch_and_nothing_be_gathered() -> None:
    each = insert_sharding(build("1f1b", m=2), None, reduce_after="each")
    assert [a.text for a in each.table[2]] == ["2F0", "2B0", "2REDUCE_GRAD", "2F1", "2B1", "2REDUCE_GRAD"]
    check(each)


def test_room_for_too_few_stages_is_refused() -> None:
    with pytest.raises(ScheduleError, match="2 stages run at once"):
        insert_sharding(build("dualpipev"), 1)


def test_neighbouring_halves_of_a_backward_merge() -> None:
    zero_bubble = build("zb-h1")
    merged = merge_backward(zero_bubble)
    assert [a.text for a in merged.table[0]] == ["0F0", "0F1", "0F2", "0B0", "0F3", "0B1", "0F4", "0B2", "0F5", "0B3",
                                                 "0B4", "0B5"]  # fmt: skip
    check(merged)
    assert split_backward(merged).table[0] == zero_bubble.table[0]
    assert merge_backward(split_backward(build("1f1b"))) == build("1f1b")


def test_some_backwards_are_split_and_their_weight_gradients_come_later() -> None:
    mixed = split_backward(build("1f1b", m=4), range(1, 4, 2), delay=1)
    check(mixed)
    assert [a.text for a in mixed.table[1]] == ["1F0", "1F1", "1B0", "1F2", "1I1", "1F3", "1W1", "1B2", "1I3", "1W3"]
    assert [a.text for a in split_backward(build("1f1b", m=4), {1}).table[2]] == [
        "2F0", "2B0", "2F1", "2I1", "2W1", "2F2", "2B2", "2F3", "2B3"
    ]  # fmt: skip
    check(split_backward(build("gpipe"), delay=3))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("credits", [1, 2, 3])
def test_bounded_buffers_are_never_overfull(name: str, credits: int) -> None:
    schedule = build(name)
    try:
        bounded = bound_buffers(schedule, credits)
    except ScheduleError as error:
        least = int(str(error).rsplit(" ", 1)[1])
        assert least > credits
        check_ends(bound_buffers(schedule, least))
        with pytest.raises(ScheduleError, match="the least is"):
            bound_buffers(schedule, least - 1)
        return
    costs = StageCosts.uniform(schedule.stages, 1.0, 1.5, 0.5, 0.2)
    timeline = simulate(bounded, costs)
    assert timeline.makespan_s >= simulate(schedule, costs).makespan_s - 1e-9
    # From the start of what fills a buffer to the end of what uses it, no boundary has more than its buffers in use.
    spans = {part.text: span for rank in range(3) for span in timeline.spans(rank) for part in span.action.flat}
    for stage in range(schedule.stages - 1):
        if schedule.placement[stage] == schedule.placement[stage + 1]:
            continue
        uses = [(spans[f"{stage}F{mb}"].start_s, spans[f"{stage + 1}F{mb}"].end_s) for mb in range(6)]
        for start, _ in uses:
            assert sum(a <= start < b for a, b in uses) <= credits
    # And no receive is posted for which there is no buffer.
    for order in insert_transfers(bounded).table:
        held: Counter[tuple[str, int]] = Counter()
        for action in order:
            if action.kind is Kind.RECV_FORWARD:
                held[("F", action.stage)] += 1
            for part in action.flat:
                if part.kind is Kind.FORWARD and held[("F", part.stage)]:
                    held[("F", part.stage)] -= 1
            assert all(value <= credits for value in held.values())
