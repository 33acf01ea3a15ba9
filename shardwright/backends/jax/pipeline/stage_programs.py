"""The compiled functions of a pipeline's stages, with the operands of each and the destinations of its results.

They are compiled in the background. A function that takes what another keeps is begun with once the other is compiled,
as on several devices the compiler decides the sharding of what is kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardwright.backends.jax.capture.inner_programs import Aval
from shardwright.backends.jax.capture.precision import computed_in
from shardwright.backends.jax.machine.compiler_options import on_cpu
from shardwright.backends.jax.machine.mesh import data_axes
from shardwright.backends.jax.machine.process_transfers import absent
from shardwright.backends.jax.pipeline.compilation import Compiler, lower, uncollected
from shardwright.backends.jax.pipeline.deduplication import TracedStages
from shardwright.backends.jax.pipeline.microbatch import CutMicrobatch
from shardwright.backends.jax.pipeline.optimizer_cut import OptimizerCut
from shardwright.backends.jax.pipeline.stage_functions import MARKER, Key, StageFunction, StageFunctions
from shardwright.backends.jax.pipeline.transfers import Route
from shardwright.backends.jax.program.equations import aval_of
from shardwright.backends.jax.state.ownership import StageMeshes
from shardwright.core.schedule import Schedule
from shardwright.core.schedule.actions import Kind

LOCAL = frozenset({"arrival", "kept", "host", "between", "cotangent"})
"""The kinds of operand that belong to one microbatch. The others are a stage's for the whole step."""
HOST = "pinned_host"
"""JAX's name of the host's memory."""
Zeros = Callable[[], Sequence[jax.Array]]
"""A program that makes the sums and gradients of a stage, at zero."""
FOLLOWING = {Kind.FORWARD: (Kind.BACKWARD, Kind.INPUT_GRAD), Kind.INPUT_GRAD: (Kind.WEIGHT_GRAD,)}
"""The functions that take what another keeps, whose sharding on several devices is the compiler's."""


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """A compiled stage function, the sources of its operands and the destinations of its results."""

    run: Any
    """The compiled program, `jax.stages.Compiled`; None on a stage of other processes."""
    absent: dict[int, jax.Array]
    """Of a stage of other processes, the results that are sent or outlive the microbatch, absent, by their position."""
    function: StageFunction
    reads: tuple[tuple[bool, Key], ...]
    """The operands: (whether of the microbatch, key)."""
    sends: tuple[tuple[int, int, Key], ...]
    """The results that go to another stage: the position, the stage, and the key there."""
    route: Route
    """The route of those results."""
    stays: tuple[tuple[int, bool, Key], ...]
    """The results kept on the stage: the position, whether for this microbatch, the key."""


class StagePrograms:
    """The programs of all stages under a schedule, those that make their sums zero included."""

    def __init__(
        self, schedule: Schedule, micro: CutMicrobatch, optimizer: OptimizerCut, meshes: StageMeshes, compute: Any,
        compiler: Compiler,
    ) -> None:  # fmt: skip
        self.compute = compute
        self.schedule, self.micro, self.meshes, self.compiler = schedule, micro, meshes, compiler
        self.optimizer = optimizer
        self.spots = _spots(optimizer, micro)
        self.kept: list[dict[Key, jax.sharding.Sharding]] = [{} for _ in range(len(meshes))]
        self.launches: list[dict[Kind, Launch]] = [{} for _ in range(len(meshes))]
        """The launches of each stage, once they are compiled: after a step, or `finish`."""
        self.zeros: list[Callable[[], Zeros]] = []
        self.zero_keys: list[tuple[Key, ...]] = []
        self._waiting: dict[tuple[int, Kind], Callable[[], None]] = {}
        self._casts: list[tuple[list[int], Callable[[], jax.stages.Compiled]]] = []
        """The weights of each stage of the plan by number, and a function that waits for what casts them."""

    def sharding(self, stage: int, key: Key) -> NamedSharding:
        """The sharding of an array of a stage."""
        kind, number, _ = key
        whole = self.meshes.whole[stage]
        if kind in ("weight", "gradient"):
            return self.meshes.at(stage, self.spots[number][kind == "gradient"])
        replicas = data_axes(whole.mesh.axis_names)
        if kind == "batch" and self.micro.operands.batch[number]:
            return NamedSharding(whole.mesh, PartitionSpec(None, replicas))
        if kind in ("row", "fault"):
            return NamedSharding(whole.mesh, PartitionSpec(replicas))
        if kind in ("arrival", "departure", "cotangent", "arrival_gradient"):
            return NamedSharding(whole.mesh, self.micro.specs.get(number, PartitionSpec()))
        if kind == "host":
            return whole.with_memory_kind(HOST)
        return whole

    def start(self, recompute: str) -> None:
        """Trace everything and begin to compile it. The longest compilations come first, so that they run while the
        rest is traced."""
        on_cpus = all(on_cpu(self.meshes.devices(stage)) for stage in range(len(self.meshes)))
        traced = TracedStages(self.micro.cut, replace(self.micro.operands, in_turn=on_cpus), recompute)
        for stage in range(len(self.meshes)):
            own = traced.of(stage)
            self._start(stage, own, Kind.FORWARD)
            held = self.zero_keys[self.micro.home(stage) :: self.micro.stages]
            there = {key for keys in held for key in keys}  # what the slices before this one share with it
            shapes = {key: aval for key, aval in _zero_shapes(own).items() if key not in there}
            self.zero_keys.append(tuple(shapes))
            self.zeros.append(self._start_zeros(stage, shapes))
        if self.compute is not None:
            self._casts = [self._start_casts(stage) for stage in range(self.micro.stages)]

    def finish(self) -> None:
        """Wait until all programs are compiled."""
        while self._waiting:
            for stage, kind in list(self._waiting):
                self.launched(stage, kind)
        for zeros in self.zeros:
            zeros()
        for _, cast in self._casts:
            cast()

    def weights(self, params: Sequence[jax.Array]) -> list[jax.Array]:
        """The weights of a step, from the parameters as they are between steps."""
        found = list(params)
        for own, cast in self._casts:
            made = cast()(*[params[number] for number in own]) if own else []
            for number, array in zip(own, made, strict=True):
                found[number] = array
        return found

    def launched(self, stage: int, kind: Kind) -> Launch | None:
        """The launch of an action, once it is compiled. None for an input gradient on a stage where no gradient flows
        further back."""
        if (stage, kind) in self._waiting:
            self._waiting[stage, kind]()
            del self._waiting[stage, kind]
        return self.launches[stage].get(kind)

    def _start(self, stage: int, own: StageFunctions, kind: Kind) -> None:
        """Begin with a stage's function, where the schedule asks for it, and with those that take what it keeps."""

        def follow() -> None:
            for following in FOLLOWING.get(kind, ()):
                self._start(stage, own, following)

        function = _function(own, kind)
        asked = any(
            part.stage == stage and part.kind is kind
            for order in self.schedule.table for action in order for part in action.flat
        )  # fmt: skip
        if function is None or not asked:
            follow()
            return
        if not self.meshes.here[stage]:
            self.launches[stage][kind] = self._launch(stage, function, None)
            follow()
            return
        devices = self.meshes.devices(stage)
        into, out = self._shardings(stage, function)
        key = None
        if all(isinstance(at, NamedSharding) for at in (*into, *out)):
            key = (function.function, tuple(at.spec for at in (*into, *out)))
        with uncollected():
            running = self.compiler.start(partial(self._lower, stage, function), devices, key)

        def wait() -> None:
            run = running()
            self.kept[stage].update(
                (key, at)
                for key, at in zip(function.makes, run.output_shardings, strict=True)
                if key[0] in ("kept", "host", "between")
            )
            self.launches[stage][kind] = self._launch(stage, function, run)
            if len(devices) > 1:
                follow()

        self._waiting[stage, kind] = wait
        if len(devices) == 1:
            follow()

    def _lower(self, stage: int, function: StageFunction) -> jax.stages.Lowered:
        into, out = self._shardings(stage, function)
        return lower(function.function, function.avals, into, out, function.donates, by_memory=function.by_memory)

    def _shardings(self, stage: int, function: StageFunction) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The shardings of what a function reads and makes; None for results whose sharding is the compiler's."""
        kept, alone = self.kept[stage], len(self.meshes.devices(stage)) == 1
        into = tuple(kept[key] if key in kept else self.sharding(stage, key) for key in function.reads)
        out = tuple(
            None if key[0] in ("kept", "host", "between") and not alone else self.sharding(stage, key)
            for key in function.makes
        )
        return into, out

    def _launch(self, stage: int, function: StageFunction, run: jax.stages.Compiled | None) -> Launch:
        sends: list[tuple[int, int, Key]] = []
        stays = []
        for position, key in enumerate(function.makes):
            kind, number, _ = key
            if kind == "departure":
                arriving: Key = ("arrival", number, 0)
                sends += [(position, user, arriving) for user in self.micro.cut.readers(stage, number)]
            elif kind == "arrival_gradient":
                arrival = next(a for a in self.micro.cut.parts[stage].arrivals if a.value == number)
                back: Key = ("cotangent", number, stage)
                sends.append((position, arrival.source, back))
            elif key != MARKER:
                stays.append((position, kind in LOCAL, key))
        reads = tuple((key[0] in LOCAL, key) for key in function.reads)
        away: dict[int, jax.Array] = {}
        if run is None:
            stays = [item for item in stays if item[2][0] in ("row", "state")]
            for position in {position for position, *_ in (*sends, *stays)}:
                key = function.makes[position]
                away[position] = absent(self._made(key), self.sharding(stage, key))
            made: list[Any] = [away[position] for position, *_ in sends]
            lies = [array.sharding for array in made]
        else:
            made = [run.out_info[position] for position, *_ in sends]
            lies = [run.output_shardings[position] for position, *_ in sends]
        route = Route(made, lies, [self.sharding(user, key) for _, user, key in sends])
        return Launch(run, away, function, reads, tuple(sends), route, tuple(stays))

    def _made(self, key: Key) -> Any:
        """The shape and dtype of a result that another stage takes, or that outlives its microbatch."""
        flat = self.micro.cut.flat
        return aval_of(flat, flat.outputs[key[1]] if key[0] == "row" else key[1])

    def _start_zeros(self, stage: int, shapes: dict[Key, Aval]) -> Callable[[], Zeros]:
        """Begin with the program that zeroes a stage's sums and gradients, and return a function that waits for it."""

        def zeros() -> tuple[jax.Array, ...]:
            return tuple(jnp.zeros(a.shape, a.dtype) for a in shapes.values())

        places = tuple(self.sharding(stage, key) for key in shapes)
        if not shapes or not self.meshes.here[stage]:  # a program without results is of no device
            none = tuple(absent(aval, at) for aval, at in zip(shapes.values(), places, strict=True))
            return lambda: lambda: none
        key = ("zeros", *((a.shape, a.dtype, at.spec) for a, at in zip(shapes.values(), places, strict=True)))
        return self.compiler.start(partial(lower, zeros, (), None, places, ()), self.meshes.devices(stage), key)

    def _start_casts(self, stage: int) -> tuple[list[int], Callable[[], jax.stages.Compiled]]:
        """Begin with the program that casts the parameters of a stage to what its weights are in a step, and return the
        numbers of those and a function that waits for it."""
        own = [n for n, weight in enumerate(self.micro.cut.weights) if weight.holding.stage == stage]
        held = [place for places in self.optimizer.parameters for place in places]
        leaves = jax.tree.leaves(self.optimizer.params)
        avals, into, out = [], [], []
        for number in own:
            weight = self.micro.cut.weights[number]
            whole, rows = leaves[weight.holding.leaf], weight.holding.rows
            shape = whole.shape if rows is None else (rows[1] - rows[0], *whole.shape[1:])
            avals.append(jax.ShapeDtypeStruct(shape, whole.dtype))
            into.append(held[number].sharding)
            out.append(self.sharding(stage, ("weight", weight.value, 0)))

        def cast(*params: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(computed_in(self.compute, leaf) for leaf in params)

        key = ("casts", *((a.shape, a.dtype, i.spec, o.spec) for a, i, o in zip(avals, into, out, strict=True)))
        lowering = partial(lower, cast, avals, tuple(into), tuple(out), ())
        return own, self.compiler.start(lowering, self.meshes.devices(stage), key)


def _zero_shapes(own: StageFunctions) -> dict[Key, Aval]:
    """The keys of a stage's sums and gradients, and their shapes."""
    found: dict[Key, Aval] = {}
    for function in (own.forward, own.backward):
        found.update(
            (k, a) for k, a in zip(function.reads, function.avals, strict=True) if k[0] in ("sum", "gradient", "fault")
        )
    return found


def _function(own: StageFunctions, kind: Kind) -> StageFunction | None:
    return {
        Kind.FORWARD: own.forward,
        Kind.BACKWARD: own.backward,
        Kind.INPUT_GRAD: own.input_grad,
        Kind.WEIGHT_GRAD: own.weight_grad,
    }[kind]


def _spots(optimizer: OptimizerCut, micro: CutMicrobatch) -> dict[int, tuple[NamedSharding, NamedSharding]]:
    """The shardings in a step of every weight of the program, and of its gradient."""
    found = {}
    for weight in micro.cut.weights:
        at = (optimizer.weights, optimizer.gradients)
        found[weight.value] = tuple(
            next(p.sharding for p in places[weight.holding.leaf] if p.rows == weight.holding.rows) for places in at
        )
    return found  # type: ignore[return-value]
