"""Replay: the steps of one stage for one microbatch, forward and backward, on real tensors.

Everything that follows from the program alone is worked out once, before the first microbatch: between two actions
there is then little Python left, which shows where actions take a millisecond.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardwright.backends.torch.capture.held_tensors import apart_from_each_other, tensors_in
from shardwright.backends.torch.compat import CustomFunctionNode, pytree
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.backends.torch.memory.offload import Offload, Trip
from shardwright.backends.torch.memory.recompute import Recompute
from shardwright.backends.torch.memory.residency import Call, Residency, own_views, saving_apart
from shardwright.backends.torch.pipeline.stage_values import Kept, StepValues
from shardwright.backends.torch.program.program import (
    BufferRef,
    ConstantRef,
    Leaf,
    Literal,
    NumberRef,
    ParameterRef,
    Step,
    ValueRef,
)
from shardwright.backends.torch.program.randomness import Streams
from shardwright.backends.torch.program.stages import Division, Edge
from shardwright.backends.torch.state.flat_shards import FlatGroup, FlatShards
from shardwright.core.errors import CaptureError, PlanWarning

Depart = Callable[[Edge, list[torch.Tensor]], None]
"""A function that takes the tensors that leave over an edge: its values, or their gradients."""
_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True, slots=True)
class Means:
    """The means to run a stage: the modules that this rank holds, by path; the random numbers of the step; the calls
    that are recomputed and offloaded."""

    modules: Mapping[str, nn.Module]
    streams: Streams
    device: torch.device
    recompute: Recompute
    offload: Offload
    watchdog: Watchdog
    residency: Residency


@dataclass(slots=True)
class _Env:
    """The values of one microbatch on one stage, the objects that its units were given, and the Python values that the
    program is given."""

    numbers: Sequence[Any] = ()
    is_followed_by_backward: bool = False
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    objects: dict[int, Any] = field(default_factory=dict)
    call: Call | None = None
    """The last call that uses sharded parameters."""
    views: dict[int, tuple[FlatGroup, ...]] = field(default_factory=dict)
    """The groups of sharded parameters that values are views of."""
    trip: Trip | None = None
    """What the last offloaded call has on the host."""
    lasting: dict[int, torch.Tensor] = field(default_factory=dict)
    """Copies of such values that leave the stage: the parameters are freed behind the call."""


class Replay:
    """The replay of one stage of a division, with the means of `Means`. ``text``: the stage in words."""

    def __init__(self, division: Division, stage: int, means: Means, text: str) -> None:
        self.program, self.part, self.stage, self.means = division.program, division.parts[stage], stage, means
        self.text = text
        self._calls = [
            (_Call(self, step), step, release) for step, release in zip(self.part.steps, self.part.release, strict=True)
        ]
        self.calls = [call for call, _, _ in self._calls]
        self.uses = Counter(value for call in self.calls for value in call.given_values)
        """The number of calls that each value is given to."""
        _say_held_in_objects(self.calls)
        self._laid_out_for: FlatShards | None = None
        sent = {v for edge in self.part.sends for v in edge.values}
        self._copied_when_sent = sent & self.part.copied
        returned = [self.program.result.leaves[index] for index in self.part.results]
        self.leaving = sent | {leaf.value for leaf in returned if isinstance(leaf, ValueRef)}
        self.leaving |= {self.program.losses[index].value for index in self.part.losses}
        self._received = [
            (edge, value, self.program.values[value].strides, value in edge.gradients, value in self.part.copied)
            for edge in self.part.receives
            for value in edge.values
        ]
        self.taken_back = tuple(edge for edge in self.part.sends if edge.gradients)
        """The edges over which gradients come in, in the order in which `backward` takes them."""
        self._scales: dict[tuple[float, torch.dtype], torch.Tensor] = {}

    def _take(self, arrived: Sequence[list[torch.Tensor]]) -> Iterator[torch.Tensor]:
        """The tensors that came in, as they lie where they were made. Those laid out anew are let go of at once."""
        strides = iter([strides for _, _, strides, _, _ in self._received])
        for tensors in arrived:
            while tensors:
                yield _laid_out(tensors.pop(0), next(strides))

    def forward(
        self,
        mb: int,
        inputs: Sequence[torch.Tensor],
        arrived: Sequence[list[torch.Tensor]],
        depart: Depart,
        out: StepValues,
        grad: bool,
        numbers: Sequence[Any] = (),
        is_followed_by_backward: bool = False,
    ) -> Kept:
        """One forward action; gradients are enabled as ``grad`` says.

        Args:
            inputs: the input tensors of the microbatch.
            arrived: the tensors that came in over each edge that the stage receives.
            numbers: the Python values that the program is given.
            is_followed_by_backward: whether the next action of the rank is the backward of this one.
        """
        program, part = self.program, self.part
        env, kept = _Env(numbers, is_followed_by_backward=is_followed_by_backward), Kept()
        self._lay_out()
        values = env.values
        for (edge, value, _, has_gradient, is_copied), tensor in zip(self._received, self._take(arrived), strict=True):
            if grad and has_gradient:
                tensor.requires_grad_()
                kept.received[edge.index, value] = tensor
            values[value] = tensor.clone() if is_copied else tensor
        for index in part.inputs:
            made = program.values[index].input
            assert made is not None
            values[index] = inputs[made].clone() if index in part.copied else inputs[made]
        copies: dict[int, torch.Tensor] = {}
        streams = self.means.streams
        running: Step | None = None
        try:
            for call, step, release in self._calls:
                running = step
                if streams.active:
                    streams.enter(program, step)
                for value in call.run(env):
                    if value in self._copied_when_sent and value not in env.lasting:
                        copies[value] = values[value].clone()
                for value in release:
                    values.pop(value, None)
        except BaseException as error:
            self.means.watchdog.note(error, f"in {running.name}" if running is not None else "")
            raise
        kept.last_call = env.call
        copies |= env.lasting
        for edge in part.sends:
            tensors = [copies[v] if v in copies else values[v] for v in edge.values]
            depart(edge, [tensor.detach() for tensor in tensors])
            for value, tensor in zip(edge.values, tensors, strict=True):
                if value in edge.gradients and tensor.requires_grad:
                    kept.sent[edge.index, value] = _gradient_edge(tensor)
        for index in part.losses:
            loss = program.losses[index]
            weight = self._weight(loss.weight, env)
            out.loss_weights.setdefault(index, {})[mb] = weight
            held = env.lasting.get(loss.value, values[loss.value])
            out.losses.append((f"loss of microbatch {mb} ({self.text})", held.detach()))
            if grad:
                kept.roots.append((index, values[loss.value], weight))
        for leaf in part.results:
            out.results.setdefault(leaf, {})[mb] = self._result(program.result.leaves[leaf], env)
        return kept

    def _result(self, leaf: Leaf, env: _Env) -> torch.Tensor:
        """A tensor of the result, which lasts longer than sharded parameters are whole."""
        tensor: torch.Tensor = self.resolve(leaf, env)
        if isinstance(leaf, ValueRef):
            return env.lasting.get(leaf.value, tensor).detach()
        residency = self.means.residency
        name = residency.name_of(tensor) if residency.frees else None
        groups = residency.groups_of([name] if name is not None else [])
        residency.enter(groups)
        found = tensor.detach().clone() if groups else tensor.detach()
        residency.leave(groups)
        return found

    def _lay_out(self) -> None:
        """Find the sharded parameters of every call, once they are sharded."""
        residency = self.means.residency
        if residency.flat is self._laid_out_for:
            return
        self._laid_out_for = residency.flat
        ahead: tuple[FlatGroup, ...] = ()
        later: frozenset[FlatGroup] = frozenset()
        for call in reversed(self.calls):
            call.groups = residency.groups_of(call.parameters)
            call.looked_up = () if call.recomputed else residency.looked_up(call.target, call.groups)
            call.ahead, call.kept = ahead, later
            ahead, later = call.groups or ahead, later | frozenset(call.groups)

    def backward(
        self, kept: Kept, arrived: Sequence[list[torch.Tensor]], depart: Depart, loss_scales: Sequence[float | None],
        factor: float = 1.0,
    ) -> None:  # fmt: skip
        """One backward action; gradients add up in the parameters.

        Args:
            arrived: the gradients that came in over each edge of ``taken_back``.
            loss_scales: the factor of each loss of this microbatch where no weight is given.
            factor: another factor of all losses, for 16-bit gradients.
        """
        gradients: dict[int, torch.Tensor] = {}
        edges: dict[int, GradientEdge] = {}
        for edge, came in zip(self.taken_back, arrived, strict=True):
            for value, gradient in zip(edge.gradients, came, strict=True):
                if (edge.index, value) in kept.sent:
                    edges[value] = kept.sent[edge.index, value]
                    gradients[value] = gradients[value] + gradient if value in gradients else gradient
        roots: list[torch.Tensor | GradientEdge] = list(edges.values())
        root_gradients: list[torch.Tensor] = [gradients[v] for v in edges]
        for index, loss, weight in kept.roots:
            scale = loss_scales[index] if weight is None else weight
            assert scale is not None
            if _is_zero(scale):  # as of a mean over nothing, which is NaN
                continue
            roots.append(loss)
            root_gradients.append(self._scale(scale * factor, loss))
        edges.clear()
        kept.sent.clear()
        kept.roots.clear()
        with self.means.residency.backward(kept.last_call):
            if roots:  # torch takes tensors beside edges, which its annotation leaves out
                torch.autograd.backward(cast("list[GradientEdge]", roots), root_gradients)
        roots.clear()
        for edge in self.part.receives:
            if not edge.gradients:
                continue
            back = []
            for value in edge.gradients:
                leaf = kept.received[edge.index, value]
                back.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
            depart(edge, back)
        kept.received.clear()

    def _scale(self, scale: torch.Tensor | float, loss: torch.Tensor) -> torch.Tensor:
        """The gradient of a loss, in memory of its own: it may become the gradient of a parameter, which is changed."""
        if isinstance(scale, torch.Tensor):
            return scale.to(loss.device, loss.dtype).reshape(loss.shape)
        key = (scale, loss.dtype)
        if key not in self._scales:
            if len(self._scales) > 64:  # of weights that are numbers of the user's own
                self._scales.clear()
            self._scales[key] = torch.tensor(scale, dtype=loss.dtype, device=loss.device)
        return self._scales[key].reshape(loss.shape).clone()

    def resolve(self, leaf: Leaf, env: _Env) -> Any:
        """The current value of a leaf."""
        if isinstance(leaf, ValueRef):
            return env.values.get(leaf.value)
        if isinstance(leaf, Literal):
            return leaf.value
        if isinstance(leaf, (ParameterRef, BufferRef)):
            path, _, last = leaf.name.rpartition(".")
            return getattr(self.means.modules[path], last)
        if isinstance(leaf, ConstantRef):
            return leaf.tensor
        if isinstance(leaf, NumberRef):
            return env.numbers[leaf.index]
        if leaf.index not in env.objects:
            templates = self.program.templates
            template = templates.get((leaf.index, self.stage)) or templates[leaf.index, -1]
            env.objects[leaf.index] = template.build(lambda inner: self.resolve(inner, env))
        return env.objects[leaf.index]

    def _weight(self, leaf: Leaf | None, env: _Env) -> torch.Tensor | float | None:
        if leaf is None:
            return None
        if isinstance(leaf, Literal):
            return float(leaf.value)
        return torch.as_tensor(self.resolve(leaf, env)).detach()


def _is_zero(scale: torch.Tensor | float) -> bool:
    """Whether a loss has no share in its batch. Weights on a device are not asked, as that would wait for them."""
    return bool(scale == 0.0) if isinstance(scale, float) or scale.device.type == "cpu" else False


class _Call:
    """One step of a stage, with the sources of its arguments and the places of its results."""

    def __init__(self, replay: Replay, step: Step) -> None:
        self.replay, self.step = replay, step
        self.recomputed, self.offloaded = replay.means.recompute.names(step), replay.means.offload.names(step)
        target = step.function if step.path is None else replay.means.modules[step.path]
        assert target is not None
        self.target: Callable[..., Any] = target
        leaves = list(enumerate(step.arguments.leaves))
        self._fixed = [leaf.value if isinstance(leaf, Literal) else None for _, leaf in leaves]
        self._values = [(place, leaf.value) for place, leaf in leaves if isinstance(leaf, ValueRef)]
        self.given_values = frozenset(value for _, value in self._values)
        self._others = [(place, leaf) for place, leaf in leaves if not isinstance(leaf, (ValueRef, Literal))]
        self._flat = _flat_form(step.arguments.spec)
        self._in_mode = step.autocast is not None or not step.grad_enabled
        self.parameters = self._parameters()
        self.groups: tuple[FlatGroup, ...] = ()
        """The groups of sharded parameters that the call uses."""
        self.looked_up: tuple[FlatGroup, ...] = ()
        """Those of these that its backward pass does not read."""
        self.ahead: tuple[FlatGroup, ...] = ()
        """Those of the next call that uses any."""
        self.kept: frozenset[FlatGroup] = frozenset()
        """Those that later calls use."""

    def run(self, env: _Env) -> Sequence[int]:
        """Run the step and store its results; returns the numbers of the values made."""
        given = self._fixed.copy()
        values = env.values
        residency = self.replay.means.residency
        groups = self.groups
        flowing = self._own_views(values) if groups and residency.frees else {}
        for place, value in self._values:
            given[place] = flowing[value] if value in flowing else values.get(value)
        for place, leaf in self._others:
            given[place] = self.replay.resolve(leaf, env)
        if self._flat is None:
            args, kwargs = pytree.tree_unflatten(given, self.step.arguments.spec)
        else:
            count, names = self._flat
            args, kwargs = given[:count], dict(zip(names, given[count:], strict=True)) if names else {}
        if env.views:
            seen = [group for _, value in self._values for group in env.views.get(value, ())]
            groups = tuple(dict.fromkeys((*groups, *seen)))
        if groups:
            residency.enter(groups, self.ahead)
        with self._mode() if self._in_mode or self.looked_up else _NOTHING:
            is_trained = self.step.grad_enabled and torch.is_grad_enabled()
            if self.recomputed and is_trained:
                result = self.replay.means.recompute.run(self.step, tuple(args), kwargs)
            elif self.offloaded and is_trained:
                offload, module = self.replay.means.offload, cast("nn.Module", self.target)
                with offload.sending(self.step.name, module, tensors_in(given), env.trip) as env.trip:
                    result = self.target(*args, **kwargs)
            else:
                result = self.target(*args, **kwargs)
        step = self.step
        made = self._store(step.outputs, result, values, given)
        for index, outputs in step.object_outputs:
            if any(v is not None for v in outputs):
                made += self._store(outputs, env.objects[index], values)
        for new, old in step.renewals:
            values[new] = values[old]
            made.append(new)
        if not groups:
            return made
        for value in made:
            if aliased := tuple(group for group in groups if group.is_seen_by(values[value])):
                env.views[value] = aliased
                if value in self.replay.leaving:
                    env.lasting[value] = values[value].clone()
        if residency.frees and torch.is_grad_enabled():
            trained = {n for group in groups if group.trains for n in group.names if n in self.parameters}
            unread = residency.unread(self.looked_up, [values[value] for value in made])
            env.call = Call(tuple(g for g in groups if g not in unread), trained, env.call)
            tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
            objects = [leaf for leaf in given if not isinstance(leaf, torch.Tensor)]
            residency.record(env.call, tensors, tensors_in(objects), [values[value] for value in made])
        # Where the backward comes next, it begins with what the last call used.
        is_last = env.is_followed_by_backward and not self.ahead
        residency.leave(groups, [g for g in groups if g not in self.looked_up] if is_last else self.kept)
        return made

    def _own_views(self, values: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Views of what the call is given where it is not the only one, or is given several: the others may be what it
        hands on."""
        if not (torch.is_grad_enabled() and self.step.grad_enabled):
            return {}
        found = {v: t for v in self.given_values if (t := values.get(v)) is not None and t.requires_grad}
        alone = len(found) < 2 and all(self.replay.uses[value] == 1 for value in found)
        return {} if alone else own_views(found)

    def _parameters(self) -> tuple[str, ...]:
        """The parameters that the call uses, by first name."""
        means, step = self.replay.means, self.step
        found: list[torch.Tensor] = []
        if step.path is not None:
            module = means.modules[step.path]
            own = getattr(module, "held_parameters", None)
            found += module.parameters() if own is None else own()
        for leaf in step.arguments.leaves:
            if isinstance(leaf, ParameterRef):
                path, _, last = leaf.name.rpartition(".")
                found.append(getattr(means.modules[path], last))
        return tuple(dict.fromkeys(name for t in found if (name := means.residency.name_of(t)) is not None))

    def _mode(self) -> AbstractContextManager[Any]:
        modes = ExitStack()
        if self.looked_up and torch.is_grad_enabled():
            modes.enter_context(saving_apart(self.looked_up))
        modes.enter_context(torch.set_grad_enabled(self.step.grad_enabled and torch.is_grad_enabled()))
        if self.step.autocast is not None:
            modes.enter_context(torch.autocast(self.replay.means.device.type, dtype=self.step.autocast))
        return modes

    def _store(
        self, outputs: Sequence[int | None], result: Any, values: dict[int, torch.Tensor], given: Sequence[Any] = ()
    ) -> list[int]:
        """Store the tensors of a result; returns the numbers of their values. Raises CaptureError for anything but
        tensors of the shapes that the program has."""
        found = tensors_in(result)
        if len(found) != len(outputs):  # what was given stands in several places, each of which is a value
            found = tensors_in(apart_from_each_other(result, given))
        if len(found) != len(outputs):
            raise CaptureError(
                f"{self.step.name} returned {len(found)} tensors, and {len(outputs)} when the step was recorded: its "
                f"control flow depends on values or on state outside the step"
            )
        made = []
        for value, tensor in zip(outputs, found, strict=True):
            if value is not None:
                expected = self.replay.program.values[value].shape
                if tensor.shape != expected:
                    raise CaptureError(
                        f"{self.step.name} made a tensor of shape {tuple(tensor.shape)}, and of {expected} when the "
                        f"step was recorded: its shapes depend on values or on state outside the step"
                    )
                values[value] = tensor
                made.append(value)
        return made


def _say_held_in_objects(calls: Sequence[_Call]) -> None:
    """Warn of recomputed calls that leave tensors in objects that they are given, as in a cache of keys and values:
    those stay, as the calls are given the objects once more."""
    ours = [call.step for call in calls if call.recomputed]
    found = [s.name for s in ours if any(value is not None for _, made in s.object_outputs for value in made)]
    if found:
        warnings.warn(
            f"{found[0]} and {len(found) - 1} other calls leave tensors in objects that they are given, such as a "
            f"cache of keys and values: these stay on the device until the backward pass, although the plan recomputes "
            f"what the calls keep; where it is such a cache, use_cache=False in the model's configuration saves them",
            PlanWarning,
            stacklevel=2,
        )


def _flat_form(spec: pytree.TreeSpec) -> tuple[int, tuple[str, ...]] | None:
    """The number of arguments by position and the names of the others, for ``((…), {…})`` of leaves alone; None for
    other structures."""
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


def _gradient_edge(tensor: torch.Tensor) -> GradientEdge:
    """The edge where a tensor's gradient goes in, which keeps the graph and not the tensor. An edge to a function
    written in Python does not keep the graph behind it in every version of torch; one to a view of that function's
    result does."""
    if isinstance(tensor.grad_fn, CustomFunctionNode):
        tensor = tensor.view_as(tensor)
    return get_gradient_edge(tensor)
