"""Which results of a recomputed unit stay: those of its products and of attention, by a mode that goes by op."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext
from torch.utils.checkpoint import create_selective_checkpoint_contexts as selective_contexts

from shardwright.core.values.recompute_modes import NAMED, kept_modules, kind_of

_PRODUCTS = {
    *(getattr(torch.ops.aten, name) for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm")),
}
"""The ops whose results are kept op by op, beside attention."""
_ATTENTION = "_scaled_dot_product"
"""What the names of attention kernels begin with."""


class KeptResults:
    """The policy of one call of a unit, as torch's selective checkpoint asks for it op by op.

    Args:
        mode: a mode that goes by op.
        unit: the module whose call it is.
    """

    def __init__(self, mode: str, unit: nn.Module) -> None:
        self.kind = kind_of(mode)
        self._names = kept_modules(mode) if self.kind == NAMED else frozenset[str]()
        self._paths = {id(module): path for path, module in unit.named_modules()} if self.kind == NAMED else {}
        self._running = _Running()
        self._seen = {False: 0, True: 0}

    def __call__(self, context: SelectiveCheckpointContext, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        packet = op.overloadpacket
        is_attention = op.namespace == "aten" and packet.__name__.startswith(_ATTENTION)
        if packet not in _PRODUCTS and not is_attention:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if self.kind == NAMED:
            running = self._running.paths
            is_kept = (running[-1] if running else "") in self._names
        else:
            self._seen[context.is_recompute] += not is_attention
            is_kept = is_attention or self.kind != "alternate" or self._seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The contexts of the unit's forward and of its second run, as ``context_fn`` of torch's checkpoint gives
        them."""
        keeping, kept = selective_contexts(self)
        return Both(self.around(), keeping), Both(EachTime(self.around), kept)

    @contextmanager
    def around(self) -> Iterator[None]:
        """A context in which the unit runs, and its modules say which of them is at work."""
        if self.kind != NAMED:
            yield
            return
        before = register_module_forward_pre_hook(self._enter)
        behind = register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            behind.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        if id(module) in self._paths:
            self._running.paths.append(self._paths[id(module)])

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        if id(module) in self._paths:
            self._running.paths.pop()


class _Running(threading.local):
    """The modules of a unit that run in this thread, by their paths, the innermost last."""

    def __init__(self) -> None:
        self.paths: list[str] = []


class Both(AbstractContextManager[None]):
    """Two contexts as one."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        self._inner.__exit__(*error)
        return self._outer.__exit__(*error)


class EachTime(AbstractContextManager[None]):
    """A context that may be entered several times: a unit runs again for each backward pass through it, as where the
    model takes gradients of its own."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make, self._entered = make, list[AbstractContextManager[None]]()

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)
