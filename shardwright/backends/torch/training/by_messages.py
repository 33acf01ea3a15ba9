"""Steps by message passing: the body runs as it is, and calls modules on the ranks that own them."""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from shardwright.backends.torch.loss.shares import LossShares
from shardwright.backends.torch.program.python_reads import left_as_it_is
from shardwright.backends.torch.program.stage_map import StageMap
from shardwright.backends.torch.training.call import Result, StepCall
from shardwright.backends.torch.training.losses import StepLosses
from shardwright.backends.torch.training.messages.engine import Messages
from shardwright.backends.torch.training.messages.module_flops import count_flops, module_tree
from shardwright.backends.torch.training.messages.owners import Owners
from shardwright.backends.torch.training.split_model import SplitModel
from shardwright.core.errors import LossError, PlanError
from shardwright.core.partition.module_tree import divide_modules, with_containers


class MessageSteps:
    """The steps of a model whose modules have owners. Every rank makes this at the same time.

    Args:
        active: the number of microbatches under way at once; None for the number of ranks and two more.
        schedule: the name of the schedule; it says whether forwards or backwards come first.
    """

    def __init__(
        self, split_model: SplitModel, losses: StepLosses, owners: Owners, *, active: int | None, schedule: str
    ) -> None:
        split_model.split_whole_modules(owners.placement(split_model.model))
        self._split_model, self._losses = split_model, losses
        self.engine = Messages(
            owners, split_model.ownership, split_model.gradients, split_model.bound, split_model.watchdog,
            timeout_s=split_model.watchdog.timeout_s, active=active, schedule=schedule,
        )  # fmt: skip

    @property
    def schedule_text(self) -> str:
        """One text for all steps: there is no schedule that is fixed beforehand."""
        return "messages"

    def prepare(self, call: StepCall) -> "PreparedMessageStep":
        """Read the losses of the step; every rank calls this. Raises LossError: see `LossSemantics.shares`."""
        return PreparedMessageStep(self._split_model, self.engine, call, self._losses.shares_unrecorded(call))

    def close(self) -> None:
        """End the threads."""
        self.engine.close()


@dataclass(frozen=True, slots=True)
class PreparedMessageStep:
    """A step that can be run by messages."""

    split_model: SplitModel
    engine: Messages
    call: StepCall
    losses: LossShares | LossError | None

    def run(self) -> Result:
        """Run the step; every rank calls this at the same time."""
        split_model, engine, call = self.split_model, self.engine, self.call
        split_model.synchronize(("dp", "tp"))
        if split_model.statistics is not None:
            split_model.statistics.begin()
        split_model.sentinel.begin(split_model.steps_run)
        with split_model.bodies.heard_by(engine):
            result = engine.step(
                call.body, call.microbatches, call.shares, self.losses, seed=split_model.seed,
                step=split_model.steps_run, leaves_python=call.written is None,
            )  # fmt: skip
        if split_model.statistics is not None:
            split_model.statistics.finish()
        split_model.steps_run += int(result.trained is not None)
        for text, loss in engine.losses:
            split_model.sentinel.loss(text, loss)
        if result.trained is not None:
            split_model.sentinel.finish(split_model.ownership.local_parameters())
        return result


def owners_of_stages(stage_map: StageMap) -> dict[str, int]:
    """The pp coordinate of each module that a stage calls, and of the modules around it."""
    given: dict[str, int] = {}
    for stage, calls in enumerate(stage_map.calls):
        for path, _ in calls:
            given.setdefault(path, stage_map.schedule.stage_to_rank(stage))
    return with_containers(given)


def owners_by_module_tree(split_model: SplitModel, call: StepCall) -> dict[str, int]:
    """The pp coordinate of each module, by the module tree; every rank takes the division of rank 0.

    Raises PlanError where the model cannot be divided.
    """
    model, bound, watchdog = split_model.model, split_model.bound, split_model.watchdog
    found: list[Any] = [None]
    watchdog.doing("dividing the model")
    if bound.rank == 0:
        flops: dict[str, int] = {}
        if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            place = next((p.device for p in model.parameters()), bound.device)
            inputs = [tensor.detach().to(place).clone() for tensor in call.microbatches[0]]
            # What fails here fails in the step, on every rank.
            with contextlib.suppress(Exception), left_as_it_is(model, getattr(call.body, "python_roots", ())):
                flops = count_flops(model, lambda: split_model.bodies.run_forward(call.body, inputs))
        try:
            found = [dict(divide_modules(module_tree(model), bound.size("pp"), flops, type(model).__name__).owners)]
        except PlanError as error:
            found = [str(error)]
    if bound.mesh.size > 1:
        with watchdog.waiting("rank 0, which divides the model"):
            dist.broadcast_object_list(found, 0)
    if isinstance(found[0], str):
        raise PlanError(found[0])
    given: dict[str, int] = found[0]
    return given
