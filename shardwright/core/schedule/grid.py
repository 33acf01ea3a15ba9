"""A schedule as a grid of text: one row per step, one column per rank."""

from itertools import zip_longest

from shardwright.core.schedule.family import Table

MARK = "<-- here"
_CONTEXT_ROWS = 12


def render(table: Table, marked: tuple[int, int] | None = None) -> str:
    """The table as a grid. `marked` is a (rank, position) to point out: its cell is put in brackets, its row marked,
    and rows far from it are left out.
    """
    cells = [[action.text for action in order] for order in table]
    if marked is not None:
        rank, position = marked
        cells[rank] += ["(end)"] * (position + 1 - len(cells[rank]))
        cells[rank][position] = f"[{cells[rank][position]}]"
    heads = [f"rank {rank}" for rank in range(len(table))]
    rows = list(zip_longest(*cells, fillvalue=""))
    first, last = 0, len(rows)
    if marked is not None:
        first, last = max(0, marked[1] - _CONTEXT_ROWS), min(len(rows), marked[1] + _CONTEXT_ROWS + 1)
    shown = rows[first:last]
    label = max(len(str(last)), len("step"))
    widths = [max([len(head), *(len(row[i]) for row in shown)]) for i, head in enumerate(heads)]
    lines = [f"{'step':>{label}}  " + "  ".join(f"{head:<{w}}" for head, w in zip(heads, widths, strict=True)).rstrip()]
    if first:
        lines.append(f"{'':>{label}}  ... {first} steps before")
    for step, row in enumerate(shown, start=first):
        line = f"{step:>{label}}  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True))
        note = f"  {MARK}" if marked is not None and step == marked[1] else ""
        lines.append(line.rstrip() + note)
    if last < len(rows):
        lines.append(f"{'':>{label}}  ... {len(rows) - last} steps after")
    return "\n".join(lines)
