"""Megatron's layouts of GPT-2 are found whatever its parts are called and however its products are written."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import T5Config, T5ForConditionalGeneration

import shardwright as sw
from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.model.fold import fold
from shardwright.core.plan.realised_layouts import realise

WIDTH, HEADS, LENGTH, VOCABULARY, RANKS = 512, 8, 128, 8192, 4


class Renamed(nn.Module):
    """nn.Linear, which keeps [out, in], under names of no meaning."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.alpha, self.beta = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gamma, self.delta = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.alpha(self.n1(x)).split(WIDTH, -1)
        q, k, v = (p.view(*p.shape[:2], HEADS, -1).transpose(1, 2) for p in parts)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.beta(a)
        return x + self.delta(F.gelu(self.gamma(self.n2(x))))


class Transposed(nn.Module):
    """Weights [in, out], as GPT-2's own Conv1D keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        sizes = {"qkv": (WIDTH, 3 * WIDTH), "o": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
        for name, size in sizes.items():
            setattr(self, name, nn.Parameter(torch.empty(size)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (self.n1(x) @ self.qkv).split(WIDTH, -1)
        q, k, v = (p.view(*p.shape[:2], HEADS, -1).transpose(1, 2) for p in parts)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + a @ self.o
        return x + F.gelu(self.n2(x) @ self.up) @ self.down


class Einsum(nn.Module):
    """Heads as a dim of the weights; no view, no fused matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        by_head = (WIDTH, HEADS, WIDTH // HEADS)
        self.q, self.k, self.v = (nn.Parameter(torch.empty(by_head)) for _ in range(3))
        self.o = nn.Parameter(torch.empty(HEADS, WIDTH // HEADS, WIDTH))
        self.up, self.down = nn.Parameter(torch.empty(WIDTH, 4 * WIDTH)), nn.Parameter(torch.empty(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.n1(x)
        q, k, v = (torch.einsum("bsd,dhw->bhsw", y, w) for w in (self.q, self.k, self.v))
        scores = torch.einsum("bhsw,bhtw->bhst", q, k) / (WIDTH // HEADS) ** 0.5
        a = torch.einsum("bhst,bhtw->bhsw", scores.softmax(-1), v)
        x = x + torch.einsum("bhsw,hwd->bsd", a, self.o)
        return x + torch.einsum("bsf,fd->bsd", F.gelu(torch.einsum("bsd,df->bsf", self.n2(x), self.up)), self.down)


class Model(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.stack = nn.ModuleList(block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.stack:
            x = block(x)
        logits = self.norm(x) @ self.words.weight.T
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


COLUMNS = {
    Renamed: {"alpha.weight": 0, "gamma.weight": 0, "beta.weight": 1, "delta.weight": 1},
    Transposed: {"qkv": 1, "up": 1, "o": 0, "down": 0},
    Einsum: {"q": 1, "k": 1, "v": 1, "up": 1, "o": 0, "down": 0},
}


@pytest.mark.parametrize("block", list(COLUMNS), ids=lambda block: block.__name__)
def test_column_and_row_parallel_with_one_all_reduce_per_sublayer_each_way(block: type[nn.Module]) -> None:
    with torch.device("meta"):
        model, tokens = Model(block), torch.empty(2, LENGTH, dtype=torch.long)
    graph = sw.capture(model, {"tokens": tokens, "labels": tokens})
    plan = sw.plan(
        graph, sw.Cluster("a100-80gb", devices_per_node=RANKS), batch=8, pp=1, dp=1, tp=RANKS, sequence_parallel=False
    )
    found = plan.parameter_layouts("torch")
    for name, dim in COLUMNS[block].items():
        place = found[f"stack.1.{name}"].on("tp")
        assert isinstance(place, sw.Split), name
        assert place.dim == dim, name
    assert found["words.weight"].on("tp") == sw.Split(0)
    unit = fold(graph).units[2]
    work = WorkCounter(graph).count(unit, 2, "bf16", realise(graph, plan)[2])
    activation = 2 * LENGTH * WIDTH * 2
    for moved in (work.forward_moved, work.backward_moved):
        assert [(c.kind, c.size_bytes) for c in moved] == [("all_reduce", activation)] * 2


def test_an_encoders_result_stays_whole_beside_split_sequences() -> None:
    with torch.device("meta"):
        model = T5ForConditionalGeneration(
            T5Config(num_layers=2, d_model=64, num_heads=4, d_kv=16, d_ff=128, vocab_size=128, decoder_start_token_id=0)
        )
        tokens = torch.empty(4, 16, dtype=torch.long)
    graph = sw.capture(model, {"input_ids": tokens, "labels": tokens})
    cluster = sw.Cluster("h100", devices_per_node=2)
    plan = sw.plan(graph, cluster, batch=8, pp=1, dp=1, tp=2, sequence_parallel=True)
    assert plan.decision.sequence_parallel
