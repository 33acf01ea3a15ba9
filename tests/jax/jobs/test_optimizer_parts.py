"""Optimizers in parts give what they give whole, and those that cannot be divided are refused by name."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardwright.backends.jax.jobs.optimizer_parts import OptimizerParts
from shardwright.backends.jax.pipeline.stage_functions import TOTAL, WEIGHT, Key
from shardwright.core.errors import MissingCapabilityError
from tests.comparison import Comparison

PARAMS = {"a": jnp.ones((4, 3)), "b": {"bias": jnp.full(3, 0.5), "scale": jnp.ones(())}, "c": jnp.linspace(-1, 1, 8)}
HOMES = (0, 1, 1, 2)
GRADIENTS = jax.tree.map(lambda leaf: jnp.cos(7 * jnp.arange(leaf.size, dtype=jnp.float32)).reshape(leaf.shape), PARAMS)


def parts_of(optimizer: optax.GradientTransformation, clip: float | None, *, waits: bool) -> OptimizerParts:
    shapes = jax.eval_shape(lambda: PARAMS)
    return OptimizerParts("a job", optimizer, shapes, HOMES, range(len(HOMES)), lambda weight: weight, clip, waits)


def in_parts(parts: OptimizerParts, steps: int = 2) -> tuple[list[Any], list[Any]]:
    """The parameters and states after some steps, each shard updated by itself."""
    functions = parts.functions()
    params, states = jax.tree.leaves(PARAMS), jax.tree.leaves(parts.optimizer.init(PARAMS))
    for step in range(steps):
        at: dict[Key, Any] = {("sum", WEIGHT, 0): jnp.float32(2), ("sum", TOTAL, 0): jnp.float32(3)}
        at |= {("gradient", n, 0): 2.0 * (step + 1) * g for n, g in enumerate(jax.tree.leaves(GRADIENTS))}
        at |= {("weight", n, 0): leaf for n, leaf in enumerate(params)}
        at |= {("state", n, 0): leaf for n, leaf in enumerate(states)}
        ahead = [*functions.partials.values(), *([] if functions.joined is None else [functions.joined])]
        for function in ahead:
            at.update(zip(function.makes, function.function(*(at[key] for key in function.reads)), strict=True))
        made: dict[Key, Any] = {}
        for shard, function in functions.shards.items():
            own = {key[1] for key in function.reads if key[0] in ("weight", "gradient")}
            assert own <= {n for n, home in enumerate(HOMES) if home == shard}
            made.update(zip(function.makes, function.function(*(at[key] for key in function.reads)), strict=True))
        if (last := functions.common) is not None:
            made.update(zip(last.makes, last.function(*(at[key] for key in last.reads)), strict=True))
        params = [made["weight", n, 0] for n in range(len(params))]
        states = [made["state", n, 0] for n in range(len(states))]
    return params, states


def whole(optimizer: optax.GradientTransformation, steps: int = 2) -> tuple[list[Any], list[Any]]:
    optimizer = optax.with_extra_args_support(optimizer)
    params: Any = PARAMS
    state = optimizer.init(params)
    for step in range(steps):
        given = jax.tree.map(lambda g, n=step: (n + 1) * g, GRADIENTS)
        updates, state = optimizer.update(given, state, params, value=jnp.float32(1.5))
        params = optax.apply_updates(params, updates)
    return jax.tree.leaves(params), jax.tree.leaves(state)


ALONE: dict[str, optax.GradientTransformation] = {
    "adamw": optax.adamw(optax.cosine_decay_schedule(1e-2, 10)),
    "momentum": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2),
    "lion": optax.lion(1e-3),
    "clipped by value": optax.chain(optax.clip(0.1), optax.rmsprop(1e-2)),
    "clipped by block": optax.chain(optax.clip_by_block_rms(0.5), optax.adam(1e-2)),
    "accumulating": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "noisy": optax.chain(optax.add_noise(0.1, 0.5, 3), optax.sgd(1e-2)),
    "by label": optax.partition(
        {"adam": optax.adam(1e-2), "sgd": optax.sgd(1e-1)},
        {"a": "adam", "b": {"bias": "sgd", "scale": "sgd"}, "c": "adam"},
    ),
    "on plateaus": optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1)),
}
TOGETHER: dict[str, optax.GradientTransformation] = {
    "clipped": optax.chain(optax.clip_by_global_norm(0.25), optax.adamw(1e-2)),
    "where finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "clipped, then noisy": optax.chain(
        optax.clip_by_global_norm(0.25), optax.add_noise(0.1, 0.5, 3), optax.sgd(1e-2, momentum=0.9)
    ),
}


def same(found: Any, expected: Any) -> None:
    plain = [[numbers(each) for tree in trees for each in tree] for trees in (found, expected)]
    Comparison("parts").values(*plain, relative=1e-5, absolute=1e-6).require()


def numbers(leaf: Any) -> np.ndarray:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


@pytest.mark.parametrize("name", ALONE)
def test_what_updates_each_parameter_by_itself(name: str) -> None:
    same(in_parts(parts_of(ALONE[name], None, waits=False)), whole(ALONE[name]))


@pytest.mark.parametrize("name", TOGETHER)
def test_numbers_of_all_shards(name: str) -> None:
    clip = 0.25 if name.startswith("clipped") else None
    same(in_parts(parts_of(TOGETHER[name], clip, waits=True)), whole(TOGETHER[name]))
    with pytest.raises(MissingCapabilityError, match="looks at the gradients of several shards"):
        parts_of(TOGETHER[name], None, waits=False).functions()


def test_the_plan_clips_before_an_optimizer_that_does_not() -> None:
    own = optax.adam(1e-2, eps=0.1)
    same(in_parts(parts_of(own, 0.25, waits=True)), whole(optax.chain(optax.clip_by_global_norm(0.25), own)))


def test_an_optimizer_that_clips_to_another_norm_is_refused() -> None:
    with pytest.raises(MissingCapabilityError, match=r"clip_norm=0.5, and its optimizer .*\(clip_by_global_norm\)"):
        parts_of(TOGETHER["clipped"], 0.5, waits=True).functions()
