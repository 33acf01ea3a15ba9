"""Broken schedules are found, and the grid shows where."""

from dataclasses import replace

import pytest

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule import Action, Schedule
from shardwright.core.schedule.checks import check, check_ends, check_memory
from shardwright.core.schedule.passes import insert_transfers
from shardwright.core.schedule.simulate import simulate


def table(*rows: str) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(Action.parse(cell) for cell in row.split()) for row in rows)


def custom(*rows: str, m: int = 2) -> Schedule:
    return Schedule("custom", (), len(rows), len(rows), m, tuple(range(len(rows))), table(*rows))


GOOD = "1F0 1B0 1F1 1B1"
BROKEN = [
    ("0F0 0F1 0B0", "rank 0 never runs 0B1", "[(end)]"),
    ("0F0 0F1 0F1 0B0 0B1", "0F1 is on rank 0 a second time", "[0F1]"),
    ("0F0 0B1 0F1 0B0", "0B1 comes before 0F1", "[0B1]"),
    ("0F0 0F1 0W0 0I0 0B1", "0W0 comes before 0I0", "[0W0]"),
    ("0F0 0F1 0B0 0I0 0B1", "0I0 repeats 0B0", "[0I0]"),
    ("0F0 1F1 0B0 0B1", "stage 1 is on rank 1", "[1F1]"),
    ("0F0 0F2 0B0 0B1", "there is no microbatch 2", "[0F2]"),
    ("0F0 0F1 0B0 0I1", "rank 0 never runs 0W1", "[(end)]"),
]


@pytest.mark.parametrize(("row", "reason", "cell"), BROKEN, ids=[reason for _, reason, _ in BROKEN])
def test_the_failing_cell_is_marked_in_the_grid(row: str, reason: str, cell: str) -> None:
    with pytest.raises(ScheduleError) as error:
        check(custom(row, GOOD))
    message = str(error.value)
    assert reason in message
    marked = [line for line in message.splitlines() if line.endswith("<-- here")]
    assert len(marked) == 1
    assert cell in marked[0]


def test_a_deadlock_is_found_and_shown() -> None:
    # Rank 0 wants the gradient of 1 before it has sent what rank 1 needs for it.
    crossed = custom("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    with pytest.raises(ScheduleError, match=r"rank 0 waits at step 1 with 0B0; rank 1 waits at step 1 with 1F1"):
        check(crossed)
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(crossed)
    with pytest.raises(ScheduleError, match="deadlock"):
        insert_transfers(crossed)


def test_blocking_transfers_can_deadlock_where_asynchronous_ones_do_not() -> None:
    # Both ranks send first and receive after: each waits for the other's receive.
    rows = (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )
    both = custom(*rows)
    check_ends(both)
    with pytest.raises(ScheduleError, match="deadlock"):
        check_ends(both, blocking=True)
    check_ends(insert_transfers(custom("0F0 0F1 0B0 0B1", GOOD)), blocking=True)


def test_two_ends_that_disagree_on_the_order_of_transfers_are_found() -> None:
    rows = ("0F0 0F1 0SEND_F0 0SEND_F1", "1RECV_F1 1RECV_F0 1F0 1F1")
    with pytest.raises(ScheduleError, match="deadlock"):
        check_ends(custom(*rows))


def test_a_receive_that_never_comes_is_found() -> None:
    with pytest.raises(ScheduleError, match="rank 1 waits at step 0 with 1F0"):
        check_ends(custom("0F0 0SEND_F0 0F1 0SEND_F1", "1F0 1F1 1RECV_F0"))


UNGATHERED = [
    ("0F0 0UNSHARD 0B0 0RESHARD", "0F0 runs while the parameters of stage 0 are not gathered"),
    ("0UNSHARD 0F0 0UNSHARD 0B0 0RESHARD", "which is gathered already"),
    ("0UNSHARD 0F0 0RESHARD 0B0", "0B0 runs while"),
    ("0UNSHARD 0F0 0B0", "never frees stage 0"),
    ("0UNSHARD 0F0 0B0 0RESHARD 0RESHARD", "which is not gathered"),
    ("0UNSHARD 0F0 0REDUCE_GRAD 0B0 0RESHARD", "to which nothing was added"),
    ("0UNSHARD 0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD 0RESHARD", "to which nothing was added"),
]


@pytest.mark.parametrize(("row", "reason"), UNGATHERED, ids=[reason for _, reason in UNGATHERED])
def test_parameters_must_be_gathered_when_they_are_used(row: str, reason: str) -> None:
    check(custom("0UNSHARD 0F0 0B0 0REDUCE_GRAD 0RESHARD", m=1))
    with pytest.raises(ScheduleError, match=reason):
        check(custom(row, m=1))


def test_gradients_are_reduced_after_they_were_added_to() -> None:
    check(custom("0F0 0B0 0REDUCE_GRAD 0F1 0B1 0REDUCE_GRAD", m=2))
    check(custom("0UNSHARD 0F0 0I0 0RESHARD 0W0 0REDUCE_GRAD", m=1))
    with pytest.raises(ScheduleError, match="never reduces the gradients of stage 0 after 0B1"):
        check(custom("0F0 0B0 0REDUCE_GRAD 0F1 0B1", m=2))


def test_memory_is_checked_at_the_action_that_goes_over() -> None:
    schedule = Schedule.build("gpipe", ranks=2, microbatches=3)
    check_memory(schedule, 3)
    with pytest.raises(ScheduleError, match="rank 1 holds 3 bytes of activations during 1F2: its limit is 2"):
        check_memory(schedule, [3, 2])


def test_a_long_schedule_shows_only_the_neighbourhood() -> None:
    schedule = Schedule.build("1f1b", ranks=2, microbatches=100)
    order = list(schedule.table[0])
    order[50], order[150] = order[150], order[50]
    with pytest.raises(ScheduleError) as error:
        check(replace(schedule, table=(tuple(order), schedule.table[1])))
    lines = str(error.value).splitlines()
    assert len(lines) < 35
    assert any("steps before" in line for line in lines)
    assert any("steps after" in line for line in lines)
