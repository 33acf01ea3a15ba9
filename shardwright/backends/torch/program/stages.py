"""Division of a recorded program into stages: the steps that each stage runs, and the values that flow between them.

Unit calls are where the plan puts them. The steps between units are cut where the fewest bytes cross, as in every
framework (`core.partition.between_units`). A step that depends on the batch and on constants alone runs again on every
stage that needs it, since all of them have the batch.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwright.backends.torch.program.program import BufferRef, ParameterRef, Program, Step, ValueRef, steps_behind
from shardwright.backends.torch.program.value_names import value_names
from shardwright.core.errors import CaptureError, PlanError
from shardwright.core.partition.between_units import ProgramOp, open_stages


@dataclass(frozen=True, slots=True)
class Edge:
    """The values that one stage sends to another for each microbatch; those in ``gradients`` send a gradient back."""

    index: int
    source: int
    target: int
    values: tuple[int, ...]
    gradients: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StagePart:
    """The work of one stage for one microbatch."""

    stage: int
    inputs: tuple[int, ...]
    """The values of the batch that are used here."""
    steps: tuple[Step, ...]
    release: tuple[tuple[int, ...], ...]
    """The values that nothing on this stage uses any more, after each step."""
    receives: tuple[Edge, ...]
    sends: tuple[Edge, ...]
    losses: tuple[int, ...]
    """Indices of the losses that are computed here."""
    results: tuple[int, ...]
    """Positions of the leaves of the step's result that are computed here."""
    copied: frozenset[int]
    """Values that are copied first, because a step writes to them after they were received, or before they are sent."""
    parameters: frozenset[str]
    buffers: frozenset[str]


@dataclass(frozen=True, slots=True)
class Division:
    """A program divided into stages."""

    program: Program
    parts: tuple[StagePart, ...]
    edges: tuple[Edge, ...]
    result_stage: tuple[int | None, ...]
    """The stage that computes each leaf of the result; None for a leaf that is no tensor."""
    loss_stage: tuple[int, ...]


def divide(
    program: Program,
    stage_of_call: Mapping[tuple[str, int], int],
    parameter_stages: Mapping[str, Sequence[int]],
    stages: int,
) -> Division:
    """Divide a program.

    Raises PlanError when a unit needs a value that a later stage computes, CaptureError when a stage would write to
    memory that another stage shares.
    """
    where = _place(program, stage_of_call, parameter_stages, stages)

    def stage_of_value(value: int) -> int | None:
        step = program.values[value].step
        return None if step is None else where[step]

    def stage_or_default(value: int, default: int) -> int:
        stage = stage_of_value(value)
        return default if stage is None else stage

    result_stage: list[int | None] = []
    for leaf in program.result.leaves:
        if isinstance(leaf, ValueRef):
            result_stage.append(stage_or_default(leaf.value, 0))
        elif isinstance(leaf, ParameterRef):
            result_stage.append(min(parameter_stages.get(leaf.name, (0,))))
        else:
            result_stage.append(0 if isinstance(leaf, BufferRef) else None)
    loss_stage = tuple(stage_or_default(loss.value, stages - 1) for loss in program.losses)
    _check_writes(program, where)
    live = _live_steps(program)
    wanted = [_wanted(program, s, where, live, result_stage, loss_stage) for s in range(stages)]
    uphill = _values_with_gradient(program)
    edges = _edges(program, wanted, stage_of_value, uphill)
    parts = tuple(
        _part(program, s, steps, values, edges, result_stage, loss_stage) for s, (steps, values) in enumerate(wanted)
    )
    return Division(program, parts, edges, tuple(result_stage), loss_stage)


def _place(
    program: Program,
    stage_of_call: Mapping[tuple[str, int], int],
    parameter_stages: Mapping[str, Sequence[int]],
    stages: int,
) -> list[int | None]:
    """The stage of every step; None for a step that every stage can compute from the batch."""
    everywhere, wished = _wishes(program, stage_of_call, parameter_stages, stages)
    together = {program.values[old].memory for step in program.steps for _, old in step.renewals}
    where: list[int | None] = []
    for step in program.steps:
        before = [where[made] for v in step.reads if (made := program.values[v].step) is not None]
        latest = max((stage for stage in before if stage is not None), default=None)
        if step.path is not None:
            stage = stage_of_call[step.path, step.occurrence]
            if latest is not None and latest > stage:
                raise PlanError(
                    f"{step.name} is on stage {stage} and needs what stage {latest} computes: the stages of this plan "
                    f"do not follow the order of the model; plan anew from a capture of this model"
                )
            where.append(stage)
            continue
        if step.stage is not None:
            if latest is not None and latest > step.stage:
                raise PlanError(
                    f"{step.name} on stage {step.stage} takes what stage {latest} computes: plan anew from a capture "
                    f"of this model"
                )
            where.append(step.stage)
            continue
        if step.index in everywhere:
            where.append(None)
        elif latest is not None and together & {program.values[v].memory for v in (*step.reads, *_made(step))}:
            where.append(latest)  # what shares memory that is written to stays together
        else:
            where.append(max(wished[step.index], latest or 0))
    return where


def _wishes(
    program: Program,
    stage_of_call: Mapping[tuple[str, int], int],
    parameter_stages: Mapping[str, Sequence[int]],
    stages: int,
) -> tuple[set[int], list[int]]:
    """The steps that every stage can compute from the batch, and the stage where each of the others would run but for
    its inputs.

    A view of a parameter is taken anew where it is used. Other functions of parameters alone run where those are, so
    that no stage holds parameters for their sake.
    """
    everywhere: set[int] = set()
    ops = []
    for step in program.steps:
        stage = step.stage if step.path is None else stage_of_call[step.path, step.occurrence]
        homes = [parameter_stages[name] for name in sorted(step.parameters) if parameter_stages.get(name)]
        made = [program.values[v].step for v in step.reads]
        if stage is None and all(i is None or i in everywhere for i in made):
            if step.views_parameter or not homes:
                everywhere.add(step.index)
            else:
                stage = max(min(home) for home in homes)
        ops.append(ProgramOp(tuple(step.reads), _made(step), stage, frozenset(itertools.chain(*homes))))

    def size_bytes(value: int) -> int:
        held = program.values[value]
        free = held.step is None or held.step in everywhere
        return 0 if free else math.prod(held.shape) * held.dtype.itemsize

    return everywhere, open_stages(ops, stages, size_bytes)


def _made(step: Step) -> tuple[int, ...]:
    """The values that a step makes."""
    found = [*step.outputs, *(v for _, outputs in step.object_outputs for v in outputs)]
    return (*(v for v in found if v is not None), *(new for new, _ in step.renewals))


def _check_writes(program: Program, where: Sequence[int | None]) -> None:
    """Refuse a write on one stage to memory that a tensor made on another stage shares."""
    for step in program.steps:
        for _, old in step.renewals:
            made = program.values[old].step
            home = None if made is None else where[made]
            if old not in step.written and home is not None and home != where[step.index]:
                raise CaptureError(
                    f"{step.name} on stage {where[step.index]} writes in place to memory that a tensor of stage {home} "
                    f"shares and that is used again afterwards: make a copy (.clone()) before the write"
                )


def _live_steps(program: Program) -> set[int]:
    """The indices of unit calls, of attributes that are set, and of all steps that they, the losses and the result
    need."""
    live = {step.index for step in program.steps if step.path is not None or step.stage is not None}
    wanted = program.given_away().union(*(program.steps[i].reads for i in live))
    return live | steps_behind(program.values, program.steps, wanted)


def _wanted(
    program: Program,
    stage: int,
    where: Sequence[int | None],
    live: set[int],
    result_stage: Sequence[int | None],
    loss_stage: Sequence[int],
) -> tuple[set[int], set[int]]:
    """The steps that a stage runs, and every value that it needs, its own included."""
    steps = {i for i in live if where[i] == stage}
    values: set[int] = set()
    pending = [v for i in steps for v in program.steps[i].reads]
    pending += program.given_away(_of_stage(stage, loss_stage), _of_stage(stage, result_stage))
    while pending:
        value = pending.pop()
        if value in values:
            continue
        values.add(value)
        made = program.values[value].step
        if made is not None and where[made] is None and made not in steps:
            steps.add(made)
            pending.extend(program.steps[made].reads)
    return steps, values


def _of_stage(stage: int, homes: Sequence[int | None]) -> tuple[int, ...]:
    """The positions of what has its home on a stage."""
    return tuple(i for i, home in enumerate(homes) if home == stage)


def _values_with_gradient(program: Program) -> set[int]:
    """The values through which a gradient can flow back from a loss."""
    found: set[int] = set()
    pending = [loss.value for loss in program.losses]
    while pending:
        value = pending.pop()
        if value in found or not program.values[value].carries_gradient:
            continue
        found.add(value)
        made = program.values[value].step
        if made is not None and program.steps[made].grad_enabled:
            pending.extend(program.steps[made].reads)
    return found


def _edges(
    program: Program,
    wanted: Sequence[tuple[set[int], set[int]]],
    stage_of_value: Callable[[int], int | None],
    uphill: set[int],
) -> tuple[Edge, ...]:
    carried: dict[tuple[int, int], list[int]] = {}
    names = value_names(program)  # both ends take the values of a message in the same order
    for target, (_, values) in enumerate(wanted):
        for value in sorted(values, key=lambda value: (names[value], value)):
            source = stage_of_value(value)
            if source is None or source == target:
                continue
            if source > target:
                raise PlanError(
                    f"stage {target} needs what stage {source} computes: plan anew from a capture of this model"
                )
            carried.setdefault((source, target), []).append(value)
    return tuple(
        Edge(index, source, target, tuple(values), tuple(v for v in values if v in uphill))
        for index, ((source, target), values) in enumerate(sorted(carried.items()))
    )


def _part(
    program: Program,
    stage: int,
    chosen: set[int],
    values: set[int],
    edges: Sequence[Edge],
    result_stage: Sequence[int | None],
    loss_stage: Sequence[int],
) -> StagePart:
    steps = tuple(program.steps[i] for i in sorted(chosen))
    receives = tuple(edge for edge in edges if edge.target == stage)
    sends = tuple(edge for edge in edges if edge.source == stage)
    losses, results = _of_stage(stage, loss_stage), _of_stage(stage, result_stage)
    written = {memory for step in steps for memory in step.memories}
    shared = {v for edge in (*receives, *sends) for v in edge.values}
    shared |= {v for v in values if program.values[v].input is not None}
    copied = frozenset(v for v in shared if program.values[v].memory in written)
    kept = {v for edge in sends for v in edge.values} | program.given_away(losses, results)
    last: dict[int, int] = {}
    for position, step in enumerate(steps):
        for v in (*step.reads, *_made(step)):
            last[v] = position
    release: list[list[int]] = [[] for _ in steps]
    for v, position in last.items():
        if v not in kept:
            release[position].append(v)
    parameters = {name for step in steps for name in step.parameters}
    parameters |= {leaf.name for i in results if isinstance(leaf := program.result.leaves[i], ParameterRef)}
    buffers = {name for step in steps for name in step.buffers}
    buffers |= {leaf.name for i in results if isinstance(leaf := program.result.leaves[i], BufferRef)}
    inputs = tuple(sorted(v for v in values if program.values[v].input is not None))
    return StagePart(
        stage, inputs, steps, tuple(map(tuple, release)), receives, sends, losses, results, copied,
        frozenset(parameters), frozenset(buffers),
    )  # fmt: skip
