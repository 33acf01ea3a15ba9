"""A program over whole stacks rewritten into one over their pieces.

The optimizer is traced over the parameters as they were given; a stack that stages share is then never whole anywhere.
An equation that treats every entry by itself is run piece by piece; a reduction over all layers is one of every piece,
combined.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from shardwright.backends.jax.capture.inner_programs import rows_between
from shardwright.backends.jax.program.equations import Atom, Equation, FlatProgram, aval_of, needed
from shardwright.core.errors import MissingCapabilityError

Rows = tuple[int, int]
Pieces = tuple[Rows, ...]

COMBINED = {
    "reduce_sum": jax.lax.add_p,
    "reduce_max": jax.lax.max_p,
    "reduce_min": jax.lax.min_p,
    "reduce_and": jax.lax.and_p,
    "reduce_or": jax.lax.or_p,
    "reduce_prod": jax.lax.mul_p,
}


def unstack(flat: FlatProgram, arguments: Sequence[Pieces | None], outputs: Sequence[Pieces | None]) -> FlatProgram:
    """The program over pieces: every stacked argument and output has become its pieces, in order. ``arguments`` and
    ``outputs`` say which are stacks, and where they are cut; None for all others.

    Raises MissingCapabilityError for an equation that mixes the layers of a stack otherwise.
    """
    if not any(arguments) and not any(outputs):
        return flat
    return _Rewriter(flat).run(arguments, outputs)


class _Rewriter:
    def __init__(self, flat: FlatProgram) -> None:
        self.old = flat
        self.new = FlatProgram(avals=list(flat.avals), constants=dict(flat.constants))
        self.cuts: dict[int, Pieces] = {}
        self.parts: dict[int, list[int]] = {}
        """A stacked value → its pieces."""

    def run(self, arguments: Sequence[Pieces | None], outputs: Sequence[Pieces | None]) -> FlatProgram:
        listed: list[int] = []
        for value, cut in zip(self.old.arguments, arguments, strict=True):
            if cut is None:
                listed.append(value)
            else:
                listed += self._declare(value, cut)
        self.new.arguments = tuple(listed)
        for equation in self.old.equations:
            stacked = [v for v in equation.values if v in self.cuts]
            if stacked:
                self._rewrite(equation, self.cuts[stacked[0]])
            else:
                self.new.equations.append(equation)
        results: list[Atom] = []
        for atom, cut in zip(self.old.outputs, outputs, strict=True):
            results += [atom] if cut is None else [self._piece(atom, cut, i) for i in range(len(cut))]
        self.new.outputs = tuple(results)
        self.new.equations = needed(self.new.equations, (a for a in results if isinstance(a, int)))
        return self.new

    def _declare(self, value: int, cut: Pieces) -> list[int]:
        aval = self.old.avals[value]
        self.cuts[value] = cut
        self.parts[value] = [self.new.new(aval.update(shape=(end - start, *aval.shape[1:]))) for start, end in cut]
        return self.parts[value]

    def _rewrite(self, equation: Equation, cut: Pieces) -> None:
        length = cut[-1][1]
        shapes = [self.old.avals[out].shape for out in equation.outputs]
        name, params = equation.primitive.name, equation.params
        if name in COMBINED and 0 in params["axes"]:
            self._reduce(equation, cut)
            return
        by_entry = all(shape[:1] == (length,) for shape in shapes) and all(
            self._fits(atom, length) for atom in equation.inputs
        )
        if not by_entry or not _row_by_row(name, params):
            raise MissingCapabilityError(
                f"the optimizer mixes the layers of a stacked parameter, of shape {self._shape(equation.inputs[0])}, "
                f"in {name}: stages hold its layers apart; give layers as parameters of their own, or plan pp=1"
            )
        for out in equation.outputs:
            self._declare(out, cut)
        for number, (start, end) in enumerate(cut):
            inputs = tuple(self._piece(atom, cut, number) for atom in equation.inputs)
            made = tuple(self.parts[out][number] for out in equation.outputs)
            self.new.equations.append(
                replace(equation, params=_resized(params, length, end - start), inputs=inputs, outputs=made)
            )

    def _fits(self, atom: Atom, length: int) -> bool:
        shape = self._shape(atom)
        return not shape or shape[0] == length

    def _shape(self, atom: Atom) -> tuple[int, ...]:
        return tuple(aval_of(self.old, atom).shape)

    def _reduce(self, equation: Equation, cut: Pieces) -> None:
        """Reduce each piece by itself, then all together."""
        (out,) = equation.outputs
        (whole,) = equation.inputs
        found: int | None = None
        for number in range(len(cut)):
            part = self.new.new(self.old.avals[out])
            self.new.equations.append(replace(equation, inputs=(self._piece(whole, cut, number),), outputs=(part,)))
            if found is None:
                found = part
                continue
            last = number == len(cut) - 1
            joined = out if last else self.new.new(self.old.avals[out])
            combine = COMBINED[equation.primitive.name]
            self.new.equations.append(replace(equation, primitive=combine, params={}, inputs=(found, part),
                                              outputs=(joined,)))  # fmt: skip
            found = joined

    def _piece(self, atom: Atom, cut: Pieces, number: int) -> Atom:
        """A piece of a value: one of a stack's own, the rows of another array, or the whole of a scalar."""
        shape = self._shape(atom)
        if not shape:
            return atom
        if isinstance(atom, int) and atom in self.parts:
            return self.parts[atom][number]
        start, end = cut[number]
        aval = aval_of(self.old, atom)
        part = self.new.new(aval.update(shape=(end - start, *shape[1:])))
        context = self.old.equations[0].context
        self.new.equations.append(Equation(jax.lax.slice_p, rows_between(shape, start, end), (atom,), (part,), context))
        return part


def _row_by_row(name: str, params: Any) -> bool:
    """Whether an equation whose operands and results all count layers in their first dim keeps layers apart."""
    if name == "broadcast_in_dim":
        dims = params["broadcast_dimensions"]
        return bool(dims) and dims[0] == 0
    if name in COMBINED or name in ("argmax", "argmin"):
        return 0 not in params["axes"]
    if name == "dot_general":
        _, (left, right) = params["dimension_numbers"]
        return bool(left) and left[0] == 0 and right[0] == 0
    if name == "transpose":
        return bool(params["permutation"][0] == 0)
    apart = {"reshape", "sort", "cumsum", "rev", "gather", "scatter", "concatenate", "pad", "slice", "dynamic_slice"}
    return name not in apart and not any(hasattr(v, "jaxpr") or hasattr(v, "eqns") for v in params.values())


def _resized(params: Any, length: int, rows: int) -> Any:
    """The parameters of an equation that spell the result's shape, for fewer rows."""
    changed = dict(params)
    if tuple(changed.get("shape") or ())[:1] == (length,):
        changed["shape"] = (rows, *changed["shape"][1:])
    return changed
