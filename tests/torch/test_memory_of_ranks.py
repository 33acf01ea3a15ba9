"""Predicted memory of every rank against what torch holds, as torch's own MemTracker follows it, in processes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import ResNetConfig, ResNetForImageClassification

import shardwright as sw
from shardwright.core.layout import Replicate
from shardwright.core.realise import realise

ROOT = Path(__file__).parents[2]


def resnet_plan(tp: int) -> tuple[sw.Graph, sw.Plan]:
    config = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic", num_labels=10)
    batch = {"pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.randint(0, 10, (4,))}
    graph = sw.capture(ResNetForImageClassification(config).train(), batch)
    pins = {"pp": 1, "dp": 1, "tp": tp, "precision": "fp32", "recompute": "none", "shard": 0, "microbatch": 4}
    return graph, sw.plan(graph, sw.Cluster("cpu", devices_per_node=tp), batch=8, **pins)


def test_what_two_units_keep_whole_on_a_tensor_axis_counts_once() -> None:
    """What goes from block to block is whole on every rank: the rectifier before and the convolution after keep it."""
    graph, plan = resnet_plan(2)
    units = realise(graph, plan)
    leaving = [dict(unit.leaves) for unit in units[1:4]]
    assert all(layout.on("tp") == Replicate() for of_unit in leaving for layout in of_unit.values())
    between = sum(graph.tensors[tensor].size_bytes(4) for of_unit in leaving for tensor in of_unit)
    assert between > 0
    held = sum(plan.costs.classes[plan.costs.unit_classes[unit]].activation_bytes for unit in range(len(units)))
    assert held - plan.predicted.memory[0].activations_bytes == between


def test_replicas_remember_running_statistics() -> None:
    """In fp64, all through the step; beside them every rank holds the statistics themselves."""
    graph, plan = resnet_plan(1)
    floats = sum(t.elements(1) for t in graph.tensors if t.role == "buffer" and t.is_floating)
    counts = sum(t.role == "buffer" and not t.is_floating for t in graph.tensors)
    assert plan.predicted.memory[0].model_buffers_bytes == 4 * floats + 8 * counts
    pins = {"pp": 1, "dp": 2, "tp": 1, "precision": "fp32", "recompute": "none", "shard": 0, "microbatch": 4}
    two = sw.plan(graph, sw.Cluster("cpu", devices_per_node=2), batch=16, **pins)
    assert two.predicted.memory[0].model_buffers_bytes == 4 * floats + 8 * counts + 8 * floats


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["pp 2", "dp 2", "tp 2"])
@pytest.mark.parametrize("model", ["resnet", "t5", "bert"])
def test_no_rank_takes_more_than_predicted_nor_3_percent_less(model: str, plan: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/memory_ranks.py"), "--models", model, "--plans", plan]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert f"| {model} | {plan} |" in done.stdout
