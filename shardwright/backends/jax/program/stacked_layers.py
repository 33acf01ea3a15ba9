"""Stacks: parameters whose first dim counts layers, read row by row by the stages that hold those rows."""

from collections.abc import Sequence
from dataclasses import replace

import jax

from shardwright.backends.jax.program.equations import Equation, FlatProgram
from shardwright.backends.jax.state.ownership import Rows
from shardwright.core.errors import PlanError


def take_rows(
    flat: FlatProgram, run: Sequence[Equation], value: int, rows: Rows, name: str, stage: int
) -> tuple[int, list[Equation]]:
    """A value for the rows that a stage holds, and the stage's equations reading that instead of the whole stack.

    Raises PlanError when the stage reads more than its rows.
    """
    aval = flat.avals[value]
    piece = flat.new(aval.update(shape=(rows[1] - rows[0], *aval.shape[1:])))
    changed = []
    for equation in run:
        if value in equation.inputs:
            read = rows_of(equation, flat)
            if read is None or read[0] < rows[0] or read[1] > rows[1]:
                wanted = "the whole of it" if read is None else f"its rows {read[0]} to {read[1] - 1}"
                raise PlanError(
                    f"stage {stage} holds rows {rows[0]} to {rows[1] - 1} of {name}, {aval.shape}, and reads {wanted} "
                    f"in {equation.primitive.name}: a stack that is cut is read by nothing but the loop over "
                    "it; give the function that was captured"
                )
            starts, limits = equation.params["start_indices"], equation.params["limit_indices"]
            params = {
                **equation.params,
                "start_indices": (starts[0] - rows[0], *starts[1:]),
                "limit_indices": (limits[0] - rows[0], *limits[1:]),
            }
            equation = replace(equation, params=params, inputs=(piece,))
        changed.append(equation)
    return piece, changed


def rows_of(equation: Equation, flat: FlatProgram) -> Rows | None:
    """The rows that a slice takes; None for anything else."""
    if equation.primitive is not jax.lax.slice_p or not isinstance(equation.inputs[0], int):
        return None
    shape = flat.avals[equation.inputs[0]].shape
    starts, limits = equation.params["start_indices"], equation.params["limit_indices"]
    strides = equation.params["strides"]
    whole = tuple(starts[1:]) == (0,) * (len(shape) - 1) and tuple(limits[1:]) == tuple(shape[1:])
    return (starts[0], limits[0]) if whole and (strides is None or strides[0] == 1) else None
