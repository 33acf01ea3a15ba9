"""Sockets between pipeline peers on one host, for messages so small that the way through Gloo costs more than they do.

Gloo hands every message to a thread of its own and wakes the waiting one: in a pipeline whose actions take a
millisecond, both show. Here the thread that computes writes to a Unix stream socket and reads from it. While it waits
it looks again and again before it sleeps, where every rank has a core for itself. Bytes that the socket does not take
at once are kept, and a thread that lives as long as there are such bytes writes them: so a sender never waits, and its
message arrives whatever it does next, as with Gloo.
"""

import os
import select
import socket
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

LOOK_S = 0.02
"""The time in seconds that a rank with a core for itself looks for a message before it sleeps."""
BUFFER_BYTES = 2**20
"""The buffer size in bytes that is asked of a socket; systems may allow less."""
ASK_S = 0.25
"""The interval in seconds at which a waiting rank asks whether its peers are still there."""
_LOOKS_BETWEEN_CLOCKS = 50
_HELLO = struct.Struct("!I")


class LocalLink:
    """A stream in both directions to one peer."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self.connection = connection
        self._unsent: deque[memoryview] = deque()
        self._writing = threading.Lock()
        self._writer: threading.Thread | None = None
        self._failure: RuntimeError | None = None
        self._awaited: deque[memoryview] = deque()
        self._ever_awaited = 0

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write contiguous CPU tensors, and keep a copy of the bytes that the socket does not take: the tensors may
        change. Raises RuntimeError when the peer is gone."""
        with self._writing:
            self._require_peer()
            for tensor in tensors:
                data = _bytes_of(tensor.contiguous())
                written = 0 if self._unsent else self._write(data)
                if written < len(data):
                    self._unsent.append(memoryview(bytearray(data[written:])))
            if self._unsent and self._writer is None:
                writer = threading.Thread(target=self._write_rest, name="shardwright-link", daemon=True)
                writer.start()  # it waits for the lock
                self._writer = writer

    def drain(self, timeout_s: float, require_peers: Callable[[], None] = lambda: None) -> None:
        """Wait until everything is written. ``require_peers`` is asked meanwhile. Raises RuntimeError when the peer
        does not take everything, or is gone, and whatever ``require_peers`` raises."""
        end = time.monotonic() + timeout_s
        writer = self._writer
        while writer is not None and writer.is_alive():
            require_peers()
            writer.join(min(ASK_S, max(0.0, end - time.monotonic())))
            if writer.is_alive() and time.monotonic() >= end:
                raise RuntimeError("a peer did not take all that it was sent in time")
        self._require_peer()

    def close(self) -> None:
        """Close the connection. Bytes that were not written are lost."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        writer = self._writer
        if writer is not None:
            writer.join()
        self.connection.close()

    def _write_rest(self) -> None:
        """Write the kept bytes, until none are left or the peer is gone; the next send or drain raises for that."""
        room = select.poll()
        room.register(self.connection, select.POLLOUT)
        while True:
            room.poll()
            with self._writing:
                try:
                    self._write_kept()
                except RuntimeError as error:
                    self._failure = error
                if not self._unsent or self._failure is not None:
                    self._writer = None
                    return

    def _write_kept(self) -> None:
        while self._unsent:
            written = self._write(self._unsent[0])
            if written < len(self._unsent[0]):
                self._unsent[0] = self._unsent[0][written:]
                return
            self._unsent.popleft()

    def _require_peer(self) -> None:
        if self._failure is not None:
            raise self._failure

    def await_into(self, tensors: Sequence[torch.Tensor]) -> int:
        """Let the bytes that come next, after those awaited before, go into these contiguous CPU tensors.

        Returns the number that `filled` reaches when they are there.
        """
        for tensor in tensors:
            if tensor.numel():
                self._awaited.append(_bytes_of(tensor))
                self._ever_awaited += 1
        return self._ever_awaited

    @property
    def filled(self) -> int:
        """The number of tensors that have been filled so far."""
        return self._ever_awaited - len(self._awaited)

    def read(self) -> bool:
        """Fill awaited tensors with the bytes that have come; False when there were none."""
        progress = False
        while self._awaited:
            try:
                count = self.connection.recv_into(self._awaited[0])
            except BlockingIOError:
                return progress
            except OSError as error:
                raise RuntimeError(f"the connection broke: {error}") from error
            if not count:
                raise RuntimeError("the peer closed the connection")
            progress = True
            if count < len(self._awaited[0]):
                self._awaited[0] = self._awaited[0][count:]
            else:
                self._awaited.popleft()
        return progress

    def _write(self, data: memoryview) -> int:
        try:
            return self.connection.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise RuntimeError(f"the connection broke: {error}") from error


class LocalLinks:
    """The links of one rank, by the peer's coordinate.

    Args:
        me: this rank's coordinate in ``group``.
        group: the peers; all of them make their links at the same time.
        timeout_s: the longest time that a wait may take.
        require_peers: asked in long waits; raises when a peer is known to be gone.
    """

    require_peers: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self, me: int, group: ProcessGroup, timeout_s: float, require_peers: Callable[[], None] = lambda: None
    ) -> None:
        self.me, self.timeout_s, self.require_peers = me, timeout_s, require_peers
        self.group: ProcessGroup | None = group
        self._links: dict[int, LocalLink] = {}
        self._pairs: set[tuple[int, int]] = set()
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        self._look_s = LOOK_S if ranks_here * torch.get_num_threads() <= (os.cpu_count() or 1) else 0.0

    def get(self, peer: int) -> LocalLink | None:
        return self._links.get(peer)

    def all(self) -> list[tuple[int, LocalLink]]:
        """The peers that this rank is linked with, and the links."""
        return list(self._links.items())

    def leave(self, peer: int) -> None:
        """Forget the link with a peer that is gone: waits do not look at it any more."""
        self._links.pop(peer, None)

    def reach(self, source: int, targets: Sequence[int]) -> bool:
        """Whether ``source`` is linked with all of ``targets``: the same answer on every rank."""
        return all((min(source, target), max(source, target)) in self._pairs for target in targets)

    def open(self, peers: Sequence[int]) -> None:
        """Link this rank with those of ``peers`` that run on this host. All ranks of the group call this, and two peers
        name each other. Raises RuntimeError when a peer that announced its connection does not connect."""
        with tempfile.TemporaryDirectory(prefix="shardwright-") as folder, socket.socket(socket.AF_UNIX) as door:
            doors = self._gather(_listen(door, str(Path(folder) / str(self.me)), len(peers)))
            for peer in peers:
                if peer < self.me and (connection := _connect(doors[peer], self.me)) is not None:
                    self._links[peer] = LocalLink(connection)
            linked = self._gather(sorted(self._links))
            self._pairs |= {(min(a, b), max(a, b)) for a, others in linked.items() for b in others}
            door.settimeout(self.timeout_s)
            for _ in [peer for peer in peers if peer > self.me and self.me in linked[peer]]:
                try:
                    connection, _ = door.accept()
                    (peer,) = _HELLO.unpack(connection.recv(_HELLO.size, socket.MSG_WAITALL))
                except OSError as error:
                    raise RuntimeError(f"a peer on this host did not connect: {error}") from error
                self._links[peer] = LocalLink(connection)

    def _gather(self, mine: Any) -> dict[int, Any]:
        """The object that each rank gives, by the rank's coordinate."""
        assert self.group is not None
        every: list[Any] = [None] * self.group.size()
        dist.all_gather_object(every, (self.me, mine), group=self.group)
        return dict(every)

    def wait(self, link: LocalLink, filled: int) -> None:
        """Wait until the link has filled ``filled`` tensors. Raises RuntimeError when the peer is gone or too slow."""
        if not self.arrived(link, filled, self.timeout_s):
            raise RuntimeError(f"nothing came for {self.timeout_s:g} s")

    def arrived(self, link: LocalLink, filled: int, within_s: float) -> bool:
        """Whether a link has filled ``filled`` tensors, after a wait of at most ``within_s``. Raises RuntimeError when
        the peer is gone."""
        return self._look(link.read, lambda: link.filled >= filled, within_s, lambda: [link])

    def until(self, progress: Callable[[], bool], is_over: Callable[[], bool]) -> None:
        """Wait until something is over that messages of any peer may bring on. ``progress`` goes on as far as it can,
        and says whether there was anything to do. Raises RuntimeError when a peer is gone, or none sends anything."""
        if not self._look(progress, is_over, self.timeout_s, lambda: self._links.values()):
            raise RuntimeError(f"nothing came for {self.timeout_s:g} s")

    def _look(
        self, progress: Callable[[], bool], is_over: Callable[[], bool], within_s: float,
        links: Callable[[], Iterable[LocalLink]],
    ) -> bool:  # fmt: skip
        begun = time.monotonic()
        looks = 0
        while not is_over():
            if progress():
                continue
            looks += 1
            if looks % _LOOKS_BETWEEN_CLOCKS and self._look_s:
                continue
            now = time.monotonic()
            if now - begun > within_s:
                return False
            if now - begun >= self._look_s:
                self.require_peers()
                sleeper = select.poll()
                for link in links():
                    sleeper.register(link.connection, select.POLLIN)
                sleeper.poll(1e3 * min(ASK_S, begun + within_s - now))
        return True

    def drain(self) -> None:
        """Wait until everything is written."""
        begun = time.monotonic()
        for link in self._links.values():
            link.drain(max(0.0, begun + self.timeout_s - time.monotonic()), self.require_peers)

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()
        self.group = None


def _listen(door: socket.socket, path: str, peers: int) -> str:
    """The path where peers find the door; empty where there can be none: some systems' folders have names too long for
    a socket."""
    try:
        door.bind(path)
    except OSError:
        return ""
    door.listen(max(1, peers))
    return path


def _connect(path: str, me: int) -> socket.socket | None:
    """A connection to a peer's door; None where the peer has no door, or its files are not here because it runs on
    another host."""
    if not path:
        return None
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        return None
    connection.sendall(_HELLO.pack(me))
    return connection


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor that needs no gradient."""
    if tensor.dtype is torch.float32 and tensor.numel():
        return memoryview(tensor.numpy().data).cast("B")
    return memoryview(tensor.resolve_conj().resolve_neg().view(-1).view(torch.uint8).numpy().data)
