"""What a unit costs, shared out among its ops."""

import pytest

from shardwright.core.cluster.hardware import load_device
from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.model.fold import fold
from shardwright.core.partition.tasks import op_tasks
from tests.core.toy import Builder


def test_a_parameter_counts_once_where_it_is_first_used() -> None:
    """36 entries that two products of one unit use, and 24 that a third one does: of 120 bytes 72 and 48."""
    b = Builder()
    x, twice = b.input("x", -1, 5, 6, dtype="float32"), b.parameter("twice", 6, 6)
    back = b.enter("block")
    first = b.linear(x, twice, None, 6)
    second = b.linear(first, twice, None, 6)
    last = b.linear(second, b.parameter("last", 6, 4), None, 4)
    b.leave(back)
    folded = fold(b.build(last))
    assert len(folded.units) == 1
    found = op_tasks(
        folded, WorkCounter(folded.graph), [(3.0, 6.0, 90.0, 120.0)], load_device("h100"), "fp32", microbatch=2
    )
    assert found.state_bytes == pytest.approx((72.0, 0.0, 48.0))
    assert sum(found.forward_s) == pytest.approx(3.0)
    assert sum(found.backward_s) == pytest.approx(6.0)
    assert sum(found.kept_bytes) == pytest.approx(90.0)
    assert [(a, b) for a, b, _ in found.edges] == [(0, 1), (1, 2)]
