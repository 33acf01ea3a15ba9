"""The units of a model in a row: one network for each class of identical units, boundaries chosen along the chain."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le
from numpy.typing import NDArray

from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.errors import PlanError
from shardwright.core.layout.placements import Layout, Placement, Split
from shardwright.core.layout.unit_layouts import RealisedUnit
from shardwright.core.model.fold import Folded
from shardwright.core.rules.dim_groups import Dim, DimGroup
from shardwright.core.solver.memory_limited import Part, Row
from shardwright.core.solver.network import Choices
from shardwright.core.solver.op_prices import Setting
from shardwright.core.solver.shared_problem import Frame
from shardwright.core.solver.unit_problem import Move, R, UnitProblem
from shardwright.core.values.found_once import found_once

Pins = Mapping[int, tuple[Placement | None, ...]]
"""The placements of a parameter's tensor on every axis, None where the placement is free."""

GAP = 0.005
"""The gap above which the answer of a price on bytes is not good enough."""
LIGHTEST = 1e3
"""A price in seconds for a byte at which only bytes count."""
ROUNDING = 1e-12
"""The relative rounding error of sums of bytes and seconds."""


@dataclass(frozen=True, slots=True)
class UnitSolution:
    """The layouts of one unit."""

    unit: int
    chosen: tuple[int, ...]
    parameters: tuple[tuple[int, Layout], ...]
    """The (tensor, layout) of every parameter that the unit uses."""
    enters: Layout
    leaves: Layout
    moves: tuple[Move, ...]
    like: RealisedUnit
    """All layouts of the first unit that is solved like this one."""


@dataclass(frozen=True, slots=True)
class Solution:
    """Layouts for the whole model."""

    units: tuple[UnitSolution, ...]
    time_s: float
    """The compute and conversions of one microbatch, forward and backward, on one rank."""
    weight_bytes: float
    """The parameters' state and the kept activations of one microbatch on one rank."""
    gap: float
    """The gap (time - bound) / time, the price of bytes in both: layouts within the limit take at least the bound."""

    def objective(self, price_s_per_byte: float) -> float:
        return self.time_s + price_s_per_byte * self.weight_bytes

    def layouts(self) -> dict[int, Layout]:
        return {tensor: layout for unit in self.units for tensor, layout in unit.parameters}


def solve(
    folded: Folded,
    setting: Setting,
    *,
    memory_limit_bytes: float = float("inf"),
    price_s_per_byte: float = 0.0,
    pins: Pins | None = None,
    counter: WorkCounter | None = None,
) -> Solution:
    """The layouts of least time, with ``price_s_per_byte`` for every byte of weight, whose weight is within the limit.

    They are exact without a binding limit. With one, a price on bytes is bisected (Everett 1963). Where that leaves a
    `gap` above `GAP`, HiGHS is used, if the model is small enough for it (`memory_limited`). The gap holds for either
    answer. Parameters that units share have one placement. Raises PlanError when nothing fits or when pins contradict
    each other.
    """
    chain, own, limit = _Chain(Frame(folded, counter), setting), price_s_per_byte, memory_limit_bytes
    pinned, most = dict(pins or {}), limit * (1 + ROUNDING)
    free, bound = _best_agreeing(chain, pinned, own)
    if free.weight_bytes <= most:
        return replace(free, gap=_gap(free, own, bound))
    low, high = 0.0, free.time_s / max(limit, 1.0) * 1e4
    best, _ = _best_agreeing(chain, pinned, own + high)
    if best.weight_bytes > most:
        low, high = high, LIGHTEST
        best, _ = _best_agreeing(chain, pinned, high)
    if best.weight_bytes > most:
        raise PlanError(
            f"the lightest layouts need {best.weight_bytes / 1e9:.2f} GB of {limit / 1e9:.2f} GB: use "
            "more ranks, more stages, or shard parameters"
        )
    for _ in range(16):
        price = (low * high) ** 0.5 if low else high / 30
        tried, least = _best_agreeing(chain, pinned, own + price)
        bound = max(bound, least * (1 - ROUNDING) - price * limit)
        if tried.weight_bytes <= most:
            high = price
            best = min(best, tried, key=lambda found: found.objective(own))
        else:
            low = price
        if low and high / low < 1.05:
            break
    if _gap(best, own, bound) > GAP:
        chosen, proven = chain.row(pinned).least_within(limit, own, best.objective(own))
        bound = max(bound, proven)
        if chosen is not None and (found := chain.chosen(pinned, chosen)).weight_bytes <= most:
            best = min(best, found, key=lambda found: found.objective(own))
    return replace(best, gap=_gap(best, own, bound))


def _gap(found: Solution, price: float, bound: float) -> float:
    value = found.objective(price)
    return max(0.0, (value - bound) / value) if value else 0.0


def solve_at(frame: Frame, setting: Setting, price_s_per_byte: float, pins: Pins | None = None) -> Solution:
    """The answer of `solve` without a limit, on a graph that was read before."""
    return _best_agreeing(_Chain(frame, setting), dict(pins or {}), price_s_per_byte)[0]


def lightest_bytes(folded: Folded, setting: Setting, counter: WorkCounter | None = None) -> float:
    """The least weight of parameters' state and kept activations on one rank; no smaller limit can be met."""
    return _best_agreeing(_Chain(Frame(folded, counter), setting), {}, LIGHTEST)[0].weight_bytes


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another layout of one parameter, with the best answer of its unit under that layout."""

    layout: Layout
    extra_s: Annotated[float, Ge(-1e12), Le(1e12)]
    """The extra compute and conversions, in seconds, of one microbatch of one unit, forward and backward."""
    extra_bytes: Annotated[float, Ge(-1e30), Le(1e30)]
    """The extra bytes against the chosen layout: parameters' state and kept activations on one rank."""


def alternatives(
    frame: Frame, setting: Setting, price_s_per_byte: float, solution: Solution, unit: int, pins: Pins | None = None
) -> dict[int, tuple[Alternative, ...]]:
    """The other layouts that each parameter (its tensor) of a unit can have, best first. The unit's other parameters
    follow, and the values that enter and leave it stay. Each states the cost of pinning that layout. ``pins`` are the
    user's alone."""
    return _Chain(frame, setting).alternatives(solution, unit, dict(pins or {}), price_s_per_byte)


def _best_agreeing(
    chain: "_Chain", pins: dict[int, tuple[Placement | None, ...]], price: float
) -> tuple[Solution, float]:
    """The best answer in which every shared parameter has one placement, and a bound of its objective. Parameters on
    which units differ are tried in turn. The bound is the objective itself unless several parameters had to be tried.
    """
    found = chain.solve(pins, price)
    bound: float | None = None
    while (tensor := chain.contested(found)) is not None:
        tried = []
        for places in chain.choices(tensor):
            with suppress(PlanError):  # a placement that one of its units cannot use
                tried.append((chain.solve({**pins, tensor: places}, price), places))
        if not tried:
            raise PlanError(f"no layout of {chain.folded.graph.tensors[tensor].name} suits all units that share it")
        found, places = min(tried, key=lambda item: item[0].objective(price))
        pins = {**pins, tensor: places}
        bound = found.objective(price) if bound is None else bound
    return found, found.objective(price) if bound is None else bound


@dataclass(frozen=True)
class _Step:
    """One unit on the way along the chain."""

    table: NDArray[np.float64]
    """The least cost by (layout that enters, layout that leaves); a dim has size 1 where there is no choice."""
    choices: Choices
    problem: UnitProblem
    enters: int | None
    leaves: int | None


class _Chain:
    """All units of a graph on given axes; problems are built once for each class and set of pins."""

    def __init__(self, frame: Frame, setting: Setting) -> None:
        self.frame, self.folded, self.setting = frame, frame.folded, setting
        self._problems: dict[object, UnitProblem] = {}
        self._tables: dict[object, tuple[NDArray[np.float64], Choices]] = {}

    def contested(self, found: Solution) -> int | None:
        """A shared parameter that units place differently, or None."""
        lies: dict[int, set[Layout]] = {}
        for unit in found.units:
            for tensor, layout in unit.parameters:
                lies.setdefault(tensor, set()).add(layout)
        return next((tensor for tensor in self.frame.shared if len(lies[tensor]) > 1), None)

    def choices(self, tensor: int) -> list[tuple[Placement | None, ...]]:
        """Every placement that some unit allows a shared parameter."""
        found: dict[tuple[Placement | None, ...], None] = {}
        for unit in self.folded.units:
            problem = self._problem(unit.index, {})
            node = problem.choice_of_tensor.get(tensor)
            if node is not None and tensor in problem.parameters:
                found.update(dict.fromkeys(value for value, _ in problem.options[node]))
        return list(found)

    def _problem(self, index: int, pins: Pins) -> UnitProblem:
        graph, unit = self.folded.graph, self.folded.units[index]
        tensors = [graph.parameters[p].tensor for p in unit.parameters]
        # Units of one class with equal pins share a problem: all list their parameters in order of first use.
        borders = [self.frame.main[index - 1] if index else None, self.frame.main[index]]
        places = self.frame.places(index)
        leaving = tuple(sorted(places[t] for t in self.frame.leaving[index]))
        alike = unit.fold_class, leaving, tuple(None if border is None else places.get(border) for border in borders)
        key = (alike, tuple(pins.get(t) for t in tensors))
        if key not in self._problems:
            own = {tensor: pins[tensor] for tensor in tensors if tensor in pins}
            groups, dims = self.frame.groups(index), None
            if not self.setting.free_activations:
                crossing = {t for t in borders if t is not None}
                inner = [g.dims for g in groups if not any(t in crossing for t, _ in g.dims)]
                asked = [(t, p.dim) for t, places in own.items() for p in places if isinstance(p, Split)]
                dims = frozenset[Dim]().union(*inner, *(self.frame.split_with(index, dim) for dim in asked))
            problem = UnitProblem(self.frame, index, self.setting, own, dims)
            self._problems[key] = problem if self._is_solvable(problem, index) else self._narrower(problem, index)
        return self._problems[key]

    def _is_solvable(self, problem: UnitProblem, index: int) -> bool:
        enters, leaves = self._border_nodes(problem, index)
        return problem.network.is_solvable([node for node in (enters, leaves) if node is not None])

    def _narrower(self, entangled: UnitProblem, index: int) -> UnitProblem:
        """The problem of a unit whose ops are too entangled for all of its choices at once (a recurrence written out).
        It has as many groups of dims as can be solved exactly, those that hold the most parameters first. The others
        stay whole."""
        graph = self.folded.graph
        entries = {graph.parameters[p].tensor: graph.tensors[graph.parameters[p].tensor].elements(1)
                   for p in entangled.unit.parameters}  # fmt: skip

        def held(group: DimGroup) -> int:
            return sum(entries.get(tensor, 0) for tensor in {t for t, _ in group.dims})

        asked = frozenset(
            (t, place.dim) for t, places in entangled.pins.items() for place in places if isinstance(place, Split)
        )
        dims = frozenset[Dim]().union(asked, *(self.frame.split_with(index, dim) for dim in asked))
        if self.setting.free_activations:  # the units beside this one know the same states of their border
            borders = (*entangled.entering, *entangled.leaving)
            dims |= {(t, d) for t in borders for d in range(len(graph.tensors[t].fixed))}
        found = UnitProblem(self.frame, index, self.setting, entangled.pins, dims)
        for group in sorted(self.frame.groups(index), key=held, reverse=True):
            more = dims | (group.dims if entangled.dims is None else group.dims & entangled.dims)
            if more == dims:
                continue
            tried = UnitProblem(self.frame, index, self.setting, entangled.pins, more)
            if self._is_solvable(tried, index):
                found, dims = tried, more
        return found

    def _border_nodes(self, problem: UnitProblem, index: int) -> tuple[int | None, int | None]:
        """The nodes of the values that enter a unit from the previous one, and leave it for the next."""
        before = self.frame.main[index - 1] if index else None
        return (
            self._node(problem, problem.entering, before, index),
            self._node(problem, problem.leaving, self.frame.main[index], index),
        )

    def _table(self, index: int, pins: Pins, price: float) -> _Step:
        """The least cost by (layout that enters, layout that leaves); a dim has size 1 where there is no choice."""
        problem = self._problem(index, pins)
        enters, leaves = self._border_nodes(problem, index)
        kept = [node for node in (enters, leaves) if node is not None]
        key = (id(problem), price, enters, leaves)
        if key not in self._tables:
            self._tables[key] = problem.network.tables(kept, price, self._crossing_whole(problem, kept))
        table, choices = self._tables[key]
        shape = (
            1 if enters is None else len(problem.options[enters]),
            1 if leaves is None else len(problem.options[leaves]),
        )
        return _Step(table.reshape(shape), choices, problem, enters, leaves)

    def _crossing_whole(self, problem: UnitProblem, chosen: Sequence[int | None]) -> dict[int, int]:
        """The nodes of values that cross a border without a chosen layout, each with its whole option."""
        return {
            node: next(i for i, (value, _) in enumerate(problem.options[node]) if all(p == R for p in value))
            for node in (*problem.entering.values(), *problem.leaving.values())
            if node not in chosen
        }

    def _node(self, problem: UnitProblem, nodes: Mapping[int, int], tensor: int | None, index: int) -> int | None:
        """The node of a border's tensor. A problem stands for a class of units, so tensors are matched by place."""
        if tensor is None:
            return None
        mine, own = self.folded.units[index], problem.unit
        if mine.index == own.index:
            return nodes.get(tensor)
        place, theirs = self.frame.places(mine.index)[tensor], self.frame.places(own.index)
        for other, node in nodes.items():
            if theirs.get(other) == place:
                return node
        return None

    def solve(self, pins: Pins, price: float) -> Solution:
        """The least time + price · weight along the chain, by dynamic programming over the layouts at the borders."""
        steps = [self._table(unit.index, pins, price) for unit in self.folded.units]
        value = np.zeros(1)
        came: list[NDArray[np.intp]] = []
        for step in steps:
            through = value[:, None] + step.table
            came.append(through.argmin(axis=0))
            value = through.min(axis=0)
        borders = [int(value.argmin())]
        for best in reversed(came):
            borders.append(int(best[borders[-1]]))
        borders.reverse()
        chosen = []
        for i, step in enumerate(steps):
            kept = [] if step.enters is None else [borders[i]]
            chosen.append(step.choices(kept if step.leaves is None else [*kept, borders[i + 1]]))
        return self.chosen(pins, chosen)

    def chosen(self, pins: Pins, chosen: Sequence[tuple[int, ...]]) -> Solution:
        """The layouts that one option for every node of every unit stands for."""
        units, total, weight = [], 0.0, 0.0
        for i, options in enumerate(chosen):
            problem = self._problem(i, pins)
            cost, weighs = problem.network.total(options)
            total, weight = total + cost, weight + weighs
            units.append(self._solution(i, problem, options))
        return Solution(tuple(units), total, weight, 0.0)

    def row(self, pins: Pins) -> Row:
        """All units as one network."""
        parts = []
        for unit in self.folded.units:
            problem = self._problem(unit.index, pins)
            renamed = self._renamed(problem, unit.index)
            parameters = {
                renamed[t]: (node, [value for value, _ in problem.options[node]])
                for t, node in problem.choice_of_tensor.items()
                if t in problem.parameters
            }
            ends = self._border_nodes(problem, unit.index)
            parts.append(Part(problem.network, *ends, self._crossing_whole(problem, ends), parameters))
        return Row.of(parts)

    def _renamed(self, problem: UnitProblem, index: int) -> dict[int, int]:
        """The parameters of a problem's own unit → those of a unit like it."""
        parameters, mine = self.folded.graph.parameters, self.folded.units[index].parameters
        return {parameters[a].tensor: parameters[b].tensor for a, b in zip(problem.unit.parameters, mine, strict=True)}

    def alternatives(
        self, solution: Solution, unit: int, pins: Pins, price: float
    ) -> dict[int, tuple[Alternative, ...]]:
        answer, problem = solution.units[unit], self._problem(unit, pins)
        found: dict[int, tuple[Alternative, ...]] = {}
        for tensor, layout in answer.parameters:
            choices = self._choices_of(problem, tensor, answer, price)
            for place in problem.every_split(tensor):  # along dims that leave the unit, where only a pin may split
                if not any(place in other.values() for other in (dict(lies.placements) for lies in choices)):
                    with suppress(PlanError):
                        pinned = self._problem(unit, {**pins, tensor: (place,) * len(self.setting.axes)})
                        choices |= self._choices_of(pinned, tensor, answer, price)
            if layout not in choices:
                continue
            time_s, weight = choices.pop(layout)
            ranked = sorted(choices.items(), key=lambda item: item[1][0] + price * item[1][1])
            found[tensor] = tuple(Alternative(lies, s - time_s, w - weight) for lies, (s, w) in ranked)
        return found

    def _choices_of(
        self, problem: UnitProblem, tensor: int, answer: UnitSolution, price: float
    ) -> dict[Layout, tuple[float, float]]:
        """The least (time, weight) of a unit for each layout of one parameter, between the same borders."""
        borders: dict[int, int] = {}
        for nodes, layout in ((problem.entering, answer.enters), (problem.leaving, answer.leaves)):
            for node in nodes.values():
                states = [problem.layout(value) for value, _ in problem.options[node]]
                borders[node] = states.index(layout if layout in states else Layout())
        node = problem.choice_of_tensor[tensor]
        table, choices = problem.network.tables([node], price, borders)
        return {
            problem.layout(places): problem.network.total(choices([i]))
            for i, (places, _) in enumerate(problem.options[node])
            if np.isfinite(table[i])
        }

    def _solution(self, index: int, problem: UnitProblem, chosen: tuple[int, ...]) -> UnitSolution:
        renamed = self._renamed(problem, index)
        layouts = tuple((renamed[t], layout) for t, layout in problem.parameter_layouts(chosen).items())
        enters, leaves = (
            Layout() if node is None else problem.layout(problem.options[node][chosen[node]][0])
            for node in self._border_nodes(problem, index)
        )
        like, moves = self._realised(problem, chosen)
        return UnitSolution(index, chosen, layouts, enters, leaves, moves, like)

    @found_once
    def _realised(self, problem: UnitProblem, chosen: tuple[int, ...]) -> tuple[RealisedUnit, tuple[Move, ...]]:
        """The layouts of a problem's own unit, and the conversions that they need."""

        def lies(nodes: Mapping[int, int]) -> tuple[tuple[int, Layout], ...]:
            return tuple((t, problem.layout(problem.options[n][chosen[n]][0])) for t, n in nodes.items())

        outside = {t: n for t, n in problem.choice_of_tensor.items() if t not in problem.parameters}
        made = {t for op in problem.ops for t in op.outputs}
        links = problem.links(chosen)
        realised = RealisedUnit(
            problem.unit.index,
            problem.unit.first_op,
            tuple((axis.name, axis.size) for axis in self.setting.axes),
            tuple(problem.signatures[i][chosen[problem.choice_of_op[i]]] for i in range(len(problem.ops))),
            links,
            tuple(problem.parameter_layouts(chosen).items()),
            lies({t: n for t, n in outside.items() if t not in made}),
            lies(problem.leaving),
        )
        return realised, problem.moves(links)
