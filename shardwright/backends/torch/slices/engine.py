"""Token slices inside the runtime: a step's call of the model becomes its units, slice by slice."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwright.backends.torch.capture.batch_dims import Growth, Sample
from shardwright.backends.torch.capture.model_call import arguments_of
from shardwright.backends.torch.machine.tensor_axis import Axis
from shardwright.backends.torch.program.program import Leaf, Program
from shardwright.backends.torch.program.randomness import Streams
from shardwright.backends.torch.slices.expanded_step import SlicedCall, expand
from shardwright.backends.torch.slices.lowering import Builder
from shardwright.backends.torch.slices.routing_checks import require_routing
from shardwright.backends.torch.slices.traces import Part, Traces, alike, require_same_numbers
from shardwright.backends.torch.tensor_parallel.by_module_calls import autocast_of
from shardwright.backends.torch.tensor_parallel.engine import Draws, TensorParallel, UnitCall
from shardwright.backends.torch.tensor_parallel.expanded_step import find_call
from shardwright.backends.torch.tensor_parallel.hooks import refuse_hooks
from shardwright.backends.torch.tensor_parallel.lowered_model import Replay, places_of
from shardwright.backends.torch.tensor_parallel.trace import NotReplayableError, Traced, trace
from shardwright.backends.torch.tensor_parallel.unit_layouts import Hop, OpLayout, UnitLayout
from shardwright.backends.torch.tensor_parallel.unit_lowering import summed_parameters
from shardwright.core.errors import CaptureError
from shardwright.core.layout.placements import Placement, Replicate
from shardwright.core.layout.signature import Signature
from shardwright.core.model.fold import fold
from shardwright.core.model.graph import Graph
from shardwright.core.plan.plan import Plan
from shardwright.core.schedule.passes.slices_as_stages import stage_of_slice
from shardwright.core.slices.sequence_ops import sequence_inputs, sequence_ops
from shardwright.core.slices.unit_parts import keep_together, unit_parts
from shardwright.core.values.recompute_modes import Mode

R = Replicate()


class TokenSlices:
    """The slices of one rank's model.

    Args:
        axis: the tensor axis, of this rank alone where there is none.
        tensor: the model's layouts on it, where there is one.

    Attributes:
        stage_of_call: the stage, of the schedule of slices as stages, of every part, by (name, 0).
        policies: the parts that do not keep what their backward reads, and what becomes of it.
    """

    def __init__(self, model: nn.Module, plan: Plan, axis: Axis, tensor: TensorParallel | None = None) -> None:
        self.model, self.plan, self.axis, self.tensor = model, plan, axis, tensor
        self.stage_of_call: dict[tuple[str, int], int] = {}
        self.policies: dict[tuple[str, int], Mode] = {}
        self._calls: dict[str, nn.Module] = {}
        self._draws = Draws()
        self._recorded = 0

    def expand(
        self, program: Program, inputs: Sequence[torch.Tensor], device: torch.device, growth: Growth | None = None
    ) -> Program:
        """The recorded step with the parts of the model's units in place of its call; ``growth`` is that of the call's
        arguments, where it is known.

        Raises:
            CaptureError: the model cannot run in these slices; the message says what forbids it.
            ShardwrightError: a hook would be lost.
        """
        refuse_hooks(self.model)
        lengths, name = self.plan.decision.slice_lengths, type(self.model).__name__
        try:
            call = find_call(program, inputs)
            given = arguments_of(self.model, call.args, call.kwargs)
            sample = Sample(given, growth=growth)
            with autocast_of(call.step):
                traces = self._traces(sample, growth, call.asked)
            graph = traces.whole.graph
            layouts: Sequence[UnitLayout] = [_whole_layout(graph, unit) for unit in fold(graph).units]
            if self.tensor is not None:
                layouts = self.tensor.lay_out(graph)
            wanted = frozenset(t for t in traces.whole.outputs if t is not None)
            if any(wanted.intersection(held) for held in traces.ops.carried.values()):
                raise NotReplayableError(
                    "the step uses a cache of keys and values that the model returns, which slices hand on to each "
                    "other (use_cache=False leaves it out)"
                )
            summed = summed_parameters(layouts, traces.whole)
            builder = Builder(
                traces, layouts, unit_parts(graph, traces.ops), wanted, self.axis, device, self._draws, summed,
                f"step {self._recorded} ",
            )  # fmt: skip
            builder.require_whole_sequences()
            by_unit = [builder.unit(unit) for unit in range(len(layouts))]
            parts = _in_order(by_unit, len(lengths))
            stages = self.plan.decision.stages
            last = stage_of_slice(stages - 1, len(lengths) - 1, stages)
            sliced = SlicedCall(traces, parts, self.axis.size, last)
            leaves = [call.leaf_of(leaf.tensor) for leaf in sample.leaves]
            inputs_of: dict[int, Leaf] = dict(zip(graph.inputs, leaves, strict=True))
            expanded = expand(program, call, sliced, inputs_of)
            if self.tensor is not None:
                self.tensor.want(places_of(traces.whole, layouts))
        except NotReplayableError as reason:
            raise CaptureError(f"{name} cannot run in slices of its sequence: {reason}; leave out slices") from reason
        self._take(traces.whole, parts)
        self._recorded += 1
        return replace(expanded, summed=frozenset(p.name for p in graph.parameters if p.tensor in summed))

    def take(self, streams: Streams) -> dict[str, nn.Module]:
        """The modules that run at the paths of parts, which draw their random numbers from ``streams`` while these are
        enabled."""
        self._draws.streams.add(streams)
        return dict(self._calls)

    def _traces(self, sample: Sample, growth: Growth | None, asked: tuple[int, ...]) -> Traces:
        lengths = self.plan.decision.slice_lengths
        whole = trace(self.model, sample, asked=asked)
        dims = sequence_inputs(whole.graph)
        leaf_of = dict(zip(whole.graph.inputs, sample.leaves, strict=True))
        tokens = {leaf_of[number].tensor.shape[dim] for number, dim in dims.items()}
        if tokens != {sum(lengths)}:
            raise CaptureError(
                f"the plan's slices {_shown(lengths)} have {sum(lengths)} tokens in all, and the model is given "
                f"{_shown(sorted(tokens))}: give it {sum(lengths)}, padded or packed, or plan with slices that add up"
            )
        places = {id(leaf_of[number]): dim for number, dim in dims.items()}
        sliced: dict[int, Traced] = {}
        for length in sorted(set(lengths)):

            def shorter(leaf: Any, length: int = length) -> torch.Tensor:
                dim = places.get(id(leaf))
                tensor: torch.Tensor = leaf.tensor
                return tensor if dim is None else tensor.narrow(dim, 0, length)

            if length == sum(lengths):
                sliced[length] = whole
                continue
            args, kwargs, _ = sample.arguments(shorter, sample.batch)
            part = Sample(kwargs or args, growth=growth)
            try:
                sliced[length] = alike(whole, trace(self.model, part, asked=asked), length)
            except NotReplayableError as reason:
                raise NotReplayableError(f"at {length} tokens, {reason}") from reason
        sites = [[op for op in site.ops if op is not None] for site in whole.sites]
        ops = keep_together(whole.graph, sequence_ops(whole.graph, dims), sites)
        require_routing(whole, ops)
        unused = {
            t for op, need in zip(whole.graph.ops, ops.needs, strict=True) if need == "unused" for t in op.outputs
        }
        for buffer, now in whole.written.items():
            if now in unused:
                raise NotReplayableError(f"{whole.graph.tensors[buffer].name} is written to by what needs all tokens")
        for length, traced in sliced.items():
            require_same_numbers(whole, traced, ops, length)
        return Traces(lengths, whole, sliced, ops, sample.batch)

    def _take(self, traced: Traced, parts: Sequence[Part]) -> None:
        held = Replay(traced, 0, (), {}, {}, frozenset())
        find, tensors = held.held(self.model), traced.graph.tensors
        decision, modes = self.plan.decision, self.plan.unit_modes
        for part in parts:
            stage = sum(start <= part.unit for start in decision.stage_starts) - 1
            self.stage_of_call[part.name, 0] = stage_of_slice(stage, part.slice, decision.stages)
            own = tuple(t for t in part.held if tensors[t].role == "parameter")
            self._calls[part.name] = UnitCall(
                part.function, part.held, find, held.holders_of(self.model, part.held), own
            )
            if part.kind != "before" and modes[part.unit] != "none":
                self.policies[part.name, 0] = modes[part.unit]


def _in_order(by_unit: Sequence[Sequence[Part]], slices: int) -> list[Part]:
    """The parts of all units: slice after slice, and in each from unit to unit."""
    return [
        part
        for number in range(slices)
        for parts in by_unit
        for part in parts
        if part.slice == number and part.kind != "behind"
    ] + [part for parts in by_unit for part in parts if part.kind == "behind"]


def _whole_layout(graph: Graph, unit: Any) -> UnitLayout:
    """The layout of a unit that one rank runs whole."""
    idle = Hop((R, R), None)
    ops = []
    for op in graph.ops[unit.first_op : unit.end_op]:
        inputs, outputs = (R,) * len(op.inputs), (R,) * len(op.outputs)
        ops.append(OpLayout(Signature(inputs, outputs), (idle,) * len(inputs)))
    parameters: dict[int, Placement] = {p.tensor: R for p in graph.parameters}
    return UnitLayout(unit, tuple(ops), parameters, {}, {}, {})


def _shown(numbers: Any) -> str:
    return " + ".join(map(str, numbers)) if len(numbers) < 9 else f"of {len(numbers)} lengths"
