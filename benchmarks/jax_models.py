"""The five models of `step_time.py` in Flax NNX: FILE.py:FUNCTION for the command line, one microbatch as the sample.

Sizes as in `memory.py`: 4 layers of 256, vocabulary 4096, sequences of 128.
"""

import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples import gpt2_flax
from tests.jax import zoo_nnx

LAYERS, WIDTH, HEADS, VOCABULARY, BATCH, SEQUENCE = 4, 256, 8, 4096, 4, 128
zoo_nnx.WIDTH, zoo_nnx.HEADS, zoo_nnx.VOCABULARY, zoo_nnx.LENGTH = WIDTH, HEADS, VOCABULARY, SEQUENCE

_DRAWN = np.random.default_rng(0)


def _tokens(*shape: int) -> Any:
    return jnp.asarray(_DRAWN.integers(0, VOCABULARY, shape, dtype=np.int32))


def gpt2() -> Any:
    config = gpt2_flax.Config(n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, vocab_size=VOCABULARY, n_positions=256)
    return gpt2_flax.create(config, seed=0), {"input_ids": _tokens(BATCH, SEQUENCE)}, gpt2_flax.next_token_loss


def bert() -> Any:
    everything = jnp.ones((BATCH, SEQUENCE), jnp.int32)
    tokens = _tokens(BATCH, SEQUENCE)
    sample = {"ids": tokens, "labels": tokens, "attended": everything, "masked": everything}
    return zoo_nnx.Bert(LAYERS, nnx.Rngs(0)), sample, zoo_nnx.bert_loss


def t5() -> Any:
    tokens = _tokens(BATCH, SEQUENCE)
    return (
        zoo_nnx.T5(LAYERS, nnx.Rngs(0)), {"source": tokens, "target": tokens, "labels": tokens}, zoo_nnx.t5_loss
    )  # fmt: skip


def resnet() -> Any:
    images = jnp.asarray(_DRAWN.standard_normal((32, 64, 64, 3)), jnp.float32)
    return zoo_nnx.ResNet(6, nnx.Rngs(0)), {"image": images, "label": _tokens(32) % 10}, zoo_nnx.resnet_loss


def ncf() -> Any:
    liked = jnp.asarray(_DRAWN.random(4096), jnp.float32)
    sample = {"user": _tokens(4096), "item": _tokens(4096), "liked": liked}
    return zoo_nnx.NCF(3, nnx.Rngs(0)), sample, zoo_nnx.ncf_loss
