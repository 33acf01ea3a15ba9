"""The parts of a step add up, and each is what it says."""

from pathlib import Path
from typing import Any

import pytest

import shardwright as sw
from shardwright import Cluster
from shardwright.core.cluster.cluster import NodeGroup
from shardwright.core.cluster.hardware import load_device, load_link
from shardwright.core.plan.breakdown import break_down
from tests.core.toy import decoder

USUAL = {"schedule": "1f1b", "virtual_stages": 1, "placement_order": "PDT"}
GRAPH = decoder(layers=8, hidden=256, heads=8, vocabulary=1024, sequence=128)


@pytest.mark.parametrize(
    "pins", [{"pp": 4, "dp": 2, "tp": 2}, {"pp": 1, "dp": 16, "tp": 1}, {"pp": 8, "dp": 2, "tp": 1}]
)
def test_the_parts_add_up_to_the_step_on_every_rank(pins: dict[str, int]) -> None:
    plan = sw.plan(
        GRAPH, Cluster("a100-80gb", nodes=2, devices_per_node=8), batch=64, microbatch=2, shard=0, **USUAL, **pins
    )
    parts = break_down(plan)
    assert len(parts) == plan.decision.pp
    for part in parts:
        assert part.total_s == pytest.approx(plan.predicted.step_time_s, rel=1e-6)
        assert min(part.compute_s, part.gradients_s, part.optimizer_s) > 0
        assert min(part.transfer_s, part.bubble_s) >= 0
        assert (part.tensor_s > 0) == (plan.decision.tp > 1)
    assert max(part.tensor_s for part in parts) == pytest.approx(plan.predicted.tensor_collective_s)


def test_replicas_on_unlike_devices_take_the_time_of_the_slower(tmp_path: Path) -> None:
    fast, slow = (NodeGroup(load_device(name), 1, 4, load_link("nvlink2")) for name in ("a100-80gb", "v100"))
    pins: dict[str, Any] = {"pp": 1, "dp": 8, "tp": 1, "batch": 64, "microbatch": 2, "shard": 0, "precision": "fp16"}
    for groups in ((fast, slow), (slow, fast)):
        plan = sw.plan(GRAPH, Cluster.of_groups(groups, "efa-400g"), **pins)
        plan.save(tmp_path / "plan.json")
        (part,) = break_down(sw.Plan.load(tmp_path / "plan.json"))
        assert part.total_s == pytest.approx(plan.predicted.step_time_s, rel=1e-6)


def test_full_recompute_runs_collectives_of_the_forward_again() -> None:
    pins: dict[str, Any] = {"pp": 1, "dp": 1, "tp": 4, "batch": 16, "microbatch": 4, "sequence_parallel": False}
    cluster = Cluster("a100-80gb", devices_per_node=4)
    plans = [sw.plan(GRAPH, cluster, recompute=recompute, **pins) for recompute in ("none", "full")]
    once, again = (plan.predicted.tensor_collective_s for plan in plans)
    assert 1.3 * once < again < 1.5 * once  # of the layers, half are the forward's; the rest of the model runs once
    for plan in plans:
        assert break_down(plan)[0].tensor_s == pytest.approx(plan.predicted.tensor_collective_s)


def test_slow_links_are_transfers_and_few_microbatches_are_bubbles() -> None:
    pins = {"pp": 4, "dp": 1, "tp": 1, "microbatch": 1, **USUAL}
    fast = Cluster("a100-80gb", nodes=4, devices_per_node=1)
    slow = Cluster("a100-80gb", nodes=4, devices_per_node=1, inter_node="ethernet-10g")
    near, far = (break_down(sw.plan(GRAPH, c, batch=16, **pins))[0] for c in (fast, slow))
    assert far.transfer_s > 3 * near.transfer_s
    few, many = (break_down(sw.plan(GRAPH, fast, batch=b, **pins)) for b in (4, 64))
    idle, rarely = (
        sum(part.bubble_s for part in parts) / sum(part.compute_s for part in parts) for parts in (few, many)
    )
    assert idle > 2 * rarely
