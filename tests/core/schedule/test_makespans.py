"""Makespans of many cuts at once against the event engine."""

from itertools import product

import numpy as np
import pytest

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule import Schedule, StageCosts, schedule_names
from shardwright.core.schedule.catalogue import FAMILIES
from shardwright.core.schedule.family import Sizes
from shardwright.core.schedule.makespans import Makespans, StageSeconds
from shardwright.core.schedule.passes.buffer_limits import bound_buffers
from shardwright.core.schedule.passes.transfers import insert_transfers
from shardwright.core.schedule.simulate import simulate

CUTS = 5


def draw(stages: int, seed: int) -> tuple[StageSeconds, list[StageCosts]]:
    random = np.random.default_rng(seed)
    times, moves = random.lognormal(0.0, 1.0, (3, stages, CUTS)), random.uniform(0.0, 2.0, (stages - 1, CUTS))
    moves[random.uniform(size=moves.shape) < 0.2] = 0.0
    each = [StageCosts(*(tuple(row[:, cut].tolist()) for row in (*times, moves)), (1,) * stages) for cut in range(CUTS)]
    return StageSeconds(*times, moves), each


@pytest.mark.parametrize("name", schedule_names())
def test_makespans_are_those_of_the_event_engine(name: str) -> None:
    compared = 0
    for seed, (ranks, m, virtual) in enumerate(product((1, 2, 3, 4), (1, 2, 4, 6), (1, 2, 3))):
        if FAMILIES[name].refusal(Sizes(ranks, m, virtual)) is not None:
            continue
        schedule = Schedule.build(name, ranks=ranks, microbatches=m, virtual_stages=virtual)
        arrays, each = draw(schedule.stages, seed)
        expected = [simulate(schedule, costs).makespan_s for costs in each]
        assert Makespans.of(schedule).seconds(arrays) == pytest.approx(expected, rel=1e-12)
        compared += 1
    assert compared >= 6


def test_what_is_not_counted_is_refused() -> None:
    schedule = Schedule.build("1f1b", ranks=2, microbatches=4)
    for other in (insert_transfers(schedule), bound_buffers(schedule, 2)):
        with pytest.raises(ScheduleError, match="forwards and backwards alone"):
            Makespans.of(other)
