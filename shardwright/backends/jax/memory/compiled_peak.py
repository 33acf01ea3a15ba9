"""The bytes that each device holds at the peak of a compiled step, by its arrays and XLA's analysis."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from shardwright.backends.jax.capture.inner_programs import Aval
from shardwright.backends.jax.pipeline.actions import Pipeline
from shardwright.backends.jax.pipeline.stage_functions import Key
from shardwright.backends.jax.pipeline.stage_programs import HOST, LOCAL, Launch
from shardwright.core.schedule.actions import Action, Kind


def program_bytes(compiled: jax.stages.Compiled) -> int:
    """The bytes of one compiled program on a device: operands, results that take no operand's memory, temporaries."""
    taken: Any = compiled.memory_analysis()
    return int(taken.argument_size_in_bytes) + beside_operands(taken)


def pipeline_bytes(pipeline: Pipeline, state: Any, devices: Sequence[jax.Device]) -> tuple[int, ...]:
    """The most bytes at once on each device while a pipeline's actions run in their order, the update after them
    included. ``state``: the arrays that stay from step to step."""
    return _Account(pipeline, state, devices).run()


def beside_operands(taken: Any) -> int:
    return int(taken.temp_size_in_bytes + taken.output_size_in_bytes - taken.alias_size_in_bytes)


class _Account:
    """The account of every array of a step from where it is made to where it is freed."""

    def __init__(self, pipeline: Pipeline, state: Any, devices: Sequence[jax.Device]) -> None:
        self.pipeline = pipeline
        pipeline.finish()
        self.place = {device: index for index, device in enumerate(devices)}
        self.held = np.zeros(len(devices), dtype=np.int64)
        for leaf in jax.tree.leaves(state):
            for shard in leaf.addressable_shards:
                self.held[self.place[shard.device]] += shard.data.nbytes
        self.peak = self.held.copy()
        self.local: dict[tuple[int, int], int] = {}
        """The bytes by (stage, microbatch) on each of the stage's devices."""
        self.leaving = np.zeros(len(devices), dtype=np.int64)
        """The bytes that each device's last action sent, which may be on their way when the next begins."""
        self.readers: dict[int, list[tuple[int, bool, int]]] = {}
        """The actions that read those bytes, by device, each as `_name` has it."""
        self.ran: dict[tuple[int, bool, int], int] = {}
        """The actions that ran before, numbered in their order."""

    def run(self) -> tuple[int, ...]:
        for stage in range(self.pipeline.micro.stages):
            self._hold(stage, self._whole_step_bytes(stage))
            self._hold(stage, self._cast_bytes(stage))
        for action in self.pipeline.order:
            for part in action.flat:
                self._act(part)
        for stage in range(self.pipeline.micro.stages):
            self._hold(stage, -self._cast_bytes(stage))
        for piece in self.pipeline.update.pieces:
            self._touch(piece.stage, beside_operands(piece.run.memory_analysis()))
        return tuple(map(int, self.peak))

    def _places(self, stage: int) -> list[int]:
        return [self.place[device] for device in self.pipeline.meshes.devices(stage)]

    def _hold(self, stage: int, size: int) -> None:
        self.held[self._places(stage)] += size

    def _touch(self, stage: int, more: int) -> None:
        places = self._places(stage)
        self.peak[places] = np.maximum(self.peak[places], (self.held + self.leaving)[places] + more)

    def _cast_bytes(self, stage: int) -> int:
        """The bytes of a stage's own weights as they are in a step, where that is beside what the state holds."""
        if self.pipeline.programs.compute is None:
            return 0
        found: dict[Key, int] = {}
        for launch in self._launches(stage):
            for key, aval, at in self._operands(launch):
                if self._is_own(stage, key):
                    found[key] = _on_each(aval, at)
        return sum(found.values())

    def _is_own(self, stage: int, key: Key) -> bool:
        """Whether a weight is one that the stage keeps between steps."""
        return key[0] == "weight" and self.pipeline.weights[key[1]].holding.stage == stage

    def _launches(self, stage: int) -> Iterable[Launch]:
        """The launches of a stage of the plan, in all its slices."""
        for launches in self.pipeline.launches[stage :: self.pipeline.micro.stages]:
            yield from launches.values()

    @staticmethod
    def _operands(launch: Launch) -> Iterable[tuple[Key, Aval, jax.sharding.Sharding]]:
        return zip(launch.function.reads, launch.function.avals, launch.run.input_shardings[0], strict=False)

    def _whole_step_bytes(self, stage: int) -> int:
        """The bytes that a stage holds from the first action to the last, beside the state: its part of the batch, sums
        and gradients, parameters of other stages."""
        found: dict[Key, int] = {}
        for launch in self._launches(stage):
            for key, aval, at in self._operands(launch):
                if key[0] not in LOCAL and not self._is_own(stage, key):
                    found[key] = _on_each(aval, at)
        return sum(found.values())

    def _act(self, part: Action) -> None:
        launch = self.pipeline.launches[part.stage].get(part.kind)
        if launch is None:
            return
        microbatch, name = part.microbatch or 0, _name(part)
        places = self._places(part.stage)
        self.ran[name] = len(self.ran)
        if self._has_arrived(part):
            self.leaving[places] = 0
        self._touch(part.stage, beside_operands(launch.run.memory_analysis()))
        self.leaving[places] = sum(self._sent(launch))
        targets = [target for _, target, _ in launch.sends]
        self.readers.update({place: [(target, *name[1:]) for target in targets] for place in places})
        for stage, size in self._made(launch, part.stage):
            self._hold(stage, size)
            self.local[stage, microbatch] = self.local.get((stage, microbatch), 0) + size
        if part.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD):
            self._hold(part.stage, -self.local.pop((part.stage, microbatch), 0))

    def _has_arrived(self, part: Action) -> bool:
        """Whether an action waits for something that came after all that its devices sent last was read."""
        _, ahead, microbatch = _name(part)
        sources = [
            (stage, ahead, microbatch)
            for stage, launches in enumerate(self.pipeline.launches)
            for kind, launch in launches.items()
            if (kind is Kind.FORWARD) is ahead and any(target == part.stage for _, target, _ in launch.sends)
        ]

        def is_read(reader: tuple[int, bool, int]) -> bool:
            """Whether the action that reads ran no later than the last source on the reader's devices."""
            after = [self.ran.get(s, -1) for s in sources if self._places(s[0]) == self._places(reader[0])]
            return reader in self.ran and self.ran[reader] <= max(after, default=-1)

        return all(is_read(reader) for place in self._places(part.stage) for reader in self.readers.get(place, ()))

    @staticmethod
    def _made(launch: Launch, stage: int) -> Iterable[tuple[int, int]]:
        """The (stage, bytes on each of its devices) of what an action leaves for others."""
        made = list(zip(jax.tree.leaves(launch.run.out_info), launch.run.output_shardings, strict=True))
        for position, is_local, _ in launch.stays:
            if is_local and made[position][1].memory_kind != HOST:
                yield stage, _on_each(*made[position])
        for (position, target, _), at in zip(launch.sends, launch.route.targets, strict=True):
            yield target, _on_each(made[position][0], at)

    @staticmethod
    def _sent(launch: Launch) -> Iterable[int]:
        made = list(zip(jax.tree.leaves(launch.run.out_info), launch.run.output_shardings, strict=True))
        return (_on_each(*made[position]) for position in dict.fromkeys(position for position, *_ in launch.sends))


def _name(part: Action) -> tuple[int, bool, int]:
    """The (stage, whether forward, microbatch) of an action. Actions of the same direction and microbatch read what it
    sends."""
    return part.stage, part.kind is Kind.FORWARD, part.microbatch or 0


def _on_each(aval: Aval, at: jax.sharding.Sharding) -> int:
    """The bytes of an array on each device of a sharding."""
    entries: int = math.prod(at.shard_shape(tuple(aval.shape)))
    return entries * int(getattr(aval.dtype, "itemsize", 8))
