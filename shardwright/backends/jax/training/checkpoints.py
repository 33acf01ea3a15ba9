"""Checkpoints of a training state: written by shards, read under any plan."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.backends.jax.pipeline.optimizer_cut import is_stack
from shardwright.backends.jax.state.ownership import Stack
from shardwright.backends.jax.state.train_state import TrainState
from shardwright.backends.jax.training.saved_state import (
    MODEL,
    OPTIMIZER,
    OTHER,
    RANDOM,
    SavedLeaf,
    leaves_of,
    read_whole,
    whole_piece,
)
from shardwright.core.checkpoint import folder as folders
from shardwright.core.checkpoint.content import encoded
from shardwright.core.checkpoint.folder import Piece
from shardwright.core.checkpoint.reader import Reader, require_names
from shardwright.core.errors import CheckpointError, MissingCapabilityError
from shardwright.core.plan.file import to_document
from shardwright.core.plan.plan import Plan

USER = "user"


def save(path: Path, tag: str, state: TrainState, plan: Plan, user_content: Any, keep: int | None) -> None:
    """Write a state, and what the user adds. Raises CheckpointError where that fails: what was there before stays."""
    if jax.process_count() > 1:
        raise MissingCapabilityError(
            "checkpoints of a JAX run over several processes are not written yet: save train.params(state), which "
            "every process has whole"
        )
    pieces: dict[str, list[Piece]] = {}
    for leaf in leaves_of(state):
        pieces.setdefault(leaf.part, []).extend(leaf.pieces())
    keys = _keys(state)
    pieces[RANDOM] = [whole_piece(str(n), jax.random.key_data(key), "a random key") for n, key in enumerate(keys)]
    user = pieces.setdefault(USER, [])

    def tensor(value: Any, place: str) -> str | None:
        if not isinstance(value, jax.Array | np.ndarray):
            return None
        user.append(whole_piece(str(len(user)), value, place))
        return f"{USER}/{len(user) - 1}"

    content = {
        "user": encoded(user_content, tensor, "user_content"),
        "steps": int(state.step),
        "keys": [str(jax.random.key_impl(key)) for key in keys],
    }
    chosen = folders.begin(path, tag)
    try:
        folders.write_rank(chosen, 0, pieces)
        folders.publish(
            chosen, 1, 0.0, step=int(state.step), framework="jax", content=content, plan=to_document(plan), keep=keep
        )
    except CheckpointError:
        folders.abandon(chosen)
        raise


def resume(path: Path, tag: str | None, state: TrainState, *, load_optimizer: bool) -> tuple[TrainState, Any]:
    """The state with the values of a checkpoint, and what the user added. The given state is used up.

    Raises CheckpointError where there is no complete checkpoint, or it is damaged, or of something else.
    """
    reader = Reader.open(path, tag)
    if reader.index.framework != "jax":
        raise CheckpointError(
            f"{reader} was written by a {reader.index.framework} run, whose names and layouts of weights are others"
        )
    content = reader.content(lambda name: read_whole(reader, name))
    leaves = leaves_of(state)
    _require_fits(reader, leaves, content, state, load_optimizer=load_optimizer)
    loaded: dict[int, list[jax.Array]] = {}
    for leaf in leaves:
        if (leaf.part != OPTIMIZER or load_optimizer) and leaf.label in reader.index.tensors:
            old = [id(array) for array in leaf.arrays]
            loaded |= {at: [new] for at, new in zip(old, leaf.read(reader), strict=True)}
    keys = iter(range(len(content["keys"])))

    def new(node: Any) -> Any:
        if is_stack(node):
            return Stack([loaded.get(id(piece), [piece])[0] for piece in node.pieces])
        if jnp.issubdtype(node.dtype, jax.dtypes.prng_key):
            number = next(keys)
            data = read_whole(reader, f"{RANDOM}/{number}")
            return jax.device_put(
                jax.random.wrap_key_data(jnp.asarray(data), impl=content["keys"][number]), node.sharding
            )
        return loaded.get(id(node), [node])[0]

    found: TrainState = jax.tree.map(new, state, is_leaf=is_stack)
    step = jax.device_put(jnp.asarray(content["steps"], jnp.int32), state.step.sharding)
    return replace(found, step=step), content["user"]


def _require_fits(
    reader: Reader, leaves: Sequence[SavedLeaf], content: Any, state: TrainState, *, load_optimizer: bool
) -> None:
    for part, what in ((MODEL, "the model"), (OPTIMIZER, "the optimizer"), (OTHER, "the state beside the parameters")):
        if part != OPTIMIZER or load_optimizer:
            require_names([leaf.name for leaf in leaves if leaf.part == part], reader.names(part), what)
    for leaf in leaves:
        record = reader.index.tensors.get(leaf.label)
        if record is not None and record.shape != leaf.shape and (leaf.part != OPTIMIZER or load_optimizer):
            raise CheckpointError(
                f"{reader} has {leaf.label} of shape {record.shape}, and the state of {leaf.shape}: it is of another "
                f"model or optimizer"
            )
    if len(_keys(state)) != len(content["keys"]):
        raise CheckpointError(f"{reader} has {len(content['keys'])} random keys, and the state {len(_keys(state))}")


def _keys(state: TrainState) -> list[jax.Array]:
    """The random keys of a state, in the order of its tree."""
    return [
        leaf for leaf in jax.tree.leaves(state, is_leaf=is_stack)
        if not is_stack(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]  # fmt: skip
