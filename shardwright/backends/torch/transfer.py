"""Messages between pipeline ranks: asynchronous sends, receives posted ahead, no order in which they could deadlock.

Between two ranks each direction is a channel of its own. Messages leave a channel in the order in which the sender's
schedule makes them, and the receiver posts its receives in that same order, which it knows because every rank has the
whole schedule. A sender never waits. So a wait always ends: the earliest unfinished action of the schedule has all that
it needs under way. NCCL gets one communicator per channel, since it matches messages by order alone; Gloo gets tags.
"""

import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from shardwright.backends.torch.watch import PeerError, Watch


@dataclass(frozen=True, slots=True)
class Shape:
    """What one tensor of a message looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Message:
    """Tensors that one rank sends to another in one go. ``key`` names it within a step on both sides."""

    key: tuple[int, int, bool]
    """(edge, microbatch, whether these are gradients)."""
    source: int
    target: int
    """Coordinates on pp."""
    tensors: tuple[Shape, ...]
    tag: int
    text: str
    """``activations of microbatch 3 from stage 0``."""


@dataclass(slots=True)
class _Posted:
    message: Message
    buffers: list[torch.Tensor]
    works: list[Work] = field(default_factory=list)


class Mailroom:
    """Sends and receives the messages of one rank.

    Args:
        ranks: the global rank at each pp coordinate.
        me: this rank's pp coordinate.
        timeout_s: how long a wait may take before it fails.
    """

    def __init__(
        self, ranks: Sequence[int], me: int, device: torch.device, watch: Watch, timeout_s: float, group: ProcessGroup
    ) -> None:
        self.ranks, self.me, self.device, self.watch = tuple(ranks), me, device, watch
        self.timeout = timedelta(seconds=timeout_s)
        self.group: ProcessGroup | None = group
        self.by_order = device.type == "cuda"
        self._channels: dict[tuple[int, int], ProcessGroup] = {}
        self._expected: dict[int, deque[Message]] = {}
        self._posted: dict[tuple[int, int, bool], _Posted] = {}
        self._sending: deque[tuple[Work, torch.Tensor]] = deque()
        self._reaper = _Reaper() if not self.by_order else None

    def open(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Make the channels (source, target) that are not there yet. All pp peers call this with the same pairs."""
        if not self.by_order:
            return
        for source, target in sorted(pairs):
            if self.me in (source, target) and (source, target) not in self._channels:
                members = sorted((self.ranks[source], self.ranks[target]))
                handle = dist.new_group(members, use_local_synchronization=True)
                assert isinstance(handle, ProcessGroup)
                self._channels[source, target] = handle

    def expect(self, messages: Sequence[Message]) -> None:
        """Begin a step: the messages that will come, those of each source in the order in which it sends them."""
        self._expected = {}
        for message in messages:
            self._expected.setdefault(message.source, deque()).append(message)
        self._posted.clear()

    def post(self, message: Message) -> None:
        """Post the receive of a message, and of those that its sender sends before it."""
        if message.key in self._posted:
            return
        waiting = self._expected.get(message.source, deque())
        while waiting:
            first = waiting.popleft()
            posted = _Posted(first, [torch.empty(t.shape, dtype=t.dtype, device=self.device) for t in first.tensors])
            for offset, buffer in enumerate(posted.buffers):
                posted.works.append(self._receive(first, buffer, offset))
            self._posted[first.key] = posted
            if first.key == message.key:
                return

    def take(self, message: Message) -> list[torch.Tensor]:
        """Wait for a message. Raises PeerError when it does not come."""
        self.post(message)
        posted = self._posted.pop(message.key)
        with self.watch.waiting(f"{message.text} from rank {self.ranks[message.source]}"):
            for work in posted.works:
                self._wait(work)
        return posted.buffers

    def send(self, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        """Send without waiting. The tensors must not change afterwards."""
        if self._reaper is not None:
            self._reaper.check(self.watch)
        for offset, tensor in enumerate(tensors):
            whole = as_carried(tensor.detach())
            with self.watch.waiting(f"the start of a send of {message.text} to rank {self.ranks[message.target]}"):
                if self.by_order:
                    work = dist.isend(whole, self.ranks[message.target], self._channels[message.source, message.target])
                else:
                    work = dist.isend(whole, self.ranks[message.target], self.group, tag=message.tag + offset)
            if work is None:
                continue
            if self._reaper is not None:
                self._reaper.put(work, whole, self.timeout)
            else:
                self._sending.append((work, whole))
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()

    def close(self) -> None:
        """End the thread that waits for sends, and let the process groups go. Nothing is sent afterwards."""
        if self._reaper is not None:
            self._reaper.close()
        self._channels.clear()
        self.group = None

    def drain(self) -> None:
        """End a step: every send is under way to the end. Raises PeerError when one failed."""
        if self._reaper is not None:
            self.watch.doing("end of the step")
            with self.watch.waiting("peers to receive what this rank sent"):
                self._reaper.drain()
            self._reaper.check(self.watch)
        while self._sending:
            work, _ = self._sending.popleft()
            self._wait(work)

    def _receive(self, message: Message, buffer: torch.Tensor, offset: int) -> Work:
        source = self.ranks[message.source]
        flat = as_carried(buffer)
        with self.watch.waiting(f"the start of a receive of {message.text} from rank {source}"):
            if self.by_order:
                work = dist.irecv(flat, source, self._channels[message.source, message.target])
            else:
                work = dist.irecv(flat, source, self.group, tag=message.tag + offset)
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
    whole = tensor.contiguous()
    if whole.dtype is torch.bool:
        return whole.view(torch.uint8)
    return torch.view_as_real(whole) if whole.dtype.is_complex else whole


class _Reaper:
    """Waits for Gloo's sends on a thread of its own, and lets their buffers go as soon as they are out.

    Gloo tells of a finished send only to who waits for it.
    """

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[Work, torch.Tensor, timedelta] | None] = queue.Queue()
        self._error: RuntimeError | None = None
        threading.Thread(target=self._run, name="shardwright-sends", daemon=True).start()

    def put(self, work: Work, tensor: torch.Tensor, timeout: timedelta) -> None:
        self._queue.put((work, tensor, timeout))

    def drain(self) -> None:
        self._queue.join()

    def close(self) -> None:
        self._queue.put(None)

    def check(self, watch: Watch) -> None:
        if self._error is not None:
            with watch.waiting("a peer to receive what this rank sent"):
                raise self._error

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                return
            work, tensor, timeout = item
            del item
            try:
                if self._error is None:
                    work.wait(timeout)
            except RuntimeError as error:
                self._error = error
            finally:
                del work, tensor
                self._queue.task_done()
