"""Look-ups in tables whose rows are split: a term for each rank, where the plan adds terms before it sums them.

A compiler sums what every look-up gives at once. The plan sums the embeddings of words and positions together, in
one reduction: their look-ups are written as one for each rank, with a first dim of ranks, and summed over it when
something else reads the sum.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from shardwright.backends.jax.capture.inner_programs import equations_in
from shardwright.backends.jax.capture.steps import Path, Step
from shardwright.core.layout.placements import Partial, Split
from shardwright.core.layout.unit_layouts import RealisedUnit
from shardwright.core.model.graph import Graph

LOOK_UP = "_take"
"""The jitted body of `jnp.take`."""
LINEAR = frozenset({"add", "add_any", "sub", "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose"})
"""The primitives that may stand between look-ups and their sum."""
FILLS = jax.lax.GatherScatterMode.FILL_OR_DROP


def terms_of(graph: Graph, units: Sequence[RealisedUnit], steps: Mapping[int, Step]) -> frozenset[Path]:
    """The equations that make terms: look-ups whose results the plan adds up, and the equations between."""
    made: dict[int, frozenset[int]] = {}
    wanted: set[int] = set()
    for unit in units:
        for op in range(unit.first_op, unit.first_op + len(unit.signatures)):
            node, step = graph.ops[op], steps.get(op)
            if step is None or step.path is None or len(node.outputs) != 1:
                continue
            (signature,) = unit.signatures[op - unit.first_op]
            if not isinstance(signature.outputs[0], Partial):
                continue
            if step.name == LOOK_UP and signature.inputs[0] == Split(0) and _by_rows(graph, op):
                made[node.outputs[0]] = frozenset({op})
                continue
            given = [i for i, place in enumerate(signature.inputs) if isinstance(place, Partial)]
            if step.name not in LINEAR or any(node.inputs[i] not in made for i in given):
                continue
            chain = frozenset({op}).union(*(made[node.inputs[i]] for i in given))
            made[node.outputs[0]] = chain
            if len(given) > 1:
                wanted |= chain
    return frozenset(path for op in wanted if (path := steps[op].path) is not None)


def _by_rows(graph: Graph, op: int) -> bool:
    table, index = (graph.tensors[t].fixed for t in graph.ops[op].inputs)
    return len(table) == 2 and len(graph.tensors[graph.ops[op].outputs[0]].fixed) == len(index) + 1


def can_look_up(equation: JaxprEqn) -> bool:
    """Whether an equation takes whole rows of a table, by numbers whose errors show in the result as NaN."""
    if equation.primitive.name not in ("jit", "pjit") or equation.params["name"] != LOOK_UP:
        return False
    gathers = [e for e in equations_in(equation.params["jaxpr"].jaxpr) if e.primitive.name == "gather"]
    if len(gathers) != 1 or gathers[0].params["mode"] != FILLS:
        return False
    numbers = gathers[0].params["dimension_numbers"]
    return tuple(numbers.start_index_map) == (0,) == tuple(numbers.collapsed_slice_dims)


def look_up(table: Any, ids: Any, ways: int) -> Any:
    """A look-up of ids [any] in a table [rows, width] → [ways, any, width]: for every rank the rows that are its own,
    and zeros elsewhere."""
    rows = table.shape[0]
    own = rows // ways
    known = jnp.where(ids < 0, ids + rows, ids)
    bad = (known < 0) | (known >= rows)

    def of_rank(piece: Any, first: Any) -> Any:
        local = known - first
        inside = (local >= 0) & (local < own)
        found = jnp.take(piece, jnp.clip(local, 0, own - 1), axis=0, mode="clip")
        return jnp.where(inside[..., None], found, jnp.where(bad & (first == 0), jnp.nan, 0)[..., None])

    firsts = jnp.arange(ways, dtype=ids.dtype) * own
    return jax.vmap(of_rank)(table.reshape(ways, own, *table.shape[1:]), firsts).astype(table.dtype)
