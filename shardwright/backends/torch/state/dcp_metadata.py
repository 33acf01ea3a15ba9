"""The metadata of a DCP folder (`torch.distributed.checkpoint`), read without running what its pickle may name.

The file ``.metadata`` is a pickle. Its records are read into classes of our own that hold values and do nothing; any
other name in it is refused before it is looked up.
"""

import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch

from shardwright.backends.torch.compat import DCP_ENCODINGS, DCP_LAYOUT, DCP_RECORDS
from shardwright.backends.torch.state.saved_parts import DTYPES
from shardwright.core.checkpoint.boxes import Box
from shardwright.core.checkpoint.index import fault_of_pieces
from shardwright.core.errors import CheckpointError

METADATA = ".metadata"
MOST_BYTES = 1 << 30
"""The most bytes of the file: that of a run of a thousand ranks has tens of millions."""
_PLAIN: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): tuple,
    DCP_LAYOUT: str,
    **dict.fromkeys(DCP_ENCODINGS, int),
    ("collections", "OrderedDict"): dict,
    **{
        (module, f"{kind}{system}Path"): PureWindowsPath if system == "Windows" else PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for kind in ("", "Pure")
        for system in ("Posix", "Windows")
    },
}
"""What stands for other names that DCP writes: values without effects."""
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_DAMAGED = (
    pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError,
    OverflowError, MemoryError, RecursionError,
)  # fmt: skip
"""What reading a pickle may raise that is damaged."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Bytes of a file of the folder, in which ``torch.save`` wrote one value."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """What the metadata says of a tensor: its dtype, by its name in safetensors files, its shape and its chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[Box, Entry], ...]


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """The content of a folder: tensors and other values by key, and the path of each key in the nested state dict;
    without any where the dict was not nested."""

    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, Entry]
    paths: Mapping[str, tuple[str | int, ...]]

    @property
    def entries(self) -> dict[str, list[Entry]]:
        """The entries of every file with values, in the order in which they lie there."""
        of_tensors = (entry for tensor in self.tensors.values() for _, entry in tensor.chunks)
        every = [*of_tensors, *self.values.values()]
        found: dict[str, list[Entry]] = {}
        for entry in sorted(every, key=lambda entry: (entry.file, entry.offset, entry.length)):
            found.setdefault(entry.file, []).append(entry)
        return found


class _Record:
    """A record whose values are its attributes; ``state`` where they are no dict."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)
        else:
            vars(self)["state"] = state


class _Restricted(pickle.Unpickler):
    """A reader of pickles that knows the names that DCP writes, and refuses any other."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._made: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in DCP_RECORDS:  # a class of this reading alone, since pickles may set attributes of classes
            return self._made.setdefault(name, type(name, (_Record,), {}))
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module == "torch" and name in _DTYPES:
            return DTYPES.get(_DTYPES[name], f"torch.{name}")
        if module == "torch" and name in ("strided", "sparse_coo", "sparse_csr"):
            return name
        raise _ForeignNameError(f"{module}.{name}")


class _ForeignNameError(Exception):
    """A name that DCP does not write."""


def read_metadata(path: Path) -> DcpMetadata:
    """The metadata in a file. Raises CheckpointError where it is missing or damaged, names a class that DCP does not
    write (nothing of it is run), or a file outside of the folder."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise CheckpointError(f"{path}: more than {MOST_BYTES:,} bytes, which the metadata of no run has")
        data = path.read_bytes()
    except OSError as failed:
        raise CheckpointError(f"{path}: the metadata of the DCP folder cannot be read: {failed.strerror}") from failed
    try:
        found = _Restricted(data).load()
        return _metadata(found)
    except _ForeignNameError as foreign:
        raise CheckpointError(
            f"{path} names {foreign}, which is none of DCP's records: it is not read, since a pickle may run anything; "
            f"export the checkpoint once more, in tensors, numbers and texts"
        ) from None
    except CheckpointError as failed:
        raise CheckpointError(f"{path}: {failed}") from None
    except _DAMAGED as failed:
        raise CheckpointError(f"{path}: no metadata of a DCP folder, or damaged: {failed}") from failed


def _metadata(found: Any) -> DcpMetadata:
    entries: dict[tuple[str, tuple[int, ...] | None], Entry] = {}
    for index, told in found.storage_data.items():
        offset = getattr(index, "offset", None)
        entries[index.fqn, None if offset is None else _sizes(offset)] = _entry(told)
    tensors, values = dict[str, DcpTensor](), dict[str, Entry]()
    for key, told in found.state_dict_metadata.items():
        if not isinstance(key, str):
            raise ValueError(f"a key is of {type(key).__name__}")
        if type(told).__name__ == "BytesStorageMetadata":
            values[key] = entries[key, None]
            continue
        shape = _sizes(told.size)
        boxes = [Box(_sizes(chunk.offsets), _sizes(chunk.sizes)) for chunk in told.chunks]
        dtype = told.properties.state[0]
        if dtype in DTYPES.values() and (fault := fault_of_pieces(shape, boxes)) is not None:
            raise CheckpointError(f"{key} of shape {shape} is not there whole: {fault}")
        tensors[key] = DcpTensor(dtype, shape, tuple((box, entries[key, box.start]) for box in boxes if box.entries))
    paths = getattr(found, "planner_data", None)
    return DcpMetadata(tensors, values, dict(_paths(paths)) if isinstance(paths, dict) else {})


def _paths(given: Mapping[Any, Any]) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    for key, path in given.items():
        if isinstance(path, tuple) and path and all(isinstance(part, str | int) for part in path):
            yield str(key), path


def _entry(told: Any) -> Entry:
    file, offset, length = told.relative_path, told.offset, told.length
    if getattr(told, "transform_descriptors", None):
        raise CheckpointError(
            f"{file} was written through {', '.join(map(str, told.transform_descriptors))}, which is not read here: "
            f"export the checkpoint without such extensions"
        )
    path = PurePosixPath(file)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise CheckpointError(f"a value is said to be in {file!r}, outside of the folder")
    if not all(type(n) is int and n >= 0 for n in (offset, length)):
        raise ValueError(f"a value is said to be in bytes {offset!r} of {file}, {length!r} of them")
    return Entry(file, offset, length)


def _sizes(given: Any) -> tuple[int, ...]:
    found = tuple(given)
    if not all(type(n) is int and n >= 0 for n in found):
        raise ValueError(f"{found!r} are no sizes")
    return found
