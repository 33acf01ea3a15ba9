"""One unit as a network of choices: a signature for every op, a placement for every parameter and boundary.

Time is compute, forward and backward, on what each rank holds, plus the conversions of values in the forward pass and
of gradients in the backward pass. A value and its gradient are placed as duals: split as split; the gradient of a
partial value is replicated; that of a replicated operand is a partial sum when the op split or summed anything, else
replicated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from shardwright.core.conversions.table import table_bytes
from shardwright.core.cost.kept import Kept
from shardwright.core.cost.work import PRODUCT_KINDS, WorkCounter, contraction_flops
from shardwright.core.fold import Unit
from shardwright.core.graph import Graph, Op
from shardwright.core.layout import Layout, Partial, Placement, Replicate, Split
from shardwright.core.rules.legal import divides, signatures
from shardwright.core.rules.signature import Signature
from shardwright.core.solver.network import Network

R, P = Replicate(), Partial("sum")
Places = tuple[Placement, ...]
"""One placement per axis."""


@dataclass(frozen=True, slots=True)
class AxisCost:
    """A tensor-like axis: its size, and what a byte and a message cost on it."""

    name: str
    size: int
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    splits_batch: bool = False
    """Whether the axis may split the batch dim; tensor axes leave it to the data-parallel ones."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What the solver is told about devices and the step."""

    axes: tuple[AxisCost, ...]
    flops_per_s: float
    memory_bytes_per_s: float
    batch: int = 1
    precision: str = "bf16"
    state_bytes_per_element: float = 16.0
    """Parameter, gradient and optimizer state of one entry."""
    microbatches: int = 1
    """Gradients of parameters are reduced once for so many microbatches."""


State = tuple[Places, Places]
"""Where a value lies, and where its gradient does."""


@dataclass(frozen=True, slots=True)
class Edge:
    """Two nodes between which a tensor may be converted."""

    tensor: int
    nodes: tuple[int, int]
    given: tuple[State, ...]
    wanted: tuple[State, ...]
    flows: bool
    is_parameter: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """A conversion along one axis that an answer needs."""

    tensor: int
    axis: str
    before: Placement
    after: Placement
    is_backward: bool
    size_bytes: float
    """The tensor as the other axes leave it: what the collective's members together hold or reduce."""
    is_parameter: bool = False
    """A parameter's gradient, once a step."""


def dual(value: Placement) -> Placement:
    """Where the gradient of an op's result is wanted."""
    return R if isinstance(value, Partial) else value


def operand_gradient(signature: Signature, position: int) -> Placement:
    """Where the gradient of an operand comes out of the op's backward."""
    given = signature.inputs[position]
    if not isinstance(given, Replicate):
        return dual(given)
    return R if all(isinstance(p, Replicate) for p in signature.outputs) else P


class UnitProblem:
    """The network of one unit. ``pins`` fix the placement of parameters: tensor → one per axis, None where free."""

    def __init__(
        self,
        graph: Graph,
        counter: WorkCounter,
        unit: Unit,
        setting: Setting,
        kept: Kept,
        pins: Mapping[int, tuple[Placement | None, ...]] | None = None,
        blocks: Mapping[tuple[int, int], tuple[int, ...]] | None = None,
    ) -> None:
        self.graph, self.counter, self.unit, self.setting = graph, counter, unit, setting
        self.pins, self.blocks = dict(pins or {}), dict(blocks or {})
        self._kept = kept
        self._bytes: dict[int, float] = {}
        self._sizes = tuple(axis.size for axis in setting.axes)
        self._conversions: dict[tuple[int, Places, Places, bool], float] = {}
        self.network = Network()
        self.edges: list[Edge] = []
        self._answers: dict[tuple[int, ...], tuple[Move, ...]] = {}
        self.parameters = {graph.parameters[p].tensor for p in unit.parameters}
        self.ops = graph.ops[unit.first_op : unit.end_op]
        self.choice_of_op: dict[int, int] = {}
        self.choice_of_tensor: dict[int, int] = {}
        """Nodes of parameters, boundary tensors and values with several readers."""
        self.options: dict[int, list[tuple[Places, Places]]] = {}
        """For the nodes of tensors: (value, gradient)."""
        self.signatures: dict[int, list[tuple[Signature, ...]]] = {}
        self._made = {t for op in self.ops for t in op.outputs}
        self.leaving: dict[int, int] = {}
        """Tensors that later units read → their nodes."""
        self._shape = {t: graph.tensors[t].shape(setting.batch) for op in self.ops for t in (*op.inputs, *op.outputs)}
        self._build()

    # -- building ------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        made = {t: i for i, op in enumerate(self.ops) for t in op.outputs}
        readers: dict[int, list[tuple[int, int]]] = {}
        for i, op in enumerate(self.ops):
            self._add_op(i, op)
            for position, tensor in enumerate(op.inputs):
                readers.setdefault(tensor, []).append((i, position))
        leaving = self._leaving(made)
        for tensor, uses in readers.items():
            flows = self._flows(tensor)
            if tensor in made:
                source, at = made[tensor], self.ops[made[tensor]].outputs.index(tensor)
                if len(uses) == 1 and tensor not in leaving:
                    self._connect_ops(tensor, source, at, *uses[0], flows)
                    continue
                node = self._tensor_node(tensor, self._middle_options(tensor))
                self._connect_made(tensor, source, at, node, flows)
            elif tensor in self.parameters:
                node = self._tensor_node(tensor, self._parameter_options(tensor), is_parameter=True)
            else:
                node = self._tensor_node(tensor, self._border_options(tensor, flows))
                if flows and len(uses) > 1:  # its readers share a conversion
                    node = self._shared(tensor, node)
            for i, position in uses:
                self._connect_reader(tensor, node, i, position, flows)
        for tensor in leaving:
            flows = self._flows(tensor)
            if tensor not in readers:
                node = self._tensor_node(tensor, self._border_options(tensor, flows))
                self._connect_made(tensor, made[tensor], self.ops[made[tensor]].outputs.index(tensor), node, flows)
                self.leaving[tensor] = node
                continue
            states = self._border_options(tensor, flows)
            out = self.network.node([0.0] * len(states))
            self.options[out] = states
            between = self.choice_of_tensor[tensor]
            self._connect(tensor, (between, out), self.options[between], states, flows)
            self.leaving[tensor] = out

    @property
    def entering(self) -> dict[int, int]:
        """Values that earlier units made, with a gradient → their nodes."""
        made = {t for op in self.ops for t in op.outputs}
        return {
            t: n
            for t, n in self.choice_of_tensor.items()
            if t not in made and t not in self.parameters and self._flows(t)
        }

    @property
    def _n(self) -> int:
        return len(self.setting.axes)

    def _flows(self, tensor: int) -> bool:
        return self.counter.needs_gradient(tensor) and self.graph.tensors[tensor].is_floating

    def _leaving(self, made: Mapping[int, int]) -> list[int]:
        outside = set(self.graph.outputs)
        for op in (*self.graph.ops[: self.unit.first_op], *self.graph.ops[self.unit.end_op :]):
            outside.update(t for t in op.inputs if t in made)
        return [t for t in made if t in outside]

    def _add_op(self, index: int, op: Op) -> None:
        found: list[tuple[Signature, ...]] = []
        seconds: list[float] = []
        weights: list[float] = []
        label_blocks = self._label_blocks(op)
        all_signatures = signatures(self.graph, op, self.setting.batch, label_blocks)
        per_axis = [[s for s in all_signatures if self._allowed(op, s, axis)] for axis in self.setting.axes]
        for chosen in product(*per_axis):
            if not self._fits(op, chosen):
                continue
            found.append(chosen)
            seconds.append(self._seconds(op, chosen))
            weights.append(self._kept_bytes(op, chosen))
        self.signatures[index] = found
        self.choice_of_op[index] = self.network.node(seconds, weights)

    def _label_blocks(self, op: Op) -> dict[int, tuple[int, ...]]:
        """The blocks that the unit's fused dims give an op's labels, at the label's whole size."""
        sizes = self.graph.label_sizes(op, self.setting.batch)
        found: dict[int, tuple[int, ...]] = {}
        for tensor, labels in zip((*op.inputs, *op.outputs), op.labels, strict=True):
            for dim, label in enumerate(labels):
                blocks = self.blocks.get((tensor, dim), ())
                if label >= 0 and blocks and self._shape[tensor][dim] == sizes[label]:
                    found[label] = blocks
        return found

    def _allowed(self, op: Op, signature: Signature, axis: AxisCost) -> bool:
        for tensor, place in zip((*op.inputs, *op.outputs), (*signature.inputs, *signature.outputs), strict=True):
            if isinstance(place, Partial) and (place.op != "sum" or tensor not in self._made):
                return False  # nothing that comes from outside the unit is a term of a sum
            if not isinstance(place, Split):
                continue
            if self.graph.tensors[tensor].per_sample[place.dim] and not axis.splits_batch:
                return False
            if not divides(self._shape[tensor], [(place, axis.size)]):
                return False
        return True

    def _fits(self, op: Op, chosen: tuple[Signature, ...]) -> bool:
        for i, tensor in enumerate((*op.inputs, *op.outputs)):
            splits = [
                (p, axis.size)
                for s, axis in zip(chosen, self.setting.axes, strict=True)
                if isinstance(p := (*s.inputs, *s.outputs)[i], Split)
            ]
            if len(splits) > 1 and not divides(self._shape[tensor], splits):
                return False
        return True

    # -- costs ---------------------------------------------------------------------------------------------------

    def _local(self, tensor: int, places: Places) -> float:
        """Bytes of a rank's piece."""
        size = self._bytes.get(tensor)
        if size is None:
            size = float(self.counter.size_bytes(tensor, self.setting.batch, self.setting.precision))
            self._bytes[tensor] = size
        for place, ranks in zip(places, self._sizes, strict=True):
            if isinstance(place, Split):
                size /= ranks
        return size

    def _operand(self, chosen: tuple[Signature, ...], i: int) -> Places:
        return tuple((*s.inputs, *s.outputs)[i] for s in chosen)

    def _seconds(self, op: Op, chosen: tuple[Signature, ...]) -> float:
        tensors = (*op.inputs, *op.outputs)
        if op.kind in ("view", "create"):
            return 0.0
        share = 1
        for signature, axis in zip(chosen, self.setting.axes, strict=True):
            if any(isinstance(p, Split) for p in (*signature.inputs, *signature.outputs)):
                share *= axis.size
        moved = sum(self._local(t, self._operand(chosen, i)) for i, t in enumerate(tensors))
        if op.kind == "gather":  # a lookup reads only the rows that it returns
            moved -= self._local(op.inputs[0], self._operand(chosen, 0))
        trained = sum(self._flows(t) for t in op.inputs)
        seconds = moved / self.setting.memory_bytes_per_s * (3 if trained else 1)
        if op.kind in PRODUCT_KINDS:
            flops = contraction_flops(self.graph, op, self.setting.batch) / share
            again = 2.5 if op.kind == "attention" and trained else float(trained)
            seconds = max(flops / self.setting.flops_per_s * (1 + again), seconds)
        for signature, axis in zip(chosen, self.setting.axes, strict=True):
            if signature.need == "combine":  # two small reductions forward, one backward
                whole = next((p.dim for p in signature.inputs if isinstance(p, Split)), 0)
                rows = (
                    self._local(op.inputs[0], self._operand(chosen, 0)) * axis.size / self._shape[op.inputs[0]][whole]
                )
                seconds += 3 * self._reduce_s(rows, axis)
        return seconds

    def _reduce_s(self, size_bytes: float, axis: AxisCost) -> float:
        steps = 2 * (axis.size - 1)
        return steps * (axis.latency_s + size_bytes / axis.size / axis.bandwidth_bytes_per_s)

    def _kept_bytes(self, op: Op, chosen: tuple[Signature, ...]) -> float:
        """Bytes that the op's backward needs of its inputs, counted where they are made: a share for each reader would
        count twice, so results are counted, once, when something non-linear or a product reads them."""
        if op.kind in ("view", "create") or not any(self._flows(t) for t in op.inputs):
            return 0.0
        size = 0.0
        for i, tensor in enumerate(op.outputs):
            if tensor in self._read_in_backward:
                size += self._local(tensor, self._operand(chosen, len(op.inputs) + i))
        return size

    @cached_property
    def _read_in_backward(self) -> set[int]:
        return {t for op in self.ops for t in self._kept.by(op)}

    def conversion_s(self, tensor: int, before: Places, after: Places, *, bucketed: bool = False) -> float:
        """Seconds to convert, axis after axis, on what the other axes leave of the tensor. ``bucketed`` conversions go
        with many others in one message: they pay no latency of their own."""
        if before == after:
            return 0.0
        key = (tensor, before, after, bucketed)
        found = self._conversions.get(key)
        if found is None:
            found = self._conversions[key] = self._conversion_s(tensor, before, after, bucketed=bucketed)
        return found

    def _conversion_s(self, tensor: int, before: Places, after: Places, *, bucketed: bool) -> float:
        total, now = 0.0, list(before)
        # Cut first what shrinks the tensor, gather last: the cheapest order of independent axes.
        order = sorted(range(len(before)), key=lambda a: _rank(before[a], after[a]))
        for a in order:
            if now[a] == after[a]:
                continue
            axis = self.setting.axes[a]
            others = tuple(p if i != a else R for i, p in enumerate(now))
            size = self._local(tensor, others)
            moved = table_bytes(now[a], after[a], axis.size, size) / axis.size
            if moved:
                steps = (axis.size - 1) * (2 if isinstance(now[a], Partial) and isinstance(after[a], Replicate) else 1)
                total += (0.0 if bucketed else steps * axis.latency_s) + moved / axis.bandwidth_bytes_per_s
            now[a] = after[a]
        return total

    # -- nodes and edges -----------------------------------------------------------------------------------------

    def _splits(self, tensor: int, axis: AxisCost) -> list[Placement]:
        found: list[Placement] = []
        for dim in range(len(self._shape[tensor])):
            if self.graph.tensors[tensor].per_sample[dim] and not axis.splits_batch:
                continue
            place = Split(dim, self.blocks.get((tensor, dim), ()))
            if self._shape[tensor][dim] > 1 and divides(self._shape[tensor], [(place, axis.size)]):
                found.append(place)
        return found

    def _combined(self, tensor: int, per_axis: list[list[tuple[Placement, Placement]]]) -> list[tuple[Places, Places]]:
        found = []
        for chosen in product(*per_axis):
            splits = [
                (p, axis.size) for (p, _), axis in zip(chosen, self.setting.axes, strict=True) if isinstance(p, Split)
            ]
            if len(splits) < 2 or divides(self._shape[tensor], splits):
                found.append((tuple(v for v, _ in chosen), tuple(g for _, g in chosen)))
        return found

    def _parameter_options(self, tensor: int) -> list[tuple[Places, Places]]:
        per_axis: list[list[tuple[Placement, Placement]]] = []
        pinned = self.pins.get(tensor, (None,) * self._n)
        for axis, pin in zip(self.setting.axes, pinned, strict=True):
            places = [R, *self._splits(tensor, axis)] if pin is None else [pin]
            per_axis.append([(p, p) for p in places])
        return self._combined(tensor, per_axis)

    def _boundary_options(self, tensor: int) -> list[tuple[Places, Places]]:
        """Between units: whole, or split along a dim that is not the batch's. The gradient lies like the value."""
        return self._combined(tensor, [[(p, p) for p in (R, *self._splits(tensor, a))] for a in self.setting.axes])

    def _border_options(self, tensor: int, flows: bool) -> list[State]:
        """Values without a gradient (masks, positions) cross whole: every rank can make them."""
        whole: Places = (R,) * self._n
        return self._boundary_options(tensor) if flows else [(whole, whole)]

    def _middle_options(self, tensor: int) -> list[tuple[Places, Places]]:
        """What several readers share: one conversion of the value, one of the sum of their gradients."""
        per_axis: list[list[tuple[Placement, Placement]]] = []
        for axis in self.setting.axes:
            per_axis.append([(R, R), (R, P), (P, R), *((s, s) for s in self._splits(tensor, axis))])
        return self._combined(tensor, per_axis)

    def _shared(self, tensor: int, border: int) -> int:
        states = self._middle_options(tensor)
        node = self.network.node([0.0] * len(states))
        self.options[node] = states
        self._connect(tensor, (border, node), self.options[border], states, flows=True)
        return node

    def _tensor_node(self, tensor: int, options: list[tuple[Places, Places]], *, is_parameter: bool = False) -> int:
        weights = [0.0] * len(options)
        if is_parameter:
            entries = self.graph.tensors[tensor].elements(1) * self.setting.state_bytes_per_element
            whole = self._local(tensor, (R,) * self._n)
            weights = [entries * self._local(tensor, value) / whole if whole else 0.0 for value, _ in options]
        node = self.network.node([0.0] * len(options), weights)
        self.choice_of_tensor[tensor] = node
        self.options[node] = options
        return node

    def _connect_ops(self, tensor: int, source: int, at: int, reader: int, position: int, flows: bool) -> None:
        nodes = self.choice_of_op[source], self.choice_of_op[reader]
        self._connect(tensor, nodes, self._made_states(source, at), self._read_states(reader, position), flows)

    def _connect_made(self, tensor: int, source: int, at: int, node: int, flows: bool) -> None:
        nodes = self.choice_of_op[source], node
        self._connect(tensor, nodes, self._made_states(source, at), self.options[node], flows)

    def _connect_reader(self, tensor: int, node: int, reader: int, position: int, flows: bool) -> None:
        nodes = node, self.choice_of_op[reader]
        self._connect(tensor, nodes, self.options[node], self._read_states(reader, position), flows)

    def _made_states(self, source: int, at: int) -> list[State]:
        values = [tuple(s.outputs[at] for s in chosen) for chosen in self.signatures[source]]
        return [(value, tuple(map(dual, value))) for value in values]

    def _read_states(self, reader: int, position: int) -> list[State]:
        return [
            (tuple(s.inputs[position] for s in chosen), tuple(operand_gradient(s, position) for s in chosen))
            for chosen in self.signatures[reader]
        ]

    def _connect(
        self, tensor: int, nodes: tuple[int, int], given: Sequence[State], wanted: Sequence[State], flows: bool
    ) -> None:
        is_parameter = tensor in self.parameters
        price = self._parameter_s if is_parameter else self._edge_s
        rows = {state: i for i, state in enumerate(dict.fromkeys(given))}
        columns = {state: j for j, state in enumerate(dict.fromkeys(wanted))}
        table = np.array([[price(tensor, a, b, flows) for b in columns] for a in rows])
        spread = table[np.ix_([rows[a] for a in given], [columns[b] for b in wanted])]
        self.network.edge(*nodes, spread)
        self.edges.append(Edge(tensor, nodes, tuple(given), tuple(wanted), flows, is_parameter))

    def _edge_s(self, tensor: int, given: tuple[Places, Places], wanted: tuple[Places, Places], flows: bool) -> float:
        ahead = self.conversion_s(tensor, given[0], wanted[0])
        return ahead + (self.conversion_s(tensor, wanted[1], given[1]) if flows else 0.0)

    def _parameter_s(self, tensor: int, held: tuple[Places, Places], used: tuple[Places, Places], flows: bool) -> float:
        """A parameter is used as it is held: gathering parameters is a sharding policy, not a tensor layout. Its
        gradient is reduced once a step."""
        for place, use in zip(held[0], used[0], strict=True):
            if place != use and not (isinstance(place, Replicate) and isinstance(use, Split)):
                return float("inf")
        if not flows:
            return 0.0
        return self.conversion_s(tensor, used[1], held[1], bucketed=True) / self.setting.microbatches

    # -- reading an answer ---------------------------------------------------------------------------------------

    def layout(self, places: Places) -> Layout:
        return Layout.of({axis.name: p for axis, p in zip(self.setting.axes, places, strict=True)})

    def parameter_layouts(self, chosen: tuple[int, ...]) -> dict[int, Layout]:
        """Tensor → layout."""
        nodes = {t: n for t, n in self.choice_of_tensor.items() if t in self.parameters}
        return {t: self.layout(self.options[n][chosen[n]][0]) for t, n in nodes.items()}

    def moves(self, chosen: tuple[int, ...]) -> tuple[Move, ...]:
        """The conversions that an answer needs, in order of the ops."""
        if chosen in self._answers:
            return self._answers[chosen]
        found: list[Move] = []
        for edge in self.edges:
            given, wanted = edge.given[chosen[edge.nodes[0]]], edge.wanted[chosen[edge.nodes[1]]]
            if not edge.is_parameter:
                found += self._moves(edge, given[0], wanted[0], is_backward=False)
            if edge.flows:
                found += self._moves(edge, wanted[1], given[1], is_backward=True)
        return self._answers.setdefault(chosen, tuple(found))

    def _moves(self, edge: Edge, before: Places, after: Places, *, is_backward: bool) -> list[Move]:
        found, now = [], list(before)
        for a in sorted(range(len(before)), key=lambda a: _rank(before[a], after[a])):
            axis = self.setting.axes[a]
            size = self._local(edge.tensor, tuple(p if i != a else R for i, p in enumerate(now)))
            if table_bytes(now[a], after[a], axis.size, size) > 0:
                found.append(Move(edge.tensor, axis.name, now[a], after[a], is_backward, size, edge.is_parameter))
            now[a] = after[a]
        return found


def _rank(before: Placement, after: Placement) -> int:
    if isinstance(before, Replicate):
        return 0
    if isinstance(after, Split):
        return 1
    return 2 if isinstance(before, Partial) else 3
