"""Conversions carried out on simulated ranks: values kept, bytes sent as predicted."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.errors import ClusterError, LayoutError
from shardwright.core.layout.conversions import convert, table_bytes, transfer
from shardwright.core.layout.mesh import Mesh
from shardwright.core.layout.placements import Layout, Partial, Placement, Replicate, Split
from tests.comparison import Comparison
from tests.core.simulated_ranks import Meter, assemble, distribute, run, run_transfer

PLACES: tuple[Placement, ...] = (Split(0), Split(1), Replicate(), Partial("sum"))


def value_of(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(len(shape)).integers(-50, 50, shape).astype(float)


def check(shape: tuple[int, ...], mesh: Mesh, before: Layout, after: Layout) -> int:
    """Convert on real values; the bytes sent."""
    value = value_of(shape)
    found = convert(shape, 8, mesh, before, after)
    meter = Meter()
    made = run(found, distribute(value, before, mesh), meter)
    found_value = assemble(shape, made, after, mesh)
    Comparison(f"{before} to {after}: {found.steps}").values(found_value, value, relative=1e-7, absolute=1e-9).require()
    assert meter.entries * 8 == found.moved_bytes, f"{before} to {after}: {found.steps}"
    return found.moved_bytes


@pytest.mark.parametrize("shape", [(5, 7), (6, 12), (2, 3)])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("before", "after"), product(PLACES, PLACES), ids=str)
def test_every_pair_on_one_axis(shape: tuple[int, int], ranks: int, before: Placement, after: Placement) -> None:
    moved = check(shape, Mesh.of(x=ranks), Layout.of(x=before), Layout.of(x=after))
    if all(size % ranks == 0 for size in shape):
        assert moved == table_bytes(before, after, ranks, 8 * shape[0] * shape[1])


@pytest.mark.parametrize("shape", [(5, 7), pytest.param((4, 8), marks=pytest.mark.slow)])
def test_all_256_pairs_on_two_by_two(shape: tuple[int, int]) -> None:
    mesh = Mesh.of(x=2, y=2)
    layouts = [Layout.of(x=a, y=b) for a, b in product(PLACES, PLACES)]
    moved = {(a, b): check(shape, mesh, a, b) for a, b in product(layouts, layouts)}
    assert len(moved) == 256
    assert all(moved[layout, layout] == 0 for layout in layouts)
    for a, b, c in product(layouts, layouts, layouts):  # no detour is cheaper
        assert moved[a, c] <= moved[a, b] + moved[b, c]


@pytest.mark.parametrize("seed", range(30))
def test_layouts_on_three_axes(seed: int) -> None:
    draws = np.random.default_rng(seed)
    mesh = Mesh.of(x=2, y=3, z=2)
    shape = tuple(int(n) for n in draws.integers(1, 9, 3))
    options = (*PLACES, Split(2))
    before, after = (Layout.of({axis: options[draws.integers(len(options))] for axis in mesh.names}) for _ in range(2))
    check(shape, mesh, before, after)


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("other", [Split(0), Replicate(), Partial("mean"), Partial("max")], ids=str)
def test_other_reductions(op: str, other: Placement) -> None:
    mesh = Mesh.of(x=3)
    check((5, 7), mesh, Layout.of(x=Partial(op)), Layout.of(x=other))
    check((5, 7), mesh, Layout.of(x=other), Layout.of(x=Partial(op)))


@pytest.mark.parametrize("other", [Split(1), Split(0), Replicate(), Partial()], ids=str)
def test_blocks(other: Placement) -> None:
    mesh = Mesh.of(x=2, y=2)
    for axis in ("x", "y"):
        check((4, 12), mesh, Layout.of({axis: Split(1, (4, 8))}), Layout.of({axis: other}))
        check((4, 12), mesh, Layout.of({axis: other}), Layout.of({axis: Split(1, (4, 8))}))


def test_padding_is_counted() -> None:
    """Five rows on two ranks are three and two: each sends three."""
    gathered = convert((5, 7), 4, Mesh.of(x=2), Layout.of(x=Split(0)), Layout())
    assert [step.kind for step in gathered.steps] == ["all-gather"]
    assert gathered.moved_bytes == 2 * 3 * 7 * 4


def test_two_axes_reduce_as_one() -> None:
    """Partial on both axes of 2×2: pieces are reduced, then gathered, 2·3·|T| as on one axis of four; not 8·|T|."""
    found = convert((4, 8), 1, Mesh.of(x=2, y=2), Layout.of(x=Partial(), y=Partial()), Layout())
    assert found.moved_bytes == 6 * 32


def test_local_conversions_move_nothing() -> None:
    mesh = Mesh.of(x=4)
    for after in (Split(0), Partial(), Partial("max")):
        assert convert((8, 4), 4, mesh, Layout(), Layout.of(x=after)).moved_bytes == 0
    assert convert((8, 4), 4, mesh, Layout.of(x=Split(1)), Layout.of(x=Partial())).moved_bytes == 0


def test_a_cost_in_seconds_can_prefer_another_path() -> None:
    """With a slow outer axis the path reduces over the fast one first and sends a piece over the slow one."""
    mesh = Mesh.of(slow=2, fast=4)
    before = Layout.of(slow=Partial(), fast=Partial())

    def seconds(kind: str, axes: tuple[str, ...], moved: int) -> float:
        return moved * (100.0 if "slow" in axes else 1.0)

    found = convert((16, 16), 4, mesh, before, Layout(), seconds)
    over_slow = sum(s.moved_bytes for s in found.steps if "slow" in s.axes)
    assert over_slow == 2 * 256 * 4  # once the pieces' size both ways, not the tensor's on every fast rank
    check((16, 16), mesh, before, Layout())


@pytest.mark.parametrize(("before", "after"), product(PLACES, PLACES), ids=str)
@pytest.mark.parametrize("shape", [(6, 12), (5, 7)])
def test_between_disjoint_sets(shape: tuple[int, int], before: Placement, after: Placement) -> None:
    """OneFlow's formula, |T|·(1 + [to replicate](p2 - 1) + [from partial](p1 - 1)), where dims divide."""
    moved = check_transfer(shape, (0, 1), (2, 3, 4), before, after)
    if shape == (6, 12):
        factor = 1 + 2 * isinstance(after, Replicate) + 1 * isinstance(before, Partial)
        assert moved == factor * 6 * 12 * 8


@pytest.mark.parametrize(("before", "after"), product(PLACES, PLACES), ids=str)
def test_between_overlapping_and_equal_sets(before: Placement, after: Placement) -> None:
    apart = check_transfer((6, 12), (0, 1), (2, 3, 4), before, after)
    assert check_transfer((6, 12), (0, 1), (1, 2, 3), before, after) <= apart
    check_transfer((5, 7), (0, 1, 2), (2, 1, 0), before, after)
    same = check_transfer((6, 12), (0, 1, 2), (0, 1, 2), before, after)
    assert same == convert((6, 12), 8, Mesh.of(x=3), Layout.of(x=before), Layout.of(x=after)).moved_bytes


def check_transfer(
    shape: tuple[int, int], ranks: tuple[int, ...], others: tuple[int, ...], before: Placement, after: Placement
) -> int:
    source, target = Mesh.of(x=len(ranks)), Mesh.of(x=len(others))
    value = value_of(shape)
    found = transfer(shape, 8, (source, ranks), (target, others), Layout.of(x=before), Layout.of(x=after))
    meter = Meter()
    made = run_transfer(found, distribute(value, Layout.of(x=before), source), meter)
    Comparison().equal(assemble(shape, made, Layout.of(x=after), target), value).require()
    assert meter.entries * 8 == found.moved_bytes
    return found.moved_bytes


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_conversions_keep_the_value(data: st.DataObject) -> None:
    mesh = Mesh.of(x=data.draw(st.integers(1, 3)), y=data.draw(st.integers(1, 3)))
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    options = [Replicate(), Partial("sum"), Partial("mean"), *(Split(d) for d in range(len(shape)))]
    before, after = (Layout.of({a: data.draw(st.sampled_from(options)) for a in mesh.names}) for _ in range(2))
    check(shape, mesh, before, after)


def test_bad_input_is_named() -> None:
    mesh = Mesh.of(x=2, y=2)
    with pytest.raises(ClusterError, match="no axis 'tp'"):
        convert((4, 4), 4, mesh, Layout.of(tp=Split(0)), Layout())
    with pytest.raises(LayoutError, match="names a dim that shape"):
        convert((4, 4), 4, mesh, Layout.of(x=Split(2)), Layout())
    with pytest.raises(LayoutError, match="add up to 5, not to the 4 entries"):
        convert((4, 4), 4, mesh, Layout.of(x=Split(0, (2, 3))), Layout())
    with pytest.raises(LayoutError, match="different blocks"):
        convert((4, 4), 4, mesh, Layout.of(x=Split(0, (2, 2)), y=Split(0)), Layout())
    with pytest.raises(LayoutError, match="order matters"):
        convert((4, 4), 4, mesh, Layout.of(x=Partial("sum"), y=Partial("max")), Layout())
    with pytest.raises(LayoutError, match="as many different ranks"):
        transfer((4, 4), 4, (mesh, (0, 1)), (mesh, (0, 1, 2, 3)), Layout(), Layout())
