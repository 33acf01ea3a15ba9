"""What shards read and hand on, against a walk over the ops of graphs with branches."""

import numpy as np
import pytest

import shardwright as sw
from shardwright.core.jobs.crossing import crossing_of, sums_of_rectangles
from shardwright.core.model.graph import Graph
from shardwright.core.tables.cost_tables import CostTables
from tests.core.toy import Builder, decoder

MICROBATCH = 3


def branching(seed: int, layers: int = 6, width: int = 8) -> Graph:
    """Layers of which each adds some earlier values to its own, as skip connections and encoder outputs do."""
    draw = np.random.default_rng(seed)
    b = Builder()
    made = [b.input("x", -1, 4, width, dtype="float32")]
    for layer in range(layers):
        back = b.enter(f"layers.{layer}")
        x = made[-1]
        for other in draw.choice(len(made), size=int(draw.integers(0, min(3, len(made)) + 1)), replace=False):
            x = b.elementwise("add", x, made[int(other)])
        made.append(b.linear(x, b.parameter(f"layers.{layer}.w", width, width), None, width))
        b.leave(back)
    from shardwright.core.rules import op_rules as L

    loss = b.op("reduction", "mean", [made[-1]], (), L.reduction(b.shape(made[-1]), [0, 1, 2]))
    return b.build(loss, name="Branching")


@pytest.mark.parametrize("graph", [branching(1), branching(2), branching(3), decoder(layers=3)])
def test_values_are_those_of_a_walk(graph: Graph) -> None:
    tables = CostTables(graph, sw.Cluster("v100"), "fp32", "adamw")
    found, units = crossing_of(tables, MICROBATCH), tables.folded.units
    assert len(units) >= 4
    unit_of = {op: unit.index for unit in units for op in range(unit.first_op, unit.end_op)}
    readers: dict[int, set[int]] = {}
    for index, op in enumerate(graph.ops):
        for tensor in op.inputs:
            if tensor in graph.producer:
                readers.setdefault(tensor, set()).add(unit_of[index])

    def size(tensors: list[int]) -> int:
        return sum(tables.counter.size_bytes(t, MICROBATCH, "fp32") for t in tensors)

    for a in range(len(units)):
        for b in range(a + 1, len(units) + 1):
            held = range(a, b)
            entering = [
                t for t, by in readers.items() if unit_of[graph.producer[t]] < a and any(unit in held for unit in by)
            ]
            leaving = [t for t, by in readers.items() if unit_of[graph.producer[t]] in held and max(by) >= b]
            again = [t for t in entering if max(readers[t]) >= b and tables.counter.needs_gradient(t)]
            assert found.entering[a, b] == size(entering)
            assert found.leaving[a, b] == size(leaving)
            assert found.partial_sums[a, b] == size(again)
            assert found.entering_flowing[a, b] == size([t for t in entering if tables.counter.needs_gradient(t)])
            assert found.leaving_flowing[a, b] == size([t for t in leaving if tables.counter.needs_gradient(t)])


def test_the_host_has_each_crossing_value_once() -> None:
    graph = branching(2)
    tables = CostTables(graph, sw.Cluster("v100"), "fp32", "adamw")
    found, one = crossing_of(tables, 1), 4 * 8 * 4
    middle = len(tables.folded.units) // 2
    values = {t for t in graph.producer for op in graph.ops if t in op.inputs}
    unit_of = {op: unit.index for unit in tables.folded.units for op in range(unit.first_op, unit.end_op)}
    last = {t: max(unit_of[i] for i, op in enumerate(graph.ops) if t in op.inputs) for t in values}
    crossing = [t for t in values if unit_of[graph.producer[t]] < middle <= last[t]]
    assert found.host_bytes([middle]) == 2 * one * len(crossing)
    assert found.host_bytes([]) == 0


def test_rectangles() -> None:
    found = sums_of_rectangles([(range(0, 2), range(1, 4), 5), (range(1, 3), range(2, 4), 7)], 3)
    expected = np.zeros((4, 4))
    expected[0:2, 1:4] += 5
    expected[1:3, 2:4] += 7
    assert np.array_equal(found, expected)
