"""The rules of every kind of op by brute force: aten ops on the pieces that ranks would hold, all placements tried."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.backends.torch import BACKEND
from shardwright.core.model.graph import OpKind
from tests.core import oracle

Case = tuple[OpKind, Callable[..., Any] | list[Callable[..., Any]], tuple[np.ndarray, ...]]
"""The kind, the op (or the same op with several constants: a rule must hold for all), its operands."""


DRAWS = np.random.default_rng(5)


def f(*shape: int) -> np.ndarray:
    return (2 * DRAWS.standard_normal(shape)).astype(np.float32)


def i(limit: int, *shape: int) -> np.ndarray:
    return DRAWS.integers(0, limit, shape)


def b(*shape: int) -> np.ndarray:
    return DRAWS.integers(0, 2, shape).astype(bool)


def mostly(*shape: int) -> np.ndarray:
    return DRAWS.random(shape) < 0.93


def positive(*shape: int) -> np.ndarray:
    return np.abs(f(*shape)) + 7


def counted(*shape: int) -> np.ndarray:
    """Few different values, so that some are equal."""
    return DRAWS.integers(-2, 3, shape).astype(np.float32)


def sized(function: Callable[..., Any], whole: tuple[int, ...]) -> Callable[..., Any]:
    """An op that is told the shape of what it makes, as a runtime tells a view of a piece."""

    def call(*operands: Any) -> Any:
        return function(*operands, whole)

    call.takes_shape = whole  # type: ignore[attr-defined]
    call.function = function  # type: ignore[attr-defined]
    return call


LIGHT: dict[str, Case] = {
    "linear": ("contraction", F.linear, (f(6, 12, 18), f(24, 18))),
    "mm": ("contraction", torch.mm, (f(6, 12), f(12, 18))),
    "einsum": ("contraction", lambda x, w: torch.einsum("bsd,hde->bhse", x, w), (f(6, 12, 18), f(24, 18, 30))),
    "add": ("elementwise", torch.add, (f(6, 12, 18), f(12, 18))),
    "sub": ("elementwise", torch.sub, (f(6, 12), f(6, 12))),
    "mul": ("elementwise", torch.mul, (f(6, 12), f(12))),
    "div": ("elementwise", torch.div, (f(6, 12), f(6, 12) + 0.01)),
    "maximum": ("elementwise", torch.maximum, (f(6, 12), f(6, 12))),
    "minimum": ("elementwise", torch.minimum, (f(6, 12), f(6, 12))),
    "where": ("elementwise", torch.where, (b(6, 12), f(6, 12), f(6, 12))),
    "neg": ("elementwise", torch.neg, (f(6, 12),)),
    "add a constant": ("elementwise", lambda x: x + 1.5, (f(6, 12),)),
    "times a constant": ("elementwise", [lambda x: x * 1.5, lambda x: x * -0.7], (f(6, 12),)),
    "gelu": ("elementwise", F.gelu, (f(6, 12),)),
    "tanh": ("elementwise", torch.tanh, (f(6, 12),)),
    "exp": ("elementwise", torch.exp, (f(6, 12),)),
    "tril": ("elementwise", torch.tril, (f(6, 12, 18),)),
    "cumsum": ("elementwise", lambda x: x.cumsum(1), (f(6, 12, 18),)),
    "greater": ("elementwise", torch.gt, (counted(6, 12), counted(6, 12))),
    "masked fill": ("elementwise", lambda x, m: x.masked_fill(m, -1.5), (f(6, 12), b(6, 12))),
    "sum": ("reduction", lambda x: x.sum(1), (f(6, 12, 18),)),
    "mean": ("reduction", lambda x: x.mean((0, 2)), (f(6, 12, 18),)),
    "amax": ("reduction", lambda x: x.amax(1), (f(6, 12, 18),)),
    "amin": ("reduction", lambda x: x.amin(1), (f(6, 12, 18),)),
    "any": ("reduction", lambda x: x.any(1), (~mostly(6, 24, 18),)),
    "all": ("reduction", lambda x: x.all(1), (mostly(6, 24, 18),)),
    "prod": ("reduction", lambda x: x.prod(1), (f(6, 12),)),
    "norm": ("reduction", lambda x: x.norm(dim=1), (f(6, 12),)),
    "embedding": ("gather", lambda w, n: F.embedding(n, w), (f(30, 18), i(30, 6, 12))),
    "gather": ("gather", lambda x, n: x.gather(1, n), (f(6, 12, 18), i(12, 6, 24, 18))),
    "index, one": ("gather", lambda x, n: x[:, n], (f(6, 12, 18), i(12, 24, 30))),
    "flatten": ("view", sized(torch.reshape, (6, 216)), (f(6, 12, 18),)),
    "split heads": ("view", sized(torch.reshape, (6, 18, 12, 30)), (f(6, 18, 360),)),
    "transpose": ("view", lambda x: x.transpose(0, 2), (f(6, 12, 18),)),
    "expand": ("view", sized(torch.Tensor.expand, (6, 18, 12)), (f(6, 1, 12),)),
    "cat": ("concat", lambda x, y: torch.cat([x, y], 1), (f(6, 12, 18), f(6, 30, 18))),
    "stack": ("concat", lambda x, y: torch.stack([x, y], 1), (f(6, 12), f(6, 12))),
    "slice": ("slice", lambda x: x.narrow(1, x.shape[1] // 3, x.shape[1] // 3), (f(6, 18, 12),)),
    "split": ("slice", lambda x: x.split([x.shape[1] // 3, 2 * x.shape[1] // 3], 1), (f(6, 18, 12),)),
    "unbind": ("slice", lambda x: x.unbind(1), (f(6, 2, 12),)),
    "flip": ("copy", lambda x: x.flip(1), (f(6, 12, 18),)),
    "pad": ("copy", lambda x: F.pad(x, (1, 2), value=1.5), (f(6, 12, 18),)),
    "shift by a pad": ("copy", lambda x: F.pad(x, (0, 0, 1, -1), value=1.5), (f(6, 12, 18),)),
    "repeat_interleave": ("copy", lambda x: x.repeat_interleave(3, 1), (f(6, 12, 18),)),
    "sort": ("sort", lambda x: x.sort(1), (f(6, 12, 18),)),
    "topk": ("sort", lambda x: x.topk(2, 1), (f(6, 12, 18),)),
    "scatter add": ("scatter", lambda x, n, v: x.scatter_add(1, n, v), (f(6, 12), i(12, 6, 12), f(6, 12))),
}
"""Run in the ordinary suite, on two ranks."""

HEAVY: dict[str, Case] = {
    "bmm": ("contraction", torch.bmm, (f(6, 12, 18), f(6, 18, 24))),
    "matmul, broadcast": ("contraction", torch.matmul, (f(6, 1, 12, 18), f(24, 18, 30))),
    "matmul, vector": ("contraction", torch.matmul, (f(6, 12, 18), f(18))),
    "conv2d": ("contraction", lambda x, w: F.conv2d(x, w, padding=1), (f(6, 12, 7, 5), f(18, 12, 3, 3))),
    "conv2d, depthwise": (
        "contraction",
        lambda x, w: F.conv2d(x, w, groups=x.shape[1]),
        (f(6, 12, 7, 5), f(12, 1, 3, 3)),
    ),
    "conv transpose": ("contraction", F.conv_transpose2d, (f(6, 12, 5, 7), f(12, 18, 2, 2))),
    "attention": ("attention", F.scaled_dot_product_attention, (f(6, 12, 18, 24), f(6, 12, 30, 24), f(6, 12, 30, 36))),
    "attention, same widths": (
        "attention",
        F.scaled_dot_product_attention,
        (f(6, 12, 18, 24), f(6, 12, 30, 24), f(6, 12, 30, 24)),
    ),
    "attention, causal": (
        "attention",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (f(6, 12, 18, 24), f(6, 12, 30, 24), f(6, 12, 30, 36)),
    ),
    "attention, grouped": (
        "attention",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        (f(6, 24, 18, 30), f(6, 12, 36, 30), f(6, 12, 36, 30)),
    ),
    "relu": ("elementwise", torch.relu, (f(6, 12),)),
    "sigmoid": ("elementwise", torch.sigmoid, (f(6, 12),)),
    "log": ("elementwise", torch.log, (positive(6, 12),)),
    "rsqrt": ("elementwise", torch.rsqrt, (positive(6, 12),)),
    "pow": ("elementwise", [lambda x: x.pow(3), lambda x: x.pow(2)], (f(6, 12),)),
    "abs": ("elementwise", torch.abs, (f(6, 12),)),
    "silu": ("elementwise", F.silu, (f(6, 12),)),
    "rsub": ("elementwise", lambda x: 2.5 - x, (f(6, 12),)),
    "to float64": ("elementwise", lambda x: x.to(torch.float64), (f(6, 12),)),
    "to int": ("elementwise", lambda x: x.to(torch.int64), (f(6, 12) * 5,)),
    "clamp": ("elementwise", lambda x: x.clamp(-0.5, 0.7), (f(6, 12),)),
    "less": ("elementwise", torch.lt, (counted(6, 12), counted(6, 12))),
    "equal": ("elementwise", torch.eq, (counted(6, 12), counted(6, 12))),
    "logical and": ("elementwise", torch.logical_and, (b(6, 12), b(6, 12))),
    "triu": ("elementwise", lambda x: torch.triu(x, 1), (f(6, 12, 18),)),
    "glu": ("elementwise", F.glu, (f(6, 12, 24),)),
    "mse loss": ("elementwise", lambda x, y: F.mse_loss(x, y, reduction="none"), (f(6, 12), f(6, 12))),
    "var": ("reduction", lambda x: x.var(1), (f(6, 12, 18),)),
    "logsumexp": ("reduction", lambda x: x.logsumexp(1), (f(6, 12, 18),)),
    "max with indices": ("reduction", lambda x: x.max(1), (f(6, 12, 18),)),
    "argmax": ("reduction", lambda x: x.argmax(1), (f(6, 12, 18),)),
    "sum, kept": ("reduction", lambda x: x.sum((0, 2), keepdim=True), (f(6, 12, 18),)),
    "max pool": ("reduction", lambda x: F.max_pool2d(x, 2), (f(6, 12, 18, 24),)),
    "avg pool": ("reduction", lambda x: F.avg_pool2d(x, 2), (f(6, 12, 18, 24),)),
    "index_select": ("gather", lambda x, n: x.index_select(1, n), (f(6, 12, 18), i(12, 24))),
    "index, two": ("gather", lambda x, n, m: x[:, n, m], (f(6, 12, 18, 24), i(12, 30), i(18, 30))),
    "merge batch": ("view", sized(torch.reshape, (72, 18)), (f(6, 12, 18),)),
    "permute": ("view", lambda x: x.permute(2, 0, 1), (f(6, 12, 18),)),
    "movedim": ("view", lambda x: x.movedim((0, 2), (-1, 0)), (f(6, 12, 18),)),
    "unsqueeze": ("view", lambda x: x.unsqueeze(1), (f(6, 12),)),
    "slice, steps": ("slice", lambda x: x[:, ::2], (f(6, 12, 18),)),
    "select": ("slice", lambda x: x[:, 1], (f(6, 12, 18),)),
    "roll": ("copy", lambda x: x.roll(1, 1), (f(6, 12, 18),)),
    "repeat": ("copy", lambda x: x.repeat(1, 2, 1), (f(6, 12, 18),)),
    "interpolate": ("copy", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (f(6, 12, 5, 7),)),
    "scatter": (
        "scatter",
        lambda x, n, v: x.scatter(1, n, v),
        (f(6, 12), np.stack([np.random.default_rng(r).permutation(12) for r in range(6)])[:, :7], f(6, 7)),
    ),
    "softmax": ("softmax", lambda x: x.softmax(1), (f(6, 12, 18),)),
    "layer norm": ("normalization", lambda x: F.layer_norm(x, (x.shape[-1],)), (f(6, 12, 18),)),
    "trace": ("reduction", torch.trace, (f(18, 12),)),
}
"""Marked slow, with everything above on three ranks too."""
CASES = LIGHT | HEAVY


class Wrapped(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, dummy: torch.Tensor, *operands: torch.Tensor) -> Any:
        return self.function(*operands)


def captured(name: str) -> oracle.Captured:
    """The op, its functions over arrays and its operands, in the op's own order."""
    kind, given, operands = CASES[name]
    functions = given if isinstance(given, list) else [given]
    graph = BACKEND.capture(
        Wrapped(functions[0]),
        (torch.zeros(2), *(torch.from_numpy(v) for v in operands)),
        batch_dims=[0, *([None] * len(operands))],
        require_loss=False,
    )
    made = [op for op in graph.ops if op.inputs]
    assert [op.kind for op in made] == [kind], [(op.kind, op.name) for op in graph.ops]
    op = made[0]
    order = [graph.inputs.index(t) - 1 for t in op.inputs]
    return graph, op, [_over_arrays(function, order) for function in functions], [operands[at] for at in order]


def _over_arrays(function: Callable[..., Any], order: list[int]) -> oracle.Function:
    def run(values: list[np.ndarray], *shape: Any) -> list[np.ndarray]:
        given: list[Any] = [None] * len(values)
        for at, value in zip(order, values, strict=True):
            given[at] = torch.from_numpy(np.ascontiguousarray(value))
        made = getattr(function, "function", function)(*given, *shape)
        return [t.numpy() for t in ([made] if isinstance(made, torch.Tensor) else made)]

    if hasattr(function, "takes_shape"):
        run.takes_shape = function.takes_shape  # type: ignore[attr-defined]
    return run


@pytest.mark.parametrize("name", LIGHT)
def test_declared_rules_are_all_that_hold_on_two_ranks(name: str) -> None:
    oracle.check_one_axis(name, captured(name), 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_declared_rules_are_all_that_hold(name: str, ranks: int) -> None:
    oracle.check_one_axis(name, captured(name), ranks)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2), (2, 3)])
def test_pairs_of_rules_hold_on_two_axes(sizes: tuple[int, int]) -> None:
    """All declared pairs, and 500 seeded others over all ops."""
    oracle.check_two_axes({name: captured(name) for name in CASES}, sizes, declared=1000, others=500)
