"""Answers to calls of ``torch.cuda`` on a machine without CUDA, for scripts that take a GPU for granted.

Opt-in: ``python -m shardwright.compat`` and `install` alone. ``torch.cuda.is_available()`` stays False, so that code
that asks is told the truth; under ``--cuda-is-available`` files of the script's folder, and they alone, are told True.

- ``set_device``, ``synchronize``, ``empty_cache``, ``ipc_collect`` and the resets of peaks do nothing;
- ``current_device`` is 0;
- figures of memory are those of the process: its resident bytes, and their peak;
- ``.cuda()`` and ``.to("cuda")`` of tensors and modules leave them on the CPU, ``pin_memory()`` as they are;
- ``torch.load(…, map_location="cuda:0")`` loads to the CPU.

Everything else of ``torch.cuda`` is as it was, and most of it raises torch's own error.
"""

import functools
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

_NOTHING = (
    "set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats", "reset_max_memory_allocated",
    "reset_max_memory_cached", "reset_accumulated_memory_stats",
)  # fmt: skip
_NOW = ("memory_allocated", "memory_reserved", "memory_cached")
_PEAK = ("max_memory_allocated", "max_memory_reserved", "max_memory_cached")
_installed = False


def install(told_available: Path | None = None) -> bool:
    """Answer these calls from now on; nothing where there is a CUDA device. Whether they are answered. A second call
    changes nothing. Code in files of the folder ``told_available`` is told that CUDA is available."""
    global _installed
    if torch.cuda.is_available():
        return False
    if _installed:
        return True
    _installed = True
    cuda: Any = torch.cuda
    for name in _NOTHING:
        setattr(cuda, name, _giving(name, lambda: None))
    for name in _NOW:
        setattr(cuda, name, _giving(name, _resident_bytes))
    for name in _PEAK:
        setattr(cuda, name, _giving(name, _peak_bytes))
    cuda.current_device = _giving("current_device", lambda: 0)
    if told_available is not None:
        cuda.is_available = _available_to(told_available.resolve(), torch.cuda.is_available)
    for kind in (torch.Tensor, nn.Module):
        patched: Any = kind
        patched.cuda = lambda self, *args, **kwargs: self
        patched.to = _on_cpu(patched.to)
    anything: Any = torch
    anything.load = _on_cpu(torch.load)
    tensor: Any = torch.Tensor
    tensor.pin_memory = lambda self, *args, **kwargs: self
    return True


def _giving(name: str, answer: Callable[[], Any]) -> Callable[..., Any]:
    """A function of that name; each is one of its own, as torch tells its functions apart by identity."""

    def answered(*args: Any, **kwargs: Any) -> Any:
        return answer()

    answered.__name__ = answered.__qualname__ = name
    return answered


def _available_to(folder: Path, is_available: Callable[[], bool]) -> Callable[[], bool]:
    """``is_available``, True where a file directly in ``folder`` calls it."""

    @functools.cache
    def is_inside(name: str) -> bool:
        return Path(name).resolve().parent == folder

    @functools.wraps(is_available)
    def answered() -> bool:
        return is_inside(sys._getframe(1).f_code.co_filename) or is_available()

    return answered


def _on_cpu(to: Callable[..., Any]) -> Callable[..., Any]:
    """``to``, or another function that takes devices behind its first argument, with the CPU in the place of CUDA
    devices."""

    @functools.wraps(to)
    def moved(first: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(_device(one) for one in args)
        return to(first, *args, **{name: _device(one) for name, one in kwargs.items()})

    return moved


def _device(item: Any) -> Any:
    is_cuda = isinstance(item, torch.device) and item.type == "cuda"
    is_cuda = is_cuda or (isinstance(item, str) and item.partition(":")[0] == "cuda")
    return torch.device("cpu") if is_cuda else item


def _resident_bytes() -> int:
    """The bytes of this process that are in memory now; where the system does not say, their peak."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return _peak_bytes()
    return pages * resource.getpagesize()


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
