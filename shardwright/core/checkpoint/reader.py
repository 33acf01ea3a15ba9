"""A checkpoint that is read: boxes of its tensors, from whatever pieces they lie in."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shardwright.core.checkpoint import folder as folders
from shardwright.core.checkpoint.boxes import Box
from shardwright.core.checkpoint.content import decoded
from shardwright.core.checkpoint.index import Index, Marker, TensorRecord
from shardwright.core.checkpoint.tensor_file import Bytes, TensorFiles, Written
from shardwright.core.errors import CheckpointError, few, nearest

STRICT = "strict=False loads what fits"
FRESH = "load_optimizer=False loads the weights alone"


class Reader:
    """A complete checkpoint. Files are opened when they are first read, and read in place."""

    def __init__(self, folder: Path, marker: Marker) -> None:
        """Raises CheckpointError where the index is damaged, or a file is missing or of another size."""
        self.folder, self.marker = folder, marker
        self.index: Index = folders.read(folder, marker)
        written = {name: Written(told.size_bytes, told.chunks) for name, told in self.index.files.items()}
        self._files = TensorFiles(folder, written)
        self._files.require_all()

    @classmethod
    def open(cls, path: Path, tag: str | None = None) -> "Reader":
        """The newest complete checkpoint of a folder, or that with a tag. Raises CheckpointError as `folder.chosen`."""
        return cls(*folders.chosen(path, tag))

    def __str__(self) -> str:
        return f"checkpoint {self.folder.name!r}, of step {self.index.step}"

    @property
    def framework(self) -> str:
        """Whose names and layouts the tensors have."""
        return self.index.framework

    @property
    def step(self) -> int:
        """The number of steps that were trained."""
        return self.index.step

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self.index.tensors

    def names(self, part: str) -> list[str]:
        """The names of a part's tensors."""
        return [name[len(part) + 1 :] for name in self.index.tensors if name.startswith(f"{part}/")]

    def tensor(self, name: str) -> TensorRecord:
        """What is known of a tensor. Raises CheckpointError where there is none of that name."""
        found = self.index.tensors.get(name)
        if found is None:
            raise CheckpointError(f"{self} has no tensor {name!r}: {nearest(name, self.index.tensors)}")
        return found

    def boxes(self, name: str, box: Box) -> Iterator[tuple[Box, Bytes]]:
        """The pieces of a box of a tensor: each with its entries as bytes, a view of a file, of the piece's shape and
        one more dim of the bytes of an entry. Together they hold the box.

        Raises CheckpointError where a file is missing or damaged.
        """
        tensor = self.tensor(name)
        for piece in tensor.pieces:
            shared = box.meet(piece.box)
            if shared is None:
                continue
            file = self._files[piece.file]
            dtype, shape, _ = file.entries.get(piece.key, ("", (), 0))
            if (dtype, shape) != (tensor.dtype, piece.shape):
                raise CheckpointError(f"{file.path}: {piece.key!r} is not the piece that the index tells of")
            yield shared, file.read(piece.key, shared.moved([-at for at in piece.start]))

    def content(self, tensors: Callable[[str], Any]) -> Any:
        """The values that are no tensors. ``tensors`` gives a tensor by its name."""
        return decoded(self.index.content, tensors)


def require_names(own: Sequence[str], saved: Sequence[str], what: str, fix: str = STRICT) -> None:
    """Raise CheckpointError where a model or an optimizer has other names than a checkpoint; the nearest are named."""
    here, there = set(own), set(saved)
    missing, unexpected = [name for name in own if name not in there], [name for name in saved if name not in here]
    if not missing and not unexpected:
        return
    said = []
    if missing:
        said.append(f"it lacks {few(missing)} ({nearest(missing[0], saved)[:200]})")
    if unexpected:
        said.append(f"it has {few(unexpected)}, which is not here ({nearest(unexpected[0], own)[:200]})")
    raise CheckpointError(f"the checkpoint does not fit {what}: {'; '.join(said)}. {fix}")
