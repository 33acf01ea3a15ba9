"""What is saved of a job that has ended: a folder with the model's weights, the optimizer's state and the losses."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_model
from torch import nn

from shardwright.core.errors import PlanError

WEIGHTS, OPTIMIZER, LOSSES = "model.safetensors", "optimizer.pt", "losses.json"


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
    output: str, model: nn.Module, optimizer: torch.optim.Optimizer, losses: Sequence[Sequence[float]]
) -> None:
    """Save a trained job: weights as Hugging Face's libraries read them, of tied parameters one; what
    ``torch.load(…, weights_only=True)`` gives to the optimizer; and the loss of every microbatch of every step. Each
    file is written whole, or not at all."""
    folder = Path(output)

    def losses_to(path: Path) -> None:
        path.write_text(json.dumps([list(row) for row in losses]) + "\n", encoding="utf-8")

    _write(folder / WEIGHTS, lambda path: save_model(model, str(path), metadata={"format": "pt"}))
    _write(folder / OPTIMIZER, lambda path: torch.save(optimizer.state_dict(), path))
    _write(folder / LOSSES, losses_to)


def _write(path: Path, write: Callable[[Path], None]) -> None:
    part = path.with_name(f"{path.name}.part")
    write(part)
    part.replace(path)
