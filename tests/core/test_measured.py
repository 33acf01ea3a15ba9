"""Costs from timelines: simulating with them gives back the timeline that they came from."""

from dataclasses import replace

import numpy as np
import pytest

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule import Action, Kind, Schedule, StageCosts
from shardwright.core.schedule.measured_costs import measured_costs
from shardwright.core.schedule.passes import split_backward
from shardwright.core.schedule.simulate import simulate

COSTS = StageCosts((1.0, 1.2, 0.8), (0.9, 1.1, 1.0), (0.7, 0.8, 0.6), (0.05, 0.1), (1, 1, 1))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_costs_of_a_timeline_give_the_timeline(name: str) -> None:
    schedule = Schedule.build(name, ranks=3, microbatches=7, costs=COSTS)
    timeline = simulate(schedule, COSTS)
    found = measured_costs([timeline, timeline])
    assert found.forward_s == pytest.approx(COSTS.forward_s)
    assert found.backward_s == pytest.approx(COSTS.backward_s)
    assert found.transfer_s == pytest.approx(COSTS.transfer_s, abs=0.04)
    if schedule.splits_backward:
        assert found.weight_grad_s == pytest.approx(COSTS.weight_grad_s)
    assert simulate(schedule, found).makespan_s == pytest.approx(timeline.makespan_s, rel=0.01)


def test_a_schedule_with_backwards_of_both_kinds_gives_the_costs_of_both() -> None:
    costs = replace(COSTS, whole_backward_s=(1.4, 1.7, 1.3))
    recorded = split_backward(Schedule.build("1f1b", ranks=3, microbatches=8), range(1, 8, 2))
    timeline = simulate(recorded, costs)
    longer = replace(
        timeline,
        end_s=tuple(ends + 0.1 * _is_split_forward(recorded.table[rank]) for rank, ends in enumerate(timeline.end_s)),
    )
    found = measured_costs([longer])
    assert found.forward_s == pytest.approx(COSTS.forward_s)
    assert found.input_grad_s == pytest.approx([seconds + 0.1 for seconds in COSTS.input_grad_s])
    assert found.weight_grad_s == pytest.approx(COSTS.weight_grad_s)
    assert found.backward_s == pytest.approx(costs.backward_s)
    measured = measured_costs([timeline])
    for name in ("gpipe", "1f1b", "zb-h1"):
        schedule = Schedule.build(name, ranks=3, microbatches=8)
        expected = simulate(schedule, costs).makespan_s
        assert simulate(schedule, measured).makespan_s == pytest.approx(expected, rel=0.01)


def _is_split_forward(order: tuple[Action, ...]) -> np.ndarray:
    return np.array([a.kind is Kind.FORWARD and (a.microbatch or 0) % 2 == 1 for a in order], dtype=np.float64)


def test_a_timeline_without_a_backward_is_refused() -> None:
    timeline = simulate(Schedule.build("forward-only", ranks=2, microbatches=3))
    with pytest.raises(ScheduleError, match="lack a forward or a backward of stage 0"):
        measured_costs([timeline])
    with pytest.raises(ScheduleError, match="no timeline"):
        measured_costs([])
