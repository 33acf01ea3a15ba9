"""A model split over this run's ranks, and the training steps that it runs: as recorded pipelines or by messages."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from shardwright.backends.torch.loss.read import StepReading
from shardwright.backends.torch.machine.agreement import Agreement, Claim
from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.backends.torch.pipeline.compiling import Compiler
from shardwright.backends.torch.pipeline.sentinels import Sentinel
from shardwright.backends.torch.pipeline.step_results import Shares, even_split
from shardwright.backends.torch.program.stage_map import StageMap
from shardwright.backends.torch.state.weights import Weights
from shardwright.backends.torch.tensor_parallel.engine import TensorParallel
from shardwright.backends.torch.training.by_messages import MessageSteps, owners_by_module_tree, owners_of_stages
from shardwright.backends.torch.training.call import PreparedStep, Result, StepCall, Steps
from shardwright.backends.torch.training.first_plan import plan_first_step
from shardwright.backends.torch.training.losses import StepLosses
from shardwright.backends.torch.training.messages.engine import Messages
from shardwright.backends.torch.training.messages.owners import Owners
from shardwright.backends.torch.training.microbatches import RecordedAhead
from shardwright.backends.torch.training.recorded import RecordedSteps
from shardwright.backends.torch.training.split_model import SplitModel
from shardwright.core.errors import MissingCapabilityError, PlanError, ShardwrightError, UnrecordableError
from shardwright.core.model.graph import Graph
from shardwright.core.plan.decision import LossScope
from shardwright.core.plan.plan import Plan
from shardwright.core.schedule import Schedule


class StepMode(Protocol):
    """The form of the steps that the user asked for.

    Attributes:
        name: "recorded" runs the step body once and replays it; "messages" runs it as a program whose control flow may
            depend on values; "auto" takes messages where recording fails.
        schedule: the name of the schedule that was asked for.
        active_microbatches: the number of microbatches under way at once by messages; None: the default.
    """

    @property
    def name(self) -> str: ...
    @property
    def schedule(self) -> str: ...
    @property
    def active_microbatches(self) -> int | None: ...

    def plan(self, model: nn.Module, graph: Graph) -> StageMap:
        """Plan a model that came without a plan. Raises PlanError when none satisfies the configuration."""

    def owners(self, model: nn.Module) -> Mapping[str, int] | None:
        """The pp coordinate that owns each module, where the user says it. Raises PlanError where a rank has none."""

    def require_messages(self, plan: Plan | None, model: nn.Module) -> None:
        """Raise MissingCapabilityError where messages would compute something else than was asked for."""

    def unheeded(self, stage_map: StageMap | None) -> str:
        """The settings that steps by messages leave out although these change no result: a sentence, or nothing."""


class Runtime:
    """One rank's part of a model and of its training.

    Args:
        model: the whole model, on any device; it is split in place.
        bound: the mesh of this run.
        seed: the seed of dropout and of init functions.
        weights: where a model on the meta device gets its data; see `weights.materialize`.
        agreement: compares the ranks; default: one of its own, which every rank makes then.
        loss_scope: the meaning where the loss couples samples; see `LossSemantics`.
        sentinel: looks for NaN and infinity in losses and gradients; default: one that warns.
        compiler: compiles the units of this rank's stages; None: they run as they are.
        mode: chooses between recorded steps and messages; None: recorded steps of a model that `split` has split.
        compute: the dtype in which steps compute; see `SplitModel`.

    Attributes:
        steps: the form that the steps have now; None: not chosen yet.
    """

    def __init__(
        self, model: nn.Module, bound: BoundMesh, watchdog: Watchdog, *, seed: int, weights: Weights | None,
        agreement: Agreement | None = None, loss_scope: LossScope | None = None, sentinel: Sentinel | None = None,
        compiler: Compiler | None = None, mode: StepMode | None = None, compute: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.agreement = agreement or Agreement(bound, watchdog)
        self.model, self.bound, self.watchdog = model, bound, watchdog
        sentinel = sentinel or Sentinel("warn", False, watchdog, bound.device)
        self.split_model = SplitModel(
            model, bound, watchdog, self.agreement, seed=seed, weights=weights, sentinel=sentinel, compute=compute
        )
        self.ownership, self.gradients = self.split_model.ownership, self.split_model.gradients
        sentinel.overflow_is_normal = compute is torch.float16
        self.compiler = compiler
        self.steps: Steps | None = None
        self._mode = mode
        self._losses = StepLosses(self.split_model, loss_scope)

    @property
    def stage_map(self) -> StageMap | None:
        """The split of the model; None until it is split, and where it is divided by its module tree."""
        return self.split_model.stage_map

    @property
    def tensor(self) -> TensorParallel | None:
        """The tensor axis of the model, where it has one."""
        return self.split_model.tensor

    @property
    def messages(self) -> Messages | None:
        """The engine that runs the steps, where these run by message passing."""
        return self.steps.engine if isinstance(self.steps, MessageSteps) else None

    @property
    def in_step_body(self) -> bool:
        """Whether the body of a step runs now, on stand-ins or by messages."""
        return self.split_model.bodies.is_running

    @property
    def schedule_text(self) -> str:
        """The schedule by which steps run, in words; two schedules that do the same have the same words."""
        return "none yet" if self.steps is None else self.steps.schedule_text

    # Steps -------------------------------------------------------------------------------------------------------

    def begin(
        self, call: str, samples: Sequence[int], claims: Sequence[Claim] = (), failure: Exception | None = None
    ) -> Shares:
        """Begin a step when all ranks do, with the same claims; every rank calls this at the same time.

        Args:
            call: the same text on all ranks.
            samples: the number of samples of each microbatch of this rank, as `step_results.even_split` gives them.
            failure: the reason why this rank cannot begin.

        Returns:
            the number of samples of each microbatch of each replica.

        Raises:
            DisagreementError: on every rank; see `Agreement.meet`.
            Exception: ``failure``, on this rank.
        """
        self.watchdog.doing("the start of the step")
        try:
            self.split_model.tree.require_same()
        except PlanError as error:
            failure = failure or error
        told = self.agreement.meet(call, claims, failure=failure, notes=(len(samples), sum(samples)))
        every = [told[ranks[0]] for ranks in self.agreement.replicas]
        return Shares(tuple(even_split(total, count) for count, total, *_ in every), self.bound.coordinate("dp"))

    def backward(self, loss: Any, weight: Any = None, reduction: str | None = None) -> None:
        """Note the loss of a microbatch, whose gradient is wanted, inside the body of a step."""
        assert self.split_model.bodies.listener is not None
        self.split_model.bodies.listener.backward(loss, weight, reduction)

    def run(self, call: StepCall) -> Result:
        """Run one training step; every rank calls this at the same time. Raises as `prepare`."""
        return self.prepare(call).run()

    def prepare(self, call: StepCall) -> PreparedStep:
        """Make a step ready to run, in the form that its mode chooses; every rank calls this at the same time.

        Raises:
            UnrecordableError: the step cannot be recorded, and is not to run by messages.
            MissingCapabilityError: the configuration or the plan asks for something that only recorded steps do.
            DisagreementError, LossError: see `RecordedSteps.prepare`.
        """
        mode = self._mode
        if mode is not None and mode.name == "messages" and self.messages is None:
            left_out = mode.unheeded(self.stage_map)
            if left_out and self.bound.rank == 0:
                warnings.warn(f"the plan is for a recorded pipeline.{left_out}", stacklevel=4)
            self._start_messages(mode, call)
        elif mode is not None and self.steps is None:
            self._split_at_first_step(mode, call)
        assert self.steps is not None
        try:
            return self.steps.prepare(call)
        except UnrecordableError as error:  # on every rank
            if mode is None or mode.name != "auto" or self.messages is not None:
                raise
            self._change_to_messages(mode, call, error)
        return self.steps.prepare(call)

    def reading(self, call: StepCall) -> StepReading:
        """What the results of a step are to the samples of its batch."""
        return self._losses.results(call)

    # The form of the steps ---------------------------------------------------------------------------------------

    def split(self, stage_map: StageMap, ahead: RecordedAhead | None = None) -> None:
        """Split the model; from now on its steps are recorded. ``ahead`` is a recording that exists already."""
        self.split_model.split(stage_map)
        self.steps = RecordedSteps(self.split_model, self._losses, self.compiler, ahead)

    def run_by_messages(self, owners: Owners, *, active: int | None, schedule: str) -> None:
        """Run steps by messages from now on; every rank calls this at the same time. See `MessageSteps`."""
        if self.steps is not None:
            self.steps.close()
        self.steps = MessageSteps(self.split_model, self._losses, owners, active=active, schedule=schedule)

    def use_schedule(self, schedule: Schedule) -> None:
        """Run the steps from now on under another schedule of the same stages. Every rank calls this.

        Raises ShardwrightError when it places stages on other ranks than the one that the model was split for.
        """
        stage_map = self.stage_map
        if stage_map is None:
            raise ShardwrightError("the model is not split yet: run a step first")
        if schedule is stage_map.schedule:
            return
        if schedule.placement != stage_map.schedule.placement:
            raise ShardwrightError(
                f"{schedule.name} places the stages on ranks {schedule.placement}, and the model was split for "
                f"{stage_map.schedule.placement}: choose a schedule with that placement"
            )
        if schedule.microbatches != stage_map.schedule.microbatches:
            raise ShardwrightError(
                f"{schedule.name} is for {schedule.microbatches} microbatches, and the steps have "
                f"{stage_map.schedule.microbatches}: build it for that number"
            )
        self.split_model.use(replace(stage_map, schedule=schedule))

    def _split_at_first_step(self, mode: StepMode, call: StepCall) -> None:
        """Plan and split the model. Where the step cannot be recorded, it runs without a plan, by messages."""
        must_record = mode.name == "recorded"
        found = plan_first_step(
            self.split_model, lambda graph: mode.plan(self.model, graph), call, must_record=must_record
        )
        if not isinstance(found, UnrecordableError):
            self.split(*found)
        elif must_record:
            raise found
        else:
            self._change_to_messages(mode, call, found)

    def _change_to_messages(self, mode: StepMode, call: StepCall, reason: UnrecordableError) -> None:
        if self.bound.rank == 0:
            warnings.warn(
                f"this model runs by message passing from now on, not as a recorded pipeline: {reason}. Set "
                f"'pipeline_mode': 'messages' to say so beforehand, or 'recorded' to make this an error."
                f"{mode.unheeded(self.stage_map)}",
                stacklevel=5,
            )
        self._start_messages(mode, call)

    def _start_messages(self, mode: StepMode, call: StepCall) -> None:
        """Run steps by messages from now on. A model that is not split yet is divided by its module tree.

        Raises MissingCapabilityError: the configuration or the plan asks for something that only recorded steps do.
        """
        stage_map, ranks = self.stage_map, self.bound.size("tp")
        if self.split_model.parts.compute is not None:
            raise MissingCapabilityError(
                f"the step runs by message passing, which does not compute in {self.split_model.parts.compute} beside "
                f"float32 parameters: leave out bf16, fp16 or the plan's precision, or change the model so that it can "
                f"be recorded ('pipeline_mode': 'recorded' says what hinders it)"
            )
        mode.require_messages(None if stage_map is None else stage_map.plan, self.split_model.model)
        if ranks > 1 and self.bound.rank == 0:
            warnings.warn(
                f"a model that runs by message passing runs whole on each of the {ranks} ranks of the "
                f"tensor axis, which saves nothing: give these ranks to the pipeline or to replicas instead",
                stacklevel=5,
            )
        given = owners_of_stages(stage_map) if stage_map is not None else mode.owners(self.split_model.model)
        if given is None:
            given = owners_by_module_tree(self.split_model, call)
        schedule = mode.schedule if stage_map is None else stage_map.schedule.name
        self.run_by_messages(Owners.of(self.model, given), active=mode.active_microbatches, schedule=schedule)

    def close(self) -> None:
        """End the threads beside the main one, and take the hooks off the model."""
        self.split_model.close()
        if self.steps is not None:
            self.steps.close()
