"""The models of `step_time.py` in Flax NNX: FILE.py:FUNCTION for the command line, one microbatch as the sample.

Sizes as in `memory.py`: 4 layers of 256, vocabulary 4096, sequences of 128. Every function takes a width.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples import gpt2_flax
from tests.jax import zoo_dropout, zoo_nnx

LAYERS, WIDTH, HEADS, VOCABULARY, BATCH, SEQUENCE = 4, 256, 8, 4096, 4, 128
STEPS_OF_TIME = 32

_DRAWN = np.random.default_rng(0)


def _sized(width: int) -> None:
    """Give the models of the tests these sizes, which they read as they are built."""
    for zoo in (zoo_nnx, zoo_dropout):
        zoo.WIDTH, zoo.HEADS, zoo.VOCABULARY, zoo.LENGTH = width, HEADS, VOCABULARY, SEQUENCE
    zoo_dropout.LAYERS, zoo_dropout.RATE = LAYERS, 0.0
    zoo_dropout.SIZE = zoo_nnx.Size(width, HEADS, VOCABULARY, SEQUENCE, widening=4)


_sized(WIDTH)


def _tokens(*shape: int) -> Any:
    return jnp.asarray(_DRAWN.integers(0, VOCABULARY, shape, dtype=np.int32))


def _images(count: int, *shape: int) -> Any:
    return jnp.asarray(_DRAWN.standard_normal((count, *shape)), jnp.float32)


def gpt2(width: int = WIDTH) -> Any:
    config = gpt2_flax.Config(n_layer=LAYERS, n_head=HEADS, n_embd=width, vocab_size=VOCABULARY, n_positions=256)
    return gpt2_flax.create(config, seed=0), {"input_ids": _tokens(BATCH, SEQUENCE)}, gpt2_flax.next_token_loss


def bert(width: int = WIDTH) -> Any:
    _sized(width)
    everything = jnp.ones((BATCH, SEQUENCE), jnp.int32)
    tokens = _tokens(BATCH, SEQUENCE)
    sample = {"ids": tokens, "labels": tokens, "attended": everything, "masked": everything}
    return zoo_nnx.Bert(LAYERS, nnx.Rngs(0)), sample, zoo_nnx.bert_loss


def t5(width: int = WIDTH) -> Any:
    _sized(width)
    tokens = _tokens(BATCH, SEQUENCE)
    return (
        zoo_nnx.T5(LAYERS, nnx.Rngs(0)), {"source": tokens, "target": tokens, "labels": tokens}, zoo_nnx.t5_loss
    )  # fmt: skip


def resnet(width: int = WIDTH) -> Any:
    sample = {"image": _images(32, 64, 64, 3), "label": _tokens(32) % 10}
    return zoo_nnx.ResNet(6, nnx.Rngs(0), width // 32), sample, zoo_nnx.resnet_loss


def ncf(width: int = WIDTH) -> Any:
    _sized(width)
    liked = jnp.asarray(_DRAWN.random(4096), jnp.float32)
    sample = {"user": _tokens(4096), "item": _tokens(4096), "liked": liked}
    return zoo_nnx.NCF(3, nnx.Rngs(0)), sample, zoo_nnx.ncf_loss


def llama(width: int = WIDTH) -> Any:
    _sized(width)
    return zoo_dropout.Llama(nnx.Rngs(0)), {"input_ids": _tokens(BATCH, SEQUENCE)}, zoo_dropout.causal_loss


def vit(width: int = WIDTH) -> Any:
    _sized(width)
    sample = {"image": _images(8, 64, 64, 3), "label": _tokens(8) % 10}
    return zoo_dropout.ViT(nnx.Rngs(0), side=64, patch=8), sample, zoo_dropout.image_loss


def mixer(width: int = WIDTH) -> Any:
    sample = {"image": _images(8, 64, 768), "label": _tokens(8) % 10}
    return Mixer(LAYERS, 64, width, nnx.Rngs(0)), sample, zoo_dropout.image_loss


def lstm(width: int = WIDTH) -> Any:
    return Lstm(LAYERS, width, nnx.Rngs(0)), {"input_ids": _tokens(16, STEPS_OF_TIME)}, zoo_dropout.causal_loss


class MixerBlock(nnx.Module):
    def __init__(self, patches: int, width: int, rngs: nnx.Rngs) -> None:
        self.norm_1, self.norm_2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.patches_1 = nnx.Linear(patches, width // 2, rngs=rngs)
        self.patches_2 = nnx.Linear(width // 2, patches, rngs=rngs)
        self.channels_1 = nnx.Linear(width, 4 * width, rngs=rngs)
        self.channels_2 = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        along = self.patches_2(jax.nn.gelu(self.patches_1(self.norm_1(x).swapaxes(1, 2))))
        x = x + along.swapaxes(1, 2)
        return x + self.channels_2(jax.nn.gelu(self.channels_1(self.norm_2(x))))


class Mixer(nnx.Module):
    """An MLP-mixer (Tolstikhin et al. 2021) of images in patches, as that of `step_models.py`."""

    def __init__(self, depth: int, patches: int, width: int, rngs: nnx.Rngs) -> None:
        self.patch = nnx.Linear(3 * 16 * 16, width, rngs=rngs)
        self.blocks = nnx.List([MixerBlock(patches, width, rngs) for _ in range(depth)])
        self.norm, self.head = nnx.LayerNorm(width, rngs=rngs), nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = self.patch(image)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Lstm(nnx.Module):
    """Token ids → logits of the next."""

    def __init__(self, layers: int, width: int, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.layers = nnx.List(
            [nnx.RNN(nnx.OptimizedLSTMCell(width, width, rngs=rngs), rngs=rngs) for _ in range(layers)]
        )
        self.head = nnx.Linear(width, VOCABULARY, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
