"""Predicted memory against what torch holds, as torch's own MemTracker follows it."""

from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)

import shardwright as sw
from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.model.fold import fold

BATCH, SEQUENCE, VOCABULARY, MICROBATCHES = 2, 64, 1024, 2


def gpt2(dropout: float) -> torch.nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=2, n_embd=128, n_head=4, vocab_size=VOCABULARY, n_positions=SEQUENCE,
            bos_token_id=0, eos_token_id=0,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        )
    )  # fmt: skip


def bert(dropout: float) -> torch.nn.Module:
    return BertForMaskedLM(
        BertConfig(
            num_hidden_layers=2, hidden_size=128, num_attention_heads=4, intermediate_size=512, vocab_size=VOCABULARY,
            hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        )
    )  # fmt: skip


def t5(dropout: float) -> torch.nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            num_layers=2, d_model=128, num_heads=4, d_kv=32, d_ff=512, vocab_size=VOCABULARY, decoder_start_token_id=0,
            dropout_rate=dropout,
        )
    )  # fmt: skip


class LowRank(torch.nn.Module):
    """A frozen map and a trained one of low rank beside it (LoRA, arXiv 2106.09685)."""

    def __init__(self, frozen: torch.nn.Module, entering: int, leaving: int, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down, self.up = torch.nn.Linear(entering, rank, bias=False), torch.nn.Linear(rank, leaving, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.frozen(x) + self.up(self.down(x))
        return made


def adapted() -> torch.nn.Module:
    model = gpt2(0.0).requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = LowRank(block.attn.c_attn, 128, 3 * 128)
    return model


class NoModules:
    """In place of the tracker's hooks on modules, which take no frozen parameter."""

    is_bw, parents = False, frozenset[str]()

    def register_user_hooks(self, *_: Any) -> None: ...
    def clear_user_hooks(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: Any) -> None: ...


def peak_bytes(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], *, first: bool = False, frozen: bool = False
) -> int:
    """Of a microbatch that adds its gradients to those that are there; of the ``first`` one of a step, which makes
    them."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        if first:
            optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    step()
    tracker = MemTracker()
    if frozen:
        tracker._mod_tracker = NoModules()  # type: ignore[assignment]
    other_microbatches = [torch.cat([value] * (MICROBATCHES - 1)) for value in batch.values()]
    tracker.track_external(model, optimizer, *batch.values(), *other_microbatches)
    with tracker:
        step()
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    return int(snapshot["Total"])


@pytest.mark.filterwarnings("ignore:Module is None")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("build", [gpt2, bert, t5])
def test_a_steps_peak_is_predicted(build: Any, dropout: float) -> None:
    model = build(dropout).train()
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))
    batch = {"input_ids": tokens, "labels": tokens}
    measured = peak_bytes(model, batch)
    plan = sw.plan(
        sw.capture(model, batch),
        sw.Cluster("cpu"),
        batch=MICROBATCHES * BATCH,
        microbatch=BATCH,
        precision="fp32",
        recompute="none",
        shard=0,
    )
    # A thousandth: buffers of the model (position ids) and scalars are not counted.
    assert 0.999 * measured <= plan.predicted.peak_memory_bytes[0] <= 1.03 * measured


class FewKeys(torch.nn.Module):
    """Attention with dropout of 128 positions to the first few."""

    def __init__(self, keys: int) -> None:
        super().__init__()
        self.qkv, self.out, self.keys = torch.nn.Linear(64, 3 * 64), torch.nn.Linear(64, 64), keys

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, *others = (part.unflatten(-1, (2, 32)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        key, value = (part[:, :, : self.keys].clone(memory_format=torch.contiguous_format) for part in others)
        found = torch.nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=0.1)
        made: torch.Tensor = self.out(found.transpose(1, 2).flatten(2))
        return made


@pytest.mark.parametrize("keys", [1, 2, 128])
def test_what_attention_with_dropout_keeps_on_a_cpu_is_counted(keys: int) -> None:
    """To the byte, with so few keys too that it is less than what one kernel would keep."""
    model, x = FewKeys(keys), torch.randn(4, 128, 64)
    held: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(x).square().mean()
    measured = sum(held.values()) - sum(held.get(t.data_ptr(), 0) for t in (x, *model.parameters()))
    graph = sw.capture(model, x, lambda out: out.square().mean())
    works = [WorkCounter(graph).count(unit, 4) for unit in fold(graph).units]
    assert measured == sum(work.saved_bytes + work.unfused_dropout_bytes for work in works)
    assert (sum(work.unfused_dropout_bytes for work in works) < 0) == (keys < 128)
    loss.backward()


@pytest.mark.filterwarnings("ignore:Module is None")
@pytest.mark.parametrize("build", [gpt2, bert, t5])
def test_gradients_that_are_made_when_activations_are_gone_count_once(build: Any) -> None:
    model = build(0.0).train()
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))
    batch = {"input_ids": tokens, "labels": tokens}
    measured = peak_bytes(model, batch, first=True)
    graph, pins = sw.capture(model, batch), {"microbatch": BATCH, "precision": "fp32", "recompute": "none"}
    plan = sw.plan(graph, sw.Cluster("cpu"), batch=BATCH, **pins)
    assert plan.predicted.memory[0].apart_bytes > 0
    # Above by no more than the gradients of one unit, which count beside its activations.
    assert 0.999 * measured <= plan.predicted.peak_memory_bytes[0] <= 1.06 * measured
    several = sw.plan(graph, sw.Cluster("cpu"), batch=4 * BATCH, **pins)
    assert several.predicted.memory[0].apart_bytes == 0
    assert several.predicted.peak_memory_bytes[0] > plan.predicted.peak_memory_bytes[0]


@pytest.mark.filterwarnings("ignore:Module is None")
def test_what_two_units_keep_counts_once() -> None:
    """A rectified value is kept by the rectifier for its slope and by the convolution after it as its operand."""
    config = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic", num_labels=10)
    model = ResNetForImageClassification(config).train()
    batch = {"pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.randint(0, 10, (4,))}
    measured = peak_bytes(model, batch)
    plan = sw.plan(
        sw.capture(model, batch), sw.Cluster("cpu"), batch=8, microbatch=4, precision="fp32", recompute="none", shard=0
    )
    assert 0.99 * measured <= plan.predicted.peak_memory_bytes[0] <= 1.03 * measured


@pytest.mark.filterwarnings("ignore:Module is None")
def test_frozen_parameters_have_no_gradients_and_no_states() -> None:
    model = adapted().train()
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))
    batch = {"input_ids": tokens, "labels": tokens}
    measured = peak_bytes(model, batch, frozen=True)
    graph = sw.capture(model, batch)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert graph.parameter_count(trainable_only=True) == trained
    pins = {"microbatch": BATCH, "precision": "fp32", "recompute": "none", "shard": 0}
    plan = sw.plan(graph, sw.Cluster("cpu"), batch=MICROBATCHES * BATCH, **pins)
    use = plan.predicted.memory[0]
    assert (use.gradients_bytes, use.optimizer_bytes) == (4 * trained, 8 * trained)
    assert 0.999 * measured <= use.total_bytes <= 1.03 * measured
    # Replicas sum, and update, what is trained alone.
    alone, two = (
        sw.plan(
            graph, sw.Cluster("cpu", devices_per_node=dp), batch=MICROBATCHES * BATCH * dp, pp=1, dp=dp, tp=1, **pins
        )
        for dp in (1, 2)
    )
    assert two.predicted.memory[0].total_bytes <= alone.predicted.memory[0].total_bytes + 4 * trained
    whole = sw.plan(sw.capture(gpt2(0.0), batch), sw.Cluster("cpu"), batch=MICROBATCHES * BATCH, **pins)
    assert plan.predicted.optimizer_s < 0.05 * whole.predicted.optimizer_s
