"""Rules that need more than pieces (an offset, a reduction inside), blocks, and what several axes ask for."""

import numpy as np
import pytest

from shardwright.core.layout.placements import Layout, Partial, Replicate, Split
from shardwright.core.layout.signature import Signature
from shardwright.core.model.graph import Graph, Op, OpKind
from shardwright.core.rules import op_rules as L
from shardwright.core.rules.legal_signatures import divides, fits, signatures
from shardwright.core.rules.op_rules import Labelled
from tests.core.oracle import REDUCE, commute, cut, holds, joint, matching
from tests.core.toy import Builder

DRAWS = np.random.default_rng(0)
S, R, P = Split, Replicate(), Partial("sum")


def one_op(kind: OpKind, name: str, inputs: list[tuple[tuple[int, ...], str]], out: tuple[int, ...],
           labelled: Labelled) -> tuple[Graph, Op]:  # fmt: skip
    b = Builder()
    operands = [b.input(f"x{i}", *shape, dtype=dtype) for i, (shape, dtype) in enumerate(inputs)]
    result = b.op(kind, name, operands, out, labelled)
    return b.build(result), b.ops[0]


def test_a_lookup_in_a_piece_of_a_table_with_its_offset() -> None:
    table, index = DRAWS.standard_normal((12, 6)), DRAWS.integers(0, 12, (4, 5))
    graph, op = one_op("gather", "embedding", [((12, 6), "float32"), ((4, 5), "int64")], (4, 5, 6),
                       L.gather((12, 6), 0, (4, 5)))  # fmt: skip
    found = [s for s in signatures(graph, op) if s.need == "offset"]
    assert found == [Signature((S(0), R), (P,), "offset")]
    for ranks in (2, 3):
        pieces = []
        for rank, rows in enumerate(cut(table, S(0), ranks)):
            place = index - rank * len(rows)
            inside = (place >= 0) & (place < len(rows))
            pieces.append(np.where(inside[..., None], rows[np.clip(place, 0, len(rows) - 1)], 0.0))
        assert holds(pieces, table[index], P)


def _softmax(x: np.ndarray, ranks: int) -> list[np.ndarray]:
    pieces = cut(x, S(1), ranks)
    top = REDUCE["max"]([p.max(1, keepdims=True) for p in pieces])
    total = REDUCE["sum"]([np.exp(p - top).sum(1, keepdims=True) for p in pieces])
    return [np.exp(p - top) / total for p in pieces]


def _layer_norm(x: np.ndarray, ranks: int) -> list[np.ndarray]:
    pieces = cut(x, S(1), ranks)
    mean = REDUCE["sum"]([p.sum(1, keepdims=True) for p in pieces]) / x.shape[1]
    variance = REDUCE["sum"]([((p - mean) ** 2).sum(1, keepdims=True) for p in pieces]) / x.shape[1]
    return [(p - mean) / np.sqrt(variance) for p in pieces]


@pytest.mark.parametrize(("kind", "combined"), [("softmax", _softmax), ("normalization", _layer_norm)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_statistics_along_a_split_dim_are_combined(kind: OpKind, combined: object, ranks: int) -> None:
    x = DRAWS.standard_normal((4, 12, 5))
    labelled = L.over_dims(x.shape, [1], "statistic")
    graph, op = one_op(kind, kind, [(x.shape, "float32")], x.shape, labelled)
    assert [s for s in signatures(graph, op) if s.need] == [Signature((S(1),), (S(1),), "combine")]
    (whole,) = combined(x, 1)  # type: ignore[operator]
    assert holds(combined(x, ranks), whole, S(1))  # type: ignore[operator]


def test_a_fused_matrix_is_split_inside_each_part() -> None:
    whole, parts = (4, 24), [(4, 12), (4, 6), (4, 6)]
    b = Builder()
    x = b.input("x", *whole, dtype="float32")
    made = tuple(b.tensor(p) for p in parts)
    cut_labels = L.parts(whole, 1, parts, [0, 12, 18])
    b.ops.append(Op("slice", "split", (x,), made, cut_labels.labels, (), cut_labels.offsets))
    graph = b.build(*made)
    assert Signature((S(1, (12, 6, 6)),), (S(1), S(1), S(1))) in signatures(graph, b.ops[0])
    value = DRAWS.standard_normal(whole)
    for rank, piece in enumerate(cut(value, S(1, (12, 6, 6)), 3)):
        for part, start, size in zip(np.split(piece, [4, 6], 1), (0, 12, 18), (12, 6, 6), strict=True):
            assert np.array_equal(part, cut(value[:, start : start + size], S(1), 3)[rank])


def test_blocks_pass_through_a_product() -> None:
    graph, op = one_op("contraction", "mm", [((4, 6), "float32"), ((6, 12), "float32")], (4, 12),
                       L.contraction("bk", "kn", "bn"))  # fmt: skip
    column = op.input_labels[1][1]
    assert Signature((R, S(1, (8, 4))), (S(1, (8, 4)),)) in signatures(graph, op, blocks={column: (8, 4)})


def test_partial_values_of_two_axes_commute_or_do_not_meet() -> None:
    assert commute([P, Partial("mean"), R, S(0)])
    assert commute([Partial("max"), Partial("max")])
    assert not commute([P, Partial("max")])
    first = Signature((P,), (P,))
    second = Signature((Partial("max"),), (Partial("max"),))
    assert joint([[first], [second]]) == ()
    assert joint([[first], [first]]) == ((first, first),)


def test_equal_copies_stand_for_an_idempotent_partial_value() -> None:
    wanted = Signature((Partial("max"), R), (Partial("max"),))
    assert matching([wanted], [R, R]) == (wanted,)
    assert matching([Signature((P, R), (P,))], [R, R]) == ()


def test_what_divides() -> None:
    assert divides((12, 8), [(S(0), 2), (S(0), 3), (S(1), 4)])
    assert not divides((12, 8), [(S(0), 2), (S(0), 4)])
    assert divides((12,), [(S(0, (8, 4)), 4)])
    assert not divides((12,), [(S(0, (9, 3)), 2)])
    assert not divides((12,), [(S(0, (8, 4)), 2), (S(0), 2)])
    assert fits((12, 8), Layout.of(tp=S(0), sp=P), {"tp": 4, "sp": 3})


def test_a_dim_behind_another_that_merges_with_it_is_split_block_by_block() -> None:
    """Of q|k|v fused as (3, heads, width): splitting the heads is splitting every third of the merged dim."""
    for before, after in (((8, 3 * 4 * 6), (8, 3, 4, 6)), ((8, 3, 4, 6), (8, 3 * 4 * 6))):
        b = Builder()
        x = b.input("x", *before, dtype="float32")
        graph = b.build(b.op("view", "view", [x], after, L.reshape(before, after)))
        merged, apart = Split(1, (24, 24, 24)), Split(2)
        pair = ((merged,), (apart,)) if len(before) < len(after) else ((apart,), (merged,))
        assert Signature(*pair) in signatures(graph, graph.ops[0])
