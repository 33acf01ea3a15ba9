"""The processes of this host, by their numbers: the times when they started, and whether they are at work."""

import os
import socket
from pathlib import Path


def host_name() -> str:
    """The name of this host, the same for all processes that see each other's numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"  # nobody else's


def _stat(process: int) -> list[str]:
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def birth_of(process: int) -> str:
    """The time when a process started, in clock ticks since the host did; empty when it is gone."""
    found = _stat(process)
    return found[19] if found else ""


def state_of(process: int, born: str) -> str:
    """The state of a process on this host, by Linux's letters; empty when it is gone."""
    found = _stat(process)
    return found[0] if found and found[19] == born else ""


def is_at_work(process: int, born: str) -> bool:
    """Whether a silent process is neither stopped nor gone: then something holds its interpreter."""
    return state_of(process, born) not in ("", "T", "t", "Z", "X")
