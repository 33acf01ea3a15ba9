"""The files of a job that JAX has trained."""

from collections.abc import Sequence
from typing import Any

import jax

from shardwright.backends.jax.capture.tree import flat_names
from shardwright.backends.jax.state.train_state import TrainState, parts_of
from shardwright.backends.jax.training.saved_state import whole_piece
from shardwright.core.checkpoint.folder import Piece
from shardwright.core.jobs import saved_job

OPTIMIZER = "optimizer.safetensors"


def save_job(output: str, state: TrainState, losses: Sequence[Sequence[float]]) -> None:
    """Save a trained job: parameters and what the model changes beside them by their dotted names, the optimizer's
    states by their paths, and the losses."""
    parts = parts_of(state)
    weights = _pieces(parts.names, parts.params) + _pieces(parts.other_names, parts.other)
    states = _pieces(flat_names(state.optimizer), state.optimizer)
    others = {OPTIMIZER: lambda path: saved_job.write_whole(path, states)}
    saved_job.save_job(output, weights, losses, others, {"format": "flax"})


def _pieces(names: Sequence[str], tree: Any) -> list[Piece]:
    return [whole_piece(name, leaf, name) for name, leaf in zip(names, jax.tree.leaves(tree), strict=True)]
