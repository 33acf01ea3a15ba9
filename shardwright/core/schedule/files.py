"""Schedules as CSV, as torch's pipeline runtime has them: a row per rank, a cell per action, empty cells ignored."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule.actions import SHARDING, Action, B, F, I, W
from shardwright.core.schedule.checks import require_runnable
from shardwright.core.schedule.schedule import Schedule, require_buildable
from shardwright.core.values.text_files import path_of, read_text, write_text

Cell = tuple[int, int]  # (row, column), both counted from 1, as an editor shows them
MOST_BYTES = 16 << 20
"""The largest size of a CSV file: the largest schedule that is built has less."""


def to_csv(schedule: Schedule) -> str:
    """The table as CSV text. Torch reads compute actions as its format `compute_only`, and a table with sends and
    receives (`insert_transfers`) as `compute_comms`.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for order in schedule.table:
        writer.writerow([action.text for action in order])
    return text.getvalue()


def save_csv(schedule: Schedule, path: str | Path) -> None:
    """Write the table to a file. Raises ScheduleError when it cannot be written."""
    write_text(path_of(path, ScheduleError), to_csv(schedule), ScheduleError)


def load_csv(path: str | Path, name: str = "custom") -> Schedule:
    """Read a schedule from a file; see `from_csv`. Raises ScheduleError for a file that cannot be read."""
    return from_csv(read_text(path_of(path, ScheduleError), ScheduleError, "schedule", MOST_BYTES), name)


def from_csv(text: str, name: str = "custom") -> Schedule:
    """Read a schedule from CSV text. The rank that holds a stage follows from the row of the stage's actions.

    Raises:
        ScheduleError: a cell is unknown, doubled, missing or too early, or the ranks wait for one another for ever;
            says in which row and column, and what was expected, or marks the cell in the grid.
    """
    if not isinstance(text, str):
        raise ScheduleError(f"{text!r} is not the text of a CSV: expected a row of actions for each rank")
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise ScheduleError(f"the text is not CSV: {error}") from error
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    if not rows:
        raise ScheduleError("the CSV is empty: expected a row of actions for each rank, such as 0F0,0F1,0B0,0B1")
    table: list[list[Action]] = []
    places: dict[Action, Cell] = {}
    holder: dict[int, Cell] = {}
    for row, cells in enumerate(rows, start=1):
        table.append([])
        for column, cell in enumerate(cells, start=1):
            if not cell.strip():
                continue
            action = _parse(cell, row, column)
            table[-1].append(action)
            for part in action.flat:
                _place(part, (row, column), places, holder)
    _require_whole(places, holder, len(rows))
    stages, microbatches, slices = _sizes(places)
    placement = tuple(holder[stage][0] - 1 for stage in range(stages))
    require_buildable(stages, microbatches * slices)
    sizes = (("ranks", len(rows)), ("microbatches", microbatches), ("virtual_stages", stages // len(rows)))
    arguments = (*sizes, ("slices", slices)) if slices > 1 else sizes
    orders = tuple(tuple(order) for order in table)
    schedule = Schedule(name, arguments, len(rows), stages, microbatches, placement, orders, slices=slices)
    require_runnable(schedule)
    return schedule


def _parse(cell: str, row: int, column: int) -> Action:
    try:
        return Action.parse(cell)
    except ScheduleError as error:
        raise ScheduleError(f"{_where((row, column))}: {error}") from None


def _place(part: Action, cell: Cell, places: dict[Action, Cell], holder: dict[int, Cell]) -> None:
    """Note the cell of an action, which must stand in the row of its stage's others, and only once unless it gathers or
    frees parameters. Raises ScheduleError otherwise."""
    if part.kind not in SHARDING:
        if part in places:
            raise ScheduleError(f"{_where(cell)} repeats {part}, which is in {_where(places[part])}: expected it once")
        places[part] = cell
    held = holder.setdefault(part.stage, cell)
    if held[0] != cell[0]:
        raise ScheduleError(
            f"{_where(cell)} holds {part}, but stage {part.stage} is in row {held[0]} (rank {held[0] - 1}): "
            "expected all of a stage's actions in one row"
        )


def _sizes(places: dict[Action, Cell]) -> tuple[int, int, int]:
    """The numbers of stages, microbatches and slices of each."""
    forwards = [action for action in places if action.kind is F]
    if not forwards:
        raise ScheduleError("the CSV has no forward (F) in any cell: expected one for every stage and microbatch")
    return (
        max(action.stage for action in places) + 1,
        max(action.microbatch or 0 for action in places) + 1,
        max(action.slice or 0 for action in places) + 1,
    )


def _require_whole(places: dict[Action, Cell], holder: dict[int, Cell], rows: int) -> None:
    """Raise ScheduleError unless every stage, and every action of every stage and microbatch, has its cell."""
    stages, microbatches, slices = _sizes(places)
    for stage in range(stages):
        if stage not in holder:
            raise ScheduleError(f"stage {stage} is in no cell of any row: expected stages 0 to {stages - 1}")
    if stages % rows:
        raise ScheduleError(f"{stages} stages do not divide over {rows} rows (ranks): expected as many in each row")
    kinds = {action.kind for action in places}
    of_slice = any(action.slice is not None for action in places)
    pieces: Sequence[int | None] = range(slices) if of_slice else (None,)
    for forward in (Action(s, F, mb, (), k) for s in range(stages) for mb in range(microbatches) for k in pieces):
        wanted = [F]
        if kinds & {B, I, W} and forward.as_kind(B) not in places:
            either = any(forward.as_kind(kind) in places for kind in (I, W))
            wanted += [I, W] if either or B not in kinds else [B]
        for kind in wanted:
            if forward.as_kind(kind) not in places:
                raise ScheduleError(_missing(forward.as_kind(kind), places, holder[forward.stage][0]))


def _missing(action: Action, places: dict[Action, Cell], row: int) -> str:
    """The text of an error about a missing action: its row, and the columns of the same action for the microbatches
    beside it."""
    beside = []
    for microbatch in ((action.microbatch or 0) - 1, (action.microbatch or 0) + 1):
        neighbour = Action(action.stage, action.kind, microbatch, (), action.slice) if microbatch >= 0 else None
        if neighbour in places:
            beside.append(f"{neighbour} is in column {places[neighbour][1]}")
    near = f" ({', '.join(beside)})" if beside else ""
    return f"row {row} (rank {row - 1}) has no {action}: expected it once{near}"


def _where(cell: Cell) -> str:
    return f"row {cell[0]} (rank {cell[0] - 1}), column {cell[1]}"
