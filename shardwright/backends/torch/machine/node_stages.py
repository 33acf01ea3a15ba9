"""Gathers and sums of shards over several nodes in two stages, so that no byte crosses between nodes twice.

The ranks of a shard group form a grid of nodes and places on them. A gather goes between the nodes first, among the
ranks of one place, and then within each node, on which every rank passes on what it was sent; the shards arrive where
they belong. A sum goes the other way: within each node, then between them. (MiCS, Zhang et al., arXiv 2205.00119,
section 3.3, which gathers in this order too: within the nodes first, every rank would fetch the shards of whole nodes,
as many times more bytes as a node has ranks.) Between the nodes each rank sends nodes − 1 shards either way.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from shardwright.backends.torch.compat import all_gather_single, reduce_scatter_single


@dataclass(frozen=True, slots=True)
class NodeGrid:
    """The ranks of a shard group on their nodes: number = node · each + place.

    Attributes:
        nodes: the number of nodes.
        each: the number of the group's ranks on each.
        coordinate: the number of this rank.
    """

    nodes: int
    each: int
    coordinate: int

    @classmethod
    def of(cls, node_of: Sequence[int], coordinate: int) -> "NodeGrid | None":
        """The grid of ranks on these nodes; None where they are no grid of several nodes and several places."""
        nodes = len(set(node_of))
        each, rest = divmod(len(node_of), nodes)
        rows = [set(node_of[first : first + each]) for first in range(0, len(node_of), each)]
        if nodes == 1 or each == 1 or rest or any(len(row) > 1 for row in rows):
            return None
        return cls(nodes, each, coordinate)

    @property
    def beside(self) -> tuple[int, ...]:
        """All ranks on this rank's node, itself too."""
        first = self.coordinate - self.coordinate % self.each
        return tuple(range(first, first + self.each))

    @property
    def across(self) -> tuple[int, ...]:
        """The ranks of this rank's place on all nodes, itself too."""
        return tuple(range(self.coordinate % self.each, self.nodes * self.each, self.each))

    def rows(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, by place."""
        return tuple(tuple(range(first, first + self.each)) for first in range(0, self.nodes * self.each, self.each))

    def columns(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each place, by node."""
        return tuple(tuple(range(place, self.nodes * self.each, self.each)) for place in range(self.each))


class _Transfer:
    """A transfer whose second stage begins when the first has brought something."""

    def __init__(self, begun: Sequence[Work | None], go_on: Callable[[], Sequence[Work | None]]) -> None:
        self._begun, self._go_on = begun, go_on
        self._has_gone_on = threading.Event()
        self._works: Sequence[Work | None] = ()
        self._failure: BaseException | None = None

    def go_on(self) -> None:
        """Wait for what the second stage needs, and begin it."""
        try:
            self._works = self._go_on()
        except BaseException as error:  # told by `wait`, in the thread that waits
            self._failure = error
        finally:
            self._has_gone_on.set()

    def wait(self) -> None:
        """Wait for both stages. Raises what either raised."""
        self._has_gone_on.wait()
        if self._failure is not None:
            raise self._failure
        for work in (*self._begun, *self._works):
            if work is not None:
                work.wait()


class _Relay:
    """A thread that begins second stages, in the order of the transfers: that of all ranks. So a rank that computes, or
    waits for something else, holds up no other."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
        threading.Thread(target=_relay, args=(self._queue,), name=f"shardwright-{name}", daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    def take(self, transfer: _Transfer) -> None:
        self._queue.put(transfer)


def _relay(transfers: "queue.SimpleQueue[_Transfer | None]") -> None:
    while (transfer := transfers.get()) is not None:
        transfer.go_on()
        del transfer  # its tensors


class StagedMessages:
    """The two stages by messages from rank to rank, for CPUs.

    Args:
        ranks: the global ranks of the group.
    """

    def __init__(self, grid: NodeGrid, ranks: Sequence[int], group: ProcessGroup) -> None:
        self.grid, self._ranks, self._group = grid, tuple(ranks), group
        self._mates = [mate for mate in grid.beside if mate != grid.coordinate]
        self._peers = [peer for peer in grid.across if peer != grid.coordinate]
        self._under_way: list[_Transfer] = []
        self._gathers, self._sums = _Relay("gathers"), _Relay("sums")

    def gather(self, parts: Sequence[torch.Tensor], tag: int) -> Callable[[], None]:
        """Begin to fill ``parts``, of which this rank's own is there, with those of all ranks; the result waits."""
        own, works = parts[self.grid.coordinate], []
        arriving = [(peer, self._receive(parts[peer], peer, tag)) for peer in self._peers]
        works += [self._send(own, peer, tag) for peer in self._peers]
        for mate in self._mates:  # messages between two ranks under one tag keep their order
            works.append(self._send(own, mate, tag))
            works.append(self._receive(parts[mate], mate, tag))
            ahead = mate - self.grid.coordinate
            works += [self._receive(parts[peer + ahead], mate, tag) for peer in self._peers]

        def pass_on() -> list[Work | None]:
            sent: list[Work | None] = []
            for peer, work in arriving:
                if work is not None:
                    work.wait()
                sent += [self._send(parts[peer], mate, tag) for mate in self._mates]
            return sent

        return self._begin(self._gathers, _Transfer(works, pass_on))

    def sum(self, parts: Sequence[torch.Tensor], tag: int) -> Callable[[], torch.Tensor]:
        """Begin to sum ``parts``, which are this function's from now on, over all ranks; the result waits, and gives
        the sum of this rank's own. Terms are added by place within the nodes, then by node."""
        coordinate, works = self.grid.coordinate, []
        # What goes on to other nodes comes first.
        rows = [*self._peers, coordinate]
        terms: dict[int, list[tuple[torch.Tensor, Work | None]]] = {}
        for row in rows:
            terms[row] = []
            for mate in self.grid.beside:
                if mate == coordinate:
                    terms[row].append((parts[row], None))
                    continue
                works.append(self._send(parts[row + mate - coordinate], mate, tag))
                received = torch.empty_like(parts[row])
                terms[row].append((received, self._receive(received, mate, tag)))
        sums = {peer: torch.empty_like(parts[coordinate]) for peer in self._peers}
        works += [self._receive(buffer, peer, tag) for peer, buffer in sums.items()]

        def pass_on() -> list[Work | None]:
            sent: list[Work | None] = []
            for row in rows:
                total = _added(terms.pop(row))
                if row == coordinate:
                    sums[row] = total
                else:
                    sent.append(self._send(total, row, tag))
            return sent

        wait = self._begin(self._sums, _Transfer(works, pass_on))

        def wait_and_add() -> torch.Tensor:
            wait()
            return _added([(sums[row], None) for row in sorted(sums)])

        return wait_and_add

    def abandon(self) -> list[Any]:
        """Forget what is under way, as its messages may never arrive; it is returned, to be kept."""
        lost, self._under_way = self._under_way, []
        self._gathers, self._sums = _Relay("gathers"), _Relay("sums")
        return lost

    def _begin(self, relay: _Relay, transfer: _Transfer) -> Callable[[], None]:
        self._under_way.append(transfer)
        relay.take(transfer)

        def wait() -> None:
            transfer.wait()
            self._under_way = [other for other in self._under_way if other is not transfer]

        return wait

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> Work | None:
        return dist.isend(tensor, self._ranks[peer], group=self._group, tag=tag) if tensor.numel() else None

    def _receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Work | None:
        return dist.irecv(tensor, self._ranks[peer], group=self._group, tag=tag) if tensor.numel() else None


def _added(terms: Sequence[tuple[torch.Tensor, Work | None]]) -> torch.Tensor:
    """The sum of tensors, in their order, in the memory of the first."""
    for _, work in terms:
        if work is not None:
            work.wait()
    total = terms[0][0]
    for term, _ in terms[1:]:
        total.add_(term)
    return total


@dataclass(frozen=True, slots=True)
class StageGroups:
    """The process groups of one kind of transfers: of this rank's node, and of its place on all nodes."""

    beside: ProcessGroup
    across: ProcessGroup


class StagedCollectives:
    """The two stages by collectives, for GPUs: on a stream of their own, so that the second waits for the first and
    nothing that computes waits for either.

    Args:
        gathers: the groups for gathers; ``sums`` those for sums, whose order among the gathers is not that of all.
    """

    def __init__(self, grid: NodeGrid, gathers: StageGroups, sums: StageGroups, device: torch.device) -> None:
        self.grid, self._gathers, self._sums = grid, gathers, sums
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else [None, None]

    def gather(self, parts: torch.Tensor, own: torch.Tensor) -> Callable[[], None]:
        """Begin to fill ``parts``, of shape (ranks, entries), with the shards of all; the result waits. What arrives
        from other nodes is copied to its place, a part of the whole as small as a node has ranks."""
        each, stream = self.grid.each, self._streams[0]
        with _after_what_runs(stream):
            arrived = own.new_empty((self.grid.nodes, own.numel()))
            _wait_all([all_gather_single(arrived.view(-1), own, group=self._gathers.across, async_op=True)])
            parts[self.grid.coordinate % each :: each].copy_(arrived)
            rows = parts.view(self.grid.nodes, -1)
            place = slice(self.grid.coordinate % each * own.numel(), (self.grid.coordinate % each + 1) * own.numel())
            _wait_all([
                all_gather_single(row, row[place], group=self._gathers.beside, async_op=True) for row in rows
            ])  # fmt: skip
            done = None if stream is None else stream.record_event()
        return _waiting(done, parts, own)

    def sum(self, parts: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to sum ``parts``, of shape (ranks, entries), over all ranks; the result waits, and gives the sum of
        this rank's own."""
        stream, own = self._streams[1], torch.empty_like(parts[0])
        with _after_what_runs(stream):
            rows = parts.view(self.grid.nodes, -1)
            sums = parts.new_empty((self.grid.nodes, own.numel()))
            common = {"op": dist.ReduceOp.SUM, "async_op": True}
            _wait_all([
                reduce_scatter_single(total, row, group=self._sums.beside, **common)
                for total, row in zip(sums, rows, strict=True)
            ])  # fmt: skip
            _wait_all([reduce_scatter_single(own, sums.view(-1), group=self._sums.across, **common)])
            done = None if stream is None else stream.record_event()
        wait = _waiting(done, parts)

        def wait_and_give() -> torch.Tensor:
            wait()
            return own

        return wait_and_give

    def abandon(self) -> list[Any]:
        """Nothing: collectives of a step that failed end, or the job does."""
        return []


def _after_what_runs(stream: Any) -> AbstractContextManager[Any]:
    """A context on a stream, after what the current one has been given; of no stream, where nothing runs beside."""
    if stream is None:
        return nullcontext()
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    return torch.cuda.stream(stream)


def _wait_all(works: Sequence[Any]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def _waiting(done: Any, *tensors: torch.Tensor) -> Callable[[], None]:
    """A function that lets the current stream wait; the tensors are kept until then."""
    held = list(tensors)

    def wait() -> None:
        if done is not None:
            torch.cuda.current_stream(held[0].device).wait_event(done)
        held.clear()

    return wait
