"""What neighbouring units hold together, where a framework says what they keep twice: by hand."""

from dataclasses import replace

import pytest

from shardwright.core.cost.unit_seconds import UnitCost
from shardwright.core.cost.value_flow import SharedValue
from shardwright.core.tables.memory import Recompute
from shardwright.core.tables.stage_working import working_of
from shardwright.core.tables.unit_table import UnitTable

UNIT = UnitCost(
    forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0, selective_s=0.5, collective_s=0.0,
    saved_bytes=100, saved_selective_bytes=60, entering_bytes=20, passing_bytes=0, parameter_elements=1,
)  # fmt: skip
# What the first unit makes is kept by it and by the next, which it enters: 10 bytes by its ops, 15 by the framework.
ENTERING = SharedValue(0, keepers=(0, 1), enterers=(1,))
# What the first and the last one read.
MASK = SharedValue(1, keepers=(0, 2), enterers=())
TABLE = UnitTable(
    (UNIT,) * 3, (0, 20, 20), (0.0,) * 3, (), 1, "none", (True,) * 3,
    shared=((ENTERING, 10), (MASK, 4)), twice_bytes=(15, 7, 0),
)  # fmt: skip


@pytest.mark.parametrize(
    ("recompute", "two", "three"),
    [("none", 200 - 15, 300 - 15 - 7 - 4), ("selective", 120 - 10, 180 - 10 - 4), ("full", 40, 60)],
)
def test_what_neighbours_keep_twice_takes_the_place_of_what_they_share_where_both_keep_all(
    recompute: Recompute, two: int, three: int
) -> None:
    table = replace(TABLE, recompute=recompute)
    assert (table.range_kept[0, 2], table.range_kept[0, 3]) == (two, three)


def test_a_unit_that_is_kept_shares_what_enters_the_next_that_is_not() -> None:
    table = replace(TABLE, recompute="full", kept=frozenset({0}))
    assert table.range_kept[0, 2] == 100 + 20 - 10


def test_the_gradient_of_a_table_that_is_looked_up_comes_when_the_passes_are_over() -> None:
    """Where gradients wait for a stage's backward: 4 bytes for each of 5 entries, beside 30 that the unit holds."""
    unit = replace(UNIT, passing_bytes=30, trained_elements=5)
    table = replace(TABLE, units=(unit,) * 3, shared=(), twice_bytes=(), found_bytes=4, looked_up=(5, 0, 0))
    held = [working_of(table).stage_working(*ends) for ends in ((0, 1), (1, 2), (0, 2))]
    assert held == [30, 20 + 30, 20 + 30]


def test_gradients_from_the_next_stage_stay_to_the_end_of_a_backward() -> None:
    """The next stage gives 20 bytes. Of a unit that holds 8 beside what it keeps, and 2 more as they stay, and then
    30 as the unit before it runs, they count beside those; after the last unit nothing is given."""
    small, large = (replace(UNIT, passing_bytes=size, given_bytes=2) for size in (8, 130))
    table = replace(TABLE, units=(large, small, small), shared=(), twice_bytes=(), given_stay=True)
    assert working_of(table).range_working[1, 2] == 8 + 2
    assert working_of(table).range_working[0, 2] == (100 + 130 + 20) - 200
    assert working_of(table).range_working[2, 3] == 8
    assert working_of(table).given_bytes(0, 2).tolist() == [20, 2]
    without = replace(table, given_stay=False)
    assert (working_of(without).range_working[1, 2], working_of(without).range_working[0, 2]) == (8, 30)
    assert working_of(without).given_bytes(0, 2).tolist() == [0, 0]


def test_the_models_buffers_lie_where_they_are_used() -> None:
    """Running statistics of the first unit, a mask of the last two; each replica remembers the statistics."""
    table = replace(TABLE, model_buffers=((16, (0,)), (5, (1, 2)), (7, ())), remembered_bytes=(32, 0, 0))
    assert table.model_buffers_bytes([(0, 1)], replicated=False) == 16
    assert table.model_buffers_bytes([(0, 1)], replicated=True) == 16 + 32
    assert table.model_buffers_bytes([(1, 2), (2, 3)], replicated=True) == 5
