"""A cut training step run under a core schedule: every process drives the stages of its devices, one dispatch per
action.

Dispatch is asynchronous: the host hands out actions in an order that agrees with every rank's own and with the flow of
values, and devices run as soon as what they wait for is there. Between stages arrays go by `transfers`. Of several
processes each goes through all actions in this one order: it runs those of its own stages, and takes its part in every
transfer.

A rank runs its actions one after the other and in the schedule's order: every function reads a number that the one
before it made. GPUs do so by themselves; on CPUs JAX starts whatever has its operands, also two functions at a time on
one device, which then take the cores of a device whose result others wait for.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardwright.backends.jax.machine.process_transfers import across, placed, processes_of
from shardwright.backends.jax.pipeline.compilation import Compiler
from shardwright.backends.jax.pipeline.microbatch import CutMicrobatch
from shardwright.backends.jax.pipeline.multi_mesh import PlacedProgram
from shardwright.backends.jax.pipeline.optimizer_cut import OptimizerCut
from shardwright.backends.jax.pipeline.sentinels import Answer
from shardwright.backends.jax.pipeline.stage_functions import MARKER, TOTAL, WEIGHT, Key
from shardwright.backends.jax.pipeline.stage_programs import StagePrograms
from shardwright.backends.jax.state.ownership import StageMeshes
from shardwright.core.model.loss.scaling import LossScale
from shardwright.core.schedule import Schedule, StageCosts
from shardwright.core.schedule.actions import Action, Kind
from shardwright.core.schedule.checks import require_trains
from shardwright.core.schedule.passes.slices_as_stages import as_stage
from shardwright.core.schedule.process_order import check_processes, ordered_steps, processes_steps
from shardwright.core.schedule.simulate import simulate_schedule

BATCH = 6
"""The number of a step's argument that is the batch."""
MOST_AHEAD = 8
"""The most actions that a rank of several CPU devices is handed before they are done. XLA's CPU client lets a device
have 32 programs under way; one for several devices that finds them full waits in a thread of the pool that runs
programs, and where that has no more threads than devices, none is left for those that others wait for in a collective.
"""
Observer = Callable[[Action, int, jax.Array], None]
"""A function that is called with every action once it is dispatched, its rank, and an array that is there when the
action is done."""


@dataclass(slots=True)
class StepCounts:
    """The counts of what one step asked of the host."""

    dispatches: int = 0
    """The number of compiled programs started."""
    transfers: int = 0
    """The number of arrays moved between stages."""


@dataclass(frozen=True, slots=True)
class StageRun:
    """The arrays that a stage has at hand during a step."""

    shared: dict[Key, jax.Array]
    """Those of all microbatches, which the slices of a stage have in common."""
    local: list[dict[Key, jax.Array]]
    """The arrays of each microbatch."""


@dataclass(frozen=True, slots=True)
class Load:
    """An array that a stage takes from the state or the batch: one of the step's arguments, and the position in it."""

    stage: int
    key: Key
    argument: int
    position: int


class PipelineResult(NamedTuple):
    """The results of a step, array by array."""

    step: jax.Array
    params: list[jax.Array]
    optimizer: list[jax.Array]
    other: list[jax.Array]
    scaling: list[jax.Array]
    loss: jax.Array
    grad_norm: jax.Array
    metric_sums: list[jax.Array]
    metric_rows: list[list[jax.Array]]
    """The rows of each microbatch, [replica, samples, …]."""
    bad_stage: jax.Array | None
    """The number of the last stage whose gradients are not finite, plus 1; 0 for none."""
    faults: list[jax.Array]
    """The notes on messages and losses: those of `Pipeline.faults`."""
    scales: jax.Array | None
    """The factors of the loss in this step and in the next."""


class Pipeline:
    """A step for batches of one structure. Its programs are compiled in the background, and the first step begins with
    those that are there: stages of several devices begin with a backward once its forward is compiled."""

    def __init__(
        self,
        schedule: Schedule,
        order: Sequence[Action],
        micro: CutMicrobatch,
        optimizer: OptimizerCut,
        meshes: StageMeshes,
        *,
        recompute: str,
        nonfinite: Answer,
        rule: LossScale | None,
        compute: Any,
    ) -> None:
        """nonfinite, rule: as in `sentinels.judged`; compute: the dtype in which the stages compute; None: that of the
        parameters."""
        self.nonfinite, self.rule = nonfinite, rule
        self.schedule, self.micro, self.meshes = schedule, micro, meshes
        self.order = order
        self.parts = [part for action in order for part in action.flat]
        self.weights = {w.value: w for w in micro.cut.weights}
        self.is_compiled = False
        """Whether all programs are compiled."""
        self._compiler = Compiler()
        self.programs = StagePrograms(schedule, micro, optimizer, meshes, compute, self._compiler)
        self.launches = self.programs.launches
        try:
            self.programs.start(recompute)
            self.update = self._start_update(optimizer)
        except BaseException:
            self.cancel()
            raise
        self.done = self._compiler.done
        if meshes.several:
            self._check_order()
        self.numbers = [
            [placed(np.int32(m), whole) for m in range(schedule.microbatches)] if here else []
            for whole, here in zip(meshes.whole, meshes.here, strict=True)
        ]
        self.markers = {
            rank: placed(np.int32(0), whole)
            for rank, whole, here in zip(schedule.placement, meshes.whole, meshes.here, strict=True)
            if here
        }
        changed = micro.operands.state.items()
        self.state_homes = {value: micro.cut.maker(position) for value, position in changed}
        """The stage that changes each of the model's other values that a step changes."""
        self.owned, self.loads = self._loads()
        self.load_targets = [self.programs.sharding(load.stage, load.key) for load in self.loads]
        self.loading = Loading(self.loads, self.load_targets, meshes)
        devices = meshes.devices(0)
        self.under_way: dict[int, deque[jax.Array]] | None = None
        """The arrays that are there when the last actions of each rank of several CPU devices are done."""
        if len(devices) > 1 and devices[0].platform == "cpu":
            self.under_way = {rank: deque(maxlen=MOST_AHEAD) for rank in self.markers}
        self.counts = StepCounts()

    def _start_update(self, optimizer: OptimizerCut) -> PlacedProgram:
        """Begin to compile the update, which the step needs last."""
        keys, beside = self.programs.zero_keys, (*self.micro.operands.sums, *self.micro.operands.rows)
        self.sums = {which: self.micro.cut.maker(which) for which in (TOTAL, WEIGHT, *beside)}
        """The stage of every output that is no state."""
        numbers = {value: number for number, value in enumerate(self.weights)}
        gradients = [(stage, key) for stage, own in enumerate(keys) for key in own if key[0] == "gradient"]
        self.gradient_keys = sorted(gradients, key=lambda item: (numbers[item[1][1]], item[0]))
        self.faults = [(stage, key) for stage, own in enumerate(keys) for key in own if key[0] == "fault"]
        uses = [(self.weights[key[1]].holding.leaf, stage) for stage, key in self.gradient_keys]
        totals = self.sums[WEIGHT], self.sums[TOTAL]
        return optimizer.compile_update(uses, *totals, self.micro.divisor, self.nonfinite, self.rule, self._compiler)

    def _check_order(self) -> None:
        """Check that all processes come to the end of a step, whatever time each takes. Raises ScheduleError."""
        parts = self.micro.cut.parts
        edges = {(a.source, stage) for stage, part in enumerate(parts) for a in part.arrivals}
        gradients = {(a.source, stage) for stage, part in enumerate(parts) for a in part.arrivals if a.differentiable}
        owners = [processes_of(self.meshes.devices(stage)) for stage in range(len(parts))]
        steps = ordered_steps(self.order, edges, gradients)
        check_processes(processes_steps(steps, owners), owners, edges, gradients)

    def transfer_order(self) -> list[Any]:
        """The transfers of a step, which all processes make in one order, as values to be compared."""
        flat, update = self.micro.cut.flat, self.update
        return [
            [str(action) for action in self.order],
            [
                [(a.value, a.source, str(flat.avals[a.value]), a.differentiable) for a in part.arrivals]
                for part in self.micro.cut.parts
            ],
            [str(load) for load in self.loads],
            update.first_moves,
            [(sources, targets) for _, sources, targets, _ in update.levels],
        ]

    def finish(self) -> None:
        """Wait until all programs are compiled."""
        if self.is_compiled:
            return
        self.programs.finish()
        self.update.finish()
        self._compiler.close()
        self.is_compiled = True

    def cancel(self) -> None:
        """Drop the programs that have not begun to be compiled: this pipeline will not run."""
        self._compiler.cancel()

    def _loads(self) -> tuple[list[Load], list[Load]]:
        """The arrays that stages take of state and batch: the parameters that they hold, and those sent to them."""
        micro = self.micro
        weights = [w.value for w in micro.cut.weights]
        arguments = ((micro.step,), weights, (), micro.random, micro.state, micro.scale, micro.batch)
        at = {value: (number, i) for number, values in enumerate(arguments) for i, value in enumerate(values)}
        owned: dict[Load, None] = {}
        sent: dict[Load, None] = {}
        for stage, part in enumerate(micro.cut.parts):
            home = micro.home(stage)
            for value in part.weights:
                held = self.weights[value].holding.stage == home
                (owned if held else sent)[Load(home, ("weight", value, 0), *at[value])] = None
            for value in part.sources:
                key = micro.operands.key(value)
                if key[0] != "m":
                    sent[Load(home, key, *at[value])] = None
        return list(owned), list(sent)

    # --- running

    def __call__(
        self, state: Sequence[Any], batch: Sequence[jax.Array], observe: Observer | None = None
    ) -> PipelineResult:
        """The results of one step. ``state``: the step, parameters in pieces, the optimizer's, random keys, other
        state, the factor of the loss and what it follows from. ``batch``: its leaves split into microbatches."""
        step, params, optimizer, random, other, scaling = state
        self.counts = StepCounts()
        if self.under_way is not None:
            jax.block_until_ready([self.under_way[rank].pop() for rank in self.under_way if self.under_way[rank]])
        weights = self.programs.weights(params)
        runs = self._begin((step,), weights, (), random, other, scaling[:1], batch)
        del weights
        for part in self.parts:
            try:
                self._act(runs, part, observe)
            except Exception as error:
                names = self.micro.names
                where = f"{names.text(part.stage)}, action {names.action(part)}, microbatch {part.microbatch}"
                error.add_note(f"[shardwright] {where}: failed, or what came before it on its devices")
                raise
        sums = [runs[self.sums[which]].shared[("sum", which, 0)] for which in (WEIGHT, TOTAL)]
        gradients = [runs[stage].shared[key] for stage, key in self.gradient_keys]
        operands, microbatches = self.micro.operands, range(self.schedule.microbatches)
        metric_sums = [runs[self.sums[at]].shared["sum", at, 0] for at in operands.sums]
        rows = [[runs[self.sums[at]].shared["row", at, m] for m in microbatches] for at in operands.rows]
        homes = self.state_homes
        other = [
            runs[homes[value]].shared[("state", value, 0)] if value in homes else given
            for value, given in zip(self.micro.state, other, strict=True)
        ]
        faults = [runs[stage].shared[key] for stage, key in self.faults]
        for run in runs:
            run.shared.clear()
        self.finish()
        made = self.update([*gradients, *sums, *self._at_home([step, *scaling]), *optimizer, *params])
        self.counts.dispatches += self.update.dispatches
        bad_stage = None if self.nonfinite == "ignore" else made.pop()
        told = [] if self.rule is None else [made.pop()]
        first, behind = 1 + len(scaling), 1 + len(scaling) + len(optimizer)
        step, *scaling, loss, norm = self.meshes.for_all([*made[:first], *made[-2:]])
        scales = next(iter(self.meshes.for_all(told)), None)
        return PipelineResult(
            step, made[behind:-2], made[first:behind], other, scaling, loss, norm, metric_sums, rows, bad_stage, faults,
            scales,
        )  # fmt: skip

    def _at_home(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """The count of steps and the factor of the loss on the devices of stage 0, whose update counts on."""
        return across(arrays, [self.meshes.whole[0]] * len(arrays)) if self.meshes.several else arrays

    def _begin(self, *arguments: Sequence[jax.Array]) -> list[StageRun]:
        """The arrays that each stage begins a step with, put there in one transfer, and its sums, at zero."""
        microbatches = range(self.schedule.microbatches)
        shared: list[dict[Key, jax.Array]] = [{} for _ in range(self.micro.stages)]
        runs = [
            StageRun(shared[self.micro.home(stage)], [{} for _ in microbatches])
            for stage in range(len(self.micro.cut.parts))
        ]
        for own in self.owned:
            runs[own.stage].shared[own.key] = arguments[own.argument][own.position]
        put = self.loading([arguments[load.argument][load.position] for load in self.loads])
        self.counts.transfers += len(put)
        for load, array in zip(self.loads, put, strict=True):
            runs[load.stage].shared[load.key] = array
        for run, zeros, keys in zip(runs, self.programs.zeros, self.programs.zero_keys, strict=True):
            run.shared.update(zip(keys, zeros()() if keys else (), strict=True))
        self.counts.dispatches += sum(self.meshes.here)
        return runs

    def _act(self, runs: list[StageRun], part: Action, observe: Observer | None) -> None:
        """Dispatch one action: run it, keep and send its results, and let go of arrays that nobody needs any more."""
        stage, m = part.stage, part.microbatch or 0
        launch = self.programs.launched(stage, part.kind)
        if launch is None:
            return
        shared, local = runs[stage].shared, runs[stage].local[m]
        rank = self.schedule.placement[stage]
        made: Any = launch.absent
        if launch.run is not None:
            shared[("m", 0, 0)], shared[MARKER] = self.numbers[stage][m], self.markers[rank]
            made = launch.run(*[local[key] if is_local else shared[key] for is_local, key in launch.reads])
            self.markers[rank] = made[-1]
            self.counts.dispatches += 1
            self._pace(rank, made[-1])
        for position, is_local, key in launch.stays:
            if key[0] == "row":  # of every microbatch, until the step ends
                key = (key[0], key[1], m)
            (local if is_local else shared)[key] = made[position]
        if launch.sends:
            sent = launch.route([made[position] for position, _, _ in launch.sends])
            for (_, user, key), array in zip(launch.sends, sent, strict=True):
                runs[user].local[m][key] = array
            self.counts.transfers += len(sent)
        if part.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD):
            local.clear()  # whoever else knows it lets go of its arrays too
        if observe is not None:
            observe(part, rank, made[-1])

    def _pace(self, rank: int, marker: jax.Array) -> None:
        """Note an action of a rank, and wait for an earlier one where too many are under way."""
        if self.under_way is None:
            return
        if len(self.under_way[rank]) == MOST_AHEAD:
            self.under_way[rank].popleft().block_until_ready()
        self.under_way[rank].append(marker)


class Loading:
    """The transfer of what stages take of state and batch, which is the same in every step."""

    def __init__(self, loads: Sequence[Load], targets: Sequence[NamedSharding], meshes: StageMeshes) -> None:
        self.targets, self.several = list(targets), meshes.several
        self.of_batch = [n for n, load in enumerate(loads) if load.argument == BATCH and meshes.here[load.stage]]
        """The loads of the batch, which every process has whole, that stages of this process take."""
        self.of_state = [n for n, load in enumerate(loads) if load.argument != BATCH]

    def __call__(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """The arrays where stages take them. None for parts of the batch that stages of other processes take."""
        if not self.several:
            return jax.device_put(list(arrays), self.targets) if arrays else []
        found: list[Any] = [None] * len(arrays)
        moved = across([arrays[n] for n in self.of_state], [self.targets[n] for n in self.of_state], from_state=True)
        for n, array in zip(self.of_state, moved, strict=True):
            found[n] = array
        for n in self.of_batch:
            found[n] = placed(arrays[n], self.targets[n])
        return found


def dispatch_order(schedule: Schedule) -> list[Action]:
    """All actions in the order in which they would start if all stages, and slices, took the same time. Every rank's
    own order is kept, and nothing comes before what it waits for. Slices are stages of their own in it
    (`slices_as_stages`), which wait for their own slice and for earlier ones, and not for all stages before them.

    Raises ScheduleError for a schedule that does not train.
    """
    costs = StageCosts.uniform(schedule.stages)
    require_trains(schedule)
    timeline = simulate_schedule(schedule, costs)
    started = []
    for rank, (actions, starts) in enumerate(zip(timeline.actions, timeline.start_s, strict=True)):
        for index, (action, start) in enumerate(zip(actions, starts.tolist(), strict=True)):
            if action.kind.is_compute:
                started.append((start, rank, index, as_stage(action, schedule.stages)))
    return [action for *_, action in sorted(started, key=lambda item: item[:3])]
