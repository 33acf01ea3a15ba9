"""Training under a plan: dp × tp by NamedSharding inside one jitted step."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from shardwright.backends.capabilities import JAX as CAPABILITIES
from shardwright.backends.jax.capture.checkpoint_policies import keeping_barriers
from shardwright.backends.jax.capture.samples import batch_sharding, batch_size, of_no_mesh, put, resolve_batch_dims
from shardwright.backends.jax.capture.tree import is_function
from shardwright.backends.jax.loss.microbatches import LossFunction, Microbatches, accumulate, split_squares, updated
from shardwright.backends.jax.loss.reductions import REDUCTIONS
from shardwright.backends.jax.machine.agreement import Agreement, array_sum, text_sum, versions
from shardwright.backends.jax.machine.mesh import bind, require_devices
from shardwright.backends.jax.machine.rendezvous import current
from shardwright.backends.jax.memory.compiled_peak import pipeline_bytes, program_bytes
from shardwright.backends.jax.pipeline.action_times import Watch
from shardwright.backends.jax.pipeline.actions import Pipeline, StepCounts
from shardwright.backends.jax.pipeline.compilation import Compilation
from shardwright.backends.jax.pipeline.first_bad_op import OpChecks
from shardwright.backends.jax.pipeline.pipeline_training import PipelinedStep, PipelinedTraining
from shardwright.backends.jax.pipeline.sentinels import (
    Answer,
    Evidence,
    OneProgram,
    Sentinel,
    chosen,
    is_sound,
    require_settings,
)
from shardwright.backends.jax.pipeline.spmd_training import SpmdStep, SpmdTraining
from shardwright.backends.jax.program.python_values import PythonValues, Slot, WithValues
from shardwright.backends.jax.state.shardings import optimizer_shardings, parameter_shardings, replicated, spread_over
from shardwright.backends.jax.state.train_state import (
    Parts,
    StepResult,
    TrainState,
    abstractly,
    is_abstract,
    own_copy,
    put_together,
    require_like,
    require_places,
    take_apart,
)
from shardwright.backends.jax.state.trainable import Trained
from shardwright.backends.jax.tensor_parallel.constrained_loss import FusedParameters, TensorParallel
from shardwright.core.errors import MissingCapabilityError, PlanError, PlanWarning, ShardwrightError
from shardwright.core.plan.plan import Plan

COMPILED_OFTEN = 4
NO_MESH = jax.sharding.Mesh(np.empty((), dtype=object), ())


def train_step(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    plan: Plan,
    *,
    devices: Sequence[jax.Device] | None = None,
    batch_dims: Any = None,
    one_program: bool | None = None,
    has_aux: bool = False,
    wrt: Any = None,
    reduction: str | None = None,
    nonfinite: Answer = "warn",
    debug: Literal["numerics"] | None = None,
) -> "TrainStep":
    """A training step under a plan.

    loss_fn: ``loss_fn(model, batch)`` for an NNX module, ``loss_fn(params, batch, *, rngs=None, state=None)`` for a
        pytree of parameters; it is handed one microbatch at a time. It returns the loss, or `weighted`: microbatches
        and replicas are then combined as Σ weight · loss / Σ weight (a count of tokens, say); a plain function that
        names ``state`` returns ``(loss, state)``. ``rngs`` is a random key of this microbatch, ``state`` what
        `TrainStep.init` was given; both are passed only to functions that name them.
    optimizer: an optax gradient transformation.
    plan: its dp × tp are laid over ``devices`` (default: all). Parameters lie as the plan says, the optimizer's state
        as its parameters, the batch along dp, and what the function computes is laid out as the plan says. Fused
        matrices that are split block by block are held in another order (see `backends.jax.tensor_parallel.blocks`):
        `TrainStep.params` and `TrainStep.original` give the model's own.
    batch_dims: as in capture.
    one_program: run pipeline stages as one SPMD program, which stages that are alike can, instead of programs of their
        own for each stage, which any model and schedule can, but in one process. Default: only over several processes.
    has_aux: the function returns ``(loss, aux)``, or ``(loss, aux, state)``, and the step ``state, loss, aux``: a
        pytree of metrics, each combined over microbatches and replicas by what it is (`backends.jax.loss.metrics`):
        joined where it has a dim of samples, else the weighted mean, integers the sum.
    wrt: which parameters are trained (default: all): an NNX filter, a function of (path, value) that returns a bool,
        or a pytree of bools. The others get no gradient and no optimizer state.
    reduction: how the losses of microbatches and replicas make that of the batch, where the function returns no weight:
        "mean" or "sum". Default: as its program shows, which is traced at two batch sizes: the mean, a mean weighted by
        the count that it divides by, or the sum; where samples are coupled, or it cannot be told, the first step is
        refused, unless one microbatch holds the whole batch.
    nonfinite: what to do when a loss or a gradient is NaN or infinite: "warn", "error", or "ignore". No step waits for
        that: it is told in a later call, `TrainStep.params` or `TrainStep.settle`. With "error" such a step leaves the
        parameters and the optimizer's state as they were, and so do those after it that nobody stopped yet if theirs
        are not finite; the state given to the call that raises is not used up.
    debug: "numerics" runs every microbatch beforehand on one device, looks at every op, and names the first that makes
        a NaN or an infinity; slow.

    Raises MissingCapabilityError for what this runtime does not do, ClusterError when the number of devices is not the
    plan's.
    """
    return TrainStep(
        loss_fn,
        optimizer,
        plan,
        devices=devices,
        batch_dims=batch_dims,
        one_program=one_program,
        has_aux=has_aux,
        wrt=wrt,
        reduction=reduction,
        nonfinite=nonfinite,
        debug=debug,
    )


class TrainStep:
    """``state = train.init(…)``, then ``state, loss = train(state, batch)``, with ``has_aux`` ``state, loss, aux``.
    See `train_step`."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        optimizer: optax.GradientTransformation,
        plan: Plan,
        *,
        devices: Sequence[jax.Device] | None = None,
        batch_dims: Any = None,
        one_program: bool | None = None,
        has_aux: bool = False,
        wrt: Any = None,
        reduction: str | None = None,
        nonfinite: Answer = "warn",
        debug: Literal["numerics"] | None = None,
    ) -> None:
        _require_supported(plan)
        require_settings(nonfinite, debug)
        _warn_of_precision(plan)
        if not callable(loss_fn):
            raise PlanError(f"loss_fn is {loss_fn!r:.80}: give a function of (params, batch), or of (model, batch)")
        if isinstance(optimizer, type) or not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
            raise PlanError(f"optimizer is {optimizer!r:.80}: give an optax transformation, as optax.adam(1e-3)")
        if reduction not in REDUCTIONS:
            raise PlanError(f"reduction={reduction!r:.80}: expected 'mean', 'sum' or None")
        self.plan = plan
        self.trained = Trained(wrt)
        self.optimizer = self.trained.optimizer(optimizer)
        self.batch_dims = batch_dims
        self.has_aux = has_aux
        self._loss = LossFunction.of(loss_fn, plan, reduction=reduction, has_aux=has_aux, trained=self.trained)
        self._compiled: dict[Any, PipelinedStep | SpmdStep | OneProgramStep] = {}
        self._latest: dict[Any, tuple[Any, ...]] = {}
        """For every form of batch and state, the Python values that its last step was compiled for."""
        self._sums: dict[str, int] | None = None
        """Of what is alike in every step; None before the first."""
        self._given_sum = 0
        """Of the parameters that init was given as arrays."""
        self._looked_through: dict[int, Any] = {}
        """Descriptions of modules, whose classes' code was read."""
        self._grad_norm: jax.Array | None = None
        self._pipelined: PipelinedTraining | SpmdTraining | None = None
        if plan.decision.pp * plan.decision.virtual_stages > 1:
            used = require_devices(devices)
            spread = len({device.process_index for device in used}) > 1
            form = SpmdTraining if one_program or (one_program is None and spread) else PipelinedTraining
            self._pipelined = form(self._loss, self.optimizer, plan, devices, nonfinite)
            self._agreement = Agreement(used[: plan.mesh.size])
        else:
            self.mesh = bind(plan.mesh, devices)
            self._agreement = Agreement(list(self.mesh.devices.flat))
        self._calls = 0
        self._op_checks: dict[int, OpChecks] = {}
        """Of compiled steps, by identity."""
        self._sentinel = Sentinel(nonfinite, self._agreement.alone, debug is not None)

    def init(self, params_or_init: Any, *, state: Any = None, seed: int = 0) -> TrainState:
        """Parameters on their devices, and the optimizer's state beside them.

        params_or_init: a pytree of arrays, an ``nnx.Module``, or a function of no arguments that returns one. The
            function is compiled with the plan's shardings as those of its results: each device makes only its share,
            and the whole model is on none of them.
        state: what a plain loss function keeps beside its parameters; handed to it as ``state=``.
        seed: of the random keys handed to a plain loss function as ``rngs=``. An NNX module has its own streams.

        Raises PlanError when the parameters are not the plan's (naming those that differ) or are only shapes.
        """
        with self._mesh_set_aside():
            return self._init(params_or_init, state, seed)

    def _init(self, params_or_init: Any, state: Any, seed: int) -> TrainState:
        init = params_or_init if is_function(params_or_init) else None
        given = take_apart(abstractly(init) if init is not None else params_or_init, seed, state)
        if isinstance(params_or_init, nnx.Module) and self._loss.python is not None:
            self._loss.python.watch(params_or_init)
        if init is None and is_abstract(given):
            raise PlanError(
                "init was given shapes without values: give it arrays, or a function of no arguments that makes them"
            )
        if init is None and not self._agreement.alone:
            self._given_sum = array_sum([np.asarray(leaf) for leaf in jax.tree.leaves(given.params)])
        stages = self._in_stages(given.graphdef)
        if stages is not None:
            self._require(given)
            make = None if init is None else lambda: _arrays(take_apart(init(), seed, state))
            return stages.init(given, make)
        shardings = self._shardings(given)
        places = (shardings.params, shardings.random, shardings.other)
        if init is None:
            parts = (FusedParameters.of(self.plan, given.names).hold(given.params), given.random, given.other)
            made = tuple(_copied(part, place) for part, place in zip(parts, places, strict=True))
        elif given.graphdef is None:
            params = self._maker(init, given)()
            made = (params, _copied(given.random, places[1]), _copied(given.other, places[2]))
        else:
            made = self._maker(init, given)()
        params, random, other = made
        optimizer_state = jax.jit(self.optimizer.init, out_shardings=shardings.optimizer)(params)
        step = jax.device_put(jnp.zeros((), jnp.int32), shardings.step)
        return TrainState(step, params, optimizer_state, random, other, given.graphdef, shardings.order)

    def _in_stages(self, graphdef: Any) -> PipelinedTraining | SpmdTraining | None:
        """What trains in stages; None for a step that is one jitted function. Of a plain function no module can be told
        to run again, but the units of its program can, on one stage."""
        if self._pipelined is None and graphdef is None and self.plan.decision.recompute != "none":
            devices = list(self.mesh.devices.flatten())
            self._pipelined = PipelinedTraining(self._loss, self.optimizer, self.plan, devices, self._sentinel.answer)
        return self._pipelined

    def __call__(self, state: TrainState, batch: Any) -> Any:
        """One update on a global batch: the new state and the loss before the update, a scalar; with ``has_aux`` the
        metrics too.

        ``state`` is donated: its memory becomes the new state's. Raises PlanError when it already was, and when the
        batch is not of the plan's size.
        """
        with self._explained():
            return self._run(state, batch)

    def _explained(self) -> Any:
        """Names a peer that has failed, in runs that began with `rendezvous.init`."""
        pulse = current()
        if self._agreement.alone or pulse is None:
            return nullcontext()
        self._calls += 1
        return pulse.explained(f"step {self._calls} of this process, {self._own_stages()}")

    def _own_stages(self) -> str:
        """The stages on this process's devices, by the plan."""
        devices = np.array(self._agreement.devices).reshape(self.plan.mesh.sizes)
        along = self.plan.mesh.names.index("pp") if "pp" in self.plan.mesh.names else 0
        own = np.vectorize(lambda device: device.process_index == jax.process_index())(devices)
        ranks = sorted({int(where[along]) for where in np.argwhere(own)})
        placement = self.plan.build_schedule().placement
        stages = [str(stage) for stage, rank in enumerate(placement) if rank in ranks]
        return f"stage{'s' if len(stages) > 1 else ''} {', '.join(stages)}"

    def _run(self, state: TrainState, batch: Any) -> Any:
        """One call of the step."""
        self._sentinel.look()
        with self._step(state, batch) as (step, leaves):
            if self._sentinel.debugged:
                self._look_at_ops(step, state, leaves)
            made: StepResult = step(state, leaves)
        return self._given(made, step)

    def _look_at_ops(self, step: Any, state: TrainState, leaves: tuple[Any, ...]) -> None:
        """Complain of a step beforehand, naming the op."""
        parts = Parts(self._whole(state), state.random, state.other, state.graphdef)
        if id(step) not in self._op_checks:
            device = jax.local_devices()[0] if not self._agreement.alone else self._agreement.devices[0]
            self._op_checks[id(step)] = OpChecks.of(self.plan, step.microbatches, parts, leaves, device)
        said = self._op_checks[id(step)].first(parts.params, state.random, state.step, state.other, leaves)
        if said:
            self._sentinel.tell_beforehand(int(state.step), said)

    def settle(self) -> None:
        """Wait for all steps so far, and say what of their losses and gradients is not finite. Raises NonFiniteError
        where ``nonfinite`` says so."""
        self._sentinel.look(0)

    def _given(self, made: StepResult, step: Any, *more: Any) -> tuple[Any, ...]:
        """What a step returns to the caller."""
        self._sentinel.note(made.evidence, step.teller)
        self._grad_norm = made.grad_norm
        return (made.state, made.loss, *((made.aux,) if self.has_aux else ()), *more)

    @property
    def grad_norm(self) -> jax.Array:
        """The global norm of the last step's gradients, those of the whole model and batch before the optimizer changed
        them: a scalar. Raises PlanError before a step."""
        if self._grad_norm is None:
            raise PlanError("there is no gradient norm before the first step: run one")
        return self._grad_norm

    @contextmanager
    def _step(self, state: TrainState, batch: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        """The compiled step for a batch, and the batch's leaves. An error before the whole of a step is compiled ends
        its compilation; a later call begins with a new one."""
        with self._mesh_set_aside():
            try:
                step, leaves = self._step_for(state, batch)
            except (ValueError, AssertionError) as error:  # JAX compares too what it puts on several processes' devices
                if not isinstance(error, ShardwrightError):
                    self._agreement.settle()
                raise
            try:
                yield step, leaves
            except BaseException as error:
                if isinstance(step, PipelinedStep) and not step.pipeline.is_compiled:
                    step.pipeline.cancel()
                    self._compiled = {key: other for key, other in self._compiled.items() if other is not step}
                if isinstance(error, ValueError | AssertionError) and not isinstance(error, ShardwrightError):
                    self._agreement.settle()
                    self._require_places(state)
                raise

    def _require_places(self, state: TrainState) -> None:
        """Raise PlanError when arrays of a state do not lie where this plan keeps them."""
        stages = self._in_stages(state.graphdef)
        if isinstance(stages, PipelinedTraining):
            require_places(*stages.places(state))
        elif stages is None:
            at = self._shardings(Parts(state.params, state.random, state.other, state.graphdef))
            require_places((state.params, state.optimizer), (at.params, at.optimizer))

    def _mesh_set_aside(self) -> Any:
        """A plan has meshes of its own; one that the caller has set, of whatever axis types, is theirs alone."""
        try:
            return jax.set_mesh(NO_MESH)
        except ValueError as error:  # the only one: a program is being traced
            raise PlanError(
                "a training step was called inside jax.jit, jax.lax.scan or the like: it compiles itself; call it "
                "outside of them, in a Python loop"
            ) from error

    def _step_for(self, state: TrainState, batch: Any) -> tuple[Any, tuple[Any, ...]]:
        """The compiled step for a batch, and the batch's leaves."""
        if not isinstance(state, TrainState):
            raise PlanError(f"a {type(state).__name__} was given where a step takes the state that train.init made")
        form = state.require_alive()
        dims = resolve_batch_dims(batch, self.batch_dims)
        decision = self.plan.decision
        size = batch_size(batch, dims)
        if size != decision.batch:
            raise PlanError(
                f"a batch of {size} samples was given, and the plan is for {decision.batch} (dp {decision.dp} × "
                f"microbatch {decision.microbatch} × {self.plan.microbatches} microbatches): give {decision.batch}, or "
                f"plan with batch={size}"
            )
        batch = jax.tree.map(of_no_mesh, batch)
        leaves, structure = jax.tree.flatten(batch)
        shapes = tuple((np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
        form = (structure, dims, shapes, form)
        python = self._python(state.graphdef)
        now = python.prints()
        if (form, now) not in self._compiled and form in self._latest:
            changed = python.changed(self._latest[form], now)
            lifted = python.lift(changed)
            if lifted:
                try:
                    return self._compiled_for(state, batch, dims, form)
                except Exception:  # whatever JAX or a library says of a number that it has to know
                    python.settle(lifted)  # another error comes again
            self._warn_of_values(form, changed)
        return self._compiled_for(state, batch, dims, form)

    def _python(self, graphdef: Any) -> PythonValues:
        """What the loss function reads of Python, as it is now."""
        python = self._loss.python
        assert python is not None
        if graphdef is not None and id(graphdef) not in self._looked_through:
            self._looked_through[id(graphdef)] = graphdef
            kinds = [getattr(node, "type", None) for node in graphdef.nodes]
            python.look_through([kind for kind in kinds if isinstance(kind, type)])
        python.notice()
        return python

    def _compiled_for(
        self, state: TrainState, batch: Any, dims: tuple[int | None, ...], form: Any
    ) -> tuple[Any, tuple[Any, ...]]:
        """The compiled step for a batch and what Python's values are, and the leaves of both."""
        python = self._python(state.graphdef)
        values = python.inputs()
        given = WithValues(batch, values) if values else batch
        leaves, structure = jax.tree.flatten(given)
        dims = (*dims, *([None] * len(values)))
        now = python.prints()
        self._compare(state, structure, dims, leaves, is_new=(form, now) not in self._compiled)
        stages = self._in_stages(state.graphdef)
        if stages is None:
            leaves = [put(leaf, batch_sharding(self.mesh, dim)) for leaf, dim in zip(leaves, dims, strict=True)]
        if (form, now) not in self._compiled:
            compile_step = self._compile if stages is None else stages.step_for
            self._compiled[form, now] = compile_step(state, structure, dims, leaves)
        self._latest[form] = now
        return self._compiled[form, now], tuple(leaves)

    def _compare(
        self, state: TrainState, structure: Any, dims: tuple[int | None, ...], leaves: Sequence[Any], *, is_new: bool
    ) -> None:
        """Compare with the other processes what all must have alike. Raises PlanError, naming what differs."""
        if self._agreement.alone:
            return
        if is_new:
            held = [(jax.tree_util.keystr(path), leaf.shape, str(leaf.dtype)) for path, leaf in
                    jax.tree_util.tree_flatten_with_path((state.params, state.optimizer))[0]]  # fmt: skip
            batch = [(np.shape(leaf), str(leaf.dtype), dim) for leaf, dim in zip(leaves, dims, strict=True)]
            loss = self._loss
            self._sums = {
                "versions of JAX and its libraries": text_sum(versions()),
                "plan": text_sum((self.plan.decision, self.plan.mesh)),
                "parameters and optimizer": text_sum(held),
                "settings of train_step": text_sum((loss.has_aux, loss.reduction, self.has_aux)),
                "seed": array_sum(jax.tree.leaves(state.random)),
                "parameters given to init": self._given_sum,
                "form of the batch": text_sum((structure, batch)),
            }
        self._agreement.compare({**(self._sums or {}), "batch": array_sum(leaves)}, wait=is_new)

    def _warn_of_values(self, form: Any, changed: Sequence[Slot]) -> None:
        """Of a value that Python has to know, and for which a step was compiled again and again."""
        times = sum(other == form for other, _ in self._compiled)
        if times == COMPILED_OFTEN:
            names = ", ".join(slot.name for slot in changed)
            warnings.warn(
                f"the step is compiled for the {times + 1}th time, as {names} changed and the loss function needs it "
                "as a Python value (a shape, a branch): give it in the batch as an array, or let it take few values",
                PlanWarning,
                stacklevel=5,
            )

    def measure(self, state: TrainState, batch: Any) -> Any:
        """One update: what a step returns, and a `Timeline` of when each of its actions ran.

        Nothing is compiled meanwhile; still, a step's first run is not like the others, so run one of the same form
        before. Raises MissingCapabilityError for a plan without pipeline stages, which has no actions."""
        if not isinstance(self._in_stages(state.graphdef), PipelinedTraining):
            raise MissingCapabilityError(
                "a step of this plan is one program, without actions to measure: plan with pp above 1, in one process, "
                "or use jax.profiler"
            )
        self._sentinel.look()
        with self._step(state, batch) as (step, leaves):
            step.pipeline.finish()
            with Watch(step.pipeline.micro.cut, self.plan.decision.pp) as watch:
                made: StepResult = step(state, leaves, watch)
            return self._given(made, step, watch.timeline())

    def memory_bytes(self, state: TrainState, batch: Any) -> tuple[int, ...]:
        """For every device, those of the first pipeline rank first, the bytes that it holds at the peak of a step, by
        what the compiler says of the step's programs (`memory_analysis`), where ``plan.predicted.peak_memory_bytes`` is
        known before anything is compiled. Raises MissingCapabilityError for stages that run as one program."""
        if isinstance(self._pipelined, SpmdTraining):
            raise MissingCapabilityError(
                "the stages of this plan run as one SPMD program, whose memory this version does not read: take "
                "plan.predicted, or leave out one_program in one process"
            )
        with self._step(state, batch) as (step, leaves):
            if isinstance(step, PipelinedStep):
                meshes = step.pipeline.meshes
                devices = list(dict.fromkeys(d for stage in range(len(meshes)) for d in meshes.devices(stage)))
                return pipeline_bytes(step.pipeline, state, devices)
            held = program_bytes(step.run.lower(state, leaves).compile())
        return (held,) * self.plan.mesh.size

    def params(self, state: TrainState, at: jax.Device | jax.sharding.Sharding | None = None) -> Any:
        """The parameters as they were given to `init`: a pytree, or an NNX module. The arrays are the state's own, so
        use or copy them before the state goes into the next step.

        at: where all of them are copied to. Those of pipeline stages lie on several devices otherwise, and a model runs
        on those of one: ``train.params(state, at=jax.devices()[0])(x)``.
        """
        state.require_alive()
        self.settle()
        with self._mesh_set_aside():
            parts = (self._whole(state), state.random, state.other)
            if at is not None:
                parts = jax.tree.map(lambda leaf: own_copy(leaf, at), parts)
        return put_together(Parts(*parts, state.graphdef))

    def _whole(self, state: TrainState) -> Any:
        """Parameters as they were given, without the module that they are of."""
        stages = self._in_stages(state.graphdef)
        if stages is not None:
            return stages.whole(state)
        fused = self._fused(state)
        fused.require(state)
        return fused.restore(state.params)

    def original(self, state: TrainState) -> TrainState:
        """The state with parameters and the optimizer's values in the order of the model's own, to be saved or compared
        with a state of another plan. `held` turns it back. Only a plan without pipeline stages has such a state.
        Raises PlanError for a state of another plan."""
        state.require_alive()
        self.settle()
        fused = self._fused(state)
        fused.require(state)
        with self._mesh_set_aside():
            optimizer = fused.restore_optimizer(state.optimizer, state.params)
            return replace(state, params=fused.restore(state.params), optimizer=optimizer, order=())

    def held(self, state: TrainState) -> TrainState:
        """A state as `original` gives it → one to go on training with, on this plan's devices. Raises PlanError for one
        that is held already."""
        if state.order:
            raise PlanError(
                "held takes a state in the model's own order, and this one is held as a plan's: take "
                "train.place(state), or other.original(state) first where it is another plan's"
            )
        shardings = self._shardings(Parts(state.params, state.random, state.other, state.graphdef))
        fused = self._fused(state)
        with self._mesh_set_aside():
            optimizer = fused.hold_optimizer(state.optimizer, state.params)
            held = replace(state, params=fused.hold(state.params), optimizer=optimizer, order=fused.order)
            found: TrainState = _copied(held, shardings)
        return found

    def place(self, state: TrainState) -> TrainState:
        """A state that was saved (`jax.device_get`, a checkpoint) → the same on this plan's devices, in memory of its
        own. Raises PlanError for a state of another plan, MissingCapabilityError for stages that run as one program.

        A state knows how its fused matrices are held, where it is kept as a whole: a checkpoint of its arrays alone,
        read into another plan's state, cannot be told apart from that plan's own. Save `original` then.
        """
        state.require_alive()
        stages = self._in_stages(state.graphdef)
        if isinstance(stages, SpmdTraining):
            raise MissingCapabilityError(
                "the stages of this plan run as one SPMD program, whose state this version does not place again: give "
                "the parameters to train.init, or leave out one_program in one process"
            )
        with self._mesh_set_aside():
            if stages is not None:
                return stages.place(state)
            self._fused(state).require(state)
            require_like(state.optimizer, jax.eval_shape(self.optimizer.init, state.params))
            shardings = self._shardings(Parts(state.params, state.random, state.other, state.graphdef))
            placed: TrainState = _copied(state, shardings)
        return placed

    def _fused(self, state: TrainState) -> FusedParameters:
        if self._in_stages(state.graphdef) is not None:
            raise MissingCapabilityError(
                "the plan has pipeline stages, or computes units of a plain function again, and then the state lies "
                "apart: take train.params(state), or plan with pp=1 and without recompute"
            )
        return FusedParameters.of(self.plan, Parts(state.params, None, None, state.graphdef).names)

    @property
    def pipeline(self) -> Pipeline:
        """The compiled pipeline of the last new step. Raises PlanError without one, or before a step."""
        steps = [step for step in self._compiled.values() if isinstance(step, PipelinedStep)]
        if not steps:
            raise PlanError("there is no compiled pipeline: plan with pp above 1, and run a step first")
        return steps[-1].pipeline

    @property
    def compiled(self) -> Compilation | None:
        """What compiling the last new step of a pipeline took; None without a pipeline, or before a step."""
        steps = [step for step in self._compiled.values() if isinstance(step, PipelinedStep)]
        return steps[-1].pipeline.done if steps else None

    @property
    def counts(self) -> StepCounts | None:
        """What the last step of a pipeline asked of the host; None without a pipeline, or before a step."""
        steps = [step for step in self._compiled.values() if isinstance(step, PipelinedStep)]
        return steps[-1].pipeline.counts if steps else None

    def lower_init(self, init: Callable[[], Any]) -> Any:
        """The compiled form of an init function as `jax.stages.Lowered`: what `init` runs on every device."""
        with self._mesh_set_aside():
            return self._maker(init, take_apart(abstractly(init), 0, None)).lower()

    def lower(self, state: TrainState, batch: Any) -> Any:
        """The step as `jax.stages.Lowered`, to look at what is compiled. Arrays may be shapes."""
        dims = resolve_batch_dims(batch, self.batch_dims)
        values = self._python(state.graphdef).inputs()
        leaves, structure = jax.tree.flatten(WithValues(batch, values) if values else batch)
        dims = (*dims, *([None] * len(values)))
        with self._mesh_set_aside():
            compiled: Any = self._compile(state, structure, dims, leaves)
            return compiled.run.lower(state, tuple(leaves))

    # -----------------------------------------------------------------------------------------------------------

    def _maker(self, init: Callable[[], Any], given: Parts) -> Any:
        """An init function compiled so that every device makes its share."""
        shardings = self._shardings(given)
        fused = FusedParameters.of(self.plan, given.names)
        if given.graphdef is None:
            return jax.jit(lambda: fused.hold_made(init(), self.mesh), out_shardings=shardings.params)
        places = (shardings.params, shardings.random, shardings.other)

        def make() -> tuple[Any, Any, Any]:
            params, random, other = _arrays(take_apart(init(), 0, None))
            return fused.hold_made(params, self.mesh), random, other

        return jax.jit(make, out_shardings=places)

    def _require(self, parts: Parts) -> None:
        """Raise PlanError unless these are the plan's parameters."""
        self.plan.require_model("jax", parts.names, "the model given to init")
        _require_sizes(self.plan, parts)

    def _shardings(self, parts: Parts) -> TrainState:
        """A TrainState whose leaves are shardings."""
        self._require(parts)
        shard = self.plan.decision.shard
        layouts = self.plan.parameter_layouts("jax")
        params = parameter_shardings(parts.names, parts.params, layouts, self.mesh)
        spread = spread_over("dp", parts.params, params) if shard else params
        _, optimizer = optimizer_shardings(self.optimizer, parts.params, spread, self.mesh)
        whole: Any = replicated(self.mesh)
        return TrainState(
            whole,
            spread if shard == 3 else params,
            optimizer,
            jax.tree.map(lambda _: whole, parts.random),
            jax.tree.map(lambda _: whole, parts.other),
            parts.graphdef,
            FusedParameters.of(self.plan, parts.names).order,
        )

    def _compile(
        self, state: TrainState, structure: Any, dims: tuple[int | None, ...], leaves: Sequence[Any]
    ) -> "OneProgramStep":
        parts = Parts(state.params, state.random, state.other, state.graphdef)
        FusedParameters.of(self.plan, parts.names).require(state)
        shardings = self._shardings(parts)
        decision = self.plan.decision
        gradients_at = spread_over("dp", state.params, shardings.params) if decision.shard >= 2 else shardings.params

        microbatches = Microbatches.of(self._loss, self.plan, parts, structure, dims, leaves)
        laid_out = TensorParallel.lay_out(microbatches, self.plan, self.mesh.abstract_mesh, parts.names)

        whole: Any = replicated(self.mesh)
        answer = self._sentinel.answer

        def step(state: TrainState, leaves: tuple[Any, ...]) -> StepResult:
            loss, mean, other, aux, losses = accumulate(
                laid_out, state, leaves, mesh=self.mesh, gradients_at=gradients_at
            )
            updates, optimizer = updated(self.optimizer, mean, state.optimizer, state.params, loss)
            params = self.trained.apply(state.params, updates)
            after = replace(state, step=state.step + 1, params=params, optimizer=optimizer, other=other)
            at = list(compress(jax.tree.leaves(gradients_at), self.trained.mask(state.params)))
            squares = split_squares(jax.tree.leaves(mean), at)
            norm, evidence = jnp.sqrt(squares.sum()), None
            if answer == "error":
                after = chosen(is_sound(loss, norm), after, state)
            if answer != "ignore":
                evidence = Evidence(state.step, loss, norm, (losses, squares))
            return StepResult(after, loss, aux, norm, evidence)

        run = jax.jit(
            step,
            in_shardings=(shardings, tuple(batch_sharding(self.mesh, dim) for dim in dims)),
            out_shardings=StepResult(shardings, whole, None if microbatches.metrics is None else whole, whole, whole),
            donate_argnums=0,
            compiler_options=keeping_barriers(self.mesh.devices.flat),
        )
        trained = OneProgram(list(compress(parts.names, self.trained.mask(state.params))))
        return OneProgramStep(run, microbatches, trained)


@dataclass(frozen=True, slots=True, eq=False)
class OneProgramStep:
    """A step that is one jitted function."""

    run: Any
    microbatches: Microbatches
    """Without the plan's layouts."""
    teller: OneProgram

    def __call__(self, state: TrainState, leaves: tuple[Any, ...]) -> StepResult:
        found: StepResult = self.run(state, leaves)
        return found


def _require_supported(plan: Plan) -> None:
    if not isinstance(plan, Plan):
        raise PlanError(f"plan is {plan!r:.80}: give what sw.plan or sw.Plan.load returned")
    decision = plan.decision
    CAPABILITIES.require_axes({"pp": decision.pp})
    CAPABILITIES.require_on_device(decision.offloaded_units)
    if decision.precision not in ("fp32", "bf16") and plan.is_pinned("precision"):
        raise MissingCapabilityError(
            f"the plan has precision={decision.precision!r}, but the JAX runtime of this version trains in fp32 and "
            "bf16: plan with one of them"
        )
    if decision.shard and decision.shard_group not in (None, decision.dp):
        raise MissingCapabilityError(
            f"the plan shards over groups of {decision.shard_group} of dp={decision.dp}, but the JAX runtime of this "
            "version shards over all of dp: plan without shard_group"
        )


def _warn_of_precision(plan: Plan) -> None:
    if plan.decision.precision != "fp32" and not plan.is_pinned("precision"):
        warnings.warn(
            f"the plan counts on {plan.decision.precision}, which nobody pinned: the model runs as it is, so time and "
            f"memory may differ from what was predicted; pin precision={plan.decision.precision!r} to compute in it",
            stacklevel=4,
        )


def _require_sizes(plan: Plan, parts: Parts) -> None:
    """Raise PlanError for parameters that have not as many entries as the plan's."""
    for name, leaf in zip(parts.names, jax.tree.leaves(parts.params), strict=True):
        kind = getattr(leaf, "dtype", type(leaf).__name__)
        if isinstance(kind, str) or not jnp.issubdtype(kind, jnp.inexact):
            raise PlanError(
                f"parameter {name} is {kind}, which has no gradient: give it as a floating array, or keep it in the "
                "state or the batch"
            )
    shapes = dict(zip(parts.names, (leaf.shape for leaf in jax.tree.leaves(parts.params)), strict=True))
    for unit, bound in enumerate(plan.binding("jax").units):
        slots = dict(plan.model.class_slots[plan.model.unit_classes[unit]])
        for role, name, _ in bound.parameters:
            if math.prod(slots[role]) != math.prod(shapes[name]):
                raise PlanError(
                    f"parameter {name} has shape {shapes[name]}, and the plan is for a model where it has "
                    f"{math.prod(slots[role])} entries {slots[role]}: capture this model and plan again"
                )


def _arrays(parts: Parts) -> tuple[Any, Any, Any]:
    return parts.params, parts.random, parts.other


def _copied(tree: Any, shardings: Any) -> Any:
    """The arrays on their devices, sharing no memory with what was given."""
    return jax.tree.map(own_copy, tree, shardings)
