"""A saved state written as a checkpoint of its own, tensor by tensor, by one process."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.core.checkpoint import folder as folders
from shardwright.core.checkpoint.boxes import Box
from shardwright.core.checkpoint.content import encoded
from shardwright.core.checkpoint.folder import Piece
from shardwright.core.checkpoint.saved_tensors import SavedState
from shardwright.core.checkpoint.tensor_file import ITEM_BYTES, Bytes
from shardwright.core.errors import CheckpointError

_PARTS = ("model", "other", "scaling", "random", "user", "extra")


@dataclass(frozen=True, slots=True)
class _Named:
    """A tensor among the values of a state, by its label."""

    label: str


def write_copy(state: SavedState, path: Path, tag: str, plan: Any = None) -> dict[str, int]:
    """Write a state as the checkpoint ``path/tag``. No more than one tensor is in memory at a time.

    plan: the document of the plan that the state was trained under; None: none.

    Returns:
        the number of tensors of every part that was written.

    Raises:
        CheckpointError: there is a complete checkpoint under that tag already, or it cannot be written.
    """
    if tag in dict(folders.complete(path)):
        raise CheckpointError(f"{path / tag} is a checkpoint already: name another target, or remove it")
    pieces: dict[str, list[Piece]] = {part: list(_pieces(state, part)) for part in _parts_of(state)}
    told = state.content(_Named)
    content = {
        key: encoded(value, lambda held, _: held.label if isinstance(held, _Named) else None, key)
        for key, value in told.items()
    }
    save = folders.begin(path, tag)
    try:
        folders.write_rank(save, 0, pieces)
        folders.publish(
            save, 1, 0.0, step=state.step, framework=state.framework, content=content, plan=plan, keep=None
        )  # fmt: skip
    except CheckpointError:
        folders.abandon(save)
        raise
    return {part: len(held) for part, held in pieces.items() if held}


def _parts_of(state: SavedState) -> Iterator[str]:
    yield from _PARTS
    number = 0
    while state.names(f"optimizer{number}"):
        yield f"optimizer{number}"
        number += 1


def _pieces(state: SavedState, part: str) -> Iterator[Piece]:
    for name in state.names(part):
        label = f"{part}/{name}"
        told = state.tensor(label)
        yield Piece(name, told.dtype, told.shape, Box.whole(told.shape), partial(whole_bytes, state, label))


def whole_bytes(state: SavedState, label: str) -> Bytes:
    """The bytes of a whole tensor, row by row."""
    told = state.tensor(label)
    box = Box.whole(told.shape)
    out = np.empty((*told.shape, ITEM_BYTES[told.dtype]), dtype=np.uint8)
    for shared, data in state.boxes(label, box):
        if shared == box and data.flags.c_contiguous:
            return data
        out[shared.inside(box)] = data
    return out
