"""Training under a plan whose stages are alike, as one program over all devices of all processes.

The blocks' parameters are kept stacked, [virtual stages, pp, …] with pp along the mesh's, so that every device holds
its stages' alone; their optimizer states too. The update sees the parameters as they were given.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.backends.jax.capture.samples import FlatBatch
from shardwright.backends.jax.capture.tree import Followed, Parts, followed
from shardwright.backends.jax.loss.gradients import split_squares, updated
from shardwright.backends.jax.loss.microbatches import Microbatches
from shardwright.backends.jax.machine.compiler_options import compiler_options
from shardwright.backends.jax.machine.mesh import bind, data_axes, mesh_of
from shardwright.backends.jax.pipeline.microbatch import CutMicrobatch, cut_microbatch
from shardwright.backends.jax.pipeline.sentinels import Evidence, OneProgram, Updated, judged
from shardwright.backends.jax.pipeline.spmd import SpmdLoss, block_plan
from shardwright.backends.jax.state.ownership import holdings_of
from shardwright.backends.jax.state.shardings import parameter_shardings, put, replicated
from shardwright.backends.jax.state.train_state import StepResult, TrainState, own_copy, parts_of
from shardwright.backends.jax.state.trainable import replaced
from shardwright.backends.jax.tensor_parallel.constrained_loss import in_fp8
from shardwright.backends.jax.training.protocol import InStages, WithoutActions
from shardwright.backends.jax.training.stacking import Stacking
from shardwright.core.errors import MissingCapabilityError


@dataclass(eq=False)
class SpmdTraining(InStages):
    """The state on one mesh, the parameters of like blocks in stacks over pp, and a step that is one program."""

    def __post_init__(self) -> None:
        self.blocks = block_plan(self.plan)
        self.mesh: Mesh = bind(mesh_of(self.plan), self.devices)

    # --- state

    def init(self, given: Parts, make: Callable[[], Parts] | None) -> TrainState:
        """The state of a model: of its arrays, or of its shapes and the function that makes them."""
        stacking, states = self._stackings(given)
        whole = replicated(self.mesh)

        def start(params: Any) -> tuple[Any, Any]:
            return stacking.pack(params), states.pack(self.optimizer.init(params))

        places = (stacking.shardings, states.shardings)
        if make is None:
            packed, optimizer = jax.jit(start, out_shardings=places)(given.params)
            random, other = jax.tree.map(lambda leaf: own_copy(leaf, whole), (given.random, given.other))
        else:

            def run() -> tuple[Any, Any, Any]:
                parts = make()
                return start(parts.params), parts.random, parts.other

            everywhere = jax.tree.map(lambda _: whole, (given.random, given.other))
            (packed, optimizer), random, other = jax.jit(run, out_shardings=(places, *everywhere))()
        step = jax.device_put(jnp.zeros((), jnp.int32), whole)
        self._unpack = jax.jit(stacking.unpack, out_shardings=whole)
        scaling = jax.device_put(self.first_scaling(), whole)
        return TrainState(step, packed, optimizer, random, other, given.graphdef, scaling=scaling)

    def whole(self, state: TrainState) -> Any:
        """The parameters as they were given, whole on every device."""
        return self._unpack(state.params)

    def apart(self, state: TrainState) -> TrainState:
        """The state with a leaf for each of the model's, copied out of stacks on the devices that have it."""
        stacking, states = self._stackings_of(state)
        return replace(state, params=stacking.apart(state.params), optimizer=states.apart(state.optimizer))

    def release(self, state: TrainState) -> None:
        """Free the stacks, of which `apart` has copies."""
        for stack in (*state.params["stacks"], *state.optimizer["stacks"]):
            stack.delete()

    def together(self, state: TrainState, like: TrainState) -> TrainState:
        """The counterpart of `apart`, for a state as another is. What is put together is used up."""
        stacking, states = self._stackings_of(like)
        return replace(state, params=stacking.together(state.params), optimizer=states.together(state.optimizer))

    def place(self, state: TrainState) -> NoReturn:
        raise MissingCapabilityError(
            "the stages of this plan run as one SPMD program, whose state this version does not place again: give "
            "the parameters to train.init, or leave out one_program in one process"
        )

    def require_places(self, state: TrainState) -> None:
        """Do nothing: the program says of its arguments where they are."""

    def _stackings_of(self, state: TrainState) -> tuple[Stacking, Stacking]:
        return self._stackings(replace(parts_of(state), params=jax.eval_shape(self._unpack, state.params)))

    def _stackings(self, given: Parts) -> tuple[Stacking, Stacking]:
        """The stackings of the parameters and of the optimizer's state. The n-th leaves of all stages' blocks make one
        stack."""
        plan = self.plan
        names = given.names
        leaves, structure = jax.tree.flatten(given.params)
        holdings = holdings_of(self.blocks, names, [leaf.shape for leaf in leaves])
        if any(h.rows is not None for h in holdings):
            raise MissingCapabilityError(
                "the model keeps its layers in stacks of its own, which one program for all stages does not restack: "
                "give the layers as parameters of their own, or run the stages in one process"
            )
        of_stage: list[list[int]] = [[] for _ in range(plan.stages)]
        for unit, bound in enumerate(plan.binding("jax").units):
            stage = next(s for s, held in enumerate(self.blocks.stage_units) if unit in held) - 1
            if 0 <= stage < plan.stages:
                own = [names.index(name) for _, name, _ in bound.parameters]
                of_stage[stage] += [leaf for leaf in own if holdings[leaf].stage == stage + 1]
        shardings = jax.tree.leaves(parameter_shardings(names, given.params, plan.parameter_layouts("jax"), self.mesh))
        groups = list(zip(*of_stage, strict=True))
        rows = tuple((tuple(g), self._stacked(shardings[g[0]])) for g in groups)
        inside = {leaf for group in groups for leaf in group}
        rest = tuple((leaf, shardings[leaf]) for leaf in range(len(leaves)) if leaf not in inside)
        shape = (plan.decision.virtual_stages, plan.decision.pp)
        stacking = Stacking(structure, rows, rest, shape)
        return stacking, self._of_optimizer(given.params, stacking, shardings)

    def _stacked(self, sharding: NamedSharding) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(None, "pp", *sharding.spec))

    def _of_optimizer(self, params: Any, stacking: Stacking, shardings: Sequence[NamedSharding]) -> Stacking:
        """The stacking of the optimizer's state. Leaves that end in a parameter's path, and have its shape, are kept as
        it is."""
        state = jax.eval_shape(self.optimizer.init, params)
        parameters, leaves = jax.tree.leaves(params), jax.tree.leaves(state)
        found = {
            at: position
            for position, (at, leaf) in enumerate(zip(followed(state, params), leaves, strict=True))
            if at is not None and leaf.shape == parameters[at.number].shape
        }
        rows = []
        for prefix in dict.fromkeys(at.prefix for at in found):
            for group, place in stacking.rows:
                own = [Followed(prefix, leaf) for leaf in group]
                if all(at in found for at in own):
                    rows.append((tuple(found[at] for at in own), place))
        inside = {position for group, _ in rows for position in group}
        places = {position: shardings[at.number] for at, position in found.items()}
        whole = replicated(self.mesh)
        rest = tuple((n, places.get(n, whole)) for n in range(len(leaves)) if n not in inside)
        return Stacking(jax.tree.structure(state), tuple(rows), rest, stacking.shape)

    # --- steps

    def step_for(self, state: TrainState, batch: FlatBatch) -> "SpmdStep":
        """The compiled step for batches of one form."""
        shapes = jax.eval_shape(self._unpack, state.params)
        parts = replace(parts_of(state), params=shapes)
        self.require_precision(parts)
        microbatches = Microbatches.of(self.loss, self.plan, parts, batch)
        microbatches = in_fp8(microbatches, self.plan, self.mesh.abstract_mesh, parts.names)
        holdings = holdings_of(self.blocks, parts.names, [leaf.shape for leaf in jax.tree.leaves(shapes)])
        micro = cut_microbatch(self.blocks, microbatches, parts, batch.leaves, holdings)
        loss = SpmdLoss.of(micro, self.plan, self.mesh)
        stacking, states = self._stackings(parts)
        mask = self.loss.trained.mask(shapes)
        run = self._program(loss, stacking, states, micro, mask, microbatches)
        along = data_axes(self.mesh.axis_names)
        split = NamedSharding(self.mesh, PartitionSpec(None, along))
        places = [replicated(self.mesh) if dim is None else split for dim in batch.dims]
        firsts = [parts.names[group[0]] for group, _ in stacking.rows if mask[group[0]]]
        names = [f"{name}, or of the same of a later block," for name in firsts]
        names += [parts.names[leaf] for leaf, _ in stacking.rest if mask[leaf]]
        return SpmdStep(run, microbatches, places, OneProgram(names))

    def _program(
        self,
        loss: SpmdLoss,
        stacking: Stacking,
        states: Stacking,
        micro: CutMicrobatch,
        mask: tuple[bool, ...],
        microbatches: Microbatches,
    ) -> jax.stages.Wrapped:
        trained = self.loss.trained
        flags = [*(_whether(group, mask) for group, _ in stacking.rows), *(mask[leaf] for leaf, _ in stacking.rest)]
        at = list(compress((place for _, place in (*stacking.rows, *stacking.rest)), flags))
        values = [weight.value for weight in micro.cut.weights]
        # Copies of float32: they are cast where they are used, so that their gradients add up in float32.
        copies = microbatches.copies or (None,) * len(values)
        dims = [*(_behind_stages(copies[group[0]]) for group, _ in stacking.rows),
                *(copies[leaf] for leaf, _ in stacking.rest)]  # fmt: skip
        dims = list(compress(dims, flags))
        metrics = microbatches.metrics
        stacks = {tuple(values[leaf] for leaf in group): number for number, (group, _) in enumerate(stacking.rows)}

        def step(number: Any, params: Any, optimizer: Any, fixed: Any, scaling: Any, batch: Any) -> Any:
            factor = jnp.float32(1) if scaling is None else scaling.scale
            others = (*micro.random, *micro.state)
            sources = {micro.step: number} | dict(zip(others, jax.tree.leaves(fixed), strict=True))

            def total(given: Any) -> Any:
                every = replaced(flags, held, given)
                beside = zip(stacking.rest, every[len(stacking.rows) :], strict=True)
                rest = {values[leaf]: array for (leaf, _), array in beside}
                stacked = [every[stacks[group]] for group in loss.blocks.stacked]
                value, results = loss(stacked, rest, sources, dict(zip(micro.batch, batch, strict=True)))
                return value * factor, (value, *results)

            held = [*params["stacks"], *params["rest"]]
            trained_leaves = compress(held, flags)
            given = [microbatches.copied(*each) for each in zip(trained_leaves, dims, at, strict=True)]
            found, (value, losses, weight, sums, rows) = jax.grad(total, has_aux=True)(given)
            below = micro.divisor(weight)
            summed = [microbatches.summed(g, dim, g.dtype) for g, dim in zip(found, dims, strict=True)]
            means = [g / (below * factor) for g in summed]
            squares = split_squares(means, at)
            norm, loss_value = jnp.sqrt(squares.sum()), value / below
            whole, before = stacking.unpack(params), states.unpack(optimizer)
            leaves = stacking.leaves(replaced(flags, [None] * len(flags), means))
            mean = trained.with_gradients(whole, [g for g in leaves if g is not None])
            updates, state = updated(self.optimizer, mean, before, whole, loss_value)
            changed = trained.apply(whole, updates)
            after = Updated(number + 1, scaling, (stacking.pack(changed), states.pack(state)))
            seen = Evidence(number, loss_value, norm, (losses, squares))
            before_it = Updated(number, scaling, (params, optimizer))
            after, evidence = judged(self.nonfinite, self.rule, seen, after, before_it)
            aux = None if metrics is None else metrics.all(sums, rows)
            return after.step, *after.rest, after.scaling, loss_value, norm, aux, evidence

        whole = replicated(self.mesh)
        places = (whole, stacking.shardings, states.shardings, whole, whole, whole, whole, whole)
        options = compiler_options(self.mesh.devices.flat)
        return jax.jit(step, out_shardings=places, donate_argnums=(1, 2), compiler_options=options)


@dataclass(frozen=True, slots=True, eq=False)
class SpmdStep(WithoutActions):
    """A compiled step, from state to state."""

    run: jax.stages.Wrapped
    microbatches: Microbatches
    places: Sequence[NamedSharding]
    """The shardings of the batch's leaves, split into microbatches."""
    teller: OneProgram

    def __call__(self, state: TrainState, leaves: Sequence[Any]) -> StepResult:
        batch = self.microbatches
        split = [batch.split(leaf, dim) for leaf, dim in zip(leaves, batch.dims, strict=True)]
        given = jax.device_put([put(leaf, at) for leaf, at in zip(split, self.places, strict=True)], self.places)
        number, params, optimizer, scaling, loss, norm, aux, evidence = self.run(
            state.step, state.params, state.optimizer, (state.random, state.other), state.scaling, given
        )
        after = TrainState(number, params, optimizer, state.random, state.other, state.graphdef, scaling=scaling)
        return StepResult(after, loss, aux, norm, evidence)

    def memory_bytes(self, state: TrainState, leaves: Sequence[Any]) -> NoReturn:
        raise MissingCapabilityError(
            "the stages of this plan run as one SPMD program, whose memory this version does not read: take "
            "plan.predicted, or leave out one_program in one process"
        )


def _behind_stages(dim: int | None) -> int | None:
    """The dim of copies in a stack, whose first two dims count stages."""
    return None if dim is None else dim + 2


def _whether(group: Sequence[int], mask: Sequence[bool]) -> bool:
    """Whether the parameters of a stack are trained. Raises MissingCapabilityError where only some are."""
    if len({mask[leaf] for leaf in group}) > 1:
        raise MissingCapabilityError(
            "wrt= trains a parameter of some blocks and not the same one of others, which one program for all stages "
            "keeps in one stack: train it in all blocks or in none, or run the stages in one process"
        )
    return mask[group[0]]
