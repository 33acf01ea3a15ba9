"""A picture of the ranks that hold each part of an array, drawn with characters."""

import itertools
from collections.abc import Sequence

from shardwright.core.layout.mesh import Mesh
from shardwright.core.layout.placements import Layout, Split

MOST_CELLS = 16
"""The most parts of one dim that are drawn; a dim with more is drawn as its first and last ones."""


def picture(shape: Sequence[int], layout: Layout, mesh: Mesh, *, pp: int = 0) -> str:
    """An array of ``shape`` as the ranks of one pipeline coordinate hold it, with a box for every part and its ranks.

    Where two dims are split, the later lies across and the other down; a dim of several blocks shows the parts of every
    block. The sizes of the parts stand beside and below. Raises LayoutError where the parts are not equal.
    """
    layout.check(tuple(shape), mesh)
    cut = sorted({place.dim for _, place in layout.placements if isinstance(place, Split)})
    last = len(shape) - 1
    across = cut[-1] if len(cut) > 1 else last
    down = max((dim for dim in cut if dim < across), default=across - 1)
    rows, columns = _parts(down, shape, layout, mesh), _parts(across, shape, layout, mesh)
    others = [rank for rank in range(mesh.size) if mesh.coordinates(rank).get("pp", 0) == pp]
    hidden = [dim for dim in cut if dim not in (down, across)]
    table = [[_ranks(others, mesh, {**row[1], **column[1]}) for column in columns] for row in rows]
    width = max(len(text) for line in table for text in line) + 2
    width = max(width, *(len(str(size)) + 2 for size, _ in columns))
    border = "┼".join("─" * width for _ in columns)
    lines = ["┌" + border.replace("┼", "┬") + "┐"]
    for which, (line, (size, _)) in enumerate(zip(table, rows, strict=True)):
        lines.append("│" + "│".join(text.center(width) for text in line) + f"│ {size}")
        lines.append("├" + border + "┤" if which < len(rows) - 1 else "└" + border.replace("┼", "┴") + "┘")
    lines.append(" " + " ".join(str(size).center(width) for size, _ in columns))
    if hidden:
        lines.append(f" dims {hidden} are split too: a box holds one part of them for each of its ranks")
    return "\n".join(lines)


Part = tuple[object, dict[str, int]]
"""(entries, coordinates of the ranks that hold the part)."""


def _parts(dim: int, shape: Sequence[int], layout: Layout, mesh: Mesh) -> list[Part]:
    """The parts of a dim in order; one of no size for a dim that the array does not have."""
    if dim < 0:
        return [("", {})]
    axes = [(axis, place) for axis, place in layout.placements if isinstance(place, Split) and place.dim == dim]
    blocks = next((place.blocks for _, place in axes if place.blocks), ()) or (shape[dim],)
    ways = 1
    for axis, _ in axes:
        ways *= mesh.axis_size(axis)
    coordinates = [
        dict(zip([axis for axis, _ in axes], found, strict=True))
        for found in itertools.product(*(range(mesh.axis_size(axis)) for axis, _ in axes))
    ]
    found: list[Part] = [(block // ways, held) for block in blocks for held in coordinates]
    if len(found) <= MOST_CELLS:
        return found
    return [*found[: MOST_CELLS // 2], ("…", {"": -1}), *found[-MOST_CELLS // 2 :]]


def _ranks(ranks: Sequence[int], mesh: Mesh, held: dict[str, int]) -> str:
    if "" in held:
        return "…"
    found = [r for r in ranks if all(mesh.coordinates(r)[axis] == at for axis, at in held.items())]
    named = ",".join(map(str, found[:4])) + (f",… {found[-1]}" if len(found) > 4 else "")
    return f"rank {named}" if len(found) == 1 else f"ranks {named}"
