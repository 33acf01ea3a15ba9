"""Stages that are alike, with the same equations on other weights, and their inputs by kind."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.backends.jax.capture.inner_programs import OWN_DERIVATIVES
from shardwright.backends.jax.capture.tree import abstract
from shardwright.backends.jax.program.cut import Cut
from shardwright.backends.jax.program.equations import Equation, FlatProgram, aval_of, evaluate
from shardwright.backends.jax.program.flattening import flatten
from shardwright.core.errors import MissingCapabilityError

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
RULE = re.compile(r"\bcustom_[jv][vj]p_call\b")
"""The pattern of functions with derivatives of their own, inside an equation's inner programs."""


@dataclass(frozen=True, slots=True)
class Alike:
    """The parts 1 … n of a cut, as one function: that of part 1."""

    equations: tuple[Equation, ...]
    stacked: tuple[tuple[int, ...], ...]
    """The weights that differ from part to part: for each, its value in every part."""
    shared: tuple[int, ...]
    """The inputs that are the same for all parts."""
    entering: tuple[int, ...]
    """The values that a part takes from the one before it; those of part 1."""
    leaving: tuple[int, ...]
    """The values that part 1 hands to the next part for each of those."""
    final: tuple[tuple[int, int], ...]
    """The pairs of a value of the last part that later parts read, and the same value of part 1."""


def alike(cut: Cut, first: int, last: int) -> Alike:
    """The parts ``first`` … ``last`` as one function.

    Raises MissingCapabilityError, naming the difference, when they are not alike or take more than the last one's
    values and what is common to all.
    """
    flat = cut.flat
    shapes = [_canonical(flat, cut.parts[index].equations) for index in range(first, last + 1)]
    for offset, (signature, inputs, _) in enumerate(shapes):
        if signature != shapes[0][0] or len(inputs) != len(shapes[0][1]):
            pairs = enumerate(zip(signature, shapes[0][0], strict=False))
            parting = (f"; equation {k}, {one[0]} against {other[0]}, or its parameters or derivative"
                       for k, (one, other) in pairs if one != other)  # fmt: skip
            raise MissingCapabilityError(
                f"stage {offset} does not run what stage 0 does ({len(signature)} equations against "
                f"{len(shapes[0][0])}, {len(inputs)} inputs against {len(shapes[0][1])}{next(parting, '')}): one "
                "program for all stages needs stages that are alike; cut blocks evenly, or run the stages as programs "
                "of their own in one process"
            )
    weights = {weight.value for weight in cut.weights}
    made = [{value: number for number, value in enumerate(outputs)} for _, _, outputs in shapes]
    stacked, shared, entering, leaving = [], [], [], []
    for values in zip(*(inputs for _, inputs, _ in shapes), strict=True):
        if len(set(values)) == 1:
            shared.append(values[0])
        elif all(value in weights for value in values):
            stacked.append(tuple(values))
        else:
            from_before = {made[i].get(value, -1) for i, value in enumerate(values[1:])}
            if len(from_before) != 1 or -1 in from_before:
                raise MissingCapabilityError(
                    f"a value of shape {flat.avals[values[0]].shape} enters the stages from elsewhere than the stage "
                    "before: one program for all stages hands values on from one to the next alone; run the stages as "
                    "programs of their own in one process"
                )
            entering.append(values[0])
            leaving.append(shapes[0][2][from_before.pop()])
    final = tuple(
        (arrival.value, shapes[0][2][made[-1][arrival.value]])
        for arrival in cut.parts[last + 1].arrivals
        if arrival.value in made[-1]
    )
    return Alike(cut.parts[first].equations, tuple(stacked), tuple(shared), tuple(entering), tuple(leaving), final)


def _canonical(flat: FlatProgram, equations: Sequence[Equation]) -> tuple[list[Any], list[int], list[int]]:
    """A signature of what equations do, whatever their values are called, and their inputs and results in order of
    first mention."""
    names: dict[int, int] = {}
    inputs: list[int] = []
    outputs: list[int] = []
    signature = []
    for equation in equations:
        operands: list[Any] = []
        for atom in equation.inputs:
            if not isinstance(atom, int):
                operands.append((str(atom.val), str(atom.aval)))
                continue
            if atom not in names:
                names[atom] = len(names)
                inputs.append(atom)
            operands.append(names[atom])
        for value in equation.outputs:
            names[value] = len(names)
            outputs.append(value)
        params = ADDRESS.sub("", str(sorted(equation.params.items(), key=lambda item: item[0])))
        if equation.primitive.name in OWN_DERIVATIVES or RULE.search(params):
            params += _derivative(flat, equation)
        shapes = [str(aval_of(flat, atom)) for atom in (*equation.inputs, *equation.outputs)]
        signature.append((equation.primitive.name, params, tuple(operands), tuple(shapes)))
    return signature, inputs, outputs


def _derivative(flat: FlatProgram, equation: Equation) -> str:
    """A text of what the derivative of an equation with a rule of its own does. The rule is a function, and two of them
    print alike whatever they close over."""
    known = {
        value: flat.avals[value] for value in equation.values if jnp.issubdtype(flat.avals[value].dtype, jnp.floating)
    }
    others = [value for value in dict.fromkeys(equation.values) if value not in known]
    made = [value for value in equation.outputs if jnp.issubdtype(flat.avals[value].dtype, jnp.floating)]

    def run(given: list[jax.Array], rest: list[jax.Array], cotangents: list[jax.Array]) -> Any:
        def forward(given: list[jax.Array]) -> list[jax.Array]:
            values = dict(zip(known, given, strict=True)) | dict(zip(others, rest, strict=True))
            evaluate([equation], values)
            return [values[value] for value in made]

        return jax.vjp(forward, given)[1](cotangents)

    avals = [[abstract(flat.avals[v]) for v in of] for of in (known, others, made)]
    program = flatten(jax.make_jaxpr(run)(*avals))
    constants = [np.asarray(value).tobytes() for value in program.constants.values()]
    equations = [(e.primitive.name, str(e.params), e.inputs, e.outputs) for e in program.equations]
    return ADDRESS.sub("", str((equations, program.outputs))) + hashlib.sha256(b"".join(constants)).hexdigest()
