"""The rendezvous of a run's processes: `init` in place of `jax.distributed.initialize`.

JAX waits 300 s for processes that do not come and 100 s for those that are gone, ends all others by an abort, and names
none or a number. Here they meet at a hub first, which names who is missing, came twice, or was started for another
number of processes; it stays beside them and hosts JAX's own service, so that this outlasts process 0 too.
"""

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax

from shardwright.backends.jax.machine.heartbeat import Pulse
from shardwright.backends.jax.machine.ports import free_port
from shardwright.backends.jax.machine.process_transfers import open_socket
from shardwright.core.errors import ClusterError

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
LATER_S = 5.0
"""The time that the processes wait longer than the hub, so that they hear its findings."""
LOOK_S = 0.05
PATIENCE = 10
"""The factor of JAX's limit for silent processes over ours: JAX's is to come later."""
_HUB = """
import json, os, sys
from jaxlib import _jax
from shardwright.backends.rendezvous_store import serve
given = json.loads(sys.argv[1])
service = _jax.get_distributed_runtime_service(
    given["bind"], given["processes"], heartbeat_timeout=given["patience_s"], shutdown_timeout=given["shutdown_s"]
)
serve(given["descriptor"], given["processes"], given["timeout_s"], given["place"], {"port": given["port"]})
os._exit(0)
"""

_pulse: Pulse | None = None


def current() -> Pulse | None:
    """The pulse of this process, if `init` began one."""
    return _pulse


def init(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    wait_timeout_s: float = 60.0,
) -> None:
    """Start a run of several processes: every one calls this before it uses JAX's devices.

    coordinator_address: "host:port" where process 0 listens, on the loopback interface alone if that is what the host
        is. Default: JAX_COORDINATOR_ADDRESS. num_processes, process_id: default JAX_NUM_PROCESSES, JAX_PROCESS_ID.
    local_device_ids: as in `jax.distributed.initialize`.
    wait_timeout_s: how long the processes that have come wait for the others, and how long one may give no sign of life
        later. Long steps, compilations and files are no silence.

    Raises ClusterError on every process that can be told when the port is taken, or processes do not come, come twice,
    or were started for another number of them. From then on a process that fails, ends or falls silent is named to all
    others, in a PeerError of their next step and on stderr, and ends those that are blocked in a collective.
    """
    global _pulse
    address = coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    processes = _number("num_processes", num_processes, "JAX_NUM_PROCESSES")
    process = _number("process_id", process_id, "JAX_PROCESS_ID")
    host, port = _split(address)
    if processes < 1 or not 0 <= process < processes:
        raise ClusterError(
            f"process_id={process} of num_processes={processes}: expected a number from 0 to num_processes - 1"
        )
    limit = isinstance(wait_timeout_s, int | float) and not isinstance(wait_timeout_s, bool) and wait_timeout_s
    if not 0 < limit < 1e6:
        raise ClusterError(f"wait_timeout_s={wait_timeout_s!r}: expected a number of seconds above 0")
    if _pulse is not None or jax.distributed.is_initialized():
        raise ClusterError("the run has begun already: call sw.init once, in place of jax.distributed.initialize")
    if process == 0:
        _start_hub(host, port, processes, float(wait_timeout_s))
    connection, told = _meet(host, port, processes, process, float(wait_timeout_s))
    pulse = Pulse(connection, process, f"{host}:{port}", float(wait_timeout_s))
    pulse.start()
    own = str(connection.getsockname()[0])
    open_socket(own, free_port(own))
    with pulse.explained("jax.distributed.initialize"):
        jax.distributed.initialize(
            f"{host}:{told['port']}", processes, process, local_device_ids,
            initialization_timeout=max(1, int(wait_timeout_s)),
            heartbeat_timeout_seconds=max(10, int(PATIENCE * wait_timeout_s)),
            coordinator_bind_address=f"127.0.0.1:{free_port('127.0.0.1')}",  # the hub has the one that is used
        )  # fmt: skip
    _pulse = pulse
    atexit.register(_at_exit, pulse)


def shutdown() -> None:
    """End the run of this process: the others are told, and JAX waits for them to come to their end too. After a
    failure nobody is waited for."""
    global _pulse
    pulse, _pulse = _pulse, None
    if pulse is not None:
        pulse.leave()
        if not pulse.has_failed:
            jax.distributed.shutdown()
            pulse.close()


def _at_exit(pulse: Pulse) -> None:
    """End the run at the exit of the process, and after a failure the process too: JAX would wait for processes that do
    not come any more."""
    if not pulse.is_own:
        return
    shutdown()
    if pulse.has_failed:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)


def _number(name: str, given: Any, variable: str) -> int:
    value = os.environ.get(variable) if given is None else given
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ClusterError(f"{name}={value!r}: expected a whole number; give {name}, or set {variable}")
    return value


def _split(address: Any) -> tuple[str, int]:
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ClusterError(
            f"coordinator_address={address!r}: expected 'host:port', that of process 0; give it, or set "
            "JAX_COORDINATOR_ADDRESS"
        )
    return host.strip("[]"), int(port)


def _family(host: str) -> socket.AddressFamily:
    return (
        socket.AF_INET6 if host == "::1" or (host not in LOOPBACK and socket.has_dualstack_ipv6()) else socket.AF_INET
    )


def _start_hub(host: str, port: int, processes: int, timeout_s: float) -> None:
    """Start the hub, which listens at the given address. JAX's service listens at a port that the hub tells all."""
    family = _family(host)
    listener = socket.socket(family, socket.SOCK_STREAM)
    local = {"::1": "::1"}.get(host, "127.0.0.1") if host in LOOPBACK else ""
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and not local:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((local, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ClusterError(
            f"process 0 cannot listen at {host}:{port}: {error.strerror or error}. Give a coordinator_address whose "
            "port is free, the same to all processes"
        ) from error
    service = free_port(local or "0.0.0.0")
    bind = f"[{local}]:{service}" if local == "::1" else f"{local}:{service}" if local else f"[::]:{service}"
    given = {
        "bind": bind, "port": service, "processes": processes, "timeout_s": timeout_s, "place": f"{host}:{port}",
        "descriptor": listener.fileno(), "patience_s": max(10, int(PATIENCE * timeout_s)), "shutdown_s": 300,
    }  # fmt: skip
    subprocess.Popen(
        [sys.executable, "-c", _HUB, json.dumps(given)], pass_fds=[listener.fileno()], start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    listener.close()


def _meet(host: str, port: int, processes: int, process: int, timeout_s: float) -> tuple[socket.socket, dict[str, Any]]:
    """A connection to the hub, and its words once all had come."""
    begun = time.monotonic()
    place = f"{host}:{port}"
    hello = {"process": process, "processes": processes, "host": socket.gethostname(), "pid": os.getpid()}
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=timeout_s + LATER_S)
            break
        except OSError as error:
            if time.monotonic() - begun > timeout_s:
                raise ClusterError(
                    f"process {process} of {processes} found nobody at {place} for {timeout_s:g} s ({error}): process "
                    "0, which listens there, did not come, or could not listen. Look at what it said, check "
                    "coordinator_address, or give wait_timeout_s more time"
                ) from None
            time.sleep(LOOK_S)
    other = (
        f"what listens at {place} does not answer as the hub of a run: another program has this port, or the hub "
        "ended. Give a coordinator_address whose port is free, the same to all processes"
    )
    try:
        connection.sendall(json.dumps(hello).encode() + b"\n")
        told = _line(connection)
        wrong = str(told["wrong"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        connection.close()
        raise ClusterError(other) from error
    if wrong:
        connection.close()
        raise ClusterError(wrong)
    connection.settimeout(None)
    return connection, told


def _line(connection: socket.socket) -> dict[str, Any]:
    """One line of a connection, read byte by byte, so that nothing after it is taken."""
    found = b""
    while not found.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(found) > 1 << 16:
            raise ValueError("no line")
        found += byte
    told: dict[str, Any] = json.loads(found)
    return told
