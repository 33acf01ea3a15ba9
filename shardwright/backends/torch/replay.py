"""Replay: the steps of one stage for one microbatch, forward and backward, on real tensors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardwright.backends.torch.program import (
    BufferRef,
    ConstantRef,
    Leaf,
    Literal,
    ParameterRef,
    Program,
    Step,
    ValueRef,
    tensors_in,
)
from shardwright.backends.torch.randomness import Streams
from shardwright.backends.torch.recompute import Recompute
from shardwright.backends.torch.stages import Division, Edge
from shardwright.backends.torch.weight_gradients import Deferred
from shardwright.core.errors import CaptureError

Arrived = Callable[[Edge], list[torch.Tensor]]
"""What came in over an edge: its values, or their gradients."""
Depart = Callable[[Edge, list[torch.Tensor]], None]


@dataclass(slots=True)
class Kept:
    """What one stage keeps of one microbatch between its forward and its backward."""

    received: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """(edge, value) → the leaf that stands for what another stage sent."""
    sent: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    roots: list[tuple[torch.Tensor, torch.Tensor | float | None]] = field(default_factory=list)
    """Losses and their weights."""
    deferred: Deferred | None = None
    """What an I left to its W."""


@dataclass(slots=True)
class StepValues:
    """What one rank's run of a step gives: leaves of the result that its stages compute, and the weights of losses,
    one for each microbatch."""

    results: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    loss_weights: dict[int, dict[int, torch.Tensor | float | None]] = field(default_factory=dict)


class Replay:
    """Runs stages on the modules that this rank holds.

    Args:
        modules: by path.
        streams: seeds what draws random numbers.
        recompute: runs the calls that are recomputed.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], streams: Streams, device: torch.device, recompute: Recompute
    ) -> None:
        self.modules, self.streams, self.device, self.recompute = modules, streams, device, recompute
        self._flat: dict[int, tuple[int, tuple[str, ...]] | None] = {}

    def forward(
        self,
        division: Division,
        stage: int,
        mb: int,
        inputs: Sequence[torch.Tensor],
        arrived: Arrived,
        depart: Depart,
        out: StepValues,
        grad: bool,
    ) -> Kept:
        """One forward action. ``inputs`` are the input tensors of the microbatch."""
        program, part = division.program, division.parts[stage]
        env: dict[int, torch.Tensor] = {}
        objects: dict[int, Any] = {}
        kept = Kept()
        with torch.set_grad_enabled(grad):
            for edge in part.receives:
                for value, given in zip(edge.values, arrived(edge), strict=True):
                    tensor = _laid_out(given, program.values[value].strides)
                    if grad and value in edge.gradients:
                        tensor.requires_grad_()
                        kept.received[edge.index, value] = tensor
                    env[value] = tensor.clone() if value in part.copied else tensor
            for index in part.inputs:
                made = program.values[index]
                assert made.input is not None
                tensor = inputs[made.input]
                env[index] = tensor.clone() if index in part.copied else tensor
            sent = {v for edge in part.sends for v in edge.values} & part.copied
            copies: dict[int, torch.Tensor] = {}
            for step, release in zip(part.steps, part.release, strict=True):
                self.streams.enter(program, step)
                for value in self._execute(program, stage, step, env, objects):
                    if value in sent:
                        copies[value] = env[value].clone()
                for value in release:
                    env.pop(value, None)
            for edge in part.sends:
                tensors = [copies[v] if v in copies else env[v] for v in edge.values]
                for value, tensor in zip(edge.values, tensors, strict=True):
                    if value in edge.gradients and tensor.requires_grad:
                        kept.sent[edge.index, value] = tensor
                depart(edge, [t.detach() for t in tensors])
            for index in part.losses:
                loss = program.losses[index]
                weight = self._weight(program, loss.weight, env)
                out.loss_weights.setdefault(index, {})[mb] = weight
                if grad:
                    kept.roots.append((env[loss.value], weight))
            for leaf in part.results:
                tensor = self._resolve(program, program.result.leaves[leaf], stage, env, objects)
                out.results.setdefault(leaf, {})[mb] = tensor.detach()
        return kept

    def backward(
        self, division: Division, stage: int, kept: Kept, arrived: Arrived, depart: Depart, loss_scale: float
    ) -> None:
        """One backward action; gradients add up in the parameters. ``loss_scale`` is what the losses of this
        microbatch are multiplied by where no weight is given."""
        part = division.parts[stage]
        gradients: dict[int, torch.Tensor] = {}
        tensors: dict[int, torch.Tensor] = {}
        for edge in part.sends:
            if not edge.gradients:
                continue
            for value, gradient in zip(edge.gradients, arrived(edge), strict=True):
                if (edge.index, value) in kept.sent:
                    tensors[value] = kept.sent[edge.index, value]
                    gradients[value] = gradients[value] + gradient if value in gradients else gradient
        roots = list(tensors.values())
        root_gradients: list[torch.Tensor] = [gradients[v] for v in tensors]
        for loss, weight in kept.roots:
            scale = loss_scale if weight is None else weight
            roots.append(loss)
            root_gradients.append(torch.as_tensor(scale, dtype=loss.dtype, device=loss.device).reshape(loss.shape))
        tensors.clear()
        kept.sent.clear()
        kept.roots.clear()
        if roots:
            torch.autograd.backward(roots, root_gradients)
        roots.clear()
        for edge in part.receives:
            if not edge.gradients:
                continue
            back = []
            for value in edge.gradients:
                leaf = kept.received[edge.index, value]
                back.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
            depart(edge, back)
        kept.received.clear()

    # One step of the program -------------------------------------------------------------------------------------

    def _execute(
        self, program: Program, stage: int, step: Step, env: dict[int, torch.Tensor], objects: dict[int, Any]
    ) -> Iterator[int]:
        """Run a step and store what it makes; yields the values made."""
        args, kwargs = self._arguments(
            step, [self._resolve(program, leaf, stage, env, objects) for leaf in step.arguments.leaves]
        )
        with self._mode(step):
            if step.path is not None and self.recompute.wants(step):
                result = self.recompute.run(step, args, kwargs)
            elif step.path is not None:
                result = self.modules[step.path](*args, **kwargs)
            else:
                assert step.function is not None
                result = step.function(*args, **kwargs)
        yield from _store(program, step, step.outputs, result, env)
        for index, outputs in step.object_outputs:
            if any(v is not None for v in outputs):
                yield from _store(program, step, outputs, objects[index], env)
        for new, old in step.renewals:
            env[new] = env[old]
            yield new

    def _arguments(self, step: Step, given: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments by position and by name; where none is a container, without torch's walk through the tree."""
        key = id(step)  # programs live as long as what replays them
        if key not in self._flat:
            self._flat[key] = _flat_form(step.arguments.spec)
        flat = self._flat[key]
        if flat is None:
            args, kwargs = pytree.tree_unflatten(given, step.arguments.spec)
            return args, kwargs
        count, names = flat
        return tuple(given[:count]), dict(zip(names, given[count:], strict=True))

    @contextmanager
    def _mode(self, step: Step) -> Iterator[None]:
        if step.autocast is None and step.grad_enabled:
            yield
            return
        with torch.set_grad_enabled(step.grad_enabled and torch.is_grad_enabled()):
            if step.autocast is None:
                yield
            else:
                with torch.autocast(self.device.type, dtype=step.autocast):
                    yield

    def _resolve(
        self, program: Program, leaf: Leaf, stage: int, env: dict[int, torch.Tensor], objects: dict[int, Any]
    ) -> Any:
        if isinstance(leaf, ValueRef):
            return env.get(leaf.value)
        if isinstance(leaf, Literal):
            return leaf.value
        if isinstance(leaf, (ParameterRef, BufferRef)):
            return self._of_module(leaf.name)
        if isinstance(leaf, ConstantRef):
            return leaf.tensor
        if leaf.index not in objects:
            templates = program.templates
            template = templates.get((leaf.index, stage)) or templates[leaf.index, -1]
            objects[leaf.index] = template.build(lambda inner: self._resolve(program, inner, stage, env, objects))
        return objects[leaf.index]

    def _of_module(self, name: str) -> torch.Tensor:
        path, _, last = name.rpartition(".")
        tensor: torch.Tensor = getattr(self.modules[path], last)
        return tensor

    def _weight(self, program: Program, leaf: Leaf | None, env: dict[int, torch.Tensor]) -> torch.Tensor | float | None:
        if leaf is None:
            return None
        if isinstance(leaf, Literal):
            return float(leaf.value)
        tensor = self._resolve(program, leaf, 0, env, {})
        return torch.as_tensor(tensor).detach()


def _flat_form(spec: pytree.TreeSpec) -> tuple[int, tuple[str, ...]] | None:
    """For ``((…), {…})`` of leaves alone the number of arguments by position, and the names of the others."""
    args, kwargs = spec.children()
    if args.type is not tuple or not all(c.is_leaf() for held in (args, kwargs) for c in held.children()):
        return None
    return args.num_children, tuple(kwargs.context)


def _laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor in the memory order that it has where it was made, if that is dense: messages carry all in one order."""
    if tensor.stride() == strides or len(strides) != tensor.dim() or not _are_dense(tensor.shape, strides):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _are_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _store(
    program: Program, step: Step, outputs: Sequence[int | None], result: Any, env: dict[int, torch.Tensor]
) -> Iterator[int]:
    found = tensors_in(result)
    if len(found) != len(outputs):
        raise CaptureError(
            f"{step.name} returned {len(found)} tensors, and {len(outputs)} when the step was recorded: its control "
            f"flow depends on values or on state outside the step"
        )
    for value, tensor in zip(outputs, found, strict=True):
        if value is not None:
            if tensor.shape != program.values[value].shape:
                raise CaptureError(
                    f"{step.name} made a tensor of shape {tuple(tensor.shape)}, and of {program.values[value].shape} "
                    f"when the step was recorded: its shapes depend on values or on state outside the step"
                )
            env[value] = tensor
            yield value
