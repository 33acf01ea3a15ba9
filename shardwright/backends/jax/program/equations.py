"""A traced program as one flat list of equations, which can be cut into parts that run by themselves.

Unlike `capture.steps`, which reads a model for planning, this keeps everything that running needs: inner programs are
opened only where they must be (a jit, or a loop or a `jax.checkpoint` that holds more than one stage), derivatives
rules stay whole, and every equation can be bound again.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

from shardwright.backends.jax.capture.checkpoint_policies import POLICIES
from shardwright.backends.jax.capture.steps import ITERATION, UNROLL_LIMIT, calls_of_iteration, layer_loop, marks
from shardwright.backends.jax.capture.trace import TracedCall, call_number
from shardwright.core.errors import PlanError

OPENED = frozenset({"jit", "pjit", "closed_call", "core_call"})
CHECKPOINTS = frozenset({"remat2", "checkpoint", "remat"})
OWN_DERIVATIVES = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})

Atom = int | jex_core.Literal
"""A value of the program by its number, or a literal."""


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A `jax.checkpoint` that was opened: what it keeps, whichever part of it runs where."""

    policy: Any
    prevent_cse: bool


@dataclass(frozen=True, slots=True, eq=False)
class Equation:
    """One application of a primitive. ``stage`` is the one that the module call around it belongs to, None when it
    belongs to none."""

    primitive: Any
    params: Mapping[str, Any]
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    context: Any
    stage: int | None = None
    unit: int | None = None
    region: Region | None = None
    effects: frozenset[Any] = frozenset()
    is_layers: bool = False
    """A loop over stacked weights: every iteration is a unit, or several, that may be recomputed by itself."""
    call: int = 0
    """The module call that it was traced in."""
    source: Any = None
    """Where in the user's code it was made, as JAX keeps it."""

    @property
    def values(self) -> Iterator[int]:
        """The numbers of its inputs, literals left out."""
        return (atom for atom in self.inputs if isinstance(atom, int))

    @property
    def is_ordered(self) -> bool:
        """Whether it has a side effect that JAX keeps in the order of the program."""
        return bool(self.params.get("ordered")) or any("Ordered" in type(effect).__name__ for effect in self.effects)


@dataclass(slots=True)
class FlatProgram:
    """Values are numbered in the order in which they are made: arguments, constants, then results."""

    avals: list[Any] = field(default_factory=list)
    equations: list[Equation] = field(default_factory=list)
    arguments: tuple[int, ...] = ()
    constants: dict[int, Any] = field(default_factory=dict)
    outputs: tuple[Atom, ...] = ()
    looped_units: set[int] = field(default_factory=set)
    """Those that are iterations of loops over stacked weights."""

    def new(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def size_bytes(self, value: int) -> int:
        aval = self.avals[value]
        return int(aval.size) * int(getattr(aval.dtype, "itemsize", 8))

    def is_small(self, value: int, limit: int) -> bool:
        """Whether a value is of numbers (random keys are none) and takes up to ``limit`` bytes."""
        return self.size_bytes(value) <= limit and not jnp.issubdtype(self.avals[value].dtype, jax.dtypes.extended)


Home = Callable[[int], tuple[int, int | None] | None]
"""The stage and the unit of a module call, by its number; None for a call outside all units."""


def flatten(
    closed: Any,
    calls: list[TracedCall] | None = None,
    home: Home = lambda call: None,
    weights: Sequence[int | None] = (),
    select: bool = False,
) -> FlatProgram:
    """The flat program of a closed jaxpr, without what no result needs.

    ``home`` says where a module call belongs; ``weights`` the stages of the first arguments, which are the model's
    parameters (None: several). Without them, only jits are opened. ``select`` opens branches too: all of them run, and
    the index picks from their results. Raises PlanError for a function with its own
    derivative rule that holds several stages.
    """
    flat = FlatProgram()
    jaxpr = closed.jaxpr
    flat.arguments = tuple(flat.new(variable.aval) for variable in jaxpr.invars)
    for variable, value in zip(jaxpr.constvars, closed.consts, strict=True):
        flat.constants[flat.new(variable.aval)] = value
    known = dict(zip(jaxpr.invars, flat.arguments, strict=True))
    known |= dict(zip(jaxpr.constvars, flat.constants, strict=True))
    held = dict(zip(flat.arguments, weights, strict=False))
    flat.outputs = tuple(_Flattener(flat, calls if calls is not None else [], home, held, select).run(jaxpr, known))
    flat.equations = needed(flat.equations, (a for a in flat.outputs if isinstance(a, int)))
    return flat


def aval_of(flat: FlatProgram, atom: Atom) -> Any:
    """The shape and dtype of a value or a literal."""
    return flat.avals[atom] if isinstance(atom, int) else atom.aval


def needed(equations: Sequence[Equation], wanted: Iterable[int]) -> list[Equation]:
    """The equations that make the ``wanted`` values, and those with side effects."""
    missing = set(wanted)
    kept = []
    for equation in reversed(equations):
        if equation.effects or not missing.isdisjoint(equation.outputs):
            kept.append(equation)
            missing.update(equation.values)
    return kept[::-1]


def evaluate(equations: Sequence[Equation], known: dict[int, Any], recompute: str = "none") -> None:
    """Run equations; ``known`` holds what they read and receives what they make.

    ``recompute``: what is kept of every equation's ``unit``, and what is computed again in the backward pass, as of
    `POLICIES`; "none" keeps all.
    """

    def region_of(equation: Equation) -> tuple[int, int]:
        unit = -1 if equation.unit is None or recompute == "none" else equation.unit
        return (id(equation.region) if equation.region else 0), unit

    for (_, unit), members in groupby(equations, key=region_of):
        group = list(members)
        region = group[0].region
        if region is None and unit < 0:
            _bind_all(group, known, recompute)
            continue
        made = [value for equation in group for value in equation.outputs]
        inside = set(made)
        read = list(dict.fromkeys(v for equation in group for v in equation.values if v not in inside))

        def run(*given: Any, group: list[Equation] = group, read: list[int] = read, made: list[int] = made) -> Any:
            local = dict(zip(read, given, strict=True))
            _bind_all(group, local)
            return [local[value] for value in made]

        policy, prevent_cse = (region.policy, region.prevent_cse) if region else (POLICIES[recompute], True)
        kept: Any = jax.checkpoint(run, policy=policy, prevent_cse=prevent_cse)
        known.update(zip(made, kept(*(known[value] for value in read)), strict=True))


def _bind_all(equations: Iterable[Equation], known: dict[int, Any], recompute: str = "none") -> None:
    for context, members in groupby(equations, key=lambda equation: equation.context):
        with context.manager:
            for equation in members:
                given = [known[atom] if isinstance(atom, int) else atom.val for atom in equation.inputs]
                if recompute != "none" and equation.is_layers:
                    made = _checkpointed_loop(equation.params, given, recompute)
                else:
                    made = equation.primitive.bind(*given, **equation.primitive.get_bind_params(equation.params))
                    made = made if equation.primitive.multiple_results else [made]
                known.update(zip(equation.outputs, made, strict=True))


def _checkpointed_loop(params: Mapping[str, Any], given: Sequence[Any], recompute: str) -> list[Any]:
    """A scan whose iterations are units."""
    run = jex_core.jaxpr_as_fun(params["jaxpr"])
    body: Any = jax.checkpoint(run, policy=POLICIES[recompute], prevent_cse=False)
    fixed, carried = params["num_consts"], params["num_carry"]

    def step(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
        made = body(*given[:fixed], *carry, *rows)
        return made[:carried], made[carried:]

    carry, stacked = jax.lax.scan(
        step,
        list(given[fixed : fixed + carried]),
        list(given[fixed + carried :]),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *stacked]


class _Flattener:
    def __init__(
        self, flat: FlatProgram, calls: list[TracedCall], home: Home, weights: dict[int, int | None], select: bool
    ) -> None:
        self.flat, self.calls, self.home, self.weights, self.select = flat, calls, home, weights, select
        self.traced = tuple(calls)
        self.casts: dict[int, Equation] = {}
        """Weights in another dtype → the cast."""
        self.renumbered: dict[int, int] = {}
        """Calls of a loop body as traced → those of the iteration at hand."""

    def run(self, jaxpr: Any, known: dict[Any, int], call: int = 0, region: Region | None = None) -> list[Atom]:
        """Append the equations of ``jaxpr``; what it returns."""
        names: dict[Any, Atom] = dict(known)

        def read(atom: Any) -> Atom:
            return atom if isinstance(atom, jex_core.Literal) else names[atom]

        for equation in jaxpr.eqns:
            made = self._equation(
                equation, [read(atom) for atom in equation.invars], self._call(equation, call), region
            )
            names.update(zip(equation.outvars, made, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _call(self, equation: Any, inherited: int) -> int:
        marked = call_number(equation.source_info.name_stack, -1)
        return self.renumbered.get(marked, marked) if 0 <= marked < len(self.calls) else inherited

    def _equation(self, equation: Any, inputs: list[Atom], call: int, region: Region | None) -> Sequence[Atom]:
        name, params = equation.primitive.name, equation.params
        if name in OPENED:
            body = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
            return self._open(body, inputs, call, region)
        if name == "scan":
            return self._scan(equation, inputs, call, region)
        if name == "cond" and self.select and not equation.effects:
            return self._branches(equation, inputs, call, region)
        held = self._held(equation, inputs)
        if len(held) > 1:
            if name in CHECKPOINTS:
                opened = Region(params.get("policy"), params.get("prevent_cse", True))
                return self._open(params["jaxpr"], inputs, call, opened)
            if name in OWN_DERIVATIVES:
                raise PlanError(
                    f"a function with its own derivative rule ({name}) holds the stages {sorted(held)}: a cut cannot "
                    "pass through it; put the rule inside a block, or plan a cut outside of it"
                )
        return self._keep(equation, params, inputs, call, region, held)

    def _open(self, body: Any, inputs: list[Atom], call: int, region: Region | None) -> list[Atom]:
        jaxpr, constants = (body.jaxpr, body.consts) if hasattr(body, "consts") else (body, ())
        names: dict[Any, Any] = dict(zip(jaxpr.invars, inputs, strict=True))
        for variable, value in zip(jaxpr.constvars, constants, strict=True):
            names[variable] = self.flat.new(variable.aval)
            self.flat.constants[names[variable]] = value
        return self.run(jaxpr, names, call, region)

    def _branches(self, equation: Any, inputs: list[Atom], call: int, region: Region | None) -> list[Atom]:
        index, *operands = inputs
        made = [self._open(body, operands, call, region) for body in equation.params["branches"]]
        outputs = [self.flat.new(variable.aval) for variable in equation.outvars]
        self.flat.equations += [
            Equation(jax.lax.select_n_p, {}, (index, *cases), (out,), equation.ctx, region=region)
            for *cases, out in zip(*made, outputs, strict=True)
        ]
        return list(outputs)

    def _keep(
        self,
        equation: Any,
        params: Mapping[str, Any],
        inputs: Sequence[Atom],
        call: int,
        region: Region | None,
        held: Collection[int] = (),
        avals: Sequence[Any] | None = None,
        is_layers: bool | None = None,
    ) -> list[Atom]:
        outputs = tuple(self.flat.new(aval) for aval in avals or [v.aval for v in equation.outvars])
        stage, unit = self.home(call) or (next(iter(held)) if len(held) == 1 else None, None)
        effects = frozenset(getattr(equation, "effects", ()))
        if is_layers is None:
            is_layers = equation.primitive.name == "scan" and any(
                self._is_weight(value) for value in inputs[params["num_consts"] + params["num_carry"] :]
            )
        self.flat.equations.append(
            Equation(
                equation.primitive,
                params,
                tuple(inputs),
                outputs,
                equation.ctx,
                stage,
                unit,
                region,
                effects,
                is_layers,
                call,
                equation.source_info,
            )
        )
        cast = inputs[0] if equation.primitive.name == "convert_element_type" else None
        if isinstance(cast, int) and cast in self.weights:
            self.casts[outputs[0]] = self.flat.equations[-1]
        return list(outputs)

    def _held(self, equation: Any, inputs: Sequence[Atom]) -> set[int]:
        """The stages of the inner programs of an equation: by their module calls, else by what they read."""
        marked = [mark for inner in jex_core.jaxprs_in_params(equation.params) for mark in marks(inner)]
        if not marked:
            if not any(True for _ in jex_core.jaxprs_in_params(equation.params)):
                return set()
            stages = (self.weights.get(atom) for atom in inputs if isinstance(atom, int))
            return {stage for stage in stages if stage is not None}
        return set(self._homes(self.renumbered.get(mark, mark) for mark in marked if mark < len(self.traced)))

    # --- loops

    def _scan(self, equation: Any, inputs: list[Atom], call: int, region: Region | None) -> Sequence[Atom]:
        """A scan whose iterations belong to several stages becomes a scan for each stage, over its slice of what is
        scanned; an iteration that itself lies on several is opened. So it does where layers that are recomputed and
        layers that are not follow each other."""
        params = equation.params
        length, body = params["length"], params["jaxpr"]
        if length > UNROLL_LIMIT:
            return self._keep(equation, params, inputs, call, region, self._held(equation, inputs))
        outer = dict(self.renumbered)
        scanned = inputs[params["num_consts"] + params["num_carry"] :]
        loop = layer_loop(self.calls, call) if any(self._is_weight(value) for value in scanned) else ""
        rows = range(length)[::-1] if params["reverse"] else range(length)
        iterations = [
            calls_of_iteration(self.calls, self.traced, body.jaxpr, position, call, outer, f"{loop}.{row}" * bool(loop))
            for position, row in enumerate(rows)
        ]
        traced = {mark: outer.get(mark, mark) for mark in marks(body.jaxpr) if mark < len(self.traced)}
        stages = [self._homes((made or traced).values()) for made in iterations]
        units = [self._units(made.values()) if loop else frozenset[int]() for made in iterations]
        self.flat.looped_units.update(*units)
        held = set().union(*stages)
        if len(held) <= 1 and len({bool(own) for own in units}) <= 1:
            again = any(units) if loop else None
            return self._keep(equation, params, inputs, call, region, held, is_layers=again)
        return _ScanCutter(self, equation, inputs, call, region, iterations, stages, units).run()

    def _is_weight(self, value: Atom) -> bool:
        return isinstance(value, int) and (value in self.weights or value in self.casts)

    def _homes(self, numbers: Iterable[int]) -> frozenset[int]:
        homes = (self.home(number) for number in numbers)
        return frozenset(home[0] for home in homes if home is not None)

    def _units(self, numbers: Iterable[int]) -> frozenset[int]:
        homes = (self.home(number) for number in numbers)
        return frozenset(home[1] for home in homes if home is not None and home[1] is not None)


class _ScanCutter:
    """One scan as several. Every operand that is scanned over is sliced along its first dim."""

    def __init__(
        self,
        flattener: _Flattener,
        equation: Any,
        inputs: list[Atom],
        call: int,
        region: Region | None,
        iterations: Sequence[dict[int, int]],
        stages: Sequence[frozenset[int]],
        units: Sequence[frozenset[int]],
    ) -> None:
        self.flattener, self.equation, self.call, self.region = flattener, equation, call, region
        self.iterations, self.stages, self.units = iterations, stages, units
        params = equation.params
        self.fixed = inputs[: params["num_consts"]]
        self.carry = inputs[params["num_consts"] : params["num_consts"] + params["num_carry"]]
        self.scanned = inputs[params["num_consts"] + params["num_carry"] :]

    def run(self) -> list[Atom]:
        params = self.equation.params
        length, carried = params["length"], params["num_carry"]
        results: list[tuple[int, list[Atom]]] = []
        for start, end in self._segments():
            first = length - end if params["reverse"] else start
            made = self._segment(start, end, first)
            self.carry = made[:carried]
            results.append((first, made[carried:]))
        results.sort(key=lambda item: item[0])
        stacked = [
            self._lax(jax.lax.concatenate_p, [row[1][position] for row in results], variable.aval, {"dimension": 0})
            for position, variable in enumerate(self.equation.outvars[carried:])
        ]
        return [*self.carry, *stacked]

    def _segments(self) -> list[tuple[int, int]]:
        """Runs of iterations, in the order in which they run, that lie on one stage and are all recomputed or none; or
        single ones that lie on several."""
        found: list[tuple[int, int]] = []
        for position, stages in enumerate(self.stages):
            first = found[-1][0] if found else position
            same = len(stages) == 1 and self.stages[first] == stages
            if found and same and bool(self.units[first]) == bool(self.units[position]):
                found[-1] = (found[-1][0], position + 1)
            else:
                found.append((position, position + 1))
        return found

    def _segment(self, start: int, end: int, first: int) -> list[Atom]:
        params, length = self.equation.params, end - start
        carried = params["num_carry"]
        rows = [self._rows(value, first, length) for value in self.scanned]
        bodies = [v.aval for v in self.equation.outvars]
        if len(self.stages[start]) == 1:
            avals = [*bodies[:carried], *(a.update(shape=(length, *a.shape[1:])) for a in bodies[carried:])]
            changed = {**params, "length": length, "unroll": min(params["unroll"], length)}
            return self.flattener._keep(
                self.equation, changed, [*self.fixed, *self.carry, *rows], self.call, self.region,
                self.stages[start], avals, bool(self.units[start]),
            )  # fmt: skip
        squeezed = [self._squeeze(row) for row in rows]
        before = self.flattener.renumbered
        self.flattener.renumbered = before | self.iterations[start]
        inner = self.iterations[start].get(ITERATION, self.call)
        made = self.flattener._open(params["jaxpr"], [*self.fixed, *self.carry, *squeezed], inner, self.region)
        self.flattener.renumbered = before
        kept = [
            self._lax(jax.lax.broadcast_in_dim_p, [row], aval.update(shape=(1, *aval.shape[1:])),
                      {"shape": (1, *aval.shape[1:]), "broadcast_dimensions": tuple(range(1, aval.ndim)),
                       "sharding": None})
            for row, aval in zip(made[carried:], bodies[carried:], strict=True)
        ]  # fmt: skip
        return [*made[:carried], *kept]

    def _rows(self, value: Atom, first: int, length: int) -> Atom:
        cast = self.flattener.casts.get(value) if isinstance(value, int) else None
        if cast is not None:  # rows of the weight are cast, rather than rows of the whole weight cast
            rows = self._rows(cast.inputs[0], first, length)
            aval = aval_of(self.flattener.flat, rows).update(dtype=self.flattener.flat.avals[cast.outputs[0]].dtype)
            return self._lax(cast.primitive, [rows], aval, dict(cast.params))
        aval = aval_of(self.flattener.flat, value)
        params = {
            "start_indices": (first, *([0] * (aval.ndim - 1))),
            "limit_indices": (first + length, *aval.shape[1:]),
            "strides": None,
        }
        return self._lax(jax.lax.slice_p, [value], aval.update(shape=(length, *aval.shape[1:])), params)

    def _squeeze(self, value: Atom) -> Atom:
        aval = aval_of(self.flattener.flat, value)
        return self._lax(jax.lax.squeeze_p, [value], aval.update(shape=aval.shape[1:]), {"dimensions": (0,)})

    def _lax(self, primitive: Any, inputs: Sequence[Atom], aval: Any, params: dict[str, Any]) -> int:
        """One equation of our own. It belongs to no stage: it follows what it is made from or used by."""
        flat = self.flattener.flat
        out = flat.new(aval)
        flat.equations.append(Equation(primitive, params, tuple(inputs), (out,), self.equation.ctx, region=self.region))
        return out
