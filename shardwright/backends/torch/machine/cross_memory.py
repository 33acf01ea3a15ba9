"""Sums and gathers between CPU ranks of one host that read each other's memory.

Linux copies from the memory of one process into that of another in one call, `process_vm_readv` (cross-memory attach,
as MPI libraries use it between ranks of one host). So a byte is copied once, where a socket copies it twice and hands
it to threads that need the cores which compute. Every rank tells its peers where a tensor lies over a local link; they
read it when they need it, and say so, since the tensor must stay as it is until then.

A sum of whole tensors is a reduce-scatter and an all-gather, both in place: each rank adds up one part of the tensor,
and reads the other parts from those that added these up. For r ranks and n bytes a rank reads 2 n (r - 1) / r bytes, as
many as it is sent by a ring. The sum of an entry is made on one rank, so all have the same bits.

A rank that waits serves whatever else it has under way, so no order of waits can deadlock.
"""

import ctypes
import os
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwright.backends.torch.machine import process_memory
from shardwright.backends.torch.machine.local_links import LocalLink, LocalLinks
from shardwright.backends.torch.machine.watchdog import Watchdog

CHUNK_BYTES = 2**18
"""The bytes that are read at once where they are added to others: they are still in a core's cache then."""
_NONCE_BYTES = 32


class Kind(IntEnum):
    """The meaning of a message between two ranks, about a tensor."""

    SUMMANDS = 0
    """Here is a tensor, of which you add up one part."""
    SUMMED = 1
    """Here is the part that this rank has added up."""
    SHARD = 2
    """Here is this rank's shard of what is gathered."""
    ADDENDS = 3
    """Here is a tensor, of which you keep the sum of one part."""
    READ = 4
    """This rank has read what you offered. Added to the kind of the offer."""


Key = tuple[int, int]
"""The name of an offer: its kind, and the number of the sum or gather."""
Reading = Callable[[int, int], None]
"""What is done with the tensor that a rank offers: called with the rank, and the address of the tensor there."""


@dataclass(slots=True)
class _Offer:
    """A tensor of this rank that peers may read."""

    key: Key
    tensor: torch.Tensor
    unread: set[int]
    """The peers that have not said yet that they read it."""


@dataclass(slots=True, eq=False)
class _Reads:
    """Tensors that this rank is to read, one of each peer."""

    key: Key
    sizes: Sequence[int]
    """The bytes of the tensor that each rank offers."""
    left: deque[int]
    """The peers whose tensor was not read yet, in the order in which they are read."""
    reading: Reading
    then: Callable[[], None] = lambda: None
    """Called when all were read."""


@dataclass(slots=True)
class _Peer:
    """What this rank knows of another one of the group."""

    process: int
    link: LocalLink
    row: torch.Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.int64))
    """The message that comes next: kind, number, address and bytes of a tensor."""
    filled: int = 0
    """The number that the link has filled when the row is there."""
    offers: dict[Key, deque[tuple[int, int]]] = field(default_factory=dict)
    """The addresses and bytes of what the peer has offered and this rank has not read."""
    loss: RuntimeError | None = None
    """The reason why nothing more comes from it, as where it has left the run."""


class CrossMemory:
    """The sums and gathers of one rank over a group of ranks that lie on one host.

    Attributes:
        read_bytes: the bytes that this rank has read from its peers.
    """

    def __init__(self, me: int, processes: Sequence[int], links: LocalLinks) -> None:
        self.me, self.ways, self.read_bytes = me, len(processes), 0
        self._links = links
        self._peers = {rank: _Peer(processes[rank], link) for rank, link in links.all()}
        for peer in self._peers.values():
            peer.filled = peer.link.await_into([peer.row])
        self._next = [(me + step) % self.ways for step in range(1, self.ways)]
        """The other ranks, beginning with the next one: so not all read from one at the same time."""
        self._under_way: list[_Reads] = []
        self._offers: list[_Offer] = []
        self._sums = 0

    @classmethod
    def bind(cls, me: int, group: ProcessGroup, watchdog: Watchdog) -> "CrossMemory | None":
        """The end of rank ``me`` of the group; None where ranks are on several hosts, or may not read each other's
        memory. All ranks of the group call this at the same time, and either all get an end or none."""
        with watchdog.waiting("ranks of this host to open their memory to each other"):
            process_memory.let_siblings_read()
            nonce = ctypes.create_string_buffer(secrets.token_bytes(_NONCE_BYTES), _NONCE_BYTES)
            host = process_memory.host_name()
            every = _told(group, (host, os.getpid(), ctypes.addressof(nonce), nonce.raw))
            can_read = bool(host) and all(there == host and process_memory.is_there(*said) for there, *said in every)
            if not all(_told(group, can_read)):
                return None
            ranks = range(group.size())
            links = LocalLinks(me, group, watchdog.longest_s, watchdog.require_peers)
            links.open([rank for rank in ranks if rank != me])
            if not all(links.reach(rank, [other for other in ranks if other != rank]) for rank in ranks):
                links.close()
                return None
            return cls(me, [process for _, process, *_ in every], links)

    def begin_sum(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Callable[[], None]:
        """Begin to reduce a flat contiguous tensor over the ranks, in place, by a sum or a maximum; the result waits.
        Every rank begins the same sums, in one order."""
        self._sums += 1
        number, sizes = self._sums, [tensor.nbytes] * self.ways
        ends = [tensor.numel() * rank // self.ways for rank in range(self.ways + 1)]
        parts = [tensor[ends[rank] : ends[rank + 1]] for rank in range(self.ways)]
        summed: list[_Offer] = []

        def add(rank: int, address: int) -> None:
            self._add(rank, address + ends[self.me] * tensor.element_size(), parts[self.me], op)

        def copy(rank: int, address: int) -> None:
            self._read(rank, address + ends[rank] * tensor.element_size(), parts[rank])
            self._say(rank, Kind.READ + Kind.SUMMED, number)

        def offer() -> None:
            summed.append(self._offer((Kind.SUMMED, number), tensor))

        # That a peer has summed its part says that it has read this tensor.
        self._tell((Kind.SUMMANDS, number), tensor)
        sums = _Reads((Kind.SUMMANDS, number), sizes, deque(self._next), add, offer)
        gathers = _Reads((Kind.SUMMED, number), sizes, deque(self._next), copy)
        return self._begin([sums, gathers], lambda: not gathers.left and bool(summed) and not summed[0].unread)

    def begin_gather(self, parts: Sequence[torch.Tensor], own: torch.Tensor, number: int) -> Callable[[], None]:
        """Begin to fill the part of each other rank with what it gives as ``own``; the result waits. ``own`` must not
        change before `settle`."""

        def copy(rank: int, address: int) -> None:
            self._read(rank, address, parts[rank])
            self._say(rank, Kind.READ + Kind.SHARD, number)

        self._offer((Kind.SHARD, number), own)
        sizes = [part.nbytes for part in parts]
        reads = _Reads((Kind.SHARD, number), sizes, deque(self._next), copy)
        return self._begin([reads], lambda: not reads.left)

    def begin_scatter(
        self, tensor: torch.Tensor, parts: Sequence[torch.Tensor], number: int
    ) -> Callable[[], torch.Tensor]:
        """Begin to add up this rank's part of a flat contiguous tensor that every rank has, in place; the result waits,
        and gives a copy of the part. ``parts`` are those of all ranks, views of the tensor."""
        own = parts[self.me]
        first_byte = own.data_ptr() - tensor.data_ptr() if own.numel() else 0

        def add(rank: int, address: int) -> None:
            self._add(rank, address + first_byte, own, dist.ReduceOp.SUM)
            self._say(rank, Kind.READ + Kind.ADDENDS, number)

        offer = self._offer((Kind.ADDENDS, number), tensor)
        reads = _Reads((Kind.ADDENDS, number), [tensor.nbytes] * self.ways, deque(self._next), add)
        wait = self._begin([reads], lambda: not reads.left and not offer.unread)

        def wait_for_part() -> torch.Tensor:
            wait()
            return own.clone()  # so that the tensor is free

        return wait_for_part

    def settle(self) -> None:
        """Wait until the peers have read all that they were offered, which may change from now on."""
        self._links.until(self._progress, lambda: not self._offers)

    def close(self) -> None:
        """Close the links to the peers; what they have not read yet they cannot sum or gather any more."""
        for peer in self._peers.values():
            peer.link.close()

    # What is under way -------------------------------------------------------------------------------------------

    def _begin(self, reads: Sequence[_Reads], is_over: Callable[[], bool]) -> Callable[[], None]:
        self._under_way += reads
        self._progress()
        return lambda: self._links.until(self._progress, is_over)

    def _progress(self) -> bool:
        """Hear the peers, and read what they have offered, as far as that goes without a wait. Returns whether there
        was anything to do."""
        has_moved = False
        for rank, peer in self._peers.items():
            while self._hears(rank, peer):
                has_moved = True
                kind, number, address, size = peer.row.tolist()
                peer.filled = peer.link.await_into([peer.row])
                if kind >= Kind.READ:
                    self._take_back((kind - Kind.READ, number), rank)
                else:
                    peer.offers.setdefault((kind, number), deque()).append((address, size))
        for reads in list(self._under_way):
            while reads.left and self._serve(reads, reads.left[0]):
                has_moved = True
                reads.left.popleft()
                if not reads.left:
                    self._under_way.remove(reads)
                    reads.then()
        for rank, peer in self._peers.items():
            if peer.loss is not None and self._needs(rank):
                raise peer.loss
        return has_moved

    def _hears(self, rank: int, peer: _Peer) -> bool:
        """Whether a message of a peer is there."""
        if peer.link.filled < peer.filled and peer.loss is None:
            try:
                peer.link.read()
            except RuntimeError as error:
                peer.loss = error
                self._links.leave(rank)
        return peer.link.filled >= peer.filled

    def _needs(self, rank: int) -> bool:
        """Whether something that is under way waits for a peer."""
        return any(rank in reads.left for reads in self._under_way) or any(rank in o.unread for o in self._offers)

    def _serve(self, reads: _Reads, rank: int) -> bool:
        """Read the tensor of a rank, if it has offered it. Raises RuntimeError for one of another size."""
        offers = self._peers[rank].offers
        waiting = offers.get(reads.key)
        if not waiting:
            return False
        address, size = waiting.popleft()
        if not waiting:
            del offers[reads.key]
        if size != reads.sizes[rank]:
            raise RuntimeError(
                f"rank {rank} of the group offers {size} bytes where this rank has {reads.sizes[rank]}: ranks sum and "
                f"gather the same tensors in one order"
            )
        reads.reading(rank, address)
        return True

    def _offer(self, key: Key, tensor: torch.Tensor) -> _Offer:
        """Tell all peers of a tensor, and keep it until they have read it."""
        offer = _Offer(key, tensor, set(self._peers))
        self._offers.append(offer)
        self._tell(key, tensor)
        return offer

    def _take_back(self, key: Key, rank: int) -> None:
        """Note that a peer has read an offer: the first of this name that it has not read yet."""
        for offer in self._offers:
            if offer.key == key and rank in offer.unread:
                offer.unread.remove(rank)
                if not offer.unread:
                    self._offers.remove(offer)
                return

    def _tell(self, key: Key, tensor: torch.Tensor) -> None:
        for rank in self._next:
            self._say(rank, *key, tensor.data_ptr(), tensor.nbytes)

    def _say(self, rank: int, kind: int, number: int, address: int = 0, size: int = 0) -> None:
        self._peers[rank].link.send([torch.tensor([kind, number, address, size])])

    # Bytes -------------------------------------------------------------------------------------------------------

    def _read(self, rank: int, address: int, into: torch.Tensor) -> None:
        """Fill a contiguous tensor with the bytes at an address of a peer's."""
        if into.nbytes:
            process_memory.read(self._peers[rank].process, address, into.data_ptr(), into.nbytes)
            self.read_bytes += into.nbytes

    def _add(self, rank: int, address: int, total: torch.Tensor, op: Any) -> None:
        """Reduce the entries at an address of a peer's into a contiguous tensor, chunk by chunk."""
        scratch = torch.empty(min(CHUNK_BYTES // total.element_size(), total.numel()), dtype=total.dtype)
        for first in range(0, total.numel(), scratch.numel() or 1):
            part = total[first : first + scratch.numel()]
            came = scratch[: part.numel()]
            self._read(rank, address + first * total.element_size(), came)
            if op == dist.ReduceOp.MAX:
                torch.maximum(part, came, out=part)
            else:
                part.add_(came)


def _told(group: ProcessGroup, mine: Any) -> list[Any]:
    """What each rank of the group says."""
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, mine, group=group)
    return every
