"""Weights in files and folders: of safetensors, of our own checkpoints, of DCP and of ``torch.save``, by name.

What a path leads to is found by what lies there. Each tensor is read when it is asked for, and of it the part that is
wanted.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardwright.backends.torch.machine.digests import BLOCKS, digest_of, digest_of_file
from shardwright.backends.torch.state.dcp_folder import open_dcp
from shardwright.backends.torch.state.dcp_metadata import METADATA
from shardwright.backends.torch.state.flat_shards import entries_of
from shardwright.backends.torch.state.plain_states import saved_state
from shardwright.backends.torch.state.saved_parts import SavedWeights, fill
from shardwright.core.checkpoint.boxes import Box, Part, Place
from shardwright.core.checkpoint.folder import MARKER, complete, folder_of
from shardwright.core.checkpoint.reader import Reader
from shardwright.core.checkpoint.safetensors_folder import INDEX, ONE_FILE, SUFFIX, SafetensorsModel, weight_map
from shardwright.core.checkpoint.saved_tensors import SavedState
from shardwright.core.errors import CheckpointError, ShardwrightError

BIN_INDEX, BIN_FILE = "pytorch_model.bin.index.json", "pytorch_model.bin"
"""The files of a Hugging Face folder that was written by ``torch.save``."""
LEAST_BLOCKS = 4
"""The number of blocks that are read of each file, at least, for a digest of many."""
TAKEN = (
    f"a Hugging Face folder ({INDEX}, {ONE_FILE}), a checkpoint of sw.save_checkpoint ({MARKER} in it, or in its "
    f"folders), a DCP folder ({METADATA}), a .safetensors file, an index of such files or a file of "
    f"torch.save(state_dict)"
)


class FileWeights(Mapping[str, torch.Tensor]):
    """The tensors of a file or a folder by name.

    Args:
        path: what was opened.
        tensors: their values; those of a `SavedWeights` are read by parts.
        files: what a digest of the contents is made of.
        digest: a text that says which contents these are, where that is known without reading the files.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, torch.Tensor], files: Sequence[Path], digest: str | None = None
    ) -> None:
        self.path, self._tensors, self._files, self._digest = path, tensors, list(files), digest

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def state(self) -> SavedState:
        """What was opened, as a saved state. Raises CheckpointError where it holds what no state dict does."""
        if isinstance(self._tensors, SavedWeights):
            return self._tensors.reader
        return saved_state(self._tensors, said=str(self.path))

    def digest(self) -> int:
        """A number that two ranks share where their files have the same contents, as far as blocks spread over them
        say. Raises OSError where one cannot be read."""
        blocks = max(LEAST_BLOCKS, BLOCKS // max(1, len(self._files)))
        return digest_of(self._digest or "", *(digest_of_file(file, blocks) for file in self._files))

    def shape(self, name: str) -> torch.Size:
        """The shape of a tensor, which is not read for that."""
        return shape_in(self._tensors, name)

    def read_part(self, name: str, part: Part, into: torch.Tensor) -> None:
        """Copy a part of a tensor to where it belongs; see `read_part`."""
        read_part(self._tensors, name, part, into)


def shape_in(weights: Mapping[str, torch.Tensor], name: str) -> torch.Size:
    """The shape of one of these weights, which is not read for that where it lies in files."""
    if isinstance(weights, FileWeights):
        return weights.shape(name)
    if isinstance(weights, SavedWeights):
        return torch.Size(weights.reader.tensor(weights.label(name)).shape)
    return weights[name].shape


def read_part(weights: Mapping[str, torch.Tensor], name: str, part: Part, into: torch.Tensor) -> None:
    """Copy the part of one of these weights to a tensor of any dtype and device, whose entries lie side by side in the
    part's order of memory. Of weights that lie in files no more is read than the part. Raises CheckpointError where a
    file is damaged."""
    if isinstance(weights, FileWeights):
        weights.read_part(name, part, into)
        return
    whole = None if isinstance(weights, SavedWeights) else weights[name].detach()
    flat = entries_of(into)
    for place in part.places():
        target = _view(flat, place)
        if isinstance(weights, SavedWeights):
            fill(weights.reader, weights.label(name), place.box, target)
        elif whole is not None:
            target.copy_(whole[place.box.inside(Box.whole(part.shape))])


def opened(weights: Any) -> Any:
    """The weights that a user gave; in place of a path, the tensors that lie there. Raises ShardwrightError where it
    leads to nothing that can be read."""
    if not isinstance(weights, str | Path):
        return weights
    path = folder_of(weights)
    if path.is_dir():
        return _of_folder(path)
    if not path.is_file():
        raise ShardwrightError(f"weights={str(weights)!r}: there is no such file or folder")
    if path.name.endswith(SUFFIX):
        return _saved(path, SafetensorsModel.of_file(path))
    if path.name == MARKER:
        return _of_folder(path.parent)
    if path.name.endswith(".bin.index.json"):
        return _of_bin_index(path)
    if path.suffix == ".json":
        return _saved(path, SafetensorsModel.of_index(path))
    return FileWeights(path, _of_torch_save(path), [path])


def _of_folder(path: Path) -> FileWeights:
    """The weights in a folder, by what lies there."""
    model = SafetensorsModel.of_folder(path)
    if model is not None:
        return _saved(path, model)
    if (path / METADATA).is_file():
        folder = open_dcp(path)
        return FileWeights(path, SavedWeights(folder, {}), folder.files)
    if (path / MARKER).is_file() or complete(path):
        own = Reader.open(path.parent, path.name) if (path / MARKER).is_file() else Reader.open(path)
        if own.framework != "torch":
            raise CheckpointError(
                f"{own} in {path} was written by a {own.framework} run, whose names and layouts of weights are others: "
                f"convert it first"
            )
        ties = own.content(lambda name: None).get("ties", {})
        return FileWeights(path, SavedWeights(own, ties), [], own.marker.index_digest)
    if (path / BIN_INDEX).is_file():
        return _of_bin_index(path / BIN_INDEX)
    if (path / BIN_FILE).is_file():
        return FileWeights(path, _of_torch_save(path / BIN_FILE), [path / BIN_FILE])
    alone = sorted(path.glob(f"*{SUFFIX}"))
    if len(alone) == 1:
        return _saved(path, SafetensorsModel.of_file(alone[0]))
    there = sorted(held.name + ("/" if held.is_dir() else "") for held in path.iterdir())
    said = ", ".join(there[:6]) + (f" and {len(there) - 6} more" if len(there) > 6 else "")
    if alone:
        raise CheckpointError(
            f"{path} has {len(alone)} safetensors files ({alone[0].name} first) and no {INDEX}, which says where each "
            f"tensor is: copy that there too, or name one of the files"
        )
    raise CheckpointError(f"{path} holds {said or 'nothing'}, and no weights that can be read: expected {TAKEN}")


def _saved(path: Path, model: SafetensorsModel) -> FileWeights:
    return FileWeights(path, SavedWeights(model, {}), model.files)


def _of_torch_save(path: Path) -> Mapping[str, torch.Tensor]:
    """The state dict in a file of ``torch.save``: mapped, and restricted to tensors, since a checkpoint is data and is
    not executed. Raises ShardwrightError for any other file."""
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as failed:  # of any class, where bytes are none of torch's
        raise ShardwrightError(
            f"{path} is no file of torch.save with tensors alone ({str(failed).partition(chr(10))[0][:200]}): save "
            f"model.state_dict(), or a safetensors file, under which name ends in {SUFFIX}"
        ) from failed
    if not isinstance(loaded, Mapping) or not all(isinstance(t, torch.Tensor) for t in loaded.values()):
        raise ShardwrightError(f"{path} does not hold a state dict (names and tensors): save model.state_dict()")
    return loaded


def _of_bin_index(path: Path) -> FileWeights:
    """The tensors of several files of ``torch.save``, and an index of them."""
    named = weight_map(path)
    files = sorted({path.parent / file for file in named.values()})
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(f"{path}: the index names {missing[0]}, which is not in {path.parent}")
    return FileWeights(path.parent, _BinTensors(path, named), [path, *files])


class _BinTensors(Mapping[str, torch.Tensor]):
    """Tensors in several files of ``torch.save``, each mapped when it is first read."""

    def __init__(self, index: Path, named: Mapping[str, str]) -> None:
        self._index, self._named = index, named
        self._load = functools.cache(_of_torch_save)

    def __getitem__(self, name: str) -> torch.Tensor:
        held = self._load(self._index.parent / self._named[name])
        if name not in held:
            raise CheckpointError(f"{self._index}: tensor {name!r} should be in {self._named[name]}, which lacks it")
        return held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)


def _view(flat: torch.Tensor, place: Place) -> torch.Tensor:
    return flat.as_strided(place.box.shape, place.strides, flat.storage_offset() + place.offset)
