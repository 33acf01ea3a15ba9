"""The messages between pipeline ranks that take memory, action by action.

What they are and how long they stay says `messages_under_way`, which counts the most of them alone, and quicker.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardwright.core.schedule.action_table import ActionTable
from shardwright.core.schedule.actions import Action, B, F, I, W
from shardwright.core.schedule.named_schedule import named_schedule

PASSES = frozenset({F, B, I, W})

Key = tuple[bool, int, int]
"""Whether it is a gradient, the stage that makes it, the microbatch."""


@dataclass(frozen=True, slots=True)
class MessageCounts:
    """The messages of one rank while each of its actions runs."""

    counts: NDArray[np.int64]
    """[part of an action, boundary between stages]: the messages that cross the boundary before each stage."""
    beginning: NDArray[np.int64]
    """The same when a part begins: its own message is there, and none that it says were taken are gone."""
    firsts: NDArray[np.int64]
    """The first part of every action."""

    def sizes(self, crossing_bytes: Sequence[int]) -> list[int]:
        """The bytes of the messages while each action runs, by the bytes of one that crosses the boundary before each
        stage."""
        return self._fullest(self.counts, crossing_bytes)

    def beginning_sizes(self, crossing_bytes: Sequence[int]) -> list[int]:
        """The bytes of the messages when each action begins, as in `sizes`."""
        return self._fullest(self.beginning, crossing_bytes)

    def _fullest(self, counts: NDArray[np.int64], crossing_bytes: Sequence[int]) -> list[int]:
        parts = counts @ np.array(crossing_bytes, dtype=np.int64)
        found: list[int] = np.maximum.reduceat(parts, self.firsts).tolist() if len(self.firsts) else []
        return found


def messages_by_action(table: ActionTable) -> tuple[MessageCounts, ...]:
    """The messages of every rank, action by action, each between the stages that it is of."""
    found = []
    for order, moments in zip(table.table, _in_memory(table), strict=True):
        rows: tuple[list[list[int]], list[list[int]]] = [], []
        firsts: list[int] = []
        for action in order:
            firsts.append(len(rows[0]))
            passes = sum(part.kind in PASSES for part in action.flat)
            for _ in range(max(1, passes)):
                for of_moment, there in zip(rows, next(moments) if passes else ((), ()), strict=True):
                    row = [0] * table.stages
                    for is_gradient, maker, _ in there:
                        row[maker + (not is_gradient)] += 1
                    of_moment.append(row)
        shape = len(rows[0]), table.stages
        running, beginning = (np.array(of_moment, dtype=np.int64).reshape(shape) for of_moment in rows)
        found.append(MessageCounts(running, beginning, np.array(firsts, dtype=np.int64)))
    return tuple(found)


@lru_cache(maxsize=256)
def usual_messages_by_action(
    name: str, ranks: int, microbatches: int, virtual_stages: int
) -> tuple[MessageCounts, ...]:
    """The messages of every rank under a named schedule, action by action."""
    return messages_by_action(named_schedule(name, ranks, microbatches, virtual_stages))


def _in_memory(table: ActionTable) -> tuple[Iterator[tuple[list[Key], list[Key]]], ...]:
    """The messages in memory while each pass of every rank runs, and when it begins, pass by pass."""
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

    def moments(run: list[Action]) -> Iterator[tuple[list[Key], list[Key]]]:
        sent, given_back = set[Key](), set[Key]()
        for here, ahead in zip(run, [*run[1:], None], strict=True):
            early = None if ahead is None else needs(ahead)
            came = needs(here)
            posted = [message for message in (came, early) if message is not None]
            beginning = [*sent, *given_back, *posted]
            if came is not None:
                sent.difference_update(taken_with[came])
                given_back.difference_update(taken_with[came])
            yield [*sent, *given_back, *((early,) if early is not None else ())], beginning
            if (made := makes(here)) is not None:
                (given_back if made[0] else sent).add(made)

    return tuple(map(moments, runs))
