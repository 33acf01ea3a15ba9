"""Small models in Flax Linen, written as users write them, for the tests of pipelines. Every loss function takes the
parameters, a batch, and (where the model has any) its batch statistics."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen

import shardwright.jax as sw

WIDTH, HEADS, VOCABULARY, LENGTH = 16, 2, 24, 8


class DecoderLayer(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        y = linen.LayerNorm(name="norm_1")(x)
        x = x + linen.MultiHeadDotProductAttention(HEADS, name="attention")(y, mask=mask)
        y = linen.LayerNorm(name="norm_2")(x)
        return x + linen.Dense(WIDTH, name="wo")(linen.gelu(linen.Dense(2 * WIDTH, name="wi")(y)))


class Gpt(linen.Module):
    layers: int = 4

    @linen.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        word = linen.Embed(VOCABULARY, WIDTH, name="word")
        position = linen.Embed(LENGTH, WIDTH, name="position")
        mask = linen.make_causal_mask(ids)
        x = word(ids) + position(jnp.arange(ids.shape[1]))
        for i in range(self.layers):
            x = DecoderLayer(name=f"layer_{i}")(x, mask)
        return word.attend(linen.LayerNorm(name="norm")(x))


def gpt_loss(apply: Callable[..., Any], batch: Any) -> jax.Array:
    logits = apply(batch["ids"])[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["ids"][:, 1:]).mean()


class EncoderLayer(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        y = linen.MultiHeadDotProductAttention(HEADS, name="attention")(x, mask=mask)
        x = linen.LayerNorm(name="norm_1")(x + y)
        y = linen.Dense(WIDTH, name="wo")(linen.gelu(linen.Dense(2 * WIDTH, name="wi")(x)))
        return linen.LayerNorm(name="norm_2")(x + y)


class Bert(linen.Module):
    layers: int = 4

    @linen.compact
    def __call__(self, ids: jax.Array, attended: jax.Array) -> jax.Array:
        mask = attended[:, None, None, :] > 0
        word = linen.Embed(VOCABULARY, WIDTH, name="word")
        position = linen.Embed(LENGTH, WIDTH, name="position")
        x = linen.LayerNorm(name="norm")(word(ids) + position(jnp.arange(ids.shape[1])))
        for i in range(self.layers):
            x = EncoderLayer(name=f"layer_{i}")(x, mask)
        return word.attend(linen.gelu(linen.Dense(WIDTH, name="transform")(x)))


def bert_loss(apply: Callable[..., Any], batch: Any) -> sw.Weighted:
    logits = apply(batch["ids"], batch["attended"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    masked = batch["masked"].astype(jnp.float32)
    return sw.weighted((losses * masked).sum() / masked.sum(), masked.sum())


class T5Layer(linen.Module):
    crosses: bool

    @linen.compact
    def __call__(self, x: jax.Array, memory: jax.Array | None = None, mask: jax.Array | None = None) -> jax.Array:
        y = linen.RMSNorm(name="norm_1")(x)
        x = x + linen.MultiHeadDotProductAttention(HEADS, use_bias=False, name="attention")(y, mask=mask)
        if self.crosses:
            y = linen.RMSNorm(name="norm_cross")(x)
            x = x + linen.MultiHeadDotProductAttention(HEADS, use_bias=False, name="cross")(y, memory)
        y = linen.RMSNorm(name="norm_2")(x)
        return x + linen.Dense(WIDTH, name="wo")(linen.relu(linen.Dense(2 * WIDTH, name="wi")(y)))


class T5(linen.Module):
    layers: int = 2

    @linen.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        shared = linen.Embed(VOCABULARY, WIDTH, name="shared")
        x = shared(source)
        for i in range(self.layers):
            x = T5Layer(False, name=f"encoder_{i}")(x)
        memory = linen.RMSNorm(name="encoder_norm")(x)
        x, causal = shared(target), linen.make_causal_mask(target)
        for i in range(self.layers):
            x = T5Layer(True, name=f"decoder_{i}")(x, memory, causal)
        return shared.attend(linen.RMSNorm(name="decoder_norm")(x))


def t5_loss(apply: Callable[..., Any], batch: Any) -> jax.Array:
    logits = apply(batch["source"], batch["target"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


class NCF(linen.Module):
    layers: int = 3

    @linen.compact
    def __call__(self, user: jax.Array, item: jax.Array) -> jax.Array:
        def embed(name: str, ids: jax.Array) -> jax.Array:
            return linen.Embed(VOCABULARY, WIDTH, name=name)(ids)

        product = embed("user_product", user) * embed("item_product", item)
        x = jnp.concatenate([embed("user_tower", user), embed("item_tower", item)], -1)
        for i in range(self.layers):
            x = linen.relu(linen.Dense(2 * WIDTH, name=f"tower_{i}")(x))
        return linen.Dense(1, name="head")(jnp.concatenate([product, x], -1))[..., 0]


def ncf_loss(apply: Callable[..., Any], batch: Any) -> jax.Array:
    return optax.sigmoid_binary_cross_entropy(apply(batch["user"], batch["item"]), batch["liked"]).mean()


class Residual(linen.Module):
    out: int
    strides: int

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def norm(name: str, y: jax.Array) -> jax.Array:
            return linen.BatchNorm(use_running_average=False, momentum=0.9, name=name)(y)

        steps = (self.strides, self.strides)
        y = linen.Conv(self.out, (3, 3), steps, use_bias=False, name="conv_1")(x)
        y = linen.Conv(self.out, (3, 3), use_bias=False, name="conv_2")(linen.relu(norm("norm_1", y)))
        if self.strides > 1:
            x = linen.Conv(self.out, (1, 1), steps, use_bias=False, name="project")(x)
        return linen.relu(norm("norm_2", y) + x)


class ResNet(linen.Module):
    blocks: int = 4

    @linen.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        x = linen.Conv(8, (3, 3), use_bias=False, name="stem")(image)
        x = linen.relu(linen.BatchNorm(use_running_average=False, momentum=0.9, name="norm")(x))
        wide = self.blocks // 2
        for i in range(self.blocks):
            x = Residual(8 if i < wide else 16, 2 if i == wide else 1, name=f"block_{i}")(x)
        return linen.Dense(10, name="head")(x.mean((1, 2)))


def resnet_loss(apply: Callable[..., Any], batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(apply(batch["image"]), batch["label"]).mean()


MODELS: dict[str, tuple[linen.Module, Callable[..., Any]]] = {
    "gpt": (Gpt(), gpt_loss),
    "bert": (Bert(), bert_loss),
    "t5": (T5(), t5_loss),
    "ncf": (NCF(), ncf_loss),
    "resnet": (ResNet(), resnet_loss),
}
