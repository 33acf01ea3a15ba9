"""The tensor axis by calls: where a model cannot be captured whole, each unit that can is run on shards by itself.

The step is recorded as for a pipeline, unit calls and the steps between them. A call whose module can be captured
becomes a function of local tensors, between values that are whole; any other stays a call of the module, which every
rank of the axis makes, with the reason. Parameters are placed as the plan says where all of their readers run on
shards.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardwright.backends.torch.capture.batch_dims import Sample
from shardwright.backends.torch.capture.model_call import arguments_of
from shardwright.backends.torch.compat import pytree
from shardwright.backends.torch.machine.tensor_axis import Axis
from shardwright.backends.torch.program.program import (
    ConstantRef,
    Context,
    Leaf,
    Literal,
    ObjectRef,
    ParameterRef,
    Program,
    Step,
    Tree,
    ValueRef,
)
from shardwright.backends.torch.tensor_parallel.hooks import require_no_hooks
from shardwright.backends.torch.tensor_parallel.lowered_model import Replay, lower_all
from shardwright.backends.torch.tensor_parallel.trace import NotReplayableError, Traced, trace_part
from shardwright.backends.torch.tensor_parallel.unit_layouts import planned_part
from shardwright.core.errors import CaptureError, PlanError
from shardwright.core.layout.placements import Placement, Replicate
from shardwright.core.model.structure import in_own_dims, layout_of
from shardwright.core.plan.plan import Plan
from shardwright.core.solver.op_layouts import AXIS

R = Replicate()


@dataclass(frozen=True, slots=True)
class CallOnPieces:
    """A unit call that runs on shards."""

    step: Step
    """The step in place of the recorded one."""
    module: nn.Module
    replay: Replay
    given: tuple[int, ...]
    """The graph tensors that the step's arguments are."""
    made: tuple[tuple[int, tuple[int, ...]], ...]
    """The (graph tensor, strides) of every output of the step."""


@dataclass(frozen=True, slots=True)
class ByCalls:
    """A recorded step of which some unit calls run on shards.

    Attributes:
        calls: by the path that their steps have now.
        whole: module path → the reason why it runs whole.
        parameters: first name → placement, of all parameters; ``summed``: as `Replay.summed`.
    """

    program: Program
    calls: Mapping[str, CallOnPieces]
    whole: Mapping[str, str]
    parameters: Mapping[str, Placement]
    summed: frozenset[str]


@dataclass(slots=True)
class _Draft:
    """A call that could be captured."""

    step: Step
    path: str
    traced: Traced
    leaves: list[Leaf]
    names: dict[str, str]
    """The first names in the model, by the names of parameters in the module."""


class Lowerer:
    """The lowering of the unit calls of one recorded step to shards.

    Args:
        first_name: for every name of a parameter or buffer, its first.
        seed: called before a draw, with the context that the unsplit model has there.
        prefix: of the paths that steps on shards get.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        axis: Axis,
        device: torch.device,
        first_name: Mapping[str, str],
        seed: Callable[[Context], None],
        prefix: str,
    ) -> None:
        self.model, self.plan, self.axis, self.device = model, plan, axis, device
        self.first_name, self.seed, self.prefix = first_name, seed, prefix

    def lower(self, program: Program, planned: Mapping[str, Placement]) -> ByCalls:
        """The program with as many of its calls on shards as can be.

        Args:
            planned: first name → placement of each parameter whose readers all run on shards.
        """
        whole: dict[str, str] = {}
        drafts: dict[int, _Draft] = {}
        for step in program.steps:
            if step.path is not None and program.is_one_of_many:
                whole[step.path] = "random numbers decide which units are called"
            elif step.path is not None:
                try:
                    drafts[step.index] = self._draft(program, step, step.path)
                except (CaptureError, PlanError) as reason:
                    whole.setdefault(step.path, _first_sentence(reason))
        calls: dict[int, CallOnPieces] = {}
        while True:
            kept_whole = {n for s in program.steps if s.index not in drafts for n in s.parameters}
            kept_whole |= {leaf.name for leaf in program.result.leaves if isinstance(leaf, ParameterRef)}
            places = {name: place for name, place in planned.items() if name not in kept_whole}
            failed = False
            for index, draft in tuple(drafts.items()):
                known = calls.get(index)
                wanted = {name: places.get(first, R) for name, first in draft.names.items()}
                if known is not None and all(known.replay.parameters[n] == p for n, p in wanted.items()):
                    continue
                try:
                    calls[index] = self._lowered(program, draft, wanted)
                except (CaptureError, PlanError) as reason:
                    whole.setdefault(draft.path, _first_sentence(reason))
                    calls.pop(index, None)
                    del drafts[index]
                    failed = True
            if not failed and not self._without_mixed_terms(program, drafts, calls, whole):
                break
        parameters: dict[str, Placement] = dict.fromkeys(planned, R)
        summed: set[str] = set()
        for index, call in calls.items():
            for name, place in call.replay.parameters.items():
                parameters[drafts[index].names[name]] = place
            summed.update(drafts[index].names[n] for n in call.replay.summed)
        steps = tuple(calls[s.index].step if s.index in calls else s for s in program.steps)
        by_path = {str(call.step.path): call for call in calls.values()}
        return ByCalls(replace(program, steps=steps), by_path, whole, parameters, frozenset(summed))

    def _without_mixed_terms(
        self, program: Program, drafts: dict[int, _Draft], calls: dict[int, CallOnPieces], whole: dict[str, str]
    ) -> bool:
        """Let calls run whole that have a term of the gradient of a parameter where another reader has all of it, as
        its gradient is summed over the axis or not. Returns whether there are such calls."""
        terms = {
            index: {drafts[index].names[name] for name in call.replay.summed} for index, call in calls.items()
        }  # fmt: skip
        readers = [(step.index, name) for step in program.steps for name in step.parameters]
        has_all = {name for index, name in readers if name not in terms.get(index, ())}
        mixed = {index: sorted(names & has_all) for index, names in terms.items() if names & has_all}
        for index, names in mixed.items():
            reason = f"its gradient of {names[0]} is a term, and other units that use it have all of theirs"
            whole.setdefault(drafts[index].path, reason)
            del calls[index], drafts[index]
        return bool(mixed)

    def _draft(self, program: Program, step: Step, path: str) -> _Draft:
        module = self.model.get_submodule(path)
        require_no_hooks(module, path)
        leaves: list[tuple[torch.Tensor, Leaf]] = []

        def resolve(leaf: Leaf) -> Any:
            if isinstance(leaf, Literal):
                return leaf.value
            if isinstance(leaf, ConstantRef):
                tensor = leaf.tensor
            elif isinstance(leaf, ValueRef):
                value = program.values[leaf.value]
                tensor = torch.empty_strided(value.shape, value.strides, dtype=value.dtype)
                tensor.requires_grad_(value.carries_gradient)
            elif isinstance(leaf, ObjectRef):
                kind = next(type(t.value).__name__ for (i, _), t in program.templates.items() if i == leaf.index)
                raise NotReplayableError(
                    f"it is given a {kind}, an object that it may write to: call the model without it (a cache: "
                    f"use_cache=False)"
                )
            else:
                raise NotReplayableError("it is given a parameter or a buffer")
            leaves.append((tensor, leaf))
            return tensor

        args, kwargs = step.arguments.build(resolve)
        if step.object_outputs or step.renewals or step.written:
            raise NotReplayableError("it writes to objects or tensors that it is given")
        sample = arguments_of(module, args, kwargs)
        asked = tuple(i for i, value in enumerate(step.outputs) if value is not None)
        with autocast_of(step):
            traced = trace_part(module, sample, asked)
        of = {id(tensor): leaf for tensor, leaf in leaves}
        order = [of[id(leaf.tensor)] for leaf in Sample(sample, fixed=True).leaves]
        names = {p.name: self.first_name[f"{path}.{p.name}"] for p in traced.graph.parameters}
        return _Draft(step, path, traced, order, names)

    def _lowered(self, program: Program, draft: _Draft, places: Mapping[str, Placement]) -> CallOnPieces:
        step, traced, graph = draft.step, draft.traced, draft.traced.graph
        counts = dict(step.counts)

        def in_model(context: Context) -> Context:
            path = f"{draft.path}.{context[0]}" if context[0] else draft.path
            return path, counts.get(path, 0) + context[1], context[2]

        path = f"{self.prefix}{draft.path} (call {step.occurrence})"
        layouts = planned_part(graph, self.plan, places)
        planned = self.plan.fp8_parameters("torch")
        fp8 = {name for name, first in draft.names.items() if first in planned}
        replay = lower_all(traced, layouts, self.axis, 1, self.device, lambda c: self.seed(in_model(c)), path, fp8)
        numbers = [value for value in step.outputs if value is not None]
        tensors = [tensor for tensor in traced.outputs if tensor is not None]
        if len(set(tensors)) != len(numbers):
            raise NotReplayableError("it returns one tensor twice")
        spec = pytree.tree_structure((tuple(0 for _ in draft.leaves), {}))
        lowered = replace(
            step,
            path=path,
            occurrence=0,
            arguments=Tree(tuple(draft.leaves), spec),
            outputs=tuple(numbers),
            autocast=None,
            random=tuple(in_model(c) for unit in replay.units for c in unit.draws),
            counts=(),
        )
        made = tuple((t, program.values[n].strides) for t, n in zip(tensors, numbers, strict=True))
        return CallOnPieces(lowered, self.model.get_submodule(draft.path), replay, graph.inputs, made)


class PartCall(nn.Module):
    """A unit call on shards, called where its module would be."""

    def __init__(self, call: CallOnPieces) -> None:
        super().__init__()
        self.call, self.find = call, call.replay.held(call.module)
        self.module = call.module  # whose buffers it uses

    def forward(self, *entering: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = dict(zip(self.call.given, entering, strict=True))
        for unit in self.call.replay.units:
            made = unit.function(*[values[t] for t in unit.entering], *[self.find(t) for t in unit.held])
            values.update(zip(unit.leaves, made, strict=True))
        return tuple(_laid_out(values[tensor], strides) for tensor, strides in self.call.made)

    def held_parameters(self) -> list[torch.Tensor]:
        """The parameters that the call uses."""
        replay = self.call.replay
        return [self.find(t) for unit in replay.units for t in replay.parameters_of(unit)]


def _laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor in the memory order that the module gives it: ops after it may draw random numbers in that order."""
    if tensor.stride() == strides:
        return tensor.view_as(tensor)
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def autocast_of(step: Step) -> torch.autocast:
    """The autocast under which a recorded step ran, on the CPU, where it is traced."""
    return torch.autocast("cpu", dtype=step.autocast or torch.bfloat16, enabled=step.autocast is not None)


def placements(plan: Plan, first_name: Mapping[str, str]) -> dict[str, Placement]:
    """First name → the plan's placement of the parameter on the tensor axis; whole where units want different
    placements."""
    decided = dict(plan.decision.layouts)
    found: dict[str, Placement] = dict.fromkeys(first_name.values(), R)
    seen: set[str] = set()
    for unit, bound in enumerate(plan.binding("torch").units):
        for role, name, dims in bound.parameters:
            place = in_own_dims(layout_of(decided, unit, plan.model.unit_classes[unit], role), dims).on(AXIS)
            first = first_name[name]
            found[first] = place if first not in seen or found[first] == place else R
            seen.add(first)
    return found


def _first_sentence(reason: Exception) -> str:
    return " ".join(str(reason).split())[:300]
