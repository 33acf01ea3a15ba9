"""Folders of `torch.distributed.checkpoint` (DCP): read in place as a saved state, and written by torch's own writer.

A folder's keys are those of the state dict that was given to ``dcp.save``: ``{"model": …, "optim": …}`` as of
`torch.distributed.checkpoint.state_dict.get_state_dict` (also inside of another dict), of ``state_dict()`` by position,
or the flat names of parameters that TorchTitan writes.
"""

import io
import math
import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from shardwright.backends.torch.compat import EXTRA_STATE_KEY
from shardwright.backends.torch.state.dcp_metadata import METADATA, DcpTensor, Entry, read_metadata
from shardwright.backends.torch.state.plain_states import (
    PARAMS,
    content_of,
    named_by_position,
    optimizer_states,
    state_value,
    told_of,
)
from shardwright.backends.torch.state.saved_parts import MODEL, NUMBER, dtype_of, name_of, read_whole
from shardwright.core.checkpoint.boxes import Box
from shardwright.core.checkpoint.saved_tensors import SavedState
from shardwright.core.checkpoint.tensor_file import ITEM_BYTES, Bytes
from shardwright.core.errors import CheckpointError, PlanWarning, nearest

MODELS = ("model", "module", "state_dict", "model_state_dict", "model_state")
"""The keys under which scripts put a model's state dict."""
OPTIMIZER = re.compile(r"optim(izer)?s?\d*(_state(_dict)?)?")
"""A pattern for those of an optimizer's."""
USER = "user"
_DAMAGED = (
    RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile, EOFError, KeyError, ValueError, TypeError, struct.error,
    NotImplementedError,
)  # fmt: skip
"""What reading a value may raise that is damaged, or was not written by ``torch.save`` with such values alone."""
Path_ = tuple[str | int, ...]


class DcpFolder:
    """What a DCP folder holds, as a `SavedState`: chunks are mapped, and read where a box is asked for.

    Attributes:
        files: the paths of the files.
    """

    framework = "torch"

    def __init__(self, path: Path, names: Sequence[str] | None = None, optimizer_class: str | None = None) -> None:
        """As `open_dcp`."""
        self._path, self._names, self._class = path, names, optimizer_class
        self._metadata = read_metadata(path / METADATA)
        self.files = [path / METADATA, *(path / file for file in self._metadata.files)]
        missing = [file.name for file in self.files if not file.is_file()]
        if missing:
            raise CheckpointError(f"{path}: {METADATA} names {missing[0]}, which is not in the folder")
        self._maps: dict[str, Bytes] = {}
        self._chunks: dict[Entry, Bytes] = {}
        self._tensors: dict[str, DcpTensor] = {}
        self._numbers: dict[str, torch.Tensor] = {}
        self._groups: dict[int, dict[Path_, Entry]] = {}
        self._positions: dict[int, Sequence[str]] = {}
        self._extra: dict[str, Entry] = {}
        self._user: dict[str, Entry] = {}
        self._sort()
        self._name_states()

    def __str__(self) -> str:
        return f"the DCP folder {self._path}"

    # What the keys mean ------------------------------------------------------------------------------------------

    def _sort(self) -> None:
        """Give every key its place: in the model, in an optimizer, or among other values."""
        metadata = self._metadata
        paths = {key: self._path_of(key) for key in (*metadata.tensors, *metadata.values)}
        begun = [str(path[0]) for key, path in paths.items() if key in metadata.tensors]
        has_model = any(_model_name(path) is not None or len(path) == 1 for path in paths.values())
        lone = begun[0] if not has_model and len(set(begun)) == 1 else None
        optimizers: dict[Path_, int] = {}
        for key, path in paths.items():
            entry = metadata.values.get(key)
            prefix = _optimizer_prefix(path)
            if prefix is not None:
                number = optimizers.setdefault(prefix, len(optimizers))
                self._place_state(number, _split(path[len(prefix) :]), metadata.tensors.get(key), entry)
                continue
            name = _model_name(path)
            if name is None and (len(path) == 1 or path[0] == lone):
                name = ".".join(map(str, path[-1:] if len(path) == 1 else path[1:]))
            if entry is not None:
                is_extra = name is not None and name.rpartition(".")[2] == EXTRA_STATE_KEY
                (self._extra if is_extra else self._user)[name or key if is_extra else key] = entry
            else:
                self._tensors[f"{USER}/{key}" if name is None else f"{MODEL}/{name}"] = metadata.tensors[key]

    def _path_of(self, key: str) -> Path_:
        known = self._metadata.paths.get(key)
        if known is not None:
            return known
        first, _, rest = key.partition(".")
        if OPTIMIZER.fullmatch(first) and rest.startswith(("state.", "param_groups.")):
            return first, rest
        tensors = [other for other in self._metadata.tensors if not OPTIMIZER.fullmatch(other.partition(".")[0])]
        if not self._metadata.paths and first in MODELS and all(one.startswith(f"{first}.") for one in tensors):
            return first, rest
        return (key,)

    def _place_state(self, number: int, path: Path_, tensor: DcpTensor | None, entry: Entry | None) -> None:
        self._groups.setdefault(number, {})
        if path[:1] == ("param_groups",) and entry is not None:
            self._groups[number][path[1:]] = entry
        elif path[:1] == ("state",) and len(path) == 3:
            label = f"optimizer{number}/{path[2]}/{path[1]}"
            if tensor is not None:
                self._tensors[label] = tensor
            elif entry is not None:
                value = self._value(entry)
                dtype = torch.float64 if isinstance(value, float) else None
                if isinstance(value, bool | int | float):
                    self._numbers[f"optimizer{number}/{path[2]}{NUMBER}/{path[1]}"] = torch.tensor(value, dtype=dtype)

    def _name_states(self) -> None:
        """Give states that are numbered the names of their parameters, where these are given or the shapes tell."""
        for number in self._groups:
            part = f"optimizer{number}"
            numbered = [label for label in self.names(part) if label.partition("/")[2].isdigit()]
            names = self._names or self._names_by_shapes(part, numbered)
            if not numbered or names is None:
                continue
            self._positions[number] = names
            for label in numbered:
                key, _, at = label.partition("/")
                named = f"{part}/{key}/{names[int(at)] if int(at) < len(names) else at}"
                if f"{part}/{label}" in self._tensors:
                    self._tensors[named] = self._tensors.pop(f"{part}/{label}")
                else:
                    self._numbers[named] = self._numbers.pop(f"{part}/{label}")

    def _names_by_shapes(self, part: str, numbered: Sequence[str]) -> list[str] | None:
        """The names of the model's tensors where each of them, in order, has states of its shape."""
        names = self.names(MODEL)
        shapes: dict[int, tuple[int, ...]] = {}
        for label in numbered:
            at = int(label.partition("/")[2])
            shapes[at] = max(shapes.get(at, ()), self.tensor(f"{part}/{label}").shape, key=len)
        fits = sorted(shapes) == list(range(len(names))) and all(
            shapes[at] == self.tensor(f"{MODEL}/{name}").shape for at, name in enumerate(names)
        )
        return names if fits else None

    # Values ------------------------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self._tensors or name in self._numbers

    def names(self, part: str) -> list[str]:
        """The names of a part's tensors."""
        every = (*self._tensors, *self._numbers)
        return [name[len(part) + 1 :] for name in every if name.startswith(f"{part}/")]

    def tensor(self, name: str) -> DcpTensor:
        """What is known of a tensor. Raises CheckpointError where there is none of that name."""
        if name in self._numbers:
            return DcpTensor(name_of(self._numbers[name].dtype, name), (), ())
        if name not in self._tensors:
            raise CheckpointError(f"{self} has no tensor {name!r}: {nearest(name, self._tensors)[:300]}")
        return self._tensors[name]

    def boxes(self, name: str, box: Box) -> Iterator[tuple[Box, Bytes]]:
        """The pieces of a box of a tensor, as views of the files."""
        if name in self._numbers:
            yield box, self._numbers[name].reshape(1).view(torch.uint8).numpy()
            return
        tensor = self.tensor(name)
        for held, entry in tensor.chunks:
            shared = box.meet(held)
            if shared is not None:
                yield shared, self._chunk(entry, tensor.dtype, held.shape, name)[shared.inside(held)]

    @property
    def step(self) -> int:
        """The number of steps that were trained, as the first optimizer counts them; 0 where none does."""
        return self._steps(0)

    def _steps(self, number: int) -> int:
        found = 0
        for key in ("step", f"step{NUMBER}"):
            for name in self.names(f"optimizer{number}/{key}"):
                found = max(found, int(state_value(self, f"optimizer{number}/{key}/{name}")))
        return found

    def content(self, tensors: Callable[[str], Any]) -> Any:
        """The values that are no tensors, as a checkpoint has them. Those of no model and no optimizer are in ``user``
        by their keys; what needs a pickle to be read is left out with a warning.

        Raises CheckpointError: the states of an optimizer are numbered, and no names are known for them.
        """
        optimizers = [
            told_of(self._named_groups(number), self._steps(number), self._class) for number in sorted(self._groups)
        ]
        user: dict[str, Any] = {}
        refused: list[str] = []
        for key, entry in self._user.items():
            try:
                user[key] = self._value(entry)
            except CheckpointError:
                refused.append(key)
        if refused:
            warnings.warn(
                f"{self}: {', '.join(refused[:6])} {'needs' if len(refused) == 1 else 'need'} a pickle to be read, "
                f"which may run anything, and {'is' if len(refused) == 1 else 'are'} left out",
                PlanWarning, stacklevel=2,
            )  # fmt: skip
        user |= {name: tensors(f"{USER}/{name}") for name in self.names(USER)}
        extra = {name: self._value(entry) for name, entry in self._extra.items()}
        return content_of(optimizers, self.step, user or None) | {"extra": extra}

    def _named_groups(self, number: int) -> list[dict[str, Any]]:
        """The groups of an optimizer: options, and the names of parameters."""
        options: dict[str | int, dict[str, Any]] = {}
        for path, entry in self._groups[number].items():
            where, key = path[0], ".".join(map(str, path[1:]))
            options.setdefault(where, {})[key] = self._value(entry)
        if all(isinstance(where, int) for where in options):
            groups = [{**held, PARAMS: list(held.get(PARAMS, ()))} for _, held in sorted(options.items())]
            return named_by_position(groups, self._positions.get(number), str(self))[0]
        merged: list[dict[str, Any]] = []  # the options of each parameter: of a flattened state dict
        for name, held in options.items():
            for group in merged:
                if {key: value for key, value in group.items() if key != PARAMS} == held:
                    group[PARAMS].append(name)
                    break
            else:
                merged.append({**held, PARAMS: [name]})
        return merged

    # Files -------------------------------------------------------------------------------------------------------

    def _map(self, entry: Entry) -> Bytes:
        """The bytes of an entry, as a view of its file."""
        path = self._path / entry.file
        if entry.file not in self._maps:
            try:
                self._maps[entry.file] = np.memmap(path, dtype=np.uint8, mode="r")
            except (OSError, ValueError) as failed:
                raise CheckpointError(f"{path}: the file of the DCP folder cannot be read: {failed}") from failed
        held = self._maps[entry.file]
        if entry.offset + entry.length > held.size:
            raise CheckpointError(
                f"{path}: the file has {held.size:,} bytes, and {METADATA} tells of {entry.offset + entry.length:,}: "
                f"it is damaged, or of another checkpoint"
            )
        return held[entry.offset : entry.offset + entry.length]

    def _value(self, entry: Entry) -> Any:
        """A value that is no tensor. Raises CheckpointError where only a pickle holds it, or the file is damaged."""
        try:
            return torch.load(io.BytesIO(self._map(entry).tobytes()), map_location="cpu", weights_only=True)
        except _DAMAGED as failed:
            if isinstance(failed, CheckpointError):
                raise
            raise CheckpointError(
                f"{self._path / entry.file}: the value at byte {entry.offset:,} is not one of tensors, numbers and "
                f"texts, or damaged: {str(failed).splitlines()[0][:200]}"
            ) from failed

    def _chunk(self, entry: Entry, dtype: str, shape: tuple[int, ...], name: str) -> Bytes:
        """The bytes of a chunk, of its shape and one more dim of the bytes of an entry: a view of the file, in which
        ``torch.save`` lays the entries of a tensor down as they are."""
        if entry in self._chunks:
            return self._chunks[entry]
        data, path = self._map(entry), self._path / entry.file
        try:
            torch_dtype = dtype_of(dtype, name)
            laid = torch.load(io.BufferedReader(_Slice(data)), map_location="meta", weights_only=True)
            if not isinstance(laid, torch.Tensor) or (laid.dtype, tuple(laid.shape)) != (torch_dtype, shape):
                raise ValueError(f"{name} is not the tensor of {dtype} and shape {shape} that {METADATA} tells of")
            entries = _entries_in(data)
            width = ITEM_BYTES[dtype]
            strides = [stride * width for stride in laid.stride()]
            first = laid.storage_offset() * width
            last = first + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + width
            if math.prod(shape) and last > entries.size:
                raise ValueError(f"{name} has {entries.size:,} bytes, and {last:,} are needed")
        except _DAMAGED as failed:
            if isinstance(failed, CheckpointError):
                raise
            raise CheckpointError(
                f"{path}: the chunk at byte {entry.offset:,} is damaged, or no tensor of torch.save: "
                f"{str(failed).splitlines()[0][:200]}"
            ) from failed
        found: Bytes = np.lib.stride_tricks.as_strided(entries[first:], (*shape, width), (*strides, 1), writeable=False)
        self._chunks[entry] = found
        return found


def open_dcp(path: Path, names: Sequence[str] | None = None, optimizer_class: str | None = None) -> DcpFolder:
    """A DCP folder as a saved state. Nothing in it is run: its metadata is read by a reader that knows DCP's own
    records alone, and values as ``torch.load(weights_only=True)`` takes them.

    Args:
        names: the parameters in the order in which the optimizer got them, for a folder that numbers them.
        optimizer_class: as ``AdamW``; None: as the options of its groups tell.

    Raises:
        CheckpointError: the folder is none of DCP's, damaged, or names in its metadata what DCP does not write.
    """
    return DcpFolder(path, names, optimizer_class)


def _optimizer_prefix(path: Path_) -> Path_ | None:
    """The part of a path that leads to an optimizer's state dict; None where it leads to none."""
    for at, part in enumerate(path[:-1]):
        if not (isinstance(part, str) and OPTIMIZER.fullmatch(part)):
            continue
        end = at + 1
        while end < len(path) - 1 and isinstance(path[end], int):
            end += 1
        if str(path[end]).partition(".")[0] in ("state", "param_groups"):
            return path[:end]
    return None


def _split(path: Path_) -> Path_:
    """The path inside of an optimizer's state dict: (``state``, parameter, state) or (``param_groups``, group, option);
    flattened state dicts have it in one text."""
    if len(path) > 1:
        first, second, *rest = path
        return (first, second, ".".join(map(str, rest))) if rest else path
    kind, _, rest_text = str(path[0]).partition(".")
    name, _, last = rest_text.rpartition(".")
    return (kind, int(name) if kind == "param_groups" and name.isdigit() else name, last)


def _model_name(path: Path_) -> str | None:
    """The name in the model's state dict that a path leads to; None where it leads to none."""
    for at, part in enumerate(path[:-1]):
        if part in MODELS:
            return ".".join(map(str, path[at + 1 :]))
    return None


class _Slice(io.RawIOBase):
    """Bytes in memory as a file, not copied."""

    def __init__(self, data: Bytes) -> None:
        self._data, self._at = data.data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = max(0, origin + offset)
        return self._at

    def readinto(self, into: Any) -> int:
        view = memoryview(into).cast("B")
        data = self._data[self._at : self._at + len(view)]
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


_LOCAL_HEADER = 30
"""The bytes of a header in a zip archive before the name of its file, whose length is at bytes 26 and 27, and that of
what follows the name at 28 and 29 (APPNOTE.TXT, section 4.3.7)."""


def _entries_in(data: Bytes) -> Bytes:
    """The entries of the one tensor that ``torch.save`` wrote to an archive, as a view. Raises ValueError where it
    holds more, or packs them."""
    with zipfile.ZipFile(_Slice(data)) as archive:
        records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if "byteorder" in records and archive.read(records["byteorder"]) != b"little":
            raise ValueError("the entries have the order of bytes of another machine")
    held = [info for name, info in records.items() if name.startswith("data/")]
    if len(held) != 1 or held[0].compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{len(held)} storages in place of one, or packed")
    header = held[0].header_offset
    of_name, of_extra = struct.unpack("<HH", data[header + 26 : header + _LOCAL_HEADER].tobytes())
    first = header + _LOCAL_HEADER + of_name + of_extra
    return data[first : first + held[0].file_size]


# Writing ---------------------------------------------------------------------------------------------------------


def write_dcp(state: SavedState, path: Path) -> None:
    """Write a saved state as a DCP folder, by torch's own writer, in the layout of
    `torch.distributed.checkpoint.state_dict.get_state_dict`: ``{"model": …, "optim": …}``, further optimizers as
    ``optim1`` and so on. No more than one tensor is in memory at a time.

    Raises CheckpointError where the state has the names of another framework, the folder holds a checkpoint already, or
    cannot be written.
    """
    if state.framework != "torch":
        raise CheckpointError(
            f"{state} has the names of a {state.framework} run, and DCP those of a torch model: translate it first, by "
            f"a map of names"
        )
    if (path / METADATA).exists():
        raise CheckpointError(f"{path} holds a DCP checkpoint already: name another folder")
    labels: dict[str, str] = {}
    content = state.content(lambda name: read_whole(state, name))
    labelled = {name: f"{MODEL}/{name}" for name in state.names(MODEL)}
    ties = content.get("ties", {})
    labelled |= {alias: labelled[name] for alias, name in ties.items() if name in labelled}
    model: dict[str, Any] = {name: _stand_in(state, label) for name, label in labelled.items()}
    labels |= {f"model.{name}": label for name, label in labelled.items()}
    model |= content.get("extra") or {}
    tree: dict[str, Any] = {"model": model}
    for number, told in enumerate(content["optimizers"]):
        key = f"optim{number or ''}"
        states: dict[str, dict[str, Any]] = {}
        for name, held in optimizer_states(state, number).items():
            for kind, label in held.items():
                if kind.endswith(NUMBER):
                    states.setdefault(name, {})[kind.removesuffix(NUMBER)] = state_value(state, label)
                else:
                    states.setdefault(name, {})[kind] = _stand_in(state, label)
                    labels[f"{key}.state.{name}.{kind}"] = label
        tree[key] = {"state": states, "param_groups": [dict(group) for group in told["groups"]]}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            # A file for each value: of one file the writer keeps all tensors until it ends.
            writer = FileSystemWriter(path, single_file_per_rank=False, overwrite=False)
            save(tree, storage_writer=writer, planner=_Streamed(state, labels), no_dist=True)
    except (OSError, RuntimeError, CheckpointException) as failed:
        raise CheckpointError(f"{path}: the DCP folder cannot be written: {failed}") from failed


class _Streamed(DefaultSavePlanner):
    """A planner that reads each tensor when it is its turn to be written."""

    def __init__(self, state: SavedState, labels: Mapping[str, str]) -> None:
        super().__init__()
        self._state, self._labels = state, labels

    def lookup_object(self, index: Any) -> Any:
        label = self._labels.get(index.fqn)
        return super().lookup_object(index) if label is None else read_whole(self._state, label)


def _stand_in(state: SavedState, label: str) -> torch.Tensor:
    """A tensor without memory, of a saved one's dtype and shape."""
    told = state.tensor(label)
    return torch.empty(told.shape, dtype=dtype_of(told.dtype, label), device="meta")
