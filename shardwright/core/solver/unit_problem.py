"""One unit as a network of choices: a signature for every op, a placement for every parameter and boundary.

The time is compute, forward and backward, on what each rank holds, plus the conversions of values in the forward pass
and of gradients in the backward pass. A value and its gradient are placed as duals. The gradient of a split value is
split alike, and that of a partial value is replicated. The gradient of a replicated operand is a partial sum when the
op split or summed anything, else replicated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from shardwright.core.layout.conversion_bytes import table_bytes
from shardwright.core.layout.placements import Layout, Partial, Placement, Replicate, Split
from shardwright.core.layout.signature import Signature
from shardwright.core.layout.unit_layouts import Link, Places
from shardwright.core.model.graph import Op
from shardwright.core.rules.dim_groups import Dim
from shardwright.core.rules.legal_signatures import divides
from shardwright.core.solver.network import Network
from shardwright.core.solver.op_prices import AxisCost, Prices, Setting, State
from shardwright.core.solver.shared_problem import Frame

R, P = Replicate(), Partial("sum")


@dataclass(frozen=True, slots=True)
class Edge:
    """Two nodes between which a tensor may be converted."""

    tensor: int
    nodes: tuple[int, int]
    given: tuple[State, ...]
    wanted: tuple[State, ...]
    flows: bool
    is_parameter: bool = False
    reader: int | None = None
    """The op of the unit that reads the tensor; None for the state that all readers, or later units, share."""
    position: int = 0
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """A conversion along one axis that an answer needs."""

    tensor: int
    axis: str
    before: Placement
    after: Placement
    is_backward: bool
    size_bytes: float
    """The bytes of the tensor as the other axes leave it: what the collective's members together hold or reduce."""
    is_parameter: bool = False
    """Whether the conversion is of a parameter's gradient, once a step."""


def dual(value: Placement) -> Placement:
    """The placement in which the gradient of an op's result is wanted."""
    return R if isinstance(value, Partial) else value


def operand_gradient(signature: Signature, position: int) -> Placement:
    """The placement in which the gradient of an operand comes out of the op's backward."""
    given = signature.inputs[position]
    if not isinstance(given, Replicate):
        return dual(given)
    return R if all(isinstance(p, Replicate) for p in signature.outputs) else P


class UnitProblem:
    """The network of one unit. ``pins`` fix the placements of parameters: tensor → one per axis, None where free.

    ``dims`` are the dims that may be split; None: all.
    """

    def __init__(
        self,
        frame: Frame,
        unit: int,
        setting: Setting,
        pins: Mapping[int, tuple[Placement | None, ...]] | None = None,
        dims: frozenset[Dim] | None = None,
    ) -> None:
        self.graph, self.unit, self.setting = frame.graph, frame.folded.units[unit], setting
        self.pins, self.dims = dict(pins or {}), dims
        able = self.graph.capabilities.block_layouts
        self.blocks = {d: sizes for group in frame.groups(unit) for d, sizes in group.blocks} if able else {}
        self.network = Network()
        self.edges: list[Edge] = []
        self.parameters = {self.graph.parameters[p].tensor for p in self.unit.parameters}
        self.ops = self.graph.ops[self.unit.first_op : self.unit.end_op]
        self.prices = Prices(self.graph, frame.counter, self.ops, setting, frame.kept, self.parameters)
        self._all_signatures = frame.signatures(unit, setting.batch)
        self._read_elsewhere = frame.leaving[unit]
        self._main = {frame.main[unit], frame.main[unit - 1] if unit else None}
        self.choice_of_op: dict[int, int] = {}
        self.choice_of_tensor: dict[int, int] = {}
        """The nodes of parameters, boundary tensors and values with several readers."""
        self.options: dict[int, list[State]] = {}
        """The (value, gradient) states of each tensor node."""
        self.signatures: dict[int, list[tuple[Signature, ...]]] = {}
        self._made = {t for op in self.ops for t in op.outputs}
        self.leaving: dict[int, int] = {}
        """The nodes of the tensors that later units read."""
        self._shape = self.prices.shape
        self._flows = self.prices.flows
        self._build()

    # -- building ------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        made = {t: i for i, op in enumerate(self.ops) for t in op.outputs}
        readers: dict[int, list[tuple[int, int]]] = {}
        for i, op in enumerate(self.ops):
            self._add_op(i, op)
            for position, tensor in enumerate(op.inputs):
                readers.setdefault(tensor, []).append((i, position))
        leaving = [t for t in made if t in self._read_elsewhere]
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
                    node = self._behind(tensor, node, self._middle_options(tensor), flows)
            for i, position in uses:
                self._connect_reader(tensor, node, i, position, flows)
        for tensor in leaving:
            flows = self._flows(tensor)
            if tensor not in readers:
                node = self._tensor_node(tensor, self._border_options(tensor, flows))
                self._connect_made(
                    tensor, made[tensor], self.ops[made[tensor]].outputs.index(tensor), node, flows, leaves=True
                )
                self.leaving[tensor] = node
                continue
            between, states = self.choice_of_tensor[tensor], self._border_options(tensor, flows)
            self.leaving[tensor] = self._behind(tensor, between, states, flows, leaves=True)

    @property
    def entering(self) -> dict[int, int]:
        """The nodes of values with a gradient that earlier units made."""
        outside = {t: n for t, n in self.choice_of_tensor.items() if t not in self._made and t not in self.parameters}
        return {t: n for t, n in outside.items() if self._flows(t)}

    @property
    def _n(self) -> int:
        return len(self.setting.axes)

    def _add_op(self, index: int, op: Op) -> None:
        found: list[tuple[Signature, ...]] = []
        seconds: list[float] = []
        weights: list[float] = []
        all_signatures = self._all_signatures[index]
        per_axis = [[s for s in all_signatures if self._allowed(op, s, axis)] for axis in self.setting.axes]
        for chosen in product(*per_axis):
            if not self._fits(op, chosen):
                continue
            found.append(chosen)
            seconds.append(self.prices.seconds(op, chosen))
            weights.append(self.prices.kept_bytes(op, chosen))
        self.signatures[index] = found
        self.choice_of_op[index] = self.network.node(seconds, weights)

    def _allowed(self, op: Op, signature: Signature, axis: AxisCost) -> bool:
        able = self.graph.capabilities
        for tensor, place in zip((*op.inputs, *op.outputs), (*signature.inputs, *signature.outputs), strict=True):
            if isinstance(place, Partial):
                # Values from outside the unit are never partial sums.
                if place.op != "sum" or tensor not in self._made or not able.partial_layouts or axis.size == 1:
                    return False
            elif isinstance(place, Split) and (
                not self._may_split(tensor, place, axis) or (place.blocks and not able.block_layouts)
            ):
                return False
        return True

    def _may_split(self, tensor: int, place: Split, axis: AxisCost) -> bool:
        """Whether an axis may split a dim: the batch dim belongs to other axes, and shards are equal."""
        if axis.size == 1:
            return False
        if self.graph.tensors[tensor].per_sample[place.dim] and not axis.splits_batch:
            return False
        if self.dims is not None and (tensor, place.dim) not in self.dims:
            return False
        return divides(self._shape[tensor], [(place, axis.size)])

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

    # -- nodes and edges -----------------------------------------------------------------------------------------

    def _splits(self, tensor: int, axis: AxisCost) -> list[Placement]:
        places = [Split(dim, self.blocks.get((tensor, dim), ())) for dim in range(len(self._shape[tensor]))]
        return [p for p in places if self._shape[tensor][p.dim] > 1 and self._may_split(tensor, p, axis)]

    def every_split(self, tensor: int) -> list[Split]:
        """The splits that cut a parameter evenly over every axis, whether or not the solver may use them."""
        places = (Split(dim, self.blocks.get((tensor, dim), ())) for dim in range(len(self._shape[tensor])))
        degrees = [axis.size for axis in self.setting.axes]
        return [p for p in places if divides(self._shape[tensor], [(p, n) for n in degrees])]

    def _combined(self, tensor: int, per_axis: list[list[tuple[Placement, Placement]]]) -> list[State]:
        found = []
        for chosen in product(*per_axis):
            splits = [
                (p, axis.size) for (p, _), axis in zip(chosen, self.setting.axes, strict=True) if isinstance(p, Split)
            ]
            if len(splits) < 2 or divides(self._shape[tensor], splits):
                found.append((tuple(v for v, _ in chosen), tuple(g for _, g in chosen)))
        return found

    def _parameter_options(self, tensor: int) -> list[State]:
        per_axis: list[list[tuple[Placement, Placement]]] = []
        pinned = self.pins.get(tensor, (None,) * self._n)
        for axis, pin in zip(self.setting.axes, pinned, strict=True):
            places = [R, *self._splits(tensor, axis)] if pin is None else [pin]
            per_axis.append([(p, p) for p in places])
        return self._combined(tensor, per_axis)

    def _border_options(self, tensor: int, flows: bool) -> list[State]:
        """The states between units: whole, or split along a dim that is not the batch's, with the gradient placed like
        the value. Values without a gradient (masks, positions) cross whole, because every rank can make them. All
        values do so where the dims of activations are not free. ``split_borders`` applies to the one value that goes
        from unit to unit; others (an encoder's result on its way to the decoder) stay whole."""
        whole: Places = (R,) * self._n
        if not flows or not self.setting.free_activations:
            return [(whole, whole)]
        found = self._combined(tensor, [[(p, p) for p in (R, *self._splits(tensor, a))] for a in self.setting.axes])
        along = self._along_the_sequence(tensor)
        if not self.setting.split_borders or along is None or tensor not in self._main:
            return found
        return [(v, g) for v, g in found if all(p == Split(along) for p in v)] or found

    def _along_the_sequence(self, tensor: int) -> int | None:
        """The sequence dim of an activation with a batch, a sequence and features; None for others."""
        slopes = self.graph.tensors[tensor].per_sample
        return (
            next((d for d, slope in enumerate(slopes) if not slope), None) if any(slopes) and len(slopes) > 2 else None
        )

    def _middle_options(self, tensor: int) -> list[State]:
        """The states that several readers share: one conversion of the value, and one of the sum of their gradients."""
        whole: list[tuple[Placement, Placement]] = [(R, R), (R, P), (P, R)]
        return self._combined(tensor, [[*whole, *((s, s) for s in self._splits(tensor, a))] for a in self.setting.axes])

    def _behind(self, tensor: int, before: int, states: list[State], flows: bool, *, leaves: bool = False) -> int:
        """A node of these states of a tensor, to which those of another node of it are converted."""
        node = self.network.node([0.0] * len(states))
        self.options[node] = states
        self._connect(tensor, (before, node), self.options[before], states, flows, leaves=leaves)
        return node

    def _tensor_node(self, tensor: int, options: list[State], *, is_parameter: bool = False) -> int:
        weights = [0.0] * len(options)
        if is_parameter:
            weights = [self.prices.state_bytes(tensor, value) for value, _ in options]
        node = self.network.node([0.0] * len(options), weights)
        self.choice_of_tensor[tensor] = node
        self.options[node] = options
        return node

    def _connect_ops(self, tensor: int, source: int, at: int, reader: int, position: int, flows: bool) -> None:
        nodes = self.choice_of_op[source], self.choice_of_op[reader]
        given, wanted = self._made_states(source, at), self._read_states(reader, position)
        self._connect(tensor, nodes, given, wanted, flows, reader, position)

    def _connect_made(self, tensor: int, source: int, at: int, node: int, flows: bool, *, leaves: bool = False) -> None:
        nodes = self.choice_of_op[source], node
        self._connect(tensor, nodes, self._made_states(source, at), self.options[node], flows, leaves=leaves)

    def _connect_reader(self, tensor: int, node: int, reader: int, position: int, flows: bool) -> None:
        nodes = node, self.choice_of_op[reader]
        states = self._read_states(reader, position)
        self._connect(tensor, nodes, self.options[node], states, flows, reader, position)

    def _made_states(self, source: int, at: int) -> list[State]:
        values = [tuple(s.outputs[at] for s in chosen) for chosen in self.signatures[source]]
        return [(value, tuple(map(dual, value))) for value in values]

    def _read_states(self, reader: int, position: int) -> list[State]:
        return [
            (tuple(s.inputs[position] for s in chosen), tuple(operand_gradient(s, position) for s in chosen))
            for chosen in self.signatures[reader]
        ]

    def _connect(
        self,
        tensor: int,
        nodes: tuple[int, int],
        given: Sequence[State],
        wanted: Sequence[State],
        flows: bool,
        reader: int | None = None,
        position: int = 0,
        *,
        leaves: bool = False,
    ) -> None:
        rows = {state: i for i, state in enumerate(dict.fromkeys(given))}
        columns = {state: j for j, state in enumerate(dict.fromkeys(wanted))}
        table = np.array([[self.prices.edge_s(tensor, a, b, flows) for b in columns] for a in rows])
        spread = table[np.ix_([rows[a] for a in given], [columns[b] for b in wanted])]
        self.network.edge(*nodes, spread)
        is_parameter = tensor in self.parameters
        self.edges.append(
            Edge(tensor, nodes, tuple(given), tuple(wanted), flows, is_parameter, reader, position, leaves)
        )

    # -- reading an answer ---------------------------------------------------------------------------------------

    def layout(self, places: Places) -> Layout:
        return Layout.of({axis.name: p for axis, p in zip(self.setting.axes, places, strict=True)})

    def parameter_layouts(self, chosen: tuple[int, ...]) -> dict[int, Layout]:
        """The layout of each parameter's tensor."""
        nodes = {t: n for t, n in self.choice_of_tensor.items() if t in self.parameters}
        return {t: self.layout(self.options[n][chosen[n]][0]) for t, n in nodes.items()}

    def links(self, chosen: tuple[int, ...]) -> tuple[Link, ...]:
        """The conversions of every tensor from its placement to the one in which it is read."""
        found = []
        for edge in self.edges:
            given, wanted = edge.given[chosen[edge.nodes[0]]], edge.wanted[chosen[edge.nodes[1]]]
            reader = None if edge.reader is None else self.unit.first_op + edge.reader
            ahead = edge.tensor, reader, edge.position, given[0], wanted[0]
            back = (wanted[1], given[1]) if edge.flows else ((), ())
            found.append(Link(*ahead, *back, edge.flows, edge.is_parameter, edge.leaves))
        return tuple(found)

    def moves(self, links: Sequence[Link]) -> tuple[Move, ...]:
        """The conversions that move anything, in order of the ops."""
        found = []
        for link in links:
            ahead = () if link.is_parameter else link.forward
            taken = [(step, False) for step in ahead] + [(step, True) for step in link.backward]
            for step, is_backward in taken:
                axis, size = self.setting.axes[step.axis], self.prices.local(link.tensor, step.others)
                if table_bytes(step.before, step.after, axis.size, size) > 0:
                    ends = link.tensor, axis.name, step.before, step.after
                    found.append(Move(*ends, is_backward, size, link.is_parameter))
        return tuple(found)
