"""What a module's forward writes to, which moves on once where it is run again in the backward pass: buffers, and
attributes of modules."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from shardwright.backends.torch.memory import module_attributes
from shardwright.backends.torch.memory.module_attributes import Attributes


@dataclass(frozen=True, slots=True)
class Written:
    """What a forward writes to.

    Attributes:
        buffers: modules, and the names of their buffers.
        attributes: places of attributes within the module.
    """

    buffers: tuple[tuple[nn.Module, str], ...]
    attributes: tuple[module_attributes.Place, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """In words."""
        named = [f"the buffer {name!r}" for _, name in self.buffers]
        return (*named, *(f"the attribute {name!r}" for _, name in self.attributes))


class WrittenState:
    """The buffers and attributes of a module, and of those in it, as they are before its forward.

    Args:
        written: those that its forward writes to; None: it is not known yet.
    """

    def __init__(self, module: nn.Module, written: Written | None = None) -> None:
        self._module = module
        self._before = {
            (inner, name): buffer.detach().clone()
            for inner in module.modules()
            for name, buffer in inner._buffers.items()
            if type(buffer) is torch.Tensor
            and not buffer.is_meta
            and (written is None or (inner, name) in written.buffers)
        }
        self._attributes = Attributes(module, None if written is None else written.attributes)

    def keep_written(self) -> Written:
        """Keep those alone that have other values now. Versions of buffers do not tell: batch norms write without a new
        one.

        Raises MissingCapabilityError for a tensor that is no buffer and was written in place.
        """
        for (inner, name), before in list(self._before.items()):
            now = inner._buffers.get(name)
            if now is not None and now.shape == before.shape and torch.equal(now, before):
                del self._before[inner, name]
        self._attributes.keep_written()
        return Written(tuple(self._before), self._attributes.places)

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """A context in which they are as they were; behind it they are again what they have become."""
        now = {(inner, name): inner._buffers.get(name) for inner, name in self._before}
        held = Attributes(self._module, self._attributes.places)
        self._attributes.restore()
        for (inner, name), before in self._before.items():
            inner._buffers[name] = before.clone()
        try:
            yield
        finally:
            for (inner, name), buffer in now.items():
                inner._buffers[name] = buffer
            held.restore()
