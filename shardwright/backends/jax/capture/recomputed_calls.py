"""Calls of modules that a plan computes again: inside and around them the model's own checkpoints are plain calls."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.extend.core.primitives import remat_p

from shardwright.backends.jax.capture.inner_programs import CHECKPOINTS, equations_in
from shardwright.backends.jax.capture.own_checkpoints import plain_call


@dataclass(slots=True, eq=False)
class Recomputing:
    """Calls of modules that a plan computes again."""

    policies: Mapping[str, Any]
    """What they keep by the mode, an object of its own by which `jax.checkpoint` around them is known."""
    depth: int = 0
    """The number of such calls around what runs."""

    @contextmanager
    def one(self) -> Iterator[None]:
        """A context inside of a call that is computed again."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def replaces(self, params: Mapping[str, Any]) -> bool:
        """Whether a checkpoint lies inside or around such a call."""
        if self._is_ours(params):
            return False
        inner = (each for each in equations_in(params["jaxpr"]) if each.primitive.name in CHECKPOINTS)
        return self.depth > 0 or any(self._is_ours(each.params) for each in inner)

    def _is_ours(self, params: Mapping[str, Any]) -> bool:
        return any(params.get("policy") is policy for policy in self.policies.values())


class _Stack(threading.local):
    def __init__(self) -> None:
        self.open: list[Recomputing] = []


_running = _Stack()
_lock = threading.Lock()
_inside = 0
"""The number of contexts of all threads in which checkpoints may be plain calls."""


@contextmanager
def recomputing(policies: Mapping[str, Any]) -> Iterator[Recomputing]:
    """A context in which checkpoints that this thread traces inside or around calls with a policy of what it gives are
    plain calls. ``policies``: by the mode, each as `jax.checkpoint` takes it."""
    global _inside
    with _lock:
        if _inside == 0:
            setattr(remat_p, "bind", _bind)  # noqa: B010
        _inside += 1
    nothing = jax.checkpoint_policies.nothing_saveable
    found = Recomputing({mode: partial(policy or nothing) for mode, policy in policies.items()})
    _running.open.append(found)
    try:
        yield found
    finally:
        _running.open.pop()
        with _lock:
            _inside -= 1
            if _inside == 0:
                delattr(remat_p, "bind")


def _bind(*given: Any, **params: Any) -> Any:
    """In place of what a checkpoint does with the function that it traced."""
    if _running.open and _running.open[-1].replaces(params):
        return plain_call(params)(*given)
    return type(remat_p).bind(remat_p, *given, **params)
