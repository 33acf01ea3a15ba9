"""The meeting of a run's ranks: each writes down that it came, and rank 0 says whether all of them are there.

The list is in torch's TCP store, which rank 0 hosts, or the agent of torchrun. A port that another program has, a rank
that did not come, one that came twice and one that was started with another number of ranks are reported by name on
every rank that can be reached, instead of being waited for.
"""

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

from shardwright.backends.torch.compat import PrefixStore, Store, TCPStore
from shardwright.core.errors import ClusterError

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
ANSWER_S = 10.0
"""The time in seconds that a program at the port may take to answer as a store does."""
LATER_S = 5.0
"""The time in seconds that the others wait longer than rank 0, so that they hear what it found."""
LOOK_S = 0.05
_BACKLOG = 2048
_LOG, _VERDICT, _HEARD = "arrivals", "verdict", "heard"

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Meeting:
    """The place where the ranks of a run meet. ``timeout_s`` is the time that a rank that has come waits for the
    others."""

    rank: int
    world_size: int
    address: str
    port: int
    timeout_s: float
    by_agent: bool = False
    """Whether the launcher's agent hosts the store."""

    @property
    def place(self) -> str:
        return f"{self.address}:{self.port}"

    @property
    def host(self) -> str:
        """The host of the store, as messages name it."""
        return f"the launcher's agent at {self.place}" if self.by_agent else f"rank 0 at {self.place}"


@dataclass(frozen=True, slots=True)
class Arrival:
    """The entry that a rank writes down when it comes."""

    rank: int
    world_size: int
    host: str
    process: int
    token: str

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


_hosted: dict[tuple[str, int], Store] = {}
"""The stores that this process knows. A host keeps its store until its process ends: of two runs in one process, a peer
may begin the second before rank 0 has ended the first."""
_meetings = 0
"""The number of times that this process has met others: the same on all ranks, which start and end runs together."""


def meet(meeting: Meeting) -> Store:
    """A store that all ranks share, once all of them have come. Every rank calls this.

    Raises ClusterError when the port is not free, or answers as no store does; when ranks do not come, come twice, or
    were started with another number of ranks.
    """
    global _meetings
    _meetings += 1
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if meeting.by_agent else "0"
    prefix = f"shardwright/{attempt}/{_meetings}"
    key = (meeting.address, meeting.port)
    if key not in _hosted:
        if meeting.rank == 0 and not meeting.by_agent:
            _hosted[key] = _host(meeting)
        else:
            _hosted[key] = _join(meeting)
    store = PrefixStore(prefix, _hosted[key])
    said = _within(
        meeting.timeout_s + 2 * LATER_S,
        lambda: _arrive(meeting, store),
        f"{meeting.host} does not answer any more: it was stopped, or its host is gone",
    )
    if said:
        raise ClusterError(said)
    return PrefixStore(f"{prefix}/run", _hosted[key])


def _host(meeting: Meeting) -> Store:
    """The store, listening on the loopback interface alone where the address that the ranks were given is a loopback
    address."""
    try:
        listener = _listen(meeting.address, meeting.port)
    except OSError as error:
        reason = "another run or program has this port" if error.errno == errno.EADDRINUSE else str(error)
        raise ClusterError(
            f"rank 0 cannot listen at {meeting.place}: {reason}. Set MASTER_PORT (torchrun: --master-port) to a port "
            f"that is free, the same for all ranks"
        ) from error
    return TCPStore(
        meeting.address, meeting.port, meeting.world_size, True, timedelta(seconds=meeting.timeout_s),
        wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach(),
    )  # fmt: skip


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET
    if address == "::1" or (address not in LOOPBACK and socket.has_dualstack_ipv6()):
        family = socket.AF_INET6
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address in LOOPBACK:
            listener.bind(("::1" if address == "::1" else "127.0.0.1", port))
        else:
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind(("", port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _join(meeting: Meeting) -> Store:
    """A connection to the store. Raises ClusterError when nobody listens, or something that is no store."""
    begun = time.monotonic()
    while True:
        try:
            socket.create_connection((meeting.address, meeting.port), timeout=ANSWER_S).close()
            break
        except OSError as error:
            if time.monotonic() - begun > meeting.timeout_s:
                raise ClusterError(
                    f"rank {meeting.rank} of {meeting.world_size} found nobody at {meeting.place} for "
                    f"{meeting.timeout_s:g} s ({error}): rank 0, which listens there, did not come, or could not "
                    f"listen. Look at what rank 0 said; check MASTER_ADDR and MASTER_PORT; give wait_timeout_s more "
                    f"time if ranks start later than that"
                ) from None
            time.sleep(LOOK_S)
    return _within(
        ANSWER_S,
        lambda: TCPStore(
            meeting.address, meeting.port, meeting.world_size, False, timedelta(seconds=ANSWER_S / 2),
            wait_for_workers=False,
        ),
        f"what listens at {meeting.place} is no store of a run: another program has this port, and rank 0 could "
        f"not take it. Set MASTER_PORT (torchrun: --master-port) to a port that is free, the same for all ranks",
    )  # fmt: skip


def _within(seconds: float, work: Callable[[], Result], otherwise: str) -> Result:
    """The result of ``work``, which runs on a thread of its own: a store that does not answer blocks its caller for
    good.

    Raises ClusterError with ``otherwise`` when it takes too long, or when the store breaks the connection.
    """
    made: list[Result] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            made.append(work())
        except BaseException as error:  # whatever it is, it belongs to the caller
            failed.append(error)

    thread = threading.Thread(target=run, name="shardwright-rendezvous", daemon=True)
    thread.start()
    thread.join(seconds)
    if made:
        return made[0]
    if failed and not isinstance(failed[0], RuntimeError):
        raise failed[0]
    raise ClusterError(otherwise) from (failed[0] if failed else None)


def _arrive(meeting: Meeting, store: Any) -> str:
    """Write down that this rank came, and wait for the verdict. Returns the error, empty where there is none."""
    mine = Arrival(meeting.rank, meeting.world_size, socket.gethostname(), os.getpid(), uuid4().hex)
    is_late = bool(store.check([_VERDICT]))
    store.append(_LOG, json.dumps(asdict(mine)) + "\n")
    if is_late and meeting.rank == 0:
        return _late(meeting)  # the agent's store has the verdict of another rank 0
    if meeting.rank == 0:
        said, tokens = _all_come(meeting, store)
        store.set(_VERDICT, json.dumps([said, sorted(tokens)]))
        if said:
            _let_hear(store)
        return said
    begun = time.monotonic()
    while not store.check([_VERDICT]):
        if time.monotonic() - begun > meeting.timeout_s + LATER_S:
            return (
                f"rank 0 did not come to {meeting.place} within {meeting.timeout_s:g} s, or waits for others there: "
                f"look at what it said"
            )
        time.sleep(LOOK_S)
    said, tokens = json.loads(store.get(_VERDICT))
    store.add(_HEARD, 1)
    if not said and mine.token not in tokens:
        return _late(meeting)
    return str(said)


def _let_hear(store: Any) -> None:
    """Wait a little until all ranks that came have heard why this one ends: the store is gone with it."""
    begun = time.monotonic()
    while time.monotonic() - begun < LATER_S:
        if store.add(_HEARD, 0) >= len(store.get(_LOG).splitlines()) - 1:
            return
        time.sleep(LOOK_S)


def _late(meeting: Meeting) -> str:
    return (
        f"the run at {meeting.place} has all its ranks already: rank {meeting.rank} was started twice, or another run "
        f"has this port. Set MASTER_PORT (torchrun: --master-port) to a port that is free"
    )


def _all_come(meeting: Meeting, store: Store) -> tuple[str, set[str]]:
    """Wait until every rank has come. Returns the error, empty where there is none, and the tokens of the ranks that
    came."""
    begun = time.monotonic()
    while True:
        arrivals = [Arrival(**json.loads(line)) for line in store.get(_LOG).decode().splitlines()]
        came: dict[int, Arrival] = {}
        for arrival in arrivals:
            first = came.setdefault(arrival.rank, arrival)
            if arrival.world_size != meeting.world_size:
                return (
                    f"rank {arrival.rank} ({arrival}) was started for a world of {arrival.world_size} ranks, and rank "
                    f"0 for one of {meeting.world_size}: give every rank the same WORLD_SIZE, and every run a "
                    f"MASTER_PORT of its own"
                ), set()
            if first is not arrival:
                return (
                    f"rank {arrival.rank} came twice, as {first} and as {arrival}: give every process a RANK of its "
                    f"own, and every run a MASTER_PORT of its own"
                ), set()
        if len(came) == meeting.world_size:
            return "", {arrival.token for arrival in arrivals}
        if time.monotonic() - begun > meeting.timeout_s:
            missing = [rank for rank in range(meeting.world_size) if rank not in came]
            return (
                f"ranks {', '.join(map(str, missing))} of {meeting.world_size} did not come to {meeting.place} within "
                f"{meeting.timeout_s:g} s: look at what they said, start as many processes as WORLD_SIZE says, or "
                f"give wait_timeout_s more time"
            ), set()
        time.sleep(LOOK_S if meeting.world_size <= 64 else 10 * LOOK_S)
