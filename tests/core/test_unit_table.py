"""What stages hold, counted for all stages at once, against a loop over values and stages."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.cost.unit_seconds import UnitCost
from shardwright.core.cost.value_flow import SharedValue
from shardwright.core.tables.stage_working import working_of
from shardwright.core.tables.unit_table import UnitTable, _sums_of_pairs

UNITS = 6
units = st.integers(0, UNITS - 1)


@given(st.lists(st.tuples(units, units, st.integers(1, 9)).filter(lambda pair: pair[0] < pair[1])))
def test_pairs_count_where_both_are_held(pairs: list[tuple[int, int, int]]) -> None:
    found = _sums_of_pairs(pairs, UNITS)
    for a in range(UNITS):
        for b in range(a + 1, UNITS + 1):
            assert found[a, b] == sum(size for one, other, size in pairs if a <= one and other < b)


@st.composite
def values(draw: st.DrawFn) -> tuple[SharedValue, int]:
    maker = draw(st.integers(-1, UNITS - 2))
    later = st.integers(maker + 1, UNITS - 1)
    keepers, enterers = draw(st.lists(later, max_size=3)), draw(st.lists(later, min_size=1, max_size=3))
    value = SharedValue(0, tuple(sorted(set(keepers))), tuple(sorted(set(enterers))), maker)
    return value, draw(st.integers(1, 9))


@given(st.lists(values(), max_size=4))
def test_a_value_arrives_at_stages_that_it_enters_and_that_do_not_keep_it(given: list[tuple[SharedValue, int]]) -> None:
    table = SimpleNamespace(
        units=range(UNITS),
        shared=[(value, 0) for value, _ in given],
        arrivals=[size for _, size in given],
        holders=lambda value: set(value.keepers),
        offloaded=frozenset(),
        found_bytes=0,
    )
    found = UnitTable._arrived(table)  # type: ignore[arg-type]
    expected = np.zeros_like(found)
    for value, size in given:
        for a in range(value.maker + 1, UNITS):
            for b in range(a + 1, UNITS + 1):
                enters, kept = (any(a <= unit < b for unit in those) for those in (value.enterers, value.keepers))
                expected[a, b] += size * (enters and not kept)
    assert np.array_equal(found, expected)


def test_what_an_offloaded_first_unit_is_given_stays_until_its_gradient_goes_back() -> None:
    value = SharedValue(0, (3,), (1, 3), 0)
    table = SimpleNamespace(
        units=range(UNITS), shared=[(value, 7)], arrivals=[5], holders=lambda value: set(value.keepers),
        offloaded=frozenset({0, 2}), found_bytes=0, boundary_bytes=tuple(range(10, 10 + UNITS)),
    )  # fmt: skip
    found = UnitTable._arrived(table)  # type: ignore[arg-type]
    table.offloaded = frozenset()
    without = UnitTable._arrived(table)  # type: ignore[arg-type]
    expected = np.zeros_like(found)
    expected[2, 3:] = 12 - 5  # of what enters unit 2, a shared value passes by
    assert np.array_equal(found - without, expected)


def test_a_value_that_no_unit_keeps_passes_by_those_up_to_its_reader() -> None:
    unit = UnitCost(
        1.0, 1.0, 1.0, 0.0, 0.0, saved_bytes=100, saved_selective_bytes=0, entering_bytes=10, passing_bytes=0,
        parameter_elements=1,
    )  # fmt: skip
    over = SharedValue(0, (1, 4), (1, 4), 1), 7
    table = UnitTable(
        (unit,) * UNITS, (10,) * UNITS, (0.0,) * UNITS, (), 1, "full", (True,) * UNITS, shared=(over,),
        swaps_beside=False,
    )  # fmt: skip
    away = table.keeping(frozenset(), frozenset(range(UNITS - 1)))
    plain = UnitTable.keeping(replace(table, shared=()), frozenset(), frozenset(range(UNITS - 1)))
    assert (working_of(away).beside_bytes - working_of(plain).beside_bytes).tolist() == [0, 0, 0, 7, 7, 0]
    kept = table.keeping(frozenset({1}), frozenset({2, 3}))
    assert (working_of(kept).beside_bytes == working_of(replace(kept, shared=())).beside_bytes).all()
