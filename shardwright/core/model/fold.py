"""Units and folding: the parts of a model that a pipeline cut keeps whole, and the classes of identical ones.

A unit is a contiguous range of ops: one call of a block (`core.model.blocks`), or what lies between blocks
(embeddings; final norm, head and loss). Where a framework records no module calls (a pure JAX function), ops belong to
the block whose parameters they use. Ops that belong to nobody are divided where the fewest bytes cross. Identical
units fold into one class, so that 96 layers cost what one does.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.core.errors import CaptureError
from shardwright.core.model.blocks import call_tree, find_blocks, parameter_tree
from shardwright.core.model.graph import Graph, Op
from shardwright.core.values.fields import Amount

GLUE = "glue"


@dataclass(frozen=True, slots=True)
class CallRef:
    """One call of one module: its path and the number of calls of that path before it."""

    path: str
    occurrence: Amount = 0


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit: the ops ``first_op`` … ``end_op - 1`` of the graph."""

    index: int
    first_op: int
    end_op: int
    fold_class: int
    calls: tuple[CallRef, ...]
    """The outermost module calls that lie wholly inside."""
    parameters: tuple[int, ...]
    """Indices into the graph's parameters, in order of first use."""


@dataclass(frozen=True, slots=True)
class Folded:
    """A graph as a sequence of units, and the classes of identical ones."""

    graph: Graph
    units: tuple[Unit, ...]

    @property
    def classes(self) -> tuple[tuple[int, ...], ...]:
        """The units of every class; the first is its representative."""
        members: dict[int, list[int]] = {}
        for unit in self.units:
            members.setdefault(unit.fold_class, []).append(unit.index)
        return tuple(tuple(members[c]) for c in sorted(members))


def fold(graph: Graph, nesting: int = 0) -> Folded:
    """Cut the graph into units and fold them. ``nesting``: how often blocks are opened into smaller ones, as in
    `find_blocks`, of a graph that records module calls. Raises CaptureError for a graph without ops."""
    if not graph.ops:
        raise CaptureError(f"{graph.model_name} ran no op: there is nothing to plan")
    labels = _fill(graph, _owners(graph, nesting))
    starts = [i for i in range(len(labels)) if i == 0 or labels[i] != labels[i - 1]]
    ranges = _merge_small_gaps(graph, labels, [*starts, len(labels)])
    parameter_of = {p.tensor: i for i, p in enumerate(graph.parameters)}
    calls = _outermost_calls(graph, ranges)
    known: dict[object, int] = {}
    units = []
    for index, (first, end) in enumerate(ranges):
        used = dict.fromkeys(parameter_of[t] for op in graph.ops[first:end] for t in op.inputs if t in parameter_of)
        fold_class = known.setdefault(_fingerprint(graph, first, end), len(known))
        units.append(Unit(index, first, end, fold_class, calls[index], tuple(used)))
    return Folded(graph, tuple(units))


def module_inside(graph: Graph, unit: Unit, op: Op) -> str:
    """The path, inside of a unit, of the module that runs an op; "" for the unit's own."""
    path = graph.calls[op.call].path
    for call in unit.calls:
        if path == call.path or path.startswith(f"{call.path}."):
            return path.removeprefix(call.path).removeprefix(".")
    return path


def _block_of_calls(graph: Graph, nesting: int) -> list[str | None]:
    """The block around every call, as a key that tells the calls of one block apart; None outside every block."""
    blocks = find_blocks(call_tree(graph), nesting)
    found: list[str | None] = []
    for index, call in enumerate(graph.calls):
        outer = found[call.parent] if index and call.parent < index else None
        if outer is None and index in blocks:
            outer = f"{call.path}#{call.occurrence}"
        found.append(outer)
    return found


def _block_of_parameters(graph: Graph) -> dict[int, str]:
    """The tensor of every parameter inside a block, by name alone, and the block's path."""
    nodes = parameter_tree(graph)
    blocks = sorted((nodes[b].path for b in find_blocks(nodes)), key=len)
    inside = {p.tensor: b for p in graph.parameters for b in blocks if p.name.startswith(f"{b}.")}
    if inside or not graph.memory_traits.stages_are_programs:
        return inside
    return {p.tensor: _innermost(p.name) for p in graph.parameters}  # no indexed container at all


def _innermost(name: str) -> str:
    """The smallest group that a parameter's name puts it in; a member of a list is one by itself."""
    group, _, last = name.rpartition(".")
    return group if group and not last.isdigit() else name


def _owners(graph: Graph, nesting: int) -> list[str | None]:
    """The owner of every op: a block, `GLUE` (a module or a parameter outside every block), or None for nobody."""
    has_calls = len(graph.calls) > 1
    blocks = _block_of_calls(graph, nesting)
    if has_calls and not any(blocks):  # no indexed container at all: every innermost module is a unit
        blocks = [f"{call.path}#{call.occurrence}" if call.path else None for call in graph.calls]
    parameters = {p.tensor for p in graph.parameters}
    named_blocks = {} if has_calls else _block_of_parameters(graph)
    owners: list[str | None] = []
    for op in graph.ops:
        used = [t for t in op.inputs if t in parameters]
        if blocks[op.call] is not None:
            owners.append(blocks[op.call])
        elif op.call:
            owners.append(GLUE)
        elif used:
            owners.append(named_blocks.get(used[0], GLUE))
        else:
            owners.append(None)
    return owners


def _fill(graph: Graph, owners: Sequence[str | None]) -> list[str]:
    """Give every op an owner; between two different ones, cut where the fewest bytes cross."""
    crossing = crossing_bytes(graph)
    filled: list[str] = []
    position = 0
    while position < len(owners):
        owner = owners[position]
        if owner is not None:
            filled.append(owner)
            position += 1
            continue
        end = position
        while end < len(owners) and owners[end] is None:
            end += 1
        before = filled[-1] if filled else None
        after = owners[end] if end < len(owners) else None
        if before is None or after is None or before == after:
            filled.extend([before or after or GLUE] * (end - position))
        else:
            cut = position + int(np.argmin(crossing[position : end + 1]))
            filled.extend([before] * (cut - position) + [after] * (end - cut))
        position = end
    return filled


def crossing_bytes(graph: Graph, size_bytes: Callable[[int], int] | None = None) -> NDArray[np.int64]:
    """Bytes of activations made before and used at or after each position 0 … len(ops).

    ``size_bytes`` gives the bytes of a tensor; default: at batch 2, as captured.
    """
    size_of = size_bytes or (lambda tensor: graph.tensors[tensor].size_bytes(2))
    last_use: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        for tensor in op.inputs:
            last_use[tensor] = index
    steps = np.zeros(len(graph.ops) + 2, dtype=np.int64)
    for tensor, made in graph.producer.items():
        if tensor in last_use:
            size = size_of(tensor)
            steps[made + 1] += size
            steps[last_use[tensor] + 1] -= size
    crossing: NDArray[np.int64] = np.cumsum(steps)[: len(graph.ops) + 1]
    return crossing


def _merge_small_gaps(graph: Graph, labels: Sequence[str], starts: Sequence[int]) -> list[tuple[int, int]]:
    """The ranges of ops of one label. Glue between two blocks that holds no parameter joins the block after it."""
    parameters = {p.tensor for p in graph.parameters}
    ranges: list[tuple[int, int]] = []
    carried: int | None = None
    for which, (first, end) in enumerate(itertools.pairwise(starts)):
        is_bare = labels[first] == GLUE and not any(t in parameters for op in graph.ops[first:end] for t in op.inputs)
        if is_bare and 0 < which < len(starts) - 2:
            carried = first if carried is None else carried
            continue
        ranges.append((first if carried is None else carried, end))
        carried = None
    return ranges


def _outermost_calls(graph: Graph, ranges: Sequence[tuple[int, int]]) -> list[tuple[CallRef, ...]]:
    """The outermost calls that lie wholly inside each range, in order of their first op."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, op in enumerate(graph.ops):
        call = op.call
        while call:
            first.setdefault(call, position)
            last[call] = position
            call = graph.calls[call].parent
    unit_of = np.repeat(np.arange(len(ranges)), [end - start for start, end in ranges])
    inside = {call: int(unit_of[first[call]]) for call in first if unit_of[first[call]] == unit_of[last[call]]}
    found: list[list[int]] = [[] for _ in ranges]
    for call, unit in inside.items():
        if graph.calls[call].parent not in inside:
            found[unit].append(call)
    return [
        tuple(
            CallRef(graph.calls[c].path, graph.calls[c].occurrence) for c in sorted(calls, key=lambda c: (first[c], c))
        )
        for calls in found
    ]


def _fingerprint(graph: Graph, first: int, end: int) -> object:
    """The features that two units must share to be solved once: kinds, labels, shapes and wiring."""
    local: dict[int, int] = {}
    rows = []
    for op in graph.ops[first:end]:
        operands: list[object] = []
        for tensor in (*op.inputs, *op.outputs):
            value = graph.tensors[tensor]
            is_new = tensor not in local
            place = local.setdefault(tensor, len(local))
            if not is_new:
                operands.append(place)
                continue
            of_value = value.fixed, value.per_sample, value.dtype, value.role, value.stays_wide, value.is_left
            operands.append((place, *of_value))
        checkpoint = op.in_checkpoint, op.is_run_again
        rows.append((op.kind, op.labels, op.special, op.offsets, tuple(operands), op.memory, checkpoint))
    return tuple(rows)
