"""The fewest bytes that a backward pass can start from, against every choice of values."""

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.cost.least_kept import least_kept
from shardwright.core.cost.remade_values import ForwardOp

INPUT = 0


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[ForwardOp], dict[int, int], list[int]]:
    """Ops that read the input, value 0, and values before them; the sizes of values; the values that are wanted."""
    count = draw(st.integers(1, 7))
    ops, sizes = [], {INPUT: 1}
    for value in range(1, count + 1):
        reads = draw(st.lists(st.integers(0, value - 1), min_size=1, max_size=3, unique=True))
        ops.append(ForwardOp(tuple(reads), (value,), draw(st.booleans()), False))
        sizes[value] = draw(st.integers(1, 9))
    return ops, sizes, draw(st.lists(st.integers(0, count), unique=True, max_size=4))


def made_from(ops: list[ForwardOp], there: set[int]) -> set[int]:
    """All that cheap ops make of values that are there."""
    found = {INPUT, *there}
    for op in ops:
        if op.is_cheap and found.issuperset(op.reads):
            found.update(op.makes)
    return found


@settings(max_examples=150, deadline=None)
@given(programs())
def test_no_choice_of_values_has_fewer_bytes(program: tuple[list[ForwardOp], dict[int, int], list[int]]) -> None:
    ops, sizes, wanted = program
    found = least_kept(ops, {INPUT}, wanted, sizes.__getitem__)
    there = {INPUT, *found.kept}
    for index in found.remade:
        assert ops[index].is_cheap
        assert there.issuperset(ops[index].reads)
        there.update(ops[index].makes)
    assert there.issuperset(wanted)
    values = [value for value in sizes if value != INPUT]
    choices = (set(c) for n in range(len(values) + 1) for c in combinations(values, n))
    least = min(sum(map(sizes.get, c)) for c in choices if made_from(ops, c).issuperset(wanted))
    assert sum(map(sizes.get, found.kept)) == least


def test_large_values_are_counted_in_larger_units() -> None:
    """Sizes beyond 32 bits: a small value from which two large ones are made."""
    ops = [ForwardOp((0,), (1,), False, False), ForwardOp((1,), (2,), True, False), ForwardOp((1,), (3,), True, False)]
    found = least_kept(ops, {0}, [2, 3], {1: 10**9, 2: 2**40, 3: 2**40}.__getitem__)
    assert found.kept == (1,)
    assert found.remade == (1, 2)
