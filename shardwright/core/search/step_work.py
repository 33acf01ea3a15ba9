"""The work in one step of a plan: its tokens, and its FLOPs with and without what recompute repeats."""

from collections.abc import Collection, Iterator

from shardwright.core.cost.training_flops import forward_flops, training_flops
from shardwright.core.model.fold import Unit, module_inside
from shardwright.core.model.graph import Graph
from shardwright.core.plan.decision import Decision
from shardwright.core.plan.throughput import StepWork
from shardwright.core.tables.cost_tables import CostTables
from shardwright.core.values.recompute_modes import kept_modules, kind_of
from shardwright.core.values.step_line import Argument, tokens_in


def step_work(tables: CostTables, decision: Decision) -> StepWork:
    """What a step of the decision does, on all devices together."""
    graph, batch = tables.graph, decision.batch
    units = zip(tables.binding.units, tables.structure.unit_classes, strict=True)
    in_fp8 = {name for unit, c in units for role, name, _ in unit.parameters if f"{c}/{role}" in decision.fp8_weights}
    counted = training_flops(graph, batch, decision.precision, in_fp8)
    tokens_of, tokens = step_tokens(graph, batch)
    return StepWork(
        tokens_of=tokens_of,
        tokens=tokens,
        flops=tuple(sorted(counted.by_precision.items())),
        recomputed_flops=forward_flops(graph, _recomputed(tables, decision), batch),
        unknown=counted.unknown,
    )


def step_tokens(graph: Graph, batch: int) -> tuple[str, int]:
    """The tokens of a batch, and the input whose entries they are; ("", 0) where it has samples only."""
    tokens = tokens_in(_argument(graph, tensor) for tensor in graph.inputs)
    return (tokens.name, tokens.shape[0] * tokens.shape[1] * batch // graph.sample_batch) if tokens else ("", 0)


def _argument(graph: Graph, tensor: int) -> Argument:
    held = graph.tensors[tensor]
    dims = [dim for dim, slope in enumerate(held.per_sample) if slope]
    is_integer = not (held.carries_gradients or held.dtype == "bool")
    return Argument(held.name, held.shape(graph.sample_batch), is_integer, dims[0] if dims else None)


def _recomputed(tables: CostTables, decision: Decision) -> Collection[int]:
    """The ops that run forward once more, by the plan or by checkpoints of the model's own."""
    own = {number for number, op in enumerate(tables.graph.ops) if op.is_run_again}
    if decision.recompute == "selective":
        return own | tables.counter.kept.computed_again
    left = {*decision.kept_units, *decision.offloaded_units}
    found = list[int]()
    for unit, may in zip(tables.folded.units, tables.recomputable, strict=True):
        if may and unit.index not in left and decision.recompute != "none":
            other = decision.other_recompute if unit.index in decision.other_units else None
            found += _recomputed_in(tables, unit, other or decision.recompute)
        else:
            found += own.intersection(range(unit.first_op, unit.end_op))
    return found


def _recomputed_in(tables: CostTables, unit: Unit, mode: str) -> Iterator[int]:
    """The ops of a unit that run forward once more under a mode."""
    graph, execution = tables.graph, tables.execution
    ops: Collection[int] = range(unit.first_op, unit.end_op)
    if execution.stops_early:
        ops = tables.counter.run_again(unit, compiled=execution.kernels == "compiled")
    plain = [op for op in range(unit.first_op, unit.end_op) if graph.ops[op].kind == "contraction"]
    kept: Collection[int] = ()
    match kind_of(mode):
        case "none":
            return
        case "elementwise":
            kept = range(unit.first_op, unit.end_op)
        case "alternate":
            kept = set(range(unit.first_op, unit.end_op)) - set(plain[1::2])
        case "products":
            modules = kept_modules(mode)
            kept = {op for op in ops if module_inside(graph, unit, graph.ops[op]) in modules}
    yield from (op for op in ops if op not in kept)
