"""The bits of simulated schedules. They are those of the engine that ran schedules alone, before jobs had it too."""

import hashlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule import Schedule, StageCosts, schedule_names
from shardwright.core.schedule.catalogue import FAMILIES
from shardwright.core.schedule.passes import bound_buffers, insert_transfers
from shardwright.core.schedule.simulate import simulate_schedule
from shardwright.core.schedule.timeline import Timeline

Case = tuple[Schedule, tuple[StageCosts, ...], str]
SIZES = ((1, 3, 1), (2, 4, 1), (3, 6, 1), (4, 8, 1), (2, 4, 2), (4, 8, 2), (3, 6, 3))
"""Ranks, microbatches, virtual stages."""
DIGESTS = {
    "plain": "64c0d545ac2234ad",
    "slices": "4cb0ba9d0f166eae",
    "explicit": "9fc1065aa2c1caf8",
    "blocking": "3c57640fdffd639f",
    "credits": "d1953caff371bf84",
    "sharing": "74990037ccc5aabb",
}


def draw_costs(draw: random.Random, stages: int, **shared: object) -> StageCosts:
    """Costs of no round numbers, so that sums in another order have other bits."""
    rows = [tuple(draw.uniform(0.3, 2.0) for _ in range(stages)) for _ in range(3)]
    transfer = tuple(draw.uniform(0.0, 1.0) for _ in range(stages - 1))
    return StageCosts(*rows, transfer, tuple(draw.randrange(9) for _ in range(stages)), **shared)


def cases(group: str) -> Iterator[Case]:
    draw = random.Random(group)
    for name, (ranks, m, v) in itertools.product(schedule_names(), SIZES):
        slices = 3 if group == "slices" else 1
        if slices > 1 and not FAMILIES[name].takes_slices:
            continue
        try:
            schedule = Schedule.build(name, ranks=ranks, microbatches=m, virtual_stages=v, slices=slices)
            if group == "credits":
                schedule = bound_buffers(schedule, 2)
        except ScheduleError:  # other sizes, or buffers for more
            continue
        costs = tuple(draw_costs(draw, schedule.stages) for _ in range(slices))
        if group == "sharing":
            for shared in ({"overlap": 0.4}, {"sender_waits": True}, {"overlap": 1.0, "sender_waits": True}):
                yield schedule, (draw_costs(draw, schedule.stages, **shared),), "asynchronous"
            whole = tuple(1.1 * seconds for seconds in costs[0].backward_s)
            yield schedule, (replace(costs[0], whole_backward_s=whole),), "asynchronous"
        elif group in ("explicit", "blocking"):
            yield insert_transfers(schedule, blocking=group == "blocking"), costs, (
                "blocking" if group == "blocking" else "asynchronous"
            )  # fmt: skip
        else:
            yield schedule, costs, "asynchronous"


def bits_of(timeline: Timeline) -> Iterator[bytes]:
    """Starts, ends and causes of all that ran, rank after rank, then the transfers and their causes."""
    assert timeline.cause is not None
    assert timeline.transfer_cause is not None
    for rows in (timeline.start_s, timeline.end_s, timeline.cause):
        for row in rows:
            yield row.tobytes()
    for t in timeline.transfers:
        yield f"{t.action.text} {t.source} {t.target} {t.start_s.hex()} {t.end_s.hex()}\n".encode()
    yield timeline.transfer_cause.tobytes()


@pytest.mark.parametrize("group", DIGESTS)
def test_times_are_the_same_to_the_last_bit(group: str) -> None:
    digest, count = hashlib.sha256(), 0
    for schedule, costs, transfers in cases(group):
        count += 1
        for part in bits_of(simulate_schedule(schedule, costs, transfers=transfers)):
            digest.update(part)
    assert count >= 20
    assert digest.hexdigest()[:16] == DIGESTS[group]
