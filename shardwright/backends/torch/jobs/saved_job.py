"""The files of a job that PyTorch has trained."""

from collections.abc import Sequence

import torch
from torch import nn

from shardwright.backends.torch.state.saved_parts import whole_piece
from shardwright.core.checkpoint.folder import Piece
from shardwright.core.jobs import saved_job

OPTIMIZER = "optimizer.pt"


def save_job(
    output: str, model: nn.Module, optimizer: torch.optim.Optimizer, losses: Sequence[Sequence[float]]
) -> None:
    """Save a trained job: weights as Hugging Face's libraries read them, of tied ones the first; what
    ``torch.load(…, weights_only=True)`` gives to the optimizer; and the losses."""
    weights, seen = list[Piece](), set[tuple[object, ...]]()
    for name, tensor in model.state_dict().items():
        place = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        weights.append(whole_piece(name, tensor))
    others = {OPTIMIZER: lambda path: torch.save(optimizer.state_dict(), path)}
    saved_job.save_job(output, weights, losses, others, {"format": "pt"})
