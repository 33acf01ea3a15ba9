"""A saved state in memory, in pieces of any cut, for tests."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.core.checkpoint.boxes import Box
from shardwright.core.checkpoint.saved_tensors import Entry

CODES = {"float32": "F32", "int32": "I32", "float16": "F16"}


class SavedArrays:
    """A saved state of arrays by label, each handed out row by row, so that readers have to put pieces together."""

    def __init__(self, framework: str, arrays: Mapping[str, NDArray[Any]], content: Any, step: int = 7) -> None:
        self.framework, self.step, self.arrays, self._content = framework, step, dict(arrays), content

    def __str__(self) -> str:
        return "the arrays"

    def names(self, part: str) -> list[str]:
        return [label.removeprefix(f"{part}/") for label in self.arrays if label.startswith(f"{part}/")]

    def has(self, name: str) -> bool:
        return name in self.arrays

    def tensor(self, name: str) -> Entry:
        return Entry(CODES[str(self.arrays[name].dtype)], self.arrays[name].shape)

    def boxes(self, name: str, box: Box) -> Iterator[tuple[Box, NDArray[np.uint8]]]:
        array = self.arrays[name]
        rows = box.shape[0] if box.shape else 1
        for row in range(rows):
            piece = box if not box.shape else Box((box.start[0] + row, *box.start[1:]), (1, *box.shape[1:]))
            entries = np.ascontiguousarray(array[piece.inside(Box.whole(array.shape))])
            yield piece, entries.reshape(-1).view(np.uint8).reshape(*piece.shape, array.dtype.itemsize)

    def content(self, tensors: Callable[[str], Any]) -> Any:
        return self._content


def read(state: Any, label: str, box: Box | None = None) -> NDArray[Any]:
    """A box of a tensor of float32 numbers; what no piece holds is NaN, and what two hold is refused."""
    box = box or Box.whole(state.tensor(label).shape)
    out = np.full(box.shape, np.nan, dtype=np.float32)
    for shared, data in state.boxes(label, box):
        part = out[(*shared.inside(box), ...)]
        assert np.isnan(part).all(), f"{label}: {shared} comes twice"
        part[...] = np.ascontiguousarray(data).view(np.float32)[..., 0]
    return out
