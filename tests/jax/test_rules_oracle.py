"""The rules of every kind of op by brute force: JAX primitives on the pieces that ranks would hold."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.backends.jax import BACKEND
from shardwright.core.model.graph import OpKind
from tests.core import oracle

Case = tuple[OpKind, Callable[..., Any] | list[Callable[..., Any]], tuple[np.ndarray, ...]]
DRAWS = np.random.default_rng(6)

capture = BACKEND.capture


def f(*shape: int) -> np.ndarray:
    return (2 * DRAWS.standard_normal(shape)).astype(np.float32)


def i(limit: int, *shape: int) -> np.ndarray:
    return DRAWS.integers(0, limit, shape).astype(np.int32)


def mostly(*shape: int) -> np.ndarray:
    return DRAWS.random(shape) < 0.93


def counted(*shape: int) -> np.ndarray:
    return DRAWS.integers(-2, 3, shape).astype(np.float32)


def sized(function: Callable[..., Any], whole: tuple[int, ...]) -> Callable[..., Any]:
    """An op that is told the shape of what it makes, as a runtime tells a view of a piece."""

    def call(*operands: Any) -> Any:
        return function(*operands, whole)

    call.takes_shape = whole  # type: ignore[attr-defined]
    call.function = function  # type: ignore[attr-defined]
    return call


def dot(left: int, right: int) -> Callable[..., Any]:
    return lambda a, b: jax.lax.dot_general(a, b, (((left,), (right,)), ((), ())))


LIGHT: dict[str, Case] = {
    "linear": ("contraction", dot(2, 0), (f(6, 12, 18), f(18, 24))),
    "batched product": (
        "contraction",
        lambda a, b: jax.lax.dot_general(a, b, (((2,), (1,)), ((0,), (0,)))),
        (f(6, 12, 18), f(6, 18, 24)),
    ),
    "add": ("elementwise", jax.lax.add, (f(6, 12), f(6, 12))),
    "mul": ("elementwise", jax.lax.mul, (f(6, 12), f(6, 12))),
    "max": ("elementwise", jax.lax.max, (f(6, 12), f(6, 12))),
    "select": ("elementwise", jax.lax.select_n, (mostly(6, 12), f(6, 12), f(6, 12))),
    "neg": ("elementwise", jax.lax.neg, (f(6, 12),)),
    "with a constant": ("elementwise", [lambda x: x * 1.5, lambda x: x * -0.7], (f(6, 12),)),
    "less a constant": ("elementwise", [lambda x: x - 1.5, lambda x: 1.5 - x], (f(6, 12),)),
    "tanh": ("elementwise", jax.lax.tanh, (f(6, 12),)),
    "gelu": ("elementwise", lambda x: jax.nn.gelu(x), (f(6, 12),)),
    "cumulative sum": ("elementwise", lambda x: jax.lax.cumsum(x, 1), (f(6, 12, 18),)),
    "sum": ("reduction", lambda x: jnp.sum(x, 1), (f(6, 12, 18),)),
    "maximum": ("reduction", lambda x: jax.lax.reduce_max(x, axes=(1,)), (f(6, 12, 18),)),
    "take": ("gather", lambda t, n: jnp.take(t, n, axis=0), (f(30, 18), i(30, 6, 12))),
    "reshape": ("view", sized(jnp.reshape, (6, 18, 12, 30)), (f(6, 18, 360),)),
    "transpose": ("view", lambda x: x.transpose(2, 0, 1), (f(6, 12, 18),)),
    "part": ("slice", lambda x: jax.lax.slice_in_dim(x, x.shape[1] // 3, 2 * x.shape[1] // 3, axis=1), (f(6, 18, 12),)),
    "concatenation": ("concat", lambda x, y: jax.lax.concatenate([x, y], 1), (f(6, 12, 18), f(6, 30, 18))),
    "shift by a pad": ("copy", lambda x: jax.lax.pad(x, jnp.float32(1.5), ((1, -1, 0), (0, 0, 0))), (f(6, 12),)),
    "padding": ("copy", lambda x: jax.lax.pad(x, jnp.float32(1.5), ((0, 0, 0), (1, 2, 0))), (f(6, 12),)),
    "sort": ("sort", lambda x: jax.lax.sort(x, dimension=1), (f(6, 12, 18),)),
}
"""Run in the ordinary suite, on two ranks."""

HEAVY: dict[str, Case] = {
    "convolution": (
        "contraction",
        lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME"),
        (f(6, 12, 9, 7), f(18, 12, 3, 3)),
    ),
    "attention": (
        "attention",
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v),
        (f(6, 18, 12, 24), f(6, 30, 12, 24), f(6, 30, 12, 24)),
    ),
    "causal attention": (
        "attention",
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True),
        (f(6, 30, 12, 24), f(6, 30, 12, 24), f(6, 30, 12, 24)),
    ),
    "grouped attention": (
        "attention",
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v),
        (f(6, 18, 24, 30), f(6, 36, 12, 30), f(6, 36, 12, 30)),
    ),
    "sub": ("elementwise", jax.lax.sub, (f(6, 12), f(6, 12))),
    "div": ("elementwise", jax.lax.div, (f(6, 12), f(6, 12) + 0.01)),
    "min": ("elementwise", jax.lax.min, (f(6, 12), f(6, 12))),
    "ge": ("elementwise", jax.lax.ge, (counted(6, 12), counted(6, 12))),
    "eq": ("elementwise", jax.lax.eq, (counted(6, 12), counted(6, 12))),
    "exp": ("elementwise", jax.lax.exp, (f(6, 12),)),
    "logistic": ("elementwise", jax.lax.logistic, (f(6, 12),)),
    "power": ("elementwise", [lambda x: jax.lax.integer_pow(x, 3), lambda x: jax.lax.integer_pow(x, 2)], (f(6, 12),)),
    "abs": ("elementwise", jax.lax.abs, (f(6, 12),)),
    "cast to integers": ("elementwise", lambda x: x.astype(jnp.int32), (5 * f(6, 12),)),
    "any": ("reduction", lambda x: jax.lax.reduce_or(x, axes=(1,)), (~mostly(6, 24, 18),)),
    "argmax": ("reduction", lambda x: jax.lax.argmax(x, 1, jnp.int32), (f(6, 12, 18),)),
    "window sum": (
        "reduction",
        lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2), (1, 2), "VALID"),
        (f(6, 24),),
    ),
    "take along": ("gather", lambda x, n: jnp.take_along_axis(x, n, 1), (f(6, 12, 18), i(12, 6, 24, 18))),
    "merge": ("view", sized(jnp.reshape, (6, 216)), (f(6, 12, 18),)),
    "broadcast": ("view", sized(lambda x, shape: jax.lax.broadcast_in_dim(x, shape, (0, 2)), (6, 18, 12)), (f(6, 12),)),
    "steps": ("slice", lambda x: jax.lax.slice_in_dim(x, 0, x.shape[1], 2, axis=1), (f(6, 12, 18),)),
    "parts": ("slice", lambda x: jax.lax.split(x, (x.shape[1] // 3, 2 * (x.shape[1] // 3)), 1), (f(6, 18, 12),)),
    "reversal": ("copy", lambda x: jax.lax.rev(x, (1,)), (f(6, 12, 18),)),
    "largest": ("sort", lambda x: jax.lax.top_k(x, 3), (f(6, 12, 18),)),
    "scatter": (
        "scatter",
        lambda x, n, v: x.at[n].set(v, unique_indices=True),
        (f(30, 18), DRAWS.permutation(30)[:7].astype(np.int32)[:, None], f(7, 18)),
    ),
    "softmax": ("softmax", lambda x: jax.nn.softmax(x, axis=1), (f(6, 12, 18),)),
}
CASES = LIGHT | HEAVY


def scatter(x: Any, n: Any, v: Any) -> Any:
    numbers = jax.lax.ScatterDimensionNumbers((1,), (0,), (0,))
    return jax.lax.scatter(x, n, v, numbers, mode="promise_in_bounds")


def scatter_add(x: Any, n: Any, v: Any) -> Any:
    numbers = jax.lax.ScatterDimensionNumbers((1,), (0,), (0,))
    return jax.lax.scatter_add(x, n, v, numbers, mode="promise_in_bounds")


CASES["scatter"] = ("scatter", scatter, CASES["scatter"][2])
CASES["scatter add"] = ("scatter", scatter_add, (f(30, 18), i(30, 12, 1), f(12, 18)))


def captured(name: str) -> oracle.Captured:
    """The op, its functions over arrays and its operands, in the op's own order."""
    kind, given, operands = CASES[name]
    functions = given if isinstance(given, list) else [given]
    graph = capture(
        lambda _, batch: (functions[0](*batch[1:]), batch[0]),
        ({}, (np.zeros(2, np.float32), *operands)),
        batch_dims=(0, *([None] * len(operands))),
        require_loss=False,
    )
    made = [op for op in graph.ops if op.kind == kind]
    assert len(made) == 1, [(op.kind, op.name) for op in graph.ops]
    op = made[0]
    order = [graph.inputs.index(t) - 1 for t in op.inputs]
    return graph, op, [_over_arrays(function, order) for function in functions], [operands[at] for at in order]


def _over_arrays(function: Callable[..., Any], order: list[int]) -> oracle.Function:
    whole = function if hasattr(function, "takes_shape") else jax.jit(function)

    def run(values: list[np.ndarray], *shape: Any) -> list[np.ndarray]:
        given: list[Any] = [None] * len(values)
        for at, value in zip(order, values, strict=True):
            given[at] = jnp.asarray(value)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(getattr(whole, "function", whole)(*given, *shape))]

    if hasattr(function, "takes_shape"):
        run.takes_shape = function.takes_shape  # type: ignore[attr-defined]
    return run


@pytest.mark.parametrize("name", LIGHT)
def test_declared_rules_are_all_that_hold_on_two_ranks(name: str) -> None:
    oracle.check_one_axis(name, captured(name), 2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_declared_rules_are_all_that_hold(name: str, ranks: int) -> None:
    oracle.check_one_axis(name, captured(name), ranks)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2), (2, 3)])
def test_pairs_of_rules_hold_on_two_axes(sizes: tuple[int, int]) -> None:
    """All declared pairs, and 500 seeded others over all ops."""
    oracle.check_two_axes({name: captured(name) for name in CASES}, sizes, declared=500, others=500)
