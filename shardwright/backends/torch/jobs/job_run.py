"""One job in one process: the passes of its plan, shard by shard, as the unsplit model trains."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from shardwright.backends.torch.jobs.host_state import HostState
from shardwright.backends.torch.jobs.host_tensors import HostTensors, OwnTensors
from shardwright.backends.torch.jobs.recordings import Recordings
from shardwright.backends.torch.jobs.saved_by_name import SavedByName
from shardwright.backends.torch.machine.host_store import store_of
from shardwright.backends.torch.memory.module_attributes import Attributes
from shardwright.backends.torch.pipeline.stage_values import Kept, StepValues
from shardwright.backends.torch.program.randomness import kept_generators
from shardwright.backends.torch.program.stages import Edge
from shardwright.core.errors import DisagreementError, LossError, MissingCapabilityError, NonFiniteError, PlanError
from shardwright.core.jobs.jobs_plan import PlannedJob
from shardwright.core.jobs.shard_pass import ShardPass
from shardwright.core.model.graph import Graph

Body = Callable[["JobRun", list[torch.Tensor]], Any]
"""The body of a step for one microbatch: it calls the model and gives its loss to ``run.backward``."""


@dataclass(slots=True)
class _Step:
    """A step under way, as this process knows it beside what is on the host."""

    number: int
    microbatches: list[list[torch.Tensor]]
    kept: dict[tuple[int, int], Kept] = field(default_factory=dict)
    """What forwards left for backwards, by shard and microbatch."""
    attributes: dict[tuple[int, int], Attributes] = field(default_factory=dict)


class JobRun:
    """A job whose model is trained shard by shard from the host's memory.

    Args:
        planned: the job's part of a plan of jobs.
        graph: the captured model that the plan is of.
        body: the body of a step for one microbatch.
        schedulers: the learning-rate schedules of the optimizer, which go on by one behind every step.
        host: where the job's tensors are on the host; None: in this process's memory alone.

    Raises:
        PlanError: the plan is of another model.
        MissingCapabilityError: another precision than fp32, activations that a plan for several processes keeps, or as
            `HostState`.
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
        schedulers: Sequence[LRScheduler] = (),
        host: HostTensors | None = None,
    ) -> None:
        if planned.precision != "fp32":
            raise MissingCapabilityError(
                f"job {planned.name!r} is planned in {planned.precision}, and jobs in shards compute in fp32 in this "
                f"version: plan it with precision='fp32'"
            )
        self.planned, self.model = planned, model
        self.device = device or torch.device("cpu")
        self._store = store_of(self.device)
        self.host = host or OwnTensors(self._store)
        self.recordings = Recordings(planned, graph, model, lambda inputs: body(self, inputs), self.device, seed)
        if self.host.is_shared and any(shard.activations != "recompute" for shard in planned.shards[:-1]):
            raise MissingCapabilityError(
                f"job {planned.name!r} keeps activations between passes, which other processes do not have: plan the "
                f"jobs for the devices that they run on"
            )
        self.state = HostState(model, optimizer, self.device, self.host)
        self._schedulers, self._scheduled = _require_schedulers(planned.name, schedulers), 0
        self._step: _Step | None = None

    @property
    def waits(self) -> bool:
        """Whether updates wait until the gradients of all shards are there."""
        return bool(self.planned.waiting.reason)

    @property
    def steps_run(self) -> int:
        """The steps that have ended, in whichever process."""
        return int(self.host.noted("steps", 0))

    def backward(self, loss: Any, weight: Any = None, reduction: str | None = None) -> None:
        """Called by the body with its loss."""
        self.recordings.backward(loss, weight, reduction)

    # A step ----------------------------------------------------------------------------------------------------------

    def step(self, batch: Sequence[torch.Tensor]) -> list[float]:
        """All passes of one step, in the plan's order; the loss of every microbatch."""
        self.begin(batch)
        for own in self.planned.passes:
            self.run(own)
        return self.finish()

    def prepare(self, batch: Sequence[torch.Tensor]) -> None:
        """Record the body for batches like this one, ahead of the first. Raises as `begin`."""
        microbatches = self._microbatches(batch)
        self.recordings.of(microbatches[0], len(microbatches))

    def begin(self, batch: Sequence[torch.Tensor]) -> None:
        """Begin a step on a batch, whose tensors have its samples in dim 0.

        Raises PlanError for another number of samples than planned, UnrecordableError for a body that cannot be
        recorded, LossError for several microbatches whose loss says nothing of its relation to them.
        """
        self._microbatches(batch)
        if self.host.is_shared:
            self.host.note("tensors", len(batch))
            batch = [self.host.put(f"batch:{n}", tensor) for n, tensor in enumerate(batch)]
        self.host.note("losses", {})
        self.host.note("weights", [])
        self.host.note("begun", self.steps_run)
        self.host.drop_all("gradient:")
        self._take_up_step(batch)

    def take_up(self) -> None:
        """Take up what other processes have done of the job since this one ran a pass of it."""
        self.state.take_up(self.host.read())
        number = self.host.noted("begun")
        if self.host.is_shared and number is not None and (self._step is None or self._step.number != number):
            self._take_up_step([self.host.get(f"batch:{n}") for n in range(self.host.noted("tensors"))])

    def _take_up_step(self, batch: Sequence[torch.Tensor]) -> None:
        number = self.host.noted("begun")
        self._go_on_to(number)
        self.state.begin_step()
        self._step = _Step(number, self._microbatches(batch))
        self._recorded = self.recordings.of(self._step.microbatches[0], len(self._step.microbatches))
        known = f"division:{self._recorded.shapes}"
        if self.host.noted(known, self._recorded.digest) != self._recorded.digest:
            raise DisagreementError(
                f"job {self.planned.name!r}: the step of this process does other things than that of another one: all "
                f"run the same code on the same models"
            )
        self.host.note(known, self._recorded.digest)
        self._require_same_options(number)

    def require_same_options(self) -> None:
        """Raise DisagreementError where the optimizer of another process begins with other options."""
        self.state.begin_step()
        self._require_same_options(0)

    def _require_same_options(self, step: int) -> None:
        options = self.state.told_options
        if self.host.noted(key := f"options of step {step}", options) != options:
            raise DisagreementError(
                f"job {self.planned.name!r}: the optimizer's options, or the parameters that they are of, are others "
                f"than in another process at step {step}: give all the same optimizer and schedules"
            )
        self.host.note(key, options)

    def _microbatches(self, batch: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        for tensor in batch:
            if tensor.dim() == 0 or len(tensor) != self.planned.batch:
                raise PlanError(
                    f"job {self.planned.name!r} is planned for batches of {self.planned.batch} samples, and a tensor "
                    f"has the shape {tuple(tensor.shape)}"
                )
        columns = [tensor.split(self.planned.microbatch) for tensor in batch]
        return [list(row) for row in zip(*columns, strict=True)]

    def _go_on_to(self, step: int) -> None:
        """Let learning-rate schedules go on to a step."""
        with warnings.catch_warnings():  # of schedules that go on before this process updates anything
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
            for _ in range(self._scheduled, step):
                for scheduler in self._schedulers:
                    scheduler.step()
        self._scheduled = max(self._scheduled, step)

    def finish(self) -> list[float]:
        """End a step all of whose passes have run; the loss of every microbatch."""
        count, losses = len(self._under_way.microbatches), self.host.noted("losses")
        self._step = None
        self.host.note("steps", self.steps_run + 1)
        self.host.note("begun", None)
        if not self.host.is_shared:
            self.host.drop_all("value:")
        wanted = range(len(self._recorded.division.program.losses))
        return [losses[f"{mb}.{number}"] for mb in range(count) for number in wanted]

    def close(self) -> None:
        """End the job, after its last step or a failure: the model and the optimizer are on the host, and schedules are
        where they would be."""
        self._step = None
        for kind in ("gradient:", "value:", "back:", "before:", "batch:"):
            self.host.drop_all(kind)
        self._go_on_to(self.steps_run)
        self.recordings.close()

    @property
    def _under_way(self) -> _Step:
        if self._step is None:
            raise PlanError(f"job {self.planned.name!r}: no step is under way: call begin first")
        return self._step

    # Passes ----------------------------------------------------------------------------------------------------------

    def run(self, own: ShardPass) -> None:
        """One pass: its shard is copied to the device, runs on all microbatches, and what has changed goes back.

        Raises NonFiniteError for a loss that is not finite, before anything is updated from it."""
        part, streams = self._recorded.division.parts[own.shard], self._recorded.streams
        names = (*sorted(part.parameters), *sorted(part.buffers))
        if own.kind == "update":
            return self._update(own.shard)
        self.state.load(names)
        changed: set[str] = set()
        try:
            with kept_generators(streams.active, self.device):
                streams.enabled = streams.active
                if own.kind == "forward":
                    self._forward(own.shard)
                else:
                    self._backward(own.shard, is_last=own.kind == "fused")
            changed |= self.state.changed_buffers(part.buffers)
            if own.kind != "forward":
                changed |= self._send_or_update(own.shard)
        finally:
            streams.enabled = False
            self.state.leave(names, changed)

    def _forward(self, shard: int) -> None:
        step, label = self._under_way, self.planned.shards[shard].activations
        for mb in range(len(step.microbatches)):
            buffers = self._recorded.division.parts[shard].buffers
            if label != "recompute":
                saved = self._saved(shard)
                with saved.saving():
                    step.kept[shard, mb] = self._replayed(shard, mb, grad=True)
                self.state.settle(buffers)
                saved.keep(self.state.changed_buffers(buffers))
                continue
            found = {name: self.state.buffers[name].clone() for name in buffers}
            with self._attributes_of(shard, mb):
                self._replayed(shard, mb, grad=False)
            self.state.settle(buffers)
            for name, before in found.items():
                if not torch.equal(before, self.state.buffers[name]):
                    self.host.put(f"before:{shard}.{mb}.{name}", before)

    @contextmanager
    def _attributes_of(self, shard: int, mb: int) -> Iterator[None]:
        """Remember the Python values that a forward in here changes. Raises MissingCapabilityError where other
        processes would not see them."""
        attributes = Attributes(self.model)
        yield
        attributes.keep_written()
        if self.host.is_shared and attributes.places:
            path, name = attributes.places[0]
            raise MissingCapabilityError(
                f"job {self.planned.name!r}: the forward of {path or 'the model'} writes its attribute {name!r}, which "
                f"other processes that run it do not see: make it a buffer, or plan the jobs for one device"
            )
        self._under_way.attributes[shard, mb] = attributes

    def _saved(self, shard: int) -> SavedByName:
        part, on_host = self._recorded.division.parts[shard], self.planned.shards[shard].activations == "offload"
        parameters = {name: self.state.parameters[name] for name in part.parameters}
        buffers = {name: self.state.buffers[name] for name in part.buffers}
        return SavedByName(parameters, buffers, self._store if on_host else None)

    def _backward(self, shard: int, *, is_last: bool) -> None:
        step, division = self._under_way, self._recorded.division
        self.state.load_gradients(n for n in division.parts[shard].parameters if self._updates(n) == shard)
        replay, scale = self._recorded.replays[shard], 1.0 / len(step.microbatches)
        for mb in range(len(step.microbatches)):
            with ExitStack() as until_done:
                kept = step.kept.pop((shard, mb), None)
                if kept is None:
                    kept = self._fused(shard, mb) if is_last else until_done.enter_context(self._again(shard, mb))
                came = [
                    [self.host.taken(f"back:{e.index}.{mb}.{n}", self.device) for n in range(len(e.gradients))]
                    for e in replay.taken_back
                ]
                self._recorded.streams.begin(step.number, mb, recomputing=True)

                def depart(edge: Edge, tensors: list[torch.Tensor], mb: int = mb) -> None:
                    for n, tensor in enumerate(tensors):
                        self.host.put(f"back:{edge.index}.{mb}.{n}", tensor)

                replay.backward(kept, came, depart, [scale] * len(division.program.losses))
            self.state.settle(division.parts[shard].buffers)

    def _fused(self, shard: int, mb: int) -> Kept:
        if not self.host.is_shared:
            return self._replayed(shard, mb, grad=True)
        with self._attributes_of(shard, mb):
            return self._replayed(shard, mb, grad=True)

    @contextmanager
    def _again(self, shard: int, mb: int) -> Iterator[Kept]:
        """The forward once more, for the backward in here, which may read buffers too: with the buffers and attributes
        that it found at first, and those that are there now left as they are."""
        buffers = self._recorded.division.parts[shard].buffers
        keys = {name: f"before:{shard}.{mb}.{name}" for name in sorted(buffers)}
        keys = {name: key for name, key in keys.items() if self.host.has(key)}
        found = self._under_way.attributes.pop((shard, mb), None)
        now = {name: self.state.buffers[name].data for name in keys}
        held = Attributes(self.model, () if found is None else found.places)
        if found is not None:
            found.restore()
        for name, key in keys.items():
            self.state.buffers[name].data = self.host.taken(key, self.device)
        try:
            yield self._replayed(shard, mb, grad=True, is_again=True)
        finally:
            held.restore()
            self.state.settle(keys)
            for name, tensor in now.items():
                self.state.buffers[name].data = tensor

    def _replayed(self, shard: int, mb: int, *, grad: bool, is_again: bool = False) -> Kept:
        """The forward of a microbatch; ``is_again``: its values are on the host already."""
        step, replay = self._under_way, self._recorded.replays[shard]
        self._recorded.streams.begin(step.number, mb)
        came = [
            [self.host.copied(f"value:{e.index}.{mb}.{n}", self.device) for n in range(len(e.values))]
            for e in replay.part.receives
        ]

        def depart(edge: Edge, tensors: list[torch.Tensor]) -> None:
            for n, tensor in enumerate(tensors if not is_again else ()):
                self.host.put(f"value:{edge.index}.{mb}.{n}", tensor)

        given = [tensor.to(self.device) for tensor in step.microbatches[mb]]
        out = StepValues()
        with torch.enable_grad() if grad else torch.no_grad():
            kept = replay.forward(mb, given, came, depart, out, grad)
        if not is_again and out.losses:
            weights = [each[mb] for each in out.loss_weights.values()]
            self._note_losses(replay.part.losses, mb, [float(loss) for _, loss in out.losses], weights)
        return kept

    def _note_losses(self, numbers: Sequence[int], mb: int, losses: Sequence[float], weights: Sequence[Any]) -> None:
        """Note the losses of a microbatch that a shard computes, and their weights. Raises NonFiniteError for one that
        is not finite, unless its weight is 0, as of a mean over nothing."""
        given = [None if weight is None else float(weight) for weight in weights]
        if not all(math.isfinite(loss) or weight == 0.0 for loss, weight in zip(losses, given, strict=True)):
            said = ", ".join(f"{loss:g}" for loss in losses)
            raise NonFiniteError(f"a loss is not finite ({said}, of microbatch {mb})")
        own = {f"{mb}.{number}": loss for number, loss in zip(numbers, losses, strict=True)}
        self.host.note("losses", self.host.noted("losses") | own)
        self.host.note("weights", self.host.noted("weights") + [weight for weight in given if weight is not None])

    # Updates ---------------------------------------------------------------------------------------------------------

    def _updates(self, name: str) -> int:
        """The shard that updates a parameter: the first one that uses it, whose backward is the last."""
        return min(n for n, part in enumerate(self._recorded.division.parts) if name in part.parameters)

    def _send_or_update(self, shard: int) -> set[str]:
        """What becomes of a shard's gradients behind its backward; returns the parameters that have changed."""
        names = self._recorded.division.parts[shard].parameters
        mine = {name for name in names if self._updates(name) == shard}
        if weights := self.host.noted("weights"):  # gradients are sums by weight until here
            if not (total := math.fsum(weights)):
                raise LossError("the weights of its losses add up to 0: there is nothing to take the mean of")
            self.state.scale_gradients(mine, 1.0 / total)
        self.state.send_gradients(sorted(names if self.waits else names - mine))
        if self.waits:
            return set()
        self.state.update(sorted(mine))
        return mine

    def _update(self, shard: int) -> None:
        """A pass that updates a shard, once all gradients are there."""
        mine = sorted(n for n in self._recorded.division.parts[shard].parameters if self._updates(n) == shard)
        is_first = shard == max(own.shard for own in self.planned.passes if own.kind == "update")
        if is_first and self.planned.clip_norm is not None:
            if not math.isfinite(norm := float(self.state.norm())):
                raise NonFiniteError(f"the norm of the gradients is not finite ({norm:g}), and they are to be clipped")
            self.host.note("scale", min(1.0, self.planned.clip_norm / (norm + 1e-6)))
        self.state.load(mine)
        self.state.load_gradients(mine)
        self.state.scale_gradients(mine, self.host.noted("scale", 1.0))
        self.state.update(mine)
        self.state.leave(mine, mine)


def _require_schedulers(name: str, schedulers: Sequence[LRScheduler]) -> tuple[LRScheduler, ...]:
    """Raise PlanError for what is no learning-rate schedule that goes on by itself."""
    for one in schedulers:
        if not isinstance(one, LRScheduler) or isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise PlanError(
                f"job {name!r}: {type(one).__name__} is given as a learning-rate schedule: expected schedules of "
                f"torch.optim.lr_scheduler whose step takes nothing"
            )
    return tuple(schedulers)
