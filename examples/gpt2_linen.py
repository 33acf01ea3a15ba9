"""A small GPT-2 in Flax Linen: pre-norm blocks, learned positions, a head of its own."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


class Block(nn.Module):
    n_head: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        y = nn.LayerNorm(epsilon=1e-5, name="ln_1")(x)
        query, key, value = jnp.split(nn.Dense(3 * width, name="c_attn")(y), 3, axis=-1)
        heads = (batch, length, self.n_head, width // self.n_head)
        y = jax.nn.dot_product_attention(query.reshape(heads), key.reshape(heads), value.reshape(heads), is_causal=True)
        x = x + nn.Dense(width, name="c_proj")(y.reshape(batch, length, width))
        y = nn.LayerNorm(epsilon=1e-5, name="ln_2")(x)
        return x + nn.Dense(width, name="fc_out")(nn.gelu(nn.Dense(4 * width, name="fc_in")(y)))


class GPT2(nn.Module):
    """Token ids [batch, length] → logits [batch, length, vocab_size]."""

    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 64
    vocab_size: int = 256
    n_positions: int = 64

    @nn.compact
    def __call__(self, input_ids: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocab_size, self.n_embd, name="wte")(input_ids)
        x = x + nn.Embed(self.n_positions, self.n_embd, name="wpe")(jnp.arange(input_ids.shape[1])[None])
        for i in range(self.n_layer):
            x = Block(self.n_head, name=f"h_{i}")(x)
        return nn.Dense(self.vocab_size, use_bias=False, name="head")(nn.LayerNorm(epsilon=1e-5, name="ln_f")(x))


def next_token_loss(apply: Any, input_ids: jax.Array) -> jax.Array:
    """Mean cross-entropy of every token after the first. ``apply`` runs the model with its variables."""
    scores = jax.nn.log_softmax(apply(input_ids)[:, :-1])
    return -jnp.take_along_axis(scores, input_ids[:, 1:, None], axis=-1).mean()


def model() -> tuple[tuple[GPT2, Any], jax.ShapeDtypeStruct, Any]:
    """For the command line: the module with its variables' shapes, a sample, and its loss."""
    module, sample = GPT2(), jax.ShapeDtypeStruct((8, 32), jnp.int32)
    variables = jax.eval_shape(module.init, jax.random.key(0), sample)
    return (module, variables), sample, next_token_loss
