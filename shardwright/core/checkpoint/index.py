"""The index of a checkpoint, and its marker: JSON that is checked when it is read.

The index says for every tensor of the logical state, by name, which boxes of it lie in which file under which key; for
every file its size and the digests of its chunks; and it holds the values that are no tensors. The marker is written
last: a checkpoint without one is not complete.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from shardwright.core.checkpoint.boxes import Box
from shardwright.core.checkpoint.tensor_file import ITEM_BYTES, digest_of
from shardwright.core.errors import CheckpointError

FORMAT = "shardwright-checkpoint"
VERSION = 1
Count = Annotated[int, Field(ge=0, strict=True)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,200}$")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileRecord(_Section):
    """A file of tensors: its size, and the digest of every chunk."""

    size_bytes: Count
    chunks: tuple[str, ...]


class PieceRecord(_Section):
    """A box of a tensor, in a file under a key."""

    file: Name
    key: str
    start: tuple[Count, ...]
    shape: tuple[Count, ...]

    @property
    def box(self) -> Box:
        return Box(self.start, self.shape)


class TensorRecord(_Section):
    """A tensor of the logical state, and the pieces that it lies in, which share nothing and lack nothing."""

    dtype: str
    shape: tuple[Count, ...]
    pieces: tuple[PieceRecord, ...]

    @model_validator(mode="after")
    def _is_whole(self) -> "TensorRecord":
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is not known")
        if (fault := fault_of_pieces(self.shape, [piece.box for piece in self.pieces])) is not None:
            raise ValueError(fault)
        return self


class RankTensor(_Section):
    """One rank's pieces of a tensor."""

    dtype: str
    shape: tuple[Count, ...]
    pieces: tuple[PieceRecord, ...]


class RankRecord(_Section):
    """What one rank wrote: its files, its pieces of tensors by name, and the values that are no tensors and that it
    alone has, by the part of the content and their names."""

    files: dict[Name, FileRecord]
    tensors: dict[str, RankTensor]
    content: dict[str, dict[str, Any]] = {}


class Index(_Section):
    """The index of a checkpoint."""

    format: Literal["shardwright-checkpoint"]
    version: int
    save: Name
    """The name of the save: every save has its own, and its files have it in theirs."""
    sequence: Count
    """Later checkpoints of a folder have larger numbers."""
    step: Count
    framework: str
    ranks: Count
    files: dict[Name, FileRecord]
    tensors: dict[str, TensorRecord]
    content: dict[str, Any]
    """The values that are no tensors, as `content.encoded` writes them."""
    plan: dict[str, Any] | None
    """The plan under which the state was written; None without one."""


class Marker(_Section):
    """The marker of a complete checkpoint."""

    format: Literal["shardwright-checkpoint"]
    version: int
    tag: str
    """The name of the folder that it was written to: copies under another name are the user's own."""
    save: Name
    sequence: Count
    step: Count
    index: Name
    """The file of the index."""
    index_bytes: Count
    index_digest: str
    digest: str
    """The digest of the marker without this line."""

    def own_digest(self) -> str:
        return digest_of(json.dumps(self.model_dump(exclude={"digest"}), sort_keys=True).encode())


RecordT = TypeVar("RecordT", Index, Marker, RankRecord)


def fault_of_pieces(shape: tuple[int, ...], boxes: list[Box]) -> str | None:
    """What is wrong with boxes that should make up a tensor; None where nothing is."""
    whole = Box.whole(shape)
    for box in boxes:
        if len(box.shape) != len(shape) or any(b > n for b, n in zip(box.stop, shape, strict=True)):
            return f"{box} is not inside of shape {shape}"
    held = sum(box.entries for box in boxes)
    if held < whole.entries:
        return f"of {whole.entries} entries, {whole.entries - held} are in no piece"
    ordered = sorted((box for box in boxes if box.entries), key=lambda box: box.start)
    for number, one in enumerate(ordered):
        for other in ordered[number + 1 :]:
            if shape and other.start[0] >= one.stop[0]:
                break
            if one.meet(other) is not None:
                return f"{one} and {other} share entries"
    return None


def merged(records: dict[int, RankRecord]) -> tuple[dict[str, FileRecord], dict[str, TensorRecord]]:
    """The files and the tensors of all ranks together. Raises CheckpointError where two ranks have different tensors
    under one name, or a tensor lacks entries, or has some twice: then nothing is to be published."""
    files: dict[str, FileRecord] = {}
    found: dict[str, RankTensor] = {}
    pieces: dict[str, list[PieceRecord]] = {}
    for rank, record in sorted(records.items()):
        files |= record.files
        for name, own in record.tensors.items():
            known = found.setdefault(name, own)
            if (known.dtype, known.shape) != (own.dtype, own.shape):
                raise CheckpointError(
                    f"rank {rank} has {name} in {own.dtype} of shape {own.shape}, and another rank in "
                    f"{known.dtype} of shape {known.shape}: nothing was published"
                )
            pieces.setdefault(name, []).extend(own.pieces)
    tensors = {}
    for name, own in found.items():
        if (fault := fault_of_pieces(own.shape, [piece.box for piece in pieces[name]])) is not None:
            raise CheckpointError(f"{name} of shape {own.shape} was not written whole: {fault}; nothing was published")
        tensors[name] = TensorRecord(dtype=own.dtype, shape=own.shape, pieces=tuple(pieces[name]))
    return files, tensors


def with_content_of(records: Mapping[int, RankRecord], content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a checkpoint with the values that single ranks have. Raises CheckpointError where two ranks have
    one of the same name: then nothing is to be published."""
    found = dict(content)
    for rank, record in sorted(records.items()):
        for part, values in record.content.items():
            known = found.setdefault(part, {})
            if twice := sorted(known.keys() & values.keys()):
                raise CheckpointError(
                    f"rank {rank} and another rank both have {part} of {twice[0]}: nothing was published"
                )
            found[part] = known | values
    return found


def read_index(text: bytes, source: str) -> Index:
    """The index in a file's bytes. Raises CheckpointError where it is none, or of another version."""
    return _checked(Index, text, source)


def read_marker(text: bytes, source: str) -> Marker:
    """The marker in a file's bytes. Raises CheckpointError where it is none, of another version, or damaged."""
    found = _checked(Marker, text, source)
    if found.digest != found.own_digest():
        raise CheckpointError(f"{source}: the marker is damaged: take another checkpoint by its tag")
    return found


def _checked(kind: type[RecordT], text: bytes, source: str) -> RecordT:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as failed:
        raise CheckpointError(f"{source}: not JSON: {failed}; the file is damaged") from failed
    if kind is not RankRecord:
        version = document.get("version") if isinstance(document, dict) else None
        if not isinstance(document, dict) or document.get("format") != FORMAT or not isinstance(version, int):
            raise CheckpointError(f"{source}: no part of a checkpoint: expected format: {FORMAT!r}, and a version")
        if version != VERSION:
            age = "newer" if version > VERSION else "older"
            raise CheckpointError(f"{source}: version {version} is {age} than this Shardwright reads ({VERSION})")
    try:
        return kind.model_validate_json(text)
    except ValidationError as failed:
        first = failed.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{source}: {place}: {first['msg']}") from failed


def read_rank_record(text: bytes, source: str) -> RankRecord:
    """The record of one rank in a file's bytes. Raises CheckpointError where it is none."""
    return _checked(RankRecord, text, source)
