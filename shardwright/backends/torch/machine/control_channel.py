"""Rows of numbers that ranks exchange before they do anything together, and the errors when a rank does not come.

On one host every rank writes its row to sockets of its own and reads those of the others; over several hosts a Gloo
group carries the rows. Neither touches the devices. A rank that waits for long writes its place, the call that it is
in, to the store of the run, and reads the places of the others: ranks that wait for each other in different calls find
out within seconds.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwright.backends.torch.compat import Store, default_store
from shardwright.backends.torch.machine.local_links import LocalLink, LocalLinks
from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.machine.watchdog import PeerError, Watchdog
from shardwright.core.errors import DisagreementError

LOOK_S = 1.0
"""The interval in seconds at which a waiting rank looks for the others."""
STALLED_S = 2.0
"""The length in seconds of a wait after which a rank writes down its place."""
ANSWER_S = 2.0
"""The time in seconds that the store has to answer."""
DETAILS_S = 5.0
"""The time in seconds that a rank waits for another one, in another call, to write down its place."""


class ControlChannel:
    """One rank's end of the exchanges over a mesh. Every rank of the run makes one at the same time.

    Attributes:
        replica: the ranks that share this rank's batch: its pp and tp peers.
    """

    def __init__(self, bound: BoundMesh, watchdog: Watchdog) -> None:
        self.bound, self.watchdog = bound, watchdog
        self.everyone = tuple(range(bound.mesh.size))
        self.replicas = bound.mesh.groups("pp", "tp")
        self.replica = next(ranks for ranks in self.replicas if bound.rank in ranks)
        self.broken = ""
        """The reason why no exchange can be made any more; empty while exchanges can be made."""
        self._links: LocalLinks | None = None
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        self._counts = dict.fromkeys(self.everyone, 0)
        """The number of exchanges with each rank."""
        store: Any = default_store()
        self._store: Store = store.clone()  # of its own: one that never answers blocks nobody else
        self._asked: threading.Thread | None = None
        epoch = self._store.add(f"shardwright/epochs/{bound.rank}", 1)
        self._prefix = f"shardwright/{epoch}"
        self._open()

    def _open(self) -> None:
        whole = dist.group.WORLD
        assert whole is not None
        if dist.get_backend() != "gloo":
            made = dist.new_group(backend="gloo")
            assert isinstance(made, ProcessGroup)
            whole = made
        others = [rank for rank in self.everyone if rank != self.bound.rank]
        links = LocalLinks(self.bound.rank, whole, self.watchdog.longest_s, self.watchdog.require_peers)
        links.open(others)
        if all(links.reach(rank, [peer for peer in self.everyone if peer != rank]) for rank in self.everyone):
            self._links = links
            return
        links.close()
        self._groups[self.everyone] = whole
        for ranks in self.replicas:
            if ranks != self.everyone and len(ranks) > 1:
                handle = dist.new_group(list(ranks), backend="gloo")
                if isinstance(handle, ProcessGroup) and ranks == self.replica:
                    self._groups[ranks] = handle

    def exchange(self, row: Sequence[int], ranks: tuple[int, ...], call: str) -> dict[int, list[int]]:
        """The rows of ``ranks``, by rank; all of them call this with rows of one length.

        Args:
            ranks: all ranks, or those of this replica.
            call: the name of the call that this rank is about to make, for errors.

        Raises:
            DisagreementError: ranks wait for each other in different calls.
            PeerError: a rank is gone, or did not come in time.
        """
        if self.broken:
            raise DisagreementError(self.broken)
        own = torch.tensor(list(row), dtype=torch.int64)
        with self.watchdog.waiting(f"{self._named(ranks)}, for {call}"):
            wait = _Wait(self, ranks, call)
            table = self._over_links(own, ranks, wait) if self._links else self._over_gloo(own, ranks, wait)
            wait.over()
        for rank in ranks:
            self._counts[rank] += 1
        return {rank: entries.tolist() for rank, entries in table.items()}

    def tell(self, said: Any, ranks: tuple[int, ...]) -> dict[int, Any]:
        """The value that each of ``ranks`` gives, as JSON carries it; all of them call this."""
        data = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
        with self.watchdog.waiting(f"{self._named(ranks)}, to say what differs"):
            wait = _Wait(self, ranks, "to say what differs")
            if self._links is None:
                every: list[Any] = [None] * len(ranks)
                dist.all_gather_object(every, said, group=self._groups[ranks])
                return dict(zip(ranks, every, strict=True))
            lengths = self._over_links(torch.tensor([data.numel()]), ranks, wait)
            sizes = {rank: int(length) for rank, length in lengths.items()}
            found = self._over_links(data, ranks, wait, sizes)
        return {rank: json.loads(bytes(entry.numpy())) for rank, entry in found.items()}

    def _over_links(
        self, own: torch.Tensor, ranks: tuple[int, ...], wait: "_Wait", sizes: dict[int, int] | None = None
    ) -> dict[int, torch.Tensor]:
        assert self._links is not None
        awaited: list[tuple[LocalLink, int]] = []
        found = {}
        for rank in ranks:
            if rank == self.bound.rank:
                found[rank] = own
                continue
            link = self._links.get(rank)
            assert link is not None
            try:
                link.send([own])
            except RuntimeError as error:
                wait.lost(error)
            found[rank] = own.new_empty(sizes[rank] if sizes else own.numel())
            awaited.append((link, link.await_into([found[rank]])))
        for rank, (link, filled) in zip((r for r in ranks if r != self.bound.rank), awaited, strict=True):
            try:
                while not self._links.arrived(link, filled, LOOK_S):
                    wait.look(rank)
            except RuntimeError as error:
                wait.lost(error)
        return found

    def _over_gloo(self, own: torch.Tensor, ranks: tuple[int, ...], wait: "_Wait") -> dict[int, torch.Tensor]:
        every = [torch.empty_like(own) for _ in ranks]
        work = dist.all_gather(every, own, group=self._groups[ranks], async_op=True)
        while work is not None:
            try:
                work.wait(timedelta(seconds=LOOK_S))
                break
            except RuntimeError:
                if work.is_completed():
                    raise
                wait.look(None)
        return dict(zip(ranks, every, strict=True))

    def _named(self, ranks: tuple[int, ...]) -> str:
        return "all ranks" if len(ranks) == len(self.everyone) else f"ranks {list(ranks)}"

    # Where ranks are ---------------------------------------------------------------------------------------------

    def write_place(self, ranks: tuple[int, ...], call: str) -> None:
        """Write down the exchange in which this rank waits."""
        counts = {rank: self._counts[rank] for rank in ranks}
        self._write(f"place/{self.bound.rank}", json.dumps({"ranks": ranks, "call": call, "counts": counts}))

    def forget_place(self) -> None:
        self._write(f"place/{self.bound.rank}", "")

    def conflict(self, ranks: tuple[int, ...], call: str) -> str:
        """The reason why the exchange in which this rank waits can never end; empty when none is known."""
        reason = self._ask(lambda: self._reason(ranks, call))
        self.broken = self.broken or reason
        return reason

    def _reason(self, ranks: tuple[int, ...], call: str) -> str:
        if verdict := self._read("verdict"):
            return verdict
        for rank in ranks:
            if rank == self.bound.rank:
                continue
            if left := self._read(f"left/{rank}"):
                return self._decided(
                    f"rank {rank} has left the run ({left}), and rank {self.bound.rank} is in {call}: every rank "
                    f"makes the same calls, and as many steps"
                )
            place = self._read(f"place/{rank}")
            if not place:
                continue
            where = json.loads(place)
            theirs = where["counts"].get(str(self.bound.rank))
            if theirs == self._counts[rank] and (where["call"] != call or tuple(where["ranks"]) != ranks):
                here, there = self.bound.rank, where["call"]
                first, second = sorted([(here, call), (rank, there)])
                return self._decided(different_calls({first[0]: first[1], second[0]: second[1]}))
        return ""

    def why_apart(self, ranks: tuple[int, ...], call: str) -> str:
        """The reason why this exchange met another one, from the places that its ranks write down."""
        for rank in ranks:
            self._counts[rank] -= 1  # the exchange was none
        self.write_place(ranks, call)
        begun = time.monotonic()
        while time.monotonic() - begun < DETAILS_S:
            if reason := self.conflict(ranks, call):
                return reason
            time.sleep(LOOK_S / 20)
        text = f"some ranks make another call than rank {self.bound.rank}, which is in {call}"
        self.broken = self._ask(lambda: self._decided(text)) or text
        return self.broken

    def _decided(self, text: str) -> str:
        """Make a reason known to every rank that waits; returns the reason that was made known first."""
        return self._store.compare_set(f"{self._prefix}/verdict", "", text).decode()

    def leave(self, why: str) -> None:
        """Tell ranks that still wait that this one makes no more calls."""
        self._write(f"left/{self.bound.rank}", why)

    def _read(self, key: str) -> str:
        name = f"{self._prefix}/{key}"
        return self._store.get(name).decode() if self._store.check([name]) else ""

    def _write(self, key: str, text: str) -> None:
        def write() -> str:
            self._store.set(f"{self._prefix}/{key}", text)
            return ""

        self._ask(write)

    def _ask(self, talk: Callable[[], str]) -> str:
        """The result of ``talk`` with the store; empty when the store is gone, or does not answer in time. A store
        whose host is stopped never answers, so a thread of its own waits for it."""
        answers: list[str] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                answers.append(talk())

        if self._asked is not None and self._asked.is_alive():
            return ""
        with contextlib.suppress(RuntimeError):  # there may be no memory for a thread
            thread = threading.Thread(target=ask, name="shardwright-control", daemon=True)
            thread.start()
            self._asked = thread
            thread.join(ANSWER_S)
        return answers[0] if answers else ""

    def close(self) -> None:
        if self._links is not None:
            self._links.close()
        self._groups.clear()


class _Wait:
    """One exchange of a rank, from its beginning."""

    def __init__(self, channel: ControlChannel, ranks: tuple[int, ...], call: str) -> None:
        self.channel, self.ranks, self.call = channel, ranks, call
        self._begun = time.monotonic()
        self._written = False

    def look(self, rank: int | None) -> None:
        """Check whether the exchange can still end, while ``rank`` is waited for.

        Raises DisagreementError when it cannot, PeerError when a peer is known to be gone, and RuntimeError after the
        timeout.
        """
        waited_s = time.monotonic() - self._begun
        if waited_s < STALLED_S:
            return
        if not self._written:
            self._written = True
            self.channel.write_place(self.ranks, self.call)
        if reason := self.channel.conflict(self.ranks, self.call):
            raise DisagreementError(reason)
        self.channel.watchdog.require_peers()
        if waited_s > self.channel.watchdog.longest_s:
            whom = "a rank" if rank is None else f"rank {rank}"
            raise RuntimeError(f"{whom} lives, and did not come within {self.channel.watchdog.longest_s:g} s")

    def lost(self, error: RuntimeError) -> NoReturn:
        """Raise the error of a broken connection: a DisagreementError when the reason is known, else
        ``error``."""
        if isinstance(error, PeerError):
            raise error
        if reason := self.channel.conflict(self.ranks, self.call):
            raise DisagreementError(reason) from error
        raise error  # the watchdog finds out who is gone

    def over(self) -> None:
        if self._written:
            self.channel.forget_place()


def different_calls(calls: Mapping[int, str]) -> str:
    """The text of the error that ranks are in different calls."""
    said = ", ".join(f"{ranks_text(ranks)} in {call}" for call, ranks in by_value(calls).items())
    return (
        f"the ranks are in different calls: {said}. Every rank makes the same calls in the same order: what one rank "
        f"alone shall do, such as writing a file, goes after the call and not around it"
    )


def by_value(said: Mapping[int, str]) -> dict[str, list[int]]:
    """The ranks that say each text."""
    found: dict[str, list[int]] = {}
    for rank, value in said.items():
        found.setdefault(value, []).append(rank)
    return found


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in words: ``rank 2``, ``ranks 0, 1 and 3``, ``ranks 0 to 7``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
