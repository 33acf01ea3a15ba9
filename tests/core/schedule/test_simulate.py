"""The event engine: links, blocking transfers, credits, causes; against times worked out by hand and by brute force."""

import itertools
import random
import tracemalloc

import pytest

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule import Action, Schedule, StageCosts, schedule_names
from shardwright.core.schedule.passes import bound_buffers, insert_transfers
from shardwright.core.schedule.simulate import simulate, simulate_schedule
from shardwright.core.schedule.timeline import Span, Timeline, Transfer


def table(*rows: str) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(Action.parse(cell) for cell in row.split()) for row in rows)


def custom(m: int, *rows: str) -> Schedule:
    return Schedule("custom", (), len(rows), len(rows), m, tuple(range(len(rows))), table(*rows))


def test_a_transfer_runs_beside_compute() -> None:
    timeline = simulate(custom(2, "0F0 0F1", "1F0 1F1"), StageCosts.uniform(2, 1.0, transfer_s=0.5))
    assert [span.start_s for span in timeline.spans(1)] == [1.5, 2.5]
    assert timeline.makespan_s == 3.5


def test_a_slow_link_carries_one_tensor_at_a_time_in_order() -> None:
    timeline = simulate(custom(3, "0F0 0F1 0F2", "1F0 1F1 1F2"), StageCosts.uniform(2, 1.0, transfer_s=3.0))
    assert [(t.start_s, t.end_s) for t in timeline.transfers] == [(1, 4), (4, 7), (7, 10)]
    assert [step.action.text for step in timeline.critical_path()] == ["0F0", "0SEND_F0", "0SEND_F1", "0SEND_F2", "1F2"]


def test_the_two_directions_of_a_link_do_not_hinder_one_another() -> None:
    schedule = Schedule.build("1f1b", ranks=2, microbatches=4)
    timeline = simulate(schedule, StageCosts.uniform(2, transfer_s=4.0))
    forward = [(t.start_s, t.end_s) for t in timeline.transfers if t.source == 0]
    backward = [(t.start_s, t.end_s) for t in timeline.transfers if t.source == 1]
    assert any(a < d and c < b for a, b in forward for c, d in backward)


def test_blocking_transfers_hold_both_ranks() -> None:
    schedule = insert_transfers(custom(2, "0F0 0F1", "1F0 1F1"))
    timeline = simulate_schedule(schedule, StageCosts.uniform(2, 1.0, transfer_s=0.5), transfers="blocking")
    assert timeline.makespan_s == 4.0
    assert [s.action.text for s in timeline.spans(0) if s.start_s == 1.0] == ["0SEND_F0"]
    path = timeline.critical_path()
    assert path[0].start_s == 0
    assert path[-1].end_s == 4.0
    assert all(a.end_s == b.start_s for a, b in itertools.pairwise(path))


def test_credits_stall_the_producer_of_a_slow_consumer() -> None:
    costs = StageCosts((1.0, 3.0), (1.0,) * 2, (1.0,) * 2, (0.0,), (1, 1))
    schedule = custom(3, "0F0 0F1 0F2", "1F0 1F1 1F2")
    free = [span.start_s for span in simulate(schedule, costs).spans(0)]
    turns = [span.start_s for span in simulate(bound_buffers(schedule, 1), costs).spans(0)]
    overlapped = [span.start_s for span in simulate(bound_buffers(schedule, 2), costs).spans(0)]
    assert (free, turns, overlapped) == ([0, 1, 2], [0, 4, 8], [0, 1, 4])


def test_overlapped_pairs_take_as_long_as_the_overlap_says() -> None:
    schedule = Schedule("custom", (), 1, 1, 2, (0,), table("0F0 (0F1;0B0) 0B1"))
    for overlap, makespan in ((0.0, 6.0), (0.5, 5.5), (1.0, 5.0)):
        costs = StageCosts((1.0,), (1.0,), (1.0,), (), (1,), overlap)
        assert simulate(schedule, costs).makespan_s == makespan


def brute_force(schedule: Schedule, costs: StageCosts) -> dict[str, float]:
    """Ends of all actions by repeated relaxation over the rules written out again, links and all."""
    ends: dict[str, float] = {}
    placement, last = schedule.placement, schedule.stages - 1
    while True:
        before = dict(ends)
        arrived: dict[tuple[str, int, int], float] = {}
        links: dict[tuple[int, int], float] = {}
        for rank, order in enumerate(schedule.table):
            for action in order:
                if action.text not in ends or action.kind.value == "W":
                    continue
                to = action.stage + (1 if action.kind.value == "F" else -1)
                if not 0 <= to <= last:
                    continue
                key = (action.kind.value.replace("I", "B"), to, action.microbatch)
                if placement[to] == rank:
                    arrived[key] = ends[action.text]
                else:
                    link = (rank, placement[to])
                    seconds = costs.transfer_s[min(to, action.stage)]
                    links[link] = arrived[key] = max(links.get(link, 0.0), ends[action.text]) + seconds
        for order in schedule.table:
            clock = 0.0
            for action in order:
                s, kind, mb = action.stage, action.kind.value, action.microbatch
                start = clock
                if kind == "F" and s:
                    if ("F", s, mb) not in arrived:
                        break
                    start = max(start, arrived[("F", s, mb)])
                elif kind in "BI" and s < last:
                    if ("B", s, mb) not in arrived:
                        break
                    start = max(start, arrived[("B", s, mb)])
                seconds = {
                    "F": costs.forward_s,
                    "I": costs.input_grad_s,
                    "W": costs.weight_grad_s,
                    "B": costs.backward_s,
                }
                clock = ends[action.text] = start + seconds[kind][s]
        if ends == before:
            return ends


@pytest.mark.parametrize("name", [name for name in schedule_names() if name != "dualpipev"])
def test_the_engine_agrees_with_brute_force(name: str) -> None:
    draw = random.Random(name)
    for ranks, m in ((2, 3), (3, 6)):
        v = 2 if name in ("zbv", "v-half", "v-min", "interleaved-1f1b", "looped-bfs", "interleaved-zb") else 1
        schedule = Schedule.build(name, ranks=ranks, microbatches=m, virtual_stages=v)
        times = [tuple(draw.uniform(0.5, 2.0) for _ in range(ranks * v)) for _ in range(4)]
        costs = StageCosts(times[0], times[1], times[2], times[3][1:], (1,) * (ranks * v))
        timeline = simulate(schedule, costs)
        expected = brute_force(schedule, costs)
        found = {span.action.text: span.end_s for rank in range(ranks) for span in timeline.spans(rank)}
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("name", schedule_names())
def test_the_critical_path_is_unbroken_and_as_long_as_the_makespan(name: str) -> None:
    v = 2 if name in ("zbv", "v-half", "v-min", "dualpipev") else 1
    timeline = simulate(
        Schedule.build(name, ranks=3, microbatches=6, virtual_stages=v), StageCosts.uniform(3 * v, 1.0, 1.2, 0.7, 0.4)
    )
    path = timeline.critical_path()
    assert path[0].start_s == 0
    assert path[-1].end_s == timeline.makespan_s
    assert all(a.end_s == pytest.approx(b.start_s) for a, b in itertools.pairwise(path))


def test_memory_over_time_peaks_at_the_peak() -> None:
    costs = StageCosts.uniform(3, activation_bytes=100)
    timeline = simulate(Schedule.build("1f1b", ranks=3, microbatches=5), costs)
    for rank in range(3):
        times, held = timeline.memory(rank)
        assert held.max() == timeline.peak_activation_bytes[rank] == 100 * timeline.peak_live_activations[rank]
        assert held[-1] == 0
        assert (times[1:] >= times[:-1]).all()


def test_a_measured_timeline_is_of_the_same_type() -> None:
    simulated = simulate(Schedule.build("zb-h1", ranks=2, microbatches=3), StageCosts.uniform(2, transfer_s=0.25))
    shifted = [
        Span(rank, span.action, span.start_s + 100, span.end_s + 100)
        for rank in range(2)
        for span in simulated.spans(rank)
    ]
    moved = [Transfer(t.action, t.source, t.target, t.start_s + 100, t.end_s + 100) for t in simulated.transfers]
    measured = Timeline.measured(reversed(shifted), 2, moved)
    assert measured.makespan_s == simulated.makespan_s
    assert measured.bubble_fraction == simulated.bubble_fraction
    assert measured.peak_live_activations == simulated.peak_live_activations
    assert tuple(measured.transfers) == tuple(simulated.transfers)
    with pytest.raises(ScheduleError, match="no critical path"):
        measured.critical_path()


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["forward_s", "input_grad_s", "weight_grad_s", "transfer_s"])
def test_times_must_be_finite_and_not_negative(which: str, bad: float) -> None:
    with pytest.raises(ScheduleError, match=rf"{which}\[0\]"):
        StageCosts.uniform(2, **{which: bad})


def test_costs_must_be_of_as_many_stages() -> None:
    with pytest.raises(ScheduleError, match="costs of 3 stages given for a schedule of 2"):
        simulate(Schedule.build("1f1b", ranks=2, microbatches=2), StageCosts.uniform(3))
    with pytest.raises(ScheduleError, match="transfer_s has 2 entries: expected 1"):
        StageCosts((1.0,) * 2, (1.0,) * 2, (1.0,) * 2, (0.0,) * 2, (1,) * 2)


def test_two_hundred_thousand_actions_in_a_gibibyte() -> None:
    """How long they take is in benchmarks/schedules.py."""
    schedule = Schedule.build("zbv", ranks=64, microbatches=512, virtual_stages=2)
    assert sum(len(order) for order in schedule.table) == 196_608
    timeline = simulate(schedule, StageCosts.uniform(128, transfer_s=0.1))
    assert timeline.makespan_s > 512 * 2 * 3
    small = Schedule.build("zbv", ranks=16, microbatches=128, virtual_stages=2)
    tracemalloc.start()
    simulate(small, StageCosts.uniform(32, transfer_s=0.1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak * 16 < 2**30  # A sixteenth of the actions: tracing all of them would take longer than simulating them.
