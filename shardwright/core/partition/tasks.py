"""A captured model as tasks with costs: what the partitioners that look inside units work on.

Tasks are ops. A unit's seconds and bytes, as the plan's cost model has them, are shared out over its ops in proportion
to what each would take by itself, so that every partitioner is measured by the same clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwright.core.cost.unit import unit_cost
from shardwright.core.cost.work import WorkCounter
from shardwright.core.fold import Folded, Unit
from shardwright.core.hardware import Device


@dataclass(frozen=True, slots=True)
class Tasks:
    """A graph of tasks, in an order in which they can run."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    state_bytes: tuple[float, ...]
    """Parameters, gradients and optimizer states; of a parameter that several tasks use, at the first."""
    kept_bytes: tuple[float, ...]
    """Activations kept for the backward pass of one microbatch."""
    edges: tuple[tuple[int, int, int], ...]
    """(task that makes a tensor, task that uses it, bytes); of a tensor with several users one for each."""
    constant: tuple[bool, ...]
    """Whether a task depends on no input of the model."""

    def __len__(self) -> int:
        return len(self.forward_s)


def op_tasks(
    folded: Folded,
    counter: WorkCounter,
    units: Sequence[tuple[float, float, float]],
    device: Device,
    precision: str,
    microbatch: int,
    state_bytes_per_element: float,
) -> Tasks:
    """The ops of a graph as tasks; ``units`` holds (forward seconds, backward seconds, kept bytes) of each unit."""
    graph = folded.graph
    count = len(graph.ops)
    forward, backward, state, kept = ([0.0] * count for _ in range(4))
    classes = folded.classes
    shares = [_shares(folded.units[members[0]], counter, device, precision, microbatch) for members in classes]
    for unit, (forward_s, backward_s, kept_bytes) in zip(folded.units, units, strict=True):
        for place, (ahead, back, held) in enumerate(shares[unit.fold_class]):
            task = unit.first_op + place
            forward[task], backward[task], kept[task] = ahead * forward_s, back * backward_s, held * kept_bytes
    holder: set[int] = set()
    parameters = {p.tensor: graph.tensors[p.tensor].elements(1) for p in graph.parameters}
    fed = set(graph.inputs)
    constant = []
    edges: dict[tuple[int, int], int] = {}
    for index, op in enumerate(graph.ops):
        for tensor in dict.fromkeys(op.inputs):
            if tensor in parameters and tensor not in holder:
                holder.add(tensor)
                state[index] += parameters[tensor] * state_bytes_per_element
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
    """For every op of a unit its share of the unit's forward, backward and kept activations."""
    rows = []
    for place in range(unit.first_op, unit.end_op):
        alone = unit_cost(
            counter.count(replace(unit, first_op=place, end_op=place + 1), microbatch, precision), device, precision
        )
        rows.append((alone.forward_s, alone.input_grad_s + alone.weight_grad_s, float(alone.saved_bytes)))
    columns = [_normalised(column) for column in zip(*rows, strict=True)]
    return list(zip(*columns, strict=True))


def _normalised(values: Sequence[float]) -> list[float]:
    """Shares that add up to 1; even ones where there is nothing to go by."""
    total = sum(values)
    return [value / total if total else 1 / len(values) for value in values]
