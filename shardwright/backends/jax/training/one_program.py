"""Training as one jitted program: dp × tp by NamedSharding."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.backends.jax.capture.inner_programs import computes_again, computes_loops_again
from shardwright.backends.jax.capture.samples import FlatBatch
from shardwright.backends.jax.capture.tree import Parts
from shardwright.backends.jax.loss.gradients import accumulate, split_squares, updated
from shardwright.backends.jax.loss.microbatches import Microbatches
from shardwright.backends.jax.machine.compiler_options import compiler_options
from shardwright.backends.jax.machine.mesh import bind, mesh_of
from shardwright.backends.jax.memory.compiled_peak import program_bytes
from shardwright.backends.jax.pipeline.sentinels import Evidence, OneProgram, Updated, judged
from shardwright.backends.jax.state.checks import require_like, require_model, require_places
from shardwright.backends.jax.state.shardings import (
    batch_sharding,
    optimizer_shardings,
    parameter_shardings,
    put,
    replicated,
    spread_over,
)
from shardwright.backends.jax.state.train_state import StepResult, TrainState, own_copy, parts_of
from shardwright.backends.jax.tensor_parallel.constrained_loss import FusedParameters, TensorParallel, in_fp8
from shardwright.backends.jax.training.protocol import OfPlan, WithoutActions


@dataclass(eq=False)
class OneProgramTraining(OfPlan):
    """The state on one mesh, and a step that is one jitted function."""

    def __post_init__(self) -> None:
        self.mesh = bind(mesh_of(self.plan), self.devices)

    # --- state

    def init(self, given: Parts, make: Callable[[], Parts] | None) -> TrainState:
        """The state of a model: of its arrays, or of its shapes and the function that makes them."""
        shardings = self._shardings(given)
        places = parts_of(shardings)
        if make is None:
            held = FusedParameters.of(self.plan, given.names).hold(given.params)
            made: Parts = _copied(replace(given, params=held), places)
        elif given.graphdef is None:  # what is beside the parameters was given, too
            made = _copied(replace(given, params=None), replace(places, params=None))
            made = replace(made, params=self._maker(given, make)().params)
        else:
            made = self._maker(given, make)()
        optimizer = jax.jit(self.optimizer.init, out_shardings=shardings.optimizer)(made.params)
        step = jax.device_put(jnp.zeros((), jnp.int32), shardings.step)
        scaling = jax.device_put(self.first_scaling(), shardings.scaling)
        return TrainState(
            step, made.params, optimizer, made.random, made.other, given.graphdef, shardings.order, scaling
        )

    def _maker(self, given: Parts, make: Callable[[], Parts]) -> jax.stages.Wrapped:
        """The compiled function by which every device makes its share; for plain functions, the parameters alone."""
        fused = FusedParameters.of(self.plan, given.names)
        places = parts_of(self._shardings(given))

        def wanted(parts: Parts) -> Parts:
            arrays = replace(parts, graphdef=None)
            return arrays if given.graphdef is not None else replace(arrays, random=None, other=None)

        def run() -> Parts:
            parts = make()
            held = fused.hold_made(parts.params, self.mesh)
            if fused:  # one step at a time: XLA has no way from one split to two others, and would make leaves whole
                held = jax.lax.with_sharding_constraint(held, self._layouts(given))
            return wanted(replace(parts, params=held))

        return jax.jit(run, out_shardings=wanted(places))

    def whole(self, state: TrainState) -> Any:
        """The parameters in the order of the model's own."""
        return self._fused(state).restore(state.params)

    def original(self, state: TrainState) -> TrainState:
        """The state in the order of the model's own."""
        fused = self._fused(state)
        optimizer = fused.restore_optimizer(state.optimizer, state.params)
        return replace(state, params=fused.restore(state.params), optimizer=optimizer, order=())

    def held(self, state: TrainState) -> TrainState:
        """The counterpart of `original`, on this plan's devices."""
        shardings = self._shardings(parts_of(state))
        self.require_precision(parts_of(state))
        fused = FusedParameters.of(self.plan, parts_of(state).names)
        optimizer = fused.hold_optimizer(state.optimizer, state.params)
        params, scaling = fused.hold(state.params), self.scaling_of(state)
        held = replace(state, params=params, optimizer=optimizer, order=fused.order, scaling=scaling)
        found: TrainState = _copied(held, shardings)
        return found

    def place(self, state: TrainState) -> TrainState:
        """A copy of a state on this plan's devices."""
        self._fused(state)
        require_like(state.optimizer, jax.eval_shape(self.optimizer.init, state.params))
        state = replace(state, scaling=self.scaling_of(state))
        placed: TrainState = _copied(state, self._shardings(parts_of(state)))
        return placed

    def require_places(self, state: TrainState) -> None:
        """Raise PlanError when arrays of a state are not where this plan keeps them."""
        at = self._shardings(parts_of(state))
        require_places((state.params, state.optimizer), (at.params, at.optimizer))

    def _fused(self, state: TrainState) -> FusedParameters:
        """The order in which this plan holds fused matrices. Raises PlanError for a state that holds them otherwise."""
        fused = FusedParameters.of(self.plan, parts_of(state).names)
        fused.require(state)
        self.require_precision(parts_of(state))
        return fused

    def _shardings(self, parts: Parts) -> TrainState:
        """A TrainState whose leaves are shardings. Raises PlanError unless the parameters are the plan's."""
        require_model(self.plan, parts)
        shard = self.plan.decision.shard
        params = self._layouts(parts)
        spread = spread_over("dp", parts.params, params) if shard else params
        _, optimizer = optimizer_shardings(self.optimizer, parts.params, spread, self.mesh)
        whole: Any = replicated(self.mesh)
        random, other = jax.tree.map(lambda _: whole, (parts.random, parts.other))
        order = FusedParameters.of(self.plan, parts.names).order
        scaling = jax.tree.map(lambda _: whole, self.first_scaling())
        params = spread if self.is_kept_sharded else params
        return TrainState(whole, params, optimizer, random, other, parts.graphdef, order, scaling)

    def _layouts(self, parts: Parts) -> Any:
        """The shardings of the parameters by their layouts, whole on every replica."""
        return parameter_shardings(parts.names, parts.params, self.plan.parameter_layouts("jax"), self.mesh)

    # --- steps

    def put(self, batch: FlatBatch) -> FlatBatch:
        """The batch split over dp, on the mesh."""
        leaves = (put(x, batch_sharding(self.mesh, dim)) for x, dim in zip(batch.leaves, batch.dims, strict=True))
        return replace(batch, leaves=tuple(leaves))

    def step_for(self, state: TrainState, batch: FlatBatch) -> "OneProgramStep":
        """The jitted step for batches of one form."""
        parts = parts_of(state)
        self._fused(state)
        shardings = self._shardings(parts)
        shard, trained, layouts = self.plan.decision.shard, self.loss.trained, self._layouts(parts)
        # Nothing but the optimizer reads the sums, so they are sharded wherever its states are.
        gradients_at = spread_over("dp", state.params, layouts) if shard else layouts
        weights_at = shardings.params if shard == 3 else layouts
        microbatches = Microbatches.of(self.loss, self.plan, parts, batch)
        mesh = self.mesh.abstract_mesh
        laid_out = TensorParallel.lay_out(microbatches, self.plan, mesh, parts.names)
        microbatches = in_fp8(microbatches, self.plan, mesh, parts.names)

        def step(state: TrainState, leaves: tuple[Any, ...]) -> StepResult:
            loss, mean, other, aux, losses = accumulate(
                laid_out,
                state,
                leaves,
                mesh=self.mesh,
                gradients_at=gradients_at,
                weights_at=weights_at,
                layouts=layouts,
            )
            updates, optimizer = updated(self.optimizer, mean, state.optimizer, state.params, loss)
            params = trained.apply(state.params, updates)
            at = list(compress(jax.tree.leaves(gradients_at), trained.mask(state.params)))
            squares = split_squares(jax.tree.leaves(mean), at)
            norm = jnp.sqrt(squares.sum())
            seen = Evidence(state.step, loss, norm, (losses, squares))
            before = Updated(state.step, state.scaling, (state.params, state.optimizer, state.other))
            changed = Updated(state.step + 1, state.scaling, (params, optimizer, other))
            (number, scaling, rest), evidence = judged(self.nonfinite, self.rule, seen, changed, before)
            params, optimizer, other = rest
            after = replace(state, step=number, params=params, optimizer=optimizer, other=other, scaling=scaling)
            return StepResult(after, loss, aux, norm, evidence)

        whole: Any = replicated(self.mesh)
        jitted = partial(
            jax.jit,
            step,
            in_shardings=(shardings, tuple(batch_sharding(self.mesh, dim) for dim in batch.dims)),
            out_shardings=StepResult(shardings, whole, None if microbatches.metrics is None else whole, whole, whole),
            donate_argnums=0,
        )
        # A model may compute again by itself: only the program tells.
        program = jitted().trace(state, batch.leaves).jaxpr.jaxpr
        by_memory = computes_loops_again(program) or not computes_again(program)
        run = jitted(compiler_options=compiler_options(self.mesh.devices.flat, by_memory=by_memory))
        names = list(compress(parts.names, trained.mask(state.params)))
        return OneProgramStep(run, microbatches, OneProgram(names), self.mesh.size)

    def lower(self, state: TrainState, batch: FlatBatch) -> jax.stages.Lowered:
        """The step before it is compiled. Arrays may be shapes."""
        return self.step_for(state, batch).run.lower(state, batch.leaves)

    def lower_init(self, given: Parts, make: Callable[[], Parts]) -> jax.stages.Lowered:
        """The program that makes the parameters, before it is compiled."""
        return self._maker(given, make).lower()


@dataclass(frozen=True, slots=True, eq=False)
class OneProgramStep(WithoutActions):
    """A step that is one jitted function."""

    run: jax.stages.Wrapped
    microbatches: Microbatches
    """The microbatches, without the plan's layouts."""
    teller: OneProgram
    devices: int

    def __call__(self, state: TrainState, leaves: tuple[Any, ...]) -> StepResult:
        found: StepResult = self.run(state, leaves)
        return found

    def memory_bytes(self, state: TrainState, leaves: tuple[Any, ...]) -> tuple[int, ...]:
        return (program_bytes(self.run.lower(state, leaves).compile()),) * self.devices


def _copied(tree: Any, shardings: Any) -> Any:
    """The arrays on their devices, sharing no memory with those that were given."""
    return jax.tree.map(own_copy, tree, shardings)
