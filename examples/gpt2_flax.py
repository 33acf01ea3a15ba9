"""GPT-2 in Flax NNX: a twin of Hugging Face's torch model, written as a Flax user would.

Same mathematics (tanh-approximated GELU, LayerNorm with epsilon 1e-5, a fused q|k|v projection, the head tied to the
token embedding), same names: ``wte wpe h.<i>.{ln_1, attn.{c_attn, c_proj}, ln_2, mlp.{c_fc, c_proj}} ln_f``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


@dataclass(frozen=True)
class Config:
    """Defaults are GPT-2 small's."""

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    vocab_size: int = 50257
    n_positions: int = 1024
    dropout: float = 0.0
    recompute_scores: bool = False
    """Whether attention keeps no scores for the backward and computes them again, as PyTorch's kernel does."""


class Attention(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.n_head, self.recompute_scores = config.n_head, config.recompute_scores
        init = nnx.initializers.normal(0.02)
        out_init = nnx.initializers.normal(0.02 / (2 * config.n_layer) ** 0.5)
        self.c_attn = nnx.Linear(config.n_embd, 3 * config.n_embd, kernel_init=init, rngs=rngs)
        self.c_proj = nnx.Linear(config.n_embd, config.n_embd, kernel_init=out_init, rngs=rngs)
        self.resid_dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key, value = jnp.split(self.c_attn(x), 3, axis=-1)
        batch, length, width = x.shape
        heads = (batch, length, self.n_head, width // self.n_head)
        attend = partial(jax.nn.dot_product_attention, is_causal=True)
        attend = jax.checkpoint(attend) if self.recompute_scores else attend
        x = attend(query.reshape(heads), key.reshape(heads), value.reshape(heads))
        return self.resid_dropout(self.c_proj(x.reshape(batch, length, width)))


class MLP(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02)
        out_init = nnx.initializers.normal(0.02 / (2 * config.n_layer) ** 0.5)
        self.c_fc = nnx.Linear(config.n_embd, 4 * config.n_embd, kernel_init=init, rngs=rngs)
        self.c_proj = nnx.Linear(4 * config.n_embd, config.n_embd, kernel_init=out_init, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.c_proj(jax.nn.gelu(self.c_fc(x), approximate=True)))


class Block(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.ln_1 = nnx.LayerNorm(config.n_embd, epsilon=1e-5, rngs=rngs)
        self.attn = Attention(config, rngs=rngs)
        self.ln_2 = nnx.LayerNorm(config.n_embd, epsilon=1e-5, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nnx.Module):
    """Token ids [batch, length] → logits [batch, length, vocab_size]."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.wte = nnx.Embed(config.vocab_size, config.n_embd, embedding_init=nnx.initializers.normal(0.02), rngs=rngs)
        self.wpe = nnx.Embed(config.n_positions, config.n_embd, embedding_init=nnx.initializers.normal(0.02), rngs=rngs)
        self.drop = nnx.Dropout(config.dropout, rngs=rngs)
        self.h = nnx.List([Block(config, rngs=rngs) for _ in range(config.n_layer)])
        self.ln_f = nnx.LayerNorm(config.n_embd, epsilon=1e-5, rngs=rngs)

    def __call__(self, input_ids: jax.Array) -> jax.Array:
        positions = jnp.arange(input_ids.shape[1])[None]
        x = self.drop(self.wte(input_ids) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        return self.wte.attend(self.ln_f(x))


def next_token_loss(model: GPT2, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Mean cross-entropy of every token after the first; ``batch["input_ids"]`` is [batch, length]."""
    tokens = batch["input_ids"]
    logits = model(tokens)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def create(config: Config, seed: int = 0) -> GPT2:
    return GPT2(config, rngs=nnx.Rngs(seed))


def from_torch(config: Config, weights: Mapping[str, np.ndarray]) -> GPT2:
    """The model with the weights of a Hugging Face ``GPT2LMHeadModel`` state dict, given as numpy arrays.

    Raises KeyError for a weight that is missing, ValueError for one of another shape.
    """
    model = nnx.eval_shape(lambda: create(config))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    filled = []
    for path, variable in nnx.to_flat_state(params):
        name = ".".join(map(str, path[:-1]))
        leaf = {"embedding": "weight", "kernel": "weight", "scale": "weight"}.get(str(path[-1]), str(path[-1]))
        given = np.asarray(weights[f"transformer.{name}.{leaf}"])  # Conv1D keeps [in, out], as a Flax kernel
        if given.shape != variable.shape:
            raise ValueError(f"{name}.{leaf} has shape {given.shape}, expected {variable.shape}")
        filled.append((path, variable.replace(jnp.asarray(given, variable.dtype))))
    rest = jax.jit(lambda: nnx.split(create(config), nnx.Param, ...)[2])()  # the states of random streams
    return nnx.merge(graphdef, nnx.from_flat_state(filled), rest)


SMALL = Config(n_layer=2, n_head=4, n_embd=64, vocab_size=256, n_positions=64)


def model() -> tuple[GPT2, dict[str, Any], Any]:
    """For the command line: GPT-2 small without memory for its weights, a sample, and its loss."""
    config = Config()
    abstract = nnx.eval_shape(lambda: create(config))
    return abstract, {"input_ids": jax.ShapeDtypeStruct((8, config.n_positions), jnp.int32)}, next_token_loss
