"""Timelines: the times at which something ran, simulated or measured: the actions of a schedule, the units of jobs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, cast, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeVar  # with a default, which Python has from 3.13 on

from shardwright.core.errors import ScheduleError
from shardwright.core.events import NOTHING, Work
from shardwright.core.schedule.actions import Action, Kind
from shardwright.core.schedule.peak_memory import SliceBytes, peak_live, walk_activations

Seconds = NDArray[np.float64]
Bytes = NDArray[np.int64]
MemoryOverTime = tuple[Seconds, Bytes]
"""The seconds at which memory changes, and the bytes from then on."""
HOST = -1
"""The source or target of a copy from or to the host."""

Ran = TypeVar("Ran", bound=Work, default=Action, covariant=True)
"""What ran: actions, unless something else is named."""


@dataclass(frozen=True, slots=True)
class Span(Generic[Ran]):
    """One action on one rank, from `start_s` to `end_s`; or other work on another lane."""

    rank: int
    action: Ran
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Transfer(Generic[Ran]):
    """One tensor on its way between two ranks; `action` is the send that it carries out. Or a copy between a device
    and the `HOST`, of other work."""

    action: Ran
    source: int
    target: int
    start_s: float
    end_s: float


TransferRow = tuple[bool, int, int, int, int, float, float]
"""(whether forward, the stage that sends, microbatch · slices + slice, source rank, target rank, start and end in
seconds)."""


class TransferLog(Sequence[Transfer]):
    """Transfers that become values only when looked at: a long simulation has hundreds of thousands."""

    __slots__ = ("_rows", "_slices")

    def __init__(self, rows: Sequence[TransferRow], slices: int = 1) -> None:
        self._rows, self._slices = rows, slices

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Transfer: ...
    @overload
    def __getitem__(self, index: slice) -> "TransferLog": ...
    def __getitem__(self, index: int | slice) -> "Transfer | TransferLog":
        if isinstance(index, slice):
            return TransferLog(self._rows[index], self._slices)
        forward, stage, number, source, target, start, end = self._rows[index]
        mb, piece = divmod(number, self._slices)
        kind = Kind.SEND_FORWARD if forward else Kind.SEND_BACKWARD
        send = Action(stage, kind, mb, (), piece if self._slices > 1 else None)
        return Transfer(send, source, target, start, end)


@dataclass(frozen=True, slots=True, eq=False)
class Timeline(Generic[Ran]):
    """The times at which each action ran, all in seconds from the first start. Units of jobs are actions of devices.

    Args:
        actions: the actions that each rank ran, in order.
        start_s, end_s: the times of each rank's actions, float64 arrays of shape [actions of the rank].
        transfers: the tensors that moved between ranks, in order of arrival at their link.
        activation_bytes: bytes that one live microbatch holds on each stage; 1 each for a count.
        cause: the last thing that each action waited for, an int64 array of shape [actions of the rank] for each rank.
            -1: nothing; n >= 0: the action with that number, counted over all ranks in order; -2 - t: transfer t.
            Simulated only.
        transfer_cause: the same for each transfer.
        freed_by_input_grad_bytes: as in `StageCosts`.
        slice_bytes: where microbatches ran in slices, these two for each slice, instead.
        held: the memory of each rank over time, where it does not follow from the order of its actions.
        outer_transfers: the numbers of the transfers that start first and end last, where they reach beyond what ran:
            copies from the host and to it. The makespan is then from the one to the other.
        lane: the word for what the actions ran on.

    Fields computed from these:
        makespan_s: the time from the first start to the last end.
        bubble_fraction: the idle share of each rank, idle time / makespan.
        bubble_s: last end - first start - time at work, for each rank.

    Raises:
        ScheduleError: lengths differ, or an action ends before it starts.
    """

    actions: tuple[Sequence[Ran], ...]
    start_s: tuple[Seconds, ...]
    end_s: tuple[Seconds, ...]
    transfers: Sequence[Transfer[Ran]] = ()
    activation_bytes: tuple[int, ...] | None = None
    cause: tuple[NDArray[np.int64], ...] | None = None
    transfer_cause: NDArray[np.int64] | None = None
    freed_by_input_grad_bytes: tuple[int, ...] | None = None
    slice_bytes: tuple[SliceBytes, ...] = ()
    held: tuple[MemoryOverTime, ...] | None = None
    outer_transfers: tuple[int, int] | None = None
    lane: str = "rank"
    makespan_s: float = field(init=False)
    bubble_fraction: tuple[float, ...] = field(init=False)
    bubble_s: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        for rank, (actions, starts, ends) in enumerate(zip(self.actions, self.start_s, self.end_s, strict=True)):
            if not len(actions) == len(starts) == len(ends):
                raise ScheduleError(
                    f"rank {rank}: {len(actions)} actions, {len(starts)} starts, {len(ends)} ends: expected as many"
                )
            if np.any(ends < starts):
                late = int(np.argmax(ends < starts))
                raise ScheduleError(f"{actions[late]} on rank {rank} ends at {ends[late]} s, before it starts")
        used = [(s[0], e.max()) for s, e in zip(self.start_s, self.end_s, strict=True) if len(s)]
        if self.outer_transfers is not None:
            first, last = (self.transfers[at] for at in self.outer_transfers)
            used.append((first.start_s, last.end_s))
        makespan = max((end for _, end in used), default=0.0) - min((start for start, _ in used), default=0.0)
        work = [float(np.sum(ends - starts)) for starts, ends in zip(self.start_s, self.end_s, strict=True)]
        reach = [
            float(ends.max() - starts[0]) if len(starts) else 0.0
            for starts, ends in zip(self.start_s, self.end_s, strict=True)
        ]
        put = object.__setattr__
        put(self, "makespan_s", float(makespan))
        put(self, "bubble_s", tuple(span - busy for span, busy in zip(reach, work, strict=True)))
        idle = tuple((makespan - busy) / makespan if makespan > 0 else 0.0 for busy in work)
        put(self, "bubble_fraction", tuple(max(0.0, float(share)) for share in idle))

    @classmethod
    def measured(
        cls,
        spans: Iterable[Span[Ran]],
        ranks: int,
        transfers: Sequence[Transfer[Ran]] = (),
        activation_bytes: Sequence[int] = (),
        *,
        held: Sequence[MemoryOverTime] | None = None,
        lane: str = "rank",
    ) -> "Timeline[Ran]":
        """A timeline of what was measured; the earliest start becomes second 0, that of a copy from the host too.

        ``held``: as `Timeline.held`, in the seconds of the spans; not counted where it is left out of other work than
        actions.

        Raises:
            ScheduleError: a span names a rank that there is not.
        """
        rows: list[list[Span[Ran]]] = [[] for _ in range(ranks)]
        for span in spans:
            if not 0 <= span.rank < ranks:
                raise ScheduleError(f"a span of {span.action} names rank {span.rank}: expected 0 to {ranks - 1}")
            rows[span.rank].append(span)
        for row in rows:
            row.sort(key=lambda span: (span.start_s, span.end_s))
        zero = min((row[0].start_s for row in rows if row), default=0.0)
        outer = None
        if any(HOST in (t.source, t.target) for t in transfers):
            numbers = range(len(transfers))
            first = min(numbers, key=lambda at: transfers[at].start_s)
            outer = first, max(numbers, key=lambda at: transfers[at].end_s)
            zero = min(zero, transfers[first].start_s)
        if held is None and not all(isinstance(span.action, Action) for row in rows for span in row):
            held = ((np.empty(0), np.empty(0, dtype=np.int64)),) * ranks
        moved = (Transfer(t.action, t.source, t.target, t.start_s - zero, t.end_s - zero) for t in transfers)
        return cls(
            tuple(tuple(span.action for span in row) for row in rows),
            tuple(np.array([span.start_s - zero for span in row], dtype=np.float64) for row in rows),
            tuple(np.array([span.end_s - zero for span in row], dtype=np.float64) for row in rows),
            tuple(moved),
            tuple(activation_bytes) or None,
            held=None if held is None else tuple((times - zero, sizes) for times, sizes in held),
            outer_transfers=outer,
            lane=lane,
        )

    @property
    def ranks(self) -> int:
        return len(self.actions)

    def spans(self, rank: int) -> tuple[Span[Ran], ...]:
        """The actions that a rank ran, in order, with their times."""
        triples = zip(self.actions[rank], self.start_s[rank].tolist(), self.end_s[rank].tolist(), strict=True)
        return tuple(Span(rank, action, start, end) for action, start, end in triples)

    def memory(self, rank: int) -> tuple[Seconds, Bytes]:
        """The activation memory of a rank over time, of jobs all that a device holds of them: the seconds at which it
        changes, and the bytes from then on."""
        if self.held is not None:
            return self.held[rank]
        times: list[float] = []
        sizes: list[int] = []
        before = 0
        walk = walk_activations(self._schedule[rank], *self._sizes)
        for span, (live, remaining) in zip(self.spans(rank), walk, strict=True):
            for time, size in ((span.start_s, live), (span.end_s, remaining)):
                if size != before:
                    times.append(time)
                    sizes.append(size)
                    before = size
        return np.array(times, dtype=np.float64), np.array(sizes, dtype=np.int64)

    @property
    def peak_live_activations(self) -> tuple[int, ...]:
        """The most (stage, microbatch) pairs, for each rank, whose forward had started and whose backward (weight
        gradient, where split) had not ended. A microbatch counts once on each stage of the rank, and so does each slice
        of one. 0 for jobs."""
        return (0,) * self.ranks if self.held is not None else tuple(map(peak_live, self._schedule))

    @property
    def peak_activation_bytes(self) -> tuple[int, ...]:
        """The most bytes of activations held at once, for each rank; of jobs all that a device holds of them."""
        if self.held is not None:
            return tuple(int(sizes.max(initial=0)) for _, sizes in self.held)
        return tuple(peak_live(actions, *self._sizes) for actions in self._schedule)

    @property
    def _schedule(self) -> tuple[Sequence[Action], ...]:
        """What ran, where that is the actions of a schedule: nothing else comes without `held`."""
        return cast("tuple[Sequence[Action], ...]", self.actions)

    @property
    def _sizes(self) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None, tuple[SliceBytes, ...]]:
        return self.activation_bytes, self.freed_by_input_grad_bytes, self.slice_bytes

    def critical_path(self) -> tuple[Span[Ran] | Transfer[Ran], ...]:
        """The chain of actions and transfers that sets the makespan, from the first start to the last end. Each waited
        for the one before it.

        Raises:
            ScheduleError: the timeline was measured: a measurement does not say what an action waited for.
        """
        if self.cause is None or self.transfer_cause is None:
            raise ScheduleError("a measured timeline has no critical path: simulate the schedule with measured costs")
        offsets = np.cumsum([0, *(len(actions) for actions in self.actions)])
        ends = [float(row.max()) if len(row) else -1.0 for row in self.end_s]
        rank = int(np.argmax(ends))
        if ends[rank] < 0:
            return ()
        node = int(offsets[rank] + np.argmax(self.end_s[rank]))
        if self.outer_transfers is not None and self.transfers[self.outer_transfers[1]].end_s > ends[rank]:
            node = -2 - self.outer_transfers[1]
        path: list[Span[Ran] | Transfer[Ran]] = []
        while node != NOTHING:
            if node < 0:
                transfer = -2 - node
                path.append(self.transfers[transfer])
                node = int(self.transfer_cause[transfer])
                continue
            rank = int(np.searchsorted(offsets, node, side="right")) - 1
            index = node - int(offsets[rank])
            times = float(self.start_s[rank][index]), float(self.end_s[rank][index])
            if not self.actions[rank][index].is_transfer:  # These are among the transfers.
                path.append(Span(rank, self.actions[rank][index], *times))
            node = int(self.cause[rank][index])
        return tuple(reversed(path))
