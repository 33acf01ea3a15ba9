"""The structure that two captures of one model share, whatever the framework: units, classes and parameter slots.

A parameter slot is named by how it is used: ``w0, w1 …`` are the matrices of a unit in order of first use, ``v0, v1 …``
its vectors. The dims of a matrix are put in one order for both frameworks: what is summed over or looked up (``in``),
then what comes out (``out``). PyTorch's Linear keeps [out, in], Flax's Dense [in, out]; both are slot dims (in, out).
"""

import difflib
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwright.core.errors import PlanError
from shardwright.core.layout.placements import Layout, Placement, Split
from shardwright.core.model.fold import CallRef, Folded, Unit
from shardwright.core.model.graph import Graph
from shardwright.core.values.fields import Amount, Count

SlotDims = tuple[tuple[tuple[Amount, Count], ...], ...]
"""The framework's own dims that make up every slot dim, outermost first: (dim, size)."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter of a unit, in structural terms."""

    role: str
    shape: tuple[int, ...]
    """(in, out) entries for a matrix, (entries,) for a vector."""
    dims: SlotDims
    parameter: int
    """The index into the graph's parameters."""


@dataclass(frozen=True, slots=True)
class UnitBinding:
    """The framework's names for the parts of one unit."""

    calls: tuple[CallRef, ...]
    parameters: tuple[tuple[str, str, SlotDims], ...]
    """(role, the framework's name, the framework's dims) of every slot."""


@dataclass(frozen=True, slots=True)
class Binding:
    """The framework's names for the parts of a structure."""

    units: tuple[UnitBinding, ...]
    aliases: tuple[tuple[str, ...], ...] = ()
    """The names of every tied parameter, its first name first."""
    unused: tuple[str, ...] = ()
    """The parameters that no op reads: they belong to no unit and stay as they are."""


@dataclass(frozen=True)
class Structure:
    """The framework-neutral shape of a model."""

    unit_classes: tuple[int, ...]
    class_slots: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]
    """The slots of every class: (role, shape)."""
    ties: tuple[tuple[str, ...], ...]
    """The groups of slots, as ``unit/role``, that are one parameter."""

    @cached_property
    def digest(self) -> str:
        """A short hash that two captures of the same model share."""
        text = json.dumps([self.unit_classes, self.class_slots, self.ties])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def slot_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every slot, as ``class/role`` and as ``@unit/role``."""
        classes = {f"{c}/{role}": shape for c, slots in enumerate(self.class_slots) for role, shape in slots}
        units = {f"@{u}/{role}": shape for u, c in enumerate(self.unit_classes) for role, shape in self.class_slots[c]}
        return classes | units

    @property
    def parameter_count(self) -> int:
        sizes = {
            f"{unit}/{role}": math.prod(shape)
            for unit, fold_class in enumerate(self.unit_classes)
            for role, shape in self.class_slots[fold_class]
        }
        tied_again = {slot for tie in self.ties for slot in tie[1:]}
        return sum(size for slot, size in sizes.items() if slot not in tied_again)

    def difference(self, other: "Structure") -> str | None:
        """The first difference in words, or None."""
        if len(self.unit_classes) != len(other.unit_classes):
            return f"{len(self.unit_classes)} units against {len(other.unit_classes)}"
        for unit, (a, b) in enumerate(zip(self.unit_classes, other.unit_classes, strict=True)):
            mine, theirs = dict(self.class_slots[a]), dict(other.class_slots[b])
            for role in sorted(mine.keys() | theirs.keys()):
                if mine.get(role) != theirs.get(role):
                    has, wants = mine.get(role, "absent"), theirs.get(role, "absent")
                    return f"unit {unit}, parameter {role}: {has} against {wants}"
        if self.unit_classes != other.unit_classes:
            return f"repeated units {self.unit_classes} against {other.unit_classes}"
        if self.ties != other.ties:
            return f"tied parameters {self.ties} against {other.ties}"
        return None


def structure_of(folded: Folded) -> tuple[Structure, Binding]:
    """The structure of a captured model, and the framework's names for it."""
    slots = [unit_slots(folded.graph, unit) for unit in folded.units]
    parameters = folded.graph.parameters
    classes: dict[tuple[tuple[str, tuple[int, ...]], ...], int] = {}
    # Ops may differ in detail between the frameworks: units are of one class when their parameters are alike.
    unit_classes = tuple(
        classes.setdefault(tuple((slot.role, slot.shape) for slot in found), len(classes)) for found in slots
    )
    users: dict[int, list[str]] = {}
    for unit, found in zip(folded.units, slots, strict=True):
        for slot in found:
            users.setdefault(slot.parameter, []).append(f"{unit.index}/{slot.role}")
    ties = tuple(tuple(places) for places in users.values() if len(places) > 1)
    binding = Binding(
        tuple(
            UnitBinding(unit.calls, tuple((s.role, parameters[s.parameter].name, s.dims) for s in found))
            for unit, found in zip(folded.units, slots, strict=True)
        ),
        tuple(p.names for p in parameters if p.aliases),
        tuple(p.name for index, p in enumerate(parameters) if index not in users),
    )
    return Structure(unit_classes, tuple(classes), ties), binding


def unit_slots(graph: Graph, unit: Unit) -> tuple[Slot, ...]:
    """The parameters of a unit in structural terms, matrices first, each in order of first use."""
    matrices: list[Slot] = []
    vectors: list[Slot] = []
    for parameter in unit.parameters:
        tensor = graph.parameters[parameter].tensor
        shape = graph.tensors[tensor].fixed
        if len([size for size in shape if size != 1]) < 2:
            entries = math.prod(shape)
            longest = max(range(len(shape)), key=lambda d: shape[d], default=0)
            vectors.append(Slot(f"v{len(vectors)}", (entries,), (((longest, entries),),), parameter))
            continue
        summed, free = matrix_dims(graph, unit, tensor)
        dims = tuple(tuple((d, shape[d]) for d in group) for group in (summed, free) if group)
        sizes = tuple(math.prod(size for _, size in group) for group in dims)
        # A bias of several dims (heads, size) is a vector all the same: nothing is summed over.
        kind, others = ("w", matrices) if len(dims) > 1 else ("v", vectors)
        others.append(Slot(f"{kind}{len(others)}", sizes, dims, parameter))
    return (*matrices, *vectors)


def layout_of(layouts: Mapping[str, Layout], unit: int, structural: int, role: str) -> Layout:
    """The layout of one unit's slot in layouts by slot: ``@unit/role``, else ``class/role``, else replicated."""
    return layouts.get(f"@{unit}/{role}", layouts.get(f"{structural}/{role}", Layout()))


def in_slot_dims(layout: Layout, dims: SlotDims) -> Layout:
    """A parameter's layout, given in its own dims, in slot dims.

    A dim that stands inside others in its slot dim is split in each of their entries: (experts, width) split along the
    width is the slot dim split by blocks, one or more for each expert.
    """
    places: dict[str, Placement] = {}
    for axis, place in layout.placements:
        if not isinstance(place, Split):
            places[axis] = place
            continue
        slot_dim, j = next((g, j) for g, group in enumerate(dims) for j, (d, _) in enumerate(group) if d == place.dim)
        group = dims[slot_dim]
        outer, inner = math.prod(n for _, n in group[:j]), math.prod(n for _, n in group[j + 1 :])
        blocks = tuple(size * inner for size in place.blocks or (group[j][1],)) * outer
        places[axis] = Split(slot_dim, blocks if len(blocks) > 1 else ())
    return Layout.of(places)


def in_own_dims(layout: Layout, dims: SlotDims) -> Layout:
    """The counterpart of `in_slot_dims`. Raises PlanError for blocks that are those of none of the own dims."""
    places: dict[str, Placement] = {}
    for axis, place in layout.placements:
        places[axis] = _own_split(place, dims[place.dim]) if isinstance(place, Split) else place
    return Layout.of(places)


def _own_split(place: Split, group: tuple[tuple[int, int], ...]) -> Split:
    given = place.blocks or (math.prod(size for _, size in group),)
    for j in reversed(range(len(group))):
        dim, size = group[j]
        outer, inner = math.prod(n for _, n in group[:j]), math.prod(n for _, n in group[j + 1 :])
        own = given[: len(given) // outer]
        if own * outer == given and all(n % inner == 0 for n in own) and sum(own) == size * inner:
            return Split(dim, tuple(n // inner for n in own) if len(own) > 1 else ())
    raise PlanError(f"{place} splits dims {group} (dim, size) by blocks that are those of none of them")


def matrix_dims(graph: Graph, unit: Unit, tensor: int) -> tuple[list[int], list[int]]:
    """The dims of a matrix that its first use sums over or looks up, and the others.

    Follows the parameter through views and casts. Dims that only the matrix has (a convolution's window) follow the
    summed ones; a matrix that no product uses keeps its order, all dims free.
    """
    origin: dict[int, tuple[int, ...]] = {tensor: tuple(range(len(graph.tensors[tensor].fixed)))}
    for op in graph.ops[unit.first_op : unit.end_op]:
        held = [i for i, t in enumerate(op.inputs) if t in origin]
        if not held:
            continue
        mine, dims = op.labels[held[0]], origin[op.inputs[held[0]]]
        if op.kind in ("view", "copy", "elementwise") and len(op.inputs) == 1:
            for output, labels in zip(op.outputs, op.output_labels, strict=True):
                origin[output] = tuple(dims[mine.index(x)] if x >= 0 and x in mine else -1 for x in labels)
            continue
        if op.kind not in ("contraction", "gather"):
            continue
        others = {x for i, labels in enumerate(op.input_labels) if i != held[0] for x in labels}
        roles = {d: op.role(label) for d, label in zip(dims, mine, strict=True) if d >= 0}
        shared = {d for d, label in zip(dims, mine, strict=True) if label in others}
        summed = [d for d in sorted(roles) if roles[d] in ("sum", "index")]
        summed.sort(key=lambda d: (roles[d] != "index" and d not in shared, d))
        summed += [d for d in sorted(roles) if roles[d] == "whole" and d not in shared]
        free = [d for d in range(len(graph.tensors[tensor].fixed)) if d not in summed]
        return summed, free
    return [], list(range(len(graph.tensors[tensor].fixed)))


def nearest_names(missing: Sequence[str], present: Sequence[str], limit: int = 3) -> str:
    """The text of an error about missing names: ``limit`` of them at most, each with the nearest present name."""
    lines = []
    for name in missing[:limit]:
        close = difflib.get_close_matches(name, present, n=1, cutoff=0.3)
        lines.append(f"{name} (nearest: {close[0]})" if close else name)
    more = f" and {len(missing) - limit} more" if len(missing) > limit else ""
    return ", ".join(lines) + more


def require_names(binding: Binding, names: Sequence[str], model_name: str) -> None:
    """Raise PlanError unless a model's parameter names are those that the plan binds."""
    planned = [*(name for unit in binding.units for _, name, _ in unit.parameters), *binding.unused]
    first_names = {alias: tied[0] for tied in binding.aliases for alias in tied}
    given = {first_names.get(name, name) for name in names}
    missing = [name for name in dict.fromkeys(planned) if name not in given]
    extra = [name for name in names if first_names.get(name, name) not in set(planned)]
    if missing or extra:
        said = []
        if missing:
            said.append(f"the plan has {nearest_names(missing, list(names))}, which the model lacks")
        if extra:
            said.append(f"the model has {nearest_names(extra, planned)}, which the plan lacks")
        raise PlanError(f"this plan is for another model than {model_name}: {'; '.join(said)}; plan this model anew")


def measured_name(framework: str, digest: str) -> str:
    """The name under which a model's units are measured, with the framework: times differ between frameworks."""
    return f"{framework}:{digest}"


def unit_form(graph: Graph, unit: Unit) -> str:
    """The digest of a unit's ops without their sizes: the same for the same layer of a wider model."""
    ops = [(op.kind, op.name, op.labels, len(op.inputs)) for op in graph.ops[unit.first_op : unit.end_op]]
    return hashlib.sha256(repr(ops).encode()).hexdigest()[:16]
