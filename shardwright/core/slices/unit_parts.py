"""The ops of a unit in the parts in which a runtime of slices runs them: before the first slice, slice by slice, behind
the last."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shardwright.core.errors import CaptureError
from shardwright.core.model.fold import fold
from shardwright.core.model.graph import Graph
from shardwright.core.slices.sequence_ops import Obstacle, SequenceOps
from shardwright.core.values.disjoint_sets import DisjointSets


@dataclass(frozen=True, slots=True)
class UnitParts:
    """The ops of one unit, in their order.

    Attributes:
        before: those that need nothing that slices make: they run once, and slices take their part of what they make.
        sliced: those that run slice by slice.
        behind: those that need all tokens: they run once, behind the last slice; in the last unit alone.
    """

    unit: int
    before: tuple[int, ...]
    sliced: tuple[int, ...]
    behind: tuple[int, ...]


def unit_parts(graph: Graph, ops: SequenceOps) -> tuple[UnitParts, ...]:
    """The parts of every unit.

    Raises CaptureError for a model that cannot run in slices: it names the ops that forbid it.
    """
    require_sliceable(graph, ops)
    found = []
    for unit in fold(graph).units:
        by_need: dict[str, list[int]] = {}
        for op in range(unit.first_op, unit.end_op):
            by_need.setdefault(ops.needs[op], []).append(op)
        sliced = sorted((*by_need.get("local", ()), *by_need.get("causal", ())))
        found.append(
            UnitParts(unit.index, tuple(by_need.get("constant", ())), tuple(sliced), tuple(by_need.get("all", ())))
        )
    return tuple(found)


def whole_calls(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """The ops that stand for one call each, as far as a graph says so: what lies between them has no memory."""
    groups: DisjointSets[int] = DisjointSets()
    for number, op in enumerate(graph.ops):
        for place in op.memory.unmade if op.memory is not None else ():
            maker = graph.producer.get((*op.inputs, *op.outputs)[place])
            if maker is not None:
                groups.add(number)
                groups.add(maker)
                groups.merge(maker, number)
    found: dict[int, list[int]] = {}
    for number in sorted(groups):
        found.setdefault(groups[number], []).append(number)
    return tuple(map(tuple, found.values()))


def keep_together(graph: Graph, ops: SequenceOps, groups: Iterable[Sequence[int]]) -> SequenceOps:
    """The same with ops that run as one, such as a loss and its mean, in one part: a group of which one op needs all
    tokens, or of which some need what slices make and others do not, runs behind the last slice, and so does what
    follows from it."""
    needs = list(ops.needs)
    when = {need: "sliced" if need in ("local", "causal") else need for need in needs}
    group_of = {op: group for group in groups if len({when[needs[op]] for op in group}) > 1 for op in group}
    behind: set[int] = set()
    early: list[int] = []
    for number, op in enumerate(graph.ops):
        if needs[number] == "unused":
            continue
        if number in group_of or (needs[number] != "constant" and behind.intersection(op.inputs)):
            needs[number] = "all"
        if needs[number] == "all":
            behind.update(op.outputs)
            if ops.needs[number] != "all" and ops.apart.intersection(op.inputs):
                early.append(number)
    last = fold(graph).units[-1].first_op
    early += [number for number, need in enumerate(needs) if need == "all" != ops.needs[number] and number < last]
    obstacles = ops.obstacles
    if early:
        op = graph.ops[early[0]]
        where = graph.calls[op.call].path or graph.model_name
        obstacles = (*obstacles, Obstacle(early[0], f"{op.name} in {where} runs as one with what needs all tokens"))
    return replace(ops, needs=tuple(needs), obstacles=obstacles)


def require_sliceable(graph: Graph, ops: SequenceOps) -> None:
    """Raise CaptureError for a model that cannot run slice by slice, with the ops that forbid it."""
    if not any(need in ("local", "causal") for need in ops.needs):
        raise CaptureError(f"{graph.model_name} has no op along its sequence: leave out slices")
    reasons = [obstacle.reason for obstacle in ops.obstacles]
    reasons += [
        f"{op.name} in {graph.calls[op.call].path or 'the model'} carries more from slice to slice than keys and values"
        for number, (op, need) in enumerate(zip(graph.ops, ops.needs, strict=True))
        if need == "causal" and number not in ops.tails and op.kind not in ("attention", "contraction")
    ]
    reasons += _not_carried_out(graph, ops)
    if reasons:
        more = f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""
        raise CaptureError(
            f"{graph.model_name} cannot run in slices of its sequence: {'; '.join(reasons[:3])}{more}. Slices follow "
            f"each other where a token needs only what came before it: leave out slices, or pin slices=1"
        )


LACKS = {
    "windows": "reads the last tokens before a slice",
    "experts": "puts tokens in the order of their experts",
    "sinks": "puts scores beside those of the keys",
}
"""What an op does that a runtime may not do slice by slice, by the names of `Capabilities.not_in_slices`."""


def _not_carried_out(graph: Graph, ops: SequenceOps) -> list[str]:
    """Why the runtime of the model's framework does not run it in slices, for each op. The last unit can still run such
    an op once, behind the last slice."""
    last, runtime = fold(graph).units[-1].first_op, graph.capabilities
    doing: dict[str, set[int]] = {
        "windows": {op for op in ops.tails if ops.needs[op] == "causal"},
        "experts": {op for op in ops.routed.sorts if ops.needs[op] == "local"},
        "sinks": {
            op for op, each in enumerate(graph.ops) if each.kind == "concat" and ops.more_keys.keys() & {*each.outputs}
        },
    }
    return [
        f"{graph.ops[op].name} in {graph.calls[graph.ops[op].call].path or 'the model'} {LACKS[name]}, which the "
        f"{runtime.framework} runtime of this version does not do slice by slice"
        for op, name in sorted((op, name) for name in runtime.not_in_slices for op in doing[name])
        if op < last
    ]
