"""Messages of any size between the ranks of a pipeline, in any order, over a Gloo group of their own.

A message is a frame: a pickled head, and small tensors behind it. Larger tensors follow by themselves, without a copy.
Between two ranks messages keep their order. Each peer has a thread that receives from it while a step runs, so that a
send never waits for the receiver's computation. Every rank ends its part of a step by a last message to every other
one, after which nothing is under way.

Pickled heads come from the ranks of this run alone, as those of torch.distributed's own object collectives do.
"""

import contextlib
import enum
import pickle
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed import ProcessGroup, Work

if TYPE_CHECKING:
    from typing_extensions import Buffer

FRAME_BYTES = 64 * 1024
"""The size in bytes up to which a message travels at once."""
SMALL_BYTES = 16 * 1024
"""The size in bytes up to which tensors travel in the frame."""
UNSENT_BYTES = 16 * 2**20
UNSENT_MESSAGES = 32
"""The number of messages that are sent before the oldest must have left: Gloo tells of a finished send only to a caller
that waits for it."""
FOREVER = timedelta(days=365)
JOIN_S = 1.0
"""The time in seconds that the end waits for a thread."""
_LENGTHS = struct.Struct("<QQ")
"""The lengths of the frame and of its head, in bytes."""
_FRAME_TAG, _BULK_TAG = 1, 2


class Kind(enum.IntEnum):
    """The kind of a message."""

    CALL = 0
    RETURN = 1
    RAISED = 2
    GRADIENT = 3
    """Gradients of a call's outputs; answered by RETURN with those of its inputs."""
    DONE = 4
    """A microbatch is over: its state can be dropped."""
    END = 5
    """The driver's last message of a step: its results."""
    BYE = 6
    """The last message of a step of every other rank."""
    ABORT = 7
    """The last message of a rank whose step has failed."""

    @property
    def last(self) -> bool:
        return self >= Kind.END


@dataclass(frozen=True, slots=True)
class Envelope:
    """One message. ``call`` numbers the calls that one rank makes for one microbatch."""

    kind: Kind
    source: int
    microbatch: int
    call: int
    body: Any
    tensors: list[torch.Tensor]


class Wire:
    """One rank's end of the connections with its pipeline peers.

    Args:
        me: this rank's pp coordinate; ``group`` has the peers in that order.
        deliver: called with every message, on the thread that received it.
        lost: called with the peer and the error when a connection breaks.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        me: int,
        size: int,
        deliver: Callable[[Envelope], None],
        lost: Callable[[int, Exception], None],
    ) -> None:
        self._group, self.me, self.size = group, me, size
        self._deliver, self._lost = deliver, lost
        self._sending: deque[tuple[Work, torch.Tensor]] = deque()
        self._unsent_bytes = 0
        self._lock = threading.Lock()
        self._gates = {peer: threading.Semaphore(0) for peer in range(size) if peer != me}
        self._quiet = {peer: threading.Event() for peer in self._gates}
        self._receiving: dict[int, Work] = {}
        self._posted: dict[int, Work] = {}
        """The receive of the next frame of each peer, posted before it is waited for: that spares Gloo a round trip."""
        self._frames = {peer: torch.empty(FRAME_BYTES, dtype=torch.uint8) for peer in self._gates}
        self._closing = False
        self._ended = False
        """Whether this rank has sent its last message in this step."""
        self._threads = [
            threading.Thread(target=self._receive, args=(peer,), name=f"shardwright-from-{peer}", daemon=True)
            for peer in self._gates
        ]
        for thread in self._threads:
            thread.start()

    @property
    def peers(self) -> tuple[int, ...]:
        return tuple(self._gates)

    def open(self) -> None:
        """Begin a step: messages are received until every peer has sent its last."""
        self._ended = False
        for peer in self._gates:
            self._quiet[peer].clear()
            self._gates[peer].release()

    def quiet(self, timeout_s: float) -> bool:
        """Wait until every peer has sent its last message of this step. False when one has not in time."""
        return all(event.wait(timeout_s) for event in self._quiet.values())

    def abandon(self) -> None:
        """Break the connections, so that no thread waits for a peer that is gone: nothing can be sent afterwards.

        A wait that runs out of time closes the pair in Gloo, which ends every other wait on it.
        """
        for work in self._receiving.values():
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(milliseconds=1))
        for thread in self._threads:
            thread.join(JOIN_S)

    def close(self) -> None:
        """End the receiving threads; between steps only."""
        self._closing = True
        for gate in self._gates.values():
            gate.release()
        for thread in self._threads:
            thread.join(JOIN_S)
        self._group = None

    def send(
        self, target: int, kind: Kind, microbatch: int, call: int, body: Any, tensors: Sequence[torch.Tensor] = ()
    ) -> None:
        """Send without waiting for the receiver; nothing is sent once this rank has sent its last message.

        Raises RuntimeError when the connection is broken.
        """
        whole = [_as_bytes(tensor) for tensor in tensors]
        small = [piece for piece in whole if piece.numel() <= SMALL_BYTES]
        shapes = [
            (tuple(tensor.shape), tensor.dtype, piece.numel() if piece.numel() <= SMALL_BYTES else None)
            for tensor, piece in zip(tensors, whole, strict=True)
        ]
        head = pickle.dumps((int(kind), microbatch, call, body, shapes), protocol=pickle.HIGHEST_PROTOCOL)
        frame = _frame(head, small)
        with self._lock:
            if self._ended and not kind.last:
                return
            if frame.numel() > FRAME_BYTES:
                self._post(torch.frombuffer(bytearray(_LENGTHS.pack(frame.numel(), 0)), dtype=torch.uint8), target)
                self._post(frame, target, _BULK_TAG)
            else:
                self._post(frame, target)
            for piece in whole:
                if piece.numel() > SMALL_BYTES:
                    self._post(piece, target, _BULK_TAG)

    def say_last(self, kind: Kind, body: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Tell every peer that nothing more comes from here in this step; only the first time counts."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        broken: RuntimeError | None = None
        for peer in self.peers:
            try:
                self.send(peer, kind, 0, 0, body, tensors)
            except RuntimeError as error:  # the others are still to be told
                broken = error
        if broken is not None:
            raise broken

    def drain(self) -> None:
        """Wait until everything has left. Raises RuntimeError when a connection is broken."""
        with self._lock:
            while self._sending:
                self._wait_for_oldest()

    def _post(self, data: torch.Tensor, target: int, tag: int = _FRAME_TAG) -> None:
        assert self._group is not None
        self._sending.append((self._group.send([data], target, tag), data))
        self._unsent_bytes += data.numel()
        while len(self._sending) > UNSENT_MESSAGES or (self._unsent_bytes > UNSENT_BYTES and len(self._sending) > 1):
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        work, data = self._sending.popleft()
        self._unsent_bytes -= data.numel()
        work.wait()

    def _receive(self, peer: int) -> None:
        while True:
            self._gates[peer].acquire()
            if self._closing:
                return
            try:
                while not self._receive_one(peer):
                    pass
            except Exception as error:  # a thread that ended in silence would leave the step waiting
                self._lost(peer, error)
                return
            finally:
                self._quiet[peer].set()

    def _receive_one(self, peer: int) -> bool:
        """Receive and deliver a message; True when it was the peer's last of this step."""
        posted = self._posted.pop(peer) if peer in self._posted else self._post_frame(peer)
        self._wait(posted, peer)
        view = _memory(self._frames[peer])
        length, head = _LENGTHS.unpack_from(view)
        if length > FRAME_BYTES:
            view = _memory(self._take(torch.empty(length, dtype=torch.uint8), peer))
            length, head = _LENGTHS.unpack_from(view)
        offset = _LENGTHS.size + head
        number, microbatch, call, body, shapes = pickle.loads(view[_LENGTHS.size : offset])
        tensors = []
        for shape, dtype, size_bytes in shapes:
            tensor = torch.empty(shape, dtype=dtype)
            data = tensor.reshape(-1).view(torch.uint8)
            if size_bytes is None:
                self._take(data, peer)
            else:
                _memory(data)[:] = view[offset : offset + size_bytes]
                offset += size_bytes
            tensors.append(tensor)
        kind = Kind(number)
        self._deliver(Envelope(kind, peer, microbatch, call, body, tensors))
        self._posted[peer] = self._post_frame(peer)
        return kind.last

    def _post_frame(self, peer: int) -> Work:
        assert self._group is not None
        return self._group.recv([self._frames[peer]], peer, _FRAME_TAG)

    def _wait(self, work: Work, peer: int) -> None:
        self._receiving[peer] = work
        work.wait(FOREVER)

    def _take(self, buffer: torch.Tensor, peer: int) -> torch.Tensor:
        assert self._group is not None
        self._wait(self._group.recv([buffer], peer, _BULK_TAG), peer)
        return buffer


def _frame(head: bytes, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """A frame: [length of the frame][length of the head][head][pieces]."""
    body: list[bytes | memoryview] = [head, *map(_memory, pieces)]
    length = _LENGTHS.size + sum(map(len, body))
    return torch.frombuffer(bytearray(b"".join((_LENGTHS.pack(length, len(head)), *body))), dtype=torch.uint8)


def _memory(data: torch.Tensor) -> memoryview:
    return memoryview(cast("Buffer", data.numpy()))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, on the host."""
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
