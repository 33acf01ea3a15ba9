"""Training with tables of sparse gradients over four ranks, against the unsplit model.

Usage: row_training.py [CHECK...]
"""

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launched import run_checks
from torch import nn

import shardwright.torch as sw
from tests.comparison import Comparison

WORDS, WIDTH, SAMPLES, TOKENS = 60, 8, 16, 5


class Tagger(nn.Module):
    """Two tables, one of which knows padding, and blocks."""

    def __init__(self, *, sparse: bool = True, shared: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0, sparse=sparse)
        self.bags = nn.EmbeddingBag(WORDS, WIDTH, mode="sum", sparse=sparse)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if shared:
            self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.bags(tokens)[:, None]
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), wanted.flatten())


@sw.step
def train_step(model, tokens, wanted):
    loss = model(tokens, wanted)
    model.backward(loss, reduction="mean")  # a bag of words numbers its samples: the loss cannot be read
    return loss


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The last samples look up padding alone, so that one replica has a gradient of few rows."""
    drawn = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, WORDS // 3, (SAMPLES, TOKENS), generator=drawn)
    tokens[-SAMPLES // 4 :] = 0
    return tokens, torch.randint(0, WORDS, (SAMPLES, TOKENS), generator=drawn)


def optimizers(model: Any, *, by_rows: bool = True) -> list[torch.optim.Optimizer]:
    tables = [p for name, p in model.named_parameters() if name.split(".")[0] in ("words", "bags")]
    others = [p for name, p in model.named_parameters() if name.split(".")[0] not in ("words", "bags")]
    ofs = torch.optim.SparseAdam(tables, lr=1e-2) if by_rows else torch.optim.SGD(tables, lr=1e-1)
    return [ofs, torch.optim.AdamW(others, lr=1e-2)]


def trained_alike(config: dict[str, Any], *, passes: int = 1, clip: float | None = None, **made: Any) -> Any:
    """Train a model split and whole, and compare losses, gradients and weights."""
    torch.manual_seed(0)
    plain = Tagger(**made)
    split = copy.deepcopy(plain)
    by_rows = not made
    sw.init({"microbatches": 2, "ddp": True} | config)
    model = sw.DistributedModel(split, backward_passes_per_step=passes)
    updates = [sw.DistributedOptimizer(o) for o in optimizers(model.module, by_rows=by_rows)]
    plain_updates = optimizers(plain, by_rows=by_rows)
    ways, own = sw.rdp_size(), sw.rdp_rank()
    microbatches = 2 * ways
    for step in range(3):
        for update in (*updates, *plain_updates):
            update.zero_grad()
        for turn in range(passes):
            tokens, wanted = batch(10 * step + turn)
            train_step(model, tokens.chunk(ways)[own].clone(), wanted.chunk(ways)[own].clone())
            for some, words in zip(tokens.chunk(microbatches), wanted.chunk(microbatches), strict=True):
                (plain(some, words) / microbatches).backward()
        if clip is not None:
            norm = model.clip_grad_norm_(clip)
            whole = [p.grad.coalesce().values() if p.grad.is_sparse else p.grad for p in plain.parameters()]
            expected = torch.stack([g.norm() for g in whole]).norm()
            Comparison("norm").values(norm, expected, relative=1e-5, absolute=1e-7).require()
            for p in plain.parameters():
                p.grad.mul_((clip / (expected + 1e-6)).clamp(max=1.0))
        same = Comparison(f"{config}, step {step}")
        found = {name: p.grad.to_dense() for name, p in model.local_named_parameters()}
        of_plain = {name: p.grad.to_dense() for name, p in plain.named_parameters() if name in found}
        same.gradients(found, of_plain).require()
        for name, p in model.local_named_parameters():
            reference = dict(plain.named_parameters())[name].grad
            assert p.grad.is_sparse == reference.is_sparse, name
            if p.grad.is_sparse:
                rows = p.grad.coalesce().indices()[0]
                assert rows.equal(reference.coalesce().indices()[0]), name
        for update in (*updates, *plain_updates):
            update.step()
    left = {name: p.detach() for name, p in model.local_named_parameters()}
    wanted_weights = {name: p.detach() for name, p in plain.named_parameters() if name in left}
    Comparison("weights").values(left, wanted_weights, relative=1e-4, absolute=1e-5).require()
    sw.shutdown()


def replicas_train_as_one() -> None:
    for policy in ("auto", "dense", "sparse"):
        trained_alike({"sparse_gradients": policy})


def pipelines_of_replicas_train_as_one() -> None:
    trained_alike({"pipeline_parallel_degree": 2, "sparse_gradients": "sparse"})


def a_norm_counts_each_row_once() -> None:
    trained_alike({"sparse_gradients": "sparse"}, clip=0.05)
    trained_alike({"sparse_gradients": "dense"}, clip=0.05)


def several_passes_add_up() -> None:
    trained_alike({}, passes=2)


def steps_by_messages_train_as_one() -> None:
    trained_alike({"pipeline_mode": "messages"})
    trained_alike({"pipeline_mode": "messages", "sparse_gradients": "dense"}, passes=2)


def a_table_that_looked_up_nothing_has_a_norm() -> None:
    sw.init({"ddp": True})
    model = sw.DistributedModel(Tagger())
    padding = torch.zeros(2, TOKENS, dtype=torch.long)
    train_step(model, padding, padding)
    assert float(model.clip_grad_norm_(1.0, norm_type=float("inf"))) > 0
    sw.shutdown()


def tied_tables_have_dense_gradients() -> None:
    trained_alike({}, shared=True)


def an_unknown_form_is_refused() -> None:
    with pytest.raises(sw.ShardwrightError, match="sparse_gradients='rows': expected 'auto', 'dense' or 'sparse'"):
        sw.init({"sparse_gradients": "rows"})


def shards_and_sparse_adam_are_refused() -> None:
    sw.init({"ddp": True, "shard": 1})
    model = sw.DistributedModel(Tagger())
    for update in optimizers(model.module):
        sw.DistributedOptimizer(update)
    tokens, wanted = (given.chunk(4)[dist.get_rank()].clone() for given in batch(0))
    with pytest.raises(sw.ShardwrightError, match=r"SparseAdam.*shard=0"):
        train_step(model, tokens, wanted)
    sw.shutdown()


CHECKS: tuple[Callable[[], None], ...] = (
    replicas_train_as_one,
    pipelines_of_replicas_train_as_one,
    a_norm_counts_each_row_once,
    several_passes_add_up,
    steps_by_messages_train_as_one,
    a_table_that_looked_up_nothing_has_a_norm,
    tied_tables_have_dense_gradients,
    an_unknown_form_is_refused,
    shards_and_sparse_adam_are_refused,
)

if __name__ == "__main__":
    chosen = sys.argv[1:]
    run_checks(check for check in CHECKS if not chosen or check.__name__ in chosen)
