"""The `FlatProgram` of a closed jaxpr.

Inner programs are opened only where they must be: those of a jit, and those of a loop or a `jax.checkpoint` that holds
more than one stage. Derivative rules stay whole.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive, jaxprs_in_params

from shardwright.backends.jax.capture.inner_programs import (
    CHECKPOINTS,
    JITS,
    OWN_DERIVATIVES,
    aval,
    inner_program,
    interpreted,
    rows_between,
)
from shardwright.backends.jax.capture.layer_loops import (
    ITERATION,
    UNROLL_LIMIT,
    calls_of_iteration,
    layer_loop,
    marks,
)
from shardwright.backends.jax.capture.trace import CALL_MARK, TracedCall, call_number
from shardwright.backends.jax.program.equations import Atom, Equation, FlatProgram, Region, aval_of, needed
from shardwright.core.errors import PlanError

Home = Callable[[int], tuple[int, int | None] | None]
"""The stage and the unit of a module call, by its number; None for a call outside all units."""


def flatten(
    closed: ClosedJaxpr,
    calls: list[TracedCall] | None = None,
    home: Home = lambda call: None,
    weights: Sequence[int | None] = (),
    select: bool = False,
    mark: str = CALL_MARK,
    opens_checkpoints: bool = False,
    opens_rules: bool = False,
) -> FlatProgram:
    """The flat program of a closed jaxpr, without equations that no result needs.

    ``home`` gives the stage and the unit of a module call; ``weights`` the stages of the first arguments, which are
    the model's parameters (None: several). Without them, only jits are opened. ``select`` opens branches too: all of
    them run, and the index picks from their results. ``mark``: what comes before the number of a call in the names of
    its equations. ``opens_checkpoints``: whether every `jax.checkpoint` is opened, as `Region`. ``opens_rules``:
    whether functions with derivative rules of their own are opened. Raises PlanError for
    such a function that holds several stages.
    """
    flat = FlatProgram()
    jaxpr = closed.jaxpr
    flat.arguments = tuple(flat.new(aval(variable)) for variable in jaxpr.invars)
    constants = flat.hold(closed)
    held = dict(zip(flat.arguments, weights, strict=False))
    flattener = _Flattener(
        flat, calls if calls is not None else [], home, held, select, mark, opens_checkpoints, opens_rules
    )
    flat.outputs = tuple(flattener.run(jaxpr, constants, flat.arguments))
    flat.equations = needed(flat.equations, (a for a in flat.outputs if isinstance(a, int)))
    return flat


class _Flattener:
    def __init__(
        self,
        flat: FlatProgram,
        calls: list[TracedCall],
        home: Home,
        weights: dict[int, int | None],
        select: bool,
        mark: str,
        opens_checkpoints: bool,
        opens_rules: bool,
    ) -> None:
        self.flat, self.calls, self.home, self.weights, self.select = flat, calls, home, weights, select
        self.mark, self.opens_checkpoints, self.opens_rules = mark, opens_checkpoints, opens_rules
        self.traced = tuple(calls)
        self.casts: dict[int, Equation] = {}
        """The weights in another dtype → the cast."""
        self.renumbered: dict[int, int] = {}
        """The calls of a loop body as traced → those of the iteration at hand."""

    def run(
        self,
        jaxpr: Jaxpr,
        constants: Sequence[Atom],
        arguments: Sequence[Atom],
        call: int = 0,
        region: Region | None = None,
    ) -> list[Atom]:
        """Append the equations of ``jaxpr``, and return the values of its results."""

        def apply(_: int, equation: JaxprEqn, inputs: list[Atom]) -> Sequence[Atom]:
            return self._equation(equation, inputs, self._call(equation, call), region)

        return interpreted(jaxpr, constants, arguments, apply, lambda literal: literal)

    def _call(self, equation: JaxprEqn, inherited: int) -> int:
        marked = call_number(equation.source_info.name_stack, -1, self.mark)
        return self.renumbered.get(marked, marked) if 0 <= marked < len(self.calls) else inherited

    def _equation(self, equation: JaxprEqn, inputs: list[Atom], call: int, region: Region | None) -> Sequence[Atom]:
        name, params = equation.primitive.name, equation.params
        if name in JITS or (self.opens_rules and name in OWN_DERIVATIVES):
            return self._open(_inner(params), inputs, call, region)
        if name == "scan":
            return self._scan(equation, inputs, call, region)
        if name == "reduce_precision" and _rounds_nothing(equation):
            return inputs
        if name == "cond" and self.select and not equation.effects:
            return self._branches(equation, inputs, call, region)
        held = self._held(equation, inputs)
        if name in CHECKPOINTS and self._is_recomputed(equation):
            return self._open(_inner(params), inputs, call, region)
        if name in CHECKPOINTS and (len(held) > 1 or self.opens_checkpoints):
            opened = Region(params.get("policy"), params.get("prevent_cse", True))
            return self._open(_inner(params), inputs, call, opened)
        if len(held) > 1 and name in OWN_DERIVATIVES:
            raise PlanError(
                f"a function with its own derivative rule ({name}) holds the stages {sorted(held)}: a cut cannot "
                "pass through it; put the rule inside a block, or plan a cut outside of it"
            )
        return self._keep(equation, params, inputs, call, region, held)

    def _open(self, body: ClosedJaxpr, inputs: list[Atom], call: int, region: Region | None) -> list[Atom]:
        return self.run(body.jaxpr, self.flat.hold(body), inputs, call, region)

    def _branches(self, equation: JaxprEqn, inputs: list[Atom], call: int, region: Region | None) -> list[Atom]:
        index, *operands = inputs
        made = [self._open(body, operands, call, region) for body in equation.params["branches"]]
        outputs = [self.flat.new(aval(variable)) for variable in equation.outvars]
        self.flat.equations += [
            Equation(jax.lax.select_n_p, {}, (index, *cases), (out,), equation.ctx, region=region)
            for *cases, out in zip(*made, outputs, strict=True)
        ]
        return list(outputs)

    def _keep(
        self,
        equation: JaxprEqn,
        params: Mapping[str, Any],
        inputs: Sequence[Atom],
        call: int,
        region: Region | None,
        held: Collection[int] = (),
        avals: Sequence[ShapedArray] | None = None,
        is_layers: bool | None = None,
    ) -> list[Atom]:
        outputs = tuple(self.flat.new(each) for each in avals or [aval(v) for v in equation.outvars])
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

    def _is_recomputed(self, equation: JaxprEqn) -> bool:
        """Whether all module calls in a checkpoint are of units that the plan recomputes by itself."""
        inside = [self.renumbered.get(mark, mark) for mark in marks(_inner(equation.params).jaxpr)]
        homes = [self.home(number) for number in inside if number < len(self.calls)]
        return bool(homes) and all(home is not None and home[1] is not None for home in homes)

    def _held(self, equation: JaxprEqn, inputs: Sequence[Atom]) -> set[int]:
        """The stages of the inner programs of an equation: by their module calls, else by the operands."""
        marked = [mark for inner in jaxprs_in_params(equation.params) for mark in marks(inner)]
        if not marked:
            if not any(True for _ in jaxprs_in_params(equation.params)):
                return set()
            stages = (self.weights.get(atom) for atom in inputs if isinstance(atom, int))
            return {stage for stage in stages if stage is not None}
        return set(self._homes(self.renumbered.get(mark, mark) for mark in marked if mark < len(self.traced)))

    # --- loops

    def _scan(self, equation: JaxprEqn, inputs: list[Atom], call: int, region: Region | None) -> Sequence[Atom]:
        """The results of a scan whose iterations belong to several stages. It becomes a scan for each stage, over its
        slice of the scanned operands; an iteration that itself lies on several is opened. Layers that are recomputed
        are divided in the same way from layers that are not."""
        params = equation.params
        length, body = params["length"], params["jaxpr"]
        if length > UNROLL_LIMIT:
            return self._keep(equation, params, inputs, call, region, self._held(equation, inputs))
        outer = dict(self.renumbered)
        fixed, rest = inputs[: params["num_consts"]], inputs[params["num_consts"] :]
        carry, scanned = rest[: params["num_carry"]], rest[params["num_carry"] :]
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
        return _ScanCutter(self, equation, fixed, carry, scanned, call, region, iterations, stages, units).run()

    def _is_weight(self, value: Atom) -> bool:
        return isinstance(value, int) and (value in self.weights or value in self.casts)

    def _homes(self, numbers: Iterable[int]) -> frozenset[int]:
        homes = (self.home(number) for number in numbers)
        return frozenset(home[0] for home in homes if home is not None)

    def _units(self, numbers: Iterable[int]) -> frozenset[int]:
        homes = (self.home(number) for number in numbers)
        return frozenset(home[1] for home in homes if home is not None and home[1] is not None)


def _rounds_nothing(equation: JaxprEqn) -> bool:
    """Whether an equation rounds to the precision that its operand has. JAX puts such equations around what the policy
    of a `jax.checkpoint` keeps, so that XLA does not compute it again; in our programs that is behind barriers. In 16
    bits they may round, as XLA is free to compute in float32 up to them."""
    dtype = aval(equation.outvars[0]).dtype
    precision = jnp.finfo(dtype)  # type: ignore[no-untyped-call]
    said = equation.params["exponent_bits"], equation.params["mantissa_bits"]
    return dtype.itemsize > 2 and said == (precision.nexp, precision.nmant)


def _inner(params: Mapping[str, Any]) -> ClosedJaxpr:
    """The program of an equation that runs one."""
    found = inner_program(params)
    assert found is not None
    return found


@dataclass(slots=True, eq=False)
class _ScanCutter:
    """The cut of one scan into several. Every operand that is scanned over is sliced along its first dim."""

    flattener: _Flattener
    equation: JaxprEqn
    fixed: list[Atom]
    carry: list[Atom]
    scanned: list[Atom]
    call: int
    region: Region | None
    iterations: Sequence[dict[int, int]]
    stages: Sequence[frozenset[int]]
    units: Sequence[frozenset[int]]

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
            self._lax(jax.lax.concatenate_p, [row[1][position] for row in results], aval(variable), {"dimension": 0})
            for position, variable in enumerate(self.equation.outvars[carried:])
        ]
        return [*self.carry, *stacked]

    def _segments(self) -> list[tuple[int, int]]:
        """The runs of iterations, in the order in which they run, that lie on one stage and are all recomputed or none;
        or single ones that lie on several."""
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
        bodies = [aval(v) for v in self.equation.outvars]
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
            self._lax(jax.lax.broadcast_in_dim_p, [row], made_of.update(shape=(1, *made_of.shape[1:])),
                      {"shape": (1, *made_of.shape[1:]), "broadcast_dimensions": tuple(range(1, made_of.ndim)),
                       "sharding": None})
            for row, made_of in zip(made[carried:], bodies[carried:], strict=True)
        ]  # fmt: skip
        return [*made[:carried], *kept]

    def _rows(self, value: Atom, first: int, length: int) -> Atom:
        cast = self.flattener.casts.get(value) if isinstance(value, int) else None
        if cast is not None:  # rows of the weight are cast, rather than rows of the whole weight cast
            rows = self._rows(cast.inputs[0], first, length)
            whole = aval_of(self.flattener.flat, rows).update(dtype=self.flattener.flat.avals[cast.outputs[0]].dtype)
            return self._lax(cast.primitive, [rows], whole, dict(cast.params))
        whole = aval_of(self.flattener.flat, value)
        params = rows_between(whole.shape, first, first + length)
        return self._lax(jax.lax.slice_p, [value], whole.update(shape=(length, *whole.shape[1:])), params)

    def _squeeze(self, value: Atom) -> Atom:
        whole = aval_of(self.flattener.flat, value)
        return self._lax(jax.lax.squeeze_p, [value], whole.update(shape=whole.shape[1:]), {"dimensions": (0,)})

    def _lax(self, primitive: Primitive, inputs: Sequence[Atom], like: ShapedArray, params: dict[str, Any]) -> int:
        """The value of one equation of our own, which has no stage: it follows its operands or its readers."""
        flat = self.flattener.flat
        out = flat.new(like)
        flat.equations.append(Equation(primitive, params, tuple(inputs), (out,), self.equation.ctx, region=self.region))
        return out
