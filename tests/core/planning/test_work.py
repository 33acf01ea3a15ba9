"""What units do, against closed forms."""

import pytest

from shardwright.core.cost.unit_work import WorkCounter, forward_flops
from shardwright.core.model.fold import fold
from shardwright.core.rules import op_rules as L
from tests.core.toy import Builder, decoder

LAYERS, HIDDEN, HEADS, VOCABULARY, SEQUENCE = 3, 32, 4, 64, 16


@pytest.fixture(scope="module")
def graph():
    return decoder(LAYERS, HIDDEN, HEADS, VOCABULARY, SEQUENCE)


def block_flops(batch: int) -> int:
    """QKV, projection, two of the feed-forward: 24·B·S·H²; scores and values: 4·B·S²·H (arXiv 2104.04473, appendix)."""
    return 24 * batch * SEQUENCE * HIDDEN**2 + 4 * batch * SEQUENCE**2 * HIDDEN


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_forward_flops_are_the_closed_form(graph, batch: int) -> None:
    head = 2 * batch * SEQUENCE * HIDDEN * VOCABULARY
    assert forward_flops(graph, batch) == LAYERS * block_flops(batch) + head


def test_backward_flops_are_twice_the_products_and_two_and_a_half_the_attention(graph) -> None:
    folded = fold(graph)
    work = WorkCounter(graph).count(folded.units[1], 2)
    attention = 4 * 2 * SEQUENCE**2 * HIDDEN
    assert work.forward_flops == block_flops(2)
    assert work.backward_flops == 2 * (block_flops(2) - attention) + 2.5 * attention


def test_saved_activations_are_megatrons_with_flash_attention(graph) -> None:
    """Kept per layer, in units of B·S·H entries: two norm inputs, two norm results, q, k, v, attention out, the
    feed-forward's inner values before and after GELU: 2 + 2 + 3 + 1 + 4 + 4 = 16 (arXiv 2205.05198, section 4.1,
    without dropout and with the scores not kept). In fp32 besides: mean and scale of two norms, and the attention's
    sums."""
    folded = fold(graph)
    work = WorkCounter(graph).count(folded.units[2], 2, "bf16")
    rows = 2 * SEQUENCE
    assert work.saved_bytes == 16 * rows * HIDDEN * 2 + 4 * (2 * 2 * rows + HEADS * rows)
    assert work.entering_bytes == 2 * SEQUENCE * HIDDEN * 2


def test_work_grows_linearly_with_the_batch(graph) -> None:
    counter, unit = WorkCounter(graph), fold(graph).units[1]
    one, four = counter.count(unit, 1), counter.count(unit, 4)
    assert four.forward_flops == 4 * one.forward_flops
    assert four.saved_bytes == 4 * one.saved_bytes


def test_a_first_layer_needs_no_gradient_of_its_input() -> None:
    b = Builder()
    x = b.input("x", -1, 4, 8, dtype="float32")
    y = b.linear(x, b.parameter("w", 8, 8), None, 8)
    z = b.linear(y, b.parameter("v", 8, 8), None, 8)
    graph = b.build(z)
    unit = fold(graph).units[0]
    first, second = WorkCounter(graph).count(unit, 2).products
    assert (first.backward_input, first.backward_weight) == (0.0, 1.0)
    assert (second.backward_input, second.backward_weight) == (1.0, 1.0)


@pytest.mark.parametrize("role", ["buffer", "input"])
def test_a_product_with_what_is_not_trained_keeps_that_alone(role) -> None:
    """As the cosines of rotary positions, which are there anyway: what they turn is not read again."""
    b = Builder()
    x = b.elementwise("scale", b.input("x", -1, 4, 8, dtype="float32"), b.parameter("scale", 8))
    fixed = b.tensor((4, 8), role, "cosines")
    y = b.elementwise("aten.mul.Tensor", x, fixed)
    graph = b.build(b.elementwise("aten.mul.Tensor", y, b.parameter("weight", 8)))
    counter = WorkCounter(graph)
    (unit,) = fold(graph).units
    assert counter.count(unit, 2).saved_bytes == 2 * 4 * 8 * 4  # y, for the gradient of the weight


def test_a_square_keeps_what_it_squares() -> None:
    b = Builder()
    x = b.elementwise("scale", b.input("x", -1, 4, 8, dtype="float32"), b.parameter("scale", 8))
    graph = b.build(b.elementwise("aten.mul.Tensor", x, x))
    assert WorkCounter(graph).count(fold(graph).units[0], 2).saved_bytes == 2 * 4 * 8 * 4


def test_a_matrix_times_its_own_transpose_keeps_it() -> None:
    b = Builder()
    x = b.elementwise("scale", b.input("x", -1, 8, dtype="float32"), b.parameter("scale", 8))
    graph = b.build(b.op("contraction", "einsum", [x, x], (-1, 8, 8), L.contraction("bi", "bj", "bij")))
    assert WorkCounter(graph).count(fold(graph).units[0], 2).saved_bytes == 2 * 8 * 4


@pytest.mark.parametrize("dims", [(0, 2), (2,)])
def test_a_replica_remembers_the_statistics_of_what_it_norms_by_the_batch(dims: tuple[int, ...]) -> None:
    """Mean and variance in double precision of each of 6 channels; nothing of a norm within each sample."""
    b = Builder()
    x = b.elementwise("scale", b.input("x", -1, 6, 10, dtype="float32"), b.parameter("scale", 10))
    graph = b.build(b.op("normalization", "norm", [x], (-1, 6, 10), L.over_dims((2, 6, 10), dims, "statistic")))
    (unit,) = fold(graph).units
    assert WorkCounter(graph).batch_statistics_bytes(unit) == (2 * 8 * 6 if 0 in dims else 0)
