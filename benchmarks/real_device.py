"""What the process of one model of `real_models_jax.py` does: two steps of it, split, against the plain model."""

import inspect
import json
import os
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from real_outcomes import EQUAL, FAILED, MISSING, REFUSED, WRONG

import shardwright.jax as sw
from benchmarks.real_networks.jax_models import BUILDERS, SAMPLES, Made
from shardwright.core.errors import PlanError, ShardwrightError
from tests.comparison import Comparison
from tests.torch.forked import note

MICROBATCH, SEED = 2, 0
RATES = (0.02, 1e6)
"""Of the two steps. The second is so large that what it adds to a parameter is the gradient alone: an optimizer's state
cannot be looked at for it, as stages hold it in pieces."""


@dataclass(frozen=True)
class Expected:
    """What the plain model gives: losses of both steps, parameters after the first, gradients of the second."""

    losses: list[float]
    parameters: list[Any]
    gradients: list[Any]


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
        self.compiled = jax.jit(jax.value_and_grad(self.loss, has_aux=True))

    def leaves(self, arrays: list[Any]) -> Any:
        both = zip(arrays, self.fixed, strict=True)
        return jax.tree.unflatten(self.structure, [a if f is None else f for a, f in both])

    def loss(self, arrays: list[Any], batch: Any, key: Any, state: Any) -> tuple[Any, Any]:
        params = self.leaves(arrays)
        model = params if self.graphdef is None else nnx.merge(self.graphdef, params, self.rest)
        given = {name: value for name, value in (("rngs", key), ("state", state)) if name in self.named}
        found = self.made.loss(model, batch, **given)
        return found if "state" in given else (found, state)

    def step(self, number: int, arrays: list[Any], state: Any) -> tuple[float, list[Any], Any]:
        """The loss, the mean of the microbatches' gradients, and the state."""
        total, losses = None, []
        for m in range(SAMPLES // MICROBATCH):
            part = jax.tree.map(lambda x, m=m: x[m * MICROBATCH : (m + 1) * MICROBATCH], self.made.batch)
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(SEED), number), m)
            (loss, state), found = self.compiled(arrays, part, key, state)
            losses.append(float(loss))
            total = found if total is None else jax.tree.map(lambda a, b: a + b, total, found)
        return sum(losses) / len(losses), jax.tree.map(lambda g: g / len(losses), total), state

    def train(self) -> Expected:
        first, gradients, state = self.step(0, self.arrays, self.made.state)
        after = [
            None if a is None else a - RATES[0] * g
            for a, g in zip(self.arrays, gradients, strict=True)
        ]  # fmt: skip
        second, gradients, _ = self.step(1, after, state)
        return Expected([first, second], trained_leaves(after), trained_leaves(gradients))


def split(made: Made, axis: str, plain: Plain, expected: Expected, reduction: str | None) -> Comparison:
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
        shard=0, loss_scope="replica",
    )  # fmt: skip
    optimizer = optax.sgd(lambda count: jnp.where(count == 0, *RATES))
    train = sw.train_step(made.loss, optimizer, plan, reduction=reduction)
    state = train.init(made.model, seed=SEED) if made.state is None else train.init(
        made.model, state=made.state, seed=SEED
    )  # fmt: skip
    found = []
    same = Comparison()
    for step in range(len(RATES)):
        state, loss = train(state, made.batch)
        same.losses([float(loss)], expected.losses[step : step + 1], what=f"losses of step {step}")
        params = train.params(state, at=jax.devices()[0])
        found.append(trained_leaves(nnx.state(params, nnx.Param) if isinstance(params, nnx.Module) else params))
    same.values(found[0], expected.parameters, relative=1e-4, absolute=1e-5, what="parameters")
    moved = [(a.astype(np.float64) - b) / RATES[1] for a, b in zip(*found, strict=True)]
    same.gradients(moved, expected.gradients, same_dtype=False)
    return same


def judge(name: str, axis: str, is_quick: bool) -> None:
    """The life of a process: notes the outcome, its detail, and how many parameters there are."""
    jax.config.update("jax_disable_most_optimizations", is_quick)
    here = str(Path(__file__).parent)
    sys.path[:] = [path for path in sys.path if path != here]  # whose jax_models is not the package of that name
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    note("report", json.dumps(_judged(name, axis)))


def _judged(name: str, axis: str) -> dict[str, Any]:
    try:
        made = without_zeros(BUILDERS[name]())
    except ImportError as error:
        return {"outcome": MISSING, "detail": f"package {error.name or name} is missing: {error}"}
    except Exception as error:
        return {"outcome": FAILED, "detail": f"the plain model cannot be built: {type(error).__name__}: {error}"[:400]}
    answer: dict[str, Any] = {}
    try:
        plain = Plain(made)
        answer["parameters"] = sum(a.size for a in plain.arrays if a is not None)
        expected = plain.train()
    except Exception as error:
        said = f"the plain model does not train: {type(error).__name__}: {error}"
        return answer | {"outcome": FAILED, "detail": said[:400]}
    more = ""
    try:
        try:
            same = split(made, axis, plain, expected, "mean" if made.is_coupled else None)
        except PlanError as error:
            if "reduction='mean'" not in str(error):
                raise
            more = f"; told reduction='mean' when asked: {error}"[:160]
            same = split(made, axis, plain, expected, "mean")
    except Exception as error:
        if os.environ.get("REAL_MODELS_TRACEBACK"):
            traceback.print_exc()
        outcome = REFUSED if isinstance(error, ShardwrightError) else FAILED
        return answer | {"outcome": outcome, "detail": f"{type(error).__name__}: {error}"[:600]}
    off = same.failures()
    if off:
        return answer | {"outcome": WRONG, "detail": "; ".join(off[:4])[:600]}
    return answer | {"outcome": EQUAL, "detail": f"{same.worst:.2g} of the bound{more}"}
