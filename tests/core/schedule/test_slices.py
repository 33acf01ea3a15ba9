"""Schedules whose microbatches go through the pipeline in slices of their sequences."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright import Schedule, StageCosts, simulate
from shardwright.core.errors import ScheduleError
from shardwright.core.schedule.actions import Action, B, F, I, W
from shardwright.core.schedule.catalogue import FAMILIES
from shardwright.core.schedule.checks import check
from shardwright.core.schedule.files import from_csv, to_csv
from shardwright.core.schedule.measured_costs import measured_costs
from shardwright.core.schedule.passes import insert_transfers, merge_backward, split_backward
from shardwright.core.schedule.passes.sharding import insert_sharding
from shardwright.core.schedule.passes.slices_as_stages import StageNames, slices_as_stages
from shardwright.core.schedule.schedule import AUTO

SLICED = {name: family for name, family in FAMILIES.items() if family.takes_slices}
SIZES = [(ranks, m, slices) for ranks in (1, 2, 4) for m in (1, 2, 4) for slices in (2, 3, 5)]


def built(name: str, ranks: int, microbatches: int, slices: int, **more: object) -> Schedule:
    virtual = 2 if name in ("interleaved-1f1b", "interleaved-zb", "looped-bfs") else 1
    return Schedule.build(name, ranks=ranks, microbatches=microbatches, slices=slices, virtual_stages=virtual, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SLICED)
def test_forwards_run_in_order_and_backwards_in_reverse(name: str) -> None:
    for sizes in SIZES:
        schedule = built(name, *sizes)
        check(schedule)
        assert schedule.trains == SLICED[name].trains
        for order in schedule.table:
            seen = {part: at for at, action in enumerate(order) for part in action.flat}
            assert len(seen) == len(order)
            for part, at in seen.items():
                assert part.slice is not None
                before = replace(part, slice=part.slice - 1) if part.slice else None
                if part.kind is F and before:
                    assert seen[before] < at
                elif part.kind in (B, I) and before:
                    assert at < seen[before]
                elif part.kind is W:
                    assert seen[part.as_kind(I)] < at
        assert from_csv(to_csv(schedule)).table == schedule.table
        explicit = insert_transfers(schedule)
        assert simulate(explicit).makespan_s == pytest.approx(simulate(schedule).makespan_s)


def test_one_slice_is_the_schedule_without() -> None:
    for name in SLICED:
        whole = Schedule.build(name, ranks=2, microbatches=4)
        assert built(name, 2, 4, 1) == built(name, 2, 4, 1)
        assert Schedule.build(name, ranks=2, microbatches=4, slices=1) == whole
        assert all(action.slice is None for order in whole.table for action in order)


@given(
    st.lists(st.floats(0.01, 10), min_size=1, max_size=6),
    st.integers(1, 6),
    st.floats(0.1, 3),
)
def test_a_step_takes_the_sum_and_the_longest_for_every_further_stage(
    seconds: list[float], ranks: int, backward: float
) -> None:
    """TeraPipe, section 3.2: Σt + (K − 1)·max t, of forwards and backwards together."""
    schedule = Schedule.build("gpipe", ranks=ranks, microbatches=1, slices=len(seconds))
    costs = [StageCosts.uniform(ranks, s, backward * s / 2, backward * s / 2) for s in seconds]
    whole = (1 + backward) * (sum(seconds) + (ranks - 1) * max(seconds))
    assert simulate(schedule, costs if len(costs) > 1 else costs[0]).makespan_s == pytest.approx(whole)


def test_fewer_slices_are_held_than_in_all_forwards_first() -> None:
    """1F1B over slices: rank r of p holds p - r + slices - 1 of them, whatever the number of microbatches."""
    for ranks, slices in ((2, 3), (4, 4), (4, 8)):
        timeline = simulate(Schedule.build("1f1b", ranks=ranks, microbatches=6, slices=slices))
        assert timeline.peak_live_activations == tuple(ranks - rank + slices - 1 for rank in range(ranks))
        all_first = simulate(Schedule.build("gpipe", ranks=ranks, microbatches=6, slices=slices))
        assert set(all_first.peak_live_activations) == {6 * slices}


def test_slices_have_seconds_and_bytes_of_their_own() -> None:
    schedule = Schedule.build("gpipe", ranks=2, microbatches=1, slices=2)
    costs = (
        StageCosts.uniform(2, forward_s=1, input_grad_s=1, weight_grad_s=1, transfer_s=0.25, activation_bytes=10),
        StageCosts.uniform(2, forward_s=3, input_grad_s=3, weight_grad_s=3, transfer_s=0.5, activation_bytes=25),
    )
    timeline = simulate(schedule, costs)
    assert [span.end_s - span.start_s for span in timeline.spans(0)] == [1, 3, 6, 2]
    assert [(str(t.action), t.end_s - t.start_s) for t in timeline.transfers] == [
        ("0SEND_F0s0", 0.25), ("0SEND_F0s1", 0.5), ("1SEND_B0s1", 0.5), ("1SEND_B0s0", 0.25)
    ]  # fmt: skip
    assert timeline.peak_activation_bytes == (35, 35)
    assert timeline.memory(0)[1].tolist() == [10, 35, 10, 0]
    with pytest.raises(ScheduleError, match="3 costs were given for a schedule of 2 slices"):
        simulate(schedule, (*costs, costs[0]))
    with pytest.raises(ScheduleError, match="differ in overlap"):
        simulate(schedule, (costs[0], replace(costs[1], overlap=0.5)))
    with pytest.raises(ScheduleError, match="0F0s0 is of a slice: costs are measured of microbatches that run whole"):
        measured_costs([timeline])
    check(schedule, memory_limit_bytes=35, costs=costs)
    with pytest.raises(ScheduleError, match=r"holds 35 bytes of activations during 0F0s1: its limit is 34"):
        check(schedule, memory_limit_bytes=34, costs=costs)
    with pytest.raises(ScheduleError, match="the least that gpipe keeps is 35"):
        Schedule.build("gpipe", ranks=2, microbatches=1, slices=2, costs=costs, memory_limit_bytes=34)


def test_backwards_are_split_and_merged_slice_by_slice() -> None:
    whole = Schedule.build("1f1b", ranks=2, microbatches=2, slices=3)
    split = split_backward(whole)
    check(split)
    assert split.splits_backward
    assert merge_backward(split).table == whole.table


@pytest.mark.parametrize(
    ("text", "action"),
    [("2F0s1", Action(2, F, 0, (), 1)), ("11W7s12", Action(11, W, 7, (), 12)), ("2F0", Action(2, F, 0))],
)
def test_the_text_of_a_slice(text: str, action: Action) -> None:
    assert Action.parse(text) == action
    assert action.text == text


@pytest.mark.parametrize("text", ["2F0s", "2F0s-1", "2Fs1", "2F0s1s2", "2F0S1", "1UNSHARDs1"])
def test_what_is_no_slice(text: str) -> None:
    with pytest.raises(ScheduleError):
        Action.parse(text)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("0F0s0,0F0s1,0B0s0,0B0s1", "0B0s0 comes before the backward of slice 1"),
        ("0F0s1,0F0s0,0B0s1,0B0s0", "0F0s1 comes before slice 0"),
        ("0F0s0,0F0,0B0,0B0s0", "0F0s0 is of a slice, and the schedule has no slices"),
        ("0F0s0,0F0s1,0B0s1", "has no 0B0s0"),
        ("0F0s0,0F0s1,0I0s1,0I0s0,0W0s0", "has no 0W0s1"),
        ("0F0s0,0B0s0", "0F0s0 is of a slice, and the schedule has no slices"),
        ("0F0s0,0B0s0,0F0s1,0B0s1", "0B0s0 comes before the backward of slice 1"),
    ],
)
def test_orders_that_are_refused(rows: str, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        from_csv(rows)


@pytest.mark.parametrize("name", [*(name for name in FAMILIES if name not in SLICED), AUTO])
def test_schedules_of_whole_microbatches_say_so(name: str) -> None:
    with pytest.raises(ScheduleError, match=rf"{name} runs microbatches whole, not in slices=2; .* gpipe, 1f1b"):
        Schedule.build(name, ranks=2, microbatches=4, slices=2)


def test_numbers_of_slices_that_cannot_be() -> None:
    for slices in (0, True, 1.5):
        with pytest.raises(ScheduleError, match=r"slices=.* is not possible"):
            Schedule.build("1f1b", ranks=2, microbatches=2, slices=slices)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SLICED)
def test_slices_become_stages_of_their_own(name: str) -> None:
    """The same actions in the same order, on the same ranks."""
    for sizes in SIZES:
        schedule = built(name, *sizes)
        stages = schedule.stages
        made = slices_as_stages(schedule)
        assert (made.slices, made.stages, made.ranks) == (1, stages * schedule.slices, schedule.ranks)
        for before, after in zip(schedule.table, made.table, strict=True):
            for old, new in zip(before, after, strict=True):
                assert (old.kind, old.microbatch) == (new.kind, new.microbatch)
                assert divmod(new.stage, stages) == (old.slice, old.stage)
                assert made.stage_to_rank(new.stage) == schedule.stage_to_rank(old.stage)
    whole = Schedule.build("1f1b", ranks=2, microbatches=4)
    assert slices_as_stages(whole) is whole


def test_stages_are_gathered_whole() -> None:
    sliced = Schedule.build("1f1b", ranks=2, microbatches=4, slices=2)
    with pytest.raises(ScheduleError, match="leave out gathered_stages and reduce_after"):
        slices_as_stages(insert_sharding(sliced, 1))


def test_stages_that_slices_became_have_the_names_of_both() -> None:
    schedule = built("interleaved-1f1b", 2, 2, 3)
    made, names = slices_as_stages(schedule), StageNames(schedule.stages, 3)
    named = tuple(tuple(names.action(part) for action in order for part in action.flat) for order in made.table)
    assert named == tuple(tuple(part for action in order for part in action.flat) for order in schedule.table)
    assert names.text(9) == "stage 1, slice 2"
    assert StageNames(4).text(3) == "stage 3"
    assert StageNames(4).action(Action(3, F, 0)) == Action(3, F, 0)
