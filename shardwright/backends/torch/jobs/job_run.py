"""One job in one process: the passes of its plan, shard by shard, as the unsplit model trains."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwright.backends.torch.jobs.host_state import HostState
from shardwright.backends.torch.jobs.saved_by_name import SavedByName
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.backends.torch.memory.module_attributes import Attributes
from shardwright.backends.torch.memory.offload import Offload
from shardwright.backends.torch.memory.recompute import Recompute
from shardwright.backends.torch.memory.residency import Residency
from shardwright.backends.torch.pipeline.stage_replay import Means, Replay
from shardwright.backends.torch.pipeline.stage_values import Kept, StepValues
from shardwright.backends.torch.program.program import NumberRef, Program
from shardwright.backends.torch.program.randomness import Streams, kept_generators
from shardwright.backends.torch.program.stages import Division, Edge, divide
from shardwright.backends.torch.program.step_recorder import StepRecorder, record
from shardwright.backends.torch.state.ownership import Ownership
from shardwright.core.errors import LossError, MissingCapabilityError, PlanError, UnrecordableError
from shardwright.core.jobs.jobs_plan import PlannedJob
from shardwright.core.jobs.shard_pass import ShardPass
from shardwright.core.model.fold import fold
from shardwright.core.model.graph import Graph
from shardwright.core.model.structure import structure_of

Body = Callable[["JobRun", list[torch.Tensor]], Any]
"""The body of a step for one microbatch: it calls the model and gives its loss to ``run.backward``."""


@dataclass(slots=True)
class _Step:
    """A step under way: its microbatches, the values between shards on the host, and what passes left."""

    number: int
    microbatches: list[list[torch.Tensor]]
    values: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)
    """Values, and in the backward their gradients, by edge and microbatch."""
    gradients: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)
    kept: dict[tuple[int, int], Kept] = field(default_factory=dict)
    """What forwards left for backwards, by shard and microbatch."""
    before: dict[tuple[int, int], dict[str, torch.Tensor]] = field(default_factory=dict)
    """Buffers as a forward found them that runs again."""
    attributes: dict[tuple[int, int], Attributes] = field(default_factory=dict)
    out: StepValues = field(default_factory=StepValues)
    scale: float = 1.0
    """What clipping makes of gradients."""


class JobRun:
    """A job whose model is trained shard by shard from the host's memory.

    Args:
        planned: the job's part of a plan of jobs.
        graph: the captured model that the plan is of.
        body: the body of a step for one microbatch.

    Raises:
        PlanError: the plan is of another model.
        MissingCapabilityError: another precision than fp32, or as `HostState`.
    """

    def __init__(
        self,
        planned: PlannedJob,
        graph: Graph,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        body: Body,
        device: torch.device | None = None,
        seed: int = 0,
    ) -> None:
        if planned.precision != "fp32":
            raise MissingCapabilityError(
                f"job {planned.name!r} is planned in {planned.precision}, and jobs in shards compute in fp32 in this "
                f"version: plan it with precision='fp32'"
            )
        folded = fold(graph, planned.nesting)
        if structure_of(folded)[0].digest != planned.model_digest:
            raise PlanError(f"job {planned.name!r} is planned for another model than {graph.model_name}: plan it again")
        self.planned, self.model, self.body, self.seed = planned, model, body, seed
        self.device = device or torch.device("cpu")
        self.shards = len(planned.shards)
        shard_of = [n for n, shard in enumerate(planned.shards) for _ in range(shard.first_unit, shard.end_unit)]
        self._calls = {(c.path, c.occurrence): shard_of[unit.index] for unit in folded.units for c in unit.calls}
        self._parameter_shards: dict[str, list[int]] = {}
        for unit in folded.units:
            for number in unit.parameters:
                held = self._parameter_shards.setdefault(graph.parameters[number].name, [])
                held += [shard_of[unit.index]] if shard_of[unit.index] not in held else []
        self._ownership, self._watchdog = Ownership(model, 0), Watchdog(f"job {planned.name}", 60.0)
        self.state = HostState(model, optimizer, self.device)
        self._recorder: StepRecorder | None = None
        self._programs: dict[Any, tuple[Division, list[Replay], Streams]] = {}
        self._step: _Step | None = None
        self.steps_run = 0

    @property
    def waits(self) -> bool:
        """Whether updates wait until the gradients of all shards are there."""
        return bool(self.planned.waiting.reason)

    def backward(self, loss: Any, weight: Any = None, reduction: str | None = None) -> None:
        """Called by the body with its loss."""
        if self._recorder is None:
            raise PlanError(f"job {self.planned.name!r}: backward is for the body of a step")
        self._recorder.backward(loss, weight, reduction)

    # A step ----------------------------------------------------------------------------------------------------------

    def step(self, batch: Sequence[torch.Tensor]) -> list[float]:
        """All passes of one step, in the plan's order; the loss of every microbatch."""
        self.begin(batch)
        for own in self.planned.passes:
            self.run(own)
        return self.finish()

    def begin(self, batch: Sequence[torch.Tensor]) -> None:
        """Begin a step on a batch, whose tensors have its samples in dim 0.

        Raises PlanError for another number of samples than planned, UnrecordableError for a body that cannot be
        recorded, LossError for several microbatches whose loss says nothing of its relation to them.
        """
        for tensor in batch:
            if tensor.dim() == 0 or len(tensor) != self.planned.batch:
                raise PlanError(
                    f"job {self.planned.name!r} is planned for batches of {self.planned.batch} samples, and a tensor "
                    f"has the shape {tuple(tensor.shape)}"
                )
        columns = [tensor.split(self.planned.microbatch) for tensor in batch]
        self._step = _Step(self.steps_run, [list(row) for row in zip(*columns, strict=True)])
        self.state.begin_step()
        self._programs_of(self._step)

    def finish(self) -> list[float]:
        """End a step all of whose passes have run; the loss of every microbatch."""
        step, self._step = self._under_way, None
        self.steps_run += 1
        count = len(step.microbatches)
        return [float(loss) for _, loss in step.out.losses[-count * len(self._division.program.losses) :]]

    @property
    def _under_way(self) -> _Step:
        if self._step is None:
            raise PlanError(f"job {self.planned.name!r}: no step is under way: call begin first")
        return self._step

    # Passes ----------------------------------------------------------------------------------------------------------

    def run(self, own: ShardPass) -> None:
        """One pass: its shard is copied to the device, runs on all microbatches, and what has changed goes back."""
        part = self._division.parts[own.shard]
        names = (*sorted(part.parameters), *sorted(part.buffers))
        if own.kind == "update":
            return self._update(own.shard)
        self.state.load(names)
        changed: set[str] = set()
        try:
            with kept_generators(self._streams.active, self.device):
                self._streams.enabled = self._streams.active
                if own.kind == "forward":
                    self._forward(own.shard)
                else:
                    self._backward(own.shard, is_last=own.kind == "fused")
            changed |= self.state.changed_buffers(part.buffers)
            if own.kind != "forward":
                changed |= self._send_or_update(own.shard)
        finally:
            self._streams.enabled = False
            self.state.leave(names, changed)

    def _forward(self, shard: int) -> None:
        step, label = self._under_way, self.planned.shards[shard].activations
        for mb in range(len(step.microbatches)):
            if label != "recompute":
                with self._saving(shard):
                    step.kept[shard, mb] = self._replayed(shard, mb, grad=True)
                continue
            buffers = self._division.parts[shard].buffers
            found = {name: self.state.buffers[name].clone() for name in buffers}
            attributes = Attributes(self.model)
            self._replayed(shard, mb, grad=False)
            attributes.keep_written()
            step.attributes[shard, mb] = attributes
            step.before[shard, mb] = {
                name: self.state.store.kept(before)
                for name, before in found.items()
                if not torch.equal(before, self.state.buffers[name])
            }

    def _saving(self, shard: int) -> AbstractContextManager[None]:
        names = self._division.parts[shard].parameters
        on_host = self.planned.shards[shard].activations == "offload"
        parameters = {name: self.state.parameters[name] for name in names}
        return SavedByName(parameters, self.state.store if on_host else None).saving()

    def _backward(self, shard: int, *, is_last: bool) -> None:
        step, division = self._under_way, self._division
        self.state.load_gradients(n for n in division.parts[shard].parameters if self._updates(n) == shard)
        replay, scale = self._replays[shard], 1.0 / len(step.microbatches)
        for mb in range(len(step.microbatches)):
            kept = step.kept.pop((shard, mb), None)
            if kept is None:
                kept = self._replayed(shard, mb, grad=True) if is_last else self._again(shard, mb)
            came = [[_on(g, self.device) for g in step.gradients.pop((e.index, mb))] for e in replay.taken_back]
            self._streams.begin(step.number, mb, recomputing=True)

            def depart(edge: Edge, tensors: list[torch.Tensor], mb: int = mb) -> None:
                step.gradients[edge.index, mb] = [self.state.store.kept(tensor) for tensor in tensors]

            replay.backward(kept, came, depart, [scale] * len(division.program.losses))

    def _again(self, shard: int, mb: int) -> Kept:
        """The forward once more, for the backward behind it: with the buffers and attributes that it found at first,
        and those that are there now left as they are."""
        step = self._under_way
        before, found = step.before.pop((shard, mb)), step.attributes.pop((shard, mb))
        now = {name: self.state.buffers[name].data for name in before}
        held = Attributes(self.model, found.places)
        found.restore()
        for name, tensor in before.items():
            self.state.buffers[name].data = _on(tensor, self.device)
        try:
            return self._replayed(shard, mb, grad=True)
        finally:
            held.restore()
            for name, tensor in now.items():
                self.state.buffers[name].data = tensor

    def _replayed(self, shard: int, mb: int, *, grad: bool) -> Kept:
        step, replay = self._under_way, self._replays[shard]
        self._streams.begin(step.number, mb)
        came = [[_on(t, self.device) for t in step.values[e.index, mb]] for e in replay.part.receives]

        def depart(edge: Edge, tensors: list[torch.Tensor]) -> None:
            step.values[edge.index, mb] = [self.state.store.kept(tensor) for tensor in tensors]

        given = [tensor.to(self.device) for tensor in step.microbatches[mb]]
        with torch.enable_grad() if grad else torch.no_grad():
            return replay.forward(mb, given, came, depart, step.out, grad)

    # Updates ---------------------------------------------------------------------------------------------------------

    def _updates(self, name: str) -> int:
        """The shard that updates a parameter: the first one that uses it, whose backward is the last."""
        return min(n for n, part in enumerate(self._division.parts) if name in part.parameters)

    def _send_or_update(self, shard: int) -> set[str]:
        """What becomes of a shard's gradients behind its backward; returns the parameters that have changed."""
        names = self._division.parts[shard].parameters
        mine = {name for name in names if self._updates(name) == shard}
        self.state.send_gradients(names if self.waits else names - mine)
        if self.waits:
            return set()
        self.state.update(sorted(mine))
        return mine

    def _update(self, shard: int) -> None:
        """A pass that updates a shard, once all gradients are there."""
        mine = sorted(n for n in self._division.parts[shard].parameters if self._updates(n) == shard)
        is_first = shard == max(own.shard for own in self.planned.passes if own.kind == "update")
        if is_first and self.planned.clip_norm is not None:
            self._under_way.scale = min(1.0, self.planned.clip_norm / (float(self.state.norm()) + 1e-6))
        self.state.load(mine)
        self.state.load_gradients(mine)
        for name in mine:
            if (gradient := self.state.parameters[name].grad) is not None:
                gradient.mul_(self._under_way.scale)
        self.state.update(mine)
        self.state.leave(mine, mine)

    # Recording -------------------------------------------------------------------------------------------------------

    def _programs_of(self, step: _Step) -> None:
        """The recording of the body for microbatches of these shapes."""
        inputs = step.microbatches[0]
        key = tuple((tuple(tensor.shape), tensor.dtype) for tensor in inputs)
        known = self._programs.get(key)
        if known is None or not known[0].program.python.hold():
            if known is not None:
                known[2].close()
            program, _ = record(self.model, self._calls, self.device, self._heard, inputs, self._listen_to)
            self._recorder = None
            _require_runnable(self.planned.name, program, len(step.microbatches))
            division = divide(program, self._calls, self._parameter_shards, self.shards)
            modules = self._ownership.modules
            streams = Streams([program], modules, self.seed, self.device)
            nothing: Mapping[Any, Any] = {}
            means = Means(
                modules, streams, self.device, Recompute(nothing, modules, streams),
                Offload(frozenset(), self.device), self._watchdog, Residency(self._ownership, self._watchdog),
            )  # fmt: skip
            replays = [Replay(division, shard, means, f"shard {shard}") for shard in range(self.shards)]
            self._programs[key] = division, replays, streams
        self._division, self._replays, self._streams = self._programs[key]

    def _heard(self, inputs: list[torch.Tensor]) -> Any:
        return self.body(self, inputs)

    def _listen_to(self, recorder: StepRecorder) -> None:
        self._recorder = recorder


def _require_runnable(name: str, program: Program, microbatches: int) -> None:
    """Raise UnrecordableError for a program that rests on values, LossError for losses that several microbatches may
    share in different ways."""
    numbers = any(isinstance(leaf, NumberRef) for step in program.steps for leaf in step.arguments.leaves)
    if program.guards or numbers or program.python.effects:
        raise UnrecordableError(
            f"job {name!r}: what its step does depends on values that it reads, or on Python values that change: jobs "
            f"run steps that do the same for every batch"
        )
    if microbatches > 1 and any(loss.weight is None and loss.reduction != "mean" for loss in program.losses):
        raise LossError(
            f"job {name!r}: a step has {microbatches} microbatches, and whether its loss is a mean over samples is not "
            f"said: give run.backward(loss, reduction='mean'), or a weight of each microbatch"
        )


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device, as it lies."""
    return torch.empty_like(tensor, device=device).copy_(tensor)
