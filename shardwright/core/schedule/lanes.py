"""Work on the lanes of one device: a compute stream, and a stream for each communicator, each in its own order.

A task starts when the task before it on its lane and all that it waits for are done. Limits on what is gathered ahead,
and the order in which gradients become whole, are such waits. Lanes that send over one port share its bandwidth. While
any message is under way, computing goes on at ``1 - slowed`` of its rate, as the message takes a part of the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

COMPUTE = 0
"""The lane of the compute stream; all others are lanes of messages."""


@dataclass(frozen=True, slots=True)
class Task:
    """A piece of work: its lane, its seconds when it runs alone, and the tasks, by number, that it waits for."""

    lane: int
    seconds: float
    after: tuple[int, ...] = ()


def run_lanes(tasks: Sequence[Task], slowed: float, ports: Sequence[int] = ()) -> list[tuple[float, float]]:
    """The (start, end) of each task, in seconds.

    Args:
        tasks: in the order in which each lane runs its own; a task waits for earlier ones only.
        slowed: the share of the compute rate that messages under way take, from 0 to 1.
        ports: the port of each lane; lanes of one port share it. Empty: each has its own.

    Raises:
        ValueError: a task waits for a later one, or its seconds are below 0 or not a number.
    """
    for number, task in enumerate(tasks):
        if not task.seconds >= 0 or any(not 0 <= other < number for other in task.after):
            raise ValueError(f"task {number} takes {task.seconds} s after {task.after}: expected earlier tasks alone")
    queues: dict[int, list[int]] = {}
    for number, task in enumerate(tasks):
        queues.setdefault(task.lane, []).append(number)
    port = {lane: ports[lane] if ports else lane for lane in queues}
    heads = dict.fromkeys(queues, 0)
    times: list[tuple[float, float]] = [(0.0, -1.0)] * len(tasks)
    left: dict[int, float] = {}
    """The seconds of work left of the task that runs on each lane."""
    now = 0.0
    while True:
        started = True
        while started:  # tasks without work end at once, and others may wait for them
            started = False
            for lane, queue in queues.items():
                if lane in left or heads[lane] == len(queue):
                    continue
                number = queue[heads[lane]]
                if any(times[other][1] < 0 for other in tasks[number].after):
                    continue
                started = True
                if tasks[number].seconds:
                    times[number], left[lane] = (now, -1.0), tasks[number].seconds
                else:
                    times[number], heads[lane] = (now, now), heads[lane] + 1
        if not left:
            return times
        sending: dict[int, int] = {}
        for lane in left:
            if lane != COMPUTE:
                sending[port[lane]] = sending.get(port[lane], 0) + 1
        rates = {
            lane: ((1 - slowed) if sending else 1.0) if lane == COMPUTE else 1 / sending[port[lane]] for lane in left
        }
        step = min(left[lane] / rate for lane, rate in rates.items() if rate > 0)
        now += step
        for lane in list(left):
            left[lane] -= step * rates[lane]
            if rates[lane] > 0 and left[lane] <= 1e-12 * tasks[queues[lane][heads[lane]]].seconds:
                number = queues[lane][heads[lane]]
                times[number] = (times[number][0], now)
                heads[lane] += 1
                del left[lane]
