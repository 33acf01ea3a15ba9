"""GPT-2 for the tests of training: plans for it, batches, and the unsplit model's run.

Beside the planner's own plans there are some with the tensor layouts that a large model would get.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardwright.jax as sw
from examples import gpt2_flax
from shardwright.backends.jax.tree import dotted
from shardwright.core.graph import Graph
from shardwright.core.layout import Layout, Split

CONFIG = gpt2_flax.Config(n_layer=2, n_head=4, n_embd=32, vocab_size=64, n_positions=16)
LENGTH = 12
BATCH = 16
MICROBATCH = 2
STEPS = 20


def create() -> gpt2_flax.GPT2:
    return gpt2_flax.create(CONFIG, seed=3)


def gpt2_graph() -> Graph:
    sample = {"input_ids": jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)}
    return sw.capture(nnx.eval_shape(create), sample, gpt2_flax.next_token_loss)


def plan_of(graph: Graph, dp: int = 1, tp: int = 1, microbatch: int = 2, batch: int = BATCH, **pins: Any) -> sw.Plan:
    cluster = sw.Cluster("cpu", nodes=1, devices_per_node=dp * tp * pins.get("pp", 1))
    pins = {"pp": 1, "precision": "fp32", "recompute": "none", "shard": 0} | pins
    return sw.plan(graph, cluster, batch=batch, dp=dp, tp=tp, microbatch=microbatch, **pins)


def megatron(plan: sw.Plan) -> sw.Plan:
    """The plan with GPT-2 split as Megatron does (arXiv 1909.08053); on CPUs tiny models gain nothing."""
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
    return replace(plan, decision=replace(plan.decision, layouts=chosen))


def batches(steps: int = STEPS) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"input_ids": rng.integers(0, CONFIG.vocab_size, (BATCH, LENGTH), np.int32)} for _ in range(steps)]


def weighted_loss(model: gpt2_flax.GPT2, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Microbatches weigh differently: only tokens below a bound count."""
    tokens = batch["input_ids"]
    logits = model(tokens)[:, :-1]
    counted = (tokens[:, 1:] < CONFIG.vocab_size // 3).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return (losses * counted).sum() / counted.sum(), counted.sum()


def reference(loss_fn: Callable[..., Any], steps: int = STEPS) -> tuple[list[float], dict[str, np.ndarray]]:
    """The unsplit model on one device, written with nothing of Shardwright: microbatch after microbatch, losses
    combined by weight. Losses, and the gradients of the first step."""
    graphdef, params = nnx.split(create(), nnx.Param, ...)[:2]
    rest = nnx.split(create(), nnx.Param, ...)[2]
    optimizer = optax.adamw(1e-3)
    state = optimizer.init(params)

    @jax.jit
    def weighted(params: Any, batch: Any) -> Any:
        def total(params: Any) -> Any:
            found = loss_fn(nnx.merge(graphdef, params, rest), batch)
            loss, weight = found if isinstance(found, tuple) else (found, jnp.float32(1))
            return loss * weight, weight

        return jax.value_and_grad(total, has_aux=True)(params)

    losses: list[float] = []
    first: dict[str, np.ndarray] = {}
    for batch in batches(steps):
        loss_sum, weight_sum = 0.0, 0.0
        total = jax.tree.map(jnp.zeros_like, params)
        for start in range(0, BATCH, MICROBATCH):
            micro = {key: value[start : start + MICROBATCH] for key, value in batch.items()}
            (loss, weight), gradients = weighted(params, micro)
            loss_sum, weight_sum = loss_sum + float(loss), weight_sum + float(weight)
            total = jax.tree.map(jnp.add, total, gradients)
        mean = jax.tree.map(lambda g, w=weight_sum: g / w, total)
        if not first:
            first = by_name(mean)
        updates, state = optimizer.update(mean, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(loss_sum / weight_sum)
    return losses, first


def by_name(state: Any) -> dict[str, np.ndarray]:
    return {dotted(path): np.asarray(variable.get_value()) for path, variable in nnx.to_flat_state(state)}
