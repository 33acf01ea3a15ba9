"""The rules of every kind of op by brute force, with NumPy's ops in place of a framework's: exactly those hold."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shardwright.core.model.graph import Op, OpKind
from shardwright.core.rules import op_rules as L
from shardwright.core.rules.op_rules import Labelled
from tests.core import oracle
from tests.core.toy import Builder

Array = np.ndarray
DRAWS = np.random.default_rng(3)
HALF = np.float32(1.5)
X, Y, M = (4, 6, 10), (6, 10), (4, 6)


def f(*shape: int) -> Array:
    return (2 * DRAWS.standard_normal(shape)).astype(np.float32)


def i(limit: int, *shape: int) -> Array:
    return DRAWS.integers(0, limit, shape)


def b(*shape: int) -> Array:
    return DRAWS.integers(0, 2, shape).astype(bool)


def counted(*shape: int) -> Array:
    return DRAWS.integers(-2, 3, shape).astype(np.float32)


def sized(after: tuple[int, ...]) -> Callable[..., Any]:
    def call(operands: list[Array], shape: tuple[int, ...]) -> list[Array]:
        return [operands[0].reshape(shape)]

    call.takes_shape = after  # type: ignore[attr-defined]
    return call


def entrywise(name: str, functions: Any, *operands: Array) -> tuple[Any, ...]:
    functions = functions if isinstance(functions, list) else [functions]
    wide = max((o.shape for o in operands), key=len)
    return ("elementwise", name, functions, operands, L.elementwise([o.shape for o in operands], [wide]))


def over_axis(name: str, function: Callable[..., Any], x: Array) -> tuple[Any, ...]:
    return ("reduction", name, [lambda x: function(x, axis=1)], (x,), L.reduction(x.shape, [1]))


def bernoulli(share: float, *shape: int) -> Array:
    return DRAWS.random(shape) < share


CASES: dict[str, tuple[OpKind, str, list[Callable[..., Any]], tuple[Array, ...], Labelled]] = {
    "where": entrywise("where", np.where, b(*M), f(*M), f(*M)),
    "where, a constant": entrywise("aten.where.ScalarOther", lambda c, x: np.where(c, x, -HALF), b(*M), f(*M)),
    "select_n": entrywise("select_n", lambda c, x, y: np.where(c, y, x), b(*M), f(*M), f(*M)),
    "masked_fill": entrywise("aten.masked_fill.Scalar", lambda x, m: np.where(m, np.float32(-1.5), x), f(*M), b(*M)),
    "add": entrywise("aten.add.Tensor", np.add, f(*X), f(*Y)),
    "sub": entrywise("aten.sub.Tensor", np.subtract, f(*M), f(*M)),
    "mul": entrywise("mul", np.multiply, f(*M), f(6)),
    "div": entrywise("div", np.divide, f(*M), f(*M) + np.float32(0.01)),
    "maximum": entrywise("maximum", np.maximum, f(*M), f(*M)),
    "minimum": entrywise("minimum", np.minimum, f(*M), f(*M)),
    "greater": entrywise("aten.gt.Tensor", np.greater, counted(*M), counted(*M)),
    "less": entrywise("aten.lt.Tensor", np.less, counted(*M), counted(*M)),
    "equal": entrywise("aten.eq.Tensor", np.equal, counted(*M), counted(*M)),
    "logical_and": entrywise("logical_and", np.logical_and, b(*M), b(*M)),
    "logical_or": entrywise("logical_or", np.logical_or, b(*M), b(*M)),
    "neg": entrywise("neg", np.negative, f(*M)),
    "exp": entrywise("exp", np.exp, f(*M)),
    "rsqrt": entrywise("rsqrt", lambda x: 1 / np.sqrt(x), np.abs(f(*M)) + 9),
    "gelu": entrywise("gelu", lambda x: x / (1 + np.exp(-1.702 * x)), f(*M)),
    "add a constant": entrywise("aten.add.Scalar", [lambda x: x + np.float32(1.5)], f(*M)),
    "times a constant": entrywise("mul", [lambda x: x * np.float32(1.5), lambda x: x * np.float32(-0.7)], f(*M)),
    "over a constant": entrywise("aten.div.Scalar", [lambda x: x / HALF, lambda x: x / np.float32(-0.7)], f(*M)),
    "a constant less": entrywise("aten.rsub.Scalar", lambda x: np.float32(2.5) - x, f(*M)),
    "sum": over_axis("sum", np.sum, f(*X)),
    "mean": over_axis("mean", np.mean, f(*X)),
    "amax": over_axis("amax", np.max, f(*X)),
    "amin": over_axis("amin", np.min, f(*X)),
    "any": over_axis("any", np.any, bernoulli(0.1, *X)),
    "all": over_axis("all", np.all, bernoulli(0.9, *X)),
    "prod": over_axis("prod", np.prod, f(*M)),
    "mm": ("contraction", "mm", [np.matmul], (f(4, 6), f(6, 10)), L.contraction("mk", "kn", "mn")),
    "a batch of products": (
        "contraction", "bmm", [np.matmul], (f(4, 6, 10), f(4, 10, 14)), L.contraction("bmk", "bkn", "bmn"),
    ),
    "embedding": (
        "gather", "embedding", [lambda w, n: w[n]], (f(14, 6), i(14, 4, 10)), L.gather((14, 6), 0, (4, 10)),
    ),
    "take along": (
        "gather", "gather", [lambda x, n: np.take_along_axis(x, n, 1)], (f(4, 6, 10), i(6, 4, 14, 10)),
        L.take_along((4, 6, 10), 1, (4, 14, 10)),
    ),
    "concat": (
        "concat", "cat", [lambda x, y: np.concatenate([x, y], 1)], (f(4, 6, 10), f(4, 14, 10)),
        L.concatenation([(4, 6, 10), (4, 14, 10)], 1),
    ),
    "stack": ("concat", "stack", [lambda x, y: np.stack([x, y], 1)], (f(*M), f(*M)), L.stack(M, 1, 2)),
    "slice": (
        "slice", "narrow", [lambda x: x[:, x.shape[1] // 3 : 2 * x.shape[1] // 3]], (f(4, 18, 10),),
        L.parts((4, 18, 10), 1, [(4, 6, 10)], [6]),
    ),
    "flatten": ("view", "reshape", [sized((4, 60))], (f(*X),), L.reshape(X, (4, 60))),
    "split heads": ("view", "reshape", [sized((4, 6, 2, 5))], (f(*X),), L.reshape(X, (4, 6, 2, 5))),
    "transpose": ("view", "transpose", [lambda x: x.swapaxes(0, 2)], (f(*X),), L.transpose((2, 1, 0))),
    "pad": (
        "copy", "pad", [lambda x: np.pad(x, ((0, 0), (1, 2), (0, 0)), constant_values=1.5)], (f(*X),),
        L.same_sizes(X, (4, 9, 10), changed=(1,)),
    ),
}  # fmt: skip


def built(name: str) -> oracle.Captured:
    kind, op_name, functions, operands, labelled = CASES[name]

    def of(function: Callable[..., Any]) -> oracle.Function:
        return function if hasattr(function, "takes_shape") else lambda given: [np.asarray(function(*given))]

    runs = [of(function) for function in functions]
    result = oracle.whole_of(runs[0], operands)[0]
    builder = Builder()
    inputs = [builder.input(f"x{n}", *o.shape, dtype=str(o.dtype)) for n, o in enumerate(operands)]
    out = builder.tensor(result.shape, dtype=str(result.dtype))
    op = Op(kind, op_name, tuple(inputs), (out,), labelled.labels, labelled.special, labelled.offsets, builder.call)
    builder.ops.append(op)
    return builder.build(out), op, runs, list(operands)


@pytest.mark.parametrize("name", CASES)
def test_exactly_the_rules_of_an_op_hold(name: str) -> None:
    oracle.check_one_axis(name, built(name), 2)
