"""What the process of one model of `real_models_jax.py` does: two steps of it, split, against the plain model."""

import inspect
import json
import os
import traceback
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from real_outcomes import EQUAL, FAILED, MISSING, REFUSED, WRONG

import shardwright.jax as sw
from benchmarks.real_networks.jax_models import BUILDERS, SAMPLES, Made
from shardwright.core.errors import ShardwrightError
from tests.comparison import Comparison
from tests.torch.forked import note

STEPS, MICROBATCH, RATE, SEED = 2, 2, 0.02, 0
Expected = tuple[list[float], list[list[Any]], list[Any]]
"""Losses and gradients of each step, and the parameters after the last."""


def is_trained(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and np.issubdtype(leaf.dtype, np.floating)


def trained_leaves(tree: Any) -> list[Any]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree) if is_trained(leaf)]


def without_zeros(made: Made) -> Made:
    """The model, none of whose parameters is all zero: whatever stands before such a one would have no gradients."""
    drawn = np.random.default_rng(0)

    def filled(leaf: Any) -> Any:
        if not is_trained(leaf) or np.asarray(leaf).any():
            return leaf
        return jnp.asarray(0.05 * drawn.standard_normal(leaf.shape), leaf.dtype)

    if not isinstance(made.model, nnx.Module):
        return replace(made, model=jax.tree.map(filled, made.model))
    graphdef, params, rest = nnx.split(made.model, nnx.Param, ...)
    return replace(made, model=nnx.merge(graphdef, jax.tree.map(filled, params), rest))


class Plain:
    """The unsplit model: its arrays, and the losses that its microbatches have."""

    def __init__(self, made: Made) -> None:
        self.made = made
        self.graphdef, self.rest = None, None
        if isinstance(made.model, nnx.Module):
            self.graphdef, params, self.rest = nnx.split(made.model, nnx.Param, ...)
        else:
            params = made.model
        leaves, self.structure = jax.tree.flatten(params)
        self.fixed = [None if is_trained(leaf) else leaf for leaf in leaves]
        self.arrays = [leaf if is_trained(leaf) else None for leaf in leaves]
        self.named = inspect.signature(made.loss).parameters

    def leaves(self, arrays: list[Any]) -> Any:
        both = zip(arrays, self.fixed, strict=True)
        return jax.tree.unflatten(self.structure, [a if f is None else f for a, f in both])

    def loss(self, arrays: list[Any], batch: Any, key: Any, state: Any) -> tuple[Any, Any]:
        params = self.leaves(arrays)
        model = params if self.graphdef is None else nnx.merge(self.graphdef, params, self.rest)
        given = {name: value for name, value in (("rngs", key), ("state", state)) if name in self.named}
        found = self.made.loss(model, batch, **given)
        return found if "state" in given else (found, state)

    def train(self) -> Expected:
        step_of = jax.jit(jax.value_and_grad(self.loss, has_aux=True))
        arrays, state = list(self.arrays), self.made.state
        losses, gradients = [], []
        count = SAMPLES // MICROBATCH
        for step in range(STEPS):
            total, parts = None, []
            for m in range(count):
                part = jax.tree.map(lambda x, m=m: x[m * MICROBATCH : (m + 1) * MICROBATCH], self.made.batch)
                key = jax.random.fold_in(jax.random.fold_in(jax.random.key(SEED), step), m)
                (loss, state), found = step_of(arrays, part, key, state)
                parts.append(float(loss))
                total = found if total is None else jax.tree.map(lambda a, b: a + b, total, found)
            mean = [None if g is None else g / count for g in total]
            arrays = [a if g is None else a - RATE * g for a, g in zip(arrays, mean, strict=True)]
            losses.append(sum(parts) / count)
            gradients.append(mean)
        return losses, gradients, arrays


def recording(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, with the last gradients as the second half of its state."""

    def init(params: Any) -> Any:
        return optimizer.init(params), jax.tree.map(lambda p: p * 0, params)

    def update(gradients: Any, state: Any, params: Any = None) -> Any:
        updates, inner = optimizer.update(gradients, state[0], params)
        return updates, (inner, gradients)

    return optax.GradientTransformation(init, update)


def split(made: Made, axis: str, plain: Plain, expected: Expected) -> Comparison:
    captured = made.loss
    given = {}
    if "rngs" in plain.named:
        given["rngs"] = jax.random.key(SEED)
    if "state" in plain.named:
        given["state"] = made.state
    if given:

        def captured(params: Any, batch: Any) -> Any:
            found = made.loss(params, batch, **given)
            return found[0] if "state" in given else found

    if isinstance(made.model, nnx.Module):
        graph = sw.capture(made.model, made.batch, captured)
    else:
        graph = sw.capture(captured, (made.model, made.batch))
    plan = sw.plan(
        graph, sw.Cluster("cpu", devices_per_node=2), batch=SAMPLES, microbatch=MICROBATCH, dp=1,
        pp=2 if axis == "pp" else 1, tp=2 if axis == "tp" else 1, schedule="1f1b", precision="fp32", recompute="none",
        shard=0,
    )  # fmt: skip
    train = sw.train_step(made.loss, recording(optax.sgd(RATE)), plan, reduction="mean" if made.is_coupled else None)
    state = train.init(made.model, seed=SEED) if made.state is None else train.init(
        made.model, state=made.state, seed=SEED
    )  # fmt: skip
    losses, gradients, arrays = expected
    same = Comparison()
    for step in range(STEPS):
        state, loss = train(state, made.batch)
        same.where = f"step {step}"
        same.losses([float(loss)], losses[step : step + 1])
        kept = state if axis == "pp" else train.original(state)
        same.gradients(trained_leaves(kept.optimizer[1]), trained_leaves(gradients[step]))
    same.where = ""
    found = train.params(state, at=jax.devices()[0])
    found = nnx.state(found, nnx.Param) if isinstance(found, nnx.Module) else found
    same.values(trained_leaves(found), trained_leaves(arrays), relative=1e-4, absolute=1e-5, what="parameters")
    return same


def judge(name: str, axis: str) -> None:
    """The life of a process: notes the outcome, its detail, and how many parameters there are."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    note("report", json.dumps(_judged(name, axis)))


def _judged(name: str, axis: str) -> dict[str, Any]:
    try:
        made = without_zeros(BUILDERS[name]())
    except ImportError as error:
        return {"outcome": MISSING, "detail": f"package {error.name or name} is missing: {error}"}
    answer: dict[str, Any] = {}
    try:
        plain = Plain(made)
        answer["parameters"] = sum(a.size for a in plain.arrays if a is not None)
        expected = plain.train()
    except Exception as error:
        said = f"the plain model does not train: {type(error).__name__}: {error}"
        return answer | {"outcome": FAILED, "detail": said[:400]}
    try:
        same = split(made, axis, plain, expected)
    except Exception as error:
        if os.environ.get("REAL_MODELS_TRACEBACK"):
            traceback.print_exc()
        outcome = REFUSED if isinstance(error, ShardwrightError) else FAILED
        return answer | {"outcome": outcome, "detail": f"{type(error).__name__}: {error}"[:600]}
    off = same.failures()
    if off:
        return answer | {"outcome": WRONG, "detail": "; ".join(off[:4])[:600]}
    return answer | {"outcome": EQUAL, "detail": f"{same.worst:.2g} of the bound"}
