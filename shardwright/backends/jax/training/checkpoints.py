"""Checkpoints of a training state: written by shards, read under any plan."""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.backends.jax.machine.meeting import meetings
from shardwright.backends.jax.pipeline.optimizer_cut import is_stack
from shardwright.backends.jax.state.optimizer_roles import roles_of
from shardwright.backends.jax.state.ownership import Stack
from shardwright.backends.jax.state.train_state import TrainState, own_copy
from shardwright.backends.jax.training.crossed_options import option_values
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
from shardwright.core.checkpoint.folder import Piece, Save
from shardwright.core.checkpoint.name_map import NameMap, families
from shardwright.core.checkpoint.options import OptionGroup
from shardwright.core.checkpoint.other_writers import KnownSaves
from shardwright.core.checkpoint.reader import FRESH, Reader, require_names
from shardwright.core.checkpoint.saved_tensors import SavedState
from shardwright.core.checkpoint.tensor_file import digest_of
from shardwright.core.checkpoint.translated import COUNTS, OPTION, OPTIONS, ROLES, Translated
from shardwright.core.errors import CheckpointError, PlanWarning
from shardwright.core.plan.file import to_document
from shardwright.core.plan.plan import Plan

USER = "user"
_SAVES: KnownSaves = {}
"""The saves that this process knows, which is one run."""
WRITTEN_S = 60.0
"""The seconds within which what other processes have written is to be seen by the one that publishes."""


def save(path: Path, tag: str, state: TrainState, plan: Plan, user_content: Any, keep: int | None) -> None:
    """Write a state, each process what its devices have, and what the user adds. All processes call this.

    Raises CheckpointError where that fails, DisagreementError on the other processes: what was there before stays.
    """
    call, process = f"train.save_checkpoint(…, {tag!r})", jax.process_index()
    pieces: dict[str, list[Piece]] = {}
    content: dict[str, Any] = {}
    begun: Save | None = None
    failure: Exception | None = None
    told, same, document = None, "", None
    try:
        folders.require_keep(keep)
        if process == 0:
            document = to_document(plan)
        pieces, content = _gathered(state, user_content)
        same = _said(content, pieces[USER])
        if process == 0:
            begun = folders.begin(path, tag, _SAVES)
            told = [begun.name, begun.sequence]
        else:
            folders.require_tag(tag)
            pieces[USER] = []  # process 0 writes them
    except Exception as error:
        failure = error
    try:
        (name, sequence), *_ = meetings.meet(call, failure=failure, told=told, same=same)
    except Exception:
        if begun is not None:
            folders.abandon(begun)
        raise
    chosen = Save(path / tag, name, sequence)

    def write() -> None:
        folders.write_rank(chosen, process, pieces)

    def publish() -> None:
        folders.publish(
            chosen, jax.process_count(), WRITTEN_S, step=content["steps"], framework="jax", content=content,
            plan=document, keep=keep,
        )  # fmt: skip

    for work, is_mine in ((write, True), (publish, process == 0)):
        failure = None
        try:
            if is_mine:
                work()
        except Exception as error:
            failure = error
        try:
            meetings.meet(f"{call}, {work.__name__}", failure=failure)
        except Exception:
            if process == 0:
                folders.abandon(chosen)
            raise


def _gathered(state: TrainState, user_content: Any) -> tuple[dict[str, list[Piece]], dict[str, Any]]:
    """The pieces that this process writes, by part, and the values that are no tensors."""
    pieces: dict[str, list[Piece]] = {RANDOM: [], USER: []}
    for leaf in leaves_of(state):
        pieces.setdefault(leaf.part, []).extend(leaf.pieces())
    keys = _keys(state)
    for number, key in enumerate(keys):
        if any(shard.replica_id == 0 for shard in key.addressable_shards):
            data = jax.random.key_data(key.addressable_data(0))
            pieces[RANDOM].append(whole_piece(str(number), data, "a random key"))
    user = pieces[USER]

    def tensor(value: Any, place: str) -> str | None:
        if not isinstance(value, jax.Array | np.ndarray):
            return None
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            raise CheckpointError(f"{place} lies on devices of several processes: give what this process has of it")
        user.append(whole_piece(str(len(user)), value, place))
        return f"{USER}/{len(user) - 1}"

    content = {
        "user": encoded(user_content, tensor, "user_content"),
        "steps": int(np.asarray(state.step.addressable_data(0))),
        ROLES: roles_of(state.optimizer),
        "keys": [str(jax.random.key_impl(key)) for key in keys],
    }
    return pieces, content


def _said(content: Mapping[str, Any], user: Sequence[Piece]) -> str:
    """A text that says what all processes must give alike."""
    tensors = " ".join(digest_of(bytes(piece.bytes())) for piece in user)
    text = digest_of(f"{json.dumps(content['user'], sort_keys=True)} {tensors}".encode())[:12]
    return f"step {content['steps']}, user_content of digest {text}"


def resume(
    path: Path,
    tag: str | None,
    state: TrainState,
    names: NameMap | None,
    *,
    load_optimizer: bool,
    missing_ok: bool = False,
    release: Callable[[], None] = lambda: None,
) -> tuple[TrainState, Any] | None:
    """The state with the values of a checkpoint, and what the user added. The given state is used up. None where the
    folder has none and ``missing_ok``.

    names: the map through which a checkpoint of PyTorch is read. ``release``: is called once the checkpoint is known to
    fit, before it is read. All processes call this.

    Raises CheckpointError where there is no complete checkpoint, or it is damaged, or of something else.
    """
    call = f"train.resume_from_checkpoint({tag=})"
    failure: Exception | None = None
    loading: _Loading | None = None
    resumed: TrainState | None = None
    try:
        if not missing_ok or tag is not None or not folders.has_none(path):
            loading = _Loading(path, tag, state, names, load_optimizer=load_optimizer)
    except Exception as error:
        failure = error
    meetings.meet(call, failure=failure, same="no checkpoint" if loading is None else loading.source)
    if loading is None:
        return None
    try:
        release()
        resumed = loading.load()
    except Exception as error:
        failure = error
    meetings.meet(f"{call}, loading", failure=failure)
    assert resumed is not None
    if loading.note is not None and jax.process_index() == 0:
        warnings.warn(f"{loading.source.rpartition(',')[0]}: {loading.note}", PlanWarning, stacklevel=3)
    return resumed, loading.content["user"]


class _Loading:
    """A checkpoint that fits a state, before the state is used up."""

    def __init__(
        self, path: Path, tag: str | None, state: TrainState, names: NameMap | None, *, load_optimizer: bool
    ) -> None:
        """Raises CheckpointError where there is none, or it does not fit."""
        found = Reader.open(path, tag)
        self.source = f"{found}, {found.marker.index_digest[:8]}"
        self._state, leaves = state, leaves_of(state)
        self._reader: SavedState = found
        if found.framework != "jax":
            self._reader = _translated(found, names, leaves, load_optimizer=load_optimizer)
        self.content = self._reader.content(lambda name: read_whole(self._reader, name))
        only_here = names if found.framework != "jax" else None
        self._leaves = [
            leaf for leaf in leaves
            if (leaf.part != OPTIMIZER or load_optimizer) and (only_here is None or not _is_own(leaf, only_here))
        ]  # fmt: skip
        self._numbers: dict[str, float] = {}
        self.note: str | None = None
        """What the user must be told of options of the optimizer that do not cross."""
        self._labels = {leaf.label: leaf.label for leaf in self._leaves}
        if COUNTS in self.content:
            known = self.content[COUNTS]
            self._labels, counts = _labels_across(self._reader, known, self._leaves, state)
            self._numbers |= counts
            if load_optimizer and OPTIONS in self.content:
                told = [OptionGroup.of_values(values) for values in self.content[OPTIONS]]
                values, self.note = option_values(told, self._leaves, roles_of(state.optimizer))
                self._numbers |= values
        parts = (MODEL, OPTIMIZER, OTHER) if load_optimizer else (MODEL, OTHER)
        _require_fits(self._reader, self._leaves, self._labels, self.content, state, parts)

    def load(self) -> TrainState:
        """The state with the checkpoint's values, read share by share. Raises CheckpointError where a file is
        damaged."""
        loaded: dict[int, jax.Array] = {}
        for leaf in self._leaves:
            if leaf.label in self._numbers:
                (array,) = leaf.arrays
                loaded[id(array)] = own_copy(np.asarray(self._numbers[leaf.label], array.dtype), array.sharding)
            elif self._reader.has(label := self._labels.get(leaf.label, "")):
                old = [id(array) for array in leaf.arrays]
                loaded |= dict(zip(old, leaf.read(self._reader, label), strict=True))
        keys = iter(range(len(self.content["keys"] or ())))

        def new(node: Any) -> Any:
            if is_stack(node):
                return Stack([loaded.get(id(piece), piece) for piece in node.pieces])
            if jnp.issubdtype(node.dtype, jax.dtypes.prng_key):
                return node if self.content["keys"] is None else self._key(next(keys), node)
            return loaded.get(id(node), node)

        resumed: TrainState = jax.tree.map(new, self._state, is_leaf=is_stack)
        step = own_copy(np.asarray(self.content["steps"], np.int32), self._state.step.sharding)
        return replace(resumed, step=step)

    def _key(self, number: int, node: jax.Array) -> jax.Array:
        """A random key of the checkpoint, where one lies now."""
        data = jnp.asarray(read_whole(self._reader, f"{RANDOM}/{number}"))
        return own_copy(jax.random.wrap_key_data(data, impl=self.content["keys"][number]), node.sharding)


def _is_own(leaf: SavedLeaf, names: NameMap) -> bool:
    """Whether a map says that the other framework's model has not what this leaf is, or is a state of."""
    if leaf.part == OPTIMIZER:
        return leaf.follows is not None and names.is_only(leaf.follows, "jax")
    return names.is_only(leaf.name if leaf.part == MODEL else leaf.label, "jax")


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
        if role == OPTION:
            continue
        if role is None:
            raise CheckpointError(
                f"the optimizer's {leaf.name} has no counterpart in {reader}: the states of Adam, AdamW and "
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
    parts: Sequence[str],
) -> None:
    said = {MODEL: "the model", OPTIMIZER: "the optimizer", OTHER: "the state beside the parameters"}
    for part in parts:
        own = [
            labels[leaf.label].removeprefix(f"{part}/") for leaf in leaves if leaf.part == part and leaf.label in labels
        ]
        require_names(own, reader.names(part), said[part])
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
