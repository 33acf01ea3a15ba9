"""The run of a divided program under a core schedule: the actions of this rank's stages, in its order."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from shardwright.backends.torch.data_parallel.overlap import Exchange
from shardwright.backends.torch.machine.pipeline_messages import Key, Message, PipelineTransport
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.backends.torch.memory.offload import Offload
from shardwright.backends.torch.memory.recompute import Recompute
from shardwright.backends.torch.memory.residency import Residency
from shardwright.backends.torch.memory.weight_gradients import adding, collecting, deferrable
from shardwright.backends.torch.pipeline.action_times import Recorder
from shardwright.backends.torch.pipeline.sentinels import Sentinel
from shardwright.backends.torch.pipeline.stage_replay import Depart, Means, Replay
from shardwright.backends.torch.pipeline.stage_values import Kept, StepValues
from shardwright.backends.torch.pipeline.step_messages import COMPUTED, Traffic, microbatch_of
from shardwright.backends.torch.program.randomness import Streams, kept_generators
from shardwright.backends.torch.program.stage_map import Call, offloaded, recomputed
from shardwright.backends.torch.program.stages import Division, Edge
from shardwright.core.schedule import Schedule
from shardwright.core.schedule.actions import SHARDING, Action, Kind
from shardwright.core.schedule.passes.sharding import without_idle_gathers
from shardwright.core.schedule.passes.slices_as_stages import StageNames
from shardwright.core.values.recompute_modes import Mode

_NOTHING: AbstractContextManager[None] = nullcontext()
POSTED_AHEAD = 2
"""The number of actions ahead for which receives are posted, so that tensors come in while the rank computes."""


@dataclass(slots=True)
class _Task:
    """An action of this rank, with everything that is known of it before the step."""

    action: Action
    microbatch: int
    replay: Replay
    is_split: bool
    """Whether the backward of its microbatch is split in two."""
    edges: tuple[Edge, ...]
    """The edges over which its inputs come, from this rank or from others."""
    messages: tuple[Message | None, ...]
    """The message that brings the input over each of ``edges``; None where that is on this rank."""
    depart: Depart
    text: str
    shown: Action
    """The action as the plan's schedule has it, in which slices are not stages."""
    is_followed_by_backward: bool = False
    """Whether it is a forward, and the next action is its backward."""
    ahead: tuple[Message, ...] = ()
    """The receives to post before it runs."""
    gathers: tuple[Action, ...] = ()
    """The gathers and frees of stages before it."""

    @property
    def key(self) -> tuple[int, int]:
        return self.action.stage, self.microbatch


class Pipeline:
    """One rank's part of a program under a schedule.

    Args:
        divisions: for each microbatch the program, divided into as many stages as the schedule has.
        modules: of the model, by path.
        rank: this rank's coordinate on pp.
        policies: the module calls that do not keep what their backward reads, and what becomes of it.
        residency: gathers sharded parameters ahead of their use.
        adds_at_once: whether weight gradients may be added to those of earlier microbatches by functions of our own.
        slices: of each sequence; each slice of a stage is a stage of its own here.
    """

    def __init__(
        self,
        divisions: Sequence[Division],
        schedule: Schedule,
        modules: Mapping[str, nn.Module],
        rank: int,
        transport: PipelineTransport,
        watchdog: Watchdog,
        streams: Streams,
        policies: Mapping[Call, Mode],
        residency: Residency,
        *,
        adds_at_once: bool = True,
        loading_horizon: int = 1,
        slices: int = 1,
    ) -> None:
        self.divisions, self.schedule = tuple(divisions), schedule
        self.transport, self.watchdog, self.streams = transport, watchdog, streams
        self.names = StageNames(schedule.stages // slices, slices)
        self.traffic = Traffic(self.divisions, schedule, rank, self.names)
        self.trains = self.traffic.trains
        self.actions = self.traffic.actions
        self.modules = modules
        self.residency = residency
        again = Recompute(recomputed(policies), modules, streams)
        self._away = Offload(offloaded(policies), transport.device, loading_horizon)
        means = Means(modules, streams, transport.device, again, self._away, watchdog, residency)
        replays: dict[tuple[int, int], Replay] = {}
        for action in self.actions:
            division = self.divisions[microbatch_of(action)]
            key = (id(division), action.stage)
            replays[key] = replays.get(key) or Replay(division, action.stage, means, self.names.text(action.stage))
        split = {(a.stage, microbatch_of(a)) for a in self.actions if a.kind is Kind.WEIGHT_GRAD}
        self._tasks = [
            self._task(a, replays[id(self.divisions[microbatch_of(a)]), a.stage], (a.stage, microbatch_of(a)) in split)
            for a in self.actions
        ]
        for task, following in pairwise(self._tasks):
            turns = task.action.kind is Kind.FORWARD and following.action.kind is not Kind.FORWARD
            task.is_followed_by_backward = turns and task.key == following.key
        self._replays = [replays[key] for key in sorted(replays, key=lambda key: key[1])]
        self.reduces_each: bool | None = None
        """Whether the schedule sums gradients after each microbatch; None where it does not say."""
        self._gathers_at_end = self._take_sharding(rank)
        self._closes, self._adds = self._last_uses(), self._uses()
        self._behind_first, self._between = self._in_the_middle() if adds_at_once else (frozenset(), frozenset())
        self._added: frozenset[tuple[int, int]] = frozenset()
        """The (stage, microbatch) whose weight gradients are added at once in this step."""
        self.numbers: Sequence[Sequence[Any]] = ((),) * len(self.divisions)
        """The Python values that the program of each microbatch is given."""
        self._arrivals: dict[Key, list[torch.Tensor]] = {}
        self._kept: dict[tuple[int, int], Kept] = {}

    def _task(self, action: Action, replay: Replay, is_split: bool) -> _Task:
        mb, gradient = microbatch_of(action), action.kind is not Kind.FORWARD
        edges = replay.taken_back if gradient else replay.part.receives
        if action.kind is Kind.WEIGHT_GRAD:
            edges = ()
        messages = tuple(self.traffic.message(edge, mb, gradient) for edge in edges)
        shown = self.names.action(action)
        text = f"{self.names.text(action.stage)}, action {shown.text}, microbatch {mb}"
        return _Task(action, mb, replay, is_split, edges, messages, partial(self._depart, mb, gradient), text, shown)

    def _take_sharding(self, rank: int) -> tuple[Action, ...]:
        """Give each task the gathers and frees that come before it; returns those behind the last one."""
        kinds = {*COMPUTED[self.trains], *SHARDING}
        parts = tuple(part for action in self.schedule.table[rank] for part in action.flat if part.kind in kinds)
        reductions = Counter(part.stage for part in parts if part.kind is Kind.REDUCE_GRAD)
        if reductions:
            self.reduces_each = max(reductions.values()) > 1
        tasks = iter(self._tasks)
        pending: list[Action] = []
        for part in without_idle_gathers(parts):
            if part.kind.is_compute:
                next(tasks).gathers = tuple(pending)
                pending.clear()
            elif part.kind is not Kind.REDUCE_GRAD:
                pending.append(part)
        return tuple(pending)

    def open(self, homes: Collection[int]) -> None:
        """Open the ways to other ranks: those of the schedule, and to all ranks from ``homes``, which have results. All
        pp peers call this together."""
        self.transport.open(self.traffic.pairs, homes)
        for position, task in enumerate(self._tasks):
            needed = [m for later in self._tasks[position : position + POSTED_AHEAD] for m in later.messages]
            task.ahead = tuple(m for m in needed if m is not None and self.transport.gains_by_posting(m))

    def run(
        self,
        inputs: Sequence[Sequence[torch.Tensor]],
        step: int,
        first_microbatch: int,
        grad: bool,
        loss_scales: Sequence[Sequence[float | None]],
        recorder: Recorder | None = None,
        exchange: Exchange | None = None,
        sentinel: Sentinel | None = None,
        factor: float = 1.0,
    ) -> StepValues:
        """Run every action; gradients add up in the parameters.

        Args:
            inputs: ``inputs[m]`` are the input tensors of microbatch m.
            first_microbatch: the number of this replica's first microbatch among those of all replicas.
            loss_scales: for each microbatch the factor of each of its losses where no weight is given.
            recorder: notes when each action runs.
            sentinel: is told of the tensors that come in, and looks at the ops if it is to.
            exchange: is told when gradients are whole.
            factor: a factor of all losses, for 16-bit gradients, beside those of ``loss_scales``.
        """
        out = StepValues()
        self.watchdog.under_way()
        self._kept.clear()
        self._arrivals.clear()
        transport, streams = self.transport, self.streams
        transport.expect(self.traffic.incoming, self.traffic.taken)
        streams.enabled = streams.active
        if exchange is not None:
            exchange.told, self.residency.missed = self.residency.told, exchange.miss
        self._added = self._behind_first
        if exchange is not None:
            self._added = frozenset() if exchange.each_microbatch else self._between
        ops = sentinel.ops if sentinel is not None else None
        looking = _NOTHING if ops is None else ops.watching(self.modules)
        try:
            with torch.set_grad_enabled(grad), kept_generators(streams.active, transport.device), looking:
                for position, task in enumerate(self._tasks):
                    mb = task.microbatch
                    self.watchdog.doing(task.text)
                    for message in task.ahead:
                        transport.post(message)
                    self._gather(task.gathers)
                    arrived = [
                        self._arrivals.pop((edge.index, mb, task.action.kind is not Kind.FORWARD))
                        if message is None
                        else transport.take(message)
                        for edge, message in zip(task.edges, task.messages, strict=True)
                    ]
                    if sentinel is not None:
                        _show(sentinel, task, arrived)
                    if recorder is not None:
                        recorder.start(task.shown)
                    if streams.active:
                        streams.begin(step, first_microbatch + mb, recomputing=task.action.kind is not Kind.FORWARD)
                    if exchange is None:
                        self._run(task, inputs[mb], arrived, grad, loss_scales[mb], out, factor)
                    else:
                        with self._closing(position, exchange):
                            self._run(task, inputs[mb], arrived, grad, loss_scales[mb], out, factor)
                        if task.action.kind is Kind.FORWARD:
                            exchange.arrive()
                    arrived = []  # not there any more when the next receives are posted
                    if recorder is not None:
                        recorder.end()
            self._gather(self._gathers_at_end)
            transport.drain()
        except BaseException as error:
            self.watchdog.note(error)
            raise
        finally:
            streams.enabled = False
            self._kept.clear()
            self._arrivals.clear()
            self.residency.reset()
            self.watchdog.doing("between steps")
        return out

    def _run(
        self, task: _Task, inputs: Sequence[torch.Tensor], arrived: Sequence[list[torch.Tensor]], grad: bool,
        loss_scales: Sequence[float | None], out: StepValues, factor: float,
    ) -> None:  # fmt: skip
        kind, replay = task.action.kind, task.replay
        if kind is Kind.FORWARD:
            with deferrable() if grad and task.is_split else self._adding(task, grad):
                kept = replay.forward(
                    task.microbatch,
                    inputs,
                    arrived,
                    task.depart,
                    out,
                    grad,
                    self.numbers[task.microbatch],
                    task.is_followed_by_backward,
                )
            if grad and self.trains:
                self._kept[task.key] = kept
                if not task.is_followed_by_backward:  # which begins with what was sent last
                    self._away.settle()
        elif kind is Kind.BACKWARD:
            with self._adding(task, grad):
                replay.backward(self._kept.pop(task.key), arrived, task.depart, loss_scales, factor)
        elif kind is Kind.INPUT_GRAD:
            kept = self._kept[task.key]
            with collecting() as kept.deferred:
                replay.backward(kept, arrived, task.depart, loss_scales, factor)
        else:
            deferred = self._kept.pop(task.key).deferred
            if deferred is not None:
                deferred.multiply()

    def _adding(self, task: _Task, grad: bool) -> AbstractContextManager[None]:
        return adding() if grad and task.key in self._added else _NOTHING

    def _depart(self, mb: int, gradient: bool, edge: Edge, tensors: list[torch.Tensor]) -> None:
        message = self.traffic.message(edge, mb, gradient)
        if message is None:
            self._arrivals[edge.index, mb, gradient] = tensors
        else:
            self.transport.send(message, tensors)

    def _gather(self, actions: Sequence[Action]) -> None:
        for action in actions:
            names = self._parameters_of(action.stage)
            if action.kind is Kind.UNSHARD:
                self.residency.hold(names)
            else:
                self.residency.let_go(names)

    def _parameters_of(self, stage: int) -> tuple[str, ...]:
        """The parameters that a stage uses in any microbatch, by first name, in the order of use."""
        calls = (call for replay in self._replays if replay.stage == stage for call in replay.calls)
        return tuple(dict.fromkeys(name for call in calls for name in call.parameters))

    def _closing(self, position: int, exchange: Exchange) -> AbstractContextManager[None]:
        names = (self._adds if exchange.each_microbatch else self._closes).get(position)
        if names is None:
            return _NOTHING
        return exchange.closing(names, self.actions[position].kind is Kind.BACKWARD)

    def _in_the_middle(self) -> tuple[frozenset[tuple[int, int]], frozenset[tuple[int, int]]]:
        """The (stage, microbatch) of whole backwards behind the first of their stage, and those of them that are not
        the last, which tell an exchange of each gradient as autograd makes it."""
        keys: dict[int, list[tuple[int, int]]] = {}
        for task in self._tasks:
            if task.action.kind is Kind.BACKWARD:
                keys.setdefault(task.action.stage, []).append(task.key)
        behind = frozenset(key for of_stage in keys.values() for key in of_stage[1:])
        return behind, behind - {of_stage[-1] for of_stage in keys.values()}

    def parameter_calls(self) -> list[tuple[str, ...]]:
        """The parameters that each call of this rank's stages uses, by first name, in the order of the forward
        pass."""
        return [call.parameters for replay in self._replays for call in replay.calls]

    def _uses(self) -> dict[int, tuple[str, ...]]:
        """The parameters whose gradients an action leaves whole for its microbatch, by the action's position."""
        return {
            position: tuple(self.divisions[microbatch_of(action)].parts[action.stage].parameters)
            for position, action in enumerate(self.actions)
            if action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD)
        }

    def _last_uses(self) -> dict[int, tuple[str, ...]]:
        """The parameters to whose gradients an action is the last to add, by the action's position; the last used
        first."""
        last: dict[str, int] = {}
        for position, action in enumerate(self.actions):
            if action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD):
                part = self.divisions[microbatch_of(action)].parts[action.stage]
                last.update(dict.fromkeys(part.parameters, position))
        found: dict[int, tuple[str, ...]] = {}
        for name, position in last.items():
            found[position] = (*found.get(position, ()), name)
        return found


def _show(sentinel: Sentinel, task: _Task, arrived: Sequence[list[torch.Tensor]]) -> None:
    """Tell a sentinel of what came from other ranks for an action."""
    for message, tensors in zip(task.messages, arrived, strict=True):
        if message is not None:
            sentinel.arrived(message.text, tensors)


def closing_order(schedule: Schedule, rank: int, division: Division, names: Sequence[str]) -> tuple[str, ...]:
    """The parameters ``names`` of a rank, given in the model's order, that its stages use: in the order in which the
    schedule adds to their gradients for the last time, within one stage from the model's end to its beginning."""
    last: dict[int, int] = {}
    for position, action in enumerate(schedule.table[rank]):
        for part in action.flat:
            if part.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD):
                last[part.stage] = position
    closes = {
        name: max((at for s, at in last.items() if name in division.parts[s].parameters), default=-1) for name in names
    }
    place = {name: number for number, name in enumerate(names)}
    return tuple(sorted((name for name in names if closes[name] >= 0), key=lambda name: (closes[name], -place[name])))
