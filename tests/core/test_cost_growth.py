"""Predictions for large models on many devices: what grows when something grows, and nothing jumps."""

import itertools
from functools import cache

import pytest

import shardwright as sw
from shardwright.core.cluster.groups import Group
from shardwright.core.cluster.hardware import load_link
from shardwright.core.cost.unit_seconds import seconds_of
from shardwright.core.cost.work import Collective
from shardwright.core.errors import ClusterError
from tests.core.toy import decoder

HIDDEN, LAYERS, VOCABULARY, SEQUENCE = 12288, 96, 51200, 2048
GRAPH = decoder(layers=LAYERS, hidden=HIDDEN, heads=96, vocabulary=VOCABULARY, sequence=SEQUENCE)
MODEL_FLOPS = 72 * SEQUENCE * LAYERS * HIDDEN**2 * (1 + SEQUENCE / (6 * HIDDEN) + VOCABULARY / (12 * LAYERS * HIDDEN))
"""Forward and backward of a sample (arXiv 2104.04473, section 3, without what is computed again)."""


@cache
def step_s(pp: int, dp: int, tp: int, batch: int, microbatch: int = 1, virtual_stages: int = 1) -> float:
    """Of 175 billion parameters with everything computed again, on nodes of eight."""
    plan = sw.plan(
        GRAPH, sw.Cluster.preset("dgx-a100", nodes=-(-pp * dp * tp // 8)), batch=batch, pp=pp, dp=dp, tp=tp,
        microbatch=microbatch, virtual_stages=virtual_stages, shard=1, recompute="full", precision="fp16",
        schedule="interleaved-1f1b" if virtual_stages > 1 else "1f1b", sequence_parallel=False,
    )  # fmt: skip
    return plan.predicted.step_time_s


def share_of_peak(seconds: float, batch: int, devices: int) -> float:
    return MODEL_FLOPS * batch / seconds / devices / 312e12


@pytest.mark.parametrize("pp", [8, 16])
def test_a_large_model_reaches_a_plausible_share_of_the_peak(pp: int) -> None:
    """Products reach under 90% of the peak and a third of the work is done again: no more than two thirds is left; less
    than a third would mean that links or bubbles rule, which they do not inside nodes and with many microbatches."""
    share = share_of_peak(step_s(pp, 128 // pp, 8, 1536), 1536, 1024)
    assert 0.3 < share < 0.62


def test_replicas_cost_a_little_each_and_never_jump() -> None:
    """Weak scaling: the work of a replica is the same, its gradients go over more links."""
    times = [step_s(8, dp, 8, 96 * dp) for dp in (1, 2, 4, 8, 16, 32)]
    for fewer, more in itertools.pairwise(times):
        assert fewer <= more <= 1.06 * fewer
    assert times[-1] < 1.1 * times[0]


def test_more_microbatches_take_as_much_longer_and_dilute_the_bubble() -> None:
    times = {
        count: step_s(16, 1, 8, count) for count in (16, 32, 48, 64, 80, 96, 128)
    }  # 80: extrapolated from there on
    each = [times[more] - times[fewer] for fewer, more in itertools.pairwise(times)]
    steps = [more - fewer for fewer, more in itertools.pairwise(times)]
    slopes = [taken / count for taken, count in zip(each, steps, strict=True)]
    assert max(slopes) < 1.02 * min(slopes)
    rates = [count / taken for count, taken in times.items()]
    assert rates == sorted(rates)


def test_longer_pipelines_idle_more_and_interleaving_idles_less() -> None:
    per_device = [step_s(pp, 1, 8, 64) * pp for pp in (8, 16, 32)]
    assert per_device == sorted(per_device)
    assert step_s(16, 1, 8, 64, virtual_stages=3) < step_s(16, 1, 8, 64, virtual_stages=2) < step_s(16, 1, 8, 64)


def test_large_microbatches_leave_a_long_pipeline_waiting() -> None:
    assert step_s(16, 1, 8, 64, microbatch=4) > step_s(16, 1, 8, 64, microbatch=1)


def test_a_tensor_axis_that_leaves_the_node_is_slower() -> None:
    assert step_s(8, 1, 16, 64) > step_s(16, 1, 8, 64)


def test_a_collective_without_a_cost_is_refused_by_name() -> None:
    seconds = seconds_of(Group(8, 1, load_link("nvlink3")), 8)
    with pytest.raises(ClusterError, match=r"'all_gatter' has no cost: did you mean 'all_gather'\? known: all_gather"):
        seconds(Collective("all_gatter", 1 << 20))


def test_tied_gradients_are_added_up_in_the_precision_of_all_gradients() -> None:
    """Where there are no replicas the table that the first and the last stage share is all that is reduced."""
    pins = {"pp": 8, "dp": 1, "tp": 8, "batch": 32, "microbatch": 1, "shard": 0, "recompute": "full"}
    cluster = sw.Cluster.preset("dgx-a100", nodes=8)
    half, whole = (
        sw.plan(GRAPH, cluster, precision="fp16", gradient_precision=kept, schedule="1f1b", **pins).predicted  # type: ignore[arg-type]
        for kept in ("fp16", "fp32")
    )
    assert half.data_parallel_s > 0
    assert whole.data_parallel_s == pytest.approx(2 * half.data_parallel_s, rel=0.05)
