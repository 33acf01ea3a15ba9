"""Transformers and others in Flax NNX with dropout and with widths that four devices divide, written as users write
them, for the tests of the tensor axis."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from examples import gpt2_flax
from tests.jax import zoo_nnx
from tests.jax.zoo_nnx import EncoderLayer, FeedForward, Size

WIDTH, HEADS, VOCABULARY, LENGTH, RATE, BATCH = 32, 4, 48, 8, 0.1, zoo_nnx.BATCH
LAYERS = 2
SIZE = Size(WIDTH, HEADS, VOCABULARY, LENGTH, RATE, widening=4)


# --- an encoder-decoder, T5-like


class T5Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, crosses: bool):
        self.norm_1 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, use_bias=False, decode=False, rngs=rngs)
        self.norm_2 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.mlp = FeedForward(rngs, SIZE)
        self.crosses = crosses
        if crosses:
            self.norm_cross = nnx.RMSNorm(WIDTH, rngs=rngs)
            self.cross = nnx.MultiHeadAttention(HEADS, WIDTH, use_bias=False, decode=False, rngs=rngs)

    def __call__(self, x: jax.Array, memory: jax.Array | None = None, mask: jax.Array | None = None) -> jax.Array:
        x = x + self.attention(self.norm_1(x), mask=mask)
        if self.crosses:
            x = x + self.cross(self.norm_cross(x), memory)
        return x + self.mlp(self.norm_2(x))


class T5(nnx.Module):
    """One embedding for encoder, decoder and head."""

    def __init__(self, rngs: nnx.Rngs):
        self.shared = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.encoder = nnx.List([T5Layer(rngs, False) for _ in range(LAYERS)])
        self.encoder_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.decoder = nnx.List([T5Layer(rngs, True) for _ in range(LAYERS)])
        self.decoder_norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        x = self.shared(source)
        for layer in self.encoder:
            x = layer(x)
        memory, causal = self.encoder_norm(x), nnx.make_causal_mask(target)
        x = self.shared(target)
        for layer in self.decoder:
            x = layer(x, memory, causal)
        return self.shared.attend(self.decoder_norm(x))


def t5_loss(model: T5, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["source"], batch["target"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


# --- Llama: grouped queries in one product, rotated positions, a gate and a value in one product


class LlamaLayer(nnx.Module):
    """Eight query heads share four key heads: the fused product has blocks of different sizes."""

    def __init__(self, rngs: nnx.Rngs):
        self.width, self.head = WIDTH, WIDTH // 8
        self.norm_1 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 2 * WIDTH, use_bias=False, rngs=rngs)
        self.o = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.norm_2 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.gate_up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(RATE, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, _ = x.shape
        fused = self.qkv(self.norm_1(x))
        width = self.width
        q, k, v = fused[..., :width], fused[..., width : width * 3 // 2], fused[..., width * 3 // 2 :]
        q = rotated(q.reshape(batch, length, 8, self.head))
        k = rotated(k.reshape(batch, length, 4, self.head))
        mixed = jax.nn.dot_product_attention(q, k, v.reshape(batch, length, 4, self.head), is_causal=True)
        x = x + self.dropout(self.o(mixed.reshape(batch, length, width)))
        gate, up = jnp.split(self.gate_up(self.norm_2(x)), 2, axis=-1)
        return x + self.dropout(self.down(jax.nn.silu(gate) * up))


def rotated(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 100 ** (jnp.arange(half) / half)
    sine, cosine = jnp.sin(angles)[None, :, None], jnp.cos(angles)[None, :, None]
    one, other = x[..., :half], x[..., half:]
    return jnp.concatenate([one * cosine - other * sine, other * cosine + one * sine], -1)


class Llama(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List([LlamaLayer(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def causal_loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["input_ids"])[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["input_ids"][:, 1:]).mean()


# --- ViT


class ViT(nnx.Module):
    """Images [batch, side, side, 3] in patches, and a class token → logits."""

    def __init__(self, rngs: nnx.Rngs, side: int = 8, patch: int = 4):
        self.count = (side // patch) ** 2
        self.patches = nnx.Conv(3, WIDTH, (patch, patch), patch, padding="VALID", rngs=rngs)
        self.token = nnx.Param(jnp.full((1, 1, WIDTH), 0.1))
        self.position = nnx.Param(jax.random.normal(rngs.params(), (1, self.count + 1, WIDTH)) * 0.1)
        self.layers = nnx.List([EncoderLayer(rngs, SIZE) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = self.patches(image).reshape(image.shape[0], self.count, -1)
        token = jnp.broadcast_to(self.token.get_value(), (x.shape[0], 1, self.token.get_value().shape[-1]))
        x = jnp.concatenate([token, x], 1) + self.position.get_value()
        mask = jnp.ones((1, 1, 1, self.count + 1), bool)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x[:, 0])


def image_loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"]).mean()


# --- NCF


class NCF(nnx.Module):
    """A product of embeddings beside a tower over two others (arXiv 1708.05031)."""

    def __init__(self, rngs: nnx.Rngs):
        self.user_product, self.item_product, self.user_tower, self.item_tower = (
            nnx.Embed(VOCABULARY, WIDTH, rngs=rngs) for _ in range(4)
        )
        self.tower = nnx.List([nnx.Linear(2 * WIDTH, 2 * WIDTH, rngs=rngs) for _ in range(3)])
        self.dropout = nnx.Dropout(RATE, rngs=rngs)
        self.head = nnx.Linear(3 * WIDTH, 1, rngs=rngs)

    def __call__(self, user: jax.Array, item: jax.Array) -> jax.Array:
        product = self.user_product(user) * self.item_product(item)
        x = jnp.concatenate([self.user_tower(user), self.item_tower(item)], -1)
        for layer in self.tower:
            x = self.dropout(jax.nn.relu(layer(x)))
        return self.head(jnp.concatenate([product, x], -1))[..., 0]


def ncf_loss(model: NCF, batch: dict[str, jax.Array]) -> jax.Array:
    return optax.sigmoid_binary_cross_entropy(model(batch["user"], batch["item"]), batch["liked"]).mean()


GPT = gpt2_flax.Config(
    n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, vocab_size=VOCABULARY, n_positions=LENGTH, dropout=RATE
)

MODELS: dict[str, tuple[Callable[[], nnx.Module], Callable[..., Any]]] = {
    "gpt2": (lambda: gpt2_flax.create(GPT), gpt2_flax.next_token_loss),
    "bert": (lambda: zoo_nnx.Bert(LAYERS, nnx.Rngs(0), SIZE), zoo_nnx.bert_loss),
    "t5": (lambda: T5(nnx.Rngs(0)), t5_loss),
    "llama": (lambda: Llama(nnx.Rngs(0)), causal_loss),
    "vit": (lambda: ViT(nnx.Rngs(0)), image_loss),
    "ncf": (lambda: NCF(nnx.Rngs(0)), ncf_loss),
    "resnet": (lambda: zoo_nnx.ResNet(4, nnx.Rngs(0)), zoo_nnx.resnet_loss),
}


def batches(model: str, steps: int) -> list[dict[str, np.ndarray]]:
    if model in ("gpt2", "llama"):
        found = zoo_nnx.batches("gpt", steps, VOCABULARY, LENGTH)
        return [{"input_ids": batch["ids"]} for batch in found]
    return zoo_nnx.batches(model, steps, VOCABULARY, LENGTH)
