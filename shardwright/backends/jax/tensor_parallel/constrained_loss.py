"""A plan's tensor layouts carried out in a training step: the values of a loss function, laid out as the plan says. So
are its products in fp8, which are those of the traced program, with layouts and without."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardwright.backends.jax.capture.loss_results import Returned
from shardwright.backends.jax.capture.model import Source, read, trace
from shardwright.backends.jax.capture.trace import Recorder, TracedCall
from shardwright.backends.jax.capture.tree import Parts, abstract, flat_names, shape_key
from shardwright.backends.jax.loss.microbatches import LossFunction, Microbatches
from shardwright.backends.jax.machine.mesh import data_axes, mesh_of
from shardwright.backends.jax.program.fp8_products import products_with
from shardwright.backends.jax.state.shardings import follow_parameters
from shardwright.backends.jax.state.train_state import TrainState
from shardwright.backends.jax.tensor_parallel.block_rules import Value
from shardwright.backends.jax.tensor_parallel.blocks import Tags, hold, restore
from shardwright.backends.jax.tensor_parallel.constrained_run import Setting, run_guided
from shardwright.backends.jax.tensor_parallel.constraints import Guides, guides
from shardwright.core.errors import PlanError
from shardwright.core.layout.placements import Layout, Split
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.realised_layouts import realise

AXIS = "tp"


def held_by_blocks(layouts: Mapping[str, Layout]) -> dict[str, Tags]:
    """The parameters with a dim that the tensor axis splits block by block, and the blocks of that dim."""
    found: dict[str, Tags] = {}
    for name, layout in layouts.items():
        place = layout.on(AXIS)
        if isinstance(place, Split) and place.blocks:
            found[name] = {place.dim: place.blocks}
    return found


@dataclass(frozen=True, slots=True)
class FusedParameters:
    """The parameters whose dims of blocks are held in another order than the model's own
    (`backends.jax.tensor_parallel.blocks`)."""

    tags: tuple[Tags, ...]
    """The tags of each leaf of the parameters."""
    ways: int

    @classmethod
    def of(cls, plan: Plan, names: tuple[str, ...]) -> "FusedParameters":
        known = held_by_blocks(plan.parameter_layouts("jax")) if plan.decision.tp > 1 else {}
        return cls(tuple(known.get(name, {}) for name in names), plan.decision.tp)

    def __bool__(self) -> bool:
        return any(self.tags)

    @property
    def order(self) -> tuple[Any, ...]:
        """The order in which fused matrices are held, as a state notes it; () is the model's own order."""
        return (self.ways, *(tuple(sorted(tags.items())) for tags in self.tags)) if self else ()

    def require(self, state: TrainState) -> None:
        """Raise PlanError unless the state holds its fused matrices in this order."""
        if state.order != self.order:
            raise PlanError(
                f"the state's fused matrices are in {_described(state.order)}, and this plan's in "
                f"{_described(self.order)}: it is another plan's; give this plan's init the parameters, "
                "other.params(state), or, without pipeline stages, take train.held(other.original(state))"
            )

    def hold(self, params: Any) -> Any:
        """The parameters as they are held, from their original order."""
        return self._each(hold, params)

    def hold_made(self, params: Any, mesh: jax.sharding.Mesh) -> Any:
        """The parameters that a compiled function makes, in held order. Each device makes a share of another dim, so
        that none holds the whole while the order is changed."""

        def reorder(leaf: Any, tags: Tags, ways: int) -> Any:
            other = [dim for dim, size in enumerate(leaf.shape) if dim not in tags and size % ways == 0]
            if tags and other:
                entries = [AXIS if dim == other[0] else None for dim in range(leaf.ndim)]
                leaf = jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, PartitionSpec(*entries)))
            return hold(leaf, tags, ways)

        return self._each(reorder, params)

    def restore(self, params: Any) -> Any:
        """The counterpart of `hold`."""
        return self._each(restore, params)

    def _each(self, reorder: Any, params: Any) -> Any:
        leaves, structure = jax.tree.flatten(params)
        made = [reorder(leaf, tags, self.ways) for leaf, tags in zip(leaves, self.tags, strict=True)]
        return jax.tree.unflatten(structure, made)

    def hold_optimizer(self, state: Any, params: Any) -> Any:
        """An optimizer's state in the held order of its parameters, from their original order."""
        return self._each_state(hold, state, params)

    def restore_optimizer(self, state: Any, params: Any) -> Any:
        """The counterpart of `hold_optimizer`."""
        return self._each_state(restore, state, params)

    def _each_state(self, reorder: Any, state: Any, params: Any) -> Any:
        structure = jax.tree.structure(params)

        def one(shape: tuple[int, ...] | None, held: list[Tags] | None, leaf: Any) -> Any:
            return (
                leaf if shape is None or not held else reorder(leaf, tags_left(held[0], shape, leaf.shape), self.ways)
            )

        return follow_parameters(one, state, params, jax.tree.unflatten(structure, [[tags] for tags in self.tags]))


def _described(order: tuple[Any, ...]) -> str:
    return f"the order for a tensor axis of {order[0]}" if order else "the model's own order"


def tags_left(tags: Tags, shape: tuple[int, ...], left: tuple[int, ...]) -> Tags:
    """The tags of a statistic over some dims of a parameter (a factored moment): those of the dims that it has left."""
    if shape == left:
        return tags
    kept = [dims for dims in combinations(range(len(shape)), len(left)) if tuple(shape[d] for d in dims) == left]
    return {kept[0].index(d): blocks for d, blocks in tags.items() if d in kept[0]} if len(kept) == 1 else {}


def in_fp8(batch: Microbatches, plan: Plan, mesh: jax.sharding.AbstractMesh, names: tuple[str, ...]) -> Microbatches:
    """The microbatches of ``batch``, with the products in fp8 that the plan names, and without its layouts. ``names``
    are those of the parameters."""
    if not plan.decision.fp8_weights:
        return batch
    whole = FusedParameters(({},) * len(names), ways=1)
    lowered = TensorParallel(plan, mesh, batch.dims, False, names, whole, lays_out=False)
    return replace(batch, loss=replace(batch.loss, laid_out=lowered.run))


@dataclass(slots=True, eq=False)
class TensorParallel:
    """A loss function's program run with the plan's layouts and products in fp8."""

    plan: Plan
    mesh: jax.sharding.AbstractMesh
    dims: tuple[int | None, ...]
    """The batch dim of every leaf of the batch."""
    over_replicas: bool
    """Whether a run sees the samples of all replicas."""
    names: tuple[str, ...]
    fused: FusedParameters
    lays_out: bool = True
    """Whether values lie as the plan says. Else only its products in fp8 are carried out."""
    _known: dict[Any, tuple[Any, Any, Guides, tuple[TracedCall, ...]]] = field(default_factory=dict)

    @classmethod
    def lay_out(
        cls, batch: Microbatches, plan: Plan, mesh: jax.sharding.AbstractMesh, names: tuple[str, ...]
    ) -> Microbatches:
        """The microbatches of ``batch``, with the loss function run as the plan lays it out; without layouts where the
        tensor axis has one rank. ``names`` are those of the parameters."""
        if plan.decision.tp == 1:
            return in_fp8(batch, plan, mesh, names)
        over_replicas = not (batch.per_replica and plan.decision.dp > 1)
        lowered = cls(plan, mesh, batch.dims, over_replicas, names, FusedParameters.of(plan, names))
        return replace(batch, loss=replace(batch.loss, laid_out=lowered.run))

    def run(self, loss: LossFunction, parts: Parts, batch: Any) -> Returned:
        """The results of ``loss.plain``, with the module calls that it records. Raises PlanError when the function is
        not the one that was planned."""
        leaves, key = jax.tree.leaves((parts, batch)), shape_key((parts, batch))
        if key not in self._known:
            self._known[key] = self._prepare(loss, parts, batch)
        closed, results, found, calls = self._known[key]
        if loss.recorder is not None:
            loss.recorder.calls[:] = calls
        tags = [*self.fused.tags, *([{}] * (len(leaves) - len(self.fused.tags)))]
        arguments = [Value(leaf, dict(tag)) for leaf, tag in zip(leaves, tags, strict=True)]
        has_replicas = self.over_replicas and self.plan.decision.dp > 1
        batch_axis = data_axes(mesh_of(self.plan).names) if has_replicas else None
        setting = Setting(self.mesh, AXIS, self.fused.ways, batch_axis)
        made: Returned = jax.tree.unflatten(results, run_guided(closed, found, setting, arguments))
        return made

    def _prepare(self, loss: LossFunction, parts: Parts, batch: Any) -> tuple[Any, Any, Guides, tuple[TracedCall, ...]]:
        """The traced program, the structure of its results, its guides, and its module calls."""
        arrays, shapes = jax.tree.map(abstract, (parts, batch))
        extra = flat_names((arrays.random, arrays.other))
        structures: list[Any] = []
        recorders: list[Recorder] = []

        def run(arrays: Parts, inputs: Any, recorder: Any) -> Any:
            made = replace(loss, recorder=recorder).plain(arrays, inputs)
            structures.append(jax.tree.structure(made))
            recorders.append(recorder)
            return made

        trainable = (*((True,) * len(self.names)), *((None,) * len(extra)))
        source = Source(loss.name, arrays, (*self.names, *(f"beside.{n}" for n in extra)), trainable, {}, run)
        read_twice = read(source, shapes, self.dims, lambda made: made[0]) if self.lays_out else None
        closed, running = trace(source, shapes, jax.tree.leaves, results=1)
        found = Guides()
        if read_twice is not None:
            graph, (_, (_, captured)) = read_twice
            # The policy of selective recompute keeps products without batch dims, which those of copies have.
            copies = self.plan.decision.recompute != "selective"
            found = guides(graph, realise(graph, self.plan), captured, running, with_copies=copies)
        fp8 = products_with(self.plan.fp8_parameters("jax"), self.names, closed, running)
        return closed, structures[-1], replace(found, fp8=fp8), tuple(recorders[-1].calls)
