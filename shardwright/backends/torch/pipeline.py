"""Runs a divided program under a core schedule: the actions of this rank's stages, in its order."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from shardwright.backends.torch.measure import Recorder
from shardwright.backends.torch.overlap import Exchange
from shardwright.backends.torch.randomness import Streams, kept_generators
from shardwright.backends.torch.recompute import Call, Recompute
from shardwright.backends.torch.replay import Kept, Replay, StepValues
from shardwright.backends.torch.stages import Division, Edge
from shardwright.backends.torch.traffic import Traffic, microbatch_of
from shardwright.backends.torch.transfer import Mailroom, Message
from shardwright.backends.torch.watch import Watch
from shardwright.backends.torch.weight_gradients import collecting, deferrable
from shardwright.core.schedule import Schedule
from shardwright.core.schedule.actions import Action, Kind

_NOTHING: AbstractContextManager[None] = nullcontext()
POSTED_AHEAD = 2
"""For so many actions ahead receives are posted, so that tensors come in while the rank computes."""


class Pipeline:
    """One rank's part of a program under a schedule.

    Args:
        divisions: for each microbatch the program, divided into as many stages as the schedule has.
        modules: of the model, by path.
        rank: this rank's coordinate on pp.
        recompute: the module calls whose forward runs again in the backward pass.
    """

    def __init__(
        self,
        divisions: Sequence[Division],
        schedule: Schedule,
        modules: Mapping[str, nn.Module],
        rank: int,
        mailroom: Mailroom,
        watch: Watch,
        streams: Streams,
        recompute: frozenset[Call],
    ) -> None:
        self.divisions, self.schedule = tuple(divisions), schedule
        self.mailroom, self.watch, self.streams = mailroom, watch, streams
        self.traffic = Traffic(self.divisions, schedule, rank)
        self.pairs = self.traffic.pairs
        self.trains = self.traffic.trains
        self.actions = self.traffic.actions
        self._needs = tuple(tuple(self.traffic.needs(action)) for action in self.actions)
        self._split = {(a.stage, microbatch_of(a)) for a in self.actions if a.kind is Kind.WEIGHT_GRAD}
        self._replay = Replay(modules, streams, mailroom.device, Recompute(recompute, modules, streams))
        self._closes = self._last_uses()
        self._arrivals: dict[tuple[int, int, bool], list[torch.Tensor]] = {}
        self._kept: dict[tuple[int, int], Kept] = {}

    def run(
        self,
        inputs: Sequence[Sequence[torch.Tensor]],
        step: int,
        first_microbatch: int,
        grad: bool,
        loss_scales: Sequence[float],
        recorder: Recorder | None = None,
        exchange: Exchange | None = None,
        parameters: Mapping[str, nn.Parameter] | None = None,
    ) -> StepValues:
        """Run every action; gradients add up in the parameters.

        Args:
            inputs: ``inputs[m]`` are the input tensors of microbatch m.
            first_microbatch: the number of this replica's first microbatch among those of all replicas.
            loss_scales: what each microbatch's losses are multiplied by where no weight is given.
            recorder: notes when each action runs.
            exchange: is told when gradients are whole: those of ``parameters``, what this rank holds by first name.
        """
        out = StepValues()
        self._kept.clear()
        self._arrivals.clear()
        self.mailroom.expect(self.traffic.incoming, self.traffic.taken)
        self.streams.enabled = self.streams.active
        try:
            with kept_generators(self.streams.active, self.mailroom.device):
                for position, action in enumerate(self.actions):
                    mb = microbatch_of(action)
                    self.watch.doing(f"stage {action.stage}, action {action.text}, microbatch {mb}")
                    for needed in self._needs[position : position + POSTED_AHEAD]:
                        for message in needed:
                            self.mailroom.post(message)
                    for message in self._needs[position]:
                        self._arrivals[message.key] = self.mailroom.take(message)
                    if recorder is not None:
                        recorder.start(action)
                    with self._closing(position, exchange, parameters):
                        self._run(action, mb, inputs[mb], step, first_microbatch + mb, grad, loss_scales[mb], out)
                    if recorder is not None:
                        recorder.end()
            self.mailroom.drain()
        finally:
            self.streams.enabled = False
            self._kept.clear()
            self._arrivals.clear()
            self.watch.doing("between steps")
        return out

    def _closing(
        self, position: int, exchange: Exchange | None, parameters: Mapping[str, nn.Parameter] | None
    ) -> AbstractContextManager[None]:
        names = self._closes.get(position)
        if exchange is None or parameters is None or names is None:
            return _NOTHING
        held = [(name, parameters[name]) for name in names if name in parameters]
        return exchange.closing(held, self.actions[position].kind is Kind.BACKWARD)

    def _last_uses(self) -> dict[int, tuple[str, ...]]:
        """By position of an action, the parameters to whose gradients it is the last to add; the last used first."""
        last: dict[str, int] = {}
        for position, action in enumerate(self.actions):
            if action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD):
                part = self.divisions[microbatch_of(action)].parts[action.stage]
                last.update(dict.fromkeys(part.parameters, position))
        found: dict[int, tuple[str, ...]] = {}
        for name, position in last.items():
            found[position] = (*found.get(position, ()), name)
        return found

    def _run(
        self, action: Action, mb: int, inputs: Sequence[torch.Tensor], step: int, global_mb: int, grad: bool,
        loss_scale: float, out: StepValues,
    ) -> None:  # fmt: skip
        stage, division = action.stage, self.divisions[mb]
        key = (stage, mb)
        if action.kind is Kind.WEIGHT_GRAD:
            deferred = self._kept.pop(key).deferred
            if deferred is not None:
                deferred.multiply()
            return
        self.streams.begin(step, global_mb, recomputing=action.kind is not Kind.FORWARD)

        def arrived(edge: Edge) -> list[torch.Tensor]:
            return self._arrivals.pop((edge.index, mb, action.kind is not Kind.FORWARD))

        def depart(edge: Edge, tensors: list[torch.Tensor]) -> None:
            self._depart(edge, mb, action.kind is not Kind.FORWARD, tensors)

        if action.kind is Kind.FORWARD:
            if grad and key in self._split:
                with deferrable():
                    kept = self._replay.forward(division, stage, mb, inputs, arrived, depart, out, grad)
            else:
                kept = self._replay.forward(division, stage, mb, inputs, arrived, depart, out, grad)
            if grad and self.trains:
                self._kept[key] = kept
        elif action.kind is Kind.BACKWARD:
            self._replay.backward(division, stage, self._kept.pop(key), arrived, depart, loss_scale)
        else:
            kept = self._kept[key]
            with collecting() as kept.deferred:
                self._replay.backward(division, stage, kept, arrived, depart, loss_scale)

    def _depart(self, edge: Edge, mb: int, gradient: bool, tensors: list[torch.Tensor]) -> None:
        message: Message | None = self.traffic.message(edge, mb, gradient)
        if message is None:
            self._arrivals[edge.index, mb, gradient] = tensors
        else:
            self.mailroom.send(message, tensors)


def closing_order(schedule: Schedule, rank: int, division: Division, names: Sequence[str]) -> tuple[str, ...]:
    """Of the parameters ``names`` of a rank, in the model's order, those that its stages use: in the order in which the
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
