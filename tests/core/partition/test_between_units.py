"""The stages of ops between units, against every choice there is."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.partition.between_units import ProgramOp, open_stages


def sent_bytes(ops: list[ProgramOp], stages: list[int], sizes: dict[int, int]) -> int:
    """Bytes over all borders between stages; a value crosses each once."""
    total = 0
    for index, op in enumerate(ops):
        for value in op.makes:
            last = max((stages[i] for i in range(index + 1, len(ops)) if value in ops[i].reads), default=0)
            total += sizes[value] * max(0, last - stages[index])
    return total


def is_possible(ops: list[ProgramOp], stages: tuple[int, ...]) -> bool:
    maker = {v: i for i, op in enumerate(ops) for v in op.makes}
    return all(
        (op.stage is None or op.stage == stages[i]) and all(stages[maker[v]] <= stages[i] for v in op.reads)
        for i, op in enumerate(ops)
    )


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[ProgramOp], int, dict[int, int]]:
    """Up to eight ops; those of units are on stages that follow their order."""
    stages = draw(st.integers(2, 3))
    count = draw(st.integers(2, 8))
    ops, sizes, now = [], {}, 0
    for index in range(count):
        reads = draw(st.lists(st.integers(0, index - 1), max_size=3, unique=True)) if index else []
        own = None
        if draw(st.booleans()):
            now = own = draw(st.integers(now, stages - 1))
        ops.append(ProgramOp(reads, [index], own))
        sizes[index] = draw(st.integers(0, 5))
    return ops, stages, sizes


@settings(max_examples=300)
@given(programs())
def test_no_other_stages_send_fewer_bytes(given: tuple[list[ProgramOp], int, dict[int, int]]) -> None:
    ops, stages, sizes = given
    found = open_stages(ops, stages, sizes.__getitem__)
    choices = [c for c in product(range(stages), repeat=len(ops)) if is_possible(ops, c)]
    assert tuple(found) in choices
    least = min(sent_bytes(ops, list(c), sizes) for c in choices)
    assert sent_bytes(ops, found, sizes) == least
    best = [c for c in choices if sent_bytes(ops, list(c), sizes) == least]
    assert tuple(found) == tuple(max(c[i] for c in best) for i in range(len(ops))), "as late as they can"


def test_ops_that_shrink_a_value_run_before_the_border_and_those_that_widen_it_behind() -> None:
    first, last = ProgramOp([], [0], 0), ProgramOp([2], [3], 1)
    between = [ProgramOp([0], [1]), ProgramOp([1], [2])]
    assert open_stages([first, *between, last], 2, {0: 8, 1: 8, 2: 2}.__getitem__) == [0, 0, 0, 1]
    assert open_stages([first, *between, last], 2, {0: 2, 1: 8, 2: 8}.__getitem__) == [0, 1, 1, 1]
    assert open_stages([first, *between, last], 2, {0: 8, 1: 2, 2: 8}.__getitem__) == [0, 0, 1, 1]


def test_a_metric_of_an_early_stage_is_made_there() -> None:
    ops = [ProgramOp([], [0, 4], 0), ProgramOp([4], [1], 1), ProgramOp([0], [2]), ProgramOp([1, 2], [3])]
    sizes = {0: 100, 1: 100, 2: 1, 3: 1, 4: 100}
    assert open_stages(ops, 2, sizes.__getitem__) == [0, 1, 0, 1]
    ops[1] = ProgramOp([0], [1], 1)  # which takes the same value, so that it is sent all the same
    assert open_stages(ops, 2, sizes.__getitem__) == [0, 1, 1, 1]


def test_ops_that_use_parameters_run_where_those_are() -> None:
    tied = frozenset({0, 2})
    ops = [ProgramOp([], [0], None, tied), ProgramOp([0], [1], 1), ProgramOp([1], [2], None, tied)]
    assert open_stages(ops, 3, lambda value: 1) == [0, 1, 2]
    lone = [ProgramOp([], [0], 1), ProgramOp([0], [1], None, frozenset({0})), ProgramOp([1], [2], 2)]
    assert open_stages(lone, 3, lambda value: 1) == [1, 1, 2]


def test_what_is_placed_before_what_it_reads_comes_later() -> None:
    assert open_stages([ProgramOp([], [0], 1), ProgramOp([0], [1], 0)], 2, lambda value: 1) == [1, 1]
