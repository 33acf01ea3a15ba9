"""The messages between pipeline ranks that take memory beside what passes keep.

A value or gradient that is sent lives until the sender knows that it was taken, and a sender never waits to know. What
it knows comes with the messages that it takes: a rank that makes a message has taken before it all that its own actions
before it needed. So a rank that is given much and gives little back, as the last one of a pipeline whose first one
runs all forwards first, finds its gradients piling up. Receives are posted one action ahead.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.core.schedule.action_table import ActionTable
from shardwright.core.schedule.actions import Action, B, F, I, W
from shardwright.core.schedule.named_schedule import named_schedule

PASSES = frozenset({F, B, I, W})

Key = tuple[bool, int, int]
"""Whether it is a gradient, the stage that makes it, the microbatch."""


class UnderWay(NamedTuple):
    """The most messages of one rank that take memory while an action runs and as many activations are live as ever: a
    message is no larger than what a microbatch keeps, so that other moments have less."""

    before: int
    """Values that came early from stages before, and gradients sent there that may not have been taken."""
    behind: int
    """Values sent to stages behind that may not have been taken, and gradients that came early from there."""


def messages_under_way(table: ActionTable) -> tuple[UnderWay, ...]:
    """The messages of every rank."""

    def fullest(moments: list[_Moment]) -> UnderWay:
        most = max((moment.live for moment in moments), default=0)
        at_most = [moment.messages for moment in moments if moment.live == most]
        return UnderWay(*map(max, zip(*at_most, strict=True))) if at_most else UnderWay(0, 0)

    return tuple(fullest([*moments]) for moments in _moments(table))


@dataclass(frozen=True, slots=True)
class MessageCounts:
    """The messages of one rank while each of its actions runs."""

    counts: NDArray[np.int64]
    """[part of an action, boundary between stages]: the messages that cross the boundary before each stage."""
    firsts: NDArray[np.int64]
    """The first part of every action."""

    def sizes(self, crossing_bytes: Sequence[int]) -> list[int]:
        """The bytes of the messages while each action runs, by the bytes of one that crosses the boundary before each
        stage."""
        parts = self.counts @ np.array(crossing_bytes, dtype=np.int64)
        found: list[int] = np.maximum.reduceat(parts, self.firsts).tolist() if len(self.firsts) else []
        return found


def messages_by_action(table: ActionTable) -> tuple[MessageCounts, ...]:
    """The messages of every rank, action by action, each between the stages that it is of."""
    found = []
    for order, moments in zip(table.table, _moments(table), strict=True):
        rows: list[list[int]] = []
        firsts: list[int] = []
        for action in order:
            firsts.append(len(rows))
            passes = sum(part.kind in PASSES for part in action.flat)
            for _ in range(max(1, passes)):
                row = [0] * table.stages
                for is_gradient, maker, _ in next(moments).keys if passes else ():
                    row[maker + (not is_gradient)] += 1
                rows.append(row)
        shape = len(rows), table.stages
        found.append(MessageCounts(np.array(rows, dtype=np.int64).reshape(shape), np.array(firsts, dtype=np.int64)))
    return tuple(found)


class _Moment(NamedTuple):
    """One pass of a rank while it runs."""

    live: int
    """The live activations."""
    messages: UnderWay
    keys: tuple[Key, ...]
    """The messages themselves."""


def _moments(table: ActionTable) -> tuple[Iterator[_Moment], ...]:
    """The passes of every rank, in order."""
    runs = [[part for action in order for part in action.flat if part.kind in PASSES] for order in table.table]
    last = table.stages - 1

    def between_ranks(stage: int, other: int) -> bool:
        return 0 <= other <= last and table.stage_to_rank(stage) != table.stage_to_rank(other)

    def needs(action: Action) -> Key | None:
        if action.kind is W:
            return None
        is_gradient = action.kind is not F
        source = action.stage + (1 if is_gradient else -1)
        return (is_gradient, source, table.pass_of(action)) if between_ranks(action.stage, source) else None

    def makes(action: Action) -> Key | None:
        if action.kind is W:
            return None
        is_gradient = action.kind is not F
        target = action.stage - (1 if is_gradient else -1)
        return (is_gradient, action.stage, table.pass_of(action)) if between_ranks(action.stage, target) else None

    taken_with: dict[Key, list[Key]] = {}
    """Message → those that its maker had taken since the last one that it made for the same rank."""
    for run in runs:
        taken: defaultdict[int, list[Key]] = defaultdict(list)
        for action in run:
            if (needed := needs(action)) is not None:
                taken[table.stage_to_rank(needed[1])].append(needed)
            if (made := makes(action)) is not None:
                target = table.stage_to_rank(action.stage - (1 if made[0] else -1))
                taken_with[made] = taken.pop(target, [])

    def moments(run: list[Action]) -> Iterator[_Moment]:
        values, gradients, live = set[Key](), set[Key](), 0
        for here, ahead in zip(run, [*run[1:], None], strict=True):
            if (came := needs(here)) is not None:
                values.difference_update(taken_with[came])
                gradients.difference_update(taken_with[came])
            early = None if ahead is None else needs(ahead)
            live += here.kind is F
            under_way = UnderWay(
                len(gradients) + (early is not None and not early[0]), len(values) + (early is not None and early[0])
            )
            yield _Moment(live, under_way, (*values, *gradients, *((early,) if early is not None else ())))
            live -= here.kind in (B, W)
            if (made := makes(here)) is not None:
                (gradients if made[0] else values).add(made)

    return tuple(map(moments, runs))


@lru_cache(maxsize=256)
def usual_messages_by_action(
    name: str, ranks: int, microbatches: int, virtual_stages: int
) -> tuple[MessageCounts, ...]:
    """The messages of every rank under a named schedule, action by action."""
    return messages_by_action(named_schedule(name, ranks, microbatches, virtual_stages))


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
