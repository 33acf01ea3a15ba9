"""Models for tensor parallelism, the same in every process: those of `models`, wider ones, one that nobody knows."""

from typing import Any

import models
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

VOCABULARY = models.VOCABULARY


class Rating(nn.Module):
    """Neural collaborative filtering: tables of users and items, a product beside a few dense layers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(40, 12), nn.Embedding(24, 12)
        self.hidden, self.inner, self.out = nn.Linear(24, 32), nn.Linear(32, 16), nn.Linear(28, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, user: torch.Tensor, item: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        u, v = self.users(user), self.items(item)
        deep = self.dropout(torch.relu(self.inner(torch.relu(self.hidden(torch.cat([u, v], -1))))))
        score = self.out(torch.cat([u * v, deep], -1)).squeeze(-1)
        return Output(loss=F.binary_cross_entropy_with_logits(score, labels))


class Output(dict[str, torch.Tensor]):
    """As Hugging Face models return: by key and by attribute."""

    @property
    def loss(self) -> torch.Tensor:
        return self["loss"]


class Images(nn.Module):
    """Convolutions, batch norms with running statistics, pooling, an odd number of classes."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(3)
        )
        self.head, self.dropout = nn.Linear(16, 5), nn.Dropout(dropout)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Output:
        x = self.stem(pixel_values)
        for stage in self.stages:
            x = x + stage(x)
        return Output(loss=F.cross_entropy(self.head(self.dropout(F.avg_pool2d(x, 2).mean((2, 3)))), labels))


class FusedBlock(nn.Module):
    """Gate and up in one matrix, keys and values in one matrix for fewer heads than the queries, RMS norms written out,
    weights used by name."""

    def __init__(self, width: int, heads: int, groups: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.groups, self.depth = heads, groups, width // heads
        self.q = nn.Parameter(torch.randn(heads, self.depth, width) * 0.2)
        self.kv = nn.Linear(width, 2 * groups * self.depth, bias=False)
        self.back = nn.Linear(width, width)
        self.gate_up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.dropout = nn.Dropout(dropout)

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        h = self.norm(x)
        q = torch.einsum("bsk,hdk->bhsd", h, self.q)
        k, v = self.kv(h).view(batch, length, 2, self.groups, self.depth).permute(2, 0, 3, 1, 4)
        k, v = (t.repeat_interleave(self.heads // self.groups, dim=1) for t in (k, v))
        scores = (q @ k.transpose(-1, -2)) / self.depth**0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        mixed = (self.dropout(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.back(mixed))
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Fused(nn.Module):
    """A model of blocks that nobody has seen, its head tied to its embedding."""

    def __init__(self, dropout: float, width: int = 32, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(FusedBlock(width, heads, groups, dropout) for _ in range(3))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        x = self.table(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = x @ self.table.weight.t()
        return Output(loss=F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits=logits)


class Recurrence(nn.Module):
    """A recurrence written out, step by step into a tensor that is made beforehand."""

    def __init__(self, dropout: float, width: int = 8, inner: int = 16) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, inner) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(inner, width) for _ in range(2))
        self.decay, self.dropout = nn.Parameter(torch.randn(2, inner) * 0.1), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Output:
        for up, decay, down in zip(self.up, self.decay, self.down, strict=True):
            given = up(x)
            made, state = torch.zeros_like(given), torch.zeros_like(given[:, 0])
            for t in range(x.shape[1]):
                state = torch.maximum(state * torch.exp(decay), given[:, t])
                made[:, t] = state
            x = x + self.dropout(down(made))
        return Output(loss=F.mse_loss(x, labels))


def build(name: str, dropout: float = 0.0) -> nn.Module:
    """A model with the same weights in every process; ``-heads4``: with as many heads as four ranks need."""
    torch.manual_seed(3)
    name, _, variant = name.partition("-")
    heads = 4 if variant else 2
    if name == "ncf":
        return Rating(dropout)
    if name == "fused":
        return Fused(dropout)
    if name == "images":
        return Images(dropout)
    if name == "recurrence":
        return Recurrence(dropout)
    if name == "vit":
        return ViTForImageClassification(
            ViTConfig(
                num_hidden_layers=3, hidden_size=32, num_attention_heads=4, intermediate_size=64, image_size=32,
                patch_size=8, num_labels=10, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
            )
        )  # fmt: skip
    if name == "roberta":
        return RobertaForMaskedLM(
            RobertaConfig(
                num_hidden_layers=3, hidden_size=32, num_attention_heads=heads, intermediate_size=64,
                vocab_size=VOCABULARY, max_position_embeddings=40, hidden_dropout_prob=dropout,
                attention_probs_dropout_prob=dropout, pad_token_id=1,
            )
        )  # fmt: skip
    if variant and name == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                n_layer=3, n_embd=32, n_head=4, vocab_size=VOCABULARY, n_positions=32, bos_token_id=0, eos_token_id=0,
                resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
            )
        )  # fmt: skip
    if variant and name == "llama":
        return LlamaForCausalLM(
            LlamaConfig(
                num_hidden_layers=3, hidden_size=64, num_attention_heads=8, num_key_value_heads=4,
                intermediate_size=64, vocab_size=VOCABULARY, max_position_embeddings=32, attention_dropout=dropout,
            )
        )  # fmt: skip
    if variant and name == "bert":
        return BertForMaskedLM(
            BertConfig(
                num_hidden_layers=3, hidden_size=32, num_attention_heads=4, intermediate_size=64,
                vocab_size=VOCABULARY, max_position_embeddings=32, hidden_dropout_prob=dropout,
                attention_probs_dropout_prob=dropout,
            )
        )  # fmt: skip
    if variant and name == "t5":
        return T5ForConditionalGeneration(
            T5Config(
                num_layers=2, d_model=32, num_heads=4, d_ff=64, d_kv=8, vocab_size=VOCABULARY, dropout_rate=dropout,
                decoder_start_token_id=0, pad_token_id=0, tie_word_embeddings=True,
            )
        )  # fmt: skip
    if variant and name == "mixtral":
        return MixtralForCausalLM(
            MixtralConfig(
                vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
                num_key_value_heads=4, intermediate_size=32, num_local_experts=4, max_position_embeddings=32,
                bos_token_id=0, eos_token_id=0, pad_token_id=0, attention_dropout=dropout,
            )
        )  # fmt: skip
    return models.build(name, dropout)


def batch(name: str, step: int, samples: int = 8) -> dict[str, Any]:
    """The whole batch of a step."""
    name, _, _ = name.partition("-")
    generator = torch.Generator().manual_seed(1000 + step)
    if name == "ncf":
        users = torch.randint(0, 40, (samples,), generator=generator)
        items = torch.randint(0, 24, (samples,), generator=generator)
        return {"user": users, "item": items, "labels": torch.randint(0, 2, (samples,), generator=generator).float()}
    if name == "recurrence":
        x = torch.randn((samples, 3, 8), generator=generator)
        return {"x": x, "labels": torch.randn((samples, 3, 8), generator=generator)}
    if name == "images":
        images = torch.randn((samples, 3, 8, 8), generator=generator)
        return {"pixel_values": images, "labels": torch.randint(0, 5, (samples,), generator=generator)}
    if name == "vit":
        images = torch.randn((samples, 3, 32, 32), generator=generator)
        return {"pixel_values": images, "labels": torch.randint(0, 10, (samples,), generator=generator)}
    return models.batch(name, step, samples)
