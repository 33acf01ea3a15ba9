"""The functions of one stage: forward, backward, and the backward in two halves (input gradient, weight gradient).

The forward's program is differentiated once. A value that its backward reads is an argument of the stage, which is at
hand anyway unless it is state that later microbatches change, or made again by cheap arithmetic (`saved_activations`),
or *kept* from forward to backward. The halves divide the backward's equations: those that the gradients of arrivals
need, and the rest, with the values that pass between them kept once more (zero bubble, arXiv 2401.10241, section 2).
What is computed again is computed in the first half, and what the second one needs of it passes between them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.tree_util import PyTreeDef

from shardwright.backends.jax.capture.inner_programs import CHECKPOINTS, LOOPS, Aval
from shardwright.backends.jax.capture.trace import TracedCall
from shardwright.backends.jax.program.cut import Cut, StagePart
from shardwright.backends.jax.program.equations import (
    AWAY,
    Atom,
    Equation,
    FlatProgram,
    aval_of,
    evaluate,
    needed,
    value_of,
)
from shardwright.backends.jax.program.flattening import flatten
from shardwright.backends.jax.program.host_operands import evaluate_from_host
from shardwright.backends.jax.program.in_turn import evaluate_in_turn
from shardwright.backends.jax.program.random_draws import evaluate_draws_in_turn, masks_of
from shardwright.backends.jax.program.saved_activations import CHEAP, Residuals, residuals

Kind = Literal[
    "weight",  # a parameter, or rows of one
    "source",  # random keys, the step, arrays without a batch dim
    "batch",  # a leaf of the batch, all microbatches
    "m",  # the number of the microbatch
    "state",  # what the model changes from microbatch to microbatch
    "arrival",
    "kept",
    "host",  # kept too, on the host
    "between",  # from the first half of a backward to the second
    "cotangent",  # of a departure, from one of its users
    "gradient",  # of a weight, summed over microbatches
    "sum",  # Σ weight · loss, Σ weight, and what adds up of metrics
    "row",  # what is joined of metrics: of one microbatch
    "fault",  # of messages or losses, by replica: 1 + the first microbatch with a NaN, with an infinity; 0: none
    "departure",
    "arrival_gradient",
    "marker",  # what a rank has run so far, counted: there when a function is done, and read by the rank's next
]
Key = tuple[Kind, int, int]
"""The key of an operand: its kind, its number (a value of the cut program; a position), and for cotangents the stage
that sends it (else 0)."""
MARKER: Key = ("marker", 0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class StageFunction:
    """A function of flat operands."""

    function: Callable[..., tuple[jax.Array, ...]]
    reads: tuple[Key, ...]
    makes: tuple[Key, ...]
    avals: tuple[Aval, ...]
    """The shapes and dtypes of what the function reads."""
    donates: tuple[int, ...] = ()
    by_memory: bool = False
    """Whether its program is put in the order that holds least (`machine.compiler_options`): loops that are computed
    again would all run at the beginning otherwise, whatever their turn."""


@dataclass(frozen=True, slots=True, eq=False)
class StageFunctions:
    """The functions of a stage. ``input_grad`` is None where no gradient flows further back."""

    forward: StageFunction
    backward: StageFunction
    input_grad: StageFunction | None
    weight_grad: StageFunction


@dataclass(frozen=True, slots=True, eq=False)
class PassFunctions:
    """The functions of a stage whose forward and backward may be passes of their own, with nothing on the device
    between them."""

    ahead: StageFunction
    """The forward that keeps nothing for the backward."""
    keeping: StageFunction
    """The forward that does."""
    again: StageFunction
    """What the backward needs of the forward, and nothing else that it makes."""
    backward: StageFunction


@dataclass(frozen=True, slots=True)
class Operands:
    """The roles of the arguments and outputs of the microbatch's program, and the way they are handed to stages."""

    batch: Mapping[int, bool]
    """The leaves of the batch → whether each has a batch dim, and so is sliced by microbatch."""
    batch_avals: Mapping[int, jax.ShapeDtypeStruct]
    """The shapes of those leaves with all microbatches."""
    m: int
    state: Mapping[int, int]
    """The arguments that carry state → the outputs that carry it on."""
    sums: tuple[int, ...] = ()
    """The outputs that add up over microbatches, beside the loss and its weight."""
    rows: tuple[int, ...] = ()
    """The outputs that are joined over microbatches."""
    watched: bool = False
    """Whether stages note which microbatches are not finite."""
    replicas: int = 1
    split: Mapping[int, int] = field(default_factory=dict)
    """The dims of values that are split over replicas. Each replica notes its own part of those values."""
    copies: Mapping[int, tuple[int, NamedSharding]] = field(default_factory=dict)
    """The weights that the program takes a copy of for each replica: the dim and the sharding of the copies. Gradients
    of copies are summed in float32."""
    away: frozenset[int] = frozenset()
    """The units that keep on the host what they keep."""
    others: Mapping[int, str] = field(default_factory=dict)
    """The units that are computed again in another mode than the rest, and that mode."""
    in_turn: bool = False
    """Whether backwards run their equations in turn (`program.in_turn`)."""
    draws_in_turn: bool = False
    """Whether forwards make their random draws in turn, as a program of the whole step does. A stage's forward
    makes draws in the memory of results that are not there yet, and takes no less in turn."""
    sums_cotangents: bool = False
    """Whether the cotangents of a value come as their sum over the stages that use it, with 0 for the stage."""

    def key(self, value: int) -> Key:
        if value == self.m:
            return ("m", 0, 0)
        return ("batch" if value in self.batch else "state" if value in self.state else "source", value, 0)


FORWARD, BACKWARD, LOSS = 0, 1, 2
"""The number of a "fault": of the values that came in for a forward, for a backward, and of losses."""
TOTAL, WEIGHT = 0, 1
"""The positions among the program's outputs of Σ weight · loss and Σ weight over replicas. State and metrics follow."""


class FunctionsOfStage:
    """A stage, whose units keep what ``recompute`` says (`evaluate`). Its forward is traced once."""

    def __init__(self, cut: Cut, stage: int, operands: Operands, recompute: str = "none") -> None:
        self.cut, self.stage, self.operands, self.recompute = cut, stage, operands, recompute
        self.part: StagePart = cut.parts[stage]
        flat = cut.flat
        self.weights = [v for v in self.part.weights if v in cut.live]
        self.fixed_weights = [v for v in self.part.weights if v not in cut.live]
        self.arriving = [a.value for a in self.part.arrivals if a.differentiable]
        self.fixed_arrivals = [a.value for a in self.part.arrivals if not a.differentiable]
        self.leaving = [v for v in self.part.departures if v in cut.live]
        self.has_total = TOTAL in self.part.results
        self.inputs: list[int] = [
            *self.weights, *self.fixed_weights, *self.arriving, *self.fixed_arrivals, *self.part.sources,
        ]  # fmt: skip
        self.avals = {value: flat.avals[value] for value in self.inputs}
        self.away = {equation.unit for equation in self.part.equations} & set(operands.away)
        """The units of the stage that keep on the host what they keep."""

    def build(self, *, least: bool = False) -> StageFunctions:
        """The functions. ``least``: see `residuals`."""
        forward, _, returned = self._traced_forward
        handed, backwards = self._handed(least=least)
        return StageFunctions(self._forward(forward, returned, handed), *backwards)

    def passes(self) -> PassFunctions:
        """The functions of a stage whose passes have nothing on the device between them."""
        forward, _, returned = self._traced_forward
        handed, (backward, _, _) = self._handed()
        ahead = _only_needed(replace(forward, outputs=forward.outputs[: len(returned)]))
        again = _only_needed(replace(forward, outputs=tuple(handed)))
        return PassFunctions(
            self._forward(ahead, returned, {}),
            self._forward(forward, returned, handed),
            self._forward(again, (), handed),
            backward,
        )

    def _handed(
        self, *, least: bool = False
    ) -> tuple[dict[int, Key], tuple[StageFunction, StageFunction | None, StageFunction]]:
        """The values that the forward keeps for the backward, with their keys, and the backward, whole and in
        halves."""
        forward, structure, returned = self._traced_forward
        saved = forward.outputs[len(returned) :]
        given = zip(self.inputs, forward.arguments, strict=True)
        passing = [argument for value, argument in given if value in self.operands.state]
        residual = residuals(forward, [atom for atom in saved if isinstance(atom, int)], passing, least=least)
        kept = self._kept_keys(forward, residual.kept)
        backwards = self._backwards(*self._trace_backward(structure, forward, saved, residual, kept))
        read = {key for function in backwards if function is not None for key in function.reads}
        return {value: key for value, key in kept.items() if key in read}, backwards

    def _kept_keys(self, forward: FlatProgram, kept: Sequence[int]) -> dict[int, Key]:
        """The values that are handed from the forward to the backward, and their keys."""
        away = {value for equation in forward.equations if equation.call == 1 for value in equation.outputs}
        return {value: ("host" if value in away else "kept", number, 0) for number, value in enumerate(kept)}

    # --- forward

    @cached_property
    def _traced_forward(self) -> tuple[FlatProgram, PyTreeDef, list[Key]]:
        """The program of the forward: its results (`_returned`), then everything that its derivative reads."""
        structures: list[PyTreeDef] = []
        split = len(self.weights), len(self.weights) + len(self.fixed_weights)
        until = split[1] + len(self.arriving)

        def run(
            weights: Sequence[jax.Array], arriving: Sequence[jax.Array], rest: Sequence[jax.Array]
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            fixed = [*self.fixed_weights, *self.fixed_arrivals, *self.part.sources]
            known = dict(zip(self.weights, weights, strict=True)) | dict(zip(self.arriving, arriving, strict=True))
            known |= dict(zip(fixed, rest, strict=True)) | self.cut.flat.constants
            evaluate(self.part.equations, known, self.recompute, self.operands.away, self.operands.others)
            live = [known[v] for v in self.leaving]
            if self.has_total:
                live.append(self._output(known, TOTAL))
            others = [known[v] for v in self.part.departures if v not in self.cut.live]
            others += [self._output(known, position) for position in self.part.results if position != TOTAL]
            return live, others

        def forward(*given: Any) -> Any:
            weights, arriving = given[: split[0]], given[split[1] : until]
            rest = [*given[split[0] : split[1]], *given[until:]]
            live, derivative, others = jax.vjp(
                lambda w, a: run(w, a, rest), list(weights), list(arriving), has_aux=True
            )
            leaves, structure = jax.tree.flatten(derivative)
            structures.append(structure)
            return [*live, *others], leaves

        avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self.avals.values()]
        closed = jax.make_jaxpr(forward)(*avals)
        parts = [TracedCall("", 0, 0), TracedCall("away", 0, 0)] if self.operands.away else None
        return flatten(closed, parts, mark=AWAY), structures[0], self._returned()

    def _output(self, known: Mapping[int, jax.Array], position: int) -> jax.Array:
        return value_of(self.cut.flat, self.cut.flat.outputs[position], known)

    def _returned(self) -> list[Key]:
        state = {position: value for value, position in self.operands.state.items()}
        keys: list[Key] = [("departure", v, 0) for v in self.leaving]
        if self.has_total:
            keys.append(("sum", TOTAL, 0))
        keys += [("departure", v, 0) for v in self.part.departures if v not in self.cut.live]
        for position in self.part.results:
            if position == WEIGHT or position in self.operands.sums:
                keys.append(("sum", position, 0))
            elif position in self.operands.rows:
                keys.append(("row", position, 0))
            elif position != TOTAL:
                keys.append(("state", state[position], 0))
        return keys

    def _forward(self, program: FlatProgram, returned: Sequence[Key], kept: Mapping[int, Key]) -> StageFunction:
        outputs = (*program.outputs[: len(returned)], *kept)
        return self._function(
            program,
            program.equations,
            dict(zip(program.arguments, (self._key(v) for v in self.inputs), strict=True)),
            outputs,
            (*returned, *kept.values()),
            {"arrival": FORWARD, "sum": LOSS},
        )

    def _key(self, value: int) -> Key:
        if value in self.part.weights:
            return ("weight", value, 0)
        if any(a.value == value for a in self.part.arrivals):
            return ("arrival", value, 0)
        return self.operands.key(value)

    # --- backward

    def _trace_backward(
        self,
        structure: PyTreeDef,
        forward: FlatProgram,
        saved: Sequence[Atom],
        residual: Residuals,
        kept: Mapping[int, Key],
    ) -> tuple[FlatProgram, FlatProgram, dict[int, Key]]:
        """The program of the backward, the same with every `jax.checkpoint` opened, and the keys of the arguments of
        either. It goes from values at hand, kept values and cotangents to gradients of weights and arrivals."""
        named = dict(zip(forward.arguments, (self._key(v) for v in self.inputs), strict=True))
        used = {a for a in saved if isinstance(a, int)} | {v for e in residual.remade for v in e.values}
        keys: dict[int, Key] = {argument: key for argument, key in named.items() if argument in used}
        keys |= kept

        def backward(*given: Any) -> Any:
            known = {**forward.constants, **dict(zip(keys, given, strict=False))}
            evaluate(residual.remade, known)
            leaves = [value_of(forward, atom, known) for atom in saved]
            cotangents = list(given[len(keys) :])
            if self.has_total:
                total: Any = aval_of(self.cut.flat, self.cut.flat.outputs[TOTAL])
                cotangents.append(jnp.ones((), total.dtype))
            weights, arriving = jax.tree.unflatten(structure, leaves)(cotangents)
            return [*weights, *arriving]

        avals = [*(forward.avals[value] for value in keys), *(self.cut.flat.avals[v] for v in self.leaving)]
        closed = jax.make_jaxpr(backward)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
        program = flatten(closed)
        has_checkpoints = any(equation.primitive.name in CHECKPOINTS for equation in program.equations)
        opened = flatten(closed, opens_checkpoints=True) if has_checkpoints else program
        cotangents: list[Key] = [("cotangent", value, 0) for value in self.leaving]
        return program, opened, dict(zip(program.arguments, [*keys.values(), *cotangents], strict=True))

    def _backwards(
        self, whole: FlatProgram, opened: FlatProgram, reads: dict[int, Key]
    ) -> tuple[StageFunction, StageFunction | None, StageFunction]:
        """The backward, and its halves, between whose equations those of what is computed again are divided too."""
        weight_keys: list[Key] = [("gradient", v, 0) for v in self.weights]
        arrival_keys: list[Key] = [("arrival_gradient", v, 0) for v in self.arriving]
        by_memory = False
        if self.operands.in_turn:  # which keeps what is computed again behind what runs before it, as regions would
            by_memory = any(e.region is not None and e.primitive.name in LOOPS for e in opened.equations)
            opened = replace(opened, equations=[replace(e, region=None) for e in opened.equations])
            whole = opened
        function, came = partial(self._function, is_backward=True, by_memory=by_memory), {"cotangent": BACKWARD}
        backward = function(whole, whole.equations, reads, whole.outputs, [*weight_keys, *arrival_keys], came)
        if not self.arriving:
            return backward, None, backward
        weight_outputs, arrival_outputs = opened.outputs[: len(self.weights)], opened.outputs[len(self.weights) :]
        first = needed(opened.equations, (a for a in arrival_outputs if isinstance(a, int)))
        chosen = {id(e) for e in first}
        second = [e for e in opened.equations if id(e) not in chosen]
        made = {value for e in first for value in e.outputs}
        wanted = [v for e in second for v in e.values] + [a for a in weight_outputs if isinstance(a, int)]
        between = residuals(replace(opened, equations=first), [v for v in wanted if v in made])
        between_keys: list[Key] = [("between", number, 0) for number in range(len(between.kept))]
        results, keys = [*arrival_outputs, *between.kept], [*arrival_keys, *between_keys]
        input_grad = function(opened, first, reads, results, keys, came)
        reads = reads | dict(zip(between.kept, between_keys, strict=True))
        late = [*between.remade, *second]
        return backward, input_grad, function(opened, late, reads, weight_outputs, weight_keys, {})

    # --- both

    def _function(
        self,
        program: FlatProgram,
        equations: Sequence[Equation],
        reads: Mapping[int, Key],
        outputs: Sequence[Any],
        makes: Sequence[Key],
        looks: Mapping[str, int],
        *,
        is_backward: bool = False,
        by_memory: bool = False,
    ) -> StageFunction:
        """A function over flat operands. Sums and gradients are added to what is handed in; cotangents of one value
        from several stages are summed; leaves of the batch come whole and are sliced by the microbatch's number.

        looks: the kinds of operand and result whose values are looked at where stages are ``watched``, and the
        number of the "fault" of each.
        """
        equations = tuple(equations)
        used = {v for e in equations for v in e.values} | {a for a in outputs if isinstance(a, int)}
        operands = {argument: key for argument, key in reads.items() if argument in used}
        keys: dict[Key, Aval] = {}
        for argument, key in operands.items():
            for one in self._spelled(key):
                keys[one] = self._aval(one, program.avals[argument])
        for key, atom in zip(makes, outputs, strict=True):
            if key[0] in ("gradient", "sum"):
                aval = aval_of(program, atom)
                counts = jnp.issubdtype(aval.dtype, jnp.integer)
                dtype = aval.dtype if counts else jnp.promote_types(aval.dtype, jnp.float32)
                keys[key] = jax.ShapeDtypeStruct(self._without_copies(key, aval.shape), dtype)
        noted: dict[Key, list[tuple[Atom, int | None]]] = {}
        replicas, split = self.operands.replicas, self.operands.split
        if self.operands.watched:
            totals = ((a, key) for a, key in zip(outputs, makes, strict=True) if key == ("sum", TOTAL, 0))
            for atom, key in (*operands.items(), *totals):
                if key[0] in looks and jnp.issubdtype(aval_of(program, atom).dtype, jnp.inexact):
                    dim = None if key[0] == "sum" else split.get(key[1])
                    noted.setdefault(("fault", looks[key[0]], 0), []).append((atom, dim))
        keys |= dict.fromkeys(noted, jax.ShapeDtypeStruct((replicas, 2), jnp.int32))
        if noted or any(key[0] == "batch" and self.operands.batch[key[1]] for key in keys):
            keys[("m", 0, 0)] = jax.ShapeDtypeStruct((), jnp.int32)
        keys[MARKER] = jax.ShapeDtypeStruct((), jnp.int32)
        order = tuple(keys)
        in_turn = self.operands.in_turn and is_backward
        on_host = [] if in_turn else [argument for argument, key in operands.items() if key[0] == "host"]
        of_unit = -(-len(on_host) // max(1, len(self.away)))

        def run(*given: jax.Array) -> tuple[jax.Array, ...]:
            at = dict(zip(order, given, strict=True))
            values: dict[int, Any] = dict(program.constants)
            for argument, key in operands.items():
                if argument not in on_host:
                    values[argument] = self._operand(key, at)

            def finished(key: Key, value: jax.Array) -> jax.Array:
                if key[0] == "host":
                    return jax.device_put(value, jax.memory.Space.Host)  # type: ignore[no-any-return]
                if key[0] not in ("gradient", "sum"):
                    return value
                return at[key] + self._summed(key, value.astype(at[key].dtype))

            made = list(zip(makes, outputs, strict=True))
            if in_turn:
                results = [(atom, partial(finished, key)) for key, atom in made if isinstance(atom, int)]
                soon = iter(evaluate_in_turn(equations, values, CHEAP, results, masks=masks_of(program)))
                found = [
                    next(soon) if isinstance(atom, int) else finished(key, value_of(program, atom, values))
                    for key, atom in made
                ]
            else:
                if on_host:
                    waiting = {value: at[operands[value]] for value in on_host}
                    evaluate_from_host(equations, values, waiting, of_unit, CHEAP)
                elif self.operands.draws_in_turn:
                    evaluate_draws_in_turn(program, values, {atom for atom in outputs if isinstance(atom, int)})
                else:
                    evaluate(equations, values)
                found = [finished(key, value_of(program, atom, values)) for key, atom in made]
            for key, atoms in noted.items():
                looked = [_badness(value_of(program, atom, values), replicas, dim) for atom, dim in atoms]
                found.append(_first_bad(at[key], at["m", 0, 0], looked))
            return (*found, at[MARKER] + 1)

        donates = tuple(i for i, key in enumerate(order) if key[0] in ("gradient", "sum", "fault"))
        return StageFunction(run, order, (*makes, *noted, MARKER), tuple(keys.values()), donates, by_memory)

    def _spelled(self, key: Key) -> list[Key]:
        """The keys behind a key: a cotangent comes from every stage that used the value."""
        if key[0] != "cotangent" or self.operands.sums_cotangents:
            return [key]
        return [("cotangent", key[1], user) for user in self.cut.readers(self.stage, key[1])]

    def _aval(self, key: Key, aval: Aval) -> Aval:
        if key[0] == "batch":
            aval = self.operands.batch_avals[key[1]]
        return jax.ShapeDtypeStruct(self._without_copies(key, aval.shape), aval.dtype)

    def _without_copies(self, key: Key, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a weight, or of its gradient, outside of the program."""
        if key[0] not in ("weight", "gradient") or key[1] not in self.operands.copies:
            return shape
        dim, _ = self.operands.copies[key[1]]
        return (*shape[:dim], *shape[dim + 1 :])

    def _summed(self, key: Key, value: jax.Array) -> jax.Array:
        """A gradient outside of the program: the sum over replicas."""
        if key[0] != "gradient" or key[1] not in self.operands.copies:
            return value
        dim, place = self.operands.copies[key[1]]
        summed: jax.Array = jax.lax.with_sharding_constraint(value, place).sum(dim)
        return summed

    def _operand(self, key: Key, at: Mapping[Key, jax.Array]) -> Any:
        if key[0] == "cotangent":
            first, *others = (at[one] for one in self._spelled(key))
            return sum(others, first)
        if key[0] == "batch" and self.operands.batch[key[1]]:
            return jax.lax.dynamic_index_in_dim(at[key], at[("m", 0, 0)], keepdims=False)
        if key[0] == "host":
            return jax.device_put(at[key], jax.memory.Space.Device)
        if key[0] == "weight" and key[1] in self.operands.copies:
            dim, place = self.operands.copies[key[1]]
            shape = self.cut.flat.avals[key[1]].shape
            wide = jnp.broadcast_to(jnp.expand_dims(at[key], dim), shape)
            return jax.lax.with_sharding_constraint(wide, place)
        return at[key]


def _only_needed(program: FlatProgram) -> FlatProgram:
    """The program without equations that its outputs do not need."""
    return replace(program, equations=needed(program.equations, (a for a in program.outputs if isinstance(a, int))))


def _badness(array: jax.Array, replicas: int, dim: int | None) -> jax.Array:
    """A number for every replica: 2 where its part of an array has a NaN, else 1 where it has an infinity, else 0. No
    replica waits for another where the array is split over them. One pass."""
    found = jnp.where(jnp.isnan(array), 2, jnp.where(jnp.isinf(array), 1, 0))
    if dim is None:
        return jnp.broadcast_to(jnp.max(found, initial=0), (replicas,))
    shape = (*array.shape[:dim], replicas, array.shape[dim] // replicas, *array.shape[dim + 1 :])
    others = tuple(number for number in range(len(shape)) if number != dim)
    return jnp.max(found.reshape(shape), axis=others, initial=0)


def _first_bad(before: jax.Array, m: jax.Array, badness: Sequence[jax.Array]) -> jax.Array:
    """The "fault" after one more microbatch."""
    worst = reduce(jnp.maximum, badness)[:, None]
    return jnp.where((before == 0) & (worst == jnp.array([2, 1])), m + 1, before)
