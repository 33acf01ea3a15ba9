"""Replays models on pieces, under layouts that hold as little as possible, more, and with slow links, and compares loss
and every gradient with the unsplit model; counts what went over the wire.

Usage: tensor_parallel.py OUT.json MODEL...; the model `compiled` is GPT-2 with a block compiled by torch.
"""

import sys
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from launched import leave
from torch import nn
from tp_models import batch, build

from shardwright.backends.torch.machine.tensor_axis import Axis
from shardwright.backends.torch.machine.tensor_shards import piece_of, whole_of
from shardwright.backends.torch.tensor_parallel.lowered_model import Replay, lower_all
from shardwright.backends.torch.tensor_parallel.trace import Traced, trace
from shardwright.backends.torch.tensor_parallel.unit_layouts import UnitLayout, of_realised
from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.layout.conversion_bytes import table_bytes
from shardwright.core.layout.placements import Placement, Split
from shardwright.core.model.fold import fold
from shardwright.core.plan.program import UnitProgram
from shardwright.core.solver import AxisCost, Setting, lightest_bytes, solve
from tests.comparison import Comparison

SAMPLES = 2
INSIDE = ("view", "slice", "copy", "attention")
CASES = {"least memory": (1.01, 1e-9), "more memory": (1.3, 1e-9), "slow links": (1.3, 1e-4)}
"""How much of the lightest layouts' memory a rank may hold, and what a message costs."""


@cache
def traced_of(name: str) -> Traced:
    """A model recorded once for all cases."""
    return trace(build(name), sample_of(name))


def sample_of(name: str) -> dict[str, torch.Tensor]:
    return {key: tensor[:SAMPLES] for key, tensor in batch(name, 0).items()}


def layouts_of(traced: Traced, ranks: int, slack: float, latency_s: float) -> tuple[UnitLayout, ...]:
    """Solved on the first rank, for all."""
    realised = [realised_units(traced, ranks, slack, latency_s) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(realised)
    return of_realised(traced.graph, realised[0])


def realised_units(traced: Traced, ranks: int, slack: float, latency_s: float) -> list[Any]:
    folded, counter = fold(traced.graph), WorkCounter(traced.graph)
    axis = AxisCost("tp", ranks, 2e11, latency_s)
    setting = Setting((axis,), flops_per_s=4e10, memory_bytes_per_s=1.5e9, batch=SAMPLES, precision="fp32")
    limit = slack * lightest_bytes(folded, setting, counter)
    found = solve(folded, setting, memory_limit_bytes=limit, counter=counter)
    return [
        UnitProgram.of(folded.graph, folded.units[a.like.unit], a.like, "").on(folded.graph, unit, "tp", ranks)
        for unit, a in zip(folded.units, found.units, strict=True)
    ]


def planned_bytes(layouts: tuple[UnitLayout, ...], traced: Traced, ranks: int) -> dict[str, float]:
    """What the layouts say goes over the wire, forward and backward; parameters' gradients apart."""
    found = {"forward": 0.0, "backward": 0.0}

    def add(kind: str, tensor: int, before: Placement, after: Placement) -> None:
        size = traced.graph.tensors[tensor].size_bytes(SAMPLES)
        found[kind] += table_bytes(before, after, ranks, size)

    for layout in layouts:
        ops = traced.graph.ops[layout.unit.first_op : layout.unit.end_op]
        hops = [(t, h) for op, x in zip(ops, layout.ops, strict=True) for t, h in zip(op.inputs, x.inputs, strict=True)]
        hops += list(layout.shared.items())
        hops += [(t, hop) for t, (_, hop) in layout.leaves.items()]
        for tensor, hop in hops:
            if tensor in layout.parameters:
                continue
            add("forward", tensor, *hop.value)
            if hop.gradient is not None:
                add("backward", tensor, *hop.gradient)
    return found


def put_pieces(model: nn.Module, replay: Replay, axis: Axis) -> None:
    for name, place in replay.parameters.items():
        if isinstance(place, Split):
            parameter = model.get_parameter(name)
            parameter.data = piece_of(parameter.detach(), place, axis.size, axis.coordinate).clone()


def run(name: str, case: str, axis: Axis, *, compiled: bool = False) -> dict[str, Any]:
    model, plain = build(name), build(name)
    sample, traced = sample_of(name), traced_of(name)
    layouts = layouts_of(traced, axis.size, *CASES[case])
    replay = lower_all(traced, layouts, axis, SAMPLES, torch.device("cpu"), lambda context: None)
    put_pieces(model, replay, axis)
    expected = plain(**sample).loss
    expected.backward()
    held = replay.held(model)
    values = dict(zip(traced.graph.inputs, sample.values(), strict=True))
    axis.traffic.clear()
    for unit in replay.units:
        function = unit.function
        if compiled and unit is replay.units[1]:  # a block
            function = torch.compile(function, backend="aot_eager", fullgraph=True)
        made = function(*[values[t] for t in unit.entering], *[held(t) for t in unit.held])
        values.update(zip(unit.leaves, made, strict=True))
    loss = values[traced.graph.outputs[0]]
    loss.backward()
    moved = {kind: sum(b for (_, k), b in axis.traffic.moved_bytes.items() if k == kind) for kind in
             ("forward", "backward", "inner")}  # fmt: skip
    gradients: dict[str, torch.Tensor | None] = {}
    for key, parameter in model.named_parameters():
        found = gradients[key] = parameter.grad
        if found is None:
            continue
        if key in replay.summed:
            found = axis.all_reduce(found.clone(), "sum", ("test", "parameters"))
        place = replay.parameters[key]
        if isinstance(place, Split):
            found = whole_of(axis.all_gather(found), place)
        gradients[key] = found
    same = Comparison(f"{name}, {case}").losses(loss, expected)
    same.gradients(gradients, {key: parameter.grad for key, parameter in plain.named_parameters()})
    reports: list[object] = [None] * axis.size
    dist.all_gather_object(reports, same.report())
    return {
        "same": reports,
        "held": sum(p.numel() for p in model.parameters()),
        "whole": sum(p.numel() for p in plain.parameters()),
        "split": {key: str(place) for key, place in replay.parameters.items() if isinstance(place, Split)},
        "moved": moved,
        "planned": planned_bytes(layouts, traced, axis.size),
        "in_attention": _conversions_in_attention(layouts, traced),
        "whole_ops": [op for unit in replay.units for op in unit.whole_ops],
        "calls": {f"{unit} {kind}": n for (unit, kind), n in axis.traffic.calls.items()},
    }


def _conversions_in_attention(layouts: tuple[UnitLayout, ...], traced: Traced) -> int:
    """Of values that only views, slices and the attention itself read."""
    found = 0
    for layout in layouts:
        ops = traced.graph.ops[layout.unit.first_op : layout.unit.end_op]
        has_attention = any(op.kind == "attention" for op in ops)
        for op, chosen in zip(ops, layout.ops, strict=True):
            if has_attention and op.kind in INSIDE and traced.graph.tensors[op.inputs[0]].is_floating:
                found += sum(not hop.is_idle for hop in chosen.inputs)
    return found


def main() -> None:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    axis = Axis(group, range(dist.get_world_size()), dist.get_rank())
    names = [name for name in sys.argv[2:] if name != "compiled"]
    results = {f"{name}, {case}": run(name, case, axis) for name in names for case in CASES}
    if "compiled" in sys.argv[2:]:
        for case in ("least memory", "slow links"):
            results[f"compiled, {case}"] = run("gpt2", case, axis, compiled=True)
    leave(results, sys.argv[1])


if __name__ == "__main__":
    main()
