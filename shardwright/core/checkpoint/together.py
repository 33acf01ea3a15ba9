"""The tensors of a checkpoint put together: one file for each part of the state, every tensor whole in it."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from shardwright.core.checkpoint.boxes import Box
from shardwright.core.checkpoint.index import FileRecord, PieceRecord, TensorRecord
from shardwright.core.checkpoint.tensor_file import ITEM_BYTES, Bytes, TensorFiles, ToWrite, Written, write_path


def put_together(
    folder: Path, save: str, files: Mapping[str, FileRecord], tensors: Mapping[str, TensorRecord]
) -> tuple[dict[str, FileRecord], dict[str, TensorRecord]]:
    """Write the files ``PART.SAVE.safetensors`` from those that ranks wrote, no more than one tensor in memory at a
    time, and remove those. Returns what an index then tells of files and tensors.

    Raises CheckpointError where a file is damaged, OSError where one cannot be written.
    """
    opened = TensorFiles(folder, {name: Written(told.size_bytes, told.chunks) for name, told in files.items()})
    parts: dict[str, list[str]] = {}
    for label in tensors:
        parts.setdefault(label.partition("/")[0], []).append(label)
    made: dict[str, FileRecord] = {}
    found: dict[str, TensorRecord] = {}
    for part, labels in parts.items():
        path = folder / f"{part}.{save}.safetensors"
        own = [
            ToWrite(label.partition("/")[2], tensors[label].dtype, tensors[label].shape,
                    partial(_whole, opened, tensors[label]))
            for label in labels
        ]  # fmt: skip
        told = write_path(path, own)
        made[path.name] = FileRecord(size_bytes=told.size_bytes, chunks=told.chunks)
        for label in labels:
            shape = tensors[label].shape
            piece = PieceRecord(file=path.name, key=label.partition("/")[2], start=(0,) * len(shape), shape=shape)
            found[label] = TensorRecord(dtype=tensors[label].dtype, shape=shape, pieces=(piece,))
    for name in files:
        (folder / name).unlink()
    return made, found


def _whole(opened: TensorFiles, tensor: TensorRecord) -> Bytes:
    out = np.empty((*tensor.shape, ITEM_BYTES[tensor.dtype]), dtype=np.uint8)
    for piece in tensor.pieces:
        out[piece.box.inside(Box.whole(tensor.shape))] = opened[piece.file].read(piece.key)
    return out.reshape(-1)
