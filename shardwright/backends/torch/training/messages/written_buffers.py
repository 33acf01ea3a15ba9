"""The buffers that a module's forward writes to, which move on once where it is run again in the backward pass."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn

Place = tuple[nn.Module, str]
"""A module, and the name of its buffer."""


class WrittenBuffers:
    """The buffers of a module, and of those in it, as they are before its forward.

    Args:
        places: those that its forward writes to; None: it is not known yet.
    """

    def __init__(self, module: nn.Module, places: Collection[Place] | None = None) -> None:
        self._before = {
            (inner, name): buffer.detach().clone()
            for inner in module.modules()
            for name, buffer in inner._buffers.items()
            if type(buffer) is torch.Tensor and not buffer.is_meta and (places is None or (inner, name) in places)
        }

    def keep_written(self) -> tuple[Place, ...]:
        """Keep those alone that have other values now. Versions do not tell: batch norms write without a new one."""
        for (inner, name), before in list(self._before.items()):
            now = inner._buffers.get(name)
            if now is not None and now.shape == before.shape and torch.equal(now, before):
                del self._before[inner, name]
        return tuple(self._before)

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """A context in which they are as they were; behind it they are again what they have become."""
        now = {(inner, name): inner._buffers.get(name) for inner, name in self._before}
        for (inner, name), before in self._before.items():
            inner._buffers[name] = before.clone()
        try:
            yield
        finally:
            for (inner, name), buffer in now.items():
                inner._buffers[name] = buffer
