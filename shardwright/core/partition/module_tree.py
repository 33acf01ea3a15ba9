"""The pipeline rank that owns each module, for a model that no capture can hold: runs of its module tree, cut by cost.

The floating-point operations of one microbatch are counted as it runs. The next one may take another path, so
parameters count as much: a module that this microbatch did not use may be used by the next one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwright.core.errors import PlanError
from shardwright.core.model.blocks import Node, find_blocks
from shardwright.core.partition.exact import min_max_cut, range_sums

PARAMETER_WEIGHT = 0.5
"""The share of parameters in a unit's cost; the rest is its share of the counted operations."""


@dataclass(frozen=True, slots=True)
class ModuleDivision:
    """The pp coordinate that owns each unit and each module with units, by path, and the counted operations."""

    owners: Mapping[str, int]
    flops: Mapping[str, int]
    """The operations of each unit; empty when nothing was run."""


def divide_modules(nodes: Sequence[Node], ranks: int, flops: Mapping[str, int], model_name: str) -> ModuleDivision:
    """Cut the units of a model, in the order of its module tree, into as many runs as there are ranks.

    Args:
        nodes: the modules, each before those in it; the first is the root.
        flops: the operations of each module's calls, by path; empty when they are not known.

    Raises PlanError: the model has fewer modules with parameters than there are ranks.
    """
    units = _units(nodes, ranks)
    if len(units) < ranks:
        raise PlanError(
            f"pp={ranks} needs as many modules with parameters, and {model_name} has {len(units)}: use at "
            f"most pp={len(units)}"
        )
    paths = [nodes[unit].path for unit in units]
    sizes = _shares([nodes[unit].elements for unit in units])
    work = _shares([flops.get(path, 0) for path in paths])
    weight = PARAMETER_WEIGHT if any(work) else 1.0
    costs = range_sums([weight * size + (1 - weight) * part for size, part in zip(sizes, work, strict=True)])
    starts = min_max_cut(costs, range_sums(sizes), ranks)
    assert starts is not None
    owners: dict[str, int] = {}
    for number, path in enumerate(paths):
        owners[path] = sum(start <= number for start in starts) - 1
    return ModuleDivision(with_containers(owners), {path: flops[path] for path in paths if path in flops})


def with_containers(owners: Mapping[str, int]) -> dict[str, int]:
    """The owners with the modules around units, the root apart, each owned as its first unit, to save a message."""
    found = dict(owners)
    for path, owner in owners.items():
        around = path.rpartition(".")[0]
        while around:
            found.setdefault(around, owner)
            around = around.rpartition(".")[0]
    return found


def _units(nodes: Sequence[Node], least: int) -> list[int]:
    """The blocks and the modules beside them; while fewer than ``least``, the largest is opened further."""
    blocks = find_blocks(list(nodes))
    inside = {unit: unit in blocks for unit in range(len(nodes))}
    for unit in reversed(range(len(nodes))):
        inside[unit] = inside[unit] or any(inside[child] for child in nodes[unit].children)

    def under(node: int) -> Iterator[int]:
        for child in nodes[node].children:
            if child not in blocks and inside[child]:
                yield from under(child)
            elif nodes[child].shapes:
                yield child

    units = list(under(0))
    while len(units) < least:
        openable = [unit for unit in units if any(nodes[child].shapes for child in nodes[unit].children)]
        if not openable:
            break
        largest = max(openable, key=lambda unit: nodes[unit].elements)
        position = units.index(largest)
        units[position : position + 1] = [child for child in nodes[largest].children if nodes[child].shapes]
    return units


def _shares(values: Sequence[float]) -> list[float]:
    total = sum(values)
    return [value / total for value in values] if total else [0.0 for _ in values]
