"""Small models in Flax NNX, written as users write them, for the tests of pipelines."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardwright.jax as sw

WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = 16, 2, 24, 8, 8


@dataclass(frozen=True)
class Size:
    width: int
    heads: int
    vocabulary: int
    length: int
    dropout: float = 0.0
    widening: int = 2

    def drop(self, rngs: nnx.Rngs) -> Any:
        """A dropout, or nothing."""
        return nnx.Dropout(self.dropout, rngs=rngs) if self.dropout else _same


def _same(x: jax.Array) -> jax.Array:
    return x


def small() -> Size:
    return Size(WIDTH, HEADS, VOCABULARY, LENGTH)


class FeedForward(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, size: Size | None = None):
        size = size or small()
        self.wi = nnx.Linear(size.width, size.widening * size.width, rngs=rngs)
        self.wo = nnx.Linear(size.widening * size.width, size.width, rngs=rngs)
        self.dropout = size.drop(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.wo(self.dropout(jax.nn.gelu(self.wi(x)))))


# --- GPT


class DecoderLayer(nnx.Module):
    """Normalised before attention and feed-forward, as GPT-2's."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm_1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.mlp = FeedForward(rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm_1(x), mask=mask)
        return x + self.mlp(self.norm_2(x))


class Gpt(nnx.Module):
    """Token ids → logits of the next; the head is the embedding."""

    def __init__(self, layers: int, rngs: nnx.Rngs):
        self.word = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.position = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(ids)
        x = self.word(ids) + self.position(jnp.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x, mask)
        return self.word.attend(self.norm(x))


def gpt_loss(model: Gpt, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["ids"])[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["ids"][:, 1:]).mean()


# --- BERT


class EncoderLayer(nnx.Module):
    """Normalised after every residual, as BERT's."""

    def __init__(self, rngs: nnx.Rngs, size: Size):
        self.attention = nnx.MultiHeadAttention(
            size.heads, size.width, decode=False, dropout_rate=size.dropout, rngs=rngs
        )
        self.dropout = size.drop(rngs)
        self.norm_1 = nnx.LayerNorm(size.width, rngs=rngs)
        self.mlp = FeedForward(rngs, size)
        self.norm_2 = nnx.LayerNorm(size.width, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = self.norm_1(x + self.dropout(self.attention(x, mask=mask, deterministic=False)))
        return self.norm_2(x + self.mlp(x))


class Bert(nnx.Module):
    """Token ids → logits; the head is tied to the embedding, with a bias of its own."""

    def __init__(self, layers: int, rngs: nnx.Rngs, size: Size | None = None):
        size = size or small()
        self.word = nnx.Embed(size.vocabulary, size.width, rngs=rngs)
        self.position = nnx.Embed(size.length, size.width, rngs=rngs)
        self.norm = nnx.LayerNorm(size.width, rngs=rngs)
        self.layers = nnx.List([EncoderLayer(rngs, size) for _ in range(layers)])
        self.transform = nnx.Linear(size.width, size.width, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(size.vocabulary))

    def __call__(self, ids: jax.Array, attended: jax.Array) -> jax.Array:
        mask = attended[:, None, None, :] > 0
        x = self.norm(self.word(ids) + self.position(jnp.arange(ids.shape[1])))
        for layer in self.layers:
            x = layer(x, mask)
        return self.word.attend(jax.nn.gelu(self.transform(x))) + self.bias.get_value()


def bert_loss(model: Bert, batch: dict[str, jax.Array]) -> sw.Weighted:
    """Of masked tokens alone: microbatches weigh differently."""
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["ids"], batch["attended"]), batch["labels"])
    masked = batch["masked"].astype(jnp.float32)
    return sw.weighted((losses * masked).sum() / masked.sum(), masked.sum())


# --- an encoder-decoder, T5-like


class T5Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, crosses: bool):
        self.norm_1 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, use_bias=False, decode=False, rngs=rngs)
        self.norm_2 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.mlp = FeedForward(rngs)
        self.crosses = crosses
        if crosses:
            self.norm_cross = nnx.RMSNorm(WIDTH, rngs=rngs)
            self.cross = nnx.MultiHeadAttention(HEADS, WIDTH, use_bias=False, decode=False, rngs=rngs)

    def __call__(self, x: jax.Array, bias: jax.Array, memory: jax.Array | None, mask: jax.Array | None) -> jax.Array:
        x = x + self.attention(self.norm_1(x) + bias, mask=mask)
        if self.crosses:
            x = x + self.cross(self.norm_cross(x), memory)
        return x + self.mlp(self.norm_2(x))


class T5(nnx.Module):
    """One embedding for encoder, decoder and head; a position bias that every layer of a side shares."""

    def __init__(self, layers: int, rngs: nnx.Rngs):
        self.shared = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.encoder_bias = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.decoder_bias = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.encoder = nnx.List([T5Layer(rngs, False) for _ in range(layers)])
        self.encoder_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.decoder = nnx.List([T5Layer(rngs, True) for _ in range(layers)])
        self.decoder_norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        places = jnp.arange(source.shape[1])
        x, bias = self.shared(source), self.encoder_bias(places)
        for layer in self.encoder:
            x = layer(x, bias, None, None)
        memory = self.encoder_norm(x)
        causal = nnx.make_causal_mask(target)
        x, bias = self.shared(target), self.decoder_bias(places)
        for layer in self.decoder:
            x = layer(x, bias, memory, causal)
        return self.shared.attend(self.decoder_norm(x))


def t5_loss(model: T5, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["source"], batch["target"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


# --- neural collaborative filtering


class NCF(nnx.Module):
    """Users and items → logits, from a product of embeddings and a tower over two others (arXiv 1708.05031)."""

    def __init__(self, layers: int, rngs: nnx.Rngs):
        self.user_product = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.item_product = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.user_tower = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.item_tower = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.tower = nnx.List([nnx.Linear(2 * WIDTH, 2 * WIDTH, rngs=rngs) for _ in range(layers)])
        self.head = nnx.Linear(3 * WIDTH, 1, rngs=rngs)

    def __call__(self, user: jax.Array, item: jax.Array) -> jax.Array:
        product = self.user_product(user) * self.item_product(item)
        x = jnp.concatenate([self.user_tower(user), self.item_tower(item)], -1)
        for layer in self.tower:
            x = jax.nn.relu(layer(x))
        return self.head(jnp.concatenate([product, x], -1))[..., 0]


def ncf_loss(model: NCF, batch: dict[str, jax.Array]) -> jax.Array:
    return optax.sigmoid_binary_cross_entropy(model(batch["user"], batch["item"]), batch["liked"]).mean()


# --- ResNet


class Residual(nnx.Module):
    def __init__(self, features: int, out: int, strides: int, rngs: nnx.Rngs):
        self.conv_1 = nnx.Conv(features, out, (3, 3), strides, use_bias=False, rngs=rngs)
        self.norm_1 = nnx.BatchNorm(out, momentum=0.9, rngs=rngs)
        self.conv_2 = nnx.Conv(out, out, (3, 3), use_bias=False, rngs=rngs)
        self.norm_2 = nnx.BatchNorm(out, momentum=0.9, rngs=rngs)
        self.project = nnx.Conv(features, out, (1, 1), strides, use_bias=False, rngs=rngs) if strides > 1 else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm_2(self.conv_2(jax.nn.relu(self.norm_1(self.conv_1(x)))))
        return jax.nn.relu(y + (self.project(x) if self.project is not None else x))


class ResNet(nnx.Module):
    """Images [batch, 8, 8, 3] → logits."""

    def __init__(self, blocks: int, rngs: nnx.Rngs, width: int = 8):
        self.stem = nnx.Conv(3, width, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        wide, twice = blocks // 2, 2 * width
        self.blocks = nnx.List(
            [
                Residual(width if i <= wide else twice, width if i < wide else twice, 2 if i == wide else 1, rngs)
                for i in range(blocks)
            ]
        )
        self.head = nnx.Linear(twice, 10, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.norm(self.stem(image)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


def resnet_loss(model: ResNet, batch: dict[str, jax.Array]) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"]).mean()


MODELS: dict[str, tuple[Any, Any]] = {
    "gpt": (lambda: Gpt(4, nnx.Rngs(0)), gpt_loss),
    "bert": (lambda: Bert(4, nnx.Rngs(0)), bert_loss),
    "t5": (lambda: T5(2, nnx.Rngs(0)), t5_loss),
    "ncf": (lambda: NCF(3, nnx.Rngs(0)), ncf_loss),
    "resnet": (lambda: ResNet(4, nnx.Rngs(0)), resnet_loss),
}


def batches(model: str, steps: int, vocabulary: int = VOCABULARY, length: int = LENGTH) -> list[dict[str, np.ndarray]]:
    """What each model's loss reads, drawn alike every time."""
    rng = np.random.default_rng(1)

    def tokens() -> np.ndarray:
        return rng.integers(0, vocabulary, (BATCH, length), np.int32)

    def one() -> dict[str, np.ndarray]:
        if model == "gpt":
            return {"ids": tokens()}
        if model == "bert":
            masked = (rng.random((BATCH, length)) < 0.4).astype(np.int32)
            masked[:, 0] = 1
            attended = np.ones((BATCH, length), np.int32)
            attended[: BATCH // 2, -2:] = 0
            return {"ids": tokens(), "labels": tokens(), "masked": masked, "attended": attended}
        if model == "t5":
            return {"source": tokens(), "target": tokens(), "labels": tokens()}
        if model == "ncf":
            ids = rng.integers(0, vocabulary, (2, BATCH), np.int32)
            return {"user": ids[0], "item": ids[1], "liked": rng.integers(0, 2, BATCH).astype(np.float32)}
        image = rng.standard_normal((BATCH, 8, 8, 3)).astype(np.float32)
        return {"image": image, "label": rng.integers(0, 10, BATCH).astype(np.int32)}

    return [one() for _ in range(steps)]
