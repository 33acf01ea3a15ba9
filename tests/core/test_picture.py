"""The picture of an array's layout: every part once, with the ranks that hold it."""

import shardwright as sw
from shardwright.core.layout.mesh import Mesh
from shardwright.core.layout.picture import picture

MESH = Mesh.placed("PDT", pp=2, dp=2, tp=2)
"""Ranks 0 to 3 are the first stage: replica 0 is (0, 1), replica 1 is (2, 3)."""


def test_an_array_that_is_whole_is_one_box() -> None:
    drawn = picture((8, 4), sw.Layout(), MESH)
    assert drawn.splitlines()[1] == "│ ranks 0,1,2,3 │ 8"
    assert drawn.splitlines()[-1].split() == ["4"]
    assert picture((), sw.Layout(), MESH).count("rank") == 1


def test_rows_lie_down_and_columns_across() -> None:
    rows = picture((8, 4), sw.Layout.of(tp=sw.Split(0)), MESH).splitlines()
    assert [line for line in rows if "rank" in line] == ["│ ranks 0,2 │ 4", "│ ranks 1,3 │ 4"]
    columns = picture((8, 4), sw.Layout.of(tp=sw.Split(1)), MESH).splitlines()
    assert columns[1] == "│ ranks 0,2 │ ranks 1,3 │ 8"
    assert columns[-1].split() == ["2", "2"]
    assert [line[0] for line in rows] == ["┌", "│", "├", "│", "└", " "]
    assert [line[0] for line in columns] == ["┌", "│", "└", " "]


def test_the_other_stage_has_other_ranks() -> None:
    assert "ranks 4,6" in picture((8, 4), sw.Layout.of(tp=sw.Split(1)), MESH, pp=1)


def test_two_axes_make_a_grid() -> None:
    drawn = picture((8, 4), sw.Layout.of(dp=sw.Split(0), tp=sw.Split(1)), MESH).splitlines()
    boxes = [[cell.strip() for cell in line.split("│")[1:-1]] for line in drawn if "rank" in line]
    assert boxes == [["rank 0", "rank 1"], ["rank 2", "rank 3"]]


def test_a_fused_dim_shows_the_parts_of_every_block() -> None:
    drawn = picture((4, 18), sw.Layout.of(tp=sw.Split(1, (6, 6, 6))), MESH).splitlines()
    assert [cell.strip() for cell in drawn[1].split("│")[1:-1]] == ["ranks 0,2", "ranks 1,3"] * 3
    assert drawn[-1].split() == ["3"] * 6


def test_a_vector_lies_across_and_many_parts_are_left_out() -> None:
    assert picture((8,), sw.Layout.of(tp=sw.Split(0)), MESH).splitlines()[1] == "│ ranks 0,2 │ ranks 1,3 │ "
    many = picture((32, 4), sw.Layout.of(tp=sw.Split(0)), Mesh.placed("PDT", pp=1, dp=1, tp=32))
    assert "…" in many
    assert many.count("rank ") == 16
