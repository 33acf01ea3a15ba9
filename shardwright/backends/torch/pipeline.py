"""Runs a divided program under a core schedule: the forwards and backwards of this rank's stages, in its order."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwright.backends.torch.program import (
    BufferRef,
    ConstantRef,
    Leaf,
    Literal,
    ParameterRef,
    Step,
    ValueRef,
    tensors_in,
)
from shardwright.backends.torch.randomness import Streams, kept_generators
from shardwright.backends.torch.stages import Division, Edge
from shardwright.backends.torch.transfer import Mailroom, Message, Shape
from shardwright.backends.torch.watch import Watch
from shardwright.core.errors import CaptureError
from shardwright.core.schedule import Schedule
from shardwright.core.schedule.actions import Action, Kind


@dataclass(slots=True)
class _Run:
    """What one stage keeps of one microbatch between its forward and its backward."""

    received: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """(edge, value) → the leaf that stands for what another stage sent."""
    sent: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    roots: list[tuple[torch.Tensor, torch.Tensor | float | None]] = field(default_factory=list)
    """Losses and their weights."""


@dataclass(slots=True)
class StepValues:
    """What one rank's run of a step gives: leaves of the result that its stages compute, one tensor per microbatch."""

    results: dict[int, list[torch.Tensor]]
    loss_weights: dict[int, list[torch.Tensor | float | None]]


class Pipeline:
    """One rank's part of a program under a schedule.

    Args:
        division: the program, divided into as many stages as the schedule has.
        parameters, buffers: what this rank holds, by first name.
        rank: this rank's coordinate on pp.
        loss_scale: what each microbatch's loss is multiplied by when no weight is given: one over their number.
    """

    def __init__(
        self,
        division: Division,
        schedule: Schedule,
        modules: Mapping[str, nn.Module],
        rank: int,
        mailroom: Mailroom,
        watch: Watch,
        streams: Streams,
        loss_scale: float,
    ) -> None:
        self.division, self.schedule, self.modules = division, schedule, modules
        self.program = division.program
        self.rank, self.mailroom, self.watch, self.streams = rank, mailroom, watch, streams
        self.loss_scale = loss_scale
        self.stages = schedule.stages_of(rank)
        self._forward, self._backward = self._messages()
        has_loss = bool(self.program.losses)
        self.actions = tuple(part for action in schedule.table[rank] for part in action.flat if _runs(part, has_loss))
        self._incoming = self._arrivals(has_loss)
        self.pairs = sorted({(m.source, m.target) for m in (*self._forward.values(), *self._backward.values())})
        self._local: dict[tuple[int, int, bool], list[torch.Tensor]] = {}
        self._runs: dict[tuple[int, int], _Run] = {}

    # The messages of a step --------------------------------------------------------------------------------------

    def _messages(self) -> tuple[dict[tuple[int, int], Message], dict[tuple[int, int], Message]]:
        """Activations and gradients between different ranks, by (edge, microbatch)."""
        forward: dict[tuple[int, int], Message] = {}
        backward: dict[tuple[int, int], Message] = {}
        values = self.program.values
        tag = 0
        for edge in self.division.edges:
            source, target = (self.schedule.stage_to_rank(s) for s in (edge.source, edge.target))
            if source == target:
                continue
            shapes = {v: Shape(values[v].shape, values[v].dtype) for v in edge.values}
            for mb in range(self.schedule.microbatches):
                forward[edge.index, mb] = Message(
                    (edge.index, mb, False), source, target, tuple(shapes[v] for v in edge.values), tag,
                    f"activations of microbatch {mb} from stage {edge.source}",
                )  # fmt: skip
                tag += len(edge.values)
                if edge.gradients:
                    backward[edge.index, mb] = Message(
                        (edge.index, mb, True), target, source, tuple(shapes[v] for v in edge.gradients), tag,
                        f"gradients of microbatch {mb} from stage {edge.target}",
                    )  # fmt: skip
                    tag += len(edge.gradients)
        return forward, backward

    def _arrivals(self, has_loss: bool) -> tuple[Message, ...]:
        """What the others send to this rank, each in the order of its own schedule."""
        found = []
        for source in range(self.schedule.ranks):
            if source == self.rank:
                continue
            for action in self.schedule.table[source]:
                for part in action.flat:
                    if _runs(part, has_loss):
                        found += [m for m in self._departures(part) if m.target == self.rank]
        return tuple(found)

    def _departures(self, action: Action) -> list[Message]:
        mb = _microbatch(action)
        part = self.division.parts[action.stage]
        edges, messages = (
            (part.sends, self._forward) if action.kind is Kind.FORWARD else (part.receives, self._backward)
        )
        return [messages[edge.index, mb] for edge in edges if (edge.index, mb) in messages]

    def _needs(self, action: Action) -> list[Message]:
        mb = _microbatch(action)
        part = self.division.parts[action.stage]
        edges, messages = (
            (part.receives, self._forward) if action.kind is Kind.FORWARD else (part.sends, self._backward)
        )
        return [messages[edge.index, mb] for edge in edges if (edge.index, mb) in messages]

    # A step ------------------------------------------------------------------------------------------------------

    def run(self, inputs: Sequence[Sequence[torch.Tensor]], step: int, first_microbatch: int, grad: bool) -> StepValues:
        """Run every action. ``inputs[m]`` are the input tensors of microbatch m; gradients add up in the parameters."""
        out = StepValues({}, {})
        self._runs.clear()
        self._local.clear()
        self.mailroom.expect(self._incoming)
        self.streams.enabled = self.streams.active
        device = self.mailroom.device
        try:
            with kept_generators(self.streams.active, device):
                for position, action in enumerate(self.actions):
                    mb = _microbatch(action)
                    self.watch.doing(f"stage {action.stage}, action {action.text}, microbatch {mb}")
                    for message in self._needs(action):
                        self.mailroom.post(message)
                    if position + 1 < len(self.actions):
                        for message in self._needs(self.actions[position + 1]):
                            self.mailroom.post(message)
                    backward = action.kind is Kind.BACKWARD
                    self.streams.begin(step, first_microbatch + mb, recomputing=backward)
                    if backward:
                        self._run_backward(action.stage, mb)
                    else:
                        self._run_forward(action.stage, mb, inputs[mb], grad, out)
            self.mailroom.drain()
        finally:
            self.streams.enabled = False
            self._runs.clear()
            self._local.clear()
            self.watch.doing("between steps")
        return out

    def _run_forward(self, stage: int, mb: int, inputs: Sequence[torch.Tensor], grad: bool, out: StepValues) -> None:
        part = self.division.parts[stage]
        values = self.program.values
        env: dict[int, torch.Tensor] = {}
        objects: dict[int, Any] = {}
        run = _Run()
        with torch.set_grad_enabled(grad):
            for edge in part.receives:
                for value, tensor in zip(edge.values, self._arrived(edge, mb, False), strict=True):
                    if grad and value in edge.gradients:
                        tensor.requires_grad_()
                        run.received[edge.index, value] = tensor
                    env[value] = tensor.clone() if value in part.copied else tensor
            for index, made in enumerate(values):
                if made.input is not None:
                    tensor = inputs[made.input]
                    env[index] = tensor.clone() if index in part.copied else tensor
            sent = {v for edge in part.sends for v in edge.values}
            copies: dict[int, torch.Tensor] = {}
            for step, release in zip(part.steps, part.release, strict=True):
                self.streams.enter(step)
                for value in self._execute(stage, step, env, objects):
                    if value in sent and value in part.copied:
                        copies[value] = env[value].clone()
                for value in release:
                    env.pop(value, None)
            for edge in part.sends:
                tensors = [copies[v] if v in copies else env[v] for v in edge.values]
                for value, tensor in zip(edge.values, tensors, strict=True):
                    if value in edge.gradients and tensor.requires_grad:
                        run.sent[edge.index, value] = tensor
                self._depart(edge, mb, False, [t.detach() for t in tensors])
            for index in part.losses:
                loss = self.program.losses[index]
                weight = self._weight(loss.weight, env)
                out.loss_weights.setdefault(index, []).append(weight)
                if grad:
                    run.roots.append((env[loss.value], weight))
            for leaf in part.results:
                tensor = self._resolve(self.program.result.leaves[leaf], stage, env, objects)
                out.results.setdefault(leaf, []).append(tensor.detach())
        if grad and self.program.losses:
            self._runs[stage, mb] = run

    def _run_backward(self, stage: int, mb: int) -> None:
        part = self.division.parts[stage]
        run = self._runs.pop((stage, mb))
        gradients: dict[int, torch.Tensor] = {}
        tensors: dict[int, torch.Tensor] = {}
        for edge in part.sends:
            if not edge.gradients:
                continue
            for value, gradient in zip(edge.gradients, self._arrived(edge, mb, True), strict=True):
                if (edge.index, value) in run.sent:
                    tensors[value] = run.sent[edge.index, value]
                    gradients[value] = gradients[value] + gradient if value in gradients else gradient
        roots = list(tensors.values())
        root_gradients: list[torch.Tensor] = [gradients[v] for v in tensors]
        for loss, weight in run.roots:
            scale = self.loss_scale if weight is None else weight
            roots.append(loss)
            root_gradients.append(torch.as_tensor(scale, dtype=loss.dtype, device=loss.device).reshape(loss.shape))
        if roots:
            torch.autograd.backward(roots, root_gradients)
        for edge in part.receives:
            if not edge.gradients:
                continue
            back = []
            for value in edge.gradients:
                leaf = run.received[edge.index, value]
                back.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
            self._depart(edge, mb, True, back)

    # One step of the program -------------------------------------------------------------------------------------

    def _execute(self, stage: int, step: Step, env: dict[int, torch.Tensor], objects: dict[int, Any]) -> Iterator[int]:
        """Run a step and store what it makes; yields the values made."""
        args, kwargs = step.arguments.build(lambda leaf: self._resolve(leaf, stage, env, objects))
        with self._mode(step):
            if step.path is not None:
                result = self.modules[step.path](*args, **kwargs)
            else:
                assert step.function is not None
                result = step.function(*args, **kwargs)
        yield from _store(step, step.outputs, result, env)
        for index, outputs in step.object_outputs:
            if any(v is not None for v in outputs):
                yield from _store(step, outputs, objects[index], env)
        for new, old in step.renewals:
            env[new] = env[old]
            yield new

    @contextmanager
    def _mode(self, step: Step) -> Iterator[None]:
        device = self.mailroom.device.type
        if step.autocast is None and step.grad_enabled:
            yield
            return
        with torch.set_grad_enabled(step.grad_enabled and torch.is_grad_enabled()):
            if step.autocast is None:
                yield
            else:
                with torch.autocast(device, dtype=step.autocast):
                    yield

    def _resolve(self, leaf: Leaf, stage: int, env: dict[int, torch.Tensor], objects: dict[int, Any]) -> Any:
        if isinstance(leaf, ValueRef):
            return env.get(leaf.value)
        if isinstance(leaf, Literal):
            return leaf.value
        if isinstance(leaf, (ParameterRef, BufferRef)):
            return self._of_module(leaf.name)
        if isinstance(leaf, ConstantRef):
            return leaf.tensor
        if leaf.index not in objects:
            templates = self.program.templates
            template = templates.get((leaf.index, stage)) or templates[leaf.index, -1]
            objects[leaf.index] = template.build(lambda inner: self._resolve(inner, stage, env, objects))
        return objects[leaf.index]

    def _of_module(self, name: str) -> torch.Tensor:
        path, _, last = name.rpartition(".")
        tensor: torch.Tensor = getattr(self.modules[path], last)
        return tensor

    def _weight(self, leaf: Leaf | None, env: dict[int, torch.Tensor]) -> torch.Tensor | float | None:
        if leaf is None:
            return None
        if isinstance(leaf, Literal):
            return float(leaf.value)
        tensor = self._resolve(leaf, 0, env, {})
        return torch.as_tensor(tensor).detach()

    def _arrived(self, edge: Edge, mb: int, gradient: bool) -> list[torch.Tensor]:
        message = (self._backward if gradient else self._forward).get((edge.index, mb))
        if message is None:
            return self._local.pop((edge.index, mb, gradient))
        return self.mailroom.take(message)

    def _depart(self, edge: Edge, mb: int, gradient: bool, tensors: list[torch.Tensor]) -> None:
        message = (self._backward if gradient else self._forward).get((edge.index, mb))
        if message is None:
            self._local[edge.index, mb, gradient] = tensors
        else:
            self.mailroom.send(message, tensors)


def _store(step: Step, outputs: Sequence[int | None], result: Any, env: dict[int, torch.Tensor]) -> Iterator[int]:
    found = tensors_in(result)
    if len(found) != len(outputs):
        raise CaptureError(
            f"{step.name} returned {len(found)} tensors, and {len(outputs)} when the step was recorded: its control "
            f"flow depends on values or on state outside the step"
        )
    for value, tensor in zip(outputs, found, strict=True):
        if value is not None:
            env[value] = tensor
            yield value


def _microbatch(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch


def _runs(action: Action, has_loss: bool) -> bool:
    return action.kind is Kind.FORWARD or (has_loss and action.kind is Kind.BACKWARD)
