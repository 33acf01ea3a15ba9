"""Orbax folders as saved states, and saved states as Orbax folders. Orbax itself reads and writes them.

A folder holds a tree: its ``params`` (or ``model``, ``state``, ``target``; else all of it) are the model, ``opt_state``
(or ``optimizer``) the state of an optax optimizer, ``step`` the number of steps; what else is in it becomes
``user_content``. `nnx.State`'s ``value`` at the end of a path is left out.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from shardwright.backends.jax.training.saved_state import DTYPES, MODEL, OPTIMIZER, OTHER, code_of
from shardwright.core.checkpoint.boxes import Box
from shardwright.core.checkpoint.copied import whole_bytes
from shardwright.core.checkpoint.options import above_options
from shardwright.core.checkpoint.saved_tensors import Entry, SavedState
from shardwright.core.checkpoint.tensor_file import ITEM_BYTES, Bytes
from shardwright.core.checkpoint.translated import COUNTS, OPTION, ROLES, SCHEDULE, STEP
from shardwright.core.errors import CheckpointError, MissingFrameworkError, nearest

_MODELS, _OPTIMIZERS, _USER = ("params", "model", "state", "target"), ("opt_state", "optimizer"), "user"
_FIELDS = {"mu": "exp_avg", "nu": "exp_avg_sq", "trace": "momentum_buffer"}
_OF_ROLE = {"exp_avg": "0.mu", "exp_avg_sq": "0.nu", "momentum_buffer": "0.trace"}
"""Where `optax.adamw` and `optax.sgd` keep states, for those that come from another framework."""


class OrbaxFolder:
    """The tree in an Orbax folder, a `SavedState` whose tensors are read one at a time."""

    framework = "jax"

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError where the folder is none of Orbax's, or its tree has a leaf of an unknown dtype."""
        self.path, self._checkpointer = path, _orbax().PyTreeCheckpointer()
        try:
            told = self._checkpointer.metadata(path)
            tree = told.item_metadata.tree if hasattr(told, "item_metadata") else told
            leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        except Exception as failed:  # of Orbax, of any class
            raise CheckpointError(f"{path}: no Orbax folder: {str(failed).partition(chr(10))[0][:200]}") from failed
        self._structure: Any = structure
        self._numbers: dict[str, int] = {}
        """The number of each tensor among the leaves of the tree."""
        self._entries: dict[str, Entry] = {}
        self._last: tuple[str, NDArray[Any]] | None = None
        paths = [([str(getattr(key, "key", getattr(key, "idx", key))) for key in keys], leaf) for keys, leaf in leaves]
        tops = {keys[0] for keys, _ in paths}
        model = next((name for name in _MODELS if name in tops), None)
        optimizer = next((name for name in _OPTIMIZERS if name in tops and model is not None), None)
        self.step = 0
        named = {".".join(_plain(keys[1:] if model else keys)) for keys, _ in paths if keys[0] == model or not model}
        for number, (keys, leaf) in enumerate(paths):
            if model is None or keys[0] == model:
                label = f"{MODEL}/{'.'.join(_plain(keys[1:] if model else keys))}"
            elif keys[0] == optimizer:
                label = f"{OPTIMIZER}/{_state(_plain(keys[1:]), named)}"
            else:
                label = f"{_USER}/{'.'.join(keys)}"
            self._numbers[label] = number
            self._entries[label] = Entry(code_of(leaf.dtype, label), tuple(getattr(leaf, "shape", ())))
        if f"{_USER}/step" in self._numbers:
            self.step = int(self._whole(f"{_USER}/step"))

    def __str__(self) -> str:
        return f"Orbax folder {self.path.name!r}"

    def names(self, part: str) -> list[str]:
        """The names of a part's tensors."""
        return [label[len(part) + 1 :] for label in self._numbers if label.startswith(f"{part}/")]

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self._numbers

    def tensor(self, name: str) -> Entry:
        """What is known of a tensor. Raises CheckpointError where there is none of that name."""
        if name not in self._entries:
            raise CheckpointError(f"{self} has no tensor {name!r}: {nearest(name, self._entries)[:300]}")
        return self._entries[name]

    def boxes(self, name: str, box: Box) -> Iterator[tuple[Box, Bytes]]:
        """The box of a tensor. Raises CheckpointError where Orbax cannot read it."""
        whole = self._whole(name)
        part = np.ascontiguousarray(whole[box.inside(Box.whole(whole.shape))])
        yield box, part.reshape(-1).view(np.uint8).reshape(*box.shape, ITEM_BYTES[self.tensor(name).dtype])

    def content(self, tensors: Callable[[str], Any]) -> Any:
        """The values that are no tensors, and what else lies in the tree."""
        user = {name: tensors(f"{_USER}/{name}") for name in self.names(_USER) if name != "step"}
        return {"user": user or None, "steps": self.step, "keys": None, ROLES: self._roles()}

    def _roles(self) -> dict[str, str]:
        """The roles of the optimizer's leaves, by the names of fields, as optax's classes have them."""
        kinds = {name.partition("/")[0] for name in self.names(OPTIMIZER)}
        found = {}
        for kind in kinds:
            above, _, field = kind.rpartition(".")
            if above_options(kind) is not None:
                found[kind] = OPTION
            elif field in _FIELDS:
                found[kind] = _FIELDS[field]
            elif field == "count":
                found[kind] = STEP if f"{above}.mu".lstrip(".") in kinds else SCHEDULE
        return found

    def _whole(self, label: str) -> NDArray[Any]:
        if self._last is None or self._last[0] != label:
            self.tensor(label)
            number, away = self._numbers[label], _orbax().PLACEHOLDER
            item = self._structure.unflatten([0 if n == number else away for n in range(len(self._numbers))])
            args = _orbax().args.PyTreeRestore(
                item=item, restore_args=jax.tree.map(lambda _: _orbax().RestoreArgs(restore_type=np.ndarray), item)
            )
            try:
                held = self._checkpointer.restore(self.path, args=args)
            except Exception as failed:  # of Orbax, of any class
                raise CheckpointError(f"{self.path}: {label} cannot be read: {str(failed)[:200]}") from failed
            self._last = label, np.asarray(jax.tree.leaves(held)[number])
        return self._last[1]


def write_orbax(state: SavedState, path: Path) -> None:
    """Write a state as an Orbax folder of ``params``, ``other``, ``opt_state`` and ``step``. States that come from
    another framework's optimizer lie where `optax.adamw` or `optax.sgd` has them.

    Raises CheckpointError where the state has the names of another framework, or the folder cannot be written.
    """
    if state.framework != "jax":
        raise CheckpointError(
            f"{state} has the names of a {state.framework} run: translate it first, by a map of names"
        )
    if path.exists():
        raise CheckpointError(f"{path} exists already: name another folder")
    content = state.content(lambda name: None)
    tree: dict[str, Any] = {"step": np.int64(state.step)}
    for part, top in ((MODEL, "params"), (OTHER, "other"), (OPTIMIZER, "opt_state")):
        for name in state.names(part):
            kind, _, rest = name.partition("/")
            keys = [*_OF_ROLE.get(kind, kind).split("."), *rest.split(".")] if rest else name.split(".")
            _put(tree, [top, *keys], _array(state, f"{part}/{name}"))
    count = (content.get(COUNTS) or {}).get(STEP)
    if count is not None:
        _put(tree, ["opt_state", "0", "count"], np.int32(count))
    try:
        _orbax().PyTreeCheckpointer().save(path, args=_orbax().args.PyTreeSave(item=tree))
    except Exception as failed:  # of Orbax, of any class
        raise CheckpointError(f"{path}: the Orbax folder cannot be written: {str(failed)[:200]}") from failed


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError:
        raise MissingFrameworkError("Orbax folders need orbax-checkpoint: pip install orbax-checkpoint") from None
    return orbax.checkpoint


def _array(state: SavedState, label: str) -> NDArray[Any]:
    told = state.tensor(label)
    dtype = next(jax.numpy.dtype(name) for name, code in DTYPES.items() if code == told.dtype)
    found: NDArray[Any] = np.ascontiguousarray(whole_bytes(state, label)).reshape(-1).view(dtype).reshape(told.shape)
    return found


def _plain(keys: Sequence[str]) -> list[str]:
    return list(keys[:-1] if len(keys) > 1 and keys[-1] == "value" else keys)


def _state(keys: Sequence[str], named: set[str]) -> str:
    """The name of an optimizer's leaf: its own keys, and the parameter that it is of."""
    for at in range(1, len(keys)):
        if (name := ".".join(keys[at:])) in named:
            return f"{'.'.join(keys[:at])}/{name}"
    return ".".join(keys)


def _put(tree: dict[str, Any], keys: Sequence[str], leaf: Any) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
    tree[keys[-1]] = leaf
