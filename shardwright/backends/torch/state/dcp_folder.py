"""Folders of `torch.distributed.checkpoint` (DCP), read in place as a saved state."""

import io
import math
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwright.backends.torch.state.dcp_keys import USER, nested, placed
from shardwright.backends.torch.state.dcp_metadata import METADATA, DcpTensor, Entry, read_metadata
from shardwright.backends.torch.state.plain_states import (
    PARAMS,
    content_of,
    named_by_position,
    state_value,
    told_of,
)
from shardwright.backends.torch.state.saved_parts import MODEL, NUMBER, dtype_of, name_of
from shardwright.core.checkpoint.boxes import Box
from shardwright.core.checkpoint.tensor_file import ITEM_BYTES, Bytes
from shardwright.core.errors import CheckpointError, PlanWarning, nearest


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
        entries = self._metadata.entries
        self.files = [path / METADATA, *(path / file for file in entries)]
        missing = [file.name for file in self.files if not file.is_file()]
        if missing:
            raise CheckpointError(f"{path}: {METADATA} names {missing[0]}, which is not in the folder")
        for file, held in entries.items():
            _require_filled(path / file, held)
        self._maps: dict[str, Bytes] = {}
        self._chunks: dict[Entry, Bytes] = {}
        self._positions: dict[int, Sequence[str]] = {}
        self._places = placed(self._metadata)
        self._tensors = self._places.tensors
        self._numbers = dict(self._read_numbers())
        self._name_states()

    def __str__(self) -> str:
        return f"the DCP folder {self._path}"

    # Names -------------------------------------------------------------------------------------------------------

    def _read_numbers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The states that are numbers of Python's, as a checkpoint has them."""
        for label, entry in self._places.states.items():
            value = self._value(entry)
            if isinstance(value, bool | int | float):
                part, key, name = label.split("/", 2)
                dtype = torch.float64 if isinstance(value, float) else None
                yield f"{part}/{key}{NUMBER}/{name}", torch.tensor(value, dtype=dtype)

    def _name_states(self) -> None:
        """Give states that are numbered the names of their parameters, where these are given or the shapes tell."""
        for number in self._places.groups:
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
            told_of(self._named_groups(number), self._steps(number), self._class)
            for number in sorted(self._places.groups)
        ]
        user: dict[str, Any] = {}
        refused: list[str] = []
        for key, entry in self._places.user.items():
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
        extra = {
            name: nested(
                {
                    place: tensors(entry) if isinstance(entry, str) else self._value(entry)
                    for place, entry in held.items()
                }
            )
            for name, held in self._places.extra.items()
        }
        return content_of(optimizers, self.step, user or None) | {"extra": extra}

    def _named_groups(self, number: int) -> list[dict[str, Any]]:
        """The groups of an optimizer: options, and the names of parameters."""
        options: dict[str | int, dict[str, Any]] = {}
        for path, entry in self._places.groups[number].items():
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
        return self._maps[entry.file][entry.offset : entry.offset + entry.length]

    def _value(self, entry: Entry) -> Any:
        """A value that is no tensor. Raises CheckpointError where only a pickle holds it, or the file is damaged."""
        data = self._map(entry)
        try:
            if zipfile.is_zipfile(_Slice(data)):
                with zipfile.ZipFile(_Slice(data)) as archive:
                    for info in archive.infolist():
                        _require_sum(_record(data, info), info)
            return torch.load(io.BytesIO(data.tobytes()), map_location="cpu", weights_only=True)
        except CheckpointError:
            raise
        except Exception as failed:  # of any class, where bytes are none of torch's
            raise CheckpointError(
                f"{self._path / entry.file}: the value at byte {entry.offset:,} is not one of tensors, numbers and "
                f"texts, or damaged: {str(failed).partition(chr(10))[0][:200]}"
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
        except CheckpointError:
            raise
        except Exception as failed:  # of any class, where bytes are none of torch's
            raise CheckpointError(
                f"{path}: the chunk at byte {entry.offset:,} is damaged, or no tensor of torch.save: "
                f"{str(failed).partition(chr(10))[0][:200]}"
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


def _require_filled(path: Path, entries: Sequence[Entry]) -> None:
    """Raise CheckpointError unless the entries of a file lie apart, and end where it does."""
    size, at = path.stat().st_size, 0
    for entry in entries:
        if entry.offset < at:
            raise CheckpointError(
                f"{path}: {METADATA} tells of two values that share byte {entry.offset:,}: it is damaged, or of "
                f"another checkpoint"
            )
        at = entry.offset + entry.length
    if at != size:
        raise CheckpointError(
            f"{path}: the file has {size:,} bytes, and {METADATA} tells of {at:,}: it is damaged, or of another "
            f"checkpoint"
        )


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


_SUM_BYTES = 1 << 24
"""The bytes of which a checksum is made at a time."""
_LOCAL_HEADER = 30
"""The bytes of a header in a zip archive before the name of its file, whose length is at bytes 26 and 27, and that of
what follows the name at 28 and 29 (APPNOTE.TXT, section 4.3.7)."""


def _entries_in(data: Bytes) -> Bytes:
    """The entries of the one tensor that ``torch.save`` wrote to an archive, as a view. Raises ValueError where it
    holds more, packs them, or has other bytes than were written, as the archive's checksums tell."""
    with zipfile.ZipFile(_Slice(data)) as archive:
        records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        for info in records.values():
            _require_sum(_record(data, info), info)
        if "byteorder" in records and _record(data, records["byteorder"]).tobytes() != b"little":
            raise ValueError("the entries have the order of bytes of another machine")
    held = [info for name, info in records.items() if name.startswith("data/")]
    if len(held) != 1 or held[0].compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{len(held)} storages in place of one, or packed")
    return _record(data, held[0])


def _record(data: Bytes, info: zipfile.ZipInfo) -> Bytes:
    """The bytes of a record of an archive, as a view. Raises ValueError where they are packed, or not all there."""
    header = info.header_offset
    of_name, of_extra = struct.unpack("<HH", data[header + 26 : header + _LOCAL_HEADER].tobytes())
    first = header + _LOCAL_HEADER + of_name + of_extra
    found = data[first : first + info.file_size]
    if info.compress_type != zipfile.ZIP_STORED or found.size != info.file_size:
        raise ValueError(f"{info.filename} is packed, or not all there")
    return found


def _require_sum(data: Bytes, info: zipfile.ZipInfo) -> None:
    """Raise ValueError where a record has not the checksum that was written with it. torch writes 0 where
    `torch.serialization.set_crc32_options` says that there is none."""
    found = 0
    for first in range(0, data.size, _SUM_BYTES):
        found = zlib.crc32(data[first : first + _SUM_BYTES].data, found)
    if info.CRC not in (0, found):
        raise ValueError(f"the bytes of {info.filename} are not those that were written")
