"""What is saved of a job that has ended: a folder with the model's weights, what belongs to the optimizer, and the
losses."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shardwright.core.checkpoint.folder import Piece
from shardwright.core.checkpoint.tensor_file import ToWrite, write_path
from shardwright.core.errors import PlanError

WEIGHTS, LOSSES = "model.safetensors", "losses.json"


def require_output(name: str, output: str) -> None:
    """Make the folder that a job is saved in. Raises PlanError where it cannot be made or written to."""
    try:
        Path(output).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(
            f"job {name!r} cannot be saved at {output}: {error.strerror}; name a folder that can be made"
        ) from error
    if not os.access(output, os.W_OK):
        raise PlanError(f"job {name!r} cannot be saved at {output}: no file can be written there")


def save_job(
    output: str,
    weights: Sequence[Piece],
    losses: Sequence[Sequence[float]],
    others: Mapping[str, Callable[[Path], object]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Save a job: its weights, whole, in the safetensors format, the loss of every microbatch of every step, and
    ``others``, functions that write files, by their names. Each file is written whole, or not at all.

    Raises:
        CheckpointError: two tensors of one name.
        OSError: as files do.
    """

    def losses_to(path: Path) -> None:
        path.write_text(json.dumps([list(row) for row in losses]) + "\n", encoding="utf-8")

    written = {WEIGHTS: lambda path: write_whole(path, weights, metadata), **others, LOSSES: losses_to}
    for name, write in written.items():
        part = Path(output, f"{name}.part")
        write(part)
        part.replace(part.with_suffix(""))


def write_whole(path: Path, tensors: Sequence[Piece], metadata: Mapping[str, str] | None = None) -> None:
    """Write whole tensors to a file in the safetensors format."""
    write_path(path, [ToWrite(one.name, one.dtype, one.shape, one.bytes) for one in tensors], metadata)
