"""The program of a microbatch in the slices that a plan says."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwright.backends.jax.capture.trace import TracedCall
from shardwright.backends.jax.program.cut import HEAVY, Placer
from shardwright.backends.jax.program.equations import Equation, FlatProgram
from shardwright.backends.jax.program.state_places import Carried
from shardwright.backends.jax.slices.reading import Reading
from shardwright.backends.jax.slices.unrolled import Unrolled, unrolled
from shardwright.core.errors import CaptureError
from shardwright.core.plan.plan import Plan


def in_slices(
    flat: FlatProgram,
    plan: Plan,
    weights: Mapping[int, str],
    batch: Mapping[int, int],
    leaves: Collection[int],
    state: Mapping[int, Carried],
    calls: Sequence[TracedCall],
    name: str,
) -> Unrolled:
    """The program unrolled over the plan's slices.

    weights: the arguments that are parameters, and their names; batch: those that have the sequence, and their dims of
    it; leaves: all that are of the batch; state: those that carry what the model changes; calls: the module calls of
    the program; name: of the model, for messages.

    Raises CaptureError for a program that cannot run in slices: it says what forbids it.
    """
    lengths, tokens = plan.decision.slice_lengths, sum(plan.decision.slice_lengths)
    reading = Reading(flat, tokens)
    reading.read(batch, weights, leaves)
    units = _Units(flat, plan, weights, calls)
    _require_sliceable(reading, units, name)
    reading.settle()
    planned = plan.parameter_stages("jax")
    weight_stages = {value: planned.get(name, ()) for value, name in weights.items()}
    placed = Placer(flat, plan.stages, weight_stages, state).run()
    found = unrolled(reading, lengths, placed, plan.stages, _made_anywhere(flat, {*weights, *state}))
    checks = reading.masking.checks.values()
    return replace(found, checks=tuple((c, units.path(flat.equations[c.position]) or name) for c in checks))


def sequence_dims(
    shapes: Sequence[tuple[tuple[int, ...], bool, int | None]], lengths: Sequence[int], name: str
) -> dict[int, int]:
    """The sequence dim of each leaf of a microbatch that has one, by its position: dim 1, behind the samples, of the
    first leaf of whole numbers with two dims or more, and the dims of its size in others; else dim 1 of the first leaf
    of vectors.

    shapes: of each leaf (its shape without samples' dim, whether it is of whole numbers, its batch dim in it).

    Raises CaptureError where no leaf has a sequence, or it is not as long as the slices together.
    """
    tokens = [n for n, (shape, whole, dim) in enumerate(shapes) if whole and dim is not None and len(shape) >= 2]
    vectors = [n for n, (shape, whole, dim) in enumerate(shapes) if not whole and dim is not None and len(shape) == 3]
    if not (tokens or vectors):
        raise CaptureError(
            f"{name} has no sequence among the leaves of its batch: expected tokens of shape [batch, sequence], or "
            f"vectors of shape [batch, sequence, width]"
        )
    first = shapes[(tokens or vectors)[0]]
    others = [size for d, size in enumerate(first[0]) if d != first[2]]
    length = others[0]
    if length != sum(lengths):
        raise CaptureError(
            f"the plan's slices {_shown(lengths)} have {sum(lengths)} tokens in all, and the batch has sequences of "
            f"{length}: give it {sum(lengths)}, padded or packed, or plan with slices that add up"
        )
    found = {}
    for number, (shape, _, batch_dim) in enumerate(shapes):
        dims = [d for d, size in enumerate(shape) if size == length and d != batch_dim]
        if dims and batch_dim is not None:
            found[number] = dims[0]
    return found


class _Units:
    """The units of equations: of the module calls that they were traced in, or of the parameters that they read."""

    def __init__(self, flat: FlatProgram, plan: Plan, weights: Mapping[int, str], calls: Sequence[TracedCall]) -> None:
        self.calls = calls
        bound = plan.binding("jax").units
        self.count = len(bound)
        self.of_call = {(c.path, c.occurrence): number for number, unit in enumerate(bound) for c in unit.calls}
        users: dict[str, set[int]] = {}
        for number, unit in enumerate(bound):
            for _, name, _ in unit.parameters:
                users.setdefault(name, set()).add(number)
        self.of_value: dict[int, frozenset[int]] = {v: frozenset(users.get(n, ())) for v, n in weights.items()}
        for equation in flat.equations:
            given = list(equation.values)
            if given and all(v in self.of_value for v in given):
                units = frozenset[int]().union(*(self.of_value[v] for v in given))
                self.of_value.update((v, units) for v in equation.outputs)

    def last_of(self, equation: Equation) -> int | None:
        """The unit of an equation, the last one of several that share a parameter; None where it is of none."""
        number = equation.call
        while self.calls:
            call = self.calls[number]
            if (call.path, call.occurrence) in self.of_call:
                return self.of_call[call.path, call.occurrence]
            if number in (0, call.parent):
                break
            number = call.parent
        read = [self.of_value[v] for v in equation.values if self.of_value.get(v)]
        if equation.is_layers:  # a loop over all of these units
            return min((min(units) for units in read), default=None)
        return max((max(units) for units in read), default=None)

    def path(self, equation: Equation) -> str:
        return self.calls[equation.call].path if equation.call < len(self.calls) else ""


def _require_sliceable(reading: Reading, units: _Units, name: str) -> None:
    """Raise CaptureError for a program of which units before the last need all tokens at once."""
    flat = reading.flat
    if not reading.sliced:
        raise CaptureError(f"{name} has no op along its sequence that can run slice by slice: leave out slices")
    behind = [e for e in flat.equations if e.outputs and reading.place.get(e.outputs[0]) == "behind"]
    early = [e for e in behind if (unit := units.last_of(e)) is not None and unit < units.count - 1]
    if not early:
        return
    reasons = [
        f"{flat.equations[n].primitive.name} in {units.path(flat.equations[n]) or 'the loss function'} {why}"
        for n, why in reading.mixing.items()
    ]
    more = f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    raise CaptureError(
        f"{name} cannot run in slices of its sequence: {'; '.join(reasons[:3])}{more}. Slices follow each other where "
        f"a token needs only what came before it: leave out slices, or pin slices=1"
    )


def _made_anywhere(flat: FlatProgram, given: set[int]) -> list[bool]:
    """Whether each equation may be made again wherever it is read: it costs little, and follows from no parameter, no
    state and no random draw."""
    free = {*flat.constants, *flat.arguments} - given
    found = []
    for equation in flat.equations:
        name = equation.primitive.name
        is_free = (
            not equation.effects
            and name not in HEAVY
            and name not in ("dot_general", "random_bits")
            and all(v in free for v in equation.values)
        )
        free.update(equation.outputs if is_free else ())
        found.append(is_free)
    return found


def _shown(numbers: Sequence[Any]) -> str:
    return " + ".join(map(str, numbers)) if len(numbers) < 9 else f"of {len(numbers)} lengths"
