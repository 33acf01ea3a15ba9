"""What the solver chose for one unit, op by op: signatures, and the conversions of every value and its gradient."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.backends.torch.tensor_parallel.collectives import Change
from shardwright.core.cost.kept import Kept, aliases
from shardwright.core.cost.work import WorkCounter
from shardwright.core.errors import PlanError
from shardwright.core.fold import Folded, Unit
from shardwright.core.layout import Placement, Replicate
from shardwright.core.rules.axes import dim_groups
from shardwright.core.rules.signature import Signature
from shardwright.core.solver import Setting, Solution
from shardwright.core.solver.problem import Edge, UnitProblem

R = Replicate()


@dataclass(frozen=True, slots=True)
class Hop:
    """The conversion of a value between two places where it lies, and that of its gradient back (None: none flows)."""

    value: Change
    gradient: Change | None

    @property
    def is_idle(self) -> bool:
        return self.value[0] == self.value[1] and (self.gradient is None or self.gradient[0] == self.gradient[1])


@dataclass(frozen=True, slots=True)
class OpLayout:
    """How one op runs: the placements of its operands, and the way of every input from where the value lies."""

    signature: Signature
    inputs: tuple[Hop, ...]


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """How one unit runs along the tensor axis."""

    unit: Unit
    ops: tuple[OpLayout, ...]
    parameters: Mapping[int, Placement]
    """Tensor → where a parameter lies."""
    enters: Mapping[int, Placement]
    """Tensor → how a value that earlier units made, or an input, lies when it comes."""
    shared: Mapping[int, Hop]
    """Conversions that all readers of a tensor share, after it is made or comes."""
    leaves: Mapping[int, tuple[Placement, Hop]]
    """Tensor → how it lies for later units, and its way there."""


def unit_layouts(
    folded: Folded, setting: Setting, solution: Solution, counter: WorkCounter | None = None
) -> tuple[UnitLayout, ...]:
    """The layouts of all units along the one axis of ``setting``. Raises PlanError for several axes."""
    if len(setting.axes) != 1:
        raise PlanError(f"the tensor axis alone is realised: the setting has {len(setting.axes)} axes")
    graph = folded.graph
    counter = counter or WorkCounter(graph)
    needing = {t for t in range(len(graph.tensors)) if counter.needs_gradient(t)}
    kept = Kept(graph, aliases(graph), needing)
    problems: dict[int, UnitProblem] = {}
    found = []
    for unit, solved in zip(folded.units, solution.units, strict=True):
        if unit.fold_class not in problems:
            blocks = {dim: sizes for group in dim_groups(graph, unit) for dim, sizes in group.blocks}
            problems[unit.fold_class] = UnitProblem(graph, counter, unit, setting, kept, {}, blocks)
        found.append(_UnitReader(folded, problems[unit.fold_class], unit, solved.chosen).layout())
    return tuple(found)


class _UnitReader:
    """Reads the answer to one unit off the problem of its class's first unit."""

    def __init__(self, folded: Folded, problem: UnitProblem, unit: Unit, chosen: Sequence[int]) -> None:
        self.problem, self.unit, self.chosen = problem, unit, chosen
        self.graph = folded.graph
        theirs = self.graph.ops[problem.unit.first_op : problem.unit.end_op]
        self.ops = self.graph.ops[unit.first_op : unit.end_op]
        self.own: dict[int, int] = {}
        for a, b in zip(theirs, self.ops, strict=True):
            self.own.update(zip((*a.inputs, *a.outputs), (*b.inputs, *b.outputs), strict=True))
        self.place_of = {own: other for other, own in self.own.items()}

    def layout(self) -> UnitLayout:
        problem = self.problem
        ops_of_node = {node: i for i, node in problem.choice_of_op.items()}
        readers: dict[tuple[int, int], list[Hop]] = {}
        shared: dict[int, Hop] = {}
        leaving: dict[int, Hop] = {}
        for edge in problem.edges:
            hop = self._hop(edge)
            target = edge.nodes[1]
            if target in ops_of_node:
                readers.setdefault((ops_of_node[target], edge.tensor), []).append(hop)
            elif problem.leaving.get(edge.tensor) == target:
                leaving[edge.tensor] = hop
            else:
                shared[edge.tensor] = hop
        layouts = []
        for i, op in enumerate(problem.ops):
            hops = tuple(readers[i, t].pop(0) for t in op.inputs)
            layouts.append(OpLayout(problem.signatures[i][self.chosen[problem.choice_of_op[i]]][0], hops))
        made = {t for op in self.ops for t in op.outputs}
        parameters, enters = {}, {}
        for other, node in problem.choice_of_tensor.items():
            own = self.own[other]
            place = problem.options[node][self.chosen[node]][0][0]
            if other in problem.parameters:
                parameters[own] = place
            elif own not in made:
                enters[own] = place
        leaves: dict[int, tuple[Placement, Hop]] = {}
        for own in self._leaving(made):
            other = self.place_of[own]
            found = leaving.get(other) or self._whole(other, shared)
            leaves[own] = (found.value[1], found)
        own_shared = {self.own[other]: hop for other, hop in shared.items()}
        return UnitLayout(self.unit, tuple(layouts), parameters, enters, own_shared, leaves)

    def _hop(self, edge: Edge) -> Hop:
        given = edge.given[self.chosen[edge.nodes[0]]]
        wanted = edge.wanted[self.chosen[edge.nodes[1]]]
        gradient = (wanted[1][0], given[1][0]) if edge.flows else None
        return Hop((given[0][0], wanted[0][0]), gradient)

    def _leaving(self, made: set[int]) -> list[int]:
        outside = set(self.graph.outputs)
        for op in (*self.graph.ops[: self.unit.first_op], *self.graph.ops[self.unit.end_op :]):
            outside.update(t for t in op.inputs if t in made)
        return [t for t in made if t in outside]

    def _whole(self, other: int, shared: Mapping[int, Hop]) -> Hop:
        """The way to a whole value, for one that leaves this unit and not the first of its class."""
        if other in shared:
            value, gradient = shared[other].value[1], shared[other].gradient
            return Hop((value, R), None if gradient is None else (R, gradient[0]))
        raise PlanError(f"a value leaves unit {self.unit.index} and not unit {self.problem.unit.index} like it")
