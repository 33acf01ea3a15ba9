"""The compiled programs of a job: for each shard its forward, its backward and its update, on every device."""

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp

from shardwright.backends.jax.capture.inner_programs import Aval
from shardwright.backends.jax.capture.samples import FlatBatch
from shardwright.backends.jax.capture.tree import Parts
from shardwright.backends.jax.jobs.device_memory import LoadedProgram, sharding_of
from shardwright.backends.jax.jobs.optimizer_parts import UpdateFunctions
from shardwright.backends.jax.loss.microbatches import LossFunction, Microbatches
from shardwright.backends.jax.machine.compiler_options import on_cpu
from shardwright.backends.jax.memory.compiled_peak import beside_operands
from shardwright.backends.jax.pipeline.compilation import Compiler, lower, uncollected
from shardwright.backends.jax.pipeline.deduplication import TracedStages
from shardwright.backends.jax.pipeline.microbatch import CutMicrobatch, cut_microbatch
from shardwright.backends.jax.pipeline.stage_functions import MARKER, Key, PassFunctions, StageFunction
from shardwright.backends.jax.state.ownership import Holding, holdings_of
from shardwright.core.errors import MissingCapabilityError
from shardwright.core.out_of_core.blocks import Label
from shardwright.core.plan.plan import Plan

TRACING = threading.RLock()
"""Held by a thread that traces: Flax and JAX's own caches of classes are changed meanwhile."""


class Devices:
    """The devices of a run, and the compiler of its programs."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self.devices = tuple(devices)
        self.compiler = Compiler()

    def start(self, function: StageFunction, key: Hashable | None = None) -> "Program":
        """Begin to compile a function for every device. ``key``: equal for functions that do the same."""
        with TRACING, uncollected():
            return Program(
                function.reads,
                function.makes,
                function.donates,
                dict(zip(function.reads, function.avals, strict=True)),
                {device: self._start(function, key or function.function, device) for device in self.devices},
            )

    def _start(self, function: StageFunction, key: Hashable, device: jax.Device) -> Callable[[], jax.stages.Compiled]:
        at = sharding_of(device)
        into, out = tuple(at for _ in function.reads), tuple(at for _ in function.makes)
        lowering = partial(
            lower, function.function, function.avals, into, out, function.donates, by_memory=function.by_memory
        )
        return self.compiler.start(lowering, (device,), key)


@dataclass(slots=True, eq=False)
class Program:
    """A program of flat operands, compiled or being compiled for every device."""

    reads: tuple[Key, ...]
    makes: tuple[Key, ...]
    donates: tuple[int, ...]
    avals: Mapping[Key, Aval]
    """The shapes and dtypes of what it reads."""
    waits: Mapping[jax.Device, Callable[[], jax.stages.Compiled]]
    loaded: dict[jax.Device, LoadedProgram] = field(default_factory=dict)

    def on(self, device: jax.Device) -> LoadedProgram:
        """The program on a device, once it is compiled."""
        if device not in self.loaded:
            run = self.waits[device]()
            self.loaded[device] = LoadedProgram(run, self.donates, beside_operands(run.memory_analysis()))
        return self.loaded[device]


@dataclass(frozen=True, slots=True, eq=False)
class ShardPrograms:
    """The programs of one shard."""

    forward: Program
    """The forward; it keeps what the backward takes, unless that runs the forward again."""
    again: Program | None
    """What the backward needs of the forward, where that kept nothing."""
    backward: Program
    zeros: Program | None
    """What makes the sums of the shard's gradients, at zero."""

    def all(self) -> list[Program]:
        return [own for own in (self.forward, self.again, self.backward, self.zeros) if own is not None]


@dataclass(frozen=True, slots=True, eq=False)
class JobPrograms:
    """The programs of a job for batches of one form."""

    micro: CutMicrobatch
    microbatches: Microbatches
    shards: tuple[ShardPrograms, ...]
    updates: "UpdatePrograms"
    leaves: Mapping[int, int]
    """The numbers of the parameters, by their values in the program."""
    homes: Mapping[int, int]
    """The shard that updates each parameter, by the parameter's number."""
    whole: frozenset[int]
    """The leaves of the batch without a batch dim, by their values."""

    def finish(self, devices: Sequence[jax.Device]) -> None:
        """Wait until all are compiled."""
        for program in (*(each for shard in self.shards for each in shard.all()), *self.updates.all()):
            for device in devices:
                program.on(device)


@dataclass(frozen=True, slots=True, eq=False)
class UpdatePrograms:
    """The programs of `UpdateFunctions`."""

    shards: Mapping[int, Program]
    partials: Mapping[int, Program]
    joined: Program | None
    common: Program | None

    @classmethod
    def of(cls, functions: UpdateFunctions, devices: Devices) -> "UpdatePrograms":
        return cls(
            {shard: devices.start(own) for shard, own in functions.shards.items()},
            {shard: devices.start(own) for shard, own in functions.partials.items()},
            None if functions.joined is None else devices.start(functions.joined),
            None if functions.common is None else devices.start(functions.common),
        )

    def all(self) -> list[Program]:
        alone = [own for own in (self.joined, self.common) if own is not None]
        return [*self.shards.values(), *self.partials.values(), *alone]


def job_programs(
    loss: LossFunction,
    plan: Plan,
    parts: Parts,
    batch: FlatBatch,
    activations: Sequence[Label],
    updates: Callable[[CutMicrobatch], UpdateFunctions],
    devices: Devices,
) -> JobPrograms:
    """The programs of a job whose shards are the stages of a plan.

    Args:
        parts: the model as shapes.
        activations: what becomes of those of each shard.
        updates: a function that divides the optimizer's update by the shards of a cut.

    Raises PlanError where the function does not run what was planned, MissingCapabilityError for stacked layers that
    lie on several shards.
    """
    with TRACING, uncollected():
        microbatches = Microbatches.of(loss, plan, parts, batch)
        holdings = holdings_of(plan, parts.names, [leaf.shape for leaf in jax.tree.leaves(parts.params)])
        require_whole(holdings, parts.names)
        micro = cut_microbatch(plan, microbatches, parts, batch.leaves, holdings)
        leaves = {value: jax.ShapeDtypeStruct(aval.shape[1:], aval.dtype) if micro.operands.batch[value] else aval
                  for value, aval in micro.operands.batch_avals.items()}  # fmt: skip
        operands = replace(
            micro.operands, batch=dict.fromkeys(leaves, False), batch_avals=leaves, sums_cotangents=True,
            in_turn=on_cpu(devices.devices),
        )  # fmt: skip
        traced = TracedStages(micro.cut, operands, "none")
        shards = [_shard_programs(traced.passes(stage), label, devices) for stage, label in enumerate(activations)]
        return JobPrograms(
            micro,
            microbatches,
            tuple(shards),
            UpdatePrograms.of(updates(micro), devices),
            {weight.value: weight.holding.leaf for weight in micro.cut.weights},
            {weight.holding.leaf: weight.holding.stage for weight in micro.cut.weights},
            frozenset(value for value, split in micro.operands.batch.items() if not split),
        )


def _shard_programs(own: PassFunctions, activations: Label, devices: Devices) -> ShardPrograms:
    """The programs of a shard with this of its activations; the last one keeps them."""
    runs_again = activations == "recompute"
    forward = devices.start(own.ahead if runs_again else own.keeping)
    again = devices.start(own.again) if runs_again and own.again.makes != (MARKER,) else None
    zeros = _zeros(own.backward)
    return ShardPrograms(forward, again, devices.start(own.backward), None if zeros is None else devices.start(zeros))


def _zeros(backward: StageFunction) -> StageFunction | None:
    """The function that makes the sums of gradients that a backward adds to, at zero; None where it adds to none."""
    shapes = {key: aval for key, aval in zip(backward.reads, backward.avals, strict=True) if key[0] == "gradient"}
    if not shapes:
        return None

    def run() -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(aval.shape, aval.dtype) for aval in shapes.values())

    return StageFunction(run, (), tuple(shapes), ())


def require_whole(holdings: Sequence[Holding], names: Sequence[str]) -> None:
    """Raise MissingCapabilityError for a stacked parameter of which several shards hold rows."""
    for holding in holdings:
        if holding.rows is not None:
            raise MissingCapabilityError(
                f"parameter {names[holding.leaf]} is a stack whose layers lie in several shards, and jobs in JAX load "
                f"parameters whole: make the layers modules of their own"
            )
