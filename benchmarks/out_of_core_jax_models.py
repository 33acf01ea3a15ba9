"""The six networks of `out_of_core.py` in Flax NNX: small widths and images, the published depths, NHWC."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

Made = tuple[nnx.Module, dict[str, jax.Array], Callable[..., jax.Array]]
"""A model, its batch, and its loss."""


class Layers(nnx.Module):
    """Modules and functions, one after the other."""

    def __init__(self, *rows: Any) -> None:
        self.rows = nnx.List(rows)

    def __call__(self, x: jax.Array) -> jax.Array:
        for row in self.rows:
            x = row(x)
        return x


class Normed(nnx.Module):
    """A convolution, the norm of its batch and, where ``active``, a ReLU."""

    def __init__(self, before: int, after: int, size: int, stride: int, rngs: nnx.Rngs, active: bool = True) -> None:
        self.conv = nnx.Conv(before, after, (size, size), stride, use_bias=False, rngs=rngs)
        self.norm, self.active = nnx.BatchNorm(after, momentum=0.9, rngs=rngs), active

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.norm(self.conv(x))
        return jax.nn.relu(x) if self.active else x


class Bottleneck(nnx.Module):
    """He et al., arXiv 1512.03385, figure 5, right; with ``widening`` 1 the basic block of wide networks."""

    def __init__(self, before: int, width: int, widening: int, stride: int, rngs: nnx.Rngs) -> None:
        after = width * widening
        sizes = [(1, 1), (3, stride), (1, 1)] if widening > 1 else [(3, stride), (3, 1)]
        channels = [before, width, width, after] if widening > 1 else [before, width, after]
        self.layers = nnx.List(
            [
                Normed(channels[n], channels[n + 1], size, step, rngs, active=n < len(sizes) - 1)
                for n, (size, step) in enumerate(sizes)
            ]
        )
        same = stride == 1 and before == after
        self.short = None if same else nnx.Conv(before, after, (1, 1), stride, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x
        for layer in self.layers:
            y = layer(y)
        return jax.nn.relu(y + (x if self.short is None else self.short(x)))


class Classifier(nnx.Module):
    """Rows of layers, the mean over places, and a head."""

    def __init__(self, stem: nnx.Module, rows: list[nnx.Module], width: int, rngs: nnx.Rngs) -> None:
        self.stem, self.rows, self.head = stem, nnx.List(rows), nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = self.stem(image)
        for row in self.rows:
            x = row(x)
        return self.head(x.mean((1, 2)))


def residual(depths: list[int], width: int, widening: int) -> nnx.Module:
    rngs = nnx.Rngs(0)
    rows: list[nnx.Module] = []
    before = width
    for stage, depth in enumerate(depths):
        for block in range(depth):
            rows.append(Bottleneck(before, width << stage, widening, 2 if stage and not block else 1, rngs))
            before = (width << stage) * widening
    return Classifier(Normed(3, width, 3, 1, rngs), rows, before, rngs)


class Plain(nnx.Module):
    """A convolution of VGG, with a ReLU and, where ``pooled``, the maximum of every four places."""

    def __init__(self, before: int, after: int, pooled: bool, rngs: nnx.Rngs) -> None:
        self.conv, self.pooled = nnx.Conv(before, after, (3, 3), rngs=rngs), pooled

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.conv(x))
        return nnx.max_pool(x, (2, 2), (2, 2)) if self.pooled else x


def vgg() -> nnx.Module:
    """VGG-16 (arXiv 1409.1556): 13 convolutions."""
    plan, rngs = [8, 8, 0, 16, 16, 0, 32, 32, 32, 0, 64, 64, 64, 0, 64, 64, 64], nnx.Rngs(0)
    rows: list[nnx.Module] = []
    before = 8
    for width, after in zip(plan[1:], [*plan[2:], 0], strict=True):
        if width:
            rows.append(Plain(before, width, after == 0, rngs))
            before = width
    return Classifier(Plain(3, 8, False, rngs), rows, before, rngs)


class UNet(nnx.Module):
    """Ronneberger et al., arXiv 1505.04597: values of the way down are read again on the way up."""

    def __init__(self, width: int = 8, depth: int = 4) -> None:
        widths, rngs = [width << level for level in range(depth + 1)], nnx.Rngs(0)
        self.down = nnx.List([_twice(a, b, rngs) for a, b in zip([3, *widths[:-2]], widths[:-1], strict=True)])
        self.middle = _twice(widths[-2], widths[-1], rngs)
        self.up = nnx.List([_twice(a + b, a, rngs) for a, b in zip(widths[-2::-1], widths[:0:-1], strict=True)])
        self.head = nnx.Conv(width, 1, (1, 1), rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        x, left = image, []
        for block in self.down:
            x = block(x)
            left.append(x)
            x = nnx.max_pool(x, (2, 2), (2, 2))
        x = self.middle(x)
        for block in self.up:
            x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
            x = block(jnp.concatenate([left.pop(), x], -1))
        return self.head(x)


def _twice(before: int, after: int, rngs: nnx.Rngs) -> nnx.Module:
    return Layers(Normed(before, after, 3, 1, rngs), Normed(after, after, 3, 1, rngs))


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, rngs: nnx.Rngs) -> None:
        self.norm_1, self.norm_2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.qkv, self.out = nnx.Linear(width, 3 * width, rngs=rngs), nnx.Linear(width, width, rngs=rngs)
        self.wide, self.narrow = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)
        self.drop, self.heads = nnx.Dropout(0.1, rngs=rngs), heads

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (
            t.reshape(*x.shape[:2], self.heads, -1) for t in jnp.split(self.qkv(self.norm_1(x)), 3, axis=-1)
        )  # fmt: skip
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.reshape(x.shape))
        return x + self.drop(self.narrow(jax.nn.gelu(self.wide(self.norm_2(x)))))


class Transformer(nnx.Module):
    def __init__(self, layers: int = 12, width: int = 64, vocabulary: int = 256) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, 4, rngs) for _ in range(layers)])
        self.head = nnx.Linear(width, vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def class_loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"]).mean()


def map_loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    wanted = batch["label"].astype(jnp.float32)[:, None, None, None] / 10
    return ((model(batch["image"]) - wanted) ** 2).mean()


def next_loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["tokens"])[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


MODELS: dict[str, Callable[[], nnx.Module]] = {
    "ResNet-50": lambda: residual([3, 4, 6, 3], 8, 4),
    "ResNet-200": lambda: residual([3, 24, 36, 3], 8, 4),
    "VGG-16": vgg,
    "WRN-28": lambda: residual([4, 4, 4], 32, 1),
    "U-Net": UNet,
    "Transformer": Transformer,
}
BATCH = {"ResNet-200": 8, "Transformer": 8}


def built(name: str) -> Made:
    model, count, drawn = MODELS[name](), BATCH.get(name, 16), np.random.default_rng(1)
    if name == "Transformer":
        tokens = drawn.integers(0, 256, (count, 128), dtype=np.int32)
        return model, {"tokens": jnp.asarray(tokens)}, next_loss
    image = jnp.asarray(drawn.standard_normal((count, 64, 64, 3)), jnp.float32)
    label = jnp.asarray(drawn.integers(0, 10, count, dtype=np.int32))
    return model, {"image": image, "label": label}, map_loss if name == "U-Net" else class_loss
