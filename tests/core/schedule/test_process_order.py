"""The order of actions and transfers over processes: every schedule ends, and what would not end is found."""

import pytest

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule import Schedule, StageCosts
from shardwright.core.schedule.actions import Action
from shardwright.core.schedule.process_order import (
    Step,
    Transfer,
    check_processes,
    ordered_steps,
    processes_steps,
)
from shardwright.core.schedule.simulate import simulate_schedule

NAMES = [("gpipe", 1), ("1f1b", 1), ("eager-1f1b", 1), ("interleaved-1f1b", 2), ("looped-bfs", 2), ("zb-h1", 1),
         ("zb-h2", 1), ("zbv", 2), ("v-half", 2), ("v-min", 2), ("dualpipev", 2), ("interleaved-zb", 2)]  # fmt: skip


def order_of(schedule: Schedule) -> list[Action]:
    timeline = simulate_schedule(schedule, StageCosts.uniform(schedule.stages))
    started = [
        (start, rank, index, action)
        for rank, (actions, starts) in enumerate(zip(timeline.actions, timeline.start_s, strict=True))
        for index, (action, start) in enumerate(zip(actions, starts.tolist(), strict=True))
        if action.kind.is_compute
    ]
    return [action for *_, action in sorted(started, key=lambda item: item[:3])]


def edges_of(stages: int) -> list[tuple[int, int]]:
    """Each stage's result to the next, and skips: of the first stage to all, and over one stage."""
    found = {(stage, stage + 1) for stage in range(stages - 1)}
    found |= {(0, stage) for stage in range(1, stages)} | {(stage, stage + 2) for stage in range(stages - 2)}
    return sorted(found)


@pytest.mark.parametrize(("name", "virtual"), NAMES)
@pytest.mark.parametrize("microbatches", [8, 9])
@pytest.mark.parametrize("shared", [False, True])
def test_every_schedule_ends_over_processes(name: str, virtual: int, microbatches: int, shared: bool) -> None:
    """``shared``: every stage lies on two processes."""
    count = 12 if name.startswith("interleaved") and microbatches == 9 else microbatches  # whole rounds alone
    schedule = Schedule.build(name, ranks=4, microbatches=count, virtual_stages=virtual)
    edges = edges_of(schedule.stages)
    owners = [{rank, (rank + 1) % 4} if shared else {rank} for rank in schedule.placement]
    steps = ordered_steps(order_of(schedule), edges, edges)
    own = processes_steps(steps, owners)
    check_processes(own, owners, edges, edges)
    transfers = [[step for step in mine if isinstance(step, Transfer)] for mine in own.values()]
    assert all(mine == transfers[0] for mine in transfers)
    assert len(transfers[0]) == 2 * len(edges) * count  # activations there, gradients back
    done = sum(isinstance(step, Action) for mine in own.values() for step in mine)
    compute = sum(len(action.flat) for order in schedule.table for action in order if action.kind.is_compute)
    assert done == compute * (2 if shared else 1)


def two_stages() -> tuple[dict[int, list[Step]], list[set[int]], list[tuple[int, int]]]:
    schedule = Schedule.build("1f1b", ranks=2, microbatches=4)
    edges, owners = [(0, 1)], [{0}, {1}]
    own = processes_steps(ordered_steps(order_of(schedule), edges, edges), owners)
    return {process: list(steps) for process, steps in own.items()}, owners, edges


def test_transfers_in_two_orders_are_found() -> None:
    own, owners, edges = two_stages()
    first, second = [n for n, step in enumerate(own[1]) if isinstance(step, Transfer)][:2]
    own[1][first], own[1][second] = own[1][second], own[1][first]
    with pytest.raises(ScheduleError, match=r"wait for one another.*process 0 is at .*process 1 is at"):
        check_processes(own, owners, edges, edges)


def test_a_transfer_that_one_process_leaves_out_is_found() -> None:
    own, owners, edges = two_stages()
    own[1] = [step for step in own[1] if step != Transfer(Action.parse("0F2"), 1)]
    with pytest.raises(ScheduleError, match=r"1F2 is run before 0F2>1 is sent"):
        check_processes(own, owners, edges, edges)


def test_a_process_that_ends_before_the_others_is_found() -> None:
    own, owners, edges = two_stages()
    own[1] = own[1][:2]
    with pytest.raises(ScheduleError, match="process 1 has ended"):
        check_processes(own, owners, edges, edges)


def test_an_action_ahead_of_its_operands_is_found() -> None:
    own, owners, edges = two_stages()
    at = own[1].index(Action.parse("1F1"))
    own[1].insert(0, own[1].pop(at))
    with pytest.raises(ScheduleError, match="1F1 is run before 0F1>1 is sent, which it reads"):
        check_processes(own, owners, edges, edges)


def test_a_transfer_ahead_of_what_makes_it_is_found() -> None:
    own, owners, edges = two_stages()
    sent = Transfer(Action.parse("0F0"), 1)
    for steps in own.values():
        steps.remove(sent)
        steps.insert(0, sent)
    with pytest.raises(ScheduleError, match="0F0>1 is sent before 0F0 is run"):
        check_processes(own, owners, edges, edges)


def test_processes_of_one_stage_that_run_it_in_two_orders_are_found() -> None:
    schedule = Schedule.build("1f1b", ranks=1, microbatches=2)
    owners = [{0, 1}]
    own = {p: list(s) for p, s in processes_steps(ordered_steps(order_of(schedule), [], []), owners).items()}
    own[1] = own[1][::-1]
    with pytest.raises(ScheduleError, match="wait for one another"):
        check_processes(own, owners, [], [])


def test_a_value_without_a_gradient_is_sent_one_way() -> None:
    schedule = Schedule.build("1f1b", ranks=2, microbatches=3)
    steps = ordered_steps(order_of(schedule), [(0, 1)], [])
    assert [step.text for step in steps if isinstance(step, Transfer)] == ["0F0>1", "0F1>1", "0F2>1"]
    check_processes(processes_steps(steps, [{0}, {1}]), [{0}, {1}], [(0, 1)], [])
