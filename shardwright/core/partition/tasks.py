"""A captured model as tasks with costs, for the partitioners that look inside units.

Tasks are ops. A unit's seconds and bytes, as in the plan's cost model, are distributed over its ops in proportion to
what each would take by itself, so that every partitioner is measured by the same clock.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwright.core.cluster.hardware import Device
from shardwright.core.cost.unit_seconds import unit_cost
from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.model.fold import Folded, Unit


@dataclass(frozen=True, slots=True)
class Tasks:
    """A graph of tasks, in an order in which they can run."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    state_bytes: tuple[float, ...]
    """The bytes of parameters, gradients and optimizer states; a unit's first task with a parameter counts it."""
    kept_bytes: tuple[float, ...]
    """The bytes of activations that are kept for the backward pass of one microbatch."""
    edges: tuple[tuple[int, int, int], ...]
    """The edges (task that makes a tensor, task that uses it, bytes); a tensor with several users has one for each."""
    constant: tuple[bool, ...]
    """Whether a task depends on no input of the model."""

    def __len__(self) -> int:
        return len(self.forward_s)


def op_tasks(
    folded: Folded,
    counter: WorkCounter,
    units: Sequence[tuple[float, float, float, float]],
    device: Device,
    precision: str,
    microbatch: int,
) -> Tasks:
    """The ops of a graph as tasks; ``units`` holds (forward seconds, backward seconds, kept bytes, bytes of parameters
    with their states) of each unit."""
    graph = folded.graph
    count = len(graph.ops)
    forward, backward, state, kept = ([0.0] * count for _ in range(4))
    classes = folded.classes
    shares = [_shares(folded.units[members[0]], counter, device, precision, microbatch) for members in classes]
    parameters = {p.tensor: graph.tensors[p.tensor].elements(1) for p in graph.parameters}
    for unit, (forward_s, backward_s, kept_bytes, state_bytes) in zip(folded.units, units, strict=True):
        first_use: dict[int, int] = {}
        for task in range(unit.first_op, unit.end_op):
            first_use |= {t: task for t in graph.ops[task].inputs if t in parameters and t not in first_use}
        used: Counter[int] = Counter()
        for tensor, task in first_use.items():
            used[task] += parameters[tensor]
        for task, entries in used.items():
            state[task] = state_bytes * entries / max(1, used.total())
        for place, (ahead, back, held) in enumerate(shares[unit.fold_class]):
            task = unit.first_op + place
            forward[task], backward[task], kept[task] = ahead * forward_s, back * backward_s, held * kept_bytes
    fed = set(graph.inputs)
    constant = []
    edges: dict[tuple[int, int], int] = {}
    for index, op in enumerate(graph.ops):
        for tensor in dict.fromkeys(op.inputs):
            made = graph.producer.get(tensor)
            if made is not None:
                size = counter.size_bytes(tensor, microbatch, precision) if counter.needs_gradient(tensor) else 0
                edges[made, index] = edges.get((made, index), 0) + size
        depends = any(t in fed for t in op.inputs)
        constant.append(not depends)
        if depends:
            fed.update(op.outputs)
    return Tasks(
        tuple(forward),
        tuple(backward),
        tuple(state),
        tuple(kept),
        tuple((a, b, size) for (a, b), size in edges.items()),
        tuple(constant),
    )


def _shares(
    unit: Unit, counter: WorkCounter, device: Device, precision: str, microbatch: int
) -> list[tuple[float, float, float]]:
    """The share of each op of a unit in the unit's forward, backward and kept activations."""
    rows = []
    for place in range(unit.first_op, unit.end_op):
        alone = unit_cost(
            counter.count(replace(unit, first_op=place, end_op=place + 1), microbatch, precision), device, precision
        )
        rows.append((alone.forward_s, alone.input_grad_s + alone.weight_grad_s, float(alone.saved_bytes)))
    columns = [_normalised(column) for column in zip(*rows, strict=True)]
    return list(zip(*columns, strict=True))


def _normalised(values: Sequence[float]) -> list[float]:
    """The shares of the values, which add up to 1; even shares where all values are 0."""
    total = sum(values)
    return [value / total if total else 1 / len(values) for value in values]
