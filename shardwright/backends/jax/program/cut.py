"""The cut of one microbatch's program into stages by the plan's units.

Equations inside a unit's module calls belong to its stage. Of the others, those that depend on no activation and cost
little (masks, positions, random keys, casts of weights) are made again on every stage that needs them; those that
depend on the state or cost more go to the first stage that needs them, or where the state is (`state_places`); the
rest goes where the fewest bytes cross, never before what it reads. Values go straight from the stage that makes them
to each that uses them, however far.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from shardwright.backends.jax.program.equations import Equation, FlatProgram, needed
from shardwright.backends.jax.program.stacked_layers import take_rows
from shardwright.backends.jax.program.state_places import Carried, follow
from shardwright.backends.jax.state.ownership import Holding
from shardwright.core.errors import PlanError
from shardwright.core.partition.between_units import ProgramOp, open_stages

HEAVY = frozenset({"scan", "while", "cond", "conv_general_dilated", "sort", "cumsum", "cumprod", "ragged_dot", "top_k"})
"""The primitives that are not run twice to save a transfer; products are weighed by their size."""
LIGHT_PRODUCT = 1 << 20
"""The most multiplications of a product that may be made again on every stage that needs it."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A value that a stage takes from an earlier one."""

    value: int
    source: int
    differentiable: bool


@dataclass(frozen=True, slots=True)
class StagePart:
    """The equations that one stage runs for one microbatch, and the values that it takes and gives."""

    equations: tuple[Equation, ...]
    weights: tuple[int, ...]
    """The parameters that the stage reads, as values of the program; a slice of a stack is a value of its own."""
    sources: tuple[int, ...]
    """The other arguments that the stage reads: part of the batch, random keys, the step, the other state."""
    arrivals: tuple[Arrival, ...]
    departures: tuple[int, ...]
    """The values that later stages take from the stage."""
    results: tuple[int, ...]
    """The positions of the program's outputs that the stage makes."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter, or rows of a stack, as a value of the program, and the stages that read it."""

    value: int
    holding: Holding
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """A program in stages."""

    flat: FlatProgram
    parts: tuple[StagePart, ...]
    weights: tuple[Weight, ...]
    """The weights: one for every holding, in their order."""
    live: frozenset[int]
    """The values that gradients flow through."""

    def maker(self, position: int) -> int:
        """The stage that makes an output of the program."""
        return next(stage for stage, part in enumerate(self.parts) if position in part.results)

    def readers(self, stage: int, value: int | None = None) -> list[int]:
        """The stages that take a value from a stage; None: any."""
        return [
            reader
            for reader, part in enumerate(self.parts)
            if any(a.source == stage and value in (None, a.value) for a in part.arrivals)
        ]


def cut(
    flat: FlatProgram,
    stages: int,
    weights: Sequence[int],
    names: Sequence[str],
    planned: Mapping[str, tuple[int, ...]],
    holdings: Sequence[Holding],
    state: Mapping[int, Carried],
    trained: Sequence[bool],
) -> Cut:
    """Cut a flat program.

    weights: the arguments that are parameters, and their ``names``.
    planned: the stages where the plan uses each parameter; ``holdings`` where it is kept.
    state: the arguments that carry what the model changes; trained: whether each of ``weights`` gets a gradient.

    Raises PlanError when a stage is left without work, for side effects in a fixed order on several stages, and for
    state that cannot be read and written on one stage.
    """
    weight_stages = {value: planned.get(name, ()) for value, name in zip(weights, names, strict=True)}
    placer = Placer(flat, stages, weight_stages, state)
    placed = placer.run()
    _refuse_ordered_effects(flat.equations, placed)
    where = dict(zip((id(e) for e in flat.equations), placed, strict=True))
    home = placer.results(where)
    own: list[list[int]] = [[] for _ in range(stages)]
    light = {}  # the positions of equations that every stage makes for itself
    for position, (equation, stage) in enumerate(zip(flat.equations, placed, strict=True)):
        if stage is None:
            light[id(equation)] = position
        else:
            own[stage].append(position)
    every_stage_makes = [flat.equations[position] for position in light.values()]
    per_stage = []
    for stage in range(stages):
        wanted = [value for position in own[stage] for value in flat.equations[position].values]
        wanted += [a for a, at in zip(flat.outputs, home, strict=True) if at == stage and isinstance(a, int)]
        made_here = [light[id(e)] for e in needed(every_stage_makes, wanted)]
        per_stage.append([flat.equations[position] for position in sorted(own[stage] + made_here)])
    held, per_stage = _hold(flat, per_stage, weights, names, holdings)
    producer = {value: where[id(e)] for e in flat.equations for value in e.outputs}
    live = _live(flat, per_stage, {w.value for w in held if trained[w.holding.leaf]})
    return Cut(flat, _parts(flat, per_stage, producer, home, held, live, state), tuple(held), live)


class Placer:
    """A placer that decides the stage of every equation: a number, or None where each stage makes its own."""

    def __init__(
        self,
        flat: FlatProgram,
        stages: int,
        weight_stages: Mapping[int, tuple[int, ...]],
        state: Mapping[int, Carried],
        own: Callable[[Equation], int | None] = lambda equation: equation.stage,
    ) -> None:
        """own: the stage of an equation that is known before."""
        self.flat, self.stages, self.weight_stages, self.state = flat, stages, weight_stages, state
        self.own = own
        self.anywhere: set[int] = set(flat.constants) | set(flat.arguments) - set(state) - set(weight_stages)
        """The values without activations or weights in them, which any stage can make."""
        self.following: set[int] = set(state)
        """The values made of the batch and the state alone, once. They are made where they are used or where the state
        is.
        """
        self.homes: dict[int, int] = {}
        """The stages of the state's entries."""
        self.of_weights: dict[int, frozenset[int]] = {w: frozenset(s) for w, s in weight_stages.items()}
        """The values made of weights alone → the stages of those weights."""

    def once(self) -> tuple[list[int | None], list[int]]:
        """The stage of every equation, and the positions of those without one that follow the state."""
        equations = self.flat.equations
        fixed = [self._fixed(equation) for equation in equations]
        tail = self._only_for_state()
        free = {v for e, at in zip(equations, fixed, strict=True) if at == "anywhere" for v in e.outputs}
        ops = [
            ProgramOp(
                tuple(equation.values),
                equation.outputs,
                at if isinstance(at, int) else None,
                at if isinstance(at, frozenset) else frozenset(),
            )
            for equation, at in zip(equations, fixed, strict=True)
        ]
        wished = open_stages(ops, self.stages, lambda value: 0 if value in free else self.flat.size_bytes(value))
        placed: list[int | None] = []
        stage_of: dict[int, int] = {}
        following: list[int] = []
        for index, equation in enumerate(equations):
            if fixed[index] == "anywhere":
                placed.append(None)
                continue
            if fixed[index] == frozenset() and self.following | self.anywhere >= set(equation.values):
                self.following.update(equation.outputs)
                following.append(index)
                placed.append(None)
                continue
            least = max((stage_of.get(value, 0) for value in equation.values), default=0)
            stage = least if index in tail and self.own(equation) is None else max(least, wished[index])
            placed.append(stage)
            stage_of.update((value, stage) for value in equation.outputs)
        return placed, following

    def run(self) -> list[int | None]:
        """The stage of every equation. Raises PlanError for a stage without work, and for state on several."""
        placed, following = self.once()
        once = {index: stage for index, stage in enumerate(placed) if stage is not None}
        self.homes = follow(self.flat, once, following, self.state, self.stages)
        placed = [once.get(index) for index in range(len(placed))]
        for stage in range(self.stages):
            if stage not in placed and any(own == (stage,) for own in map(tuple, self.weight_stages.values())):
                raise PlanError(
                    f"nothing of the loss function runs on stage {stage}: it does not call the modules that the plan "
                    "puts there; give the function that was captured, or capture this one and plan again"
                )
            if stage not in placed:
                raise PlanError(
                    f"nothing of the loss function runs on stage {stage}: the plan puts no parameters of its own "
                    "there, and what reads none runs where the fewest bytes cross; plan with fewer stages, or with "
                    "stage_starts= that give every stage parameters"
                )
        return placed

    def _fixed(self, equation: Equation) -> int | str | frozenset[int]:
        """The stage of an equation, "anywhere", or, where it is open, the stages of the weights that it reads."""
        inputs = list(equation.values)
        own = self.own(equation)
        if own is not None:
            return own
        light = not equation.effects and _is_light(equation, self.flat)
        if light and all(value in self.anywhere for value in inputs):
            self.anywhere.update(equation.outputs)
            return "anywhere"
        if light and inputs and all(value in self.of_weights or value in self.anywhere for value in inputs):
            grown = max(self.flat.size_bytes(v) for v in equation.outputs) > 4 * max(map(self.flat.size_bytes, inputs))
            if all(value in self.of_weights for value in inputs) and not grown:
                stages = frozenset[int]().union(*(self.of_weights[value] for value in inputs))
                self.of_weights.update((value, stages) for value in equation.outputs)
                return "anywhere"
        return frozenset[int]().union(*(self.of_weights.get(value, frozenset()) for value in inputs))

    def _only_for_state(self) -> set[int]:
        """The equations that nothing but the model's next state needs: they stay on the stage of their operands."""
        state_outputs = {carried.output for carried in self.state.values()}
        results = [a for i, a in enumerate(self.flat.outputs) if i not in state_outputs and isinstance(a, int)]
        used = {id(e) for e in needed(self.flat.equations, results)}
        return {index for index, e in enumerate(self.flat.equations) if id(e) not in used}

    def results(self, where: Mapping[int, int | None]) -> list[int]:
        """The stage of every output. State is where it is kept. Outputs that need no stage's work go to the last."""
        made = {value: where[id(e)] for e in self.flat.equations for value in e.outputs}
        found = [made.get(atom) if isinstance(atom, int) else None for atom in self.flat.outputs]
        for value, carried in self.state.items():
            found[carried.output] = self.homes[value]
        return [self.stages - 1 if stage is None else stage for stage in found]


def _is_light(equation: Equation, flat: FlatProgram) -> bool:
    name = equation.primitive.name
    if name != "dot_general":
        return name not in HEAVY
    (contracted, _), _ = equation.params["dimension_numbers"]
    first = equation.inputs[0]
    depth = math.prod(flat.avals[first].shape[d] for d in contracted) if isinstance(first, int) else 1
    return bool(depth * math.prod(flat.avals[equation.outputs[0]].shape) <= LIGHT_PRODUCT)


def _refuse_ordered_effects(equations: Sequence[Equation], placed: Sequence[int | None]) -> None:
    """Raise PlanError for ordered side effects on several stages: devices that do not wait for each other cannot keep
    the order."""
    stages = {stage for equation, stage in zip(equations, placed, strict=True) if equation.is_ordered}
    if len(stages) > 1:
        raise PlanError(
            f"the loss function has side effects in a fixed order (io_callback with ordered=True) on stages "
            f"{sorted(s for s in stages if s is not None)}: stages do not run in one order; use ordered=False, or keep "
            "them inside one block"
        )


def _hold(
    flat: FlatProgram,
    per_stage: list[list[Equation]],
    weights: Sequence[int],
    names: Sequence[str],
    holdings: Sequence[Holding],
) -> tuple[list[Weight], list[list[Equation]]]:
    """The value and the readers of every holding, and the equations of every stage. Stages that hold rows of a stack
    read those instead of the whole."""
    held: list[Weight] = []
    users_of: dict[int, dict[int, None]] = {value: {} for value in weights}
    for stage, run in enumerate(per_stage):
        for value in (v for e in run for v in e.values if v in users_of):
            users_of[value][stage] = None
    for holding in holdings:
        value, name = weights[holding.leaf], names[holding.leaf]
        users = list(users_of[value])
        if holding.rows is not None:
            piece, per_stage[holding.stage] = take_rows(
                flat, per_stage[holding.stage], value, holding.rows, name, holding.stage
            )
            held.append(Weight(piece, holding, (holding.stage,)))
            continue
        if not users:
            raise PlanError(
                f"no stage uses parameter {name}, which the plan puts on stage {holding.stage}: the loss function "
                "does not depend on it; leave it out of the parameters, or give the function that was captured"
            )
        held.append(Weight(value, holding, tuple(users)))
    return held, per_stage


def _live(flat: FlatProgram, per_stage: Iterable[Sequence[Equation]], weights: set[int]) -> frozenset[int]:
    """The floating values that depend on a weight."""
    live = {value for value in weights if jnp.issubdtype(flat.avals[value].dtype, jnp.inexact)}
    for run in per_stage:  # stages are in the order in which values flow
        for equation in run:
            if equation.primitive.name != "stop_gradient" and not live.isdisjoint(equation.values):
                live.update(v for v in equation.outputs if jnp.issubdtype(flat.avals[v].dtype, jnp.inexact))
    return frozenset(live)


def _parts(
    flat: FlatProgram,
    per_stage: Sequence[Sequence[Equation]],
    producer: Mapping[int, int | None],
    home: Sequence[int],
    weights: Sequence[Weight],
    live: frozenset[int],
    state: Mapping[int, Carried],
) -> tuple[StagePart, ...]:
    arguments = set(flat.arguments) - {weight.value for weight in weights}
    reads: list[dict[int, None]] = []
    for stage, run in enumerate(per_stage):
        made = {value for e in run for value in e.outputs}
        found = dict.fromkeys(value for e in run for value in e.values if value not in made)
        for position, atom in enumerate(flat.outputs):
            if home[position] == stage and isinstance(atom, int) and atom not in made:
                found[atom] = None
        reads.append(found)
    arrivals = [
        tuple(
            Arrival(value, source, value in live)
            for value in found
            if (source := producer.get(value)) is not None and source != stage
        )
        for stage, found in enumerate(reads)
    ]
    parts = []
    for stage, run in enumerate(per_stage):
        leaving = dict.fromkeys(a.value for other in arrivals for a in other if a.source == stage)
        own_state = [value for value, carried in state.items() if home[carried.output] == stage]
        sources = [v for v in reads[stage] if v in arguments]
        parts.append(
            StagePart(
                tuple(run),
                tuple(w.value for w in weights if w.value in reads[stage]),
                tuple(dict.fromkeys([*sources, *own_state])),
                arrivals[stage],
                tuple(leaving),
                tuple(position for position, at in enumerate(home) if at == stage),
            )
        )
    return tuple(parts)
