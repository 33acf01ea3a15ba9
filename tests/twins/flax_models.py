"""BERT, T5, NCF and ResNet in Flax NNX, written as one writes them there, for twins of the PyTorch models.

Sizes are arguments; parameters are never made: the tests take their shapes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

Batch = dict[str, jax.Array]


def token_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def attention(query: jax.Array, key: jax.Array, value: jax.Array, bias: Any = None, **options: Any) -> jax.Array:
    """[batch, length, heads, size] each; keeps these alone for the backward, which computes the scores again, as
    PyTorch's kernel does."""
    return jax.checkpoint(lambda *given: jax.nn.dot_product_attention(*given))(query, key, value, bias)


def gelu(x: jax.Array) -> jax.Array:
    """The exact one; keeps ``x`` alone, as PyTorch's kernel does."""
    return jax.checkpoint(lambda given: jax.nn.gelu(given, approximate=False))(x)


# BERT (arXiv 1810.04805) --------------------------------------------------------------------------------------------


class BertLayer(nnx.Module):
    def __init__(self, width: int, heads: int, inner: int, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, attention_fn=attention, rngs=rngs)
        self.attention_norm = nnx.LayerNorm(width, epsilon=1e-12, rngs=rngs)
        self.up, self.down = nnx.Linear(width, inner, rngs=rngs), nnx.Linear(inner, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, epsilon=1e-12, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.attention_norm(x + self.attention(x))
        return self.norm(x + self.down(gelu(self.up(x))))


class Bert(nnx.Module):
    """Token ids → logits of the masked tokens' vocabulary; the head is tied to the embedding."""

    def __init__(self, vocabulary: int, positions: int, layers: int, width: int, heads: int, rngs: nnx.Rngs):
        self.word = nnx.Embed(vocabulary, width, rngs=rngs)
        self.position = nnx.Embed(positions, width, rngs=rngs)
        self.kind = nnx.Embed(2, width, rngs=rngs)
        self.embedded = nnx.LayerNorm(width, epsilon=1e-12, rngs=rngs)
        self.layers = nnx.List([BertLayer(width, heads, 4 * width, rngs) for _ in range(layers)])
        self.transform = nnx.Linear(width, width, rngs=rngs)
        self.transformed = nnx.LayerNorm(width, epsilon=1e-12, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(vocabulary))

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.word(ids) + self.kind(jnp.zeros_like(ids)) + self.position(jnp.arange(ids.shape[1]))
        x = self.embedded(x)
        for layer in self.layers:
            x = layer(x)
        x = self.transformed(gelu(self.transform(x)))
        return self.word.attend(x) + self.bias.get_value()


def bert_loss(model: Bert, batch: Batch) -> jax.Array:
    return token_loss(model(batch["ids"]), batch["labels"])


# T5 (arXiv 1910.10683) ----------------------------------------------------------------------------------------------


class T5Attention(nnx.Module):
    """Without scaling and without biases; the first of a side holds the biases of relative positions."""

    def __init__(self, width: int, heads: int, size: int, rngs: nnx.Rngs, buckets: int | None = None):
        self.query, self.key, self.value = (
            nnx.Linear(width, heads * size, use_bias=False, rngs=rngs) for _ in range(3)
        )
        self.out = nnx.Linear(heads * size, width, use_bias=False, rngs=rngs)
        self.heads, self.size, self.buckets = heads, size, buckets
        self.relative = nnx.Embed(buckets, heads, rngs=rngs) if buckets else None

    def positions(self, length: int) -> jax.Array:
        """[1, heads, length, length]"""
        apart = jnp.arange(length)[None, :] - jnp.arange(length)[:, None]
        return self.relative(jnp.clip(jnp.abs(apart), 0, self.buckets - 1)).transpose(2, 0, 1)[None]

    def __call__(self, x: jax.Array, memory: jax.Array, bias: jax.Array | None, mask: Any = None) -> tuple[Any, Any]:
        batch, length = x.shape[:2]
        q = self.query(x).reshape(batch, length, self.heads, self.size)
        k, v = (p(memory).reshape(batch, memory.shape[1], self.heads, self.size) for p in (self.key, self.value))
        if self.relative is not None:
            bias = self.positions(length)
            bias = bias if mask is None else bias + mask
        mixed = attention(q * self.size**0.5, k, v, bias)  # T5 does not scale
        mixed = mixed.reshape(batch, length, self.heads * self.size)
        return self.out(mixed), bias


class T5Layer(nnx.Module):
    def __init__(self, width: int, heads: int, size: int, inner: int, crosses: bool, first: bool, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.attention = T5Attention(width, heads, size, rngs, 32 if first else None)
        self.crosses = crosses
        if crosses:
            self.cross_norm = nnx.RMSNorm(width, rngs=rngs)
            self.cross = T5Attention(width, heads, size, rngs)
        self.feed_norm = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, inner, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(inner, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, bias: Any, memory: Any = None, mask: Any = None) -> tuple[jax.Array, Any]:
        normed = self.norm(x)
        mixed, bias = self.attention(normed, normed, bias, mask)
        x = x + mixed
        if self.crosses:
            x = x + self.cross(self.cross_norm(x), memory, None)[0]
        return x + self.down(jax.nn.relu(self.up(self.feed_norm(x)))), bias


class T5(nnx.Module):
    """One embedding for the encoder, the decoder and the head."""

    def __init__(self, vocabulary: int, layers: int, width: int, heads: int, size: int, inner: int, rngs: nnx.Rngs):
        self.shared = nnx.Embed(vocabulary, width, rngs=rngs)
        sizes = (width, heads, size, inner)
        self.encoder = nnx.List([T5Layer(*sizes, False, i == 0, rngs) for i in range(layers)])
        self.encoder_norm = nnx.RMSNorm(width, rngs=rngs)
        self.decoder = nnx.List([T5Layer(*sizes, True, i == 0, rngs) for i in range(layers)])
        self.decoder_norm = nnx.RMSNorm(width, rngs=rngs)
        self.width = width

    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        x, bias = self.shared(source), None
        for layer in self.encoder:
            x, bias = layer(x, bias)
        memory = self.encoder_norm(x)
        length = target.shape[1]
        causal = jnp.where(jnp.tril(jnp.ones((length, length), bool)), 0.0, -1e9)
        x, bias = self.shared(target), None
        for layer in self.decoder:
            x, bias = layer(x, bias, memory, causal)
        return self.shared.attend(self.decoder_norm(x) * self.width**-0.5)


def t5_loss(model: T5, batch: Batch) -> jax.Array:
    return token_loss(model(batch["source"], batch["target"]), batch["labels"])


# NCF (arXiv 1708.05031) ---------------------------------------------------------------------------------------------


class Hidden(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.relu(self.linear(x))


class NCF(nnx.Module):
    def __init__(self, users: int, items: int, width: int, depth: int, rngs: nnx.Rngs):
        self.user_product, self.item_product = (nnx.Embed(n, width, rngs=rngs) for n in (users, items))
        self.user_tower, self.item_tower = (nnx.Embed(n, 2 * width, rngs=rngs) for n in (users, items))
        self.tower = nnx.List([Hidden(4 * width, rngs) for _ in range(depth)])
        self.head = nnx.Linear(5 * width, 1, rngs=rngs)

    def __call__(self, user: jax.Array, item: jax.Array) -> jax.Array:
        product = self.user_product(user) * self.item_product(item)
        x = jnp.concatenate([self.user_tower(user), self.item_tower(item)], -1)
        for layer in self.tower:
            x = layer(x)
        return self.head(jnp.concatenate([product, x], -1))[:, 0]


def ncf_loss(model: NCF, batch: Batch) -> jax.Array:
    return optax.sigmoid_binary_cross_entropy(model(batch["user"], batch["item"]), batch["label"]).mean()


# ResNet (arXiv 1512.03385) ------------------------------------------------------------------------------------------


class Residual(nnx.Module):
    def __init__(self, inside: int, outside: int, stride: int, rngs: nnx.Rngs):
        self.first = nnx.Conv(inside, outside, (3, 3), stride, padding=1, use_bias=False, rngs=rngs)
        self.first_norm = nnx.BatchNorm(outside, rngs=rngs)
        self.second = nnx.Conv(outside, outside, (3, 3), padding=1, use_bias=False, rngs=rngs)
        self.second_norm = nnx.BatchNorm(outside, rngs=rngs)
        same = inside == outside and stride == 1
        self.skip = None if same else nnx.Conv(inside, outside, (1, 1), stride, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        inner = jax.nn.relu(self.first_norm(self.first(x)))
        return jax.nn.relu(self.second_norm(self.second(inner)) + (x if self.skip is None else self.skip(x)))


class ResNet(nnx.Module):
    """Images [batch, height, width, 3] → logits."""

    def __init__(self, width: int, classes: int, rngs: nnx.Rngs):
        self.stem = nnx.Conv(3, width, (3, 3), padding=1, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        widths = [width, width, 2 * width, 2 * width, 4 * width, 4 * width]
        before = [width, *widths[:-1]]
        self.blocks = nnx.List([Residual(a, b, 1 if a == b else 2, rngs) for a, b in zip(before, widths, strict=True)])
        self.head = nnx.Linear(widths[-1], classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.norm(self.stem(images)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


def resnet_loss(model: ResNet, batch: Batch) -> jax.Array:
    return token_loss(model(batch["images"]), batch["labels"])
