"""A flat program of one microbatch, unrolled over the slices of its sequences.

What is there whole keeps its equations and values. What runs slice by slice has an equation for each, at its sizes, and
reads its part of what is there whole; attention reads the keys and values of the slices before beside its own. What
needs all tokens reads the slices put together. Every slice of a stage is a stage of its own (`slices_as_stages`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from shardwright.backends.jax.program.equations import Atom, Equation, FlatProgram, Region, aval_of, evaluate
from shardwright.backends.jax.slices.masking import Axes, Check
from shardwright.backends.jax.slices.op_dims import sized
from shardwright.backends.jax.slices.reading import Reading, SlicedOp
from shardwright.core.errors import CaptureError
from shardwright.core.schedule.passes.slices_as_stages import stage_of_slice


@dataclass(frozen=True, slots=True)
class Unrolled:
    """A program with an equation for each slice.

    Attributes:
        whole: value of a slice → the value of the whole program that it is a part of.
        checks: of masks, and the module calls that mask by them.
    """

    flat: FlatProgram
    whole: Mapping[int, int]
    checks: tuple[tuple[Check, str], ...] = ()


def unrolled(
    reading: Reading, lengths: Sequence[int], placed: Sequence[int | None], stages: int, made_anywhere: Sequence[bool]
) -> Unrolled:
    """The program of a reading, unrolled. ``placed``: the stage of every equation of the whole program; made_anywhere:
    whether each may be made again wherever it is read."""
    return _Unrolling(reading, lengths, placed, stages, made_anywhere).run()


@dataclass(slots=True, eq=False)
class _Writer:
    """Writes the equations of one program, slice after slice."""

    reading: Reading
    lengths: Sequence[int]
    flat: FlatProgram
    """The program that is written."""
    value_of: dict[tuple[int, int], int] = field(default_factory=dict)
    """(value, slice) → the slice's value."""
    whole: dict[int, int] = field(default_factory=dict)
    parts: dict[Any, int] = field(default_factory=dict)
    regions: dict[tuple[int, int], Region] = field(default_factory=dict)

    def start(self, which: int) -> int:
        return sum(self.lengths[:which])

    def size(self, role: str | None, whole: int, which: int) -> int:
        if role == "tokens":
            return self.lengths[which]
        return self.start(which + 1) if role == "keys" else whole

    def shape(self, shape: Sequence[int], roles: Sequence[str | None], which: int) -> tuple[int, ...]:
        return tuple(self.size(role, size, which) for role, size in zip(roles, shape, strict=True))

    def equation(self, equation: Equation, op: SlicedOp, which: int, stage: int | None) -> None:
        """Write one equation at one slice's sizes."""
        old = self.reading.flat
        like = replace(equation, stage=stage, region=self._region(equation.region, which))
        inputs = [
            self._operand(atom, wanted, which, like) for atom, wanted in zip(equation.inputs, op.wanted, strict=True)
        ]
        shapes = [
            self.shape(old.avals[value].shape, self.reading.roles(self.reading.axes[value]), which)
            for value in equation.outputs
        ]
        outputs = []
        for value, shape in zip(equation.outputs, shapes, strict=True):
            made = self.flat.new(old.avals[value].update(shape=shape))
            self.value_of[value, which], self.whole[made] = made, value
            outputs.append(made)
        given = [tuple(aval_of(self.flat, atom).shape) for atom in inputs]
        primitive = equation.primitive
        params: Mapping[str, Any] = sized(old, equation, shapes, given)
        if op.primal is not None:
            primitive, params = _own_derivative(self, op, which, [aval_of(self.flat, atom) for atom in inputs])
        if op.layouts is not None:
            primitive, params = op.layouts.equation(aval_of(self.flat, inputs[0]))
        self.flat.equations.append(
            replace(like, primitive=primitive, params=params, inputs=tuple(inputs), outputs=tuple(outputs))
        )

    def _region(self, region: Region | None, which: int) -> Region | None:
        if region is None:
            return None
        return self.regions.setdefault((id(region), which), Region(region.policy, region.prevent_cse))

    def _operand(self, atom: Atom, wanted: Axes, which: int, like: Equation) -> Atom:
        if not isinstance(atom, int):
            return atom
        roles = self.reading.roles(wanted)
        if self.reading.place.get(atom, "whole") == "whole":
            return self._part(atom, roles, which, like)
        own = self.reading.roles(self.reading.axes[atom])
        longer = [
            d for d, (one, other) in enumerate(zip(own, roles, strict=True)) if (one, other) == ("tokens", "keys")
        ]
        if not longer:
            return self.value_of[atom, which]
        (dim,) = longer
        return self._joined([self.value_of[atom, s] for s in range(which + 1)], dim, atom, like)

    def _joined(self, parts: Sequence[int], dim: int, whole: int, like: Equation) -> int:
        """Slices of a value one behind the other."""
        if len(parts) == 1:
            return parts[0]
        key = ("joined", whole, dim, len(parts), like.stage, like.unit, id(like.region))
        if key not in self.parts:
            size = sum(self.flat.avals[part].shape[dim] for part in parts)
            shape = list(self.flat.avals[parts[0]].shape)
            shape[dim] = size
            made = self.flat.new(self.flat.avals[parts[0]].update(shape=tuple(shape)))
            self._write(jax.lax.concatenate_p, {"dimension": dim}, parts, made, like)
            self.parts[key], self.whole[made] = made, whole
        return self.parts[key]

    def _part(self, value: int, roles: Sequence[str | None], which: int, like: Equation) -> int:
        """What one slice takes of a value that is there whole."""
        shape = self.reading.flat.avals[value].shape
        starts = [self.start(which) if role == "tokens" else 0 for role in roles]
        ends = [start + self.size(role, size, which) for start, role, size in zip(starts, roles, shape, strict=True)]
        if (starts, ends) == ([0] * len(shape), list(shape)):
            return value
        key = ("part", value, tuple(starts), tuple(ends), like.stage, like.unit, id(like.region))
        if key not in self.parts:
            sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
            made = self.flat.new(self.flat.avals[value].update(shape=sizes))
            params = {"start_indices": tuple(starts), "limit_indices": tuple(ends), "strides": None}
            self._write(jax.lax.slice_p, params, (value,), made, like)
            self.parts[key], self.whole[made] = made, value
        return self.parts[key]

    def _write(
        self, primitive: Any, params: Mapping[str, Any], inputs: Sequence[int], made: int, like: Equation
    ) -> None:
        self.flat.equations.append(
            replace(
                like, primitive=primitive, params=params, inputs=tuple(inputs), outputs=(made,), effects=frozenset(),
                is_layers=False,
            )
        )  # fmt: skip


class _Unrolling:
    """The unrolled program of a microbatch under construction."""

    def __init__(
        self, reading: Reading, lengths: Sequence[int], placed: Sequence[int | None], stages: int,
        made_anywhere: Sequence[bool],
    ) -> None:  # fmt: skip
        self.reading, self.placed, self.stages, self.anywhere = reading, placed, stages, made_anywhere
        old = reading.flat
        flat = replace(old, avals=list(old.avals), equations=[], constants=dict(old.constants))
        self.writer = _Writer(reading, lengths, flat)
        self.stage_of = {v: stage for e, stage in zip(old.equations, placed, strict=True) for v in e.outputs}
        self.joined: set[int] = set()

    def run(self) -> Unrolled:
        reading, writer = self.reading, self.writer
        equations, slices = reading.flat.equations, range(len(writer.lengths))
        places = [self._place(equation) for equation in equations]
        for position, (equation, place) in enumerate(zip(equations, places, strict=True)):
            if place == "whole":
                stage = None if self.anywhere[position] else self.placed[position]
                writer.flat.equations.append(replace(equation, stage=stage))
        for which in slices:
            for position, (equation, place) in enumerate(zip(equations, places, strict=True)):
                if place == "slices":
                    stage = self.placed[position]
                    assert stage is not None
                    writer.equation(
                        equation, reading.sliced[position], which, stage_of_slice(stage, which, self.stages)
                    )
        for position, (equation, place) in enumerate(zip(equations, places, strict=True)):
            if place == "behind":
                self._join([v for v in equation.values if reading.place.get(v) == "slices"], equation)
                writer.flat.equations.append(replace(equation, stage=self._last(self.placed[position])))
        sliced = [a for a in writer.flat.outputs if isinstance(a, int) and reading.place.get(a) == "slices"]
        self._join(sliced, equations[-1])
        return Unrolled(writer.flat, writer.whole)

    def _place(self, equation: Equation) -> str:
        return self.reading.place.get(equation.outputs[0], "whole") if equation.outputs else "whole"

    def _last(self, stage: int | None) -> int:
        last = self.stages - 1 if stage is None else stage
        return stage_of_slice(last, len(self.writer.lengths) - 1, self.stages)

    def _join(self, values: Sequence[int], like: Equation) -> None:
        """Put the slices of values together, under the numbers that they have in the whole program."""
        reading, writer = self.reading, self.writer
        for value in values:
            if value in self.joined:
                continue
            roles = reading.roles(reading.axes[value])
            dims = [d for d, role in enumerate(roles) if role == "tokens"]
            if len(dims) != 1 or "keys" in roles:
                raise CaptureError("an op needs the scores of an attention of all tokens")
            parts = [writer.value_of[value, which] for which in range(len(writer.lengths))]
            at = replace(like, stage=self._last(self.stage_of[value]), unit=None, region=None)
            writer._write(jax.lax.concatenate_p, {"dimension": dims[0]}, parts, value, at)
            self.joined.add(value)


def _own_derivative(
    writer: _Writer, op: SlicedOp, which: int, given: Sequence[ShapedArray]
) -> tuple[Any, Mapping[str, Any]]:
    """The primitive and parameters of a function with its own derivative rule, at one slice's sizes. Inside another
    such function it needs no rule."""
    assert op.primal is not None
    run = _program(op.primal, writer.lengths, which)
    function: Any = jax.jit(run)
    if op.derivative is not None:
        derived = _program(op.derivative, writer.lengths, which)

        @jax.custom_jvp
        def with_rule(*arrays: Any) -> list[Any]:
            return run(*arrays)

        @with_rule.defjvp
        def rule(primals: Any, moved: Any) -> Any:
            made = derived(*primals, *(moved[number] for number in op.tangents))
            return made[: len(made) // 2], made[len(made) // 2 :]

        function = with_rule

    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in given]
    closed = jax.make_jaxpr(function)(*shapes)
    (equation,) = closed.jaxpr.eqns
    if list(equation.invars) != list(closed.jaxpr.invars):
        raise CaptureError("a function with its own derivative rule holds arrays of its own")
    return equation.primitive, equation.params


def _program(reading: Reading, lengths: Sequence[int], which: int) -> Callable[..., list[Any]]:
    """The program inside an equation, at one slice's sizes, as a function of its operands."""
    old = reading.flat
    flat = replace(old, avals=list(old.avals), equations=[], constants=dict(old.constants))
    writer = _Writer(reading, lengths, flat)
    for value in old.arguments:
        if reading.place.get(value) == "slices":
            roles = reading.roles(reading.axes[value])
            flat.avals[value] = flat.avals[value].update(shape=writer.shape(old.avals[value].shape, roles, which))
            writer.value_of[value, which] = value
    for position, equation in enumerate(old.equations):
        if position in reading.sliced:
            writer.equation(equation, reading.sliced[position], which, None)
        else:
            flat.equations.append(equation)
    outputs = [
        writer.value_of[atom, which] if isinstance(atom, int) and reading.place.get(atom) == "slices" else atom
        for atom in old.outputs
    ]

    def run(*arrays: Any) -> list[Any]:
        known: dict[int, Any] = dict(flat.constants) | dict(zip(flat.arguments, arrays, strict=True))
        evaluate(flat.equations, known)
        return [
            known[atom] if isinstance(atom, int) else jnp.asarray(atom.val, aval_of(flat, atom).dtype)
            for atom in outputs
        ]

    return run
