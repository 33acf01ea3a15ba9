"""Tiny Hugging Face models and batches for them, the same in every process."""

from typing import Any

import torch
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils import logging

logging.set_verbosity_error()

VOCABULARY = 64


def build(name: str, dropout: float = 0.0, layers: int = 4) -> nn.Module:
    """A model with the same weights in every process."""
    torch.manual_seed(3)
    if name in ("gpt2", "gpt2-eager"):  # eager: attention written out
        return GPT2LMHeadModel(
            GPT2Config(
                n_layer=layers, n_embd=32, n_head=2, vocab_size=VOCABULARY, n_positions=32, bos_token_id=0,
                eos_token_id=0, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
                attn_implementation="eager" if name == "gpt2-eager" else "sdpa",
            )
        )  # fmt: skip
    if name == "bert":
        return BertForMaskedLM(
            BertConfig(
                num_hidden_layers=layers, hidden_size=32, num_attention_heads=2, intermediate_size=64,
                vocab_size=VOCABULARY, max_position_embeddings=32, hidden_dropout_prob=dropout,
                attention_probs_dropout_prob=dropout,
            )
        )  # fmt: skip
    if name == "t5":
        return T5ForConditionalGeneration(
            T5Config(
                num_layers=layers // 2, d_model=32, num_heads=2, d_ff=64, d_kv=16, vocab_size=VOCABULARY,
                dropout_rate=dropout, decoder_start_token_id=0, pad_token_id=0, tie_word_embeddings=True,
            )
        )  # fmt: skip
    if name == "llama":
        return LlamaForCausalLM(
            LlamaConfig(
                num_hidden_layers=layers, hidden_size=32, num_attention_heads=2, num_key_value_heads=1,
                intermediate_size=64, vocab_size=VOCABULARY, max_position_embeddings=32, bos_token_id=0,
                eos_token_id=0, attention_dropout=dropout,
            )
        )  # fmt: skip
    if name == "albert":  # one block, called once for every layer
        return AlbertForMaskedLM(
            AlbertConfig(
                vocab_size=VOCABULARY, embedding_size=16, hidden_size=32, num_hidden_layers=layers,
                num_attention_heads=2, intermediate_size=64, max_position_embeddings=32, hidden_dropout_prob=dropout,
                attention_probs_dropout_prob=dropout,
            )
        )  # fmt: skip
    if name in ("mixtral", "mixtral-balanced"):  # routing that depends on values, inside units
        return MixtralForCausalLM(
            MixtralConfig(
                vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=layers, num_attention_heads=2,
                num_key_value_heads=2, intermediate_size=32, num_local_experts=4, max_position_embeddings=32,
                bos_token_id=0, eos_token_id=0, pad_token_id=0, attention_dropout=dropout,
                output_router_logits=name == "mixtral-balanced",  # a loss of how many tokens each expert has
            )
        )  # fmt: skip
    if name == "sinks":  # a score of every head beside those of the keys
        return GptOssForCausalLM(
            GptOssConfig(
                vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=layers, num_attention_heads=2, head_dim=16,
                num_key_value_heads=1, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2,
                sliding_window=6, max_position_embeddings=32, bos_token_id=0, eos_token_id=0, pad_token_id=0,
                attention_dropout=dropout, use_cache=False,
            )
        )  # fmt: skip
    if name == "windows":
        return Windows(layers, dropout)
    raise ValueError(name)


def batch(name: str, step: int, samples: int = 8, length: int = 12) -> dict[str, Any]:
    """The whole batch of a step: for every replica and microbatch, in order."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(1, VOCABULARY, (samples, length), generator=generator)
    found = {"input_ids": ids, "labels": ids.clone()}
    if name in ("bert", "t5"):
        mask = torch.ones_like(ids)
        mask[:, -2:] = torch.randint(0, 2, (samples, 2), generator=generator)
        found["attention_mask"] = mask
    return found


class WindowBlock(nn.Module):
    """Everything by which a token needs a few before it: convolutions padded in front and cut behind, a shift, sums."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.cut = nn.Conv1d(2 * width, width, 3, padding=4, dilation=2)
        self.padded = nn.Sequential(nn.Conv1d(width, width, 2, groups=width), nn.Conv1d(width, width, 3, bias=False))
        self.shift, self.dropout = nn.ZeroPad2d((0, 0, 1, -1)), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        h = self.wide(self.norm(x)).transpose(1, 2)
        h = nn.functional.silu(self.cut(h))[..., :length]
        h = self.dropout(self.padded(nn.functional.pad(h, (3, 0)))).transpose(1, 2)
        h = h + torch.tanh(self.shift(h)) * nn.functional.pad(h, (0, 0, 2, 0))[:, :-2]
        h = h + torch.sigmoid(torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1))
        counted = torch.arange(1, length + 1)[:, None]
        return x + h + torch.tanh(h).cumsum(1) / counted + torch.logcumsumexp(h, 1)


class Windows(nn.Module):
    """A language model without attention."""

    def __init__(self, layers: int, dropout: float, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(WindowBlock(width, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> "Output":
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return Output(
            loss=nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits=logits
        )


class Doubled(torch.autograd.Function):
    """A function of a user's own, with a parameter among its arguments."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        return 2 * x * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, scale = ctx.saved_tensors
        return 2 * gradient * scale, (2 * gradient * x).sum(dim=(0, 1))


class Mixed(nn.Module):
    """A block with every way in which a weight can be used."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.twice = nn.Linear(width, width, bias=False)  # called twice in a row
        self.conv = nn.Conv1d(width, width, 3, padding=1, groups=2)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))  # a weight that is computed
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.scale = nn.Parameter(torch.ones(width))
        self.matrix = nn.Parameter(torch.eye(width) + 0.1 * torch.randn(width, width))
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        h = self.twice(torch.tanh(self.twice(h)))
        h = h + self.conv(h.transpose(1, 2)).transpose(1, 2)
        h = self.normed(torch.tanh(h)) @ self.matrix
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h = torch.nn.functional.relu(self.frozen(h), inplace=True) + h
        return x + Doubled.apply(h, self.scale)


class EveryKindOfWeight(nn.Module):
    """Eight blocks, the first and the last the same one; the embedding is tied to the head."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, width, padding_idx=0)
        self.blocks = nn.ModuleList(Mixed(width) for _ in range(7))
        self.blocks.append(self.blocks[0])
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def every_kind_of_weight() -> nn.Module:
    torch.manual_seed(3)
    return EveryKindOfWeight()


class NormedBlock(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.tanh(self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)))


class Output(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]


class WithBatchNorm(nn.Module):
    """What batch norm gives depends on the microbatch, and its running statistics on their order."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(NormedBlock(8, dropout) for _ in range(4))
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return Output(loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)


def with_batch_norm(dropout: float = 0.2) -> nn.Module:
    torch.manual_seed(3)
    return WithBatchNorm(dropout)
