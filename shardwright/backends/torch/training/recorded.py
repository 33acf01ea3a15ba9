"""Steps by recorded pipelines: the body is recorded once, and its parts run under a schedule."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwright.backends.torch.loss.shares import LossShares, of_own
from shardwright.backends.torch.machine.pipeline_messages import PipelineTransport
from shardwright.backends.torch.pipeline.action_times import Recorder
from shardwright.backends.torch.pipeline.compiling import Compiler
from shardwright.backends.torch.pipeline.step_results import Returned, share, total_weight
from shardwright.backends.torch.program.program import Literal, NumberRef, Program, Tree, ValueRef
from shardwright.backends.torch.program.stage_map import StageMap
from shardwright.backends.torch.training.call import Result, StepCall, Trained, losses_of_batch
from shardwright.backends.torch.training.compiled import CompiledStep, CompiledSteps
from shardwright.backends.torch.training.losses import StepLosses
from shardwright.backends.torch.training.microbatches import RecordedAhead, StepRecordings
from shardwright.backends.torch.training.split_model import SplitModel
from shardwright.core.errors import ShardwrightError


class RecordedSteps:
    """The steps of a model that is split by its stage map.

    Args:
        compiler: see `CompiledSteps`.
        ahead: see `StepRecordings`.
    """

    def __init__(
        self, split_model: SplitModel, losses: StepLosses, compiler: Compiler | None, ahead: RecordedAhead | None
    ) -> None:
        self._split_model, self._losses = split_model, losses
        bound, group = split_model.bound, dist.group.WORLD
        assert group is not None
        self._transport = PipelineTransport(
            bound.groups["pp"], bound.coordinate("pp"), bound.device, split_model.watchdog, peers=bound.handles["pp"],
            group=group,
        )  # fmt: skip
        self.recordings = StepRecordings(split_model, ahead)
        self.compiled = CompiledSteps(split_model, self._transport, compiler)

    @property
    def _stage_map(self) -> StageMap:
        stage_map = self._split_model.stage_map
        assert stage_map is not None
        return stage_map

    @property
    def schedule_text(self) -> str:
        """The schedule by which steps run, in words; two schedules that do the same have the same words."""
        return f"{self._stage_map.schedule.name} ({self._split_model.schedule_digest[:12]})"

    def prepare(self, call: StepCall) -> "PreparedRecordedStep":
        """The recording by which a step can be run, made now if there is none yet; every rank calls this.

        Raises:
            UnrecordableError: there is none, on this rank or on another.
            DisagreementError: ranks run different recordings, or only some of a replica record the step anew.
            LossError: see `LossSemantics.shares`.
        """
        stage_map = self._stage_map
        key = (call.signature, call.shapes, self._split_model.schedule_digest)
        found, all_ready = self.recordings.of(call, stage_map, lambda of: self.compiled.find(key, of) is not None)
        divisions = found.divisions
        compiled = self.compiled.find(key, divisions)
        if not all_ready:
            self.compiled.require_sound(stage_map, divisions if compiled is None else ())
        if compiled is None:
            compiled = self.compiled.add(key, stage_map, divisions)
        losses = divisions[0].program.losses if torch.is_grad_enabled() else ()
        shares = self._losses.shares(losses, call, divisions)
        for division in divisions:
            before = division.program.python.leave()
            if call.written is not None:
                call.written.extend(before)
        return PreparedRecordedStep(self._split_model, self._transport, call, compiled, shares, tuple(found.numbers))

    def close(self) -> None:
        """Take the hooks off the model, and let the process groups go."""
        self.compiled.close()
        self._transport.close()


@dataclass(frozen=True, slots=True)
class PreparedRecordedStep:
    """A step that can be run from a recording.

    Attributes:
        numbers: for each microbatch the Python values that its program is given.
    """

    split_model: SplitModel
    transport: PipelineTransport
    call: StepCall
    compiled: CompiledStep
    losses: LossShares
    numbers: Sequence[Sequence[Any]]

    @property
    def results(self) -> list[Tree]:
        """The result of the body for each microbatch, with its numbers."""
        found = []
        for division, given in zip(self.compiled.pipeline.divisions, self.numbers, strict=True):
            result = division.program.result
            leaves = [Literal(given[leaf.index]) if isinstance(leaf, NumberRef) else leaf for leaf in result.leaves]
            found.append(Tree(tuple(leaves), result.spec))
        return found

    def run(self) -> Result:
        """Run the step; every rank calls this at the same time."""
        split_model, pipeline, shares = self.split_model, self.compiled.pipeline, self.call.shares
        stage_map, gradients, watchdog = split_model.stage_map, split_model.gradients, split_model.watchdog
        assert stage_map is not None
        split_model.synchronize()
        split_model.shard_state(pipeline.parameter_calls())
        if split_model.parts.tensor is not None:
            split_model.parts.tensor.summed = self._summed_over_tensor_axis()
        self._require_as_many_microbatches(stage_map)
        if split_model.statistics is not None:
            split_model.statistics.begin()
        training = pipeline.trains
        exchange = gradients.begin(self.compiled.order, pipeline.reduces_each) if training else None
        pipeline.streams.seed, pipeline.numbers = split_model.seed, self.numbers
        recorder = None
        if split_model.recorders is not None:
            recorder = Recorder(split_model.bound.device)
            split_model.recorders.append(recorder)
        schedule = stage_map.steps_schedule
        stage_rank = [schedule.stage_to_rank(s) for s in range(schedule.stages)]
        if training:
            split_model.sentinel.begin(split_model.steps_run)
        try:
            split_model.begin_step()
            values = pipeline.run(
                self.call.microbatches, split_model.steps_run, shares.first, training and torch.is_grad_enabled(),
                of_own(self.losses, shares), recorder, exchange, split_model.sentinel if training else None,
                split_model.loss_scale.scale,
            )  # fmt: skip
            split_model.end_step()
            if exchange is not None:
                exchange.send_rest()
            if split_model.statistics is not None:
                split_model.statistics.finish()
            watchdog.doing("the end of the step")
            total, weights = total_weight(
                pipeline.divisions, values, stage_rank, split_model.bound, self.transport, shares
            )
            watchdog.doing("the results of the step")  # while sums of gradients are under way
            returned = share(
                pipeline.divisions, values, stage_rank, split_model.bound, self.transport, shares, weights, self.losses
            )
            divisor = split_model.loss_scale.scale * (1.0 if total is None else total)
            if training:
                gradients.finish(total, split_model.loss_scale.scale)
            split_model.settle()
        except BaseException:
            with suppress(ShardwrightError, RuntimeError):  # what follows from the error that is on its way
                split_model.end_step()
            if training:
                gradients.abandon()
            raise
        split_model.steps_run += int(training)
        if training:
            for text, loss in values.losses:
                split_model.sentinel.loss(text, loss)
            split_model.sentinel.finish(split_model.ownership.local_parameters())
        watchdog.doing("between steps")
        trained = self._trained(returned, weights, divisor) if training else None
        first, *others = self.results
        return Result(first, returned, trained, others)

    def _trained(self, returned: Mapping[int, Returned], weights: torch.Tensor | None, divisor: float) -> Trained:
        """What a training step did, from its results and the weights of its losses."""
        programs = [division.program for division in self.compiled.pipeline.divisions]
        first = programs[0]
        at = {leaf.value: p for p, leaf in enumerate(first.result.leaves) if isinstance(leaf, ValueRef)}
        losses = losses_of_batch([at.get(loss.value) for loss in first.losses], returned, self.losses, weights)
        unknown = next((program.unknown_flops for program in programs if program.flops is None), "")
        if unknown:
            return Trained(losses, None, f"the FLOPs of {unknown} are not known", divisor)
        return Trained(losses, _added(programs), divisor=divisor)

    def _summed_over_tensor_axis(self) -> frozenset[str]:
        """The parameters whose gradients are summed over the tensor axis: the same in every microbatch. Raises
        ShardwrightError where they are not."""
        found = [division.program.summed for division in self.compiled.pipeline.divisions]
        if different := sorted(frozenset().union(*found) - found[0].intersection(*found)):
            raise ShardwrightError(
                f"microbatches of this step have different layouts on the tensor axis, under which the gradient of "
                f"{different[0]} is a term of a sum in some and whole in others: give batches whose microbatches have "
                f"the same size"
            )
        return found[0]

    def _require_as_many_microbatches(self, stage_map: StageMap) -> None:
        samples = self.call.shares.samples
        if stage_map.loss_scope == "global" and len({len(held) for held in samples}) > 1:
            raise ShardwrightError(
                f"the replicas were given {[sum(held) for held in samples]} samples, which make different "
                f"numbers of microbatches, and loss_scope='global' norms those of all replicas together: give each "
                f"replica at least {stage_map.schedule.microbatches} samples"
            )


def _added(programs: Sequence[Program]) -> dict[str, int]:
    """The FLOPs of several microbatches, by precision."""
    found: dict[str, int] = {}
    for program in programs:
        for precision, flops in (program.flops or {}).items():
            found[precision] = found.get(precision, 0) + flops
    return found
