"""Ports for sockets that JAX opens by itself, later."""

import contextlib
import random
import socket
from pathlib import Path


def free_port(host: str) -> int:
    """A port of this host's that is free, where there is one beside those that systems give to outgoing connections and
    to whoever asks for any: JAX may bind it only minutes later, at the first transfer, and it cannot be held until
    then."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports = [port for port in range(10_000, 65_536) if not _EPHEMERAL[0] <= port <= _EPHEMERAL[1]]
    drawn = random.SystemRandom()  # the user's own random numbers stay as they are
    for port in [drawn.choice(ports) for _ in range(64)] if ports else []:
        with socket.socket(family) as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _ephemeral_ports() -> tuple[int, int]:
    """The first and last port that the system gives out by itself: Linux tells, elsewhere IANA's range (RFC 6335) and
    Linux's default together."""
    with contextlib.suppress(OSError, ValueError):
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(first), int(last)
    return 32_768, 65_535


_EPHEMERAL = _ephemeral_ports()
