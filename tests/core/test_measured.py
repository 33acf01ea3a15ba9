"""Costs from timelines: simulating with them gives back the timeline that they came from."""

import pytest

from shardwright.core.errors import ScheduleError
from shardwright.core.measured import measured_costs
from shardwright.core.schedule import Schedule, StageCosts
from shardwright.core.simulate import simulate

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


def test_a_timeline_without_a_backward_is_refused() -> None:
    timeline = simulate(Schedule.build("forward-only", ranks=2, microbatches=3))
    with pytest.raises(ScheduleError, match="lack a forward or a backward of stage 0"):
        measured_costs([timeline])
    with pytest.raises(ScheduleError, match="no timeline"):
        measured_costs([])
