"""The memory that every unit of a model keeps and holds in this runtime, counted from the program of its derivative.

Each unit is cut out as a stage of its own, as `pipeline.actions` would run it. The bytes that its forward hands to
its backward are then known (`program.saved_activations`), also for two neighbours as one stage, which keep less than
each for itself. The memory that the backward holds beside them follows from its equations (`liveness`).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import pairwise
from typing import Any

import jax

from shardwright.backends.jax.capture.inner_programs import computes_again
from shardwright.backends.jax.capture.model import Captured
from shardwright.backends.jax.capture.own_checkpoints import with_plain
from shardwright.backends.jax.capture.precision import COMPUTE
from shardwright.backends.jax.capture.steps import Program
from shardwright.backends.jax.capture.trace import TracedCall
from shardwright.backends.jax.machine.mesh import no_mesh
from shardwright.backends.jax.memory.liveness import Liveness, makes_zeros
from shardwright.backends.jax.memory.step_constants import constants_bytes, scaled_sums_bytes
from shardwright.backends.jax.pipeline.stage_functions import (
    FunctionsOfStage,
    Key,
    Operands,
    StageFunction,
    StageFunctions,
)
from shardwright.backends.jax.program.cut import cut
from shardwright.backends.jax.program.equations import FlatProgram
from shardwright.backends.jax.program.flattening import Home, flatten
from shardwright.backends.jax.state.ownership import held_by
from shardwright.core.errors import ShardwrightError
from shardwright.core.model.fold import fold
from shardwright.core.model.graph import Footprint, Graph, KeptTwice, UnitMemory
from shardwright.core.model.structure import UnitBinding, structure_of

_Merged = tuple[int, list[int], list[int]]
_Again = tuple[int, list[int]]
_Counted = tuple[tuple[int, list[int], int, int, int], int, _Merged, tuple[_Again, _Again] | None]
"""The bytes of a unit at one batch: as `_bytes` has them, under selective recompute, as `_merged` has them, as
`_again` has them."""


def with_footprints(captured: Captured) -> Graph:
    """The graph of a model, which finds the memory that its units keep and hold in this runtime when it is asked."""
    graph = captured.graph
    is_wide = any(graph.tensors[p.tensor].dtype == "float32" for p in graph.parameters)

    @cache
    def find(in_16_bits: bool) -> UnitMemory:
        if not in_16_bits:
            return footprints(graph, captured.traces, captured.names, by_calls=captured.is_module)
        if not (find(False).footprints and is_wide):
            return UnitMemory()
        try:
            with no_mesh():  # it is asked when a plan is saved, too, whatever is around that
                traces = captured.traces_in(COMPUTE["bf16"])
            return footprints(graph, traces, captured.names, by_calls=captured.is_module)
        except Exception:  # of the user's model, which does not run so: a training step in 16 bits says it
            return UnitMemory()

    return replace(graph, unit_memory=find)


def footprints(
    graph: Graph, traces: Sequence[tuple[Any, Program]], names: Sequence[str], *, by_calls: bool = False
) -> UnitMemory:
    """The memory that a unit of every class keeps and holds, and that which neighbours keep twice; empty where the
    program cannot be cut into units.

    traces: the closed jaxpr and the program at batch 2 and at batch 3; ``names`` of the model's arrays, the first
    arguments. ``by_calls``: whether one stage computes calls of modules again, and not whole units.
    """
    folded = fold(graph)
    firsts = [members[0] for members in folded.classes]
    _, binding = structure_of(folded)
    classes = [unit.fold_class for unit in folded.units]
    pairs = {both: first for first, both in reversed(list(enumerate(pairwise(classes))))}
    found, selective, together, merged, called, adding, shards = [], [], [], [], [], [], []
    scales: list[list[int]] = []
    try:
        for closed, program in traces:
            whole = partial(_Stages, graph, closed, program.traced, names, binding.units)
            stages = whole(range(len(classes)))
            again = stages
            if computes_again(closed.jaxpr):  # a plan recomputes units in place of the model's own checkpoints
                of_plain = with_plain(closed)
                again = _Stages(graph, of_plain, program.traced, names, binding.units, range(len(classes)))
            plain = [stages.functions(unit) for unit in firsts]
            found.append([_bytes(functions) for functions in plain])
            constants = constants_bytes(closed)
            merged.append([_merged(stages.functions(unit, least=True), constants) for unit in firsts])
            selective.append([_kept_bytes(again.functions(unit, "selective")) for unit in firsts])
            scales.append([scaled_sums_bytes(_program_of(functions.backward)) for functions in plain])
            adding.append([held_bytes(functions.backward, with_gradients=True) for functions in plain])
            shards.append(
                [
                    _of_shards(one, stages.functions(unit, least=True), constants)
                    for one, unit in zip(plain, firsts, strict=True)
                ]
            )
            called.append([_again(again, unit, constants) if by_calls else None for unit in firsts])
            halves = [whole([(unit + odd) // 2 for unit in range(len(classes))]) for odd in (0, 1)]
            both = [(halves[first % 2], (first + 1) // 2) for first in pairs.values()]
            together.append(
                [(_kept_bytes(cut.functions(at)), _kept_bytes(cut.functions(at, least=True))) for cut, at in both]
            )
    except (ShardwrightError, ValueError, TypeError, NotImplementedError):
        # No pipeline trains a program that cannot be cut, or has no derivative (JAX says so in any of these ways): the
        # core counts by kinds of op.
        return UnitMemory()
    finally:
        _program_of.cache_clear()
    twice = []
    for (first, second), kept, kept_3 in zip(pairs, *together, strict=True):
        size = _line(*(of[first][0] + of[second][0] - at[0] for of, at in zip(found, (kept, kept_3), strict=True)))
        merged_size = _line(
            *(of[first][0] + of[second][0] - at[1] for of, at in zip(merged, (kept, kept_3), strict=True))
        )
        if any((*size, *merged_size)):
            twice.append(KeptTwice(first, second, size, merged_size))
    at_2, at_3 = (list(zip(found[at], selective[at], merged[at], called[at], strict=True)) for at in (0, 1))
    each = [
        replace(one, adding=_fullest(*moments), of_shards=tuple(map(_fullest, *divided)), scales=_line(*scaled))
        for one, moments, divided, scaled in zip(
            map(_footprint, at_2, at_3),
            zip(*adding, strict=True),
            zip(*shards, strict=True),
            zip(*scales, strict=True),
            strict=True,
        )
    ]
    return UnitMemory(tuple(each), tuple(twice))


def _footprint(at_2: "_Counted", at_3: "_Counted") -> Footprint:
    (kept, passing, _, between, looped), again, (held, beside, working), called = at_2
    (kept_3, passing_3, wide, between_3, looped_3), again_3, (held_3, beside_3, working_3), called_3 = at_3
    again_at_2_and_3 = list(zip(called or (), called_3 or (), strict=True))
    kept_again = [_line(one[0], other[0]) for one, other in again_at_2_and_3]
    return Footprint(
        kept=_line(kept, kept_3),
        kept_selective=_line(again, again_3),
        passing=_fullest(passing, passing_3),
        wide_share=wide / kept_3 if kept_3 else 0.0,
        between=_line(between, between_3),
        merged_kept=_line(held, held_3),
        merged_passing=_fullest(beside, beside_3),
        merged_working=_fullest(working, working_3),
        gathered_in_loops=_line(looped, looped_3),
        kept_by_calls=(kept_again[0], kept_again[1]) if kept_again else None,
        working_again=tuple(_fullest(one[1], other[1]) for one, other in again_at_2_and_3),
    )


def _line(at_2: int, at_3: int) -> tuple[int, int]:
    """The bytes of one microbatch as (fixed, for each sample), from those at batch 2 and at batch 3."""
    return 3 * at_2 - 2 * at_3, at_3 - at_2


class _Stages:
    """A traced model in stages; ``stage_of_unit`` counts them without a gap."""

    def __init__(
        self,
        graph: Graph,
        closed: Any,
        calls: Sequence[TracedCall],
        names: Sequence[str],
        units: Sequence[UnitBinding],
        stage_of_unit: Sequence[int],
    ) -> None:
        users: dict[str, list[int]] = {}
        for stage, bound in zip(stage_of_unit, units, strict=True):
            for _, name, _ in bound.parameters:
                if stage not in users.setdefault(name, []):
                    users[name].append(stage)
        self.units, self.stage_of_unit = units, stage_of_unit
        trained = {p.name for p in graph.parameters if p.trainable} & users.keys()
        stage_of = [users[name][0] if name in trained and len(users[name]) == 1 else None for name in names]
        own = list(calls)
        flat = flatten(closed, own, _homes(units, own, stage_of_unit), stage_of)
        self.calls = own
        self._traced: dict[tuple[int, str, frozenset[int]], FunctionsOfStage] = {}
        self._built: dict[tuple[int, str, frozenset[int], bool], StageFunctions] = {}
        weights = [(name, value) for name, value in zip(names, flat.arguments, strict=False) if name in trained]
        shapes = [flat.avals[value].shape for _, value in weights]
        holdings = held_by(units, dict(enumerate(stage_of_unit)), [name for name, _ in weights], shapes)
        self.cut = cut(
            flat,
            stage_of_unit[-1] + 1,
            [value for _, value in weights],
            [name for name, _ in weights],
            {name: tuple(using) for name, using in users.items()},
            holdings,
            {},
            [True] * len(weights),
        )

    def beside_calls(self, stage: int) -> frozenset[int]:
        """The module calls around the equations of a stage that are neither calls of its units nor inside of one."""
        ours = zip(self.stage_of_unit, self.units, strict=True)
        known = {(call.path, call.occurrence) for at, bound in ours if at == stage for call in bound.calls}

        def is_inside(number: int) -> bool:
            while (self.calls[number].path, self.calls[number].occurrence) not in known:
                if number == 0 or self.calls[number].parent == number:
                    return False
                number = self.calls[number].parent
            return True

        return frozenset(e.call for e in self.cut.parts[stage].equations if not is_inside(e.call))

    def functions(
        self, stage: int, recompute: str = "none", kept: frozenset[int] = frozenset(), *, least: bool = False
    ) -> StageFunctions:
        """The functions of a stage as one unit that keeps what ``recompute`` says. Equations with side effects are
        never run again, nor those of the module calls ``kept``."""
        key = stage, recompute, kept
        if (*key, least) in self._built:
            return self._built[*key, least]
        if key not in self._traced:
            parts = list(self.cut.parts)
            equations = tuple(
                replace(equation, unit=None if equation.effects or equation.call in kept else stage)
                for equation in parts[stage].equations
            )
            parts[stage] = replace(parts[stage], equations=equations)
            alone = replace(self.cut, parts=tuple(parts))
            self._traced[key] = FunctionsOfStage(
                alone, stage, Operands({}, {}, -1, {}, in_turn=True, draws_in_turn=True), recompute
            )
        self._built[*key, least] = self._traced[key].build(least=least)
        return self._built[*key, least]


def _homes(units: Sequence[UnitBinding], calls: list[TracedCall], stage_of_unit: Sequence[int]) -> Home:
    """The stage of a module call, or of the nearest call around it."""
    unit_of = {
        (c.path, c.occurrence): stage for stage, bound in zip(stage_of_unit, units, strict=True) for c in bound.calls
    }

    def home(number: int) -> tuple[int, int | None] | None:
        while (calls[number].path, calls[number].occurrence) not in unit_of:
            if number == 0 or calls[number].parent == number:
                return None
            number = calls[number].parent
        return unit_of[calls[number].path, calls[number].occurrence], None

    return home


def _fullest(at_2: Sequence[int], at_3: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The bytes at every moment of one program, at batch 2 and at batch 3, as (fixed, for each sample): the moments
    that no other exceeds at every batch."""
    if len(at_2) != len(at_3):
        at_2, at_3 = [max(at_2)], [max(at_3)]
    lines = {_line(*each) for each in zip(at_2, at_3, strict=True)}
    found: list[tuple[int, int]] = []
    for fixed, each in sorted(lines, key=lambda line: (-line[1], -line[0])):
        if all(fixed + each > other + more for other, more in found):
            found.append((fixed, each))
    return tuple(found)


def _bytes(functions: StageFunctions) -> tuple[int, list[int], int, int, int]:
    """The bytes of a unit: those kept from forward to backward, with the operands that the backward reads again; those
    held by the backward beside them, at every moment; the part of the kept bytes that is in fp32; those that pass from
    the input gradient to the weight gradient; and those in which loops add gradients up."""
    wide = [aval for aval in _kept(functions) if aval.dtype == jax.numpy.float32]
    weight_grad = functions.weight_grad
    read = zip(weight_grad.reads, weight_grad.avals, strict=True)
    between = sum(_size(aval) for key, aval in read if key[0] == "between")
    looped = looped_bytes(functions.backward)
    return _kept_bytes(functions), held_bytes(functions.backward), sum(map(_size, wide)), between, looped


def _again(stages: _Stages, unit: int, constants: int) -> tuple[_Again, _Again]:
    """The bytes of a unit of a program that computes calls of its modules alone again, in full and selectively: those
    kept, and those held beside them at every moment, with gradients of parameters on their way to their sums.
    ``constants``: as in `_merged`."""
    beside = stages.beside_calls(unit)
    full, selective = (stages.functions(unit, policy, beside, least=True) for policy in ("full", "selective"))
    return _kept_and_held(full, constants), _kept_and_held(selective, constants)


def _kept_and_held(functions: StageFunctions, constants: int) -> _Again:
    held = held_bytes(functions.backward, with_gradients=True, is_part=True) + drawing_bytes(functions)
    return _kept_bytes(functions), [constants + each for each in held]


def _kept_bytes(functions: StageFunctions) -> int:
    return sum(map(_size, _kept(functions)))


def _kept(functions: StageFunctions) -> list[Any]:
    backward = functions.backward
    return [aval for key, aval in zip(backward.reads, backward.avals, strict=True) if key[0] in ("kept", "arrival")]


def _size(aval: Any) -> int:
    return int(aval.size) * int(getattr(aval.dtype, "itemsize", 8))


def held_bytes(
    function: StageFunction, *, with_gradients: bool = False, is_part: bool = False, of_shards: bool = False
) -> list[int]:
    """The bytes alive at every moment while a compiled function runs. Left out are its operands, results in their
    memory, and, unless ``with_gradients``, gradients of parameters that wait to be added to their sums. ``is_part``
    and ``of_shards``: as `Liveness` has them. What is kept ends where a part of a longer program has read it."""
    program = _program_of(function)
    sums, gradients = _added(program, function.makes)
    read = zip(program.arguments, function.reads, strict=True)
    # Shards keep more beside it than is counted of the whole, as their layouts stand between ops.
    parts = [(value, key[0]) for value, key in read if is_part and not of_shards]
    given = {value for value, kind in parts if kind == "cotangent"}
    ending = {value for value, kind in parts if kind == "kept"} | given
    waiting = () if with_gradients else gradients
    moments = Liveness(program, sums, waiting, is_part=is_part, ending=ending, of_shards=of_shards).moments()
    return [size + sum(map(program.size_bytes, given)) for size in moments]


def drawing_bytes(functions: StageFunctions) -> list[int]:
    """The bytes alive at every random draw of a forward that is part of a longer program, beside what it keeps."""
    program = _program_of(functions.forward)
    sums, _ = _added(program, functions.forward.makes)
    liveness = Liveness(program, sums, is_part=True)
    liveness.moments()
    made = zip(functions.forward.makes, program.outputs, strict=True)
    # What arrives is kept too, but as an argument it is not among the bytes of moments.
    kept = sum(program.size_bytes(atom) for key, atom in made if key[0] == "kept" and isinstance(atom, int))
    return [max(0, size - kept) for size in liveness.draws]


@lru_cache(maxsize=128)
def _program_of(function: StageFunction) -> FlatProgram:
    """The program of a function, traced once for all that is counted of it."""
    return flatten(jax.make_jaxpr(function.function)(*function.avals), opens_rules=True)


def looped_bytes(function: StageFunction) -> int:
    """The bytes in which loops of a compiled function add gradients up, which begin as zeros. XLA makes these when the
    program begins, and keeps them beside what becomes of them."""
    program = _program_of(function)
    zeros = {value for e in program.equations if makes_zeros(e) for value in e.outputs}
    found = 0
    for equation in program.equations:
        if equation.primitive.name == "scan":
            first = equation.params["num_consts"]
            carried = equation.inputs[first : first + equation.params["num_carry"]]
            found += sum(program.size_bytes(v) for v in carried if isinstance(v, int) and v in zeros)
    return found


def _added(program: FlatProgram, makes: Sequence[Key]) -> tuple[set[int], set[int]]:
    """The sums of gradients among a program's results, and the gradients that are added to them."""
    added = (atom for key, atom in zip(makes, program.outputs, strict=True) if key[0] in ("gradient", "sum"))
    sums = {atom for atom in added if isinstance(atom, int)}
    return sums, {value for e in program.equations if not sums.isdisjoint(e.outputs) for value in e.values}


def _merged(least: StageFunctions, constants: int) -> _Merged:
    """The bytes of a unit whose forward and backward are one program that runs in turn (`loss.gradients_in_turn`):
    those kept from one to the other, and those held beside them at every moment, without and with one gradient on its
    way to its sum. ``least``: the functions that keep the fewest bytes, as XLA does that sees both. ``constants``:
    the bytes of `constants_bytes`, which stay all the while."""
    without, adding = (held_bytes(least.backward, with_gradients=added, is_part=True) for added in (False, True))
    kept, drawing = _kept_bytes(least), drawing_bytes(least)
    return kept, [constants + each for each in (*without, *drawing)], [constants + each for each in (*adding, *drawing)]


def _of_shards(functions: StageFunctions, least: StageFunctions, constants: int) -> tuple[list[int], ...]:
    """The bytes at every moment of a unit of which each device runs a shard: of its backward, without and with
    gradients, and the same where forward and backward are one program, with the ``constants`` of the step."""
    return tuple(
        [
            is_part * constants + each
            for each in held_bytes(one.backward, with_gradients=added, is_part=is_part, of_shards=True)
        ]
        for one, is_part in ((functions, False), (least, True))
        for added in (False, True)
    )
