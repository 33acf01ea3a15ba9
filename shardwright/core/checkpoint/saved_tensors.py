"""What can be read like a checkpoint: tensors of a training state by name, box by box, and the values beside them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from shardwright.core.checkpoint.boxes import Box
from shardwright.core.checkpoint.tensor_file import Bytes


class SavedTensor(Protocol):
    """What is known of a tensor before it is read."""

    @property
    def dtype(self) -> str:
        """Its name in safetensors files, as ``F32``."""

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """A `SavedTensor` that is nothing more."""

    dtype: str
    shape: tuple[int, ...]


class SavedState(Protocol):
    """A saved training state. Tensors are named ``PART/NAME``: ``model/NAME`` are parameters and buffers,
    ``optimizer0/…`` the first optimizer's states."""

    @property
    def framework(self) -> str:
        """Whose names and layouts the tensors have: ``torch`` or ``jax``."""

    @property
    def step(self) -> int:
        """The number of steps that were trained."""

    def __str__(self) -> str:
        """What it is called in errors."""

    def names(self, part: str) -> list[str]:
        """The names of a part's tensors, without the part."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""

    def tensor(self, name: str) -> SavedTensor:
        """What is known of a tensor. Raises CheckpointError where there is none of that name."""

    def boxes(self, name: str, box: Box) -> Iterator[tuple[Box, Bytes]]:
        """The pieces of a box of a tensor, each with its entries as bytes, of the piece's shape and one more dim of
        the bytes of an entry; together they hold the box. Raises CheckpointError where a file is damaged."""

    def content(self, tensors: Callable[[str], Any]) -> Any:
        """The values that are no tensors. ``tensors`` gives a tensor by its name."""
