"""The messages between pipeline ranks that take memory beside what passes keep.

A value or gradient that is sent lives until the sender knows that it was taken, and a sender never waits to know. What
it knows comes with the messages that it takes: a rank that makes a message has taken before it all that its own actions
before it needed. So a rank that is given much and gives little back, as the last one of a pipeline whose first one
runs all forwards first, finds its gradients piling up. Receives are posted one action ahead.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from shardwright.core.schedule.action_table import ActionTable
from shardwright.core.schedule.actions import Action, B, F, I, W
from shardwright.core.schedule.named_schedule import named_schedule


class UnderWay(NamedTuple):
    """The most messages of one rank that take memory while an action runs and as many activations are live as ever: a
    message is no larger than what a microbatch keeps, so that other moments have less."""

    before: int
    """Values that came early from stages before, and gradients sent there that may not have been taken."""
    behind: int
    """Values sent to stages behind that may not have been taken, and gradients that came early from there."""


class _Step(NamedTuple):
    """One pass of a rank. Messages are numbered, values first and gradients behind them; -1: none."""

    is_forward: bool
    frees: bool
    """Whether activations of its microbatch are gone behind it."""
    needed: int
    made: int
    source: int
    """The rank that makes what it needs."""
    target: int
    """The rank that needs what it makes."""


def messages_under_way(table: ActionTable) -> tuple[UnderWay, ...]:
    """The messages of every rank."""
    runs = [[*_steps(table, order)] for order in table.table]
    values = table.stages * table.passes
    taken_with: dict[int, tuple[int, int]] = {}
    """Message → how many values and gradients its maker had taken since the last one that it made for the same rank."""
    for run in runs:
        taken: dict[int, tuple[int, int]] = {}
        for step in run:
            if step.needed >= 0:
                before = taken.get(step.source, (0, 0))
                is_gradient = step.needed >= values
                taken[step.source] = before[0] + (not is_gradient), before[1] + is_gradient
            if step.made >= 0:
                taken_with[step.made] = taken.pop(step.target, (0, 0))
    return tuple(_fullest(run, values, taken_with) for run in runs)


def _steps(table: ActionTable, order: Sequence[Action]) -> Iterator[_Step]:
    """The passes of a rank with their messages."""
    rank_of, last, passes, slices = table.placement, table.stages - 1, table.passes, table.slices
    crosses = [False, *(a != b for a, b in pairwise(rank_of)), False]
    """Whether what enters each stage comes from another rank, and behind them, what leaves the last one."""
    gradients = table.stages * passes
    for action in order:
        for part in action.parts or (action,):
            kind, stage = part.kind, part.stage
            at = (part.microbatch or 0) * slices + (part.slice or 0)
            if kind is F:
                needed = (stage - 1) * passes + at if crosses[stage] else -1
                made = stage * passes + at if crosses[stage + 1] else -1
                yield _Step(True, False, needed, made, rank_of[stage - 1], rank_of[min(stage + 1, last)])
            elif kind is B or kind is I:
                needed = gradients + (stage + 1) * passes + at if crosses[stage + 1] else -1
                made = gradients + stage * passes + at if crosses[stage] else -1
                yield _Step(False, kind is B, needed, made, rank_of[min(stage + 1, last)], rank_of[stage - 1])
            elif kind is W:
                yield _Step(False, True, -1, -1, -1, -1)


def _fullest(run: Sequence[_Step], values: int, taken_with: dict[int, tuple[int, int]]) -> UnderWay:
    """The most messages of a rank where as many activations are live as ever. What was taken of its messages it had
    made before, so that their number is enough."""
    most, before, behind = 0, 0, 0
    live, sent, given_back = 0, 0, 0
    for number, step in enumerate(run):
        if step.needed >= 0:
            of_values, of_gradients = taken_with[step.needed]
            sent, given_back = sent - of_values, given_back - of_gradients
        early = run[number + 1].needed if number + 1 < len(run) else -1
        live += step.is_forward
        if live >= most:
            ahead, back = given_back + (0 <= early < values), sent + (early >= values)
            before, behind = (ahead, back) if live > most else (max(before, ahead), max(behind, back))
            most = live
        live -= step.frees
        if step.made >= 0:
            sent, given_back = (sent + 1, given_back) if step.made < values else (sent, given_back + 1)
    return UnderWay(before, behind)


@lru_cache(maxsize=1024)
def usual_messages_under_way(name: str, ranks: int, microbatches: int, virtual_stages: int) -> tuple[UnderWay, ...]:
    """The messages of every rank under a named schedule. They settle, as live activations do: beyond a few rounds of
    the pipeline they are constant or grow evenly, so long schedules are extrapolated from short ones."""
    first, second = 4 * ranks, 5 * ranks
    if microbatches <= second:
        return messages_under_way(named_schedule(name, ranks, microbatches, virtual_stages))
    growth = (microbatches - second) / (second - first)
    early, late = (usual_messages_under_way(name, ranks, count, virtual_stages) for count in (first, second))
    return tuple(
        UnderWay(*(int(b + (b - a) * growth + 0.5) for a, b in zip(of_first, of_second, strict=True)))
        for of_first, of_second in zip(early, late, strict=True)
    )
