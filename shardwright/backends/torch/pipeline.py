"""Runs a divided program under a core schedule: the actions of this rank's stages, in its order."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shardwright.backends.torch.measure import Recorder
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
    ) -> StepValues:
        """Run every action; gradients add up in the parameters.

        Args:
            inputs: ``inputs[m]`` are the input tensors of microbatch m.
            first_microbatch: the number of this replica's first microbatch among those of all replicas.
            loss_scales: what each microbatch's losses are multiplied by where no weight is given.
            recorder: notes when each action runs.
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
