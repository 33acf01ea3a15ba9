"""One of the models of a run: its runtime, its plan, and what its training has come to."""

import json
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from shardwright.backends.torch import CAPABILITIES
from shardwright.backends.torch.capture.precision import COMPUTE
from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.program.randomness import seed_of_model
from shardwright.backends.torch.runtime import Runtime
from shardwright.backends.torch.training.call import LossOfBatch
from shardwright.core.errors import PlanError, ShardwrightError
from shardwright.core.plan.decision import LossScope
from shardwright.core.plan.file import to_document
from shardwright.core.plan.plan import Plan
from shardwright.torch.config import Config
from shardwright.torch.planning import device_peaks
from shardwright.torch.step_log import StepLog


class OptimizerSettings(Protocol):
    """An optimizer that gives its settings in words."""

    def said(self, name: str) -> dict[str, str]: ...


class ModelRun:
    """One distributed model of this process.

    Args:
        number: the number of models that were wrapped before it.
        name: the class of the module.
        plan: the plan that it was given; None: it is planned at its first step.
        seed: that of the run; see `own_seed`.
        is_alone: whether the run has no other model: then errors and lines need not say which.

    Attributes:
        samples_trained: the samples that its training steps of all replicas have taken since the session began.
        samples_before: those that steps had taken in the run that a checkpoint is of, less those of this session before
            it was read.
        scalers: the gradient scalers that scaled the loss of its last training step.
        optimizers: references to the optimizers of its parameters, which give their settings in words.
        post_partition_hooks: functions of an optimizer that wait for the model to be split.
        is_first_step: whether no step was prepared yet: before the first one runs the hooks of all ranks are called.
        reduction: the relation of losses to their batch, where `backward` is told none.
        batch_losses: the losses of the last training step, of the batch of all replicas; None where the step did not
            return all that it gave to ``model.backward``.
        log: the lines of its training steps, on rank 0.
        has_copied_weights: whether the model has the weights of a copy at the moment.
    """

    runtime: Runtime
    """Set when the model is wrapped."""

    def __init__(
        self, number: int, name: str, config: Config, bound: BoundMesh, plan: Plan | None, seed: int,
        is_alone: Callable[[], bool],
    ) -> None:  # fmt: skip
        self.number, self.name, self.config, self.bound = number, name, config, bound
        self._given_plan, self._is_alone = plan, is_alone
        self._told_plan: tuple[Plan | None, Any] | None = None
        self.seed = seed
        self.samples_trained = self.samples_before = 0
        self.scalers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.optimizers: list[Callable[[], OptimizerSettings | None]] = []
        self.post_partition_hooks: OrderedDict[int, Callable[[Any], Any]] = OrderedDict()
        self.is_first_step = True
        self.has_copied_weights = False
        self.reduction: str | None = None
        self.batch_losses: Sequence[LossOfBatch] | None = None
        self.log = self._log() if config.log_every and bound.rank == 0 else None

    def _log(self) -> StepLog:
        sharing = self.bound.size("pp") * self.bound.size("tp")
        peaks = partial(device_peaks, self.config, self._given_plan, self.bound.device)
        return StepLog(self.config.log_every, self.bound.device, sharing, peaks, self.said_before)

    # Its name ----------------------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """The model in words: its class, and its number among the models of the run, from 0."""
        return f"{self.name} (model {self.number})"

    def of_model(self, call: str) -> str:
        """A call in words, with the model that it is for where there are several."""
        return call if self._is_alone() else f"{call} of {self.label}"

    def said_before(self) -> str:
        """What stands before a line about this model: nothing where it is the only one."""
        return "" if self._is_alone() else f"{self.label}  "

    # Its plan ----------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan that the model was given, or the one by which it was split at its first step."""
        stage_map = self.runtime.stage_map if "runtime" in vars(self) else None
        return self._given_plan if self._given_plan is not None or stage_map is None else stage_map.plan

    def plan_document(self) -> Any:
        """The plan as plain JSON values, made once for each plan; None where there is none."""
        plan = self.plan
        if self._told_plan is None or self._told_plan[0] is not plan:
            self._told_plan = plan, None if plan is None else json.loads(json.dumps(to_document(plan)))
        return self._told_plan[1]

    @property
    def compute(self) -> torch.dtype | None:
        """The dtype in which steps compute; None: that of the parameters."""
        asked = self.config.precision if self._given_plan is None else self._given_plan.decision.precision
        return None if asked is None else COMPUTE[asked]

    @property
    def loss_scope(self) -> LossScope | None:
        """The user's choice for a loss that couples samples; None: the user has not said."""
        planned = None if self.plan is None else self.plan.decision.loss_scope
        return self.config.loss_scope or planned

    @property
    def microbatches(self) -> int:
        return self.config.microbatches if self.plan is None else self.plan.microbatches

    # Its randomness ----------------------------------------------------------------------------------------------

    @property
    def own_seed(self) -> int:
        """The seed of this model's dropout and init functions: that of the run for the first model, and one that
        follows from it and the number of the model for the others, so that no two draw the same."""
        return seed_of_model(self.seed, self.number)

    def set_seed(self, seed: int) -> None:
        """Let this model's random numbers follow from a seed of the run."""
        self.seed = seed
        self.runtime.split_model.seed = self.own_seed

    # Its optimizers ----------------------------------------------------------------------------------------------

    def optimizers_alive(self) -> list[Any]:
        """The optimizers of this model that are in use, in the order in which they were wrapped."""
        return [one for reference in self.optimizers if (one := reference()) is not None]

    def optimizers_said(self) -> dict[str, str]:
        """The settings of every optimizer in words."""
        found: dict[str, str] = {}
        for number, reference in enumerate(self.optimizers):
            optimizer = reference()
            if optimizer is not None:
                found |= optimizer.said(f"optimizer {number}")
        return found

    def run_post_partition_hooks(self) -> Exception | None:
        """Call the functions that waited for the model to be split, once each; the failure of one."""
        alive = self.optimizers_alive()
        failure: Exception | None = None
        try:
            while self.post_partition_hooks:
                number, hook = next(iter(self.post_partition_hooks.items()))
                hook(alive[-1] if alive else None)
                self.post_partition_hooks.pop(number, None)
        except Exception as error:
            failure = error
        return failure


def labels(runs: Sequence[ModelRun]) -> str:
    """Models in words: ``Teacher (model 0) and Student (model 1)``."""
    said = [run.label for run in runs]
    return " and ".join([", ".join(said[:-1]), said[-1]] if len(said) > 1 else said)


def read_plan(plan: "Plan | str | Path | None") -> Plan | None:
    """A plan, or that of a file. Raises PlanFileError for a file that is none."""
    return Plan.load(plan) if isinstance(plan, (str, Path)) else plan


def require_fits_run(plan: Plan, bound: BoundMesh) -> None:
    """Raise PlanError for a plan of one model whose mesh is not that of the run."""
    plan.require_world(bound.mesh.size)
    if plan.mesh != bound.mesh:
        planned, running = (
            " × ".join(f"{name} {size}" for name, size in zip(mesh.names, mesh.sizes, strict=True))
            for mesh in (plan.mesh, bound.mesh)
        )
        raise PlanError(
            f"the plan lays the model over {planned}, and the run has {running}: all models of a run have its axes, in "
            f"its order; plan with those degrees"
        )
    CAPABILITIES.require_axes({"tp": plan.decision.tp})


def require_apart(module: nn.Module, runs: Sequence[ModelRun]) -> None:
    """Raise ShardwrightError for a module that shares modules or tensors with a model that was wrapped before."""
    name = type(module).__name__
    for run in runs:
        ownership = run.runtime.ownership
        if module is ownership.model:
            raise ShardwrightError(f"this {name} is wrapped already, as {run.label}: use the DistributedModel of it")
        tensors = {id(ownership.tensor(buffer)) for buffer in ownership.buffer_names}
        shared = next((key for key, p in module.named_parameters() if ownership.name_of(p)), None)
        shared = shared or next((key for key, one in module.named_buffers() if id(one) in tensors), None)
        if shared is not None:
            raise ShardwrightError(
                f"{name} shares {shared} with {run.label}, and each model of a run has parameters and buffers of its "
                f"own: copy what they share, or put both into one module, nn.ModuleDict({{...}}), and wrap that"
            )
        for optimizer in run.optimizers_alive():
            if any(optimizer.holds(parameter) for parameter in module.parameters()):
                raise ShardwrightError(
                    f"a DistributedOptimizer of {run.label} has parameters of this {name}, which was wrapped after it: "
                    f"wrap the model first, then its optimizer"
                )
