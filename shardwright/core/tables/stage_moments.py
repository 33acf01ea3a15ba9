"""All that a rank ever holds at once while a schedule gathers, reduces and frees: its moments, found once and then
counted for stages of any sizes.

Each moment is the number of times that it has every size of every stage. A long schedule has few of them, since each
round of the pipeline is like the one before, so that its peak for stages of other sizes is the largest of some sums.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.core.schedule.actions import Action, B, F, I, Kind, W
from shardwright.core.schedule.family import Order


class StageSizes(NamedTuple):
    """The bytes of one stage."""

    activations: int
    freed_by_input_grad: int
    whole: int
    """All its parameters, where the schedule gathers them."""
    sums: int
    """All its gradients, where they add up whole."""
    shard: int
    """This rank's shard of the sums over replicas."""
    under_way: int
    """One bucket of gradients whose sum is under way, with what comes in."""
    passing: int
    """What a forward holds beside its activations."""
    input_grad: int
    """What an input gradient does."""
    weighing: int
    """What a weight gradient by itself holds beside."""
    tail: int
    """What a backward holds beside until its first bucket has left, where it reduces them."""
    first_backward: int
    """What a backward holds beside, or the rest of it where it reduces gradients, with the gradients that it is the
    first to make."""
    backward: int
    """What a later one does."""


_NUMBER = {name: number for number, name in enumerate(StageSizes._fields)}

_Moment = tuple[int, ...]
"""The number of times that a moment has each size of each stage, name by name, and behind them, for each stage and each
whose bucket may be under way (the last: none), what a backward holds beside whose first bucket leaves when that bucket
has arrived."""


class StageMoments:
    """The moments of every rank under one schedule."""

    def __init__(self, table: Sequence[Sequence[Action]], more: Callable[[Order], Order] | None = None) -> None:
        """The moments of a table of actions; ``more`` inserts what a rank does beside them, rank by rank, when it is
        first asked for."""
        self.first_backwards = tuple(
            tuple(dict.fromkeys(part.stage for action in order for part in action.flat if part.kind in (B, W)))
            for order in table
        )
        """The stages of every rank in the order of their first backward."""
        self._table, self._more = table, more
        self._known: dict[object, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def peak(self, rank: int, stages: Mapping[int, StageSizes]) -> int:
        """The most bytes that a rank holds at once whose stages have these sizes."""
        adds_up = frozenset(stage for stage, sizes in stages.items() if sizes.sums)
        if (rank, adds_up) not in self._known:
            order = tuple(self._table[rank])
            order = order if self._more is None else self._more(order)
            counts = np.array([*_moments(order, list(stages), adds_up)], dtype=np.int64)
            used = np.flatnonzero(counts.any(axis=0))
            self._known[rank, adds_up] = used, counts[:, used]
        used, counts = self._known[rank, adds_up]
        return int((counts @ _sizes(stages)[used]).max(initial=0))


def _sizes(stages: Mapping[int, StageSizes]) -> NDArray[np.int64]:
    """The bytes of all that a moment may have, in its order."""
    sizes = np.array([*stages.values()], dtype=np.int64)
    under_way = np.append(sizes[:, _NUMBER["under_way"]], 0)
    ending = np.maximum(sizes[:, _NUMBER["tail"], None], sizes[:, _NUMBER["backward"], None] - under_way)
    return np.concatenate([sizes.T.ravel(), ending.ravel()])


def _moments(order: Sequence[Action], stages: Sequence[int], adds_up: frozenset[int]) -> set[_Moment]:
    """The moments of one rank: while each action runs, and at the end of each of its backwards.

    ``stages``: those of the rank; ``adds_up``: those of them whose gradients add up whole.
    """
    count = len(stages)
    place = {stage: number for number, stage in enumerate(stages)}
    found: set[_Moment] = set()
    now = [0] * (len(_NUMBER) * count + count * (count + 1))
    """Live activations, gathered stages, whole sums and shards of sums."""
    sums, shards, sent = set[int](), set[int](), None

    def size(stage: int, name: str) -> int:
        return _NUMBER[name] * count + place[stage]

    def ending(stage: int) -> int:
        other = count if sent is None else place[sent]
        return len(_NUMBER) * count + place[stage] * (count + 1) + other

    def moment(beside: Sequence[int]) -> None:
        for each in beside:
            now[each] += 1
        found.add(tuple(now))
        for each in beside:
            now[each] -= 1

    def begin(held: set[int], stage: int, name: str) -> None:
        if stage not in held:
            held.add(stage)
            now[size(stage, name)] += name != "sums" or stage in adds_up

    for action in order:
        if action.kind in (Kind.UNSHARD, Kind.RESHARD):
            now[size(action.stage, "whole")] += 1 if action.kind is Kind.UNSHARD else -1
        elif action.kind is Kind.REDUCE_GRAD:
            if action.stage in sums:
                sums.remove(action.stage)
                now[size(action.stage, "sums")] -= action.stage in adds_up
            begin(shards, action.stage, "shard")
            sent = action.stage
        beside: list[int] = []
        for part in action.flat:
            at = part.stage
            if part.kind is F:
                now[size(at, "activations")] += 1
                beside.append(size(at, "passing"))
            elif part.kind is I:
                beside.append(size(at, "input_grad"))
            elif part.kind is W:
                begin(sums, at, "sums")
                beside.append(size(at, "weighing"))
            elif part.kind is B and at in adds_up:
                beside.append(size(at, "backward" if at in sums else "first_backward"))
            elif part.kind is B:
                # Its first bucket leaves when the one under way has arrived. Each is added to its shard.
                beside.append(ending(at) if at in shards else size(at, "first_backward"))
                begin(shards, at, "shard")
        moment(beside if sent is None else [*beside, size(sent, "under_way")])
        for part in action.flat:
            if part.kind is F and part.stage not in adds_up:
                sent = None  # what a forward ran beside has arrived
            if part.kind is B:
                begin(sums, part.stage, "sums")
                # The last bucket is on its way when all activations are gone.
                own = size(part.stage, "activations")
                now[own] -= 1
                moment([size(part.stage, "under_way")])
                now[own] += 1
        for part in action.flat:
            if part.kind in (B, W):
                now[size(part.stage, "activations")] -= 1
            if part.kind in (I, W):
                now[size(part.stage, "freed_by_input_grad")] += -1 if part.kind is I else 1
    return found
