"""One job: the passes of its plan, shard by shard, each on whichever device runs it, as the unsplit model trains."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from shardwright.backends.jax.jobs.device_memory import DeviceMemory, Host
from shardwright.backends.jax.jobs.host_state import HostState
from shardwright.backends.jax.jobs.job_step import JobStep
from shardwright.backends.jax.jobs.programs import JobPrograms, Program
from shardwright.backends.jax.pipeline.stage_functions import MARKER, Key
from shardwright.core.jobs.jobs_plan import PlannedJob
from shardwright.core.jobs.shard_pass import ShardPass

Arrays = dict[Key, jax.Array]
M: Key = ("m", 0, 0)


class JobRun:
    """A job whose model is trained shard by shard from the host's memory."""

    def __init__(self, planned: PlannedJob, state: HostState) -> None:
        self.planned, self.state = planned, state
        self._step: JobStep | None = None
        self._runs: Mapping[str, Callable[[int, DeviceMemory], None]] = {
            "forward": self._ahead,
            "fused": self._fused,
            "backward": self._back,
            "update": self._update,
        }

    @property
    def waits(self) -> bool:
        """Whether updates wait until the gradients of all shards are there."""
        return bool(self.planned.waiting.reason)

    # A step ----------------------------------------------------------------------------------------------------------

    def begin(self, programs: JobPrograms, leaves: tuple[Any, ...]) -> None:
        """Begin a step on the leaves of a batch."""
        micro, split = programs.micro, programs.microbatches
        batch: dict[int, Host] = {
            value: np.asarray(split.split(np.asarray(leaf), dim))
            for value, leaf, dim in zip(micro.batch, leaves, split.dims, strict=True)
        }
        self.state.gradients.clear()
        self._step = JobStep(programs, batch, dict(zip(micro.state, self.state.other, strict=True)))

    def run(self, own: ShardPass, memory: DeviceMemory) -> None:
        """Run one pass of the step, with the copies before and behind it."""
        self._runs[own.kind](own.shard, memory)

    def finish(self, memory: DeviceMemory) -> tuple[float, ...]:
        """End the step; the loss of every microbatch."""
        step, common = self._under_way, self._under_way.programs.updates.common
        if common is not None:
            self.state.take(self._run_alone(common, self._of_update, memory))
        self.state.other = [step.other[value] for value in step.programs.micro.state]
        self.state.step += 1
        losses = step.losses()
        self._step = None
        return losses

    @property
    def _under_way(self) -> JobStep:
        assert self._step is not None, "begin comes first"
        return self._step

    # Passes ----------------------------------------------------------------------------------------------------------

    def _ahead(self, shard: int, memory: DeviceMemory) -> None:
        """The forward of a shard before the last."""
        step, label = self._under_way, self.planned.shards[shard].activations
        own = step.programs.shards[shard]
        held = self._load(memory, own.forward)
        for m in self._under_way.microbatches:
            if own.again is not None:
                changing = [key[1] for key in own.again.reads if key[0] == "state"]
                step.before.update(((value, m), step.other[value]) for value in changing)
            made = self._forward(own.forward, m, held, memory)
            kept = {key: array for key, array in made.items() if key[0] == "kept"}
            if label == "offload":
                step.kept[shard, m] = dict(zip(kept, memory.take(list(kept.values())), strict=True))
            elif kept:
                step.kept[shard, m] = kept
        memory.free(held.values())

    def _fused(self, shard: int, memory: DeviceMemory) -> None:
        """The last shard's forward and backward."""
        step = self._under_way
        own = step.programs.shards[shard]
        held = self._load(memory, own.forward, own.backward)
        sums = self._begin_sums(shard, memory)
        for m in self._under_way.microbatches:
            made = self._forward(own.forward, m, held, memory)
            self._backward(shard, m, held | made, sums, memory)
        losses = self._under_way.losses()
        if not all(map(math.isfinite, losses)):
            raise FloatingPointError(f"a loss is not finite ({', '.join(f'{loss:g}' for loss in losses)})")
        self._end_backward(shard, held, sums, memory)

    def _back(self, shard: int, memory: DeviceMemory) -> None:
        """The backward of a shard before the last."""
        step, label = self._under_way, self.planned.shards[shard].activations
        own = step.programs.shards[shard]
        held = self._load(memory, own.backward, *([] if own.again is None else [own.again]))
        sums = self._begin_sums(shard, memory)
        for m in self._under_way.microbatches:
            if own.again is not None:
                made = self._run(own.again, m, held, memory, before=True)
            else:
                made = step.kept.pop((shard, m), {})
                if label == "offload":
                    made = dict(zip(made, memory.put(list(made.values())), strict=True))
            self._backward(shard, m, held | made, sums, memory)
        self._end_backward(shard, held, sums, memory)

    def _update(self, shard: int, memory: DeviceMemory) -> None:
        """A shard's update, once the gradients of all are there."""
        step, updates = self._under_way, self._under_way.programs.updates
        if updates.joined is not None and not set(updates.joined.makes) <= set(step.scalars):
            step.scalars.update(self._run_alone(updates.joined, self._of_update, memory))
        self.state.take(self._run_alone(updates.shards[shard], self._of_update, memory))

    # Parts of passes -------------------------------------------------------------------------------------------------

    def _load(self, memory: DeviceMemory, *programs: Program) -> Arrays:
        """What all microbatches of a pass share: parameters, random keys, the step, arrays without a batch dim."""
        keys = dict.fromkeys(key for program in programs for key in program.reads if self._is_shared(key))
        return dict(zip(keys, memory.put([self._host(key, 0) for key in keys]), strict=True))

    def _is_shared(self, key: Key) -> bool:
        return key[0] in ("weight", "source") or (key[0] == "batch" and key[1] in self._under_way.programs.whole)

    def _host(self, key: Key, m: int, *, before: bool = False) -> Host:
        """The array on the host that an operand is, for a microbatch."""
        (kind, number, _), step, micro = key, self._under_way, self._under_way.programs.micro
        if kind == "weight":
            return self.state.params[self._leaf(number)]
        if kind == "batch":
            leaf = step.batch[number]
            return leaf if self._is_shared(key) else leaf[m]
        if kind == "source":
            if number == micro.step:
                return np.asarray(self.state.step, np.int32)
            if number in micro.random:
                return self.state.random[micro.random.index(number)]
            return step.other[number]
        if kind == "state":
            return step.before[number, m] if before else step.other[number]
        if kind == "arrival":
            return step.values[number, m]
        if kind == "cotangent":
            return step.gradients.pop((number, m))
        assert key in (M, MARKER), f"no host has {key}"
        return np.asarray(m, np.int32)

    def _leaf(self, value: int) -> int:
        """The number of the parameter that a value of the program is."""
        return self._under_way.programs.leaves[value]

    def _run(
        self, program: Program, m: int, held: Mapping[Key, jax.Array], memory: DeviceMemory, *, before: bool = False
    ) -> Arrays:
        """The results of a program for a microbatch, on what is on the device, and on what is put there for it and
        freed behind it. ``before``: whether what changes with every microbatch is as its forward found it."""
        wanted = [key for key in program.reads if key not in held]
        arrays = [
            np.zeros(program.avals[key].shape, program.avals[key].dtype) if key[0] == "sum"
            else self._host(key, m, before=before)
            for key in wanted
        ]  # fmt: skip
        put = dict(zip(wanted, memory.put(arrays), strict=True))
        operands = [put[key] if key in put else held[key] for key in program.reads]
        made = dict(zip(program.makes, memory.run(program.on(memory.device), operands), strict=True))
        memory.free([*put.values(), made.pop(MARKER)])
        return made

    def _forward(self, program: Program, m: int, held: Arrays, memory: DeviceMemory) -> Arrays:
        """The forward of a microbatch: what it makes for others goes to the host, and what it keeps is returned."""
        step = self._under_way
        made = self._run(program, m, held, memory)
        leaving = {key: array for key, array in made.items() if key[0] != "kept"}
        for (kind, number, _), array in zip(leaving, memory.take(list(leaving.values())), strict=True):
            if kind == "departure":
                step.values[number, m] = array
            elif kind == "sum":
                step.sums[number, m] = array
            else:
                step.other[number] = array
        return {key: array for key, array in made.items() if key[0] == "kept"}

    def _begin_sums(self, shard: int, memory: DeviceMemory) -> Arrays:
        """The sums that a shard's gradients are added to: zero, or what later shards have made of them."""
        zeros = self._under_way.programs.shards[shard].zeros
        if zeros is None:
            return {}
        sums = dict(zip(zeros.makes, memory.run(zeros.on(memory.device), []), strict=True))
        for key in sums:
            if (waiting := self.state.gradients.pop(self._leaf(key[1]), None)) is not None:
                memory.free([sums[key]])
                (sums[key],) = memory.put([waiting])
        return sums

    def _backward(self, shard: int, m: int, held: Arrays, sums: Arrays, memory: DeviceMemory) -> None:
        """The backward of a microbatch: gradients are added to their sums, those of arrivals go to the host."""
        step = self._under_way
        kept = [array for key, array in held.items() if key[0] == "kept"]
        made = self._run(step.programs.shards[shard].backward, m, held | sums, memory)
        sums.update((key, array) for key, array in made.items() if key[0] == "gradient")
        leaving = {key[1]: array for key, array in made.items() if key[0] == "arrival_gradient"}
        memory.free(kept)
        for number, found in zip(leaving, memory.take(list(leaving.values())), strict=True):
            before = step.gradients.get((number, m))
            step.gradients[number, m] = found if before is None else np.add(before, found)

    def _end_backward(self, shard: int, held: Arrays, sums: Arrays, memory: DeviceMemory) -> None:
        """What becomes of the gradients of a shard: its own parameters are updated, or their gradients wait; those of
        parameters that an earlier shard updates are summed on the host."""
        step = self._under_way
        updates, homes = step.programs.updates, step.programs.homes
        for value in step.programs.micro.cut.parts[shard].departures:
            for m in self._under_way.microbatches:
                del step.values[value, m]
        by_leaf = {self._leaf(key[1]): array for key, array in sums.items()}
        mine = {leaf: array for leaf, array in by_leaf.items() if homes[leaf] == shard}
        weights: Arrays = {
            ("weight", self._leaf(key[1]), 0): array for key, array in held.items() if key[0] == "weight"
        }
        gradients: Arrays = {("gradient", leaf, 0): array for leaf, array in mine.items()}
        if shard in updates.partials:
            step.scalars.update(self._run_alone(updates.partials[shard], self._of_update, memory, gradients | weights))
        leaving = by_leaf if self.waits else {leaf: a for leaf, a in by_leaf.items() if leaf not in mine}
        for leaf, found in zip(leaving, memory.take(list(leaving.values())), strict=True):
            self.state.gradients[leaf] = found
        if self.waits or shard not in updates.shards:
            memory.free(held.values())
            return
        program = updates.shards[shard]
        given = gradients | {key: array for key, array in weights.items() if key in program.reads}
        used = set(map(id, given.values()))
        memory.free([array for array in held.values() if id(array) not in used])
        self.state.take(self._run_alone(program, self._of_update, memory, given))

    # Updates ---------------------------------------------------------------------------------------------------------

    def _of_update(self, key: Key) -> Host:
        """The array on the host that an operand of an update is."""
        kind, number, _ = key
        if kind == "gradient":
            return self.state.gradients[number]
        if kind == "weight":
            return self.state.params[number]
        if kind == "state":
            return self.state.states[number]
        if kind == "sum":
            return self._under_way.summed(number)
        return self._under_way.scalars[key]

    def _run_alone(
        self,
        program: Program,
        host: Callable[[Key], Host],
        memory: DeviceMemory,
        given: Mapping[Key, jax.Array] | None = None,
    ) -> dict[Key, Host]:
        """The results of a program, on the host: of arrays that are given, and others that are put on the device."""
        at = dict(given or {})
        wanted = [key for key in program.reads if key not in at]
        put = dict(zip(wanted, memory.put([host(key) for key in wanted]), strict=True))
        operands = [put[key] if key in put else at[key] for key in program.reads]
        made = memory.run(program.on(memory.device), operands)
        found = dict(zip(program.makes, memory.take(made), strict=True))
        donated = {id(operands[index]) for index in program.donates}
        memory.free([array for array in put.values() if id(array) not in donated])
        return found
