"""The peak of a rank from its moments is that of a walk through its actions, one after the other."""

import random
from collections.abc import Mapping, Sequence

import pytest

from shardwright.core.schedule.actions import Action, B, F, I, Kind, W
from shardwright.core.schedule.named_schedule import named_schedule
from shardwright.core.schedule.passes.sharding import insert_residency
from shardwright.core.tables.gathered_stages import gathering_moments
from shardwright.core.tables.stage_moments import StageMoments, StageSizes


def walked(order: Sequence[Action], stages: Mapping[int, StageSizes]) -> int:
    """The peak by what is there after each action, in bytes."""
    live = whole = under_way = most = 0
    sums: dict[int, int] = {}
    shards: dict[int, int] = {}
    for action in order:
        stage = stages[action.flat[0].stage]
        whole += {Kind.UNSHARD: stage.whole, Kind.RESHARD: -stage.whole}.get(action.kind, 0)
        if action.kind is Kind.REDUCE_GRAD:
            sums.pop(action.stage, None)
            under_way, shards[action.stage] = stage.under_way, stage.shard
        live += sum(stages[part.stage].activations for part in action.flat if part.kind is F)
        beside = 0
        for part in action.flat:
            own = stages[part.stage]
            if part.kind is W:
                sums[part.stage] = own.sums
            is_first = part.stage not in (sums if own.sums else shards)
            later = own.backward if own.sums else max(own.tail, own.backward - under_way)
            beside += {
                F: own.passing, I: own.input_grad, W: own.weighing, B: own.first_backward if is_first else later,
            }.get(part.kind, 0)  # fmt: skip
            if part.kind is B and not own.sums:
                shards[part.stage] = own.shard
        most = max(most, live + beside + whole + sum(sums.values()) + sum(shards.values()) + under_way)
        for part in action.flat:
            own = stages[part.stage]
            if part.kind is F and not own.sums:
                under_way = 0
            if part.kind is B:
                sums[part.stage] = own.sums
                ended = live - own.activations + whole + sum(sums.values()) + sum(shards.values())
                most = max(most, ended + own.under_way)
        for part in action.flat:
            own = stages[part.stage]
            freed = {B: own.activations, I: own.freed_by_input_grad, W: own.activations - own.freed_by_input_grad}
            live -= freed.get(part.kind, 0)
    return most


@pytest.mark.parametrize("reduces_each", [True, False])
@pytest.mark.parametrize("gathered", [None, 2, 3])
@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "virtual"),
    [
        ("gpipe", 2, 4, 1),
        ("zb-h1", 3, 6, 1),
        ("interleaved-1f1b", 2, 8, 4),
        ("interleaved-zb", 2, 8, 3),
        ("looped-bfs", 2, 6, 4),
        ("v-half", 3, 9, 2),
        ("dualpipev", 2, 8, 2),
    ],
)
def test_the_peak_is_that_of_a_walk(
    name: str, ranks: int, microbatches: int, virtual: int, gathered: int | None, reduces_each: bool
) -> None:
    schedule = named_schedule(name, ranks, microbatches, virtual)
    table = insert_residency(schedule, gathered, None, reduces_each=reduces_each).table
    moments, chance = StageMoments(table), random.Random(0)
    found_by_rank = gathering_moments(name, ranks, microbatches, virtual, gathered, None, reduces_each)
    for _ in range(5):
        for rank, order in enumerate(table):
            stages = {}
            for stage in sorted({part.stage for action in order for part in action.flat}):
                sizes = StageSizes(*(chance.randrange(1000) for _ in StageSizes._fields))
                freed = chance.randrange(-50, sizes.activations + 1)
                no_sums = reduces_each or chance.random() < 0.2
                stages[stage] = sizes._replace(freed_by_input_grad=freed, sums=0 if no_sums else 1 + sizes.sums)
            assert moments.peak(rank, stages) == found_by_rank.peak(rank, stages) == walked(order, stages)
