"""Labels against brute force: split the operands along a label, run the op on the pieces, compare with the whole."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.backends.jax import BACKEND
from shardwright.core.model.graph import Graph, Op
from tests.comparison import Comparison

BATCH = 4

capture = BACKEND.capture


def f(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def i(limit: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(limit).integers(0, limit, shape).astype(np.int32)


def heads_to_width(x: Any) -> Any:
    return x.reshape(x.shape[0], x.shape[1], -1)


def width_to_heads(x: Any) -> Any:
    return x.reshape(x.shape[0], x.shape[1], -1, 6)


# Sizes differ from each other, so that no label matches by luck; every one but 1, 3 and 5 can be halved.
CASES: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...], tuple[int | None, ...], str]] = {
    "linear": (lambda x, w: x @ w, (f(BATCH, 6, 8), f(8, 10)), (0, None), "contraction"),
    "linear of an [out, in] weight": (
        lambda x, w: jax.lax.dot_general(x, w, (((2,), (1,)), ((), ()))),
        (f(BATCH, 6, 8), f(10, 8)),
        (0, None),
        "contraction",
    ),
    "batched product": (
        lambda a, b: jnp.einsum("bhsd,bhtd->bhst", a, b),
        (f(BATCH, 2, 6, 8), f(BATCH, 2, 10, 8)),
        (0, 0),
        "contraction",
    ),
    "linear to heads": (
        lambda x, w: jnp.einsum("bsd,dhk->bshk", x, w),
        (f(BATCH, 6, 8), f(8, 2, 10)),
        (0, None),
        "contraction",
    ),
    "convolution": (
        lambda x, w: jax.lax.conv_general_dilated(x, w, (2, 1), "SAME"),
        (f(BATCH, 6, 9, 7), f(8, 6, 3, 3)),
        (0, None),
        "contraction",
    ),
    "depthwise convolution": (
        lambda x, w: jax.lax.conv_general_dilated(x, w, (1,), "SAME", feature_group_count=6),
        (f(BATCH, 6, 9), f(6, 1, 3)),
        (0, None),
        "contraction",
    ),
    "broadcast addition": (lambda x, y: x + y, (f(BATCH, 6, 8), f(1, 6, 1)), (0, None), "elementwise"),
    "softmax": (lambda x: jax.nn.softmax(x, axis=1), (f(BATCH, 6, 8),), (0,), "softmax"),
    "log softmax": (lambda x: jax.nn.log_softmax(x), (f(BATCH, 6, 8),), (0,), "softmax"),
    "gelu": (lambda x: jax.nn.gelu(x), (f(BATCH, 6, 8),), (0,), "elementwise"),
    "sum": (lambda x: x.sum((1, 2)), (f(BATCH, 6, 8),), (0,), "reduction"),
    "maximum": (lambda x: jax.lax.reduce_max(x, axes=(1,)), (f(BATCH, 6, 8),), (0,), "reduction"),
    "cumulative sum": (lambda x: jnp.cumsum(x, 1), (f(BATCH, 6, 8),), (0,), "elementwise"),
    "sort": (lambda x: jax.lax.sort(x, dimension=1), (f(BATCH, 6, 8),), (0,), "sort"),
    "largest": (lambda x: jax.lax.top_k(x, 3)[0], (f(BATCH, 6, 8),), (0,), "sort"),
    "embedding": (lambda t, x: jnp.take(t, x, axis=0), (f(10, 8), i(10, BATCH, 6)), (None, 0), "gather"),
    "take along": (lambda x, y: jnp.take_along_axis(x, y, -1), (f(BATCH, 6, 8), i(8, BATCH, 6, 2)), (0, 0), "gather"),
    "transpose": (lambda x: x.transpose(2, 0, 1), (f(BATCH, 6, 8),), (0,), "view"),
    "merge heads": (heads_to_width, (f(BATCH, 6, 8, 10),), (0,), "view"),
    "part heads": (width_to_heads, (f(BATCH, 8, 12),), (0,), "view"),
    "part of a dim": (lambda x: x[:, 1:4], (f(BATCH, 6, 8),), (0,), "slice"),
    "every other": (lambda x: x[:, ::2], (f(BATCH, 6, 8),), (0,), "slice"),
    "three parts": (lambda x: jnp.split(x, 3, axis=1), (f(BATCH, 6, 8),), (0,), "slice"),
    "concatenation": (lambda x, y: jnp.concatenate([x, y], 1), (f(BATCH, 6, 8), f(BATCH, 2, 8)), (0, 0), "concat"),
    "padding": (lambda x: jnp.pad(x, ((0, 0), (1, 2), (0, 0))), (f(BATCH, 6, 8),), (0,), "copy"),
    "reversal": (lambda x: x[:, ::-1], (f(BATCH, 6, 8),), (0,), "copy"),
    "attention": (
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v),
        (f(BATCH, 6, 2, 8), f(BATCH, 10, 2, 8), f(BATCH, 10, 2, 8)),
        (0, 0, 0),
        "attention",
    ),
    "attention of grouped queries": (
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v),
        (f(BATCH, 6, 4, 8), f(BATCH, 10, 2, 8), f(BATCH, 10, 2, 8)),
        (0, 0, 0),
        "attention",
    ),
    "attention with a mask": (
        lambda q, k, v, m: jax.nn.dot_product_attention(q, k, v, mask=m > 0),
        (f(BATCH, 6, 2, 8), f(BATCH, 10, 2, 8), f(BATCH, 10, 2, 8), f(BATCH, 1, 6, 10)),
        (0, 0, 0, 0),
        "attention",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_pieces_give_the_whole(name: str) -> None:
    function, operands, dims, kind = CASES[name]
    graph = capture(lambda _, batch: function(*batch), ({}, operands), batch_dims=(*dims,), require_loss=False)
    op = _op(graph, kind)
    given = [operands[graph.inputs.index(t)] if t in graph.inputs else None for t in op.inputs]
    sizes = graph.label_sizes(op, BATCH)
    split = 0
    for label, size in sizes.items():
        role = op.role(label)
        part_of_a_whole = any(
            graph.tensors[t].shape(BATCH)[d] != size and kind != "attention"
            for t, labels in zip((*op.inputs, *op.outputs), op.labels, strict=True)
            for d, own in enumerate(labels)
            if own == label
        )
        if role not in ("map", "sum") or size % 2 or part_of_a_whole:
            continue
        split += 1
        halves = [_run(function, operands, graph, op, given, label, half) for half in (0, 1)]
        whole = jax.tree.leaves(function(*operands))
        for k, (labels, expected) in enumerate(zip(op.output_labels, whole, strict=False)):
            if role == "sum":
                found = halves[0][k] + halves[1][k]
            else:
                assert label in labels, f"label {label} is mapped, but output {k} lacks it"
                found = np.concatenate([halves[0][k], halves[1][k]], labels.index(label))
            Comparison(f"label {label} ({role})").values(found, expected, relative=1e-5, absolute=1e-5).require()
    assert split >= 1


def _op(graph: Graph, kind: str) -> Op:
    found = [op for op in graph.ops if op.kind == kind]
    assert len(found) == 1, [(op.kind, op.name) for op in graph.ops]
    return found[0]


def _run(
    function: Callable[..., Any],
    operands: tuple[np.ndarray, ...],
    graph: Graph,
    op: Op,
    given: list[Any],
    label: int,
    half: int,
) -> list[np.ndarray]:
    """The function on one half of every operand along ``label``."""
    pieces = list(operands)
    for operand, labels, value in zip(op.inputs, op.input_labels, given, strict=True):
        if label in labels:
            dim = labels.index(label)
            assert value is not None or _is_elementwise(graph, operand), "the split operand is no input"
            place = graph.inputs.index(_source(graph, operand))
            pieces[place] = np.split(operands[place], 2, axis=dim)[half]
    return [np.asarray(leaf) for leaf in jax.tree.leaves(function(*pieces))]


def _source(graph: Graph, tensor: int) -> int:
    """The input that a tensor is an elementwise image of."""
    while tensor not in graph.inputs:
        tensor = graph.ops[graph.producer[tensor]].inputs[0]
    return tensor


def _is_elementwise(graph: Graph, tensor: int) -> bool:
    return graph.ops[graph.producer[tensor]].kind == "elementwise"


def test_a_looked_up_dim_has_its_role() -> None:
    graph = capture(
        lambda _, batch: jnp.take(*batch, axis=0),
        ({}, (f(10, 8), i(10, 4, 6))),
        batch_dims=(None, 0),
        require_loss=False,
    )
    op = _op(graph, "gather")
    assert op.role(op.labels[0][0]) == "index"
    assert op.role(op.labels[0][1]) == "map"


def test_statistics_and_whole_dims_have_their_roles() -> None:
    graph = capture(lambda _, x: jax.nn.softmax(x), ({}, f(4, 6)), require_loss=False)
    op = _op(graph, "softmax")
    assert [op.role(label) for label in op.labels[0]] == ["map", "statistic"]
    graph = capture(lambda _, x: jnp.cumsum(x, 1), ({}, f(4, 6)), require_loss=False)
    op = _op(graph, "elementwise")
    assert [op.role(label) for label in op.labels[0]] == ["map", "whole"]


def test_attention_never_splits_keys_or_width() -> None:
    function, operands, dims, _ = CASES["attention with a mask"]
    graph = capture(lambda _, batch: function(*batch), ({}, operands), batch_dims=dims, require_loss=False)
    op = _op(graph, "attention")
    (_, positions, head, width), (_, keys, *_), *_ = op.labels
    assert [op.role(label) for label in (positions, head, keys, width)] == ["map", "map", "whole", "whole"]
    assert op.labels[3] == (op.labels[0][0], -1, positions, keys)


def test_offsets_say_where_the_parts_begin() -> None:
    graph = capture(lambda _, x: jnp.split(x, [2, 5], axis=1), ({}, f(4, 6)), require_loss=False)
    assert _op(graph, "slice").offsets == (0, 2, 5)
    graph = capture(lambda _, x: jnp.concatenate([x, x[:, :2], x], 1), ({}, f(4, 6)), require_loss=False)
    assert _op(graph, "concat").offsets == (0, 6, 8)
