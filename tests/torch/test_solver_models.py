"""Layouts of well-known models: Megatron's come out, or cheaper ones."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.layout.placements import Placement, Split
from shardwright.core.model.fold import fold
from shardwright.core.solver import AxisCost, Setting, Solution, lightest_bytes, solve

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "layouts.py"
RANKS = 4


def benchmark():  # type: ignore[no-untyped-def]
    spec = importlib.util.spec_from_file_location("layouts_benchmark", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def placements(graph: sw.Graph, found: Solution) -> dict[str, Placement]:
    return {graph.tensors[t].name: layout.on("tp") for t, layout in found.layouts().items()}


COLUMNS = {
    "gpt2": ("transformer.h.1.attn.c_attn.weight", "transformer.h.1.mlp.c_fc.weight"),
    "bert": tuple(f"bert.encoder.layer.1.attention.self.{x}.weight" for x in ("query", "key", "value")),
    "llama": tuple(f"model.layers.1.{x}_proj.weight" for x in ("self_attn.q", "self_attn.k", "mlp.gate", "mlp.up")),
    "vit": ("vit.layers.1.attention.q_proj.weight", "vit.layers.1.mlp.fc1.weight"),
    "t5": ("decoder.block.1.layer.0.SelfAttention.q.weight", "encoder.block.1.layer.0.SelfAttention.q.weight"),
}
ROWS = {
    "gpt2": ("transformer.h.1.attn.c_proj.weight", "transformer.h.1.mlp.c_proj.weight"),
    "bert": ("bert.encoder.layer.1.attention.output.dense.weight", "bert.encoder.layer.1.output.dense.weight"),
    "llama": ("model.layers.1.self_attn.o_proj.weight", "model.layers.1.mlp.down_proj.weight"),
    "vit": ("vit.layers.1.attention.o_proj.weight", "vit.layers.1.mlp.fc2.weight"),
    "t5": ("decoder.block.1.layer.0.SelfAttention.o.weight", "encoder.block.1.layer.1.DenseReluDense.wo.weight"),
}


@pytest.mark.parametrize(
    "name", ["gpt2", "llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("bert", "t5", "vit"))]
)
def test_finds_megatron(name: str) -> None:
    """Column then row parallel products, and no more bytes than one all-reduce per sublayer each way."""
    module = benchmark()
    graph, found, _ = module.solved(name, RANKS)
    lies = placements(graph, found)
    column, row = (1, 0) if name == "gpt2" else (0, 1)
    for weight in COLUMNS[name]:
        assert isinstance(lies[weight], Split), weight
        assert lies[weight].dim == column, weight
    for weight in ROWS[name]:
        assert lies[weight] == Split(row), weight
    _, moved, _ = module.block_bytes(graph, found, RANKS)
    length = 197 if name == "vit" else module.LENGTH
    formula = module.ALL_REDUCES.get(name, 4) * 2 * (RANKS - 1) * module.BATCH * length * module.HIDDEN * 2
    assert 0 < moved <= formula


@pytest.mark.slow
def test_experts_are_split() -> None:
    graph, found, _ = benchmark().solved("mixtral", RANKS)
    lies = placements(graph, found)
    for layer in range(3):
        for weight in ("gate_up_proj", "down_proj"):
            assert isinstance(lies[f"model.layers.{layer}.mlp.experts.{weight}"], Split)


class Rating(nn.Module):
    """Neural collaborative filtering: two tables of unequal rows, a few dense layers."""

    def __init__(self, users: int = 400_000, items: int = 60_000, width: int = 10) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.hidden, self.out = nn.Linear(2 * width, 30), nn.Linear(30, 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.users(user), self.items(item)], -1)
        score = self.out(torch.relu(self.hidden(both))).squeeze(-1)
        return nn.functional.binary_cross_entropy_with_logits(score, label)


def test_tables_too_narrow_to_split_by_columns_are_split_by_rows() -> None:
    with torch.device("meta"):
        model = Rating()
        sample = (torch.empty(4, dtype=torch.long), torch.empty(4, dtype=torch.long), torch.empty(4))
    graph = sw.capture(model, sample)
    folded, counter = fold(graph), WorkCounter(graph)
    setting = Setting((AxisCost("tp", RANKS, 2e11, 5e-6),), 4e14, 1.5e12, batch=64)
    limit = 1.1 * lightest_bytes(folded, setting, counter)
    lies = placements(graph, solve(folded, setting, memory_limit_bytes=limit, counter=counter))
    assert lies["users.weight"] == lies["items.weight"] == Split(0)


@pytest.mark.slow
def test_llama_70b_on_eight_by_eight() -> None:
    found, _ = benchmark().llama_70b()
    assert len(found.units) == 82
    assert found.gap == 0.0
    used = {axis for layout in found.layouts().values() for axis, _ in layout.placements}
    assert used == {"inner", "outer"}
