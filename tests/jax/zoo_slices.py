"""Causal models in Flax for the tests of token slices, each written as users write them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

WIDTH, HEADS, GROUPS, VOCABULARY, LENGTH, BATCH = 16, 4, 2, 24, 12, 8
HEAD = WIDTH // HEADS


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions of [batch, tokens, heads, width], in halves as Llama's."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 10_000 ** (jnp.arange(half) / half)
    sin, cos = (f(angles)[None, :, None, :] for f in (jnp.sin, jnp.cos))
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def written_out(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Attention in einsums, with another low number than Flax has, and grouped keys repeated."""
    k, v = (jnp.repeat(each, q.shape[2] // each.shape[2], axis=2) for each in (k, v))
    scores = jnp.einsum("bkhd,bqhd->bhqk", k, q) / np.sqrt(q.shape[-1])
    shares = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", shares, v)


def masked_twice(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Attention under a mask of some keys, and then a causal one: a token may see nothing but what both hide."""
    k, v = (jnp.repeat(each, q.shape[2] // each.shape[2], axis=2) for each in (k, v))
    scores = jnp.where(mask[:, None, None, :], jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e30)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(causal, scores, -1e30)), v)


def in_two_masks(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Attention under a mask, and then under one of the three tokens before each: they may hide all together."""
    k, v = (jnp.repeat(each, q.shape[2] // each.shape[2], axis=2) for each in (k, v))
    scores = jnp.where(mask, jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e30)
    near = jnp.triu(jnp.ones(scores.shape[-2:], bool), -2)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(near, scores, -1e30)), v)


def causal(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def both_ways(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v)


def window(ids: jax.Array) -> jax.Array:
    """Each token sees itself and the three before it."""
    at = jnp.arange(ids.shape[1])
    far = at[:, None] - at[None, :]
    return (far >= 0) & (far < 4)


def documents(ids: jax.Array) -> jax.Array:
    """Each token sees those before it of its own document; documents begin with token 0."""
    document = jnp.cumsum(ids == 0, axis=1)
    same = document[:, None, :, None] == document[:, None, None, :]
    return same & jnp.tril(jnp.ones((ids.shape[1], ids.shape[1]), bool))


def padded(ids: jax.Array) -> jax.Array:
    """No token sees those that are 0."""
    return jnp.tril(jnp.ones((ids.shape[1], ids.shape[1]), bool)) & (ids != 0)[:, None, None, :]


class LlamaLayer(nnx.Module):
    def __init__(self, attend: Any, dropout: float, rngs: nnx.Rngs):
        self.norm_1 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.q = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.kv = nnx.Linear(WIDTH, 2 * GROUPS * HEAD, use_bias=False, rngs=rngs)
        self.o = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.norm_2 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.gate = nnx.Linear(WIDTH, 2 * WIDTH, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.drop = nnx.Dropout(dropout, rngs=rngs)
        self.attend = attend

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        batch, tokens, _ = x.shape
        y = self.norm_1(x)
        k, v = jnp.split(self.kv(y).reshape(batch, tokens, 2 * GROUPS, HEAD), 2, axis=2)
        q = self.q(y).reshape(batch, tokens, HEADS, HEAD)
        seen = self.attend(rotated(q), rotated(k), v, mask)
        x = x + self.drop(self.o(seen.reshape(batch, tokens, WIDTH)))
        y = self.norm_2(x)
        return x + self.drop(self.down(jax.nn.relu(self.gate(y)) * self.up(y)))


class Llama(nnx.Module):
    """Token ids → logits of the next; rotary positions, grouped queries."""

    def __init__(self, layers: int, rngs: nnx.Rngs, attend: Any = causal, mask: Any = window, dropout: float = 0.0):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List([LlamaLayer(attend, dropout, rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)
        self.mask = mask

    def __call__(self, ids: jax.Array) -> jax.Array:
        mask, x = self.mask(ids), self.embed(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


class DroppingLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, dropout_rate=0.2, broadcast_dropout=False, decode=False, rngs=rngs
        )
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x), mask=mask, deterministic=False)
        return x + self.drop(jax.nn.gelu(self.up(x)))


class Dropping(nnx.Module):
    """Token ids → logits, with dropout of attention's shares and of layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List([DroppingLayer(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        mask, x = nnx.make_causal_mask(ids), self.embed(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


class LinenLayer(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        y = linen.LayerNorm()(x)
        x = x + linen.MultiHeadDotProductAttention(HEADS)(y, y, mask=mask)
        return x + linen.Dense(WIDTH)(linen.gelu(linen.Dense(2 * WIDTH)(linen.LayerNorm()(x))))


class LinenGpt(linen.Module):
    layers: int

    @linen.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        mask = linen.make_causal_mask(ids)
        word = linen.Embed(VOCABULARY, WIDTH)
        x = word(ids) + linen.Embed(LENGTH, WIDTH)(jnp.arange(ids.shape[1]))
        for _ in range(self.layers):
            x = LinenLayer()(x, mask)
        return word.attend(linen.LayerNorm()(x))


def next_loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """The mean loss of the next tokens; the last one's is not counted."""
    logits = model(batch["ids"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["ids"][:, 1:])
    return losses.mean()


def padded_right(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A batch of sequences of unlike lengths, with 0 behind their tokens."""
    ids = np.maximum(batch["ids"], 1)
    lengths = 3 + np.arange(len(ids)) % (ids.shape[1] - 2)
    return {"ids": np.where(np.arange(ids.shape[1]) < lengths[:, None], ids, 0).astype(np.int32)}


def batches(steps: int, length: int = LENGTH) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"ids": rng.integers(0, VOCABULARY, (BATCH, length), np.int32)} for _ in range(steps)]
