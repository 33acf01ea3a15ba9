"""Recorded steps that are ready to run under a schedule."""

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from shardwright.backends.torch.machine.pipeline_messages import PipelineTransport
from shardwright.backends.torch.pipeline.actions import Pipeline, closing_order
from shardwright.backends.torch.pipeline.compiling import Compiler
from shardwright.backends.torch.pipeline.step_results import homes_of
from shardwright.backends.torch.program.early_checks import (
    require_alike,
    require_hooks_fire,
    require_results,
    require_whole_gradients,
    used_by_several,
)
from shardwright.backends.torch.program.randomness import Streams
from shardwright.backends.torch.program.stage_map import StageMap, keep_microbatches
from shardwright.backends.torch.program.stages import Division
from shardwright.backends.torch.training.split_model import SplitModel
from shardwright.core.schedule.checks import require_trains

COMPILED = 16
"""The number of steps kept ready for one signature, which differ in the recordings of their microbatches."""


@dataclass(frozen=True, slots=True)
class CompiledStep:
    """A recorded step, ready to run."""

    pipeline: Pipeline
    order: tuple[str, ...]
    """This rank's parameters in the order in which their gradients become whole."""

    def runs(self, divisions: Sequence[Division]) -> bool:
        """Whether this step is for these recordings of the microbatches."""
        return all(one is other for one, other in zip(self.pipeline.divisions, divisions, strict=True))


class CompiledSteps:
    """The steps that are ready, by the keys of their recordings.

    Args:
        compiler: compiles the units of this rank's stages; None: they run as they are.
    """

    def __init__(self, split_model: SplitModel, transport: PipelineTransport, compiler: Compiler | None) -> None:
        self._split_model, self._transport, self._compiler = split_model, transport, compiler
        self._ready: dict[Hashable, list[CompiledStep]] = {}

    def find(self, key: Hashable, divisions: Sequence[Division]) -> CompiledStep | None:
        """The step that runs these recordings, if it is ready."""
        return next((made for made in self._ready.get(key, ()) if made.runs(divisions)), None)

    def add(self, key: Hashable, stage_map: StageMap, divisions: Sequence[Division]) -> CompiledStep:
        """Make the step that runs these recordings ready; another is forgotten where there are `COMPILED` of them."""
        variants = self._ready.setdefault(key, [])
        if len(variants) >= COMPILED:
            variants.pop(0).pipeline.streams.close()
        variants.append(self._compile(stage_map, divisions))
        return variants[-1]

    def require_sound(self, stage_map: StageMap, divisions: Sequence[Division]) -> None:
        """Check recordings that were never run, none where this rank is ready. Every rank calls this."""
        split_model = self._split_model
        failure: Exception | None = None
        try:
            if divisions:
                programs = [division.program for division in divisions]
                bound = split_model.bound
                require_alike(programs)
                for program in programs:
                    require_results(program, bound.size("pp"))
                require_hooks_fire(
                    split_model.ownership.modules, {path for held in stage_map.calls for path, _ in held}
                )
                if programs[0].losses:
                    require_whole_gradients(
                        split_model.model, len(divisions), bound.mesh.size, bound.size("tp"), used_by_several(divisions)
                    )
                if any(program.losses for program in programs):
                    require_trains(stage_map.schedule)
        except Exception as error:
            failure = error
        split_model.agreement.meet("checking the recorded step", failure=failure)

    def _compile(self, stage_map: StageMap, divisions: Sequence[Division]) -> CompiledStep:
        split_model = self._split_model
        used = list({id(division): division for division in divisions}.values())
        programs = [division.program for division in used]
        schedule = keep_microbatches(stage_map.steps_schedule, len(divisions))
        for division in used:
            split_model.place_needs(division, schedule)
        modules, tensor, slices = split_model.ownership.modules, split_model.tensor, split_model.slices
        rank = split_model.bound.coordinate("pp")
        streams = Streams(programs, modules, split_model.seed, split_model.bound.device)
        if tensor is not None:
            modules = {**modules, **tensor.take(streams)}
        if slices is not None:
            modules = {**modules, **slices.take(streams)}
        if self._compiler is not None:
            self._compiler.require(stage_map, used)
            modules = {**modules, **self._compiler.units(modules, used, schedule.stages_of(rank))}
        policies = {**stage_map.policies, **({} if tensor is None else tensor.policies)}
        policies |= {} if slices is None else slices.policies
        pipeline = Pipeline(
            divisions, schedule, modules, rank, self._transport, split_model.watchdog, streams, policies,
            split_model.residency, adds_at_once=self._compiler is None,
            loading_horizon=1 if stage_map.plan is None else stage_map.plan.decision.activation_loading_horizon,
            slices=stage_map.schedule.slices,
        )  # fmt: skip
        stage_rank = [schedule.stage_to_rank(stage) for stage in range(schedule.stages)]
        pipeline.open(set[int]().union(*(homes_of(division, stage_rank) for division in used)))
        names = tuple(split_model.ownership.local_parameters())
        return CompiledStep(pipeline, closing_order(schedule, rank, used[0], names))

    def close(self) -> None:
        """Take the hooks of these steps off the model."""
        for compiled in itertools.chain.from_iterable(self._ready.values()):
            compiled.pipeline.streams.close()
        self._ready.clear()
