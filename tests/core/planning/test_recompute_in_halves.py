"""Recompute under split backwards: what plans count, and that a search takes it where it alone fits."""

from dataclasses import replace
from typing import Any

import pytest

import shardwright as sw
from shardwright.backends.capabilities import TORCH, TORCH_MEMORY
from shardwright.core.errors import PlanWarning
from tests.core.toy import decoder

GRAPH = replace(
    decoder(layers=8, hidden=128, heads=4, vocabulary=256, sequence=64), capabilities=TORCH, memory_traits=TORCH_MEMORY
)
PINS: dict[str, Any] = {"pp": 2, "dp": 1, "tp": 1, "microbatch": 4, "precision": "fp32", "shard": 0,
                        "stage_starts": [0, 5]}  # fmt: skip


def planned(graph: sw.Graph = GRAPH, **pins: Any) -> sw.Plan:
    return sw.plan(graph, sw.Cluster("a100-80gb", devices_per_node=2), batch=32, **PINS, **pins)


def test_the_second_forward_counts_once_and_in_the_input_gradient() -> None:
    none, full = (planned(schedule="zb-h1", recompute=recompute).stage_costs() for recompute in ("none", "full"))
    for stage in range(2):
        again = full.input_grad_s[stage] - none.input_grad_s[stage]
        assert 0 < again <= none.forward_s[stage] * (1 + 1e-9)
        assert full.weight_grad_s[stage] == pytest.approx(none.weight_grad_s[stage])
        assert full.forward_s[stage] == pytest.approx(none.forward_s[stage])


def test_what_waits_for_weight_gradients_counts() -> None:
    """Whole backwards leave nothing, and recompute saves most under them; split ones save something all the same."""
    peaks = {
        (schedule, recompute): planned(schedule=schedule, recompute=recompute).predicted.memory_by_stage_rank
        for schedule in ("1f1b", "zb-h1")
        for recompute in ("none", "full")
    }
    for rank in range(2):
        whole, split = (peaks[schedule, "full"][rank].activations_bytes for schedule in ("1f1b", "zb-h1"))
        assert whole < split < peaks["zb-h1", "none"][rank].activations_bytes


def test_a_search_takes_it_where_the_runtime_carries_it_out() -> None:
    most = max(planned(schedule="zb-h1", recompute="full").predicted.peak_memory_bytes)
    least = max(planned(schedule="zb-h1", recompute="none").predicted.peak_memory_bytes)
    between = (most + least) // 2
    assert most < between < least
    cluster = sw.Cluster("a100-80gb", devices_per_node=2)
    share = between / cluster.memory_bytes(0)
    pins = PINS | {"schedule": "zb-h1", "headroom": 1 - share}
    found = sw.plan(GRAPH, cluster, batch=32, **pins)
    assert found.decision.recompute == "full"
    assert max(found.predicted.peak_memory_bytes) <= between
    unable = replace(GRAPH, capabilities=replace(TORCH, recomputes_in_halves=False))
    with pytest.warns(PlanWarning, match="nothing that every runtime carries out fits"):
        sw.plan(unable, cluster, batch=32, **pins)
