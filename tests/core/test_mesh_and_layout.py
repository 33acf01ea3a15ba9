import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright import Layout, Mesh, Partial, Replicate, Split
from shardwright.core.errors import ClusterError, LayoutError

AXES = ("pp", "dp", "tp")


@given(st.tuples(*[st.integers(1, 4)] * 3), st.data())
def test_coordinates_and_ranks_are_inverse(sizes: tuple[int, ...], data: st.DataObject) -> None:
    mesh = Mesh(AXES, sizes)
    rank = data.draw(st.integers(0, mesh.size - 1))
    assert mesh.rank(mesh.coordinates(rank)) == rank


@given(st.tuples(*[st.integers(1, 4)] * 3), st.sampled_from([("pp",), ("tp",), ("pp", "tp"), ("dp", "tp"), AXES]))
def test_groups_hold_every_rank_once(sizes: tuple[int, ...], axes: tuple[str, ...]) -> None:
    mesh = Mesh(AXES, sizes)
    assert sorted(rank for group in mesh.groups(*axes) for rank in group) == list(range(mesh.size))


def test_the_last_axis_has_neighbouring_ranks() -> None:
    mesh = Mesh.of(pp=2, dp=2, tp=2)
    assert mesh.coordinates(5) == {"pp": 1, "dp": 0, "tp": 1}
    assert mesh.group(5, "tp") == (4, 5)
    assert mesh.group(5, "pp") == (1, 5)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Mesh(("pp", "pp"), (1, 2)), "different names"),
        (lambda: Mesh(("pp",), (0,)), "at least 1"),
        (lambda: Mesh(("pp",), (1, 2)), "one size per axis"),
        (lambda: Mesh.of(pp=2).axis_size("dpp"), "no axis 'dpp'"),
        (lambda: Mesh.of(pp=2).coordinates(2), "not on a mesh of 2"),
        (lambda: Mesh.of(pp=2).rank({"pp": 2}), "outside 0 … 1"),
    ],
)
def test_a_mesh_says_what_is_wrong(call, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        call()


def test_layouts_are_equal_whatever_the_order_and_replicated_axes() -> None:
    assert Layout.of(tp=Split(0), dp=Replicate()) == Layout.of(tp=Split(0))
    assert Layout.of({"dp": Split(1), "tp": Split(0)}) == Layout.of({"tp": Split(0), "dp": Split(1)})
    assert Layout.of(tp=Partial()).on("tp") == Partial("sum")
    assert Layout().is_replicated


def test_local_shape_and_pieces() -> None:
    mesh = Mesh.of(dp=2, tp=3)
    layout = Layout.of(dp=Split(0), tp=Split(1))
    assert layout.local_shape((4, 9), mesh) == (2, 3)
    assert layout.pieces(mesh) == 6
    assert Layout.of(dp=Split(0), tp=Split(0)).local_shape((12,), mesh) == (2,)
    assert Layout.of(tp=Split(1, (6, 3))).local_shape((5, 9), mesh) == (5, 3)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (Layout.of(tp=Split(2)), "dim that shape"),
        (Layout.of(tp=Split(0)), "does not divide"),
        (Layout.of(tp=Split(1, (4, 4))), "add up to 8"),
        (Layout.of(tp=Split(1, (4, 5))), "does not divide"),
        (Layout.of(dp=Split(1), tp=Split(1)), "does not divide"),
    ],
)
def test_a_layout_that_does_not_fit_says_why(layout: Layout, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        layout.check((4, 9), Mesh.of(dp=2, tp=3))


def test_placements_refuse_nonsense() -> None:
    with pytest.raises(LayoutError, match="from 0"):
        Split(-1)
    with pytest.raises(LayoutError, match="two or more"):
        Split(0, (4,))
    with pytest.raises(LayoutError, match="reduces by one of"):
        Partial("product")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="one placement"):
        Layout((("tp", Split(0)), ("tp", Split(1))))
