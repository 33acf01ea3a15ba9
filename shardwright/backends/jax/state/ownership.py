"""The stage that owns each parameter, or each part of a stacked one's rows, as the plan says."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from shardwright.backends.jax.machine.mesh import GROUPS, bind, mesh_of, require_equal_shares, require_own_device
from shardwright.backends.jax.machine.process_transfers import (
    across,
    is_here,
    require_carrier,
    require_threads,
    several_processes,
)
from shardwright.core.errors import PlanError
from shardwright.core.model.structure import UnitBinding
from shardwright.core.plan.plan import Plan

Rows = tuple[int, int]
"""The first row, and the one after the last."""

ITERATION = re.compile(r"(?:^|\.)scan\d+\.(?P<row>\d+)$")
"""The pattern of the path of one iteration of a loop over stacked weights."""


@dataclass(frozen=True, slots=True)
class Holding:
    """A parameter, or rows of a stack, on the stage that owns it: there it is kept and updated."""

    leaf: int
    """The parameter's number among the leaves of the parameters."""
    stage: int
    rows: Rows | None = None


@jax.tree_util.register_pytree_with_keys_class
class Stack:
    """A stacked parameter in pieces, one for each stage that holds layers of it, in the order of its rows."""

    def __init__(self, pieces: Sequence[Any]) -> None:
        self.pieces = tuple(pieces)

    def tree_flatten_with_keys(self) -> tuple[Any, None]:
        return tuple((jax.tree_util.SequenceKey(i), piece) for i, piece in enumerate(self.pieces)), None

    @classmethod
    def tree_unflatten(cls, _: None, pieces: Sequence[Any]) -> "Stack":
        return cls(pieces)

    def __repr__(self) -> str:
        return f"Stack({', '.join(str(getattr(piece, 'shape', piece)) for piece in self.pieces)})"


def holdings_of(plan: Plan, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> tuple[Holding, ...]:
    """The holding of every parameter in order, or those of its rows. A tied parameter belongs to the first stage that
    uses it. Raises PlanError for a parameter that no unit uses."""
    stage_of = {unit: stage for stage, held in enumerate(plan.stage_units) for unit in held}
    return held_by(plan.binding("jax").units, stage_of, names, shapes)


def held_by(
    units: Sequence[UnitBinding], stage_of: Mapping[int, int], names: Sequence[str], shapes: Sequence[tuple[int, ...]]
) -> tuple[Holding, ...]:
    """The holdings of `holdings_of` for units on any stages: ``stage_of`` gives the stage of each unit."""
    users: dict[str, list[int]] = {}
    for unit, bound in enumerate(units):
        for _, name, _ in bound.parameters:
            users.setdefault(name, []).append(unit)
    found = []
    for leaf, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        used = users.get(name, [])
        if not used:
            raise PlanError(
                f"no stage uses parameter {name}, {tuple(shape)}: the function that was captured does not read it, so "
                "it would belong nowhere and never learn; leave it out of the parameters, or use it and capture again"
            )
        rows = _rows(shape, [[call.path for call in units[u].calls] for u in used], [stage_of[u] for u in used])
        if rows is None:
            found.append(Holding(leaf, min(stage_of[u] for u in used)))
        else:
            found += [Holding(leaf, stage, (start, end)) for stage, start, end in rows]
    return tuple(found)


def _rows(
    shape: tuple[int, ...], calls: Sequence[Sequence[str]], stages: Sequence[int]
) -> list[tuple[int, int, int]] | None:
    """The (stage, first row, end) of a parameter that one loop's iterations use, each its row, on several stages; or
    None."""
    rows: dict[int, list[int]] = {}
    for paths, stage in zip(calls, stages, strict=True):
        matches = [ITERATION.search(path) for path in paths]
        if not matches or not all(matches):
            return None
        rows.setdefault(stage, []).extend(int(match["row"]) for match in matches if match)
    seen = sorted(row for held in rows.values() for row in held)
    if len(rows) < 2 or not shape or seen != list(range(shape[0])):
        return None
    return sorted(((stage, min(held), max(held) + 1) for stage, held in rows.items()), key=lambda item: item[1])


class StageMeshes:
    """The devices of every stage, as a mesh with the axes dp (or two for it: `machine.mesh.GROUPS`) and tp. Stages of
    one rank share a mesh."""

    def __init__(self, plan: Plan, devices: Sequence[jax.Device] | None, placement: Sequence[int]) -> None:
        """Lay the plan's mesh over ``devices``. Raises ClusterError when their number is not the plan's, none of them
        is this process's, or several processes have them unequally; MissingCapabilityError where arrays cannot go
        between these processes."""
        mesh = bind(mesh_of(plan), devices)
        self.several = several_processes(list(mesh.devices.flat))
        """Whether the stages lie on the devices of more than one process."""
        require_own_device(list(mesh.devices.flat))
        if self.several:
            require_equal_shares(list(mesh.devices.flat))
        inside = (GROUPS, "dp", "tp") if GROUPS in mesh.axis_names else ("dp", "tp")
        grid = mesh.devices.transpose([mesh.axis_names.index(name) for name in ("pp", *inside)])
        ranks = [jax.sharding.Mesh(grid[rank], inside) for rank in range(plan.decision.pp)]
        self.placement = tuple(placement)
        self.meshes = tuple(ranks[rank] for rank in placement)
        self.whole = tuple(NamedSharding(mesh, jax.sharding.PartitionSpec()) for mesh in self.meshes)
        for stage in range(len(self.meshes)):
            if self.several:
                require_carrier(stage, self.devices(stage))
            require_threads(stage, self.devices(stage))
        self.here = tuple(is_here(whole) for whole in self.whole)
        """Whether this process has a device of each stage, and so runs its programs."""
        self.everywhere = NamedSharding(jax.sharding.Mesh(grid, ("pp", *inside)), jax.sharding.PartitionSpec())
        """The sharding of what every device of the plan has whole."""
        self.all_devices = tuple(grid.flat)

    def __len__(self) -> int:
        return len(self.meshes)

    def at(self, stage: int, sharding: NamedSharding) -> NamedSharding:
        """The same split on a stage's devices."""
        return NamedSharding(self.meshes[stage], sharding.spec)

    def devices(self, stage: int) -> tuple[jax.Device, ...]:
        return tuple(self.meshes[stage].devices.flat)

    def for_all(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Arrays of single stages, whole on every device where several processes have the plan's; else as they are."""
        return across(arrays, [self.everywhere] * len(arrays)) if self.several else list(arrays)

    def spans(self, stage: int) -> bool:
        """Whether the devices of one stage belong to several processes."""
        return several_processes(self.devices(stage))
