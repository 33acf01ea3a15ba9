"""The program of one microbatch of a training step, traced and cut by the plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardwright.backends.jax.capture.checkpoint_policies import told_apart
from shardwright.backends.jax.capture.precision import computed_in
from shardwright.backends.jax.capture.trace import Recorder, TracedCall
from shardwright.backends.jax.capture.tree import Parts, abstract
from shardwright.backends.jax.loss.microbatches import Microbatches
from shardwright.backends.jax.machine.mesh import DataAxes
from shardwright.backends.jax.pipeline.stage_functions import Operands
from shardwright.backends.jax.program.cut import Cut, cut
from shardwright.backends.jax.program.equations import FlatProgram
from shardwright.backends.jax.program.flattening import Home, flatten
from shardwright.backends.jax.program.state_places import Carried
from shardwright.backends.jax.program.units import name_units
from shardwright.backends.jax.slices.mask_checks import MaskChecks
from shardwright.backends.jax.slices.program import in_slices, sequence_dims
from shardwright.backends.jax.state.ownership import Holding
from shardwright.backends.jax.state.shardings import copies_at
from shardwright.core.errors import MissingCapabilityError, PlanError
from shardwright.core.plan.plan import Plan
from shardwright.core.schedule.passes.slices_as_stages import StageNames


@dataclass(frozen=True, slots=True)
class CutMicrobatch:
    """One microbatch's program in stages, and the roles of its arguments."""

    cut: Cut
    operands: Operands
    random: tuple[int, ...]
    step: int
    state: tuple[int, ...]
    batch: tuple[int, ...]
    specs: dict[int, PartitionSpec]
    """The split over dp and tp of the values that pass between stages."""
    divisor: Callable[[jax.Array], jax.Array]
    """A function that gives the divisor of a step's sums from its `WEIGHT`."""
    paths: tuple[str, ...]
    """The paths of the module calls in the program, by their numbers."""
    axes: DataAxes = "dp"
    """The mesh axes of the replicas."""
    scale: tuple[int, ...] = ()
    """The argument that is a factor of the loss, if there is one."""
    stages: int = 0
    """The stages of the plan. With slices each slice of them is a stage of its own (`slices_as_stages`)."""
    masks: MaskChecks | None = None
    """What of the batch's masks is looked at before a step in slices runs."""

    @property
    def names(self) -> StageNames:
        """The names of the stages, for messages and timelines."""
        return StageNames(self.stages, len(self.cut.parts) // self.stages)

    def home(self, stage: int) -> int:
        """The stage of the plan whose parameters, gradients and sums a stage uses."""
        return stage % self.stages

    def watched(self, replicas: int) -> "CutMicrobatch":
        """The same program, whose stages note which microbatches are not finite."""
        split = {value: list(spec).index(self.axes) for value, spec in self.specs.items() if self.axes in spec}
        return replace(self, operands=replace(self.operands, watched=True, replicas=replicas, split=split))


def cut_microbatch(
    plan: Plan,
    microbatches: Microbatches,
    parts: Parts,
    leaves: Sequence[Any],
    holdings: Sequence[Holding],
    layouts: Sequence[NamedSharding] | None = None,
    *,
    is_scaled: bool = False,
) -> CutMicrobatch:
    """Trace the loss of one microbatch on shapes, and cut it.

    parts: the model taken apart, as shapes; leaves: those of a global batch. layouts: the shardings of whole
    parameters on an abstract mesh, where the program takes them as a step computes with them and makes copies for
    replicas (`Microbatches.copied`); None: it takes what `Microbatches.total` takes, and casts that itself. is_scaled:
    whether the loss is multiplied with an argument. Raises PlanError when the function does not run what was planned.
    """
    split = [jax.eval_shape(lambda leaf, dim=dim: microbatches.split(leaf, dim), abstract(leaf))
             for leaf, dim in zip(leaves, microbatches.dims, strict=True)]  # fmt: skip
    weights_given = jax.tree.leaves(parts.params)
    if layouts is not None:
        weights_given = [computed_in(microbatches.loss.compute, leaf) for leaf in weights_given]
    flat, counts, calls = _trace(plan, microbatches, parts, split, weights_given, is_scaled)
    names = parts.names
    planned = plan.parameter_stages("jax")
    first = 0
    groups = []
    for count in counts:
        groups.append(flat.arguments[first : first + count])
        first += count
    weights, random, (step,), state, (m,), batch, scale = groups
    # State that comes out as it went in is read wherever it is wanted, like an array of the batch.
    changed = [
        (value, name, atom)
        for value, name, atom in zip(state, parts.other_names, flat.outputs[2 : 2 + len(state)], strict=True)
        if not isinstance(atom, int) or atom != value
    ]
    beside = flat.outputs[2 + len(state) :]
    flat.outputs = (*flat.outputs[:2], *(atom for *_, atom in changed), *beside)
    carried = {value: Carried(name, 2 + position) for position, (value, name, _) in enumerate(changed)}
    metrics = range(2 + len(changed), len(flat.outputs))
    sums = 0 if microbatches.metrics is None else len(microbatches.metrics.zeros())
    _refuse_closed_over(flat, parts, weights)
    name_units(flat, plan, dict(zip(weights, names, strict=True)), carried)
    trained = microbatches.loss.trained.mask(parts.params)
    specs: dict[int, PartitionSpec] = {}
    if microbatches.replicas > 1:
        wider = replace(microbatches, replicas=2 * microbatches.replicas)
        more = [
            leaf if dim is None else leaf.update(shape=(leaf.shape[0], wider.replicas, *leaf.shape[2:]))
            for leaf, dim in zip(split, microbatches.dims, strict=True)
        ]
        specs = _batch_specs(flat, _trace(plan, wider, parts, more, weights_given, is_scaled)[0], microbatches)
    stages, masks = plan.stages * plan.decision.slice_count, None
    if plan.decision.slice_count > 1:
        _refuse_stacks(holdings, names)
        sequences = _sequences(plan, microbatches, batch, split)
        in_order = in_slices(
            flat, plan, dict(zip(weights, names, strict=True)), sequences, batch, carried, calls,
            microbatches.loss.name,
        )  # fmt: skip
        if in_order.checks:
            split_by = {value: dim is not None for value, dim in zip(batch, microbatches.dims, strict=True)}
            checks, where = zip(*in_order.checks, strict=True)
            masks = MaskChecks.of(flat, split_by, microbatches.microbatches, checks, where)
        flat = in_order.flat
        specs |= {value: specs[whole] for value, whole in in_order.whole.items() if whole in specs}
    found = cut(flat, stages, weights, names, planned, holdings, carried, trained)
    specs |= _constraints(flat)
    operands = Operands(
        {value: dim is not None for value, dim in zip(batch, microbatches.dims, strict=True)},
        dict(zip(batch, split, strict=True)),
        m,
        {value: entry.output for value, entry in carried.items()},
        tuple(metrics[:sums]),
        tuple(metrics[sums:]),
        away=frozenset(plan.decision.offloaded_units),
        others=dict.fromkeys(plan.decision.other_units, plan.decision.other_recompute or "none"),
        copies=_copies(found, microbatches, layouts) if layouts is not None else {},
    )
    divisor, axes = microbatches.divisor, microbatches.axes
    paths = tuple(call.path for call in calls)
    return CutMicrobatch(
        found, operands, random, step, state, batch, specs, divisor, paths, axes, scale, plan.stages, masks
    )  # fmt: skip


def _refuse_stacks(holdings: Sequence[Holding], names: Sequence[str]) -> None:
    """Raise MissingCapabilityError for a stacked parameter of which stages hold rows."""
    for holding in holdings:
        if holding.rows is not None:
            raise MissingCapabilityError(
                f"the plan has slices, and parameter {names[holding.leaf]} is a stack whose layers lie on several "
                f"stages: the jax runtime of this version runs slices of layers with parameters of their own; make the "
                f"layers modules of their own, or plan without slices"
            )


def _sequences(plan: Plan, microbatches: Microbatches, batch: Sequence[int], split: Sequence[Any]) -> dict[int, int]:
    """The arguments of a microbatch's program that have the sequence, and their dims of it."""
    shapes = []
    for leaf, dim in zip(split, microbatches.dims, strict=True):
        inner = leaf.shape if dim is None else leaf.shape[2:]  # without microbatches and replicas
        shapes.append((tuple(inner), jnp.issubdtype(leaf.dtype, jnp.integer), None if dim is None else 0))
    dims = sequence_dims(shapes, plan.decision.slice_lengths, microbatches.loss.name)
    return {batch[number]: dim + 1 for number, dim in dims.items()}


def _trace(
    plan: Plan, microbatches: Microbatches, parts: Parts, split: Sequence[Any], weights: Sequence[Any], is_scaled: bool
) -> tuple[FlatProgram, tuple[int, ...], list[TracedCall]]:
    """The flat program; the counts of its arguments that are parameters, random state, step, other state, m, batch and
    the factor of the loss; and its module calls. ``weights`` are the parameters that it is given."""
    recorder = Recorder()
    recorded = replace(microbatches, loss=replace(microbatches.loss, recorder=recorder))

    def run(params: Any, random: Any, step: Any, other: Any, m: Any, part: Any, scale: Any) -> Any:
        given = jax.tree.unflatten(jax.tree.structure(parts.params), params)
        total, (weight, after, sums, rows) = recorded.total(given, random, step, other, m, part)
        total = total * scale[0] if scale else total
        return total, weight, jax.tree.leaves(after), sums, rows

    count = jax.ShapeDtypeStruct((), jnp.int32)
    part = [
        leaf if dim is None else jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
        for leaf, dim in zip(split, microbatches.dims, strict=True)
    ]
    copies = microbatches.copies or [None] * len(weights)
    given = [leaf if dim is None else jax.ShapeDtypeStruct(microbatches.copied_shape(leaf.shape, dim), leaf.dtype)
             for leaf, dim in zip(weights, copies, strict=True)]  # fmt: skip
    scale = [jax.ShapeDtypeStruct((), jnp.float32)] if is_scaled else []
    arguments = (given, parts.random, count, parts.other, count, part, scale)
    shapes = jax.tree.map(abstract, arguments)
    closed = jax.make_jaxpr(run)(*shapes)
    planned = plan.parameter_stages("jax")
    stages = [planned.get(name, ()) for name in parts.names]
    flat = flatten(
        closed,
        recorder.calls,
        _homes(plan, recorder.calls),
        [s[0] if len(s) == 1 else None for s in stages],
        opens_checkpoints=plan.decision.slice_count > 1,
    )
    counts = tuple(len(jax.tree.leaves(argument)) for argument in arguments)
    return flat, counts, recorder.calls


def _copies(
    found: Cut, microbatches: Microbatches, layouts: Sequence[NamedSharding]
) -> dict[int, tuple[int, NamedSharding]]:
    """The weights of a program that it takes a copy of for each replica: the dim and the sharding of the copies."""
    made: dict[int, tuple[int, NamedSharding]] = {}
    for weight in found.weights:
        dim = microbatches.copies[weight.holding.leaf] if microbatches.copies else None
        if dim is not None:
            made[weight.value] = dim, copies_at(layouts[weight.holding.leaf], dim, microbatches.axes)
    return made


def _homes(plan: Plan, calls: list[TracedCall]) -> Home:
    """The stage and unit that the plan gives to a module call, or to the nearest call around it.

    Only units that do not keep all on the device are named as units."""
    again = set(told_apart(plan))
    found: dict[tuple[str, int], tuple[int, int | None]] = {}
    for stage, held in enumerate(plan.stage_units):
        for unit in held:
            named = unit if unit in again else None
            for call in plan.binding("jax").units[unit].calls:
                found[(call.path, call.occurrence)] = (stage, named)

    def home(number: int) -> tuple[int, int | None] | None:
        while True:
            call = calls[number]
            if (call.path, call.occurrence) in found:
                return found[(call.path, call.occurrence)]
            if call.parent == number or number == 0:
                return None
            number = call.parent

    return home


def _refuse_closed_over(flat: FlatProgram, parts: Parts, weights: Sequence[int]) -> None:
    """Raise PlanError for a function that reads arrays of its own where it should read its parameters."""
    used = {value for equation in flat.equations for value in equation.values}
    unused = {
        (leaf.shape, leaf.dtype): name
        for leaf, value, name in zip(jax.tree.leaves(parts.params), weights, parts.names, strict=True)
        if value not in used
    }
    for constant in flat.constants.values():
        name = unused.get((jnp.shape(constant), getattr(constant, "dtype", None)))
        if name is not None:
            raise PlanError(
                f"the loss function closes over an array {jnp.shape(constant)} of the shape of parameter {name}, which "
                "it does not read: the array would get no gradient; take parameters from the first argument alone"
            )


def _batch_specs(flat: FlatProgram, wider: FlatProgram, batch: Microbatches) -> dict[int, PartitionSpec]:
    """The spec of each value with a dim that grows with the number of replicas: that dim is split over dp."""
    specs = {}
    for value, (one, other) in enumerate(zip(flat.avals, wider.avals, strict=False)):
        dims = [d for d, (a, b) in enumerate(zip(one.shape, other.shape, strict=False)) if a != b]
        if len(dims) == 1 and one.shape[dims[0]] % batch.replicas == 0:
            specs[value] = PartitionSpec(*([None] * dims[0]), batch.axes)
    return specs


def _constraints(flat: FlatProgram) -> dict[int, PartitionSpec]:
    """The specs of values by the program's own sharding constraints; whole where a constraint leaves a dim open."""
    return {
        equation.outputs[0]: PartitionSpec(
            *(None if axes is PartitionSpec.UNCONSTRAINED else axes for axes in equation.params["sharding"].spec)
        )
        for equation in flat.equations
        if equation.primitive.name == "sharding_constraint"
    }
