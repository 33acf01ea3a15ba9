"""The training step of a plan: it checks what is given, chooses the form of training, and runs steps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from shardwright.backends.jax.capture.precision import between_steps
from shardwright.backends.jax.capture.samples import batch_size, of_no_mesh, resolve_batch_dims
from shardwright.backends.jax.capture.tree import Parts, abstract, is_function, put_together, take_apart
from shardwright.backends.jax.loss.microbatches import LossFunction
from shardwright.backends.jax.machine.mesh import no_mesh, require_devices
from shardwright.backends.jax.machine.process_transfers import on_own_device
from shardwright.backends.jax.pipeline.actions import Pipeline, StepCounts
from shardwright.backends.jax.pipeline.compilation import Compilation
from shardwright.backends.jax.pipeline.first_bad_op import OpChecks
from shardwright.backends.jax.pipeline.sentinels import Answer, Sentinel, require_settings
from shardwright.backends.jax.program.python_values import PythonValues, with_values
from shardwright.backends.jax.state.checks import require_model
from shardwright.backends.jax.state.train_state import StepResult, TrainState, own_copy, parts_of
from shardwright.backends.jax.state.trainable import Trained
from shardwright.backends.jax.training import checkpoints
from shardwright.backends.jax.training.agreement import StepAgreement
from shardwright.backends.jax.training.arguments import (
    loss_scale_rule,
    require_fp8,
    require_functions,
    require_size,
    require_supported,
    say_precision,
)
from shardwright.backends.jax.training.compiled_steps import CompiledSteps
from shardwright.backends.jax.training.form import Form, form_of
from shardwright.backends.jax.training.pipelined import PipelinedTraining
from shardwright.backends.jax.training.protocol import CompiledStep, Training
from shardwright.backends.jax.training.step_log import StepLog
from shardwright.core.checkpoint.name_map import NameMap
from shardwright.core.errors import PlanError, ShardwrightError
from shardwright.core.plan.plan import Plan
from shardwright.core.values.step_line import require_every


def train_step(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    plan: Plan,
    *,
    devices: Sequence[jax.Device] | None = None,
    batch_dims: Any = None,
    one_program: bool = False,
    has_aux: bool = False,
    wrt: Any = None,
    reduction: str | None = None,
    nonfinite: Answer = "warn",
    debug: Literal["numerics"] | None = None,
    log_every: int = 10,
    static_loss_scale: float = 1.0,
    dynamic_loss_scale: bool = False,
    dynamic_loss_args: Mapping[str, Any] | None = None,
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
        own for each stage, which any model and schedule can.
    has_aux: the function returns ``(loss, aux)``, or ``(loss, aux, state)``, and the step ``state, loss, aux``: a
        pytree of metrics, each combined over microbatches and replicas by what it is (`backends.jax.loss.metrics`):
        joined where it has a dim of samples, else the weighted mean, integers the sum.
    wrt: the parameters that are trained (default: all): an NNX filter, a function of (path, value) that returns a bool,
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
    log_every: the first process says a line after the first update and after every so many: loss, norm of the
        gradients, memory, tokens, FLOPs (`core.values.step_line`); 0: none. It is said in a later call, once its values
        are there, in `TrainStep.settle`, or at the end.
    static_loss_scale: a fixed factor of losses, for plans in float16; gradients are divided by it again.
    dynamic_loss_scale: whether the factor is found while training goes on.
    dynamic_loss_args: the arguments of a dynamic factor: ``init_scale`` (2**32), ``scale_factor`` (2),
        ``scale_window`` (1000), ``min_scale`` (1), ``delayed_shift`` (1), ``consecutive_hysteresis`` (False); see
        `core.model.loss.scaling.LossScale`. In float16 a step whose gradients overflow is skipped, on all devices: it
        leaves all but ``state.step`` and the factor as it was, and is logged in a later call.

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
        log_every=log_every,
        static_loss_scale=static_loss_scale,
        dynamic_loss_scale=dynamic_loss_scale,
        dynamic_loss_args=dynamic_loss_args,
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
        one_program: bool = False,
        has_aux: bool = False,
        wrt: Any = None,
        reduction: str | None = None,
        nonfinite: Answer = "warn",
        debug: Literal["numerics"] | None = None,
        log_every: int = 10,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
    ) -> None:
        require_supported(plan)
        require_every(log_every)
        require_settings(nonfinite, debug)
        self._rule = loss_scale_rule(plan, static_loss_scale, dynamic_loss_scale, dynamic_loss_args)
        say_precision(plan, self._rule)
        require_functions(loss_fn, optimizer, reduction)
        self.plan = plan
        self.trained = Trained(wrt)
        self.optimizer = self.trained.optimizer(optimizer)
        self.batch_dims = batch_dims
        self.has_aux = has_aux
        python = PythonValues.of(loss_fn)
        self._loss = LossFunction.of(
            loss_fn, plan, reduction=reduction, has_aux=has_aux, trained=self.trained, python=python
        )
        self._steps = CompiledSteps(python)
        self._grad_norm: jax.Array | None = None
        self._devices, self._one_program, self._nonfinite = require_devices(devices), one_program, nonfinite
        self._trainings: dict[Form, Training] = {}
        require_fp8(plan, self._devices[: plan.mesh.size])
        in_stages = isinstance(self._training(is_module=True), PipelinedTraining)
        held = self._devices[: plan.mesh.size]
        self._agreement = StepAgreement(held, plan, self._loss, self._rule, in_stages=in_stages)
        self._op_checks: dict[int, OpChecks] = {}
        """The checks of compiled steps, by the identity of the step."""
        self._sentinel = Sentinel(nonfinite, self._agreement.alone, debug is not None)
        says = log_every and jax.process_index() == 0
        self._log = StepLog(log_every, plan, self._loss, self._devices[: plan.mesh.size]) if says else None

    def _training(self, *, is_module: bool) -> Training:
        """The form of training for the kind of model that is trained."""
        form = form_of(self.plan, self._one_program, is_module=is_module)
        if form not in self._trainings:
            self._trainings[form] = form(
                self._loss, self.optimizer, self.plan, self._devices, self._nonfinite, self._rule
            )
        return self._trainings[form]

    def _training_of(self, state: TrainState) -> Training:
        return self._training(is_module=state.graphdef is not None)

    def init(self, params_or_init: Any, *, state: Any = None, seed: int = 0) -> TrainState:
        """The state of parameters on their devices, with the optimizer's state beside them.

        params_or_init: a pytree of arrays, an ``nnx.Module``, or a function of no arguments that returns one. The
            function is compiled with the plan's shardings as those of its results: each device makes only its share,
            and the whole model is on none of them.
        state: what a plain loss function keeps beside its parameters; handed to it as ``state=``.
        seed: of the random keys handed to a plain loss function as ``rngs=``. An NNX module has its own streams.

        Raises PlanError when the parameters are not the plan's (naming those that differ) or are only shapes.
        """
        with no_mesh():
            init = params_or_init if is_function(params_or_init) else None
            given = take_apart(params_or_init if init is None else nnx.eval_shape(init), seed, state)
            if isinstance(params_or_init, nnx.Module):
                self._steps.python.follow(params_or_init)
            if init is None and given.is_abstract:
                raise PlanError(
                    "init was given shapes without values: give it arrays, or a function of no arguments that makes "
                    "them"
                )
            if init is None:
                self._agreement.note_given(given)
            require_model(self.plan, given)
            if self._log is not None:
                self._log.model = jax.tree.map(abstract, given)
            given = self._between_steps(given)
            make = None if init is None else lambda: self._between_steps(take_apart(init(), seed, state))
            self._agreement.compare_call("train.init")
            return self._training(is_module=given.graphdef is not None).init(given, make)

    def _between_steps(self, parts: Parts) -> Parts:
        """A model taken apart, with its parameters as they are between steps."""
        return replace(parts, params=between_steps(parts.params, self.trained.mask(parts.params), self._loss.compute))

    def __call__(self, state: TrainState, batch: Any) -> Any:
        """The results of one update on a global batch: the new state and the loss before the update, a scalar; with
        ``has_aux`` the metrics too.

        ``state`` is donated: its memory becomes the new state's. Raises PlanError when it already was, and when the
        batch is not of the plan's size.
        """
        with self._agreement.explained():
            return self._run(state, batch)

    def _run(self, state: TrainState, batch: Any) -> Any:
        """The results of one call of the step."""
        self._sentinel.look()
        if self._log is not None:
            self._log.begin()
        with self._step(state, batch) as (step, leaves):
            if self._sentinel.debugged:
                self._look_at_ops(step, state, leaves)
            made = step(state, leaves)
        if self._log is not None:
            given = with_values(batch, resolve_batch_dims(batch, self.batch_dims), [])
            self._log.updated(step, given, made)
        return self._returned(made, step)

    def _look_at_ops(self, step: CompiledStep, state: TrainState, leaves: tuple[Any, ...]) -> None:
        """Complain of a step that is not run yet whose losses or gradients will not be finite, and name the op."""
        parts, number = self._whole(state)
        if id(step) not in self._op_checks:
            device = jax.local_devices()[0] if not self._agreement.alone else self._agreement.devices[0]
            self._op_checks[id(step)] = OpChecks.of(self.plan, step.microbatches, parts, leaves, device)
        said = self._op_checks[id(step)].first(parts.params, parts.random, number, parts.other, leaves)
        if said:
            self._sentinel.tell_beforehand(int(state.step), said)

    def _whole(self, state: TrainState) -> tuple[Parts, jax.Array]:
        """The model of a state with whole parameters, and the count of steps. Where stages lie on the devices of
        several processes, all of it is on a device of each."""
        parts = replace(parts_of(state), params=self._training_of(state).whole(state))
        if not self._agreement.by_transfers:
            return parts, state.step
        beside = on_own_device((parts.random, parts.other, state.step), self._agreement.devices)
        return replace(parts, random=beside[0], other=beside[1]), beside[2]

    def settle(self) -> None:
        """Wait for all steps so far, and report the losses and gradients that are not finite. Raises NonFiniteError
        where ``nonfinite`` says so."""
        self._sentinel.look(0)
        if self._log is not None:
            self._log.settle()

    def _returned(self, made: StepResult, step: CompiledStep) -> tuple[Any, ...]:
        """The results of a step as the caller gets them."""
        self._sentinel.note(made.evidence, step.teller)
        self._grad_norm = made.grad_norm
        return (made.state, made.loss, *((made.aux,) if self.has_aux else ()))

    @property
    def grad_norm(self) -> jax.Array:
        """The global norm of the last step's gradients, those of the whole model and batch before the optimizer changed
        them: a scalar. Raises PlanError before a step."""
        if self._grad_norm is None:
            raise PlanError("there is no gradient norm before the first step: run one")
        return self._grad_norm

    @property
    def overflow(self) -> jax.Array:
        """Whether the last step was skipped, as its gradients overflowed in float16: a bool scalar. Raises PlanError
        before a step."""
        return jnp.logical_not(jnp.isfinite(self.grad_norm)) & (self._rule is not None)

    @contextmanager
    def _step(self, state: TrainState, batch: Any) -> Iterator[tuple[CompiledStep, tuple[Any, ...]]]:
        """The compiled step for a batch, and the batch's leaves. An error before the whole of a step is compiled ends
        its compilation; a later call begins with a new one."""
        with no_mesh():
            try:
                step, leaves = self._step_for(state, batch)
            except (ValueError, AssertionError) as error:  # JAX compares too what it puts on several processes' devices
                if not isinstance(error, ShardwrightError):
                    self._agreement.settle()
                raise
            try:
                yield step, leaves
            except BaseException as error:
                if step.cancel():
                    self._steps.forget(step)
                if isinstance(error, ValueError | AssertionError) and not isinstance(error, ShardwrightError):
                    self._agreement.settle()
                    self._training_of(state).require_places(state)
                raise

    def _step_for(self, state: TrainState, batch: Any) -> tuple[CompiledStep, tuple[Any, ...]]:
        """The compiled step for a batch, and the batch's leaves."""
        if not isinstance(state, TrainState):
            raise PlanError(f"a {type(state).__name__} was given where a step takes the state that train.init made")
        kept = state.require_alive()
        dims = resolve_batch_dims(batch, self.batch_dims)
        require_size(self.plan, batch_size(batch, dims))
        batch = jax.tree.map(of_no_mesh, batch)
        leaves, structure = jax.tree.flatten(batch)
        shapes = tuple((np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
        training = self._training_of(state)

        def compile_step(values: list[np.ndarray], known: CompiledStep | None) -> Any:
            given = with_values(batch, dims, values)
            self._agreement.compare_step(state, given, is_new=known is None)
            given = training.put(given)
            step = known or training.step_for(state, given)
            if known is None and step.pipeline is not None:
                self._agreement.compare_program(step.pipeline.transfer_order())
            return step, given.leaves

        return self._steps.find((structure, dims, shapes, kept), state.graphdef, compile_step)

    def measure(self, state: TrainState, batch: Any) -> Any:
        """The results of one update, and a `Timeline` of the times at which its actions ran.

        Nothing is compiled meanwhile; still, a step's first run is not like the others, so run one of the same form
        before. Raises MissingCapabilityError for a plan without pipeline stages, which has no actions."""
        self._sentinel.look()
        with self._step(state, batch) as (step, leaves):
            made, timeline = step.measure(state, leaves)
        return (*self._returned(made, step), timeline)

    def memory_bytes(self, state: TrainState, batch: Any) -> tuple[int, ...]:
        """The bytes that each device holds at the peak of a step, those of the first pipeline rank first. They follow
        from what the compiler says of the step's programs (`memory_analysis`), where
        ``plan.predicted.peak_memory_bytes`` is known before anything is compiled. Raises MissingCapabilityError for
        stages that run as one program."""
        with self._step(state, batch) as (step, leaves):
            return step.memory_bytes(state, leaves)

    def params(self, state: TrainState, at: jax.Device | jax.sharding.Sharding | None = None) -> Any:
        """The parameters as they were given to `init`: a pytree, or an NNX module. The arrays are the state's own, so
        use or copy them before the state goes into the next step.

        at: where all of them are copied to. Those of pipeline stages lie on several devices otherwise, and a model runs
        on those of one: ``train.params(state, at=jax.devices()[0])(x)``.
        """
        state.require_alive()
        self.settle()
        self._agreement.compare_call("train.params")
        with no_mesh():
            parts, _ = self._whole(state)
            if at is not None:
                parts = jax.tree.map(lambda leaf: own_copy(leaf, at), parts)
        return put_together(parts)

    def original(self, state: TrainState) -> TrainState:
        """The state with parameters and the optimizer's values in the order of the model's own, to be saved or compared
        with a state of another plan. `held` turns it back. Only a plan without pipeline stages has such a state.
        Raises PlanError for a state of another plan."""
        state.require_alive()
        self.settle()
        with no_mesh():
            return self._training_of(state).original(state)

    def held(self, state: TrainState) -> TrainState:
        """A state for training on this plan's devices, from one that `original` gave. Raises PlanError for a state that
        is held already."""
        if state.order:
            raise PlanError(
                "held takes a state in the model's own order, and this one is held as a plan's: take "
                "train.place(state), or other.original(state) first where it is another plan's"
            )
        with no_mesh():
            return self._training_of(state).held(state)

    def place(self, state: TrainState) -> TrainState:
        """A saved state (`jax.device_get`, a checkpoint) on this plan's devices, in memory of its own. Raises PlanError
        for a state of another plan, MissingCapabilityError for stages that run as one program.

        A state knows how its fused matrices are held, where it is kept as a whole: a checkpoint of its arrays alone,
        read into another plan's state, cannot be told apart from that plan's own. Save `original` then.
        """
        state.require_alive()
        with no_mesh():
            return self._training_of(state).place(state)

    def save_checkpoint(
        self, path: str | Path, tag: str, state: TrainState, user_content: Any = None, *, keep: int | None = None
    ) -> None:
        """Write a state to ``path/tag``, each device's share by itself: `resume_from_checkpoint` reads it under any
        plan. It is complete when its marker is there, which is written last: what fails or is killed before leaves what
        was there.

        user_content: numbers, texts, lists, tuples, dicts and arrays. Nothing is pickled.
        keep: so many of the newest checkpoints of the folder are kept; None: all.

        Over several processes all call this, and each writes what its devices have; the folder is one that they share.

        Raises CheckpointError where it cannot be written, and DisagreementError on the other processes then.
        """
        state.require_alive()
        self.settle()
        with no_mesh():
            held = self._training_of(state).apart(state)
            checkpoints.save(Path(path), tag, held, self.plan, user_content, keep)

    def resume_from_checkpoint(
        self,
        path: str | Path,
        state: TrainState,
        tag: str | None = None,
        *,
        load_optimizer: bool = True,
        names: NameMap | Mapping[str, str] | str | Path | None = None,
        missing_ok: bool = False,
    ) -> tuple[TrainState, Any]:
        """The state of a checkpoint, whatever plan it was written under, and its ``user_content``. ``state``, of the
        same model and optimizer, as `init` of a function makes it, says where arrays lie; it is used up. Each device
        reads its share.

        tag: the name of a checkpoint; None: the newest that is complete.
        load_optimizer: whether the optimizer's state is loaded too.
        names: for a checkpoint of PyTorch, how its names and layouts become this model's: the name of a family, a
            `NameMap`, its TOML file, or its relations. The states of Adam, AdamW and SGD with momentum come along, and
            the counts of steps; random keys stay as they are.
        missing_ok: whether a folder without a complete checkpoint, or none, is a first start: then the given state and
            None come back.

        Raises CheckpointError where there is none, it is not complete, damaged, or of another model or optimizer.
        """
        state.require_alive()
        chosen = None if names is None else NameMap.of_any(names)
        training = self._training_of(state)
        with no_mesh():
            apart = training.apart(state)
            found = checkpoints.resume(
                Path(path), tag, apart, chosen, load_optimizer=load_optimizer, missing_ok=missing_ok,
                release=lambda: training.release(state),
            )  # fmt: skip
            return (state, None) if found is None else (training.together(found[0], state), found[1])

    def _pipelines(self) -> list[Pipeline]:
        """The compiled pipelines, the newest last."""
        return [step.pipeline for step in self._steps if step.pipeline is not None]

    @property
    def pipeline(self) -> Pipeline:
        """The compiled pipeline of the last new step. Raises PlanError without one, or before a step."""
        pipelines = self._pipelines()
        if not pipelines:
            raise PlanError("there is no compiled pipeline: plan with pp above 1, and run a step first")
        return pipelines[-1]

    @property
    def compiled(self) -> Compilation | None:
        """The record of compiling the last new step of a pipeline; None without a pipeline, or before a step."""
        pipelines = self._pipelines()
        return pipelines[-1].done if pipelines else None

    @property
    def counts(self) -> StepCounts | None:
        """The counts of the last step of a pipeline; None without a pipeline, or before a step."""
        pipelines = self._pipelines()
        return pipelines[-1].counts if pipelines else None

    def lower_init(self, init: Callable[[], Any]) -> jax.stages.Lowered:
        """The compiled form of an init function as `jax.stages.Lowered`: the program that `init` runs on every device.
        Raises MissingCapabilityError for a plan with pipeline stages."""
        with no_mesh():
            given = self._between_steps(take_apart(nnx.eval_shape(init)))
            training = self._training(is_module=given.graphdef is not None)
            return training.lower_init(given, lambda: self._between_steps(take_apart(init())))

    def lower(self, state: TrainState, batch: Any) -> jax.stages.Lowered:
        """The step as `jax.stages.Lowered`, to look at before it is compiled. Arrays may be shapes. Raises
        MissingCapabilityError for a plan with pipeline stages."""
        given = with_values(batch, resolve_batch_dims(batch, self.batch_dims), self._steps.inputs(state.graphdef))
        with no_mesh():
            return self._training_of(state).lower(state, given)
