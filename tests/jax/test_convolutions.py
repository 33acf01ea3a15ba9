"""Convolutions inside a loop: the same numbers in the order of dims that is fast there."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex_core

from shardwright.backends.jax.program.convolutions import for_cpu_loops
from tests.comparison import Comparison

CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[str, str, str], dict[str, Any]]] = {
    "features last": ((2, 8, 9, 4), (3, 3, 4, 6), ("NHWC", "HWIO", "NHWC"), {}),
    "features first": ((2, 4, 8, 9), (6, 4, 3, 3), ("NCHW", "OIHW", "NCHW"), {}),
    "strides": ((2, 9, 8, 4), (3, 2, 4, 6), ("NHWC", "HWIO", "NHWC"), {"window_strides": (2, 3)}),
    "groups": ((2, 8, 8, 4), (3, 3, 2, 6), ("NHWC", "HWIO", "NHWC"), {"feature_group_count": 2}),
    "dilated": ((2, 8, 8, 4), (3, 3, 4, 6), ("NHWC", "HWIO", "NHWC"), {"rhs_dilation": (2, 2)}),
    "one dim": ((2, 8, 4), (3, 4, 6), ("NWC", "WIO", "NWC"), {}),
}


def convolution(case: str) -> tuple[Callable[..., Any], jax.Array, jax.Array]:
    left, right, numbers, options = CASES[case]
    drawn = np.random.default_rng(0)
    spatial = len(left) - 2

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        strides = options.get("window_strides", (1,) * spatial)
        others = {key: value for key, value in options.items() if key != "window_strides"}
        return jax.lax.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=numbers, **others)

    return run, jnp.asarray(drawn.standard_normal(left)), jnp.asarray(drawn.standard_normal(right))


def orders(jaxpr: Any) -> list[Any]:
    found = [e.params["dimension_numbers"] for e in jaxpr.eqns if e.primitive.name == "conv_general_dilated"]
    return found + [one for e in jaxpr.eqns for sub in jex_core.jaxprs_in_params(e.params) for one in orders(sub)]


@pytest.mark.parametrize(
    ("case", "around"),
    [*((case, jax.jit) for case in CASES), ("features first", jax.checkpoint), ("features first", lambda f: f)],
)
def test_gradients_are_the_same_and_every_convolution_is_in_order(case: str, around: Callable[..., Any]) -> None:
    run, x, w = convolution(case)
    inner = around(lambda x, w: jnp.sin(run(x, w)))

    def body(total: Any, number: Any) -> tuple[Any, None]:
        found = jax.grad(lambda x, w: inner(x * number, w).sum(), argnums=(0, 1))(x, w)
        return jax.tree.map(jnp.add, total, found), None

    start = (jnp.zeros_like(x), jnp.zeros_like(w))
    ordered = for_cpu_loops(body, start, jnp.float32(1))
    given = jnp.arange(3, dtype=jnp.float32)
    expected, _ = jax.lax.scan(body, start, given)
    found, _ = jax.lax.scan(ordered, start, given)
    Comparison().values(found, expected, relative=1e-4, absolute=1e-4).require()
    before, after = (orders(jax.make_jaxpr(f)(start, given[0]).jaxpr) for f in (body, ordered))
    last = x.ndim - 1
    fast = ((0, last, *range(1, last)), (last, last - 1, *range(last - 1)), (0, last, *range(1, last)))
    assert len(after) == len(before) >= 2
    assert any(tuple(one) != fast for one in before)
    assert all(tuple(one) == fast for one in after)


def test_what_is_recomputed_stays_so() -> None:
    run, x, w = convolution("features first")
    body = jax.grad(lambda x, w: jax.checkpoint(lambda x, w: jnp.sin(run(x, w)))(x, w).sum())
    names = [e.primitive.name for e in jax.make_jaxpr(for_cpu_loops(body, x, w))(x, w).jaxpr.eqns]
    assert names.count("remat2") + names.count("checkpoint") == 1


def test_a_constant_of_an_inner_function_stays_with_it() -> None:
    run, x, w = convolution("features first")
    constant = np.asarray(w)
    body = jax.checkpoint(jax.jit(lambda x: run(x, constant)))
    Comparison().values(for_cpu_loops(body, x)(x), run(x, w), relative=1e-4, absolute=1e-4).require()


def test_an_inner_functions_own_shardings_stay() -> None:
    run, x, w = convolution("features first")
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    at = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    body = jax.jit(run, in_shardings=(at, None), out_shardings=at)

    def of_inner(function: Callable[..., Any]) -> list[Any]:
        equations = jax.make_jaxpr(function)(x, w).jaxpr.eqns
        return [(e.params["in_shardings"], e.params["out_shardings"]) for e in equations if e.primitive.name == "jit"]

    before = of_inner(body)
    assert len(before) == 1
    assert of_inner(for_cpu_loops(body, x, w)) == before


def test_a_body_without_convolutions_is_traced_once_and_left_alone() -> None:
    traced = []

    def body(x: jax.Array) -> dict[str, jax.Array]:
        traced.append(x)
        return {"double": 2 * x}

    run = for_cpu_loops(body, jnp.float32(1))
    assert run(jnp.float32(4)) == {"double": 8}
    assert len(traced) == 1
