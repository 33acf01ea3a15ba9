"""Signatures of programs that do the same to other values, found before the programs are traced or lowered.

Tracing and lowering are Python's work, and beside XLA's the longest part of a first step. The comparison here is exact,
so that programs which compare equal are one program; where that cannot be told (side effects, constants of their own,
derivative rules and inner programs that were traced apart), there is no signature, and each is traced by itself.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shardwright.backends.jax.pipeline.stage_functions import (
    FunctionsOfStage,
    Key,
    Operands,
    PassFunctions,
    StageFunction,
    StageFunctions,
)
from shardwright.backends.jax.program.cut import Cut
from shardwright.backends.jax.program.equations import NO_OTHERS, Atom, Equation, FlatProgram

NUMBERED = frozenset({"m", "kept", "host", "between", "sum", "row", "fault", "marker"})
"""The kinds of operand whose number is no value of the program."""


def signature(
    flat: FlatProgram,
    equations: Iterable[Equation],
    inputs: Sequence[int],
    outputs: Iterable[Atom],
    away: Collection[int] = (),
    others: Mapping[int, str] = NO_OTHERS,
) -> Hashable | None:
    """A key of what equations make of inputs, whatever values are called; units in ``away`` differ from others, and
    those in ``others`` by their mode. None where that cannot be told.

    Parameters of equations that Python calls equal, such as 0.0 and -0.0, are taken as equal; constants are compared
    bit by bit.
    """
    names = {value: position for position, value in enumerate(inputs)}
    parts: dict[Any, int] = {}
    """The units and regions, numbered in the order in which they come."""

    def named(atom: Atom) -> Hashable:
        if isinstance(atom, int):
            return names[atom]
        return np.asarray(atom.val).tobytes(), atom.aval

    does: list[Hashable] = []
    try:
        for equation in equations:
            if equation.effects:
                return None
            region = equation.region
            does.append((
                equation.primitive,
                tuple((name, type(value), value) for name, value in equation.params.items()),
                tuple(named(atom) for atom in equation.inputs),
                equation.context,
                equation.is_layers,
                None if equation.unit is None else parts.setdefault(("unit", equation.unit), len(parts)),
                equation.unit in away,
                None if equation.unit is None else others.get(equation.unit),
                region and (parts.setdefault(("region", id(region)), len(parts)), region.policy, region.prevent_cse),
            ))  # fmt: skip
            for value in equation.outputs:
                names[value] = len(names)
        found = tuple(flat.avals[value] for value in inputs), tuple(does), tuple(named(atom) for atom in outputs)
        hash(found)
    except (KeyError, TypeError, ValueError):  # a constant of the program's own, a parameter without a hash
        return None
    return found


class TracedStages:
    """The functions of every stage; those of stages that are alike are traced once."""

    def __init__(self, cut: Cut, operands: Operands, recompute: str) -> None:
        self.cut, self.operands, self.recompute = cut, operands, recompute
        self._known: dict[Hashable, tuple[Any, list[int], list[tuple[int, int]]]] = {}

    def of(self, stage: int) -> StageFunctions:
        """The functions of a stage: for a stage like an earlier one, the earlier one's with this one's operands."""
        found, like = self._traced(stage, lambda own: own.build())
        first_half = found.input_grad and like(found.input_grad)
        return StageFunctions(like(found.forward), like(found.backward), first_half, like(found.weight_grad))

    def passes(self, stage: int) -> PassFunctions:
        """The functions of a stage whose passes have nothing on the device between them."""
        found, like = self._traced(stage, lambda own: own.passes())
        return PassFunctions(like(found.ahead), like(found.keeping), like(found.again), like(found.backward))

    def _traced(
        self, stage: int, build: Callable[[FunctionsOfStage], Any]
    ) -> tuple[Any, Callable[[StageFunction], StageFunction]]:
        """The functions of a stage or of an earlier one like it, and what gives them this one's operands."""
        kind, values, users = self._described(stage)
        if kind is None or kind not in self._known:
            found = build(FunctionsOfStage(self.cut, stage, self.operands, self.recompute))
            if kind is not None:
                self._known[kind] = found, values, users
            return found, lambda function: function
        found, other_values, other_users = self._known[kind]
        names = dict(zip(other_values, values, strict=True))
        cotangents = dict(zip(other_users, users, strict=True))

        def renamed(key: Key) -> Key:
            kind, number, user = key
            if kind in NUMBERED:
                return key
            if kind == "cotangent" and not self.operands.sums_cotangents:
                return (kind, *cotangents[number, user])
            return (kind, names[number], user)

        def like(function: StageFunction) -> StageFunction:
            reads, makes = (tuple(renamed(key) for key in keys) for keys in (function.reads, function.makes))
            return replace(function, reads=reads, makes=makes)

        return found, like

    def _described(self, stage: int) -> tuple[Hashable | None, list[int], list[tuple[int, int]]]:
        """A key of what a stage does, the values that its operands are, and (departure, stage that reads it)."""
        cut, operands, part = self.cut, self.operands, self.cut.parts[stage]
        arrivals = [arrival.value for arrival in part.arrivals]
        inputs = [*part.weights, *arrivals, *part.sources]
        users = [(value, user) for value in part.departures for user in cut.readers(stage, value)]
        read = Counter(value for value, _ in users)
        carried = {position: value for value, position in operands.state.items()}
        results = [carried.get(p, ("sum", p)) for p in part.results]
        program = signature(
            cut.flat, part.equations, inputs, [*part.departures, *(cut.flat.outputs[p] for p in part.results)],
            operands.away, operands.others,
        )  # fmt: skip
        if program is None:
            return None, [], []
        kind = (
            program,
            tuple((value in cut.live, operands.copies.get(value)) for value in part.weights),
            tuple(arrival.differentiable for arrival in part.arrivals),
            tuple(self._source(value) for value in part.sources),
            tuple((value in cut.live, read[value]) for value in part.departures),
            tuple(inputs.index(value) if isinstance(value, int) else value for value in results),
        )
        return kind, [*inputs, *part.departures], users

    def _source(self, value: int) -> Hashable:
        """A key of the kind of an argument that is no parameter."""
        kind, _, _ = self.operands.key(value)
        if kind != "batch":
            return kind
        whole = self.operands.batch_avals[value]
        return kind, self.operands.batch[value], whole.shape, whole.dtype
