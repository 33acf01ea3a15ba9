"""The body of a job's step, recorded once for microbatches of the same shapes, and cut into the shards of its plan."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwright.backends.torch.machine.digests import digest_of
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.backends.torch.memory.offload import Offload
from shardwright.backends.torch.memory.recompute import Recompute
from shardwright.backends.torch.memory.residency import Residency
from shardwright.backends.torch.pipeline.stage_replay import Means, Replay
from shardwright.backends.torch.program.early_checks import (
    require_hooks_fire,
    require_whole_gradients,
    used_by_several,
)
from shardwright.backends.torch.program.program import NumberRef, Program
from shardwright.backends.torch.program.randomness import Streams
from shardwright.backends.torch.program.stages import Division, divide
from shardwright.backends.torch.program.step_recorder import StepRecorder, record
from shardwright.backends.torch.state.ownership import Ownership
from shardwright.core.errors import LossError, PlanError, UnrecordableError
from shardwright.core.jobs.jobs_plan import PlannedJob
from shardwright.core.model.fold import fold
from shardwright.core.model.graph import Graph
from shardwright.core.model.structure import structure_of


@dataclass(frozen=True, slots=True)
class Recorded:
    """The body recorded for microbatches of some shapes, cut into shards."""

    division: Division
    replays: list[Replay]
    streams: Streams
    shapes: int
    """A digest of the shapes."""
    digest: int
    """A digest of what shards exchange and hold."""


class Recordings:
    """The recordings of one job. ``body``: the body of a step, given the tensors of a microbatch.

    Raises PlanError where the job is planned for another model.
    """

    def __init__(
        self,
        planned: PlannedJob,
        graph: Graph,
        model: nn.Module,
        body: Callable[[list[torch.Tensor]], Any],
        device: torch.device,
        seed: int,
    ) -> None:
        folded = fold(graph, planned.nesting)
        if structure_of(folded)[0].digest != planned.model_digest:
            raise PlanError(f"job {planned.name!r} is planned for another model than {graph.model_name}: plan it again")
        self._name, self._shards, self._model, self._body = planned.name, len(planned.shards), model, body
        self._device, self._seed = device, seed
        shard_of = [n for n, shard in enumerate(planned.shards) for _ in range(shard.first_unit, shard.end_unit)]
        self._calls = {(c.path, c.occurrence): shard_of[unit.index] for unit in folded.units for c in unit.calls}
        self._parameter_shards: dict[str, list[int]] = {}
        for unit in folded.units:
            for number in unit.parameters:
                held = self._parameter_shards.setdefault(graph.parameters[number].name, [])
                held += [shard_of[unit.index]] if shard_of[unit.index] not in held else []
        self._ownership, self._watchdog = Ownership(model, 0), Watchdog(f"job {planned.name}", 60.0)
        self._recorder: StepRecorder | None = None
        self.known: dict[Any, Recorded] = {}
        """By the shapes of microbatches."""

    def backward(self, loss: Any, weight: Any, reduction: str | None) -> None:
        """Note the loss of the body that is recorded."""
        if self._recorder is None:
            raise PlanError(f"job {self._name!r}: backward is for the body of a step")
        self._recorder.backward(loss, weight, reduction)

    def of(self, inputs: list[torch.Tensor], microbatches: int) -> Recorded:
        """The recording for a microbatch, of so many in a step.

        Raises UnrecordableError for a body that cannot be recorded, LossError for several microbatches whose loss says
        nothing of its relation to them.
        """
        key = tuple((tuple(tensor.shape), tensor.dtype) for tensor in inputs)
        known = self.known.get(key)
        if known is not None and known.division.program.python.hold():
            return known
        if known is not None:
            known.streams.close()
        try:
            program, _ = record(self._model, self._calls, self._device, self._body, inputs, self._listen_to)
        finally:
            self._recorder = None
        _require_runnable(self._name, program, microbatches)
        division = divide(program, self._calls, self._parameter_shards, self._shards)
        modules = self._ownership.modules
        require_hooks_fire(modules, {path for path, _ in self._calls})
        require_whole_gradients(self._model, microbatches, self._shards, 1, used_by_several([division]))
        streams = Streams([program], modules, self._seed, self._device)
        nothing: Mapping[Any, Any] = {}
        means = Means(
            modules, streams, self._device, Recompute(nothing, modules, streams),
            Offload(frozenset(), self._device), self._watchdog, Residency(self._ownership, self._watchdog),
        )  # fmt: skip
        replays = [Replay(division, shard, means, f"shard {shard}") for shard in range(self._shards)]
        self.known[key] = Recorded(division, replays, streams, digest_of(repr(key)), _digest(division))
        return self.known[key]

    def close(self) -> None:
        """Forget the recordings, and take their hooks off the model."""
        for own in self.known.values():
            own.streams.close()
        self.known.clear()

    def _listen_to(self, recorder: StepRecorder) -> None:
        self._recorder = recorder


def _digest(division: Division) -> int:
    held = [(sorted(part.parameters), sorted(part.buffers), part.losses) for part in division.parts]
    return digest_of(repr(division.edges), repr(held))


def _require_runnable(name: str, program: Program, microbatches: int) -> None:
    """Raise UnrecordableError for a program that rests on values, LossError for losses that several microbatches may
    share in different ways."""
    numbers = any(isinstance(leaf, NumberRef) for step in program.steps for leaf in step.arguments.leaves)
    if program.guards or numbers or program.python.effects:
        raise UnrecordableError(
            f"job {name!r}: what its step does depends on values that it reads, or on Python values that change: jobs "
            f"run steps that do the same for every batch"
        )
    if len(program.losses) > 1 and any(loss.weight is not None for loss in program.losses):
        raise LossError(
            f"job {name!r}: its step gives {len(program.losses)} losses to run.backward, and some have weights: "
            f"add them up, and give the sum with one weight"
        )
    if microbatches > 1 and any(loss.weight is None and loss.reduction != "mean" for loss in program.losses):
        raise LossError(
            f"job {name!r}: a step has {microbatches} microbatches, and whether its loss is a mean over samples is not "
            f"said: give run.backward(loss, reduction='mean'), or a weight of each microbatch"
        )
