"""Parameters of like blocks, and the optimizer's states of them, as stacks over the stages of one program."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef


@dataclass(frozen=True, slots=True)
class Stacking:
    """A tree whose leaves include one for every parameter, as lists of arrays: stacks of the blocks', and the rest."""

    structure: PyTreeDef
    rows: tuple[tuple[tuple[int, ...], NamedSharding], ...]
    """The leaves of every stack, in the order of stages, and its sharding."""
    rest: tuple[tuple[int, NamedSharding], ...]
    """The other leaves, each with its sharding."""
    shape: tuple[int, int]

    def pack(self, tree: Any) -> dict[str, list[Any]]:
        leaves = jax.tree.leaves(tree)
        stacks = [jnp.stack([leaves[i] for i in rows]).reshape(*self.shape, *leaves[rows[0]].shape)
                  for rows, _ in self.rows]  # fmt: skip
        return {"stacks": stacks, "rest": [leaves[i] for i, _ in self.rest]}

    def unpack(self, packed: dict[str, list[Any]]) -> Any:
        return jax.tree.unflatten(self.structure, self.leaves([*packed["stacks"], *packed["rest"]]))

    def leaves(self, arrays: Sequence[Any]) -> list[Any]:
        """The leaves of the tree, of its stacks and then the rest; None for those of a stack that is None."""
        leaves: list[Any] = [None] * (len(self.rest) + sum(len(rows) for rows, _ in self.rows))
        for (rows, _), stack in zip(self.rows, arrays, strict=False):
            flat = [None] * len(rows) if stack is None else stack.reshape(-1, *stack.shape[2:])
            for number, leaf in enumerate(rows):
                leaves[leaf] = flat[number]
        for (leaf, _), value in zip(self.rest, arrays[len(self.rows) :], strict=True):
            leaves[leaf] = value
        return leaves

    @property
    def shardings(self) -> dict[str, list[NamedSharding]]:
        return {"stacks": [at for _, at in self.rows], "rest": [at for _, at in self.rest]}

    # Leaf by leaf, on the devices that have each -----------------------------------------------------------------

    def apart(self, packed: dict[str, list[jax.Array]]) -> Any:
        """As `unpack`, but that every leaf of a stack lies on the devices of its stage alone."""
        leaves = self.leaves([*[None] * len(self.rows), *packed["rest"]])
        for (rows, _), stack in zip(self.rows, packed["stacks"], strict=True):
            for number, leaf in enumerate(rows):
                leaves[leaf] = _entry(stack, *divmod(number, self.shape[1]))
        return jax.tree.unflatten(self.structure, leaves)

    def together(self, tree: Any) -> dict[str, list[jax.Array]]:
        """The counterpart of `apart`. The leaves of stacks are used up."""
        leaves = jax.tree.leaves(tree)
        stacks = [self._stack([leaves[i] for i in rows], place) for rows, place in self.rows]
        return {"stacks": stacks, "rest": [leaves[i] for i, _ in self.rest]}

    def _stack(self, leaves: Sequence[jax.Array], place: NamedSharding) -> jax.Array:
        turns, stages = self.shape
        shards = []
        for stage in range(stages):
            held = [
                {shard.device: shard.data for shard in leaves[turn * stages + stage].addressable_shards}
                for turn in range(turns)
            ]
            shards += [jnp.stack([data[device] for data in held])[:, None] for device in held[0]]
        shape, dtype = (turns, stages, *leaves[0].shape), leaves[0].dtype
        made = jax.make_array_from_single_device_arrays(shape, place, shards, dtype=dtype)
        jax.block_until_ready(made)
        for leaf in leaves:
            leaf.delete()
        return made


def _entry(stack: jax.Array, turn: int, stage: int) -> jax.Array:
    """An entry of a stack of [virtual stages, pp, …], on the devices that have it."""
    sharding: Any = stack.sharding
    mesh: Mesh = sharding.mesh
    axis = mesh.axis_names.index("pp")
    own = Mesh(mesh.devices.take([stage], axis), mesh.axis_names, axis_types=mesh.axis_types)
    devices = set(own.devices.flat)
    shards = [shard.data[turn, 0] for shard in stack.addressable_shards if shard.device in devices]
    place = NamedSharding(own, PartitionSpec(*sharding.spec[2:]))
    return jax.make_array_from_single_device_arrays(stack.shape[2:], place, shards, dtype=stack.dtype)
