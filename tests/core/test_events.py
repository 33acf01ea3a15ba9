"""The event engine: its two queues, resources, memory and the log."""

import numpy as np

from shardwright.core.events import NOTHING, Engine, Log, Memory, Resource


class Recorder:
    """A policy that notes when it is asked about what, and does then what it was told to."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.asked = engine, list[tuple[float, int]]()
        self.then: dict[int, list[tuple[str, object]]] = {}

    def advance(self, resource: int) -> None:
        self.asked.append((self.engine.now_s, resource))
        for what, given in self.then.pop(resource, []):
            getattr(self.engine, what)(*given) if isinstance(given, tuple) else getattr(self.engine, what)(given)


def test_what_is_due_comes_in_the_order_of_time_and_of_numbers_once_each() -> None:
    engine = Engine()
    policy = Recorder(engine)
    for time, resource in ((2.0, 1), (1.0, 5), (1.0, 2), (2.0, 0), (1.0, 5)):
        engine.ask_at(time, resource)
    policy.then[2] = [("ask_at", (1.0, 3)), ("ask_at", (1.5, 9))]
    engine.run(policy)
    assert policy.asked == [(1.0, 2), (1.0, 3), (1.0, 5), (1.5, 9), (2.0, 0), (2.0, 1)]


def test_lists_go_ahead_of_what_is_due_and_wait_for_what_is_announced() -> None:
    engine = Engine()
    policy = Recorder(engine)
    engine.ask_at(1.0, 7)
    engine.ask(0)
    engine.ask(1)
    policy.then = {0: [("wait", ("tensor", 0))], 1: [("announce", "tensor"), ("announce", "nothing waits for it")]}
    engine.run(policy)
    assert [resource for _, resource in policy.asked] == [0, 1, 0, 7]


def test_a_resource_serves_first_come_first_and_says_what_was_waited_for() -> None:
    link = Resource()
    assert link.take(1.0, 4, 2.0, -2) == (1.0, 3.0, 4)
    assert link.take(2.0, 5, 2.0, -3) == (3.0, 5.0, -2)
    assert link.take(5.0, 6, 1.0, -4) == (5.0, 6.0, 6)
    assert (link.free_s, link.last) == (6.0, -4)


def test_memory_has_a_capacity_and_keeps_its_use_over_time() -> None:
    memory = Memory(10)
    memory.take(0.0, 6)
    assert memory.has_room(4)
    assert not memory.has_room(5)
    memory.take(1.0, 4)
    memory.take(1.0, -6)
    memory.take(2.0, 0)
    times, sizes = memory.over_time()
    assert (times.tolist(), sizes.tolist()) == ([0.0, 1.0], [6, 4])
    assert Memory().has_room(1 << 60)


def test_a_log_of_decisions_is_numbered_lane_after_lane() -> None:
    log = Log()
    first = log.add(1, 0.0, 1.0, NOTHING)
    second = log.add(0, 1.0, 2.0, first)
    log.add(1, 2.0, 3.0, second)
    log.add(3, 3.0, 4.0, -2)
    times = log.by_lane(4)
    assert [row.tolist() for row in times.start_s] == [[1.0], [0.0, 2.0], [], [3.0]]
    assert [row.tolist() for row in times.cause] == [[1], [NOTHING, 0], [], [-2]]
    assert times.order is not None
    assert times.order.tolist() == [1, 0, 2, 3]
    listed = Log.of_lists([2, 0, 1])
    listed.end_s[:] = [1.0, 2.0, 3.0]
    assert [row.tolist() for row in listed.by_lane(3).end_s] == [[1.0, 2.0], [], [3.0]]
    assert np.concatenate(Log().by_lane(2).cause).tolist() == []
