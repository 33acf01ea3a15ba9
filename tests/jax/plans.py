"""GPT-2 for the tests of training: plans for it, and batches.

Beside the planner's own plans there are some with the tensor layouts that a large model would get.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardwright.jax as sw
from examples import gpt2_flax
from shardwright.core.layout.placements import Layout, Split
from shardwright.core.model.graph import Graph

CONFIG = gpt2_flax.Config(n_layer=2, n_head=4, n_embd=32, vocab_size=64, n_positions=16)
LENGTH = 12
BATCH = 16
MICROBATCH = 2
STEPS = 20


def create() -> gpt2_flax.GPT2:
    return gpt2_flax.create(CONFIG, seed=3)


@cache
def gpt2_graph() -> Graph:
    sample = {"input_ids": jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)}
    return sw.capture(nnx.eval_shape(create), sample, gpt2_flax.next_token_loss)


def plan_of(graph: Graph, dp: int = 1, tp: int = 1, microbatch: int = 2, batch: int = BATCH, **pins: Any) -> sw.Plan:
    cluster = sw.Cluster("cpu", nodes=1, devices_per_node=dp * tp * pins.get("pp", 1))
    pins = {"pp": 1, "precision": "fp32", "recompute": "none", "shard": 0} | pins
    return sw.plan(graph, cluster, batch=batch, dp=dp, tp=tp, microbatch=microbatch, **pins)


def megatron(graph: Graph, dp: int = 1, tp: int = 1, microbatch: int = 2, **pins: Any) -> sw.Plan:
    """A plan with GPT-2 split as Megatron does (arXiv 1909.08053); on CPUs tiny models gain nothing."""
    width = CONFIG.n_embd
    block = {
        "w0": Split(1, (width, width, width)),  # c_attn
        "v2": Split(0, (width, width, width)),
        "w1": Split(0),  # attn.c_proj
        "w2": Split(1),  # c_fc
        "v6": Split(0),
        "w3": Split(0),  # mlp.c_proj
    }
    layouts = {"0/w0": Split(0), "2/w0": Split(1), **{f"1/{role}": split for role, split in block.items()}}
    chosen = tuple((slot, Layout.of(tp=split)) for slot, split in layouts.items())
    plan = plan_of(graph, dp, tp, microbatch, **pins)
    return replace(plan, decision=replace(plan.decision, layouts=chosen)).rebind(graph)


def batches(steps: int = STEPS) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"input_ids": rng.integers(0, CONFIG.vocab_size, (BATCH, LENGTH), np.int32)} for _ in range(steps)]


def weighted_loss(model: gpt2_flax.GPT2, batch: dict[str, jax.Array]) -> sw.Weighted:
    """Microbatches weigh differently: only tokens below a bound count."""
    tokens = batch["input_ids"]
    logits = model(tokens)[:, :-1]
    counted = (tokens[:, 1:] < CONFIG.vocab_size // 3).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return sw.weighted((losses * counted).sum() / counted.sum(), counted.sum())
