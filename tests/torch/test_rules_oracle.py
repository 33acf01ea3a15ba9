"""The rules of every kind of op by brute force: aten ops on the pieces that ranks would hold, all placements tried."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.backends.torch import BACKEND
from shardwright.core.graph import Graph, Op, OpKind
from tests.core import oracle

Case = tuple[OpKind, Callable[..., Any], tuple[np.ndarray, ...]]


def f(*shape: int) -> np.ndarray:
    return np.random.default_rng(list(shape)).standard_normal(shape).astype(np.float32)


def i(limit: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(limit).integers(0, limit, shape)


def b(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).integers(0, 2, shape).astype(bool)


def positive(*shape: int) -> np.ndarray:
    return np.abs(f(*shape)) + 4


LIGHT: dict[str, Case] = {
    "linear": ("contraction", F.linear, (f(6, 12, 18), f(24, 18))),
    "mm": ("contraction", torch.mm, (f(6, 12), f(12, 18))),
    "einsum": ("contraction", lambda x, w: torch.einsum("bsd,hde->bhse", x, w), (f(6, 12, 18), f(24, 18, 30))),
    "add": ("elementwise", torch.add, (f(6, 12, 18), f(12, 18))),
    "sub": ("elementwise", torch.sub, (f(6, 12), f(6, 12))),
    "mul": ("elementwise", torch.mul, (f(6, 12), f(12))),
    "div": ("elementwise", torch.div, (f(6, 12), positive(6, 12))),
    "maximum": ("elementwise", torch.maximum, (f(6, 12), f(6, 12))),
    "minimum": ("elementwise", torch.minimum, (f(6, 12), f(6, 12))),
    "where": ("elementwise", torch.where, (b(6, 12), f(6, 12), f(6, 12))),
    "neg": ("elementwise", torch.neg, (f(6, 12),)),
    "add a constant": ("elementwise", lambda x: x + 1.5, (f(6, 12),)),
    "times a constant": ("elementwise", lambda x: x * 1.5, (f(6, 12),)),
    "gelu": ("elementwise", F.gelu, (f(6, 12),)),
    "tanh": ("elementwise", torch.tanh, (f(6, 12),)),
    "exp": ("elementwise", torch.exp, (f(6, 12),)),
    "tril": ("elementwise", torch.tril, (f(6, 12, 18),)),
    "cumsum": ("elementwise", lambda x: x.cumsum(1), (f(6, 12, 18),)),
    "greater": ("elementwise", torch.gt, (f(6, 12), f(6, 12))),
    "masked fill": ("elementwise", lambda x, m: x.masked_fill(m, -1.5), (f(6, 12), b(6, 12))),
    "sum": ("reduction", lambda x: x.sum(1), (f(6, 12, 18),)),
    "mean": ("reduction", lambda x: x.mean((0, 2)), (f(6, 12, 18),)),
    "amax": ("reduction", lambda x: x.amax(1), (f(6, 12, 18),)),
    "amin": ("reduction", lambda x: x.amin(1), (f(6, 12, 18),)),
    "any": ("reduction", lambda x: x.any(1), (b(6, 12, 18),)),
    "all": ("reduction", lambda x: x.all(1), (b(6, 12, 18),)),
    "prod": ("reduction", lambda x: x.prod(1), (f(6, 12),)),
    "norm": ("reduction", lambda x: x.norm(dim=1), (f(6, 12),)),
    "embedding": ("gather", lambda w, n: F.embedding(n, w), (f(30, 18), i(30, 6, 12))),
    "gather": ("gather", lambda x, n: x.gather(1, n), (f(6, 12, 18), i(12, 6, 24, 18))),
    "index, one": ("gather", lambda x, n: x[:, n], (f(6, 12, 18), i(12, 24, 30))),
    "flatten": ("view", lambda x: x.flatten(1), (f(6, 12, 18),)),
    "split heads": ("view", lambda x: x.reshape(x.shape[0], -1, 12, 2) if x.shape[-1] == 24 else
                    x.reshape(x.shape[0], -1, x.shape[-1] // 2, 2), (f(6, 12, 24),)),
    "transpose": ("view", lambda x: x.transpose(0, 2), (f(6, 12, 18),)),
    "expand": ("view", lambda x: x.expand(-1, 18, -1), (f(6, 1, 12),)),
    "cat": ("concat", lambda x, y: torch.cat([x, y], 1), (f(6, 12, 18), f(6, 30, 18))),
    "stack": ("concat", lambda x, y: torch.stack([x, y], 1), (f(6, 12), f(6, 12))),
    "slice": ("slice", lambda x: x.narrow(1, x.shape[1] // 3, x.shape[1] // 3), (f(6, 18, 12),)),
    "split": ("slice", lambda x: x.split([x.shape[1] // 3, 2 * x.shape[1] // 3], 1), (f(6, 18, 12),)),
    "unbind": ("slice", lambda x: x.unbind(1), (f(6, 2, 12),)),
    "flip": ("copy", lambda x: x.flip(1), (f(6, 12, 18),)),
    "pad": ("copy", lambda x: F.pad(x, (1, 2), value=1.5), (f(6, 12, 18),)),
    "repeat_interleave": ("copy", lambda x: x.repeat_interleave(3, 1), (f(6, 12, 18),)),
    "sort": ("sort", lambda x: x.sort(1)[0] if False else x.sort(1), (f(6, 12, 18),)),
    "topk": ("sort", lambda x: x.topk(2, 1), (f(6, 12, 18),)),
    "scatter add": ("scatter", lambda x, n, v: x.scatter_add(1, n, v), (f(6, 12), i(12, 6, 12), f(6, 12))),
}
"""Run in the ordinary suite, on two ranks."""

HEAVY: dict[str, Case] = {
    "bmm": ("contraction", torch.bmm, (f(6, 12, 18), f(6, 18, 24))),
    "matmul, broadcast": ("contraction", torch.matmul, (f(6, 1, 12, 18), f(24, 18, 30))),
    "matmul, vector": ("contraction", torch.matmul, (f(6, 12, 18), f(18))),
    "conv2d": ("contraction", lambda x, w: F.conv2d(x, w, padding=1), (f(6, 12, 7, 5), f(18, 12, 3, 3))),
    "conv2d, depthwise": ("contraction", lambda x, w: F.conv2d(x, w, groups=x.shape[1]),
                          (f(6, 12, 7, 5), f(12, 1, 3, 3))),
    "conv transpose": ("contraction", F.conv_transpose2d, (f(6, 12, 5, 7), f(12, 18, 2, 2))),
    "attention": ("attention", F.scaled_dot_product_attention, (f(6, 12, 18, 24), f(6, 12, 30, 24), f(6, 12, 30, 36))),
    "attention, same widths": ("attention", F.scaled_dot_product_attention,
                               (f(6, 12, 18, 24), f(6, 12, 30, 24), f(6, 12, 30, 24))),
    "attention, causal": ("attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
                          (f(6, 12, 18, 24), f(6, 12, 30, 24), f(6, 12, 30, 36))),
    "attention, grouped": ("attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
                           (f(6, 24, 18, 30), f(6, 12, 36, 30), f(6, 12, 36, 30))),
    "relu": ("elementwise", torch.relu, (f(6, 12),)),
    "sigmoid": ("elementwise", torch.sigmoid, (f(6, 12),)),
    "log": ("elementwise", torch.log, (positive(6, 12),)),
    "rsqrt": ("elementwise", torch.rsqrt, (positive(6, 12),)),
    "pow": ("elementwise", lambda x: x.pow(3), (positive(6, 12) - 6,)),
    "abs": ("elementwise", torch.abs, (f(6, 12),)),
    "silu": ("elementwise", F.silu, (f(6, 12),)),
    "rsub": ("elementwise", lambda x: 2.5 - x, (f(6, 12),)),
    "to float64": ("elementwise", lambda x: x.to(torch.float64), (f(6, 12),)),
    "to int": ("elementwise", lambda x: x.to(torch.int64), (f(6, 12) * 5,)),
    "clamp": ("elementwise", lambda x: x.clamp(-0.5, 0.7), (f(6, 12),)),
    "less": ("elementwise", torch.lt, (f(6, 12), f(6, 12))),
    "equal": ("elementwise", torch.eq, (f(6, 12), f(6, 12))),
    "logical and": ("elementwise", torch.logical_and, (b(6, 12), b(6, 12).T.copy().reshape(6, 12))),
    "triu": ("elementwise", lambda x: torch.triu(x, 1), (f(6, 12, 18),)),
    "glu": ("elementwise", F.glu, (f(6, 12, 24),)),
    "mse loss": ("elementwise", lambda x, y: F.mse_loss(x, y, reduction="none"), (f(6, 12), f(6, 12) + 1)),
    "var": ("reduction", lambda x: x.var(1), (f(6, 12, 18),)),
    "logsumexp": ("reduction", lambda x: x.logsumexp(1), (f(6, 12, 18),)),
    "max with indices": ("reduction", lambda x: x.max(1), (f(6, 12, 18),)),
    "argmax": ("reduction", lambda x: x.argmax(1), (f(6, 12, 18),)),
    "sum, kept": ("reduction", lambda x: x.sum((0, 2), keepdim=True), (f(6, 12, 18),)),
    "max pool": ("reduction", lambda x: F.max_pool2d(x, 2), (f(6, 12, 18, 24),)),
    "avg pool": ("reduction", lambda x: F.avg_pool2d(x, 2), (f(6, 12, 18, 24),)),
    "index_select": ("gather", lambda x, n: x.index_select(1, n), (f(6, 12, 18), i(12, 24))),
    "index, two": ("gather", lambda x, n, m: x[:, n, m], (f(6, 12, 18, 24), i(12, 30), i(18, 30))),
    "merge batch": ("view", lambda x: x.flatten(0, 1), (f(6, 12, 18),)),
    "permute": ("view", lambda x: x.permute(2, 0, 1), (f(6, 12, 18),)),
    "unsqueeze": ("view", lambda x: x.unsqueeze(1), (f(6, 12),)),
    "slice, steps": ("slice", lambda x: x[:, ::2], (f(6, 12, 18),)),
    "select": ("slice", lambda x: x[:, 1], (f(6, 12, 18),)),
    "roll": ("copy", lambda x: x.roll(1, 1), (f(6, 12, 18),)),
    "repeat": ("copy", lambda x: x.repeat(1, 2, 1), (f(6, 12, 18),)),
    "interpolate": ("copy", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (f(6, 12, 5, 7),)),
    "scatter": ("scatter", lambda x, n, v: x.scatter(1, n, v),
                (f(6, 12), np.stack([np.random.default_rng(r).permutation(12) for r in range(6)])[:, :7], f(6, 7))),
    "softmax": ("softmax", lambda x: x.softmax(1), (f(6, 12, 18),)),
    "layer norm": ("normalization", lambda x: F.layer_norm(x, (x.shape[-1],)), (f(6, 12, 18),)),
    "opaque": ("reduction", torch.trace, (f(6, 12),)),
}
"""Marked slow, with everything above on three ranks too."""
CASES = LIGHT | HEAVY


class Wrapped(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, dummy: torch.Tensor, *operands: torch.Tensor) -> Any:
        return self.function(*operands)


def captured(name: str) -> tuple[Graph, Op, Callable[[list[np.ndarray]], list[np.ndarray]], list[np.ndarray]]:
    """The op, its function over arrays and its operands, in the op's own order."""
    kind, function, operands = CASES[name]
    graph = BACKEND.capture(
        Wrapped(function),
        (torch.zeros(2), *(torch.from_numpy(v) for v in operands)),
        batch_dims=[0, *([None] * len(operands))],
        require_loss=False,
    )
    made = [op for op in graph.ops if op.inputs]
    assert [op.kind for op in made] == [kind], [(op.kind, op.name) for op in graph.ops]
    op = made[0]
    order = [graph.inputs.index(t) - 1 for t in op.inputs]

    def run(values: list[np.ndarray]) -> list[np.ndarray]:
        given: list[Any] = [None] * len(operands)
        for at, value in zip(order, values, strict=True):
            given[at] = torch.from_numpy(np.ascontiguousarray(value))
        made = function(*given)
        return [t.numpy() for t in ([made] if isinstance(made, torch.Tensor) else made)]

    return graph, op, run, [operands[at] for at in order]


def check_one_axis(name: str, ranks: int) -> int:
    graph, op, run, operands = captured(name)
    wrong, missing, count = oracle.compare_rules(graph, op, run, operands, ranks, 2)
    assert not wrong, f"wrong rules of {name}: {wrong}"
    assert not missing, f"missing rules of {name}: {missing}"
    return count


@pytest.mark.parametrize("name", LIGHT)
def test_declared_rules_are_all_that_hold_on_two_ranks(name: str) -> None:
    assert check_one_axis(name, 2) > 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_declared_rules_are_all_that_hold(name: str, ranks: int) -> None:
    assert check_one_axis(name, ranks) > 1


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2), (2, 3)])
def test_pairs_of_rules_hold_on_two_axes(sizes: tuple[int, int]) -> None:
    """All declared pairs, and 500 seeded others over all ops."""
    failures: list[str] = []
    declared = others = 0
    each = math.ceil(500 / len(CASES))
    for name in CASES:
        graph, op, run, operands = captured(name)
        wholes = run(operands)
        pairs = list(oracle.declared_pairs(graph, op, operands, wholes, sizes, 2))
        for pair in pairs:
            declared += 1
            chosen = [list(p) for p in zip(*(s.inputs for s in pair), strict=True)]
            made = oracle.run_grid(run, operands, chosen, sizes)
            results = [list(p) for p in zip(*(s.outputs for s in pair), strict=True)]
            if made is None or not all(
                oracle.holds_twice(grid, whole, places, sizes)
                for grid, whole, places in zip(made, wholes, results, strict=True)
            ):
                failures.append(f"{name}: {pair[0]} with {pair[1]} does not hold")
        for chosen, results in oracle.random_pairs(operands, wholes, sizes, each, seed=len(name)):
            others += 1
            made = oracle.run_grid(run, operands, chosen, sizes)
            for which, (whole, places) in enumerate(zip(wholes, results, strict=True)):
                real = made is not None and oracle.holds_twice(made[which], whole, places, sizes)
                said = oracle.said_twice(pairs, chosen, which, places)
                if real and not said and not any(oracle._trivial(p, whole) for p in places):
                    failures.append(f"{name}: {chosen} → {places} holds and is not declared")
    assert not failures, failures
    assert declared > 1000
    assert others >= 500
