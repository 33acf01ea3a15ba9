"""Each model twice: Hugging Face's or plain PyTorch, and Flax NNX written apart from it."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
from flax import nnx
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

import shardwright as sw
from tests.models.own import NeuMF, ResidualNetwork
from tests.twins import flax_models as flax

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import gpt2_flax

Graphs = tuple[sw.Graph, sw.Graph]


def captured(
    model: Callable[[], Any], batch: dict[str, Any], twin: Callable[[], Any], sample: Any, loss: Any
) -> Graphs:
    with torch.device("meta"):
        built = model().train()
    return sw.capture(built, batch), sw.capture(nnx.eval_shape(twin), sample, loss)


def ids(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def tokens(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long)


def gpt2(layers: int = 24, width: int = 1024, heads: int = 16, length: int = 1024) -> Graphs:
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, vocab_size=50304, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        activation_function="gelu_pytorch_tanh",
    )  # fmt: skip
    sizes = gpt2_flax.Config(n_layer=layers, n_embd=width, n_head=heads, vocab_size=50304, recompute_scores=True)
    return captured(
        lambda: GPT2LMHeadModel(config), {"input_ids": tokens(2, length), "labels": tokens(2, length)},
        lambda: gpt2_flax.create(sizes), {"input_ids": ids(2, length)}, gpt2_flax.next_token_loss,
    )  # fmt: skip


def bert(layers: int = 24, width: int = 1024, heads: int = 16, length: int = 512) -> Graphs:
    config = BertConfig(
        vocab_size=30528, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * width, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return captured(
        lambda: BertForMaskedLM(config), {"input_ids": tokens(2, length), "labels": tokens(2, length)},
        lambda: flax.Bert(30528, 512, layers, width, heads, nnx.Rngs(0)),
        {"ids": ids(2, length), "labels": ids(2, length)}, flax.bert_loss,
    )  # fmt: skip


def t5(layers: int = 12, width: int = 768, heads: int = 12, length: int = 512) -> Graphs:
    config = T5Config(
        vocab_size=32128, d_model=width, d_kv=64, d_ff=4 * width, num_layers=layers, num_heads=heads, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return captured(
        lambda: T5ForConditionalGeneration(config), {"input_ids": tokens(2, length), "labels": tokens(2, length)},
        lambda: flax.T5(32128, layers, width, heads, 64, 4 * width, nnx.Rngs(0)),
        {"source": ids(2, length), "target": ids(2, length), "labels": ids(2, length)}, flax.t5_loss,
    )  # fmt: skip


def ncf(users: int = 138_496, items: int = 26_752, width: int = 64, depth: int = 4) -> Graphs:
    return captured(
        lambda: _without_dropout(NeuMF(users, items, width, depth)),
        {"user": tokens(2), "item": tokens(2), "label": torch.zeros(2)},
        lambda: flax.NCF(users, items, width, depth, nnx.Rngs(0)),
        {"user": ids(2), "item": ids(2), "label": jax.ShapeDtypeStruct((2,), jnp.float32)}, flax.ncf_loss,
    )  # fmt: skip


def resnet(width: int = 64, size: int = 64) -> Graphs:
    return captured(
        lambda: ResidualNetwork(width, 1000), {"images": torch.zeros(2, 3, size, size), "labels": tokens(2)},
        lambda: flax.ResNet(width, 1000, nnx.Rngs(0)),
        {"images": jax.ShapeDtypeStruct((2, size, size, 3), jnp.float32), "labels": ids(2)}, flax.resnet_loss,
    )  # fmt: skip


def _without_dropout(model: torch.nn.Module) -> torch.nn.Module:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


TWINS = {"gpt2": gpt2, "bert": bert, "t5": t5, "ncf": ncf, "resnet": resnet}
