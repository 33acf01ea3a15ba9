"""Files of tensors in the safetensors format, written as a stream and read in place, with a digest of every chunk.

The format is that of https://github.com/huggingface/safetensors: eight bytes with the length of a header, a header in
JSON that gives every tensor its dtype, shape and place, and the bytes of all tensors. Entries are handled as bytes, so
that 16-bit types need no framework. The library itself reads and writes whole tensors only, and knows no digests.
"""

import json
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardwright.core.checkpoint.boxes import Box
from shardwright.core.errors import CheckpointError

ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes of an entry of every dtype that the format names."""
CHUNK_BYTES = 1 << 20
"""The bytes that a digest is of: a reader of a few rows reads as much, and no more, to check them."""
MOST_HEADER_BYTES = 100 << 20
"""The most bytes of a header, the limit of the safetensors library."""
METADATA = "__metadata__"
"""The key of the header that names no tensor, and has texts."""
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ToWrite:
    """A tensor to be written: ``bytes`` gives its entries, row by row, when it is its turn."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    bytes: Callable[[], Bytes]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Written:
    """What is known of a file that was written: its size, and a digest of each chunk of `CHUNK_BYTES`."""

    size_bytes: int
    chunks: tuple[str, ...]


class _Digested:
    """A file that digests what is written to it, chunk by chunk."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.size_bytes, self.chunks = file, 0, list[str]()
        self._hash, self._filled = xxhash.xxh3_64(), 0

    def write(self, data: memoryview) -> None:
        self._file.write(data)
        self.size_bytes += len(data)
        while len(data):
            piece = data[: CHUNK_BYTES - self._filled]
            self._hash.update(piece)
            self._filled += len(piece)
            data = data[len(piece) :]
            if self._filled == CHUNK_BYTES:
                self._end_chunk()

    def end(self) -> Written:
        if self._filled:
            self._end_chunk()
        return Written(self.size_bytes, tuple(self.chunks))

    def _end_chunk(self) -> None:
        self.chunks.append(self._hash.hexdigest())
        self._hash, self._filled = xxhash.xxh3_64(), 0


def write(file: BinaryIO, tensors: Sequence[ToWrite], metadata: Mapping[str, str] | None = None) -> Written:
    """Write tensors to an open file, one after the other; no more than one of them is asked for at a time.
    ``metadata``: texts of the header's own. Raises CheckpointError for two of one key."""
    header: dict[str, Any] = {} if metadata is None else {METADATA: dict(metadata)}
    at = 0
    for tensor in tensors:
        if tensor.key in header:
            raise CheckpointError(
                f"two tensors would have the key {tensor.key!r} in one file: name one of them otherwise"
            )
        header[tensor.key] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.size_bytes],
        }
        at += tensor.size_bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    out = _Digested(file)
    out.write(memoryview(len(text).to_bytes(8, "little") + text))
    for tensor in tensors:
        data = np.ascontiguousarray(tensor.bytes()).reshape(-1)
        assert data.nbytes == tensor.size_bytes, tensor.key
        out.write(data.data)
    return out.end()


def write_path(path: Path, tensors: Sequence[ToWrite], metadata: Mapping[str, str] | None = None) -> Written:
    """Write tensors to a new file, which outlives a loss of power afterwards. Raises OSError as files do."""
    with path.open("wb") as file:
        told = write(file, tensors, metadata)
        file.flush()
        os.fsync(file.fileno())
    return told


class TensorFile:
    """A file of tensors that is read in place, each chunk checked when it is first read.

    ``known``: the size and the digests that the file must have; None for files of others, which have none.
    Raises CheckpointError for a file that is missing, has another size or is no safetensors file.
    """

    def __init__(self, path: Path, known: Written | None = None) -> None:
        self.path, self._known = path, known
        try:
            size = path.stat().st_size
        except OSError as failed:
            raise CheckpointError(f"{path}: the checkpoint's file cannot be read: {failed.strerror}") from failed
        if known is not None and size != known.size_bytes:
            raise CheckpointError(
                f"{path}: the file has {size:,} bytes, and was written with {known.size_bytes:,}: it is damaged"
            )
        if known is not None and len(known.chunks) != -(-size // CHUNK_BYTES):
            raise CheckpointError(
                f"{path}: the index has {len(known.chunks)} digests for {size:,} bytes: it is damaged"
            )
        if size < 8:
            raise CheckpointError(f"{path}: no safetensors file: it has {size} bytes")
        try:
            self._bytes: Bytes = np.memmap(path, dtype=np.uint8, mode="r")
        except OSError as failed:
            raise CheckpointError(f"{path}: the checkpoint's file cannot be read: {failed.strerror}") from failed
        self._checked = np.zeros(0 if known is None else len(known.chunks), dtype=bool)
        self.entries = self._read_header(size)

    def _read_header(self, size: int) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """The dtype, the shape and the first byte of every tensor."""
        self._check(0, 8)
        length = int.from_bytes(self._bytes[:8].tobytes(), "little")
        if length > min(MOST_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{self.path}: no safetensors file: its header would have {length:,} bytes")
        self._check(8, 8 + length)
        try:
            header = json.loads(self._bytes[8 : 8 + length].tobytes(), object_pairs_hook=_once)
            found = {key: self._place(entry, 8 + length, size) for key, entry in header.items() if key != METADATA}
            _require_filled(found, 8 + length, size)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as failed:
            raise CheckpointError(f"{self.path}: the header of the safetensors file is damaged: {failed}") from failed
        return found

    @staticmethod
    def _place(entry: Mapping[str, Any], origin: int, size: int) -> tuple[str, tuple[int, ...], int]:
        dtype, shape, (first, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if dtype not in ITEM_BYTES:
            raise ValueError(f"dtype {dtype!r} is not known")
        if not all(type(n) is int and n >= 0 for n in (*shape, first, end)):
            raise ValueError("sizes are whole numbers")
        if end - first != math.prod(shape) * ITEM_BYTES[dtype] or origin + end > size:
            raise ValueError(f"a tensor of {dtype} and shape {shape} does not lie in bytes {first} to {end}")
        return dtype, shape, origin + first

    def read(self, key: str, box: Box | None = None) -> Bytes:
        """The bytes of a tensor, or of a box of it, of the box's shape and one more dim of the bytes of an entry. It is
        a view of the file. Raises CheckpointError where the file has no such tensor, or is damaged there."""
        if key not in self.entries:
            raise CheckpointError(f"{self.path}: the file has no tensor {key!r}")
        dtype, shape, at = self.entries[key]
        width, box = ITEM_BYTES[dtype], box or Box.whole(shape)
        if len(box.shape) != len(shape) or any(b > n for b, n in zip(box.stop, shape, strict=True)):
            raise CheckpointError(f"{self.path}: tensor {key!r} has shape {shape}, without {box}")
        strides = [width * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        first = at + sum(a * s for a, s in zip(box.start, strides, strict=True))
        last = at + sum((b - 1) * s for b, s in zip(box.stop, strides, strict=True)) + width
        whole = self._bytes[at : at + math.prod(shape) * width].reshape(*shape, width)
        if box.entries:
            self._check(first, last)
        return whole[box.inside(Box.whole(shape))]

    def _check(self, first: int, end: int) -> None:
        """Check the chunks of some bytes. Raises CheckpointError where one is not as it was written."""
        if self._known is None:
            return
        for chunk in range(first // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
            if self._checked[chunk]:
                continue
            data = self._bytes[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
            if xxhash.xxh3_64(data.data).hexdigest() != self._known.chunks[chunk]:
                raise CheckpointError(
                    f"{self.path}: bytes {chunk * CHUNK_BYTES:,} to {chunk * CHUNK_BYTES + len(data):,} are not those "
                    f"that were written: the file is damaged, or another's; take an earlier checkpoint"
                )
            self._checked[chunk] = True


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError where it has a key twice, which could mean either value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} is there twice")
    return found


def _require_filled(entries: Mapping[str, tuple[str, tuple[int, ...], int]], origin: int, size: int) -> None:
    """Raise ValueError unless tensors lie one after the other and fill the file, as the format demands: else bytes are
    missing, or the header is another file's."""
    at = origin
    for key, (dtype, shape, first) in sorted(entries.items(), key=lambda item: (item[1][2], math.prod(item[1][1]))):
        if first != at:
            raise ValueError(f"tensor {key!r} begins at byte {first:,}, and the one before ends at {at:,}")
        at += math.prod(shape) * ITEM_BYTES[dtype]
    if at != size:
        raise ValueError(f"the tensors end at byte {at:,}, and the file has {size:,}")


class TensorFiles:
    """Files of tensors in a folder, of which some are open at a time: the ones that were read last."""

    MOST_OPEN = 64

    def __init__(self, folder: Path, known: Mapping[str, Written]) -> None:
        self._folder, self._known = folder, known
        self._open: OrderedDict[str, TensorFile] = OrderedDict()

    def __getitem__(self, name: str) -> TensorFile:
        """The file of a name. Raises CheckpointError for one that is not known, missing or damaged."""
        if name not in self._open:
            if name not in self._known:
                raise CheckpointError(f"{self._folder}: the index names a file {name!r} that it does not know")
            self._open[name] = TensorFile(self._folder / name, self._known[name])
        self._open.move_to_end(name)
        if len(self._open) > self.MOST_OPEN:
            self._open.popitem(last=False)
        return self._open[name]

    def require_all(self) -> None:
        """Raise CheckpointError where a file is missing or has another size than it was written with."""
        for name, written in self._known.items():
            path = self._folder / name
            if not path.exists() or path.stat().st_size != written.size_bytes:
                raise CheckpointError(
                    f"{path}: the file is missing, or has not the {written.size_bytes:,} bytes that were written"
                )


def digest_of(data: bytes) -> str:
    """The digest by which a file is known."""
    return xxhash.xxh3_128(data).hexdigest()
