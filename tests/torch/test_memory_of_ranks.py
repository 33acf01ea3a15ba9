"""Predicted memory of every rank against what torch holds, as torch's own MemTracker follows it, in processes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

import shardwright as sw
from shardwright.backends.torch.state.ownership import place
from shardwright.core.layout.placements import Replicate
from shardwright.core.plan.realised_layouts import realise

ROOT = Path(__file__).parents[2]


def resnet_plan(tp: int) -> tuple[sw.Graph, sw.Plan]:
    config = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic", num_labels=10)
    batch = {"pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.randint(0, 10, (4,))}
    graph = sw.capture(ResNetForImageClassification(config).train(), batch)
    pins = {
        "pp": 1,
        "dp": 1,
        "tp": tp,
        "precision": "fp32",
        "recompute": "none",
        "shard": 0,
        "microbatch": 4,
        "sequence_parallel": False,
    }
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


class Scaled(nn.Module):
    """A block with a buffer that it reads and one that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("scale", torch.ones(64))
        self.register_buffer("unread", torch.zeros(1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * self.scale


class Masked(nn.Module):
    """Blocks, and buffers of the model itself, which no stage's modules hold."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(4))
        self.register_buffer("mask", torch.ones(3000, 64))
        self.register_buffer("unread", torch.zeros(5000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x * self.mask[0])
        return x.pow(2).mean()


def test_buffers_count_on_every_rank_that_holds_them() -> None:
    """As the runtime places them."""
    model = Masked()
    graph = sw.capture(model, {"x": torch.randn(4, 64)})
    pins = {"pp": 2, "dp": 1, "tp": 1, "schedule": "1f1b", "precision": "fp32", "recompute": "none", "shard": 0}
    plan = sw.plan(graph, sw.Cluster("cpu", devices_per_node=2), batch=8, microbatch=4, **pins)
    binding = plan.binding("torch")
    calls = [[call.path for unit in units for call in binding.units[unit].calls] for units in plan.stage_units]
    placed = place(model, calls, plan.parameter_stages("torch"), lambda stage: stage, 2)
    buffers = dict(model.named_buffers())
    held = [sum(buffers[name].nbytes for name, ranks in placed.buffers.items() if rank in ranks) for rank in range(2)]
    assert min(held) > buffers["mask"].nbytes
    assert [use.model_buffers_bytes for use in plan.predicted.memory] == held


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
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        *((model, plan) for model in ("resnet", "t5", "bert") for plan in ("pp 2", "dp 2", "tp 2")),
        *((model, "dp 2, bf16") for model in ("gpt2", "bert", "t5")),
        *(("ncf", f"dp 2, shard {level}") for level in (1, 2, 3)),
        *((model, "dp 2, shard 3") for model in ("gpt2", "bert", "t5")),
        ("ncf", "dp 2, shard 3, sums at the end"),
        *(("gpt2, frozen, low-rank maps beside", plan) for plan in ("dp 2, bf16", "dp 2, shard 3, bf16")),
    ],
)
def test_no_rank_takes_more_than_predicted_nor_3_percent_less(model: str, plan: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/memory_ranks.py"), "--models", model, "--plans", plan]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert f"| {model} | {plan} |" in done.stdout
