"""Messages between pipeline ranks: asynchronous sends, receives posted ahead, no order in which they could deadlock.

Between two ranks each direction is a channel of its own. Messages leave a channel in the order in which the sender's
schedule makes them, and the receiver posts its receives in that same order, which it knows because every rank has the
whole schedule. A sender never waits. So a wait always ends: the messages that the earliest unfinished action of the
schedule needs are all under way. NCCL gets one communicator per channel, since it matches messages by order alone; Gloo
gets tags. Small messages between CPU ranks of one host go over sockets of their own (`local_links`).

A tensor that is sent lives until the send is over. Gloo tells that only to a caller that waits for the send. But the
schedule says which messages a peer had taken before it made the message that has just come in, and to wait for those
takes no time. So no thread is needed that would wait for sends and take its share of a core.
"""

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from shardwright.backends.torch.machine.local_links import LocalLink, LocalLinks
from shardwright.backends.torch.machine.watchdog import PeerError, Watchdog

SMALL_BYTES = 256 * 2**10
"""The size in bytes up to which messages go over local links. Both ends know the size from the program."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape and dtype of one tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Key = tuple[int, int, bool]
"""The name of a message within a step: (edge, microbatch, whether these are gradients)."""


@dataclass(frozen=True, slots=True)
class Message:
    """Tensors that one rank sends to another in one go. ``key`` names the message within a step on both sides."""

    key: Key
    source: int
    target: int
    """The coordinates of source and target on pp."""
    tensors: tuple[Shape, ...]
    tag: int
    text: str
    """The message in words: ``activations of microbatch 3 from stage 0``."""
    is_small: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_small", sum(tensor.bytes for tensor in self.tensors) <= SMALL_BYTES)


@dataclass(slots=True)
class _Posted:
    buffers: list[torch.Tensor]
    works: list[Work] = field(default_factory=list)
    link: LocalLink | None = None
    filled: int = 0
    """The number of tensors that a local link has filled when this message is there."""


class PipelineTransport:
    """The transport of one rank: it sends and receives the rank's messages.

    Args:
        ranks: the global rank at each pp coordinate.
        me: this rank's pp coordinate.
        peers: the process group of ``ranks``.
        group: the process group of all ranks, which carries the messages.
    """

    def __init__(
        self, ranks: Sequence[int], me: int, device: torch.device, watchdog: Watchdog, *, peers: ProcessGroup,
        group: ProcessGroup,
    ) -> None:  # fmt: skip
        self.ranks, self.me, self.device, self.watchdog = tuple(ranks), me, device, watchdog
        self.timeout = timedelta(seconds=watchdog.longest_s)
        self.group: ProcessGroup | None = group
        self.peers: ProcessGroup | None = peers
        self.by_order = device.type == "cuda"
        self.links = None if self.by_order else LocalLinks(me, peers, watchdog.longest_s, watchdog.require_peers)
        self._linked: set[frozenset[int]] = set()
        self._channels: dict[tuple[int, int], ProcessGroup] = {}
        self._expected: dict[int, deque[Message]] = {}
        self._posted: dict[Key, _Posted] = {}
        self._sending: dict[Key, list[tuple[Work, torch.Tensor]]] = {}
        self._taken: Mapping[Key, Sequence[Key]] = {}

    def open(self, pairs: Sequence[tuple[int, int]], homes: Collection[int] = ()) -> None:
        """Make the channels (source, target) that are not there yet, and links from each of ``homes`` to all peers for
        the tensors that it `spread`s. All pp peers call this with the same arguments."""
        if self.links is not None:
            wanted = {frozenset(pair) for pair in (*pairs, *((a, b) for a in homes for b in range(len(self.ranks))))}
            wanted = {pair for pair in wanted if len(pair) == 2} - self._linked
            if wanted:
                with self.watchdog.waiting("pipeline peers to open their links"):
                    self.links.open(sorted(sum(pair) - self.me for pair in wanted if self.me in pair))
                self._linked |= wanted
            return
        for source, target in sorted(pairs):
            if self.me in (source, target) and (source, target) not in self._channels:
                members = sorted((self.ranks[source], self.ranks[target]))
                handle = dist.new_group(members, use_local_synchronization=True)
                assert isinstance(handle, ProcessGroup)
                self._channels[source, target] = handle

    def expect(self, messages: Sequence[Message], taken: Mapping[Key, Sequence[Key]]) -> None:
        """Begin a step.

        Args:
            messages: the messages that will come, of each source in the order in which it sends.
            taken: for some of these, the messages that this rank had sent to their source and the source had taken
                before it made them.
        """
        self._expected = {}
        for message in messages:
            self._expected.setdefault(message.source, deque()).append(message)
        self._posted.clear()
        self._taken = taken

    def gains_by_posting(self, message: Message) -> bool:
        """Whether a message comes in earlier when it is posted before it is taken. Over a local link it does not: the
        link reads only what is awaited."""
        return self._link(message) is None

    def post(self, message: Message) -> None:
        """Post the receive of a message, and of those that its sender sends before it."""
        if message.key in self._posted:
            return
        waiting = self._expected.get(message.source, deque())
        while waiting:
            first = waiting.popleft()
            posted = _Posted([torch.empty(t.shape, dtype=t.dtype, device=self.device) for t in first.tensors])
            posted.link = self._link(first)
            if posted.link is not None:
                posted.filled = posted.link.await_into(posted.buffers)
            else:
                for offset, buffer in enumerate(posted.buffers):
                    posted.works.append(self._receive(first, buffer, offset))
            self._posted[first.key] = posted
            if first.key == message.key:
                return

    def take(self, message: Message) -> list[torch.Tensor]:
        """Wait for a message. Raises PeerError when it does not come."""
        self.post(message)
        posted = self._posted.pop(message.key)
        with self.watchdog.waiting(f"{message.text} from rank {self.ranks[message.source]}"):
            if posted.link is not None and self.links is not None:
                self.links.wait(posted.link, posted.filled)
            for work in posted.works:
                self._wait(work)
        if self._sending:
            for key in self._taken.get(message.key, ()):
                self._settle(key)
        return posted.buffers

    def send(self, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        """Send without waiting. The tensors must not change afterwards, and need no gradient."""
        link = self._link(message)
        target = self.ranks[message.target]
        with self.watchdog.waiting(f"the start of a send of {message.text} to rank {target}"):
            if link is not None:
                link.send(tensors)
                return
            going = []
            for offset, tensor in enumerate(tensors):
                whole = as_carried(tensor)
                if self.by_order:
                    work = dist.isend(whole, target, self._channels[message.source, message.target])
                else:
                    assert self.group is not None
                    work = self.group.send([whole], target, message.tag + offset)
                if work is not None:
                    going.append((work, whole))
        self._sending[message.key] = going

    def spread(self, tensor: torch.Tensor, home: int, what: str) -> torch.Tensor:
        """Give all pp peers, which call this together between steps, the contiguous tensor of the peer at ``home``; the
        others pass a tensor of its shape and dtype, which is filled. Raises PeerError when it does not come."""
        with self.watchdog.waiting(f"{what} from rank {self.ranks[home]}"):
            everyone = [peer for peer in range(len(self.ranks)) if peer != home]
            if self.links is None or tensor.nbytes > SMALL_BYTES or not self.links.reach(home, everyone):
                dist.broadcast(as_carried(tensor), self.ranks[home], group=self.peers)
            elif self.me == home:
                for peer in everyone:
                    link = self.links.get(peer)
                    assert link is not None
                    link.send([tensor])
                self.links.drain()
            else:
                link = self.links.get(home)
                assert link is not None
                self.links.wait(link, link.await_into([tensor]))
        return tensor

    def _link(self, message: Message) -> LocalLink | None:
        if self.links is None or not message.is_small:
            return None
        return self.links.get(message.source + message.target - self.me)

    def _settle(self, key: Key) -> None:
        """Let go of a message that the peer has taken."""
        for work, _ in self._sending.pop(key, ()):
            with self.watchdog.waiting("the end of a send that was taken"):
                self._wait(work)

    def close(self) -> None:
        """Let the process groups go. Nothing is sent afterwards."""
        self._channels.clear()
        self.group = self.peers = None
        if self.links is not None:
            self.links.close()

    def drain(self) -> None:
        """End a step: every send is over. Raises PeerError when one failed."""
        self.watchdog.doing("end of the step")
        with self.watchdog.waiting("peers to receive what this rank sent"):
            for going in self._sending.values():
                for work, _ in going:
                    self._wait(work)
            if self.links is not None:
                self.links.drain()
        self._sending.clear()

    def _receive(self, message: Message, buffer: torch.Tensor, offset: int) -> Work:
        source = self.ranks[message.source]
        flat = as_carried(buffer)
        with self.watchdog.waiting(f"the start of a receive of {message.text} from rank {source}"):
            if self.by_order:
                work = dist.irecv(flat, source, self._channels[message.source, message.target])
            else:
                assert self.group is not None
                work = self.group.recv([flat], source, message.tag + offset)
        if work is None:
            raise PeerError(f"torch.distributed made no receive from rank {source}")
        return work

    def _wait(self, work: Work) -> None:
        if self.by_order:
            work.wait()
        else:
            work.wait(self.timeout)


def as_carried(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as every backend can carry it: bool and complex have no kernels."""
    whole = tensor.resolve_conj().resolve_neg().contiguous()
    if whole.dtype is torch.bool:
        return whole.view(torch.uint8)
    return torch.view_as_real(whole) if whole.dtype.is_complex else whole
