"""Activation checkpointing that a user asks for: calls of `torch.utils.checkpoint` in a model, and SageMaker's marks on
modules.

Capture notes which module calls lie in them, so that a plan recomputes these, counts them, and a runtime recomputes
each once: inside of what a plan recomputes, the model's own checkpoints are plain calls.
"""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from shardwright.backends.torch.capture.replaced import replaced
from shardwright.backends.torch.compat import CHECKPOINTS
from shardwright.core.errors import PlanWarning, ShardwrightError

_marks: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()

Around = Callable[[bool], AbstractContextManager[None]]
"""Makes the context of one checkpointed call; given whether all of it is computed again, and not by a policy."""


def set_activation_checkpointing(
    module: nn.Module, preserve_rng_state: bool = True, pack_args_as_tuple: bool = False, strategy: str = "each"
) -> None:
    """Mark a module whose calls are to be computed again in the backward pass; of an ``nn.Sequential`` or
    ``nn.ModuleList``, each of its modules.

    The plan takes the marks as pins, where it is not told what to recompute. Call it before the model is captured or
    planned.

    Args:
        preserve_rng_state: random numbers are always drawn alike again.
        pack_args_as_tuple: arguments go on as they are, tuples too.
        strategy: "each"; "contiguous" and "group_N" as well, which keep the input of every module and not of every
            group, with a warning.

    Raises:
        ShardwrightError: an argument is no module, or random numbers need not be drawn alike, or the strategy is
            unknown.
    """
    if not isinstance(module, nn.Module):
        raise ShardwrightError(f"set_activation_checkpointing marks a torch.nn.Module, not a {type(module).__name__}")
    if not preserve_rng_state:
        raise ShardwrightError(
            "preserve_rng_state=False: a recomputed module draws the same random numbers again, or its gradients would "
            "be wrong; leave it out"
        )
    if not isinstance(pack_args_as_tuple, bool):
        raise ShardwrightError(f"pack_args_as_tuple={pack_args_as_tuple!r}: expected True or False")
    group = re.fullmatch(r"group_([1-9]\d*)", strategy) if isinstance(strategy, str) else None
    if strategy not in ("each", "contiguous") and group is None:
        raise ShardwrightError(f"strategy={strategy!r}: expected 'each', 'contiguous' or 'group_N', as 'group_2'")
    row = list(module) if isinstance(module, nn.Sequential | nn.ModuleList) else None
    if row is not None and strategy not in ("each", "group_1"):
        warnings.warn(
            f"strategy={strategy!r}: each module of the {type(module).__name__} is computed again by itself, and keeps "
            f"its own input, where a group would keep that of its first module alone",
            PlanWarning,
            stacklevel=2,
        )
    for each in (module,) if row is None else row:
        _marks[each] = strategy


def marked_paths(model: nn.Module) -> frozenset[str]:
    """The paths of the marked modules of a model."""
    return frozenset(path for path, module in model.named_modules(remove_duplicate=False) if module in _marks)


@contextmanager
def plain_checkpoints(around: Around | None = None) -> Iterator[None]:
    """A context in which calls that a model checkpoints are plain calls, each in a context of ``around``."""

    def entered(context_fn: Any) -> AbstractContextManager[None]:
        is_whole = context_fn is torch_checkpoint.noop_context_fn
        return nullcontext() if around is None else around(is_whole)

    def generator(*given: Any, **named: Any) -> Iterator[None]:
        with entered(named.get("context_fn", given[2] if len(given) > 2 else torch_checkpoint.noop_context_fn)):
            yield

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
            with entered(torch_checkpoint.noop_context_fn):
                return function(*args)

    with ExitStack() as stack:
        for name, instead in zip(CHECKPOINTS, (generator, Plain), strict=True):
            if hasattr(torch_checkpoint, name):
                stack.enter_context(replaced(torch_checkpoint, name, instead))
        yield
