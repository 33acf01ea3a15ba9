"""Activation checkpointing that a user asks for: calls of `torch.utils.checkpoint` in a model, and SageMaker's marks on
modules.

Capture notes which module calls lie in them, so that a plan recomputes these, counts them, and a runtime recomputes
each once: inside of what a plan recomputes, the model's own checkpoints are plain calls.
"""

import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from shardwright.backends.torch.compat import CHECKPOINTS
from shardwright.core.errors import PlanWarning, ShardwrightError

_marks: WeakSet[nn.Module] = WeakSet()

Around = Callable[[bool], AbstractContextManager[None]]
"""Makes the context of one checkpointed call; given whether all of it is computed again, and not by a policy."""


def set_activation_checkpointing(
    module: nn.Module, preserve_rng_state: bool = True, pack_args_as_tuple: bool = False, strategy: str = "each"
) -> None:
    """Mark a module whose calls are to be computed again in the backward pass; of an ``nn.Sequential`` or
    ``nn.ModuleList``, each of its modules.

    The plan takes the marks as pins, where it is not told what to recompute. Call it before the model is captured or
    planned, on the modules that are: a copy of a model has no marks.

    Args:
        preserve_rng_state: random numbers are always drawn alike again.
        pack_args_as_tuple: arguments go on as they are, tuples too.
        strategy: "each"; "contiguous" and "group_N" as well, which keep the input of every module and not of every
            group, with a warning.

    Raises:
        ShardwrightError: an argument is no module, or random numbers need not be drawn alike, or the strategy is
            unknown.
    """
    require_marks("set_activation_checkpointing", module, preserve_rng_state, pack_args_as_tuple, strategy)
    row = list(module) if isinstance(module, nn.Sequential | nn.ModuleList) else None
    if row is not None:
        warn_of_groups(module, strategy)
    for each in (module,) if row is None else row:
        _marks.add(each)


def require_marks(call: str, module: object, preserve_rng_state: bool, packs: object, strategy: object) -> None:
    """Raise ShardwrightError for arguments of a call of SageMaker's that it cannot have."""
    if not isinstance(module, nn.Module):
        raise ShardwrightError(f"{call} takes a torch.nn.Module, not a {type(module).__name__}")
    if not preserve_rng_state:
        raise ShardwrightError(
            "preserve_rng_state=False: a recomputed module draws the same random numbers again, or its gradients would "
            "be wrong; leave it out"
        )
    if not isinstance(packs, bool):
        raise ShardwrightError(f"pack_args_as_tuple={packs!r}: expected True or False")
    group = re.fullmatch(r"group_([1-9]\d*)", strategy) if isinstance(strategy, str) else None
    if strategy not in ("each", "contiguous") and group is None:
        raise ShardwrightError(f"strategy={strategy!r}: expected 'each', 'contiguous' or 'group_N', as 'group_2'")


def warn_of_groups(row: nn.Module, strategy: str) -> None:
    """Warn of a strategy that is about groups of modules."""
    if strategy not in ("each", "group_1"):
        warnings.warn(
            f"strategy={strategy!r}: each module of the {type(row).__name__} is computed again by itself, and keeps "
            f"its own input, where a group would keep that of its first module alone",
            PlanWarning,
            stacklevel=3,
        )


def marked_paths(model: nn.Module) -> frozenset[str]:
    """The paths of the marked modules of a model."""
    return frozenset(path for path, module in model.named_modules(remove_duplicate=False) if module in _marks)


class _Stack(threading.local):
    """What is around checkpoints of this thread that are plain calls, innermost last."""

    def __init__(self) -> None:
        self.around: list[Around | None] = []


_plain = _Stack()
_lock = threading.Lock()
_originals: dict[str, Any] = {}
_inside = 0
"""The number of contexts of all threads in which checkpoints are plain calls of these threads."""


@contextmanager
def plain_checkpoints(around: Around | None = None) -> Iterator[None]:
    """A context in which calls that a model checkpoints in this thread are plain calls, each in a context of
    ``around``."""
    global _inside
    with _lock:
        if _inside == 0:
            _originals.update({name: getattr(torch_checkpoint, name) for name in CHECKPOINTS})
            for name, instead in zip(CHECKPOINTS, (_generator, _Function), strict=True):
                setattr(torch_checkpoint, name, instead)
        _inside += 1
    _plain.around.append(around)
    try:
        yield
    finally:
        _plain.around.pop()
        with _lock:
            _inside -= 1
            if _inside == 0:
                for name, original in _originals.items():
                    setattr(torch_checkpoint, name, original)


def _entered(context_fn: Any) -> AbstractContextManager[None]:
    around = _plain.around[-1]
    return nullcontext() if around is None else around(context_fn is torch_checkpoint.noop_context_fn)


def _generator(*given: Any, **named: Any) -> Any:
    """In place of the generator around a checkpointed call."""
    if not _plain.around:
        return _originals[CHECKPOINTS[0]](*given, **named)
    context_fn = named.get("context_fn", given[2] if len(given) > 2 else torch_checkpoint.noop_context_fn)

    def plain() -> Iterator[None]:
        with _entered(context_fn):
            yield

    return plain()


class _Function:
    """In place of the autograd function of reentrant checkpoints."""

    @staticmethod
    def apply(function: Callable[..., Any], preserves_rng: bool, *args: Any) -> Any:
        if not _plain.around:
            return _originals[CHECKPOINTS[1]].apply(function, preserves_rng, *args)
        with _entered(torch_checkpoint.noop_context_fn):
            return function(*args)
