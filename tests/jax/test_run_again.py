"""What a recomputed backward runs again in JAX, in FLOPs: predicted, and in the program of the gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import shardwright as sw
from shardwright.backends.jax.capture.inner_programs import aval, equations_in

WIDTH, TOKENS, BATCH = 16, 8, 4


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 48, rngs=rngs), nnx.Linear(48, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.sin(self.up(self.norm(x))))


class Gated(nnx.Module):
    """The last product is read by the backward: its result is a factor."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(WIDTH, 32, rngs=rngs), nnx.Linear(32, WIDTH, rngs=rngs)
        self.gate = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.sin(x) * self.down(jnp.tanh(self.up(x))) + self.gate(x)


class Parallel(nnx.Module):
    """The first branch ends in a product that nothing reads, wherever it stands."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.one, self.other = Mlp(rngs), Mlp(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.one(x) + self.other(x)


class Blocks(nnx.Module):
    def __init__(self, make: Callable[[nnx.Rngs], nnx.Module]) -> None:
        rngs = nnx.Rngs(0)
        self.enter = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.blocks, self.head = nnx.List([make(rngs) for _ in range(3)]), nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.run(x, lambda block, x: block(x))

    def run(self, x: jax.Array, each: Callable[[Any, jax.Array], jax.Array]) -> jax.Array:
        x = self.enter(x)
        for block in self.blocks:
            x = each(block, x)
        return (self.head(x) ** 2).mean()


def product_flops(model: Blocks, each: Callable[[Any, jax.Array], jax.Array]) -> int:
    """The FLOPs of the products in the program of the loss and all its gradients."""
    graphdef, state = nnx.split(model)
    loss = jax.value_and_grad(lambda state, x: nnx.merge(graphdef, state).run(x, each))
    found = 0
    for equation in equations_in(jax.make_jaxpr(loss)(state, jnp.ones((BATCH, TOKENS, WIDTH))).jaxpr):
        if equation.primitive.name == "dot_general":
            ((contracted, _), _) = equation.params["dimension_numbers"]
            left = aval(equation.invars[0]).shape
            found += 2 * int(np.prod(aval(equation.outvars[0]).shape)) * int(np.prod([left[d] for d in contracted]))
    return found


@pytest.mark.parametrize("make", [Mlp, Gated, Parallel])
def test_flops_that_are_run_again_are_those_of_the_program(make: Callable[[nnx.Rngs], nnx.Module]) -> None:
    model = Blocks(make)
    graph = sw.capture(model, jax.ShapeDtypeStruct((2, TOKENS, WIDTH), jnp.float32))
    cluster = sw.Cluster("cpu", nodes=1, devices_per_node=1)
    plan = sw.plan(graph, cluster, batch=BATCH, microbatch=BATCH, recompute="full", precision="fp32")
    assert plan.unit_modes.count("full") == 3
    once = product_flops(model, lambda block, x: block(x))
    again = product_flops(model, lambda block, x: nnx.remat(lambda b, x: b(x))(block, x))
    assert plan.work.recomputed_flops == again - once
