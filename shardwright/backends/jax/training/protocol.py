"""The protocol of every form of training: it places a state, and compiles and runs steps on it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import jax
import optax

from shardwright.backends.jax.capture.samples import FlatBatch
from shardwright.backends.jax.capture.tree import Parts
from shardwright.backends.jax.loss.microbatches import LossFunction, Microbatches
from shardwright.backends.jax.loss.scaling import Scaling
from shardwright.backends.jax.pipeline.actions import Pipeline
from shardwright.backends.jax.pipeline.sentinels import Answer, Teller
from shardwright.backends.jax.state.checks import require_wide
from shardwright.backends.jax.state.train_state import StepResult, TrainState
from shardwright.core.errors import MissingCapabilityError
from shardwright.core.model.loss.scaling import LossScale
from shardwright.core.plan.plan import Plan
from shardwright.core.schedule.timeline import Timeline


class CompiledStep(Protocol):
    """A step for batches of one form, from state to state."""

    @property
    def microbatches(self) -> Microbatches:
        """The microbatches of a batch, without the plan's layouts."""

    @property
    def teller(self) -> Teller:
        """The teller of what the evidence of a step means."""

    @property
    def pipeline(self) -> Pipeline | None:
        """The compiled programs of a step that runs as a pipeline's actions."""

    def __call__(self, state: TrainState, leaves: tuple[Any, ...]) -> StepResult:
        """The result of one step on a state, which is used up, and on the leaves of a batch."""

    def measure(self, state: TrainState, leaves: tuple[Any, ...]) -> tuple[StepResult, Timeline]:
        """The result of one step, and the times of each of its actions. Raises MissingCapabilityError for a step
        without actions."""

    def memory_bytes(self, state: TrainState, leaves: tuple[Any, ...]) -> tuple[int, ...]:
        """The bytes that every device holds at the step's peak, by what the compiler says of its programs. Raises
        MissingCapabilityError for programs whose memory is not read."""

    def cancel(self) -> bool:
        """Compile no more of the step. Returns whether the step cannot be run, as something was left to compile."""


class Training(Protocol):
    """One form of training under a plan. ``make`` is a function that makes a model's parts, to be traced."""

    def init(self, given: Parts, make: Callable[[], Parts] | None) -> TrainState:
        """The state of a model: of its arrays, or of its shapes and the function that makes them."""

    def put(self, batch: FlatBatch) -> FlatBatch:
        """The batch on the devices where a step takes it from."""

    def step_for(self, state: TrainState, batch: FlatBatch) -> CompiledStep:
        """The compiled step for batches of one form. Raises PlanError for a state of another plan."""

    def whole(self, state: TrainState) -> Any:
        """The parameters as they were given to `init`, without the module that they are of."""

    def place(self, state: TrainState) -> TrainState:
        """A copy of a state, wherever its arrays are, on this plan's devices. Raises PlanError for a state of another
        plan."""

    def require_places(self, state: TrainState) -> None:
        """Raise PlanError when arrays of a state are not where this plan keeps them."""

    def apart(self, state: TrainState) -> TrainState:
        """The state as a checkpoint has it: with a leaf for each of the model's, on the devices that have it."""

    def release(self, state: TrainState) -> None:
        """Free what `apart` has copied of a state."""

    def together(self, state: TrainState, like: TrainState) -> TrainState:
        """The counterpart of `apart`, for a state as another is. What is put together is used up."""

    def original(self, state: TrainState) -> TrainState:
        """The state in the order of the model's own. Raises MissingCapabilityError for forms that divide a state among
        stages."""

    def held(self, state: TrainState) -> TrainState:
        """The counterpart of `original`."""

    def lower(self, state: TrainState, batch: FlatBatch) -> jax.stages.Lowered:
        """The one program of a step, before it is compiled. Raises MissingCapabilityError as `original` does."""

    def lower_init(self, given: Parts, make: Callable[[], Parts]) -> jax.stages.Lowered:
        """The program that makes the parameters, before it is compiled."""


class WithoutActions:
    """A step that is one program: it has no actions to measure, and nothing to cancel."""

    __slots__ = ()
    pipeline: None = None

    def measure(self, state: TrainState, leaves: tuple[Any, ...]) -> NoReturn:
        raise MissingCapabilityError(
            "a step of this plan is one program, without actions to measure: plan with pp above 1, in one process, "
            "or use jax.profiler"
        )

    def cancel(self) -> bool:
        return False


@dataclass(eq=False)
class OfPlan:
    """What every form of training is made of."""

    loss: LossFunction
    optimizer: optax.GradientTransformation
    plan: Plan
    devices: Sequence[jax.Device]
    nonfinite: Answer
    rule: LossScale | None
    """The rule of the factor of the loss; None but in float16."""

    @property
    def compute(self) -> Any:
        """The dtype in which steps compute; None: that of the parameters."""
        return self.loss.compute

    @property
    def is_kept_sharded(self) -> bool:
        """Whether parameters are sharded over replicas between steps: at stage 3 of ZeRO, and from stage 1 on where
        steps run on copies in 16 bits, since those in float32 are read by the update alone."""
        shard = self.plan.decision.shard
        return shard == 3 or (shard > 0 and self.compute is not None)

    def apart(self, state: TrainState) -> TrainState:
        """The state as it is: it has a leaf for each of the model's."""
        return state

    def release(self, state: TrainState) -> None:
        """Nothing was copied."""

    def together(self, state: TrainState, like: TrainState) -> TrainState:
        """The state as it is."""
        return state

    def require_precision(self, parts: Parts) -> None:
        """Raise PlanError unless the parameters of a state are in the dtypes that this plan keeps them in."""
        require_wide(parts.names, parts.params, self.loss.trained.mask(parts.params), self.compute)

    def first_scaling(self) -> Scaling | None:
        """The factor of the loss in the first step."""
        return None if self.rule is None else Scaling.begin(self.rule)

    def scaling_of(self, state: TrainState) -> Scaling | None:
        """The factor of the loss that training goes on with from a state, which may be of a plan in another
        precision."""
        return state.scaling if self.rule is not None and state.scaling is not None else self.first_scaling()


class InStages(OfPlan):
    """A form that divides a state among stages: `original`, `held`, `lower` and `lower_init` raise
    MissingCapabilityError."""

    def put(self, batch: FlatBatch) -> FlatBatch:
        """The batch as it is: its leaves are split into microbatches first."""
        return batch

    def original(self, state: TrainState) -> NoReturn:
        raise MissingCapabilityError(
            "the plan has pipeline stages, or computes units of a plain function again, and then the state lies "
            "apart: take train.params(state), or plan with pp=1 and without recompute"
        )

    held = original

    def lower(self, state: TrainState, batch: FlatBatch) -> NoReturn:
        raise MissingCapabilityError(
            "the plan has pipeline stages, or computes units of a plain function again, and then no single program is "
            "a step: look at train.pipeline after a step, or plan with pp=1 and without recompute"
        )

    def lower_init(self, given: Parts, make: Callable[[], Parts]) -> NoReturn:
        raise MissingCapabilityError(
            "the plan has pipeline stages, or computes units of a plain function again, and then every stage makes its "
            "parameters by a program of its own: plan with pp=1 and without recompute"
        )
