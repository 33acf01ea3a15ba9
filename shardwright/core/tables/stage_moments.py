"""All that a rank ever holds at once while a schedule gathers, reduces and frees: its moments, found once and then
counted for stages of any sizes.

Each moment is the number of times that it has every size of every stage. A long schedule has few of them, since each
round of the pipeline is like the one before, so that its peak for stages of other sizes is the largest of some sums.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shardwright.core.schedule.actions import Action, B, F, I, Kind, W


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


class _Size(NamedTuple):
    """One of the sizes of a stage."""

    stage: int
    name: str

    def of(self, stages: Mapping[int, StageSizes]) -> int:
        size: int = getattr(stages[self.stage], self.name)
        return size


class _Ending(NamedTuple):
    """What a backward holds beside whose first bucket leaves when the bucket under way, of stage ``sent``, has
    arrived."""

    stage: int
    sent: int | None

    def of(self, stages: Mapping[int, StageSizes]) -> int:
        own = stages[self.stage]
        return max(own.tail, own.backward - (0 if self.sent is None else stages[self.sent].under_way))


_Moment = frozenset[tuple[_Size | _Ending, int]]
"""The number of times that a moment has each size, for those that it has."""


class StageMoments:
    """The moments of every rank under one schedule."""

    def __init__(self, table: Sequence[Sequence[Action]]) -> None:
        self.first_backwards = tuple(
            tuple(dict.fromkeys(part.stage for action in order for part in action.flat if part.kind in (B, W)))
            for order in table
        )
        """The stages of every rank in the order of their first backward."""
        self._table = table
        self._known: dict[object, tuple[list[_Size | _Ending], np.ndarray[tuple[int, int], np.dtype[np.int64]]]] = {}

    def peak(self, rank: int, stages: Mapping[int, StageSizes]) -> int:
        """The most bytes that a rank holds at once whose stages have these sizes."""
        adds_up = frozenset(stage for stage, sizes in stages.items() if sizes.sums)
        if (rank, adds_up) not in self._known:
            moments = set(_moments(self._table[rank], adds_up))
            sizes = list({size: None for moment in moments for size, _ in moment})
            place = {size: number for number, size in enumerate(sizes)}
            counts = np.zeros((len(moments), len(sizes)), dtype=np.int64)
            for row, moment in enumerate(moments):
                for size, count in moment:
                    counts[row, place[size]] = count
            self._known[rank, adds_up] = sizes, counts
        sizes, counts = self._known[rank, adds_up]
        given = np.array([size.of(stages) for size in sizes], dtype=np.int64)
        return int((counts @ given).max(initial=0))


def _moments(order: Sequence[Action], adds_up: frozenset[int]) -> Iterator[_Moment]:
    """The moments of one rank: while each action runs, and at the end of each of its backwards.

    ``adds_up``: the stages whose gradients add up whole.
    """
    held: defaultdict[_Size | _Ending, int] = defaultdict(int)
    """Live activations and gathered stages."""
    sums, shards, sent = set[int](), set[int](), None

    def moment(*beside: _Size | _Ending) -> _Moment:
        counts = held.copy()
        for size in (*beside, *(_Size(at, "sums") for at in sums), *(_Size(at, "shard") for at in shards)):
            counts[size] += 1
        return frozenset((size, count) for size, count in counts.items() if count)

    for action in order:
        if action.kind in (Kind.UNSHARD, Kind.RESHARD):
            held[_Size(action.stage, "whole")] += 1 if action.kind is Kind.UNSHARD else -1
        elif action.kind is Kind.REDUCE_GRAD:
            sums.discard(action.stage)
            shards.add(action.stage)
            sent = action.stage
        beside: list[_Size | _Ending] = []
        for part in action.flat:
            at = part.stage
            if part.kind is F:
                held[_Size(at, "activations")] += 1
                beside.append(_Size(at, "passing"))
            elif part.kind is I:
                beside.append(_Size(at, "input_grad"))
            elif part.kind is W:
                sums.add(at)
                beside.append(_Size(at, "weighing"))
            elif part.kind is B and at in adds_up:
                beside.append(_Size(at, "backward" if at in sums else "first_backward"))
            elif part.kind is B:
                # Its first bucket leaves when the one under way has arrived. Each is added to its shard.
                beside.append(_Ending(at, sent) if at in shards else _Size(at, "first_backward"))
                shards.add(at)
        yield moment(*beside, *(() if sent is None else (_Size(sent, "under_way"),)))
        for part in action.flat:
            if part.kind is F and part.stage not in adds_up:
                sent = None  # what a forward ran beside has arrived
            if part.kind is B:
                sums.add(part.stage)
                # The last bucket is on its way when all activations are gone.
                held[_Size(part.stage, "activations")] -= 1
                yield moment(_Size(part.stage, "under_way"))
                held[_Size(part.stage, "activations")] += 1
        for part in action.flat:
            early, own = _Size(part.stage, "freed_by_input_grad"), _Size(part.stage, "activations")
            if part.kind in (B, W):
                held[own] -= 1
            if part.kind in (I, W):
                held[early] += -1 if part.kind is I else 1
