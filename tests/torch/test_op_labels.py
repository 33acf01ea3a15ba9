"""Labels by brute force: split every operand along a label, run the op on the pieces, put the results together.

Sizes are even and differ from dim to dim, so that nothing matches by luck.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.backends.torch import BACKEND
from shardwright.core.model.graph import Graph, Op
from tests.comparison import Comparison

Case = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def i(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


CASES: dict[str, Case] = {
    "linear": (F.linear, (r(4, 6, 8), r(10, 8))),
    "linear, one output": (F.linear, (r(4, 6, 8), r(8))),
    "mm": (torch.mm, (r(4, 6), r(6, 8))),
    "bmm": (torch.bmm, (r(4, 6, 8), r(4, 8, 10))),
    "matmul, heads": (torch.matmul, (r(4, 2, 6, 8), r(4, 2, 8, 10))),
    "matmul, broadcast": (torch.matmul, (r(4, 1, 6, 8), r(2, 8, 10))),
    "matmul, vector": (torch.matmul, (r(4, 6, 8), r(8))),
    "matmul, vector first": (torch.matmul, (r(8), r(4, 8, 6))),
    "dot": (torch.dot, (r(8), r(8))),
    "einsum": (lambda a, b: torch.einsum("bsd,hde->bhse", a, b), (r(4, 6, 8), r(2, 8, 10))),
    "einsum, batch": (lambda a, b: torch.einsum("bsd,bd->sb", a, b), (r(4, 6, 8), r(4, 8))),
    "conv2d": (lambda x, w: F.conv2d(x, w, padding=1), (r(4, 6, 7, 7), r(8, 6, 3, 3))),
    "conv1d": (F.conv1d, (r(4, 6, 9), r(8, 6, 3))),
    "conv2d, grouped": (lambda x, w: F.conv2d(x, w, groups=2), (r(4, 4, 7, 7), r(8, 2, 3, 3))),
    "conv2d, depthwise": (lambda x, w: F.conv2d(x, w, groups=x.shape[1]), (r(4, 6, 7, 7), r(6, 1, 3, 3))),
    "conv2d, unbatched": (F.conv2d, (r(6, 7, 7), r(8, 6, 3, 3))),
    "conv_transpose2d": (F.conv_transpose2d, (r(4, 6, 5, 5), r(6, 8, 2, 2))),
    "attention": (F.scaled_dot_product_attention, (r(4, 2, 6, 8), r(4, 2, 10, 8), r(4, 2, 10, 8))),
    "attention, wide values": (F.scaled_dot_product_attention, (r(4, 2, 6, 8), r(4, 2, 10, 8), r(4, 2, 10, 14))),
    "attention, no heads": (F.scaled_dot_product_attention, (r(4, 6, 8), r(4, 10, 8), r(4, 10, 8))),
    "attention, grouped": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        (r(4, 8, 6, 2), r(4, 4, 10, 2), r(4, 4, 10, 2)),
    ),
    "attention, one key head": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        (r(4, 8, 6, 2), r(4, 1, 10, 2), r(4, 1, 10, 2)),
    ),
    "attention, mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        (r(4, 2, 6, 8), r(4, 2, 10, 8), r(4, 2, 10, 8), r(4, 1, 6, 10)),
    ),
    "attention, small mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        (r(4, 2, 6, 8), r(4, 2, 10, 8), r(4, 2, 10, 8), r(6, 10)),
    ),
    "add, broadcast": (torch.add, (r(4, 1, 8), r(6, 8))),
    "where": (lambda c, a, b: torch.where(c > 0, a, b), (r(4, 6), r(6), r(4, 1))),
    "gelu": (F.gelu, (r(4, 6),)),
    "cumsum": (lambda x: x.cumsum(1), (r(4, 6, 8),)),
    "tril": (torch.tril, (r(4, 6, 8),)),
    "glu": (F.glu, (r(4, 6, 8),)),
    "to": (lambda x: x.to(torch.float64), (r(4, 6),)),
    "softmax": (lambda x: x.softmax(1), (r(4, 6, 8),)),
    "log_softmax": (lambda x: F.log_softmax(x, -1), (r(4, 6, 8),)),
    "layer_norm": (lambda x: F.layer_norm(x, (8,)), (r(4, 6, 8),)),
    "rms_norm": (lambda x: F.rms_norm(x, (8,)), (r(4, 6, 8),)),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), (r(4, 6, 8),)),
    "batch_norm, running": (F.batch_norm, (r(4, 6, 8), r(6), r(6).abs())),
    "group_norm": (lambda x: F.group_norm(x, 2), (r(4, 6, 8),)),
    "sum": (lambda x: x.sum(1), (r(4, 6, 8),)),
    "sum, all": (torch.sum, (r(4, 6, 8),)),
    "sum, kept": (lambda x: x.sum((0, 2), keepdim=True), (r(4, 6, 8),)),
    "amax": (lambda x: x.amax(1), (r(4, 6, 8),)),
    "max": (lambda x: x.max(1), (r(4, 6, 8),)),
    "logsumexp": (lambda x: x.logsumexp(1), (r(4, 6, 8),)),
    "norm": (lambda x: x.norm(dim=1), (r(4, 6, 8),)),
    "var": (lambda x: x.var(1), (r(4, 6, 8),)),
    "argmax": (lambda x: x.argmax(1), (r(4, 6, 8),)),
    "embedding": (lambda w, n: F.embedding(n, w), (r(10, 8), i(10, 4, 6))),
    "index_select": (lambda x, n: x.index_select(1, n), (r(4, 6, 8), i(6, 10))),
    "gather": (lambda x, n: x.gather(1, n), (r(4, 6, 8), i(6, 4, 10, 8))),
    "index, one": (lambda x, n: x[:, n], (r(4, 6, 8), i(6, 10, 2))),
    "index, two": (lambda x, n, m: x[:, n, m], (r(4, 6, 8, 2), i(6, 10), i(8, 10))),
    "scatter": (lambda x, n, v: x.scatter(1, n, v), (r(4, 6), torch.arange(6).repeat(4, 1), r(4, 6))),
    "transpose": (lambda x: x.transpose(0, 2), (r(4, 6, 8),)),
    "permute": (lambda x: x.permute(2, 0, 1), (r(4, 6, 8),)),
    "movedim": (lambda x: x.movedim((0, 2), (-1, 0)), (r(4, 6, 8),)),
    "t": (torch.t, (r(4, 6),)),
    "flatten": (lambda x: x.flatten(1), (r(4, 6, 8),)),
    "reshape, first kept": (lambda x: x.reshape(x.shape[0], -1, 2), (r(4, 6, 8),)),
    "split heads": (lambda x: x.unflatten(-1, (-1, 2)), (r(4, 6, 8),)),
    "merge batch": (lambda x: x.flatten(0, 1), (r(4, 6, 8),)),
    "unsqueeze": (lambda x: x.unsqueeze(1), (r(4, 6),)),
    "squeeze": (lambda x: x.squeeze(1), (r(4, 1, 6),)),
    "expand": (lambda x: x.expand(-1, 10, -1), (r(4, 1, 6),)),
    "cat": (lambda a, b: torch.cat([a, b], 1), (r(4, 6, 8), r(4, 10, 8))),
    "stack": (lambda a, b: torch.stack([a, b], 1), (r(4, 6), r(4, 6))),
    "slice": (lambda x: x[:, 1:5], (r(4, 6, 8),)),
    "slice, steps": (lambda x: x[:, ::2], (r(4, 12, 8),)),
    "select": (lambda x: x[:, 1], (r(4, 6, 8),)),
    "split": (lambda x: x.split([2, 4], 1), (r(4, 6, 8),)),
    "unbind": (lambda x: x.unbind(1), (r(4, 6, 8),)),
    "pad": (lambda x: F.pad(x, (1, 2)), (r(4, 6, 8),)),
    "flip": (lambda x: x.flip(1), (r(4, 6, 8),)),
    "roll": (lambda x: x.roll(1, 1), (r(4, 6, 8),)),
    "repeat": (lambda x: x.repeat(1, 2, 1), (r(4, 6, 8),)),
    "repeat_interleave": (lambda x: x.repeat_interleave(3, 1), (r(4, 6, 8),)),
    "topk": (lambda x: x.topk(2, 1), (r(4, 6, 8),)),
    "sort": (lambda x: x.sort(1), (r(4, 6, 8),)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), (r(4, 6, 8, 8),)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 1), (r(4, 6, 8, 8),)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2), (r(4, 6, 8, 8),)),
}


class Wrapped(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *operands: torch.Tensor) -> Any:
        return self.function(*operands)


def captured(case: Case) -> tuple[Graph, Op]:
    """The op that reads the operands, captured at its own sizes: no operand grows with the batch but a dummy."""
    function, operands = case
    graph = BACKEND.capture(
        Wrapped(lambda dummy, *rest: function(*rest)),
        (torch.zeros(2), *operands),
        batch_dims=[0, *([None] * len(operands))],
        require_loss=False,
    )
    last = [op for op in graph.ops if set(op.outputs) & set(graph.outputs)][-1]
    return graph, last


def outputs(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


@pytest.mark.parametrize("name", CASES)
def test_an_op_can_be_split_along_its_labels(name: str) -> None:
    function, operands = CASES[name]
    graph, op = captured(CASES[name])
    assert op.kind != "opaque"
    assert set(op.inputs) <= set(graph.inputs) or name == "where"
    order = {number: position - 1 for position, number in enumerate(graph.inputs)}
    if name == "where":  # whose condition is computed from the first operand, dim by dim
        order[op.inputs[0]] = 0
    used = {order[t]: labels for t, labels in zip(op.inputs, op.input_labels, strict=True)}
    whole = outputs(function(*operands))
    splits = 0
    for label in sorted({label for labels in used.values() for label in labels if label >= 0}):
        role = op.role(label)
        if role not in ("map", "sum"):
            continue
        dims = {position: labels.index(label) for position, labels in used.items() if label in labels}
        if op.offsets and len({operands[p].shape[d] for p, d in dims.items()}) > 1:
            continue  # parts of a whole: each is split by itself
        if op.offsets and any(
            out.shape[labels.index(label)] != operands[p].shape[d]
            for out, labels in zip(whole, op.output_labels, strict=True)
            if label in labels
            for p, d in dims.items()
        ):
            continue
        assert all(operands[p].shape[d] % 2 == 0 for p, d in dims.items())
        pieces = []
        for half in range(2):
            given = [t.chunk(2, dims[p])[half] if p in dims else t for p, t in enumerate(operands)]
            pieces.append(outputs(function(*given)))
        for n, (expected, labels) in enumerate(zip(whole, op.output_labels, strict=True)):
            parts = [piece[n] for piece in pieces]
            if role == "sum":
                assert label not in labels
                together = parts[0] + parts[1]
            else:
                together = torch.cat(parts, labels.index(label))
            Comparison(f"{name}, label {label}").values(together, expected, relative=1e-5, absolute=1e-5).require()
        splits += 1
    assert splits >= 1


MEGATRON = {
    # case → (operand, dim) pairs that tensor parallelism needs, and the role of their label
    "linear": {(1, 0): "map", (1, 1): "sum", (0, 0): "map"},
    "matmul, heads": {(0, 1): "map", (0, 3): "sum"},
    "attention": {(0, 0): "map", (0, 1): "map"},
    "attention, grouped": {(0, 1): "map", (1, 1): "map"},
    "embedding": {(0, 0): "index", (0, 1): "map"},
    "softmax": {(0, 1): "statistic", (0, 0): "map"},
    "layer_norm": {(0, 2): "statistic", (0, 0): "map", (0, 1): "map"},
    "split heads": {(0, 2): "map"},
    "conv2d": {(1, 0): "map", (1, 1): "sum"},
}


@pytest.mark.parametrize("name", MEGATRON)
def test_the_splits_that_tensor_parallelism_needs_are_there(name: str) -> None:
    _, op = captured(CASES[name])
    for (operand, dim), role in MEGATRON[name].items():
        label = op.input_labels[operand][dim]
        assert label >= 0
        assert op.role(label) == role
