"""Ranks that share a machine, against a run of the same actions at the rates that they then have."""

import numpy as np
import pytest

from shardwright import Schedule, StageCosts, simulate
from shardwright.core.errors import ScheduleError
from shardwright.core.schedule.actions import Action, B, F


def shared_run(schedule: Schedule, costs: StageCosts) -> dict[Action, tuple[float, float]]:
    """When each action runs where, of p ranks, k at work are each 1 / (1 - lent · (p - k) / p) times as fast: from one
    event to the next. For forwards and whole backwards, without messages' time."""
    done: dict[Action, tuple[float, float]] = {}
    position = [0] * schedule.ranks
    begun: dict[int, tuple[float, float]] = {}  # of every rank at work: since when, and the work that is left
    now = 0.0

    def is_ready(action: Action) -> bool:
        stage, mb = action.stage, action.microbatch
        if action.kind is F:
            return stage == 0 or Action(stage - 1, F, mb) in done
        return Action(stage, F, mb) in done and (stage == schedule.stages - 1 or Action(stage + 1, B, mb) in done)

    while any(at < len(order) for at, order in zip(position, schedule.table, strict=True)):
        for rank, order in enumerate(schedule.table):
            if rank not in begun and position[rank] < len(order) and is_ready(order[position[rank]]):
                action = order[position[rank]]
                begun[rank] = now, (costs.forward_s if action.kind is F else costs.backward_s)[action.stage]
        rate = 1 / (1 - costs.idle_lent * (schedule.ranks - len(begun)) / schedule.ranks)
        passed = min(left for _, left in begun.values()) / rate
        now += passed
        for rank, (since, left) in list(begun.items()):
            left -= passed * rate
            begun[rank] = since, left
            if left <= 1e-12:
                done[schedule.table[rank][position[rank]]] = since, now
                position[rank] += 1
                del begun[rank]
    return done


@pytest.mark.parametrize("lent", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(("name", "ranks", "virtual"), [("1f1b", 2, 1), ("gpipe", 3, 1), ("interleaved-1f1b", 2, 2)])
def test_idle_ranks_make_the_others_faster(name: str, ranks: int, virtual: int, lent: float) -> None:
    random = np.random.default_rng(ranks)
    stages = ranks * virtual
    times = [tuple(random.uniform(0.5, 2.0, stages).tolist()) for _ in range(3)]
    costs = StageCosts(*times, (0.0,) * (stages - 1), (1,) * stages, idle_lent=lent)
    schedule = Schedule.build(name, ranks=ranks, microbatches=2 * ranks, virtual_stages=virtual)
    expected, timeline = shared_run(schedule, costs), simulate(schedule, costs)
    for rank in range(ranks):
        for span in timeline.spans(rank):
            assert (span.start_s, span.end_s) == pytest.approx(expected[span.action])
    alone_s = simulate(schedule, StageCosts(*times, (0.0,) * (stages - 1), (1,) * stages)).makespan_s
    work_s = 2 * ranks * sum(map(sum, times)) / ranks
    assert timeline.makespan_s == pytest.approx((1 - lent) * alone_s + lent * work_s)


def test_nothing_is_faster_while_all_ranks_wait() -> None:
    costs = StageCosts((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (5.0,), (1, 1), idle_lent=1.0)
    timeline = simulate(Schedule.build("1f1b", ranks=2, microbatches=1), costs)
    # Each of four passes has the machine to itself, and takes half as long.
    assert timeline.makespan_s == pytest.approx((1 + 1 + 2 + 2) / 2 + 2 * 5)
    there, back = timeline.transfers
    assert (there.start_s, there.end_s) == pytest.approx((0.5, 5.5))
    assert (back.start_s, back.end_s) == pytest.approx((7.0, 12.0))
    assert timeline.critical_path()[-1].end_s == timeline.makespan_s


@pytest.mark.parametrize("lent", [-0.1, 1.1, float("nan")])
def test_a_share_that_is_none_is_refused(lent: float) -> None:
    with pytest.raises(ScheduleError, match="expected a share between 0 and 1"):
        StageCosts((1.0,), (1.0,), (1.0,), (), (1,), idle_lent=lent)


def test_generated_schedules_do_not_depend_on_what_is_lent() -> None:
    random = np.random.default_rng(0)
    times = [tuple(random.uniform(0.5, 2.0, 3).tolist()) for _ in range(3)]
    made = [
        Schedule.build("auto", ranks=3, microbatches=5, costs=StageCosts(*times, (0.1, 0.1), (1,) * 3, idle_lent=lent))
        for lent in (0.0, 0.7)
    ]
    assert made[0].table == made[1].table
