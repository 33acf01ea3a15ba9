"""Memory over time: its fullest moment is the predicted peak, and everything that comes goes."""

from dataclasses import replace
from itertools import pairwise

import pytest

import shardwright as sw
from shardwright.backends.capabilities import JAX_MEMORY, TORCH_MEMORY
from shardwright.core.capabilities import PLAIN_MEMORY, MemoryTraits
from shardwright.core.plan.memory_over_time import memory_over_time
from tests.core.toy import decoder

GRAPH = decoder(layers=8, hidden=256, heads=8, vocabulary=1024, sequence=128)
CLUSTER = sw.Cluster("a100-80gb", devices_per_node=4)


@pytest.mark.parametrize(
    "pins",
    [
        {"pp": 4, "schedule": "1f1b"},
        {"pp": 4, "schedule": "gpipe"},
        {"pp": 2, "dp": 2, "schedule": "interleaved-1f1b", "virtual_stages": 2},
        {"pp": 4, "schedule": "zb-h1"},
        {"pp": 1, "dp": 4},
        {"pp": 1, "dp": 4, "batch": 4},
        {"pp": 2, "dp": 2, "schedule": "1f1b"},
        {"pp": 2, "dp": 2, "schedule": "interleaved-1f1b", "virtual_stages": 2, "batch": 4},
        {"pp": 2, "dp": 2, "schedule": "zbv", "virtual_stages": 2, "batch": 8},
    ],
)
@pytest.mark.parametrize(
    ("traits", "bucket_bytes"), [(PLAIN_MEMORY, 0), (JAX_MEMORY, 0), (TORCH_MEMORY, 2**20), (TORCH_MEMORY, 2**40)]
)
def test_the_fullest_moment_is_the_peak_and_activations_come_and_go(
    pins: dict[str, object], traits: MemoryTraits, bucket_bytes: int
) -> None:
    usual = {"dp": 1, "tp": 1, "recompute": "none", "shard": 0, "microbatch": 1, "batch": 64}
    traits = replace(traits, bucket_bytes=bucket_bytes)
    plan = sw.plan(replace(GRAPH, memory_traits=traits), CLUSTER, **(usual | pins))
    every = memory_over_time(plan, traits)
    assert len(every) == plan.decision.pp
    for moments, most in zip(every, plan.predicted.memory_by_stage_rank, strict=True):
        assert moments[0].start_s == 0.0
        assert moments[-1].end_s == pytest.approx(plan.predicted.step_time_s)
        assert all(a.end_s == b.start_s for a, b in pairwise(moments))
        assert max(m.memory.total_bytes for m in moments) == most.total_bytes
        assert max(m.memory.activations_bytes for m in moments) == most.activations_bytes
        assert moments[-1].memory.activations_bytes == 0
        assert moments[-1].memory.buffers_bytes == 0
        assert {m.memory.parameters_bytes for m in moments} == {most.parameters_bytes}


def test_earlier_ranks_of_1f1b_hold_more_microbatches_for_longer() -> None:
    plan = sw.plan(
        GRAPH, CLUSTER, batch=16, microbatch=1, pp=4, dp=1, tp=1, schedule="1f1b", recompute="none", shard=0,
        stage_starts=[0, 3, 5, 7],
    )  # fmt: skip
    kept = plan.stage_costs().activation_bytes
    first, *_, last = memory_over_time(plan)
    assert max(m.memory.activations_bytes for m in first) == 4 * kept[0]
    assert max(m.memory.activations_bytes for m in last) == kept[-1]


def test_gradients_that_are_made_anew_come_with_the_first_backward() -> None:
    fresh = replace(GRAPH, memory_traits=MemoryTraits(gradients_when_made=True))
    pair = sw.Cluster("a100-80gb", devices_per_node=2)
    plan = sw.plan(fresh, pair, batch=1, microbatch=1, pp=2, dp=1, tp=1, schedule="1f1b", recompute="none", shard=0)
    for moments, most in zip(memory_over_time(plan), plan.predicted.memory_by_stage_rank, strict=True):
        assert most.apart_bytes > 0
        assert moments[0].memory.gradients_bytes == 0
        assert moments[-1].memory.gradients_bytes == most.gradients_bytes
        assert max(m.memory.activations_bytes for m in moments) == most.activations_bytes
        # Nothing is taken off before there are gradients: what is there then is below the peak by itself.
        assert all(m.memory.apart_bytes == 0 for m in moments if m.memory.gradients_bytes == 0)


def test_frozen_stages_are_drawn_without_gradients() -> None:
    """Of a rank of two stages the gradients are all of the one that is trained, and come with its backward."""
    frozen = tuple(replace(p, trainable=p.name.startswith(("h.7", "ln_f", "head"))) for p in GRAPH.parameters)
    traits = MemoryTraits(gradients_when_made=True)
    plan = sw.plan(
        replace(GRAPH, parameters=frozen, memory_traits=traits), sw.Cluster("a100-80gb", devices_per_node=2),
        batch=4, microbatch=1, pp=2, dp=1, tp=1, recompute="none", shard=0, schedule="zbv", virtual_stages=2,
        stage_starts=[0, 3, 5, 8],
    )  # fmt: skip
    placement = plan.decision.stage_ranks
    last = placement[-1]
    for rank, (moments, most) in enumerate(
        zip(memory_over_time(plan, traits), plan.predicted.memory_by_stage_rank, strict=True)
    ):
        assert (most.gradients_bytes > 0) == (rank == last)
        assert {m.memory.gradients_bytes for m in moments} == {0, most.gradients_bytes}
