"""Checkpoints of a training state: written by shards, read under any plan."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.backends.jax.pipeline.optimizer_cut import is_stack
from shardwright.backends.jax.state.optimizer_roles import roles_of
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
from shardwright.core.checkpoint.name_map import NameMap, families
from shardwright.core.checkpoint.reader import FRESH, Reader, require_names
from shardwright.core.checkpoint.saved_tensors import SavedState
from shardwright.core.checkpoint.translated import COUNTS, ROLES, Translated
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
        ROLES: roles_of(state.optimizer),
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


def resume(
    path: Path, tag: str | None, state: TrainState, names: NameMap | None, *, load_optimizer: bool
) -> tuple[TrainState, Any]:
    """The state with the values of a checkpoint, and what the user added. The given state is used up.

    names: the map through which a checkpoint of PyTorch is read.

    Raises CheckpointError where there is no complete checkpoint, or it is damaged, or of something else.
    """
    found = Reader.open(path, tag)
    leaves = leaves_of(state)
    reader: SavedState = found
    if found.framework != "jax":
        reader = _translated(found, names, leaves, load_optimizer=load_optimizer)
    content = reader.content(lambda name: read_whole(reader, name))
    wanted = [leaf for leaf in leaves if leaf.part != OPTIMIZER or load_optimizer]
    if COUNTS in content:
        labels, counts = _labels_across(reader, content[COUNTS], wanted, state)
    else:
        labels, counts = {leaf.label: leaf.label for leaf in wanted}, {}
    _require_fits(reader, wanted, labels, content, state)
    loaded: dict[int, list[jax.Array]] = {}
    for leaf in wanted:
        if leaf.label in counts:
            (array,) = leaf.arrays
            count = jax.device_put(jnp.asarray(counts[leaf.label], array.dtype), array.sharding)
            loaded[id(array)] = [count]
        elif reader.has(label := labels.get(leaf.label, "")):
            old = [id(array) for array in leaf.arrays]
            loaded |= {at: [new] for at, new in zip(old, leaf.read(reader, label), strict=True)}
    keys = iter(range(len(content["keys"] or ())))

    def new(node: Any) -> Any:
        if is_stack(node):
            return Stack([loaded.get(id(piece), [piece])[0] for piece in node.pieces])
        if jnp.issubdtype(node.dtype, jax.dtypes.prng_key):
            if content["keys"] is None:
                return node
            number = next(keys)
            data = read_whole(reader, f"{RANDOM}/{number}")
            return jax.device_put(
                jax.random.wrap_key_data(jnp.asarray(data), impl=content["keys"][number]), node.sharding
            )
        return loaded.get(id(node), [node])[0]

    resumed: TrainState = jax.tree.map(new, state, is_leaf=is_stack)
    step = jax.device_put(jnp.asarray(content["steps"], jnp.int32), state.step.sharding)
    return replace(resumed, step=step), content["user"]


def _translated(
    found: Reader, names: NameMap | None, leaves: Sequence[SavedLeaf], *, load_optimizer: bool
) -> Translated:
    """A checkpoint of PyTorch as one of this state's model."""
    if names is None:
        raise CheckpointError(
            f"{found} was written by a {found.framework} run, whose weights have other names and layouts: give names=, "
            f"a map of them or the name of a family: {', '.join(families())}"
        )
    shapes = {leaf.label: leaf.shape for leaf in leaves if leaf.part in (MODEL, OTHER)}
    reader = Translated(found, names, shapes)
    if load_optimizer:
        reader.require_states()
    return reader


def _labels_across(
    reader: SavedState, known: Mapping[str, int | None], leaves: Sequence[SavedLeaf], state: TrainState
) -> tuple[dict[str, str], dict[str, int]]:
    """The label in a checkpoint that comes from the other framework for each leaf's, and the counts of the optimizer by
    the leaf's. ``known``: the counts by role. Raises CheckpointError for a leaf of the optimizer that the other
    framework's has no word for."""
    roles = roles_of(state.optimizer)
    labels, counts = {}, {}
    for leaf in leaves:
        if leaf.part != OPTIMIZER:
            labels[leaf.label] = leaf.label
            continue
        role = roles.get(leaf.kind)
        if role is None:
            raise CheckpointError(
                f"the optimizer's {leaf.name} has no counterpart in {reader}: the states of Adam, AdamW, AMSGrad and "
                f"SGD with momentum cross over; load_optimizer=False loads the weights alone"
            )
        if leaf.follows is not None:
            labels[leaf.label] = f"{OPTIMIZER}/{role}/{leaf.follows}"
            continue
        count = known.get(role)
        if count is None:
            raise CheckpointError(f"{reader} has no count for the optimizer's {leaf.name}: {FRESH}")
        counts[leaf.label] = count
    return labels, counts


def _require_fits(
    reader: SavedState,
    leaves: Sequence[SavedLeaf],
    labels: Mapping[str, str],
    content: Any,
    state: TrainState,
) -> None:
    for part, what in ((MODEL, "the model"), (OPTIMIZER, "the optimizer"), (OTHER, "the state beside the parameters")):
        own = [
            labels[leaf.label].removeprefix(f"{part}/") for leaf in leaves if leaf.part == part and leaf.label in labels
        ]
        if own or part != OPTIMIZER:
            require_names(own, reader.names(part), what)
    for leaf in leaves:
        label = labels.get(leaf.label, "")
        if reader.has(label) and reader.tensor(label).shape != leaf.shape:
            raise CheckpointError(
                f"{reader} has {label} of shape {reader.tensor(label).shape}, and the state {leaf.label} of "
                f"{leaf.shape}: it is of another model or optimizer"
            )
    if content["keys"] is not None and len(_keys(state)) != len(content["keys"]):
        raise CheckpointError(f"{reader} has {len(content['keys'])} random keys, and the state {len(_keys(state))}")


def _keys(state: TrainState) -> list[jax.Array]:
    """The random keys of a state, in the order of its tree."""
    return [
        leaf for leaf in jax.tree.leaves(state, is_leaf=is_stack)
        if not is_stack(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]  # fmt: skip
