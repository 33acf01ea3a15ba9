"""A traced JAX program as one flat list of steps: inner programs inlined, loops unrolled, boxed functions whole."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from shardwright.backends.jax.capture.inner_programs import (
    CHECKPOINTS,
    INLINED,
    aval,
    bound,
    equations_in,
    inner_program,
    interpreted,
    rows_between,
)
from shardwright.backends.jax.capture.layer_loops import (
    ITERATION,
    UNROLL_LIMIT,
    calls_of_iteration,
    layer_loop,
)
from shardwright.backends.jax.capture.own_checkpoints import OwnCheckpoint
from shardwright.backends.jax.capture.trace import BOX_MARK, TracedCall, call_number
from shardwright.core.errors import CaptureError

WHOLE_JITS = frozenset({"_take", "take_along_axis"})
"""The jax.numpy functions whose jitted body is one gather and the arithmetic of its index."""


Path = tuple[int, ...]
"""The path of an equation: its position in the program, then in the program inside that one, and so on."""
Operand = tuple[int | None, float | None]
"""The number of a value, None for a scalar literal; and the number that the literal is, or one handed on unchanged."""


@dataclass(frozen=True, slots=True)
class Step:
    """One primitive, or a few that make one op. Operands are numbers of values; a literal is None."""

    name: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    params: dict[str, Any]
    call: int
    path: Path | None = None
    """The path of the equation as traced, the same for every iteration of a loop; None without an equation."""
    members: tuple["Step", ...] = ()
    """The steps that were joined to make this one."""
    numbers: tuple[float | None, ...] = ()
    """The value of each operand that is a literal; none for steps that stand for no equation."""
    made: float | None = None
    """The one number that the step makes, where it follows from literals alone."""
    checkpoint: OwnCheckpoint | None = None
    """The checkpoint of the model's own around it."""
    is_saved: bool = False
    """Whether that keeps the result."""


@dataclass(slots=True)
class Program:
    """A flat program. Values are numbered in the order in which they are made, after arguments and constants."""

    shapes: list[tuple[int, ...]] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    arguments: list[int] = field(default_factory=list)
    constants: list[int] = field(default_factory=list)
    outputs: list[int | None] = field(default_factory=list)
    calls: list[TracedCall] = field(default_factory=list)
    traced: tuple[TracedCall, ...] = ()
    """The calls before loops were unrolled."""
    weights: set[int] = field(default_factory=set)
    """The arguments that are the model's own arrays."""
    numbers: dict[int, float] = field(default_factory=dict)
    """The constants that are one number."""
    arrays: dict[int, Any] = field(default_factory=dict)
    """All constants."""
    results: tuple[float | None, ...] = ()
    """The value of each output that is a literal."""

    def new(self, made: ShapedArray) -> int:
        return self.value(tuple(made.shape), dtype_name(made.dtype))

    def value(self, shape: tuple[int, ...], dtype: str) -> int:
        self.shapes.append(shape)
        self.dtypes.append(dtype)
        return len(self.shapes) - 1

    def constant(self, made: ShapedArray, array: Any) -> int:
        value = self.new(made)
        self.arrays[value] = array
        number = number_in(array)
        if number is not None:
            self.numbers[value] = number
        return value

    def shape(self, value: int | None) -> tuple[int, ...]:
        return () if value is None else self.shapes[value]


def number_in(array: Any) -> float | None:
    """The number that an array of one entry holds."""
    try:
        if getattr(array, "size", 1) == 1 and not jnp.issubdtype(jnp.result_type(array), jax.dtypes.extended):
            return float(np.asarray(array).reshape(()))
    except (TypeError, ValueError):
        pass
    return None


SHORT_DTYPES = {"uint16": "int16", "int4": "int8", "uint4": "int8", "float0": "bool"}
"""The dtypes that the core counts as another of the same size (or that arrays pad to one)."""


def dtype_name(dtype: Any) -> str:
    name = str(dtype)
    return "key" if name.startswith("key<") else SHORT_DTYPES.get(name, name)


def flatten(closed: ClosedJaxpr, calls: Sequence[TracedCall], weights: int = 0, results: int | None = None) -> Program:
    """The flat program of a closed jaxpr whose first ``weights`` arguments are the model's arrays, with the equations
    that its first ``results`` results need (None: all). Raises CaptureError for a program that cannot be read."""
    program = Program(calls=list(calls), traced=tuple(calls))
    program.arguments = [program.new(aval(variable)) for variable in closed.jaxpr.invars]
    program.weights = set(program.arguments[:weights])
    made = _Flattener(program).run(closed, [(value, None) for value in program.arguments])[:results]
    program.outputs, program.results = [value for value, _ in made], tuple(number for _, number in made)
    program = _collapse_whole_calls(program)
    program.steps = _needed(program.steps, (value for value in program.outputs if value is not None))
    return program


class _Flattener:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.traced = tuple(program.calls)
        self.renumbered: dict[int, int] = {}
        """The calls of the loop body as traced → those of the iteration that is being unrolled."""
        self.checkpoint: OwnCheckpoint | None = None
        """The checkpoint that is being read."""

    def run(self, closed: ClosedJaxpr, arguments: Sequence[Operand], call: int = 0, path: Path = ()) -> list[Operand]:
        """Append the steps of a program, and return its results."""

        def apply(index: int, equation: JaxprEqn, inputs: list[Operand]) -> list[Operand]:
            marked = call_number(equation.source_info.name_stack, -1)
            inside = call if not 0 <= marked < len(self.program.calls) else self.renumbered.get(marked, marked)
            return self._equation(equation, inputs, inside, (*path, index))

        held = zip(closed.jaxpr.constvars, closed.consts, strict=True)
        constants = [self.program.constant(aval(variable), array) for variable, array in held]
        self.program.constants += constants
        given = [(value, None) for value in constants]
        return interpreted(closed.jaxpr, given, arguments, apply, self._literal)

    def _literal(self, atom: Literal) -> Operand:
        if not aval(atom).shape:
            return None, number_in(atom.val)
        value = self.program.constant(aval(atom), atom.val)
        self.program.constants.append(value)
        return value, number_in(atom.val)

    def _equation(self, equation: JaxprEqn, inputs: list[Operand], call: int, path: Path) -> list[Operand]:
        name, params = equation.primitive.name, equation.params
        if name in ("jit", "pjit"):
            called = params["name"]
            if called.startswith(BOX_MARK) or (called in WHOLE_JITS and all(value is not None for value, _ in inputs)):
                return self._step(equation, called.removeprefix(BOX_MARK), inputs, call, path)
        if name in ("jit", "pjit") and _only_draws(params["jaxpr"].jaxpr):
            return self._step(equation, f"random.{params['name'].lstrip('_')}", inputs, call, path)
        if name == "scan":
            if params["length"] <= UNROLL_LIMIT:
                return self._unroll(equation, inputs, call, path)
            return self._step(equation, f"scan of {params['length']} iterations, not unrolled", inputs, call, path)
        if name in ("while", "cond"):
            return self._step(equation, name, inputs, call, path)
        inner = inner_program(params) if name in INLINED else None
        if inner is None:
            return self._step(equation, name, inputs, call, path)
        given = inputs[len(inputs) - len(inner.jaxpr.invars) :]
        if name not in CHECKPOINTS or self.checkpoint is not None:
            return self.run(inner, given, call, path)
        self.checkpoint = OwnCheckpoint(path, params.get("policy"))
        made = self.run(inner, given, call, path)
        self.checkpoint = None
        return made

    def _step(self, equation: JaxprEqn, name: str, inputs: list[Operand], call: int, path: Path) -> list[Operand]:
        outputs = tuple(self.program.new(aval(variable)) for variable in equation.outvars)
        values, numbers = tuple(value for value, _ in inputs), tuple(number for _, number in inputs)
        made = None if any(value is not None for value in values) else _number_of(equation, numbers)
        around = self.checkpoint
        is_saved = around is not None and around.saves(equation)
        self.program.steps.append(
            Step(name, values, outputs, equation.params, call, path, (), numbers, made, around, is_saved)
        )
        return [(value, None) for value in outputs]

    def _unroll(self, equation: JaxprEqn, inputs: list[Operand], call: int, path: Path) -> list[Operand]:
        """A scan as its iterations one after the other. Every iteration reads a slice of what is scanned over, and its
        module calls count as calls of their own."""
        params, program = equation.params, self.program
        body, carried = params["jaxpr"], params["num_carry"]
        fixed, carry = inputs[: params["num_consts"]], inputs[params["num_consts"] :][:carried]
        scanned = [value for value, _ in inputs[params["num_consts"] + carried :]]
        results: list[list[Operand]] = []
        order = range(params["length"])
        outer = dict(self.renumbered)
        loop = layer_loop(program.calls, call) if not program.weights.isdisjoint(scanned) else ""
        for position, index in enumerate(reversed(order) if params["reverse"] else order):
            made = calls_of_iteration(
                program.calls, self.traced, body.jaxpr, position, call, outer, f"{loop}.{index}" * bool(loop)
            )
            self.renumbered = outer | made
            inside = made.get(ITERATION, call)
            slices = [(self._slice(value, index, inside), None) for value in scanned]
            outputs = self.run(body, [*fixed, *carry, *slices], inside, path)
            carry = outputs[:carried]
            results.append(outputs[carried:])
        self.renumbered = outer
        if params["reverse"]:
            results.reverse()
        stacked: list[Operand] = []
        for position, variable in enumerate(equation.outvars[carried:]):
            rows = []
            for row in results:
                shape = (1, *aval(variable).shape[1:])
                value = program.value(shape, dtype_name(aval(variable).dtype))
                program.steps.append(
                    Step("reshape", (row[position][0],), (value,), {}, call, checkpoint=self.checkpoint)
                )
                rows.append(value)
            out = program.new(aval(variable))
            program.steps.append(
                Step("concatenate", tuple(rows), (out,), {"dimension": 0}, call, checkpoint=self.checkpoint)
            )
            stacked.append((out, None))
        return [*carry, *stacked]

    def _slice(self, value: int | None, index: int, call: int) -> int:
        program = self.program
        if value is None:
            raise CaptureError("a scan runs over a scalar literal")
        shape, dtype = program.shapes[value], program.dtypes[value]
        row = program.value((1, *shape[1:]), dtype)
        rows = rows_between(shape, index, index + 1)
        program.steps.append(Step("slice", (value,), (row,), rows, call, checkpoint=self.checkpoint))
        out = program.value(shape[1:], dtype)
        program.steps.append(Step("squeeze", (row,), (out,), {"dimensions": (0,)}, call, checkpoint=self.checkpoint))
        return out


def _number_of(equation: JaxprEqn, numbers: Sequence[float | None]) -> float | None:
    """The number that an equation makes of literals."""
    told = [number for number in numbers if number is not None]
    if len(told) != len(numbers) or not told or equation.effects or len(equation.outvars) != 1:
        return None
    with jax.ensure_compile_time_eval():
        given = [jnp.asarray(number, aval(atom).dtype) for atom, number in zip(equation.invars, told, strict=True)]
        return number_in(*bound(equation.primitive, equation.params, given))


def _only_draws(jaxpr: Jaxpr) -> bool:
    """Whether a program makes random values from keys and scalars."""
    if any(aval(variable).shape for variable in jaxpr.invars if dtype_name(aval(variable).dtype) != "key"):
        return False
    names = {equation.primitive.name for equation in equations_in(jaxpr)}
    return bool(names & {"random_bits", "threefry2x32", "random_gamma"})


def _collapse_whole_calls(program: Program) -> Program:
    """Join the steps of every call that is one op as a whole (a normalisation, a dropout) into one step."""
    owner: dict[int, int] = {}
    for number, call in enumerate(program.calls):
        if call.parent in owner:
            owner[number] = owner[call.parent]
        elif call.whole_kind:
            owner[number] = number
    if not owner:
        return program
    readers: dict[int, set[int]] = {}
    for step in program.steps:
        for value in step.inputs:
            if value is not None:
                readers.setdefault(value, set()).add(owner.get(step.call, -1))
    for value in program.outputs:
        if value is not None:
            readers.setdefault(value, set()).add(-1)
    members: dict[int, list[Step]] = {}
    last: dict[int, int] = {}
    for index, step in enumerate(program.steps):
        group = owner.get(step.call)
        if group is not None:
            members.setdefault(group, []).append(step)
            last[group] = index
    steps: list[Step] = []
    for index, step in enumerate(program.steps):
        group = owner.get(step.call)
        if group is None:
            steps.append(step)
        elif last[group] == index:
            steps += _joined(program, members[group], group, readers)
    program.steps = steps
    return program


def _joined(program: Program, steps: list[Step], call: int, readers: dict[int, set[int]]) -> list[Step]:
    """One step for all of ``steps``, when they make one floating result. Otherwise the steps as they are."""
    made = [value for step in steps for value in step.outputs]
    inside = set(made)
    outputs = [value for value in made if readers.get(value, set()) - {call}]
    inputs = [v for step in steps for v in step.inputs if v is not None and v not in inside]
    results = [value for value in outputs if program.shapes[value]]
    kind = program.calls[call].whole_kind
    same = [value for value in inputs if results and program.shapes[value] == program.shapes[results[0]]]
    if len(results) != 1 or not same:
        return steps
    first = same[0]
    ordered = (first, *(value for value in dict.fromkeys(inputs) if value != first))
    # Scalars that leave the call (the counter of a random stream) are bookkeeping: kept as steps of their own.
    scalars = [step for step in steps if any(value in outputs and value not in results for value in step.outputs)]
    last = next(step for step in steps if results[0] in step.outputs)
    whole = Step(
        f"call:{kind}", ordered, (results[0],), {}, call, members=tuple(steps), checkpoint=last.checkpoint,
        is_saved=last.is_saved,
    )  # fmt: skip
    return [whole, *_needed(steps, (value for step in scalars for value in step.outputs))]


def _needed(steps: Sequence[Step], wanted: Iterable[int]) -> list[Step]:
    """The steps that make the ``wanted`` values, as the compiler leaves out all others."""
    missing = set(wanted)
    kept: list[Step] = []
    for step in reversed(steps):
        if not missing.isdisjoint(step.outputs):
            kept.append(step)
            missing.update(value for value in step.inputs if value is not None)
    return kept[::-1]


def same_structure(
    first: Program, second: Program, differ: Callable[[str], CaptureError], sizes: tuple[int, int] = (2, 3)
) -> None:
    """Raise the error that ``differ`` makes of the first difference between the programs at two batch sizes."""
    small, large = sizes
    if len(first.steps) != len(second.steps):
        raise differ(f"{len(first.steps)} ops with batch {small}, {len(second.steps)} with batch {large}")
    for one, other in zip(first.steps, second.steps, strict=True):
        if (one.name, one.inputs, one.outputs) != (other.name, other.inputs, other.outputs):
            path = first.calls[one.call].path or "the model"
            raise differ(f"in {path}, {one.name} with batch {small} is {other.name} with batch {large}")
