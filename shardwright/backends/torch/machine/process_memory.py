"""The memory of other processes of this host, read by `process_vm_readv`.

A process may read those that it may trace, of the same user. Yama, where it restricts that to descendants (Ubuntu's
default), lets a process name another one that may trace it, along with that one's descendants: ranks name the launcher
that started them all (prctl(2), PR_SET_PTRACER), so that they may read each other and nobody else may.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_MOST_BYTES = 2**30
"""The most bytes of one system call."""
_SET_TRACER = 0x59616D61


class _Vector(ctypes.Structure):
    """The `iovec` of the C library."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _system_call() -> Callable[..., int] | None:
    """The C library's `process_vm_readv`; None where there is none."""
    try:
        found = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (AttributeError, OSError, TypeError):
        return None
    many = ctypes.POINTER(_Vector)
    found.argtypes = (ctypes.c_int, many, ctypes.c_ulong, many, ctypes.c_ulong, ctypes.c_ulong)
    found.restype = ctypes.c_ssize_t
    call: Callable[..., int] = found
    return call


_READ = _system_call()


def read(process: int, source: int, target: int, size_bytes: int) -> None:
    """Copy bytes from the memory of another process.

    Args:
        source: the address there.
        target: the address here.

    Raises:
        RuntimeError: the process is gone, may not be read, or has no such memory.
    """
    if _READ is None:
        raise RuntimeError("this system has no process_vm_readv")
    done = 0
    while done < size_bytes:
        length = min(size_bytes - done, _MOST_BYTES)
        here, there = _Vector(target + done, length), _Vector(source + done, length)
        count = _READ(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            reason = os.strerror(ctypes.get_errno()) if count < 0 else "it has no such memory"
            raise RuntimeError(f"the memory of process {process} could not be read: {reason}")
        done += count


def host_name() -> str:
    """A name of this host, as processes see it that see each other by one number; empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def is_there(process: int, address: int, expected: bytes) -> bool:
    """Whether this process may read these bytes at an address of another one."""
    found = ctypes.create_string_buffer(len(expected))
    try:
        read(process, address, ctypes.addressof(found), len(expected))
    except RuntimeError:
        return False
    return found.raw == expected


def let_siblings_read() -> None:
    """Allow what the parent of this process started to read this process, where Yama asks for that."""
    parent = os.getppid()
    if parent > 1:
        with suppress(AttributeError, OSError, TypeError):  # without Yama the call is refused, and none is needed
            ctypes.CDLL(None).prctl(_SET_TRACER, ctypes.c_ulong(parent), 0, 0, 0)


_OFFERS = """
import ctypes, sys
from shardwright.backends.torch.machine.process_memory import let_siblings_read
let_siblings_read()
buffer = ctypes.create_string_buffer(b"what a sibling reads")
print(ctypes.addressof(buffer), flush=True)
sys.stdin.read()
"""
_READS = """
import sys
from shardwright.backends.torch.machine.process_memory import is_there
sys.exit(not is_there(int(sys.argv[1]), int(sys.argv[2]), b"what a sibling reads"))
"""


def siblings_can_read() -> bool:
    """Whether two processes that this one starts may read each other, as the ranks of one launcher do: by trying it."""
    command = [sys.executable, "-c"]
    with subprocess.Popen([*command, _OFFERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as offers:
        assert offers.stdout is not None
        assert offers.stdin is not None
        address = offers.stdout.readline().strip()
        reads = subprocess.run([*command, _READS, str(offers.pid), address], capture_output=True, check=False)
        offers.stdin.close()
    return reads.returncode == 0
