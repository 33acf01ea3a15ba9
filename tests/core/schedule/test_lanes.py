"""Work on lanes: closed forms, and what holds of any tasks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.schedule.lanes import COMPUTE, Task, run_lanes

GATHER, SUM = 1, 2


def end_of(tasks: list[Task], slowed: float = 0.0, ports: tuple[int, ...] = ()) -> float:
    return max(end for _, end in run_lanes(tasks, slowed, ports))


@pytest.mark.parametrize(("compute", "message", "slowed"), [(5, 2, 0.0), (5, 2, 0.25), (1, 4, 0.25), (3, 3, 1.0)])
def test_a_message_beside_computing(compute: float, message: float, slowed: float) -> None:
    """While the message is under way, computing gets on at 1 - slowed; then at its full rate."""
    done = message * (1 - slowed)
    expected = message + (compute - done) if compute > done else max(message, compute / (1 - slowed))
    assert end_of([Task(COMPUTE, compute), Task(GATHER, message)], slowed) == pytest.approx(expected)


def test_lanes_of_one_port_share_it() -> None:
    both = [Task(GATHER, 2.0), Task(SUM, 3.0)]
    assert run_lanes(both, 0.0, (0, 1, 1)) == [(0.0, 4.0), (0.0, 5.0)]
    assert run_lanes(both, 0.0, (0, 1, 2)) == [(0.0, 2.0), (0.0, 3.0)]


def test_a_pass_that_gathers_one_unit_ahead() -> None:
    """Units of 2 s whose gathers take 1 s: only the first is waited for. Where they take 3 s, each is."""
    for gather, expected in ((1.0, 1 + 4 * 2), (3.0, 4 * 3 + 2)):
        tasks: list[Task] = []
        for unit in range(4):
            freed = (2 * (unit - 2) + 1,) if unit >= 2 else ()
            tasks += [Task(GATHER, gather, freed), Task(COMPUTE, 2.0, (2 * unit,))]
        assert end_of(tasks) == pytest.approx(expected)


@st.composite
def some_tasks(draw: st.DrawFn) -> list[Task]:
    found: list[Task] = []
    for number in range(draw(st.integers(1, 12))):
        after = draw(st.lists(st.integers(0, number - 1), max_size=3)) if number else []
        seconds = draw(st.one_of(st.just(0.0), st.floats(0.01, 10)))
        found.append(Task(draw(st.integers(0, 3)), seconds, tuple(after)))
    return found


@given(some_tasks(), st.sampled_from([0.0, 0.3, 1.0]), st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_tasks(tasks: list[Task], slowed: float, shared: bool) -> None:
    ports = (0, 1, 1, 2) if shared else (0, 1, 2, 3)
    times = run_lanes(tasks, slowed, ports)
    last: dict[int, float] = {}
    for task, (start, end) in zip(tasks, times, strict=True):
        assert end - start >= task.seconds * (1 - 1e-9)
        assert start >= max((times[other][1] for other in task.after), default=0.0)
        assert start >= last.get(task.lane, 0.0)
        last[task.lane] = end
    end = max(end for _, end in times)
    by_port: dict[int, float] = {}
    for task in tasks:
        by_port[ports[task.lane]] = by_port.get(ports[task.lane], 0.0) + task.seconds
    assert end >= max(by_port.values()) * (1 - 1e-9), "no port carries more than time allows"
    assert end <= sum(task.seconds for task in tasks) * (1 + 1e-9)
    if slowed == 1.0 and not shared:
        lanes = {task.lane for task in tasks}
        if COMPUTE in lanes and len(lanes) == 2:
            assert end == pytest.approx(sum(task.seconds for task in tasks)), "then nothing is hidden"


@pytest.mark.parametrize("bad", [Task(COMPUTE, -1.0), Task(COMPUTE, float("nan")), Task(COMPUTE, 1.0, (1,))])
def test_bad_tasks_are_refused(bad: Task) -> None:
    with pytest.raises(ValueError, match="task 1 takes"):
        run_lanes([Task(COMPUTE, 1.0), bad], 0.0)
