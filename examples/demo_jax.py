"""The JAX half of the demo: the reference run and the planned run, one line of JSON for each step.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/demo_jax.py PLAN.json WEIGHTS.npz STEPS
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpt2_flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import twins
from flax import nnx

import shardwright.jax as sw


def optimizer() -> optax.GradientTransformation:
    return optax.adamw(twins.LEARNING_RATE, eps=twins.EPSILON, weight_decay=twins.WEIGHT_DECAY)


def reference(model: nnx.Module, batches: np.ndarray) -> Iterator[float]:
    """Plain JAX on one device: the unsplit model, one microbatch after the other."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    adamw = optimizer()
    state = adamw.init(params)

    @jax.jit
    def loss_and_gradients(params: Any, tokens: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return gpt2_flax.next_token_loss(nnx.merge(graphdef, params, rest), {"input_ids": tokens})

        return jax.value_and_grad(loss)(params)

    @jax.jit
    def update(params: Any, state: Any, total: Any) -> Any:
        gradients = jax.tree.map(lambda g: g / (twins.BATCH // twins.MICROBATCH), total)
        updates, state = adamw.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for batch in batches:
        losses = []
        total = jax.tree.map(jnp.zeros_like, params)
        for tokens in twins.microbatches(batch):
            loss, gradients = loss_and_gradients(params, tokens)
            losses.append(float(loss))
            total = jax.tree.map(jnp.add, total, gradients)
        params, state = update(params, state, total)
        yield float(np.mean(losses))


def planned(model: nnx.Module, batches: np.ndarray, plan: sw.Plan) -> Iterator[float]:
    """The same under the plan: parameters and batch lie over all devices as it says."""
    train = sw.train_step(gpt2_flax.next_token_loss, optimizer(), plan)
    state = train.init(model)
    for batch in batches:
        state, loss = train(state, {"input_ids": batch})
        yield float(loss)


def main() -> None:
    plan, weights, steps = sw.Plan.load(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    batches = twins.batches(steps)
    pairs = zip(
        reference(twins.flax_model(weights), batches), planned(twins.flax_model(weights), batches, plan), strict=True
    )
    for step, (expected, loss) in enumerate(pairs):
        print(json.dumps({"step": step, "reference": expected, "loss": loss}), flush=True)


if __name__ == "__main__":
    main()
