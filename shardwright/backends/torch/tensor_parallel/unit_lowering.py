"""One unit's ops as a function of local tensors, with the collectives that the solver chose between them."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.backends.torch.program.program import Context
from shardwright.backends.torch.tensor_parallel import (
    local_ops,
    local_views,  # noqa: F401  # they add their rules to those of `local_ops`
    split_compute,  # noqa: F401
)
from shardwright.backends.torch.tensor_parallel.generated_source import Var
from shardwright.backends.torch.tensor_parallel.trace import NotReplayableError, Traced
from shardwright.backends.torch.tensor_parallel.unit_call import Call, Lowering
from shardwright.backends.torch.tensor_parallel.unit_layouts import Hop, UnitLayout
from shardwright.core.layout.placements import Replicate

R = Replicate()


@dataclass(frozen=True, slots=True)
class Lowered:
    """A unit ready to run: ``function(*entering, *held)`` gives the tensors in ``leaves``."""

    name: str
    function: Callable[..., tuple[Any, ...]]
    text: str
    entering: tuple[int, ...]
    """Graph tensors that earlier units made, or inputs of the model, in order."""
    held: tuple[int, ...]
    """Graph tensors that the model holds: parameters, buffers, constants."""
    leaves: tuple[int, ...]
    draws: tuple[Context, ...]
    whole_ops: tuple[str, ...]
    """Names of ops that run whole although the layouts split them: no sharded form is known here."""


def lower_unit(lowering: Lowering) -> Lowered:
    """The unit as one function. Raises NotReplayableError for ops that cannot run call by call."""
    unit, graph, source, layout = lowering.layout.unit, lowering.traced.graph, lowering.source, lowering.layout
    traced = lowering.traced
    inside = range(unit.first_op, unit.end_op)
    made = {t for i in inside for t in graph.ops[i].outputs}
    read: dict[int, None] = {}
    for i in inside:
        read.update((t, None) for t in graph.ops[i].inputs if t not in made)
    for i in sorted({traced.site_of_op[i][0] for i in inside}):
        named = [t for t in traced.sites[i].inputs if t is not None and t not in made]
        read.update((t, None) for t in named if graph.tensors[t].role not in ("activation", "input"))
    written = {now: buffer for buffer, now in traced.written.items() if now in made}
    read.update((buffer, None) for buffer in written.values())
    roles = {t: graph.tensors[t].role for t in read}
    entering = tuple(t for t in read if roles[t] in ("activation", "input"))
    held = tuple(t for t in read if t not in entering)
    arguments = {tensor: source.input() for tensor in (*entering, *held)}
    for tensor, argument in arguments.items():
        lowering.made(tensor, argument, layout.parameters.get(tensor, layout.enters.get(tensor, R)))
    done = unit.first_op
    for i in inside:
        if i >= done:
            done = lower_site(lowering, i, inside)
    for now, buffer in written.items():
        value = lowering.hop(lowering.at[now], Hop((lowering.place[now], R), None))
        source.call(write, arguments[buffer], value, is_kept=True)
    leaves = tuple(layout.leaves)
    outputs = [leave(lowering, t, layout.leaves[t][1]) for t in leaves]
    return Lowered(
        lowering.name, source.build(lowering.name, outputs), source.text(lowering.name, outputs), entering, held,
        leaves, tuple(lowering.draws), tuple(lowering.whole_ops),
    )  # fmt: skip


def leave(lowering: Lowering, tensor: int, hop: Hop) -> Var:
    """A value as later units find it, a tensor of its own."""
    return lowering.source.call(_own, lowering.hop(lowering.at[tensor], hop))


def lower_site(
    lowering: Lowering, first: int, inside: Container[int], own: Callable[[Call], bool] | None = None
) -> int:
    """Lower the call behind an op, and with it as many ops as it became, all of which lie ``inside``. Returns the
    number of the op that comes next.

    Args:
        own: a rule that is asked before those of `local_ops`; False where it has no form.
    """
    graph, unit = lowering.traced.graph, lowering.layout.unit
    index, piece = lowering.traced.site_of_op[first]
    site = lowering.traced.sites[index]
    present = [op for op in site.ops if op is not None]
    is_whole = piece == min(p for p, op in enumerate(site.ops) if op is not None) and all(
        op in inside for op in present
    )
    if not is_whole:
        raise NotReplayableError(f"the ops of {site.name} lie in two units")
    call = Call(lowering, site, [(graph.ops[op], lowering.layout.ops[op - unit.first_op]) for op in present])
    if not (own is not None and own(call)) and not local_ops.lower(call):
        lowering.whole_ops.append(site.name)
        local_ops.run_whole(call)
    return max(present) + 1


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a tensor object of its own."""
    return tensor.view_as(tensor)


def write(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Leave a value in a buffer of the model."""
    with torch.no_grad():
        buffer.copy_(value)


def summed_parameters(layouts: Sequence[UnitLayout], traced: Traced) -> frozenset[int]:
    """The parameters held whole whose gradient, on some reader, is a term of a sum."""
    found = set()
    for layout in layouts:
        ops = traced.graph.ops[layout.unit.first_op : layout.unit.end_op]
        for op, chosen in zip(ops, layout.ops, strict=True):
            for tensor, hop in zip(op.inputs, chosen.inputs, strict=True):
                if tensor in layout.parameters and hop.gradient is not None and hop.gradient[0] != hop.gradient[1]:
                    found.add(tensor)
    return frozenset(found)
