"""Folders of checkpoints: one folder for each tag, and in it the files of one complete save.

A save writes files whose names are its own, then the index, and the marker last; until then an earlier save under the
same tag stays what is read. Nothing is renamed but the marker, which replaces the one before: on object stores that is
one write too.
"""

import contextlib
import json
import os
import re
import secrets
import stat
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.core.checkpoint.boxes import Box
from shardwright.core.checkpoint.index import (
    VERSION,
    FileRecord,
    Index,
    Marker,
    PieceRecord,
    RankRecord,
    RankTensor,
    merged,
    read_index,
    read_marker,
    read_rank_record,
    with_content_of,
)
from shardwright.core.checkpoint.other_writers import KnownSaves, publishing_alone, require_alone
from shardwright.core.checkpoint.tensor_file import ToWrite, digest_of, write_path
from shardwright.core.checkpoint.together import put_together
from shardwright.core.errors import CheckpointError, PlanWarning, nearest
from shardwright.core.values.text_files import path_of

MARKER = "complete.json"
LOCKED_S = 60.0
"""The seconds that a run waits while another publishes to the same folder, at least."""
POLL_S = 0.02
"""Seconds between two looks for what other ranks have written."""
_OF_SAVE = re.compile(r"(?P<part>[a-z0-9-]+)\.(?P<save>[0-9a-f]{12})\.(?:json|safetensors)(?:\.part)?")
"""A pattern for the names of a save's files."""
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,200}")


@dataclass(frozen=True, slots=True)
class Save:
    """One save: its folder, the name that its files have, and its place among those of the folder."""

    folder: Path
    name: str
    sequence: int

    def file(self, part: str, rank: int, suffix: str) -> Path:
        return self.folder / f"{part}-{rank:05d}.{self.name}.{suffix}"


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor that a rank writes. ``bytes`` gives its entries row by row."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    bytes: Callable[[], Any]


def require_tag(tag: object) -> str:
    """The tag. Raises CheckpointError where it cannot be the name of a folder."""
    if not isinstance(tag, str) or _TAG.fullmatch(tag) is None:
        raise CheckpointError(
            f"tag={tag!r}: expected letters, digits, and . _ = - after the first, as 'step_100': it names a folder"
        )
    return tag


def require_keep(keep: object) -> None:
    """Raise CheckpointError for a number of checkpoints to keep that is none."""
    if keep is not None and (type(keep) is not int or keep < 1):
        raise CheckpointError(
            f"checkpoints to keep: expected a whole number of at least 1, or None for all; given {keep!r}"
        )


def folder_of(path: str | Path) -> Path:
    """The folder that a user names, wherever the process goes later. Raises CheckpointError where it is no path."""
    return path_of(path, CheckpointError).expanduser().absolute()


def begin(path: Path, tag: str, known: KnownSaves | None = None) -> Save:
    """Begin a save under a tag: one rank calls this, and tells the others. ``known``: the saves that the run knows.
    Raises CheckpointError where the folder cannot be made, or another run writes to it too."""
    folder = path / require_tag(tag)
    found = complete(path)
    names = set() if known is None else require_alone(path, found, known)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"probe.{secrets.token_hex(4)}"
        probe.touch()
        probe.unlink()
    except OSError as failed:
        raise CheckpointError(f"no checkpoint can be written to {folder}: {failed.strerror}") from failed
    last = max((marker.sequence for _, marker in found), default=0)
    save = Save(folder, secrets.token_hex(6), last + 1)
    names.add(save.name)
    return save


def write_rank(
    save: Save, rank: int, pieces: Mapping[str, list[Piece]], content: Mapping[str, dict[str, Any]] | None = None
) -> None:
    """Write one rank's pieces, by the part of the state that they belong to, each part to a file of its own; and last
    its record.

    content: values that are no tensors and that this rank alone has, by their part of the content that `publish` gets
    and their names there.

    Raises CheckpointError where a file cannot be written, as on a full disk; nothing of it is left then.
    """
    files: dict[str, FileRecord] = {}
    tensors: dict[str, RankTensor] = {}
    made: list[Path] = []
    try:
        for part, held in pieces.items():
            if not held:
                continue
            path = save.file(part, rank, "safetensors")
            made.append(path)
            keys = [_key(piece) for piece in held]
            told = write_path(
                path, [ToWrite(k, p.dtype, p.box.shape, p.bytes) for k, p in zip(keys, held, strict=True)]
            )
            files[path.name] = FileRecord(size_bytes=told.size_bytes, chunks=told.chunks)
            for key, piece in zip(keys, held, strict=True):
                own = PieceRecord(file=path.name, key=key, start=piece.box.start, shape=piece.box.shape)
                name = f"{part}/{piece.name}"
                before = tensors[name].pieces if name in tensors else ()
                tensors[name] = RankTensor(dtype=piece.dtype, shape=piece.shape, pieces=(*before, own))
        made.append(save.file("record", rank, "json"))
        _write_whole(
            made[-1], RankRecord(files=files, tensors=tensors, content=content or {}).model_dump_json().encode()
        )
    except OSError as failed:
        for path in made:
            path.unlink(missing_ok=True)
        raise CheckpointError(
            f"the checkpoint could not be written to {save.folder}: {failed.strerror}; what was there before stays"
        ) from failed


def publish(
    save: Save,
    ranks: int,
    timeout_s: float,
    *,
    step: int,
    framework: str,
    content: Any,
    plan: Any,
    keep: int | None,
    together: bool = False,
) -> None:
    """Wait for all ranks' records, write the index and then the marker; then drop what the marker replaced, and all
    but the last ``keep`` checkpoints. One rank calls this.

    Raises CheckpointError where a rank has written nothing within ``timeout_s``, where a tensor is not whole, or where
    a file is gone. Nothing is published then.
    """
    records = _gathered(save, ranks, timeout_s)
    files, tensors = merged(records)
    with publishing_alone(save.folder.parent, max(timeout_s, LOCKED_S)):
        for name, record in files.items():
            if not (save.folder / name).exists() or (save.folder / name).stat().st_size != record.size_bytes:
                raise CheckpointError(
                    f"{save.folder / name} is gone, or has changed, before the checkpoint was complete: does another "
                    f"run write to this folder? Nothing was published"
                )
        try:
            if together:
                files, tensors = put_together(save.folder, save.name, files, tensors)
            index = Index(
                format="shardwright-checkpoint", version=VERSION, save=save.name, sequence=save.sequence, step=step,
                framework=framework, ranks=ranks, files=files, tensors=tensors,
                content=with_content_of(records, content), plan=plan,
            )  # fmt: skip
            _write_marker(save, index)
        except OSError as failed:
            raise CheckpointError(
                f"the checkpoint could not be written to {save.folder}: {failed.strerror}"
            ) from failed
        _settle_folder(save.folder.parent)
        try:
            _clear(save, keep)
        except (OSError, CheckpointError) as failed:  # the checkpoint is complete
            warnings.warn(f"what {save.folder} replaces could not be removed: {failed}", PlanWarning, stacklevel=2)


def _write_marker(save: Save, index: Index) -> None:
    """Write the index of a save, and then the marker."""
    text = index.model_dump_json().encode()
    path = save.folder / f"index.{save.name}.json"
    _write_whole(path, text)
    marker = Marker(
        tag=save.folder.name, format="shardwright-checkpoint", version=VERSION, save=save.name,
        sequence=save.sequence, step=index.step, index=path.name, index_bytes=len(text),
        index_digest=digest_of(text), digest="",
    )  # fmt: skip
    marker = marker.model_copy(update={"digest": marker.own_digest()})
    aside = save.folder / f"marker.{save.name}.json"
    _write_whole(aside, marker.model_dump_json(indent=1).encode())
    os.replace(aside, save.folder / MARKER)
    _settle_folder(save.folder)


def _clear(save: Save, keep: int | None) -> None:
    """Drop what a complete save makes needless: records, other saves under its tag, and where not all are kept, older
    checkpoints and what other tags have of saves that were never completed."""
    begun = min((path.stat().st_mtime_ns for path in save.folder.glob(f"*.{save.name}.*")), default=0)
    for path in save.folder.iterdir():
        found = _OF_SAVE.fullmatch(path.name)
        if found is not None and (found["save"] != save.name or found["part"].startswith("record-")):
            path.unlink(missing_ok=True)
    if keep is not None:
        own = [(tag, other) for tag, other in complete(save.folder.parent) if tag == other.tag]
        for tag, other in own[:-keep]:
            remove(save.folder.parent / tag, other)
        for folder in save.folder.parent.iterdir():
            _drop_unfinished(folder, begun)


def _drop_unfinished(folder: Path, before_ns: int) -> None:
    """Drop a folder that has nothing but files of saves without a marker, none of which was written to since."""
    if folder.is_symlink() or not folder.is_dir() or (folder / MARKER).exists():
        return
    held = list(folder.iterdir())
    if held and all(_OF_SAVE.fullmatch(path.name) and path.stat().st_mtime_ns < before_ns for path in held):
        for path in held:
            path.unlink(missing_ok=True)
        folder.rmdir()


def abandon(save: Save) -> None:
    """Drop what was written of a save that is not going to be published; nothing of one that is complete."""
    marker = _marker_of(save.folder)
    if marker is not None and marker.save == save.name:
        return
    _drop(save.folder, save.name)
    with contextlib.suppress(OSError):  # something else is in it
        save.folder.rmdir()


def tell_failure(save: Save, rank: int, error: Exception) -> None:
    """Tell the rank that waits for the records of all that this one will not write its own; on a full disk by a file
    without bytes."""
    path = save.file("failure", rank, "json")
    try:
        _write_whole(path, json.dumps(f"{type(error).__name__}: {error}").encode())
    except OSError:
        with contextlib.suppress(OSError):
            path.touch()


def complete(path: Path) -> list[tuple[str, Marker]]:
    """The complete checkpoints of a folder, by tag, the oldest first. Links are none, and one whose marker is damaged
    is left out with a warning."""
    found = []
    for folder in _folders_in(path):
        if folder.is_symlink():
            continue
        try:
            marker = _marker_of(folder)
        except CheckpointError as damaged:
            warnings.warn(f"{damaged}: this checkpoint is left out", PlanWarning, stacklevel=2)
            continue
        if marker is not None:
            found.append((folder.name, marker))
    return sorted(found, key=lambda item: (item[1].sequence, item[1].save))


def has_none(path: Path) -> bool:
    """Whether a folder has no checkpoint that was completed, damaged ones among them, or does not exist. Raises
    CheckpointError where it may not be looked into, or is a file, or a checkpoint itself."""
    require_folder(path)
    return not any(_is_there(folder / MARKER) for folder in _folders_in(path))


def require_folder(path: Path) -> None:
    """Raise CheckpointError where a path, if there is anything, is not a folder of checkpoints but a file, or one of
    them."""
    if _is_there(path) and not _is_folder(path):
        raise CheckpointError(f"{path} is a file: expected the folder of checkpoints")
    if _is_there(path / MARKER):
        raise CheckpointError(
            f"{path} is itself a checkpoint: name the folder that it is in, {path.parent}, and tag={path.name!r}"
        )


def chosen(path: Path, tag: str | None) -> tuple[Path, Marker]:
    """The folder of the newest complete checkpoint, or of that with a tag, and its marker.

    Raises CheckpointError where there is none, naming those that are.
    """
    require_folder(path)
    if not _is_folder(path):
        raise CheckpointError(f"{path}: there is no such folder of checkpoints")
    if tag is not None:
        marker = _marker_of(path / require_tag(tag))
        if marker is None:
            known = [held for held, _ in complete(path)]
            why = "is not complete: its run ended while it was written" if _is_folder(path / tag) else "does not exist"
            raise CheckpointError(f"checkpoint {tag!r} in {path} {why}; {nearest(tag, known)}")
        return path / tag, marker
    found = complete(path)
    if not found:
        raise CheckpointError(f"{path}: no complete checkpoint is there")
    return path / found[-1][0], found[-1][1]


def read(folder: Path, marker: Marker) -> Index:
    """The index of a complete checkpoint. Raises CheckpointError where it is damaged, and OSError never."""
    path = folder / marker.index
    text = _read_bytes(path)
    if len(text) != marker.index_bytes or digest_of(text) != marker.index_digest:
        raise CheckpointError(f"{path}: the index is not as it was written: it is damaged; take another checkpoint")
    return read_index(text, str(path))


def remove(folder: Path, marker: Marker) -> None:
    """Remove a complete checkpoint: the marker first, so that no half of it is ever taken for one."""
    (folder / MARKER).unlink(missing_ok=True)
    _drop(folder, marker.save)
    with contextlib.suppress(OSError):  # something else is in it
        folder.rmdir()


def _drop(folder: Path, save: str) -> None:
    for path in folder.glob(f"*.{save}.*"):
        path.unlink(missing_ok=True)


def _marker_of(folder: Path) -> Marker | None:
    path = folder / MARKER
    return read_marker(_read_bytes(path), str(path)) if _is_there(path) else None


def _folders_in(path: Path) -> list[Path]:
    """The folders in a folder, none where it does not exist. Raises CheckpointError where it may not be listed."""
    if not _is_folder(path):
        return []
    try:
        return [held for held in path.iterdir() if _is_folder(held)]
    except OSError as failed:
        raise _unreadable(path, failed) from failed


def _is_folder(path: Path) -> bool:
    told = _stat_of(path)
    return told is not None and stat.S_ISDIR(told.st_mode)


def _is_there(path: Path) -> bool:
    return _stat_of(path) is not None


def _stat_of(path: Path) -> os.stat_result | None:
    """What the system knows of a path; None where there is nothing. What may not be looked at is not taken for nothing:
    raises CheckpointError."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as failed:
        raise _unreadable(path, failed) from failed


def _unreadable(path: Path, failed: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: the folder of checkpoints cannot be read: {failed.strerror}")


def _gathered(save: Save, ranks: int, timeout_s: float) -> dict[int, RankRecord]:
    until = time.monotonic() + timeout_s
    records: dict[int, RankRecord] = {}
    while True:
        for rank in range(ranks):
            path = save.file("record", rank, "json")
            if rank not in records and path.exists():
                records[rank] = read_rank_record(_read_bytes(path), str(path))
            failed = save.file("failure", rank, "json")
            if rank not in records and failed.exists():
                why = json.loads(_read_bytes(failed) or b'"there was no space to say why"')
                raise CheckpointError(f"rank {rank} could not write its part: {why}")
        if len(records) == ranks:
            return records
        if time.monotonic() > until:
            lacking = sorted(set(range(ranks)) - set(records))
            raise CheckpointError(
                f"after {timeout_s:.0f} s rank {lacking[0]} ({len(lacking)} of {ranks} ranks) has written nothing to "
                f"{save.folder} that this rank sees: a checkpoint needs a folder that all ranks share"
            )
        time.sleep(POLL_S)


def _key(piece: Piece) -> str:
    is_whole = piece.box == Box.whole(piece.shape)
    return piece.name if is_whole else f"{piece.name}@{','.join(map(str, piece.box.start))}"


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as failed:
        raise CheckpointError(f"{path}: the checkpoint's file cannot be read: {failed.strerror}") from failed


def _write_whole(path: Path, data: bytes) -> None:
    """Write a file that is whole or not there: aside first."""
    aside = path.with_name(path.name + ".part")
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def _settle_folder(folder: Path) -> None:
    """Let the folder's own entries outlive a loss of power, where the system can."""
    try:
        number = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(number)
    except OSError:
        pass
    finally:
        os.close(number)
