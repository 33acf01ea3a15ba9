"""Tables of whole numbers in which repeated rows are written once, as plan files hold a model's graph.

A model repeats its blocks, so the rows of its ops and tensors repeat too: from one block to the next each number grows
by a step of its own, often 0. A run holds the rows of one block, the steps, and how often the block occurs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import sub

from shardwright.core.errors import PlanError
from shardwright.core.values.fields import Amount, Count

MOST_ROWS = 500_000
"""The most rows of a table that is read. The graphs of models with a trillion parameters have fewer than 100,000; a
number beyond this asks for more memory than a plan may take."""
LONGEST_BLOCK = 4096
"""The most rows of a block that is searched for. A transformer block has about 60."""
TRIED_LENGTHS = 24
"""The number of lengths of a block that are tried at each row, shortest first: so many rows of the same form in one
block are rare, and a repetition that is missed only makes the file longer."""

Row = tuple[Amount, ...]
"""The number of a form, and the numbers that this form leaves open."""


@dataclass(frozen=True, slots=True)
class Run:
    """Rows that occur ``times`` times in a row; ``steps`` says by how much each number after the form grows from one
    time to the next, and is empty where the rows occur once."""

    times: Count
    rows: tuple[Row, ...]
    steps: tuple[tuple[int, ...], ...] = ()


def folded(rows: Sequence[Row]) -> tuple[Run, ...]:
    """The runs of a table's rows. `unfolded` gives the same rows back."""
    places: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        places.setdefault(row[0], []).append(index)
    order = {index: number for found in places.values() for number, index in enumerate(found)}
    forms = [(row[0], len(row)) for row in rows]
    runs: list[Run] = []
    single: list[Row] = []
    start = 0
    while start < len(rows):
        later = places[rows[start][0]][order[start] + 1 :][:TRIED_LENGTHS]
        best = (0, 0, 0)  # rows saved, length, times
        for length in (index - start for index in later if index - start <= LONGEST_BLOCK):
            times = _times(rows, forms, start, length)
            best = max(best, (length * (times - 2), -length, times))
        saved, length, times = best[0], -best[1], best[2]
        if saved <= 0:
            single.append(rows[start])
            start += 1
            continue
        if single:
            runs.append(Run(1, tuple(single)))
            single = []
        first, second = rows[start : start + length], rows[start + length : start + 2 * length]
        runs.append(Run(times, tuple(first), tuple(_steps(a, b) for a, b in zip(first, second, strict=True))))
        start += length * times
    if single:
        runs.append(Run(1, tuple(single)))
    return tuple(runs)


def unfolded(runs: Sequence[Run], name: str) -> list[Row]:
    """The rows of a table. Raises PlanError, with the table's name, for steps that are none of the rows', numbers that
    fall below 0, and more rows than `MOST_ROWS`."""
    if (count := sum(run.times * len(run.rows) for run in runs)) > MOST_ROWS:
        raise PlanError(f"{name}: {count} rows, expected at most {MOST_ROWS}")
    rows: list[Row] = []
    for number, run in enumerate(runs):
        where = f"{name}.{number}"
        if not all(run.rows):
            raise PlanError(f"{where}: a row without numbers; the first is that of its form")
        if not run.steps and run.times > 1:
            raise PlanError(f"{where}: {run.times} times without steps, expected one for each number after the form")
        if run.steps and [len(row) - 1 for row in run.rows] != [len(step) for step in run.steps]:
            raise PlanError(f"{where}: expected a step for each number after the form, in each of its rows")
        rows += run.rows
        for time in range(1, run.times):
            for (form, *start), steps in zip(run.rows, run.steps, strict=True):
                rows.append((form, *(value + time * step for value, step in zip(start, steps, strict=True))))
    if min(chain.from_iterable(rows), default=0) < 0:
        raise PlanError(f"{name}: a number falls below 0")
    return rows


def _times(rows: Sequence[Row], forms: Sequence[tuple[int, int]], start: int, length: int) -> int:
    """The number of times that the ``length`` rows from ``start`` on occur, each number growing by one step. ``forms``:
    the form and the length of every row."""
    block = forms[start : start + length]
    if forms[start + length : start + 2 * length] != block:
        return 1
    steps = list(map(_steps, rows[start : start + length], rows[start + length : start + 2 * length]))
    times = 2
    while forms[(at := start + times * length) : at + length] == block:
        for before, after, step in zip(rows[at - length : at], rows[at : at + length], steps, strict=True):
            if _steps(before, after) != step:
                return times
        times += 1
    return times


def _steps(a: Row, b: Row) -> tuple[int, ...]:
    return tuple(map(sub, b[1:], a[1:]))
