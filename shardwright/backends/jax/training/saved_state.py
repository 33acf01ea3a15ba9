"""The leaves of a training state as boxes of whole tensors in the model's own order: what a checkpoint holds of them.

A leaf lies on devices by its sharding; of stacked parameters each stage has rows; and fused matrices are held block by
block (`tensor_parallel.blocks`). Each shard is a few boxes of the leaf as the model has it, so that a state is read
under any plan.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from shardwright.backends.jax.capture.tree import followed
from shardwright.backends.jax.pipeline.optimizer_cut import is_stack
from shardwright.backends.jax.state.train_state import TrainState, parts_of
from shardwright.backends.jax.tensor_parallel.blocks import Blocks, Tags
from shardwright.backends.jax.tensor_parallel.constrained_loss import tags_left
from shardwright.core.checkpoint.boxes import Box
from shardwright.core.checkpoint.folder import Piece
from shardwright.core.checkpoint.saved_tensors import SavedState
from shardwright.core.errors import CheckpointError

DTYPES: Mapping[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "uint16": "U16",
    "uint32": "U32", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""The name that a checkpoint's files have for each dtype."""
_OF_NAME = {code: jnp.dtype(name) for name, code in DTYPES.items()}
MODEL, OPTIMIZER, OTHER, RANDOM, SCALING = "model", "optimizer0", "other", "random", "scaling"
"""The parts of a checkpoint."""


@dataclass(frozen=True, slots=True)
class SavedLeaf:
    """A leaf of a state, whole or in the pieces of several stages."""

    part: str
    name: str
    arrays: tuple[jax.Array, ...]
    """One array; or one for the rows of each stage, in order."""
    tags: Tags
    ways: int
    follows: str | None = None
    """The parameter that a state of the optimizer is of; None for others."""

    @property
    def kind(self) -> str:
        """The name without the parameter's."""
        return self.name if self.follows is None else self.name.removesuffix(f"/{self.follows}")

    @property
    def label(self) -> str:
        return f"{self.part}/{self.name}"

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.arrays[0].shape
        return tuple(first) if len(self.arrays) == 1 else (sum(a.shape[0] for a in self.arrays), *first[1:])

    def rows_before(self) -> list[int]:
        """The first row of each array."""
        return [0, *accumulate(a.shape[0] for a in self.arrays[:-1])] if len(self.arrays) > 1 else [0]

    # Writing -----------------------------------------------------------------------------------------------------

    def pieces(self) -> Iterator[Piece]:
        """The pieces of the leaf: of shards that several devices have, one's. Raises CheckpointError for a dtype that
        files do not hold."""
        for array, first in zip(self.arrays, self.rows_before(), strict=True):
            code = code_of(array.dtype, self.label)
            for shard in array.addressable_shards:
                if shard.replica_id:
                    continue
                held = _moved(_box_of(shard.index, array.shape), first)
                for box, inside in original_boxes(held, self.tags, self.ways):
                    yield Piece(self.name, code, self.shape, box, partial(_bytes_of, shard, inside.inside(held)))

    # Reading -----------------------------------------------------------------------------------------------------

    def read(self, reader: SavedState, label: str) -> list[jax.Array]:
        """The arrays with the values of a checkpoint, where ``label`` is the leaf's own, each device's share read by
        itself. The old ones are freed. Raises CheckpointError where a file is damaged."""
        found: list[jax.Array] = []
        for array, first in zip(self.arrays, self.rows_before(), strict=True):
            shape, sharding, dtype = array.shape, array.sharding, np.dtype(array.dtype)
            array.delete()
            shares = _Shares(self, reader, label, shape, dtype, first)
            found.append(jax.make_array_from_callback(shape, sharding, shares, dtype=dtype))
        return found


class _Shares:
    """The shares of an array by their indices, each read once for all devices that have it."""

    def __init__(
        self, leaf: SavedLeaf, reader: SavedState, label: str, shape: tuple[int, ...], dtype: Any, first: int
    ) -> None:
        self._leaf, self._reader, self._label = leaf, reader, label
        self._shape, self._dtype, self._first = shape, dtype, first
        self._last: tuple[Box, NDArray[Any]] | None = None

    def __call__(self, index: tuple[slice, ...] | None) -> NDArray[Any]:
        held = _moved(_box_of(index or (), self._shape), self._first)
        if self._last is not None and self._last[0] == held:
            return self._last[1]
        out = np.empty(held.shape, dtype=self._dtype)
        saved = _OF_NAME[self._reader.tensor(self._label).dtype]
        for box, inside in original_boxes(held, self._leaf.tags, self._leaf.ways):
            part: NDArray[Any] = out[_entries(inside.inside(held))]
            for shared, data in self._reader.boxes(self._label, box):
                part[_entries(shared.inside(box))] = np.ascontiguousarray(data).view(saved)[..., 0]
        self._last = held, out
        return out


def leaves_of(state: TrainState) -> list[SavedLeaf]:
    """The leaves of a state in the order of its tree, stacks in one, but for the count of steps and for random keys,
    which a checkpoint holds apart."""
    shapes: Any = jax.tree.map(_shape, state, is_leaf=is_stack)
    parts = parts_of(shapes)
    names = parts.names
    ways, *tags = state.order or (1, *[()] * len(names))
    held = [dict(one) for one in tags]
    found = [
        SavedLeaf(MODEL, name, _arrays(node), own, ways)
        for name, node, own in zip(names, jax.tree.leaves(state.params, is_leaf=is_stack), held, strict=True)
    ]
    whole = jax.tree.leaves(shapes.params)
    paths = jax.tree_util.tree_leaves_with_path(shapes.optimizer)
    nodes = jax.tree.leaves(state.optimizer, is_leaf=is_stack)
    for (path, leaf), node, at in zip(paths, nodes, followed(shapes.optimizer, shapes.params), strict=True):
        if at is None:
            found.append(SavedLeaf(OPTIMIZER, _keys(path), _arrays(node), {}, ways))
            continue
        own = tags_left(held[at.number], whole[at.number].shape, leaf.shape) if held[at.number] else {}
        name = names[at.number]
        found.append(SavedLeaf(OPTIMIZER, f"{_keys(at.prefix)}/{name}", _arrays(node), own, ways, follows=name))
    beside = [(OTHER, name, leaf) for name, leaf in zip(parts.other_names, jax.tree.leaves(state.other), strict=True)]
    beside += [(SCALING, _keys(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state.scaling)]
    for part, name, leaf in beside:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            found.append(SavedLeaf(part, name, (leaf,), {}, ways))
    return found


def original_boxes(held: Box, tags: Tags, ways: int) -> list[tuple[Box, Box]]:
    """The boxes that a box of a held array is made of: each in the model's own order, and in the held one."""
    found = [(held, held)]
    for dim, blocks in tags.items():
        found = [cut for original, inside in found for cut in _cut(original, inside, dim, blocks, ways)]
    return found


def _cut(original: Box, inside: Box, dim: int, blocks: Blocks, ways: int) -> Iterator[tuple[Box, Box]]:
    begins = list(accumulate(blocks, initial=0))
    at = 0
    for coordinate in range(ways):
        for first, end in pairwise(begins):
            size = (end - first) // ways
            start, stop = max(inside.start[dim], at), min(inside.stop[dim], at + size)
            if start < stop:
                own = first + coordinate * size + start - at
                yield _with(original, dim, own, stop - start), _with(inside, dim, start, stop - start)
            at += size


def _with(box: Box, dim: int, start: int, size: int) -> Box:
    starts, shape = list(box.start), list(box.shape)
    starts[dim], shape[dim] = start, size
    return Box(tuple(starts), tuple(shape))


def code_of(dtype: Any, label: str) -> str:
    """The name of a dtype in a checkpoint. Raises CheckpointError for one that its files cannot hold."""
    name = str(np.dtype(dtype))
    if name not in DTYPES:
        raise CheckpointError(f"{label} is of {name}: the files of a checkpoint hold {', '.join(DTYPES)}")
    return DTYPES[name]


def whole_piece(name: str, value: Any, label: str) -> Piece:
    """A whole array as a piece."""
    data = np.asarray(value)
    shape = tuple(data.shape)
    return Piece(name, code_of(data.dtype, label), shape, Box.whole(shape), lambda: _as_bytes(data))


def read_whole(reader: SavedState, label: str) -> NDArray[Any]:
    """A whole tensor. Raises CheckpointError where a file is damaged."""
    record = reader.tensor(label)
    box = Box.whole(record.shape)
    out = np.empty(record.shape, dtype=_OF_NAME[record.dtype])
    for shared, data in reader.boxes(label, box):
        out[shared.inside(box)] = np.ascontiguousarray(data).view(out.dtype)[..., 0]
    return out


def _shape(node: Any) -> jax.ShapeDtypeStruct:
    if not is_stack(node):
        return jax.ShapeDtypeStruct(node.shape, node.dtype)
    return jax.ShapeDtypeStruct((sum(p.shape[0] for p in node.pieces), *node.pieces[0].shape[1:]), node.pieces[0].dtype)


def _arrays(node: Any) -> tuple[jax.Array, ...]:
    return tuple(node.pieces) if is_stack(node) else (node,)


def _keys(path: Sequence[Any]) -> str:
    return jax.tree_util.keystr(tuple(path), simple=True, separator=".")


def _box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    ends = [part.indices(size)[:2] for part, size in zip(index, shape, strict=False)]
    ends += [(0, size) for size in shape[len(ends) :]]
    return Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


def _moved(box: Box, rows: int) -> Box:
    return box if not rows else box.moved((rows, *(0,) * (len(box.shape) - 1)))


def _entries(inside: tuple[slice, ...]) -> Any:
    """The index of a box in an array: a view of it, where that is a number too."""
    return (*inside, ...)


def _as_bytes(data: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


def _bytes_of(shard: Any, inside: tuple[slice, ...]) -> NDArray[np.uint8]:
    return _as_bytes(np.asarray(shard.data)[inside])
