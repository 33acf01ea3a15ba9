"""The first op of a step that makes a NaN, or an infinity, of finite values: every op is looked at."""

import bisect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules

from shardwright.backends.torch.compat import TorchDispatchMode, current_node, pytree, sequence_number
from shardwright.backends.torch.machine.watchdog import Watchdog

_WITHOUT_VALUES = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_", "set_")
"""Ops whose result is whatever the memory holds."""


class OpChecks(TorchDispatchMode):
    """A mode that looks at all inputs and outputs of every op, in the forward and in the backward."""

    def __init__(self, watchdog: Watchdog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watchdog = watchdog
        self._nan = self._infinity = ""
        self._stack: list[str] = []
        self._numbers: list[int] = []
        """The sequence numbers of autograd's nodes from which on they belong to the path in ``_paths``."""
        self._paths: list[str] = []

    def begin(self) -> None:
        """Begin a step."""
        self._nan = self._infinity = ""
        self._stack.clear()
        self._numbers.clear()
        self._paths.clear()

    def first(self) -> str:
        """The ops that made the first NaN and the first infinity, in words; empty where no op did."""
        found = [f"the first {what} was made by {op}" for what, op in self._made() if op]
        return "; ".join(found)

    def _made(self) -> tuple[tuple[str, str], ...]:
        return ("infinity", self._infinity), ("NaN", self._nan)

    @contextmanager
    def watching(self, held: Mapping[str, nn.Module]) -> Iterator[None]:
        """A context in which every op that runs is looked at; ``held`` are the modules that may be called, by path."""
        paths = {
            id(inner): f"{path}.{name}".strip(".") for path, m in held.items() for name, inner in m.named_modules()
        }
        paths |= {id(module): path for path, module in held.items()}

        def enter(module: nn.Module, _: Any) -> None:
            self._at([*self._stack, paths.get(id(module), type(module).__name__)])

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            self._at(self._stack[:-1])

        handles = [
            modules.register_module_forward_pre_hook(enter),
            modules.register_module_forward_hook(leave, always_call=True),
        ]
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _at(self, stack: list[str]) -> None:
        self._stack = stack
        self._numbers.append(sequence_number())
        self._paths.append(stack[-1] if stack else "")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func).partition(".")[2].partition(".")[0]
        if name in _WITHOUT_VALUES or (self._nan and self._infinity):
            return func(*args, **kwargs)
        before = _kinds((args, kwargs))
        made = func(*args, **kwargs)
        after = _kinds(made)
        if not self._nan and "nan" in after and "nan" not in before:
            self._nan = self._said(name)
        if not self._infinity and "inf" in after and not before:
            self._infinity = self._said(name)
        return made

    def _said(self, name: str) -> str:
        node: Any = current_node()
        if node is None:
            path, way = (self._stack[-1] if self._stack else ""), "forward"
        else:
            place = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
            path, way = (self._paths[place] if place >= 0 else ""), f"backward, {node.name()}"
        where = f"in {path}" if path else "between modules"
        return f"{name} {where} ({way}; {self.watchdog.action})"


def _kinds(tree: Any) -> set[str]:
    """The subset of {"nan", "inf"} that the floating tensors and numbers in a tree hold."""
    found: set[str] = set()
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, float):
            if leaf != leaf:
                found.add("nan")
            elif leaf - leaf != 0.0:
                found.add("inf")
        elif isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()) and not leaf.is_meta:
            if bool(torch.isnan(leaf).any()):
                found.add("nan")
            if bool(torch.isinf(leaf).any()):
                found.add("inf")
    return found
