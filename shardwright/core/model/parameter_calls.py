"""The module calls of a unit that use parameters: a runtime that shards parameters gathers those of one call together,
and sums their gradients together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.core.model.fold import CallRef, Unit
from shardwright.core.model.graph import Graph


@dataclass(frozen=True, slots=True)
class ParameterCall:
    """One call that uses parameters, or one op outside all calls that does."""

    first_use: int
    """The first op that reads a parameter: the backward pass has made all gradients of the call's when it is over."""
    end_op: int
    """The op behind the last one of the call."""
    parameters: tuple[int, ...]
    """Indices into the graph's parameters, in order of first use."""
    looked_up: frozenset[int]
    """Those of which the call reads rows alone, so that its backward pass reads none of them, where the call is theirs
    alone or others use them too."""
    tied: frozenset[int]
    """Those that other calls use too."""
    waiting: frozenset[int]
    """Those that calls of earlier units use too: their gradients wait for these calls'."""


def parameter_calls(graph: Graph, unit: Unit, users: Mapping[int, Sequence[int]]) -> tuple[ParameterCall, ...]:
    """The calls of a unit that use parameters, in the order in which they first do. ``users``: tensor → the ops that
    read it."""
    number_of = {parameter.tensor: number for number, parameter in enumerate(graph.parameters)}
    own = set(unit.calls)
    outermost: dict[int, int] = {0: 0 if len(graph.calls) == 1 else -1}

    def call_of(call: int) -> int:
        """The outermost call of the unit around a call; -1 for none."""
        if call not in outermost:
            here = graph.calls[call]
            is_one = CallRef(here.path, here.occurrence) in own
            outermost[call] = call if is_one else call_of(here.parent)
        return outermost[call]

    ops: dict[tuple[int, int], list[int]] = {}
    for index in range(unit.first_op, unit.end_op):
        if (call := call_of(graph.ops[index].call)) >= 0:
            ops.setdefault((call, -1), []).append(index)
        elif any(tensor in number_of for tensor in graph.ops[index].inputs):
            ops.setdefault((-1, index), []).append(index)
    found = []
    for members in ops.values():
        uses: dict[int, list[int]] = {}
        for index in members:
            for tensor in graph.ops[index].inputs:
                if tensor in number_of:
                    uses.setdefault(tensor, []).append(index)
        if not uses:
            continue
        inside = set(members)
        rows = {t for t, at in uses.items() if all(_reads_rows(graph, index, t) for index in at)}
        tied = {t for t in uses if not inside.issuperset(users[t])}
        found.append(
            ParameterCall(
                first_use=min(at[0] for at in uses.values()),
                end_op=members[-1] + 1,
                parameters=tuple(number_of[t] for t in uses),
                looked_up=frozenset(number_of[t] for t in (rows if rows == set(uses) else rows & tied)),
                tied=frozenset(number_of[t] for t in tied),
                waiting=frozenset(number_of[t] for t in tied if min(users[t]) < unit.first_op),
            )
        )
    return tuple(sorted(found, key=lambda call: call.first_use))


def _reads_rows(graph: Graph, index: int, table: int) -> bool:
    op = graph.ops[index]
    return op.kind == "gather" and op.inputs[0] == table and table not in op.inputs[1:]
