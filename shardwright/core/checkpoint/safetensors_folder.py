"""Models in safetensors files, as Hugging Face lays them out: one file, or several and an index of their tensors."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from shardwright.core.checkpoint.boxes import Box
from shardwright.core.checkpoint.copied import whole_bytes
from shardwright.core.checkpoint.saved_tensors import Entry, SavedState
from shardwright.core.checkpoint.tensor_file import ITEM_BYTES, Bytes, TensorFile, ToWrite, write_path
from shardwright.core.errors import CheckpointError, nearest

MODEL = "model"
"""The part of a state with parameters and buffers."""
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
FORMAT: Mapping[str, str] = {"format": "pt"}
"""What Hugging Face's readers want to find in a file's header: whose layouts the tensors have."""


class SafetensorsModel:
    """The parameters and buffers in safetensors files, a `SavedState` without optimizers.

    Files are mapped, and read where a box is asked for. Raises CheckpointError where a file is missing or damaged, or
    has other tensors than the index says, or all of them other sizes; no tensor is read for that. Entries of such files
    have no digests: a changed one is not noticed.

    Attributes:
        files: the paths of the files, and of the index.
    """

    framework = "torch"
    step = 0

    def __init__(self, path: Path, index: Path | None, files: Mapping[Path, Sequence[str] | None]) -> None:
        """``files``: the tensors that each has, as the index says; None: all that are in it."""
        self._said = str(path)
        self.files = [*([] if index is None else [index]), *sorted(files)]
        self._file_of: dict[str, TensorFile] = {}
        for file, names in files.items():
            opened = TensorFile(file)
            for name in opened.entries if names is None else names:
                if name not in opened.entries:
                    raise CheckpointError(
                        f"{index}: tensor {name!r} should be in {file.name}, which lacks it: "
                        f"{nearest(name, opened.entries)[:200]}; the index and the files are of different models"
                    )
                self._file_of[name] = opened
            more = [] if names is None else sorted(set(opened.entries) - set(names))
            if more:
                raise CheckpointError(
                    f"{file}: the file has a tensor {more[0]!r}, which {index} does not place there: the index and the "
                    f"files are of different models"
                )

    @classmethod
    def of_file(cls, path: Path) -> "SafetensorsModel":
        """All tensors of one file."""
        return cls(path, None, {path: None})

    @classmethod
    def of_index(cls, path: Path) -> "SafetensorsModel":
        """The tensors that an index names, in files beside it."""
        files: dict[Path, list[str]] = {}
        for name, file in weight_map(path).items():
            files.setdefault(path.parent / file, []).append(name)
        missing = sorted(file.name for file in files if not file.is_file())
        if missing:
            raise CheckpointError(
                f"{path}: the index names {missing[0]} ({len(missing)} of {len(files)} files), which is not in "
                f"{path.parent}: complete the download, or copy the file there"
            )
        found = cls(path.parent, path, files)
        found._require_size(path)
        return found

    def _require_size(self, index: Path) -> None:
        """Raise CheckpointError where the tensors have not the bytes that the index tells of."""
        told = total_size(index)
        entries = [file.entries[name] for name, file in self._file_of.items()]
        bytes_of = [(dtype, math.prod(shape) * ITEM_BYTES[dtype]) for dtype, shape, _ in entries]
        size = sum(held for _, held in bytes_of)
        # Older writers count an eighth of a byte for each entry of bool.
        packed = size - sum(held - held / 8 for dtype, held in bytes_of if dtype == "BOOL")
        if told is not None and told not in (size, packed) and int(told) not in (int(packed), size):
            sizes = ", ".join(f"{file.name} {file.stat().st_size:,}" for file in self.files if file != index)
            raise CheckpointError(
                f"{index}: the index tells of {told:,.0f} bytes of tensors (total_size), and the files have {size:,} "
                f"({sizes} with their headers): one of them is of another model, or of another precision. Complete the "
                f"download; where the files are right, remove total_size from the index"
            )

    @classmethod
    def of_folder(cls, path: Path) -> "SafetensorsModel | None":
        """The model in a folder, by its index or its one file; None where it has neither."""
        indexes = [path / INDEX, *sorted(path.glob(f"*{SUFFIX}.index.json"))]
        index = next((held for held in indexes if held.is_file()), None)
        if index is not None:
            return cls.of_index(index)
        return cls.of_file(path / ONE_FILE) if (path / ONE_FILE).is_file() else None

    def __str__(self) -> str:
        return self._said

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name.startswith(f"{MODEL}/") and name[len(MODEL) + 1 :] in self._file_of

    def names(self, part: str) -> list[str]:
        """The names of a part's tensors."""
        return list(self._file_of) if part == MODEL else []

    def tensor(self, name: str) -> Entry:
        """What is known of a tensor. Raises CheckpointError where there is none of that name."""
        file, key = self._place(name)
        dtype, shape, _ = file.entries[key]
        return Entry(dtype, shape)

    def boxes(self, name: str, box: Box) -> Iterator[tuple[Box, Bytes]]:
        """The box of a tensor, as a view of the file."""
        file, key = self._place(name)
        yield box, file.read(key, box)

    def content(self, tensors: Callable[[str], Any]) -> Any:
        """The values that are no tensors: none."""
        return {
            "optimizers": [], "user": None, "ties": {}, "seed": 0, "steps": 0, "steps_begun": 0, "samples": 0,
            "extra": {},
        }  # fmt: skip

    def _place(self, name: str) -> tuple[TensorFile, str]:
        key = name.removeprefix(f"{MODEL}/")
        if not self.has(name):
            raise CheckpointError(f"{self} has no tensor {key!r}: {nearest(key, self._file_of)[:300]}")
        return self._file_of[key], key


def total_size(path: Path) -> float | None:
    """The bytes of all tensors, as an index has it; None where it does not tell."""
    try:
        found = json.loads(path.read_bytes())["metadata"]["total_size"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None


def weight_map(path: Path) -> dict[str, str]:
    """The name of the file of each tensor, as an index has it. Raises CheckpointError for a file that is no index."""
    try:
        found = json.loads(path.read_bytes())["weight_map"]
        named = {str(name): str(file) for name, file in found.items()}
    except OSError as failed:
        raise CheckpointError(f"{path}: the index cannot be read: {failed.strerror}") from failed
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as failed:
        raise CheckpointError(
            f"{path}: no index of safetensors files: expected JSON with a 'weight_map' of tensors and their files"
        ) from failed
    outside = next((file for file in named.values() if Path(file).name != file or file in ("", ".", "..")), None)
    if outside is not None:
        raise CheckpointError(f"{path}: the index names a file {outside!r}: expected the name of one beside it")
    if not named:
        raise CheckpointError(f"{path}: the index names no tensors")
    return named


def write_safetensors_folder(state: SavedState, path: Path, max_shard_bytes: float = 5e9) -> list[Path]:
    """Write the parameters and buffers of a state as Hugging Face's readers take them: ``model.safetensors``, or
    ``model-00001-of-0000N.safetensors`` … and an index where one file would have more than ``max_shard_bytes``.

    No more than one tensor is in memory at a time. Of tied parameters the first is written, as these readers expect.

    Returns:
        the files, the index last.

    Raises:
        CheckpointError: the state has the names of another framework or no parameters, the folder has a model already,
            or cannot be written to; what was written is removed then.
    """
    if state.framework != "torch":
        raise CheckpointError(
            f"{state} has the names of a {state.framework} run, and files of Hugging Face's those of a torch model: "
            f"translate it first, by a map of names"
        )
    if not max_shard_bytes > 0:
        raise CheckpointError(f"max_shard_bytes={max_shard_bytes!r}: expected a number of bytes above 0")
    files: list[list[ToWrite]] = []
    filled = 0
    for name in state.names(MODEL):
        told = state.tensor(f"{MODEL}/{name}")
        tensor = ToWrite(name, told.dtype, told.shape, partial(whole_bytes, state, f"{MODEL}/{name}"))
        if not files or filled + tensor.size_bytes > max_shard_bytes:
            files.append([])
            filled = 0
        files[-1].append(tensor)
        filled += tensor.size_bytes
    if not files:
        raise CheckpointError(f"{state} holds no parameters")
    names = [ONE_FILE]
    if len(files) > 1:
        names = [f"model-{number + 1:05d}-of-{len(files):05d}{SUFFIX}" for number in range(len(files))]
    written: list[Path] = []
    try:
        path.mkdir(parents=True, exist_ok=True)
        there = sorted(held.name for held in path.glob(f"model*{SUFFIX}*"))
        if there:
            raise CheckpointError(f"{path} has {there[0]} already: name a folder without a model")
        for name, tensors in zip(names, files, strict=True):
            written.append(path / name)
            write_path(path / name, tensors, FORMAT)
        if len(files) > 1:
            total = sum(tensor.size_bytes for tensors in files for tensor in tensors)
            held_by = {tensor.key: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(held_by.items()))}
            written.append(path / INDEX)
            written[-1].write_text(json.dumps(index, indent=2) + "\n")
    except (OSError, CheckpointError) as failed:
        for file in written:
            file.unlink(missing_ok=True)
        if isinstance(failed, CheckpointError):
            raise
        raise CheckpointError(f"{path}: the model cannot be written there: {failed.strerror}") from failed
    return written
