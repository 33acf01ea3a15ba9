"""The hub where the processes of a run meet, and hear of each other while it goes on.

The hub is a process of its own beside process 0, so that it outlasts each of the run's. All hold a connection to it and
say every second what they do; a process that ends breaks the connection, one that is stopped falls silent, and all
others are told. Nothing that comes in is more than text. Lines of JSON go both ways.
"""

import asyncio
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEAT_S = 1.0
LATE_S = 5.0
"""The delay of the hub's own look from which on it was itself stopped, and knows nothing of the others."""
LINE_BYTES = 1 << 16


@dataclass(slots=True)
class _Member:
    host: str
    pid: int
    writer: asyncio.StreamWriter
    heard: float
    said: str = "starting"
    is_there: bool = True
    """Whether the process is waited for: it has not failed or left."""
    is_open: bool = True
    """Whether the process has not ended."""
    hears: bool = False
    """Whether the process was told that all have come."""

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


class Hub:
    """The hub of one run, with what all its processes have told.

    Args:
        processes: the number of processes that come.
        timeout_s: the time that those that have come wait for the others, and that one may be silent after that.
        place: the address where they meet, for messages.
        more: values that all are told once they have met.
    """

    def __init__(self, processes: int, timeout_s: float, place: str, more: dict[str, Any]) -> None:
        self.processes, self.timeout_s, self.place, self.more = processes, timeout_s, place, more
        self.members: dict[int, _Member] = {}
        self.faults: list[dict[str, Any]] = []
        self.left: list[int] = []
        self.wrong = ""
        self.decided = asyncio.Event()
        self.begun = time.monotonic()

    async def serve(self, listener: socket.socket) -> None:
        """Serve the processes until nobody is there any more."""
        server = await asyncio.start_server(self._connected, sock=listener, limit=LINE_BYTES)
        looked = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_S)
            now = time.monotonic()
            if now - looked > LATE_S:
                for member in self.members.values():
                    member.heard = now
            looked = now
            if not self.decided.is_set() and now - self.begun > self.timeout_s:
                missing = [str(p) for p in range(self.processes) if p not in self.members]
                self._decide(
                    f"process{'es' if len(missing) > 1 else ''} {', '.join(missing)} of {self.processes} did not come "
                    f"to {self.place} within {self.timeout_s:g} s: look at what they said, start as many processes as "
                    "num_processes says, or give wait_timeout_s more time"
                )
            if self.decided.is_set():
                self._look(now)
                if self.wrong or not any(m.is_open for m in self.members.values()):
                    break
        await asyncio.sleep(BEAT_S)
        server.close()

    def _look(self, now: float) -> None:
        for process, member in self.members.items():
            if member.is_there and now - member.heard > self.timeout_s and not _is_at_work(member):
                silent_s = now - member.heard
                said = f"has given no sign of life for {silent_s:.0f} s; the last was '{member.said}'"
                self._fault(process, said)
        self._tell_all()

    def _tell_all(self) -> None:
        line = json.dumps({"faults": self.faults, "left": self.left}).encode() + b"\n"
        for member in self.members.values():
            if (
                member.hears
                and not member.writer.is_closing()
                and member.writer.transport.get_write_buffer_size() < LINE_BYTES
            ):
                member.writer.write(line)

    def _fault(self, process: int, said: str) -> None:
        self.members[process].is_there = self.members[process].is_open = False
        self.faults.append({"process": process, "text": f"process {process} ({self.members[process]}) {said}"})
        self._tell_all()

    def _decide(self, wrong: str) -> None:
        if not self.decided.is_set():
            self.wrong = wrong
            self.decided.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._converse(reader, writer)
        except (OSError, ValueError, KeyError, TypeError):
            pass  # what speaks no such lines is nobody of the run
        finally:
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = json.loads(await reader.readline())
        process, member = (
            int(hello["process"]),
            _Member(str(hello["host"]), int(hello["pid"]), writer, time.monotonic()),
        )
        before = self.members.get(process)
        if self.decided.is_set():
            wrong = self.wrong or (
                f"the run at {self.place} has all its processes already: process {process} was started twice, or "
                "another run has this port; give every run a coordinator_address of its own"
            )
            await _send(writer, {"wrong": wrong})
            return
        if before is not None:
            self._decide(
                f"process {process} came twice, as {before} and as {member}: give every process a process_id of its "
                "own, and every run a coordinator_address of its own"
            )
        elif int(hello["processes"]) != self.processes:
            self._decide(
                f"process {process} ({member}) was started as one of {hello['processes']}, and process 0 as one of "
                f"{self.processes}: give all the same num_processes, and every run a coordinator_address of its own"
            )
        else:
            self.members[process] = member
            if len(self.members) == self.processes:
                self._decide("")
        await self.decided.wait()
        await _send(writer, {"wrong": self.wrong, **self.more})
        if not self.wrong:
            member.hears = True
            await self._listen(process, member, reader)

    async def _listen(self, process: int, member: _Member, reader: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await reader.readline()
            except OSError:
                line = b""
            if not member.is_open:
                return
            if not line and member.is_there:
                self._fault(process, f"ended without a word; the last was '{member.said}'")
            member.is_open = bool(line)
            if not line:
                return
            told = json.loads(line)
            member.heard = time.monotonic()
            if "said" in told:
                member.said = str(told["said"])
            elif "fault" in told:
                self._fault(process, str(told["fault"]))
            elif "left" in told:
                member.is_there = False
                self.left.append(process)
                self._tell_all()


async def _send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()


def _is_at_work(member: _Member) -> bool:
    """Whether a process of this host is there and not stopped. Such a process holds the interpreter, and cannot
    tell."""
    if member.host != socket.gethostname():
        return False
    try:
        said = Path(f"/proc/{member.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return said.rpartition(")")[2].split()[0] not in ("T", "t", "Z", "X")


def serve(descriptor: int, processes: int, timeout_s: float, place: str, more: dict[str, Any]) -> None:
    """Run a hub on a listening socket that was handed down, until nobody is there any more."""
    os.set_inheritable(descriptor, False)
    listener = socket.socket(fileno=descriptor)

    async def run() -> None:
        await Hub(processes, timeout_s, place, more).serve(listener)

    asyncio.run(run())
