"""Which rank owns which module, for a model that no capture can hold: units of the module tree, cut by what they cost.

The floating-point operations of one microbatch are counted as it runs on real tensors. What the next one does may
differ, so parameters count as much: a module that this microbatch did not come to may be the next one's choice.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shardwright.core.errors import PlanError
from shardwright.core.model.blocks import Node, find_blocks
from shardwright.core.partition.exact import min_max_cut, range_sums

PARAMETER_WEIGHT = 0.5
"""The share of parameters in a unit's cost; the rest is its share of the operations counted."""


@dataclass(frozen=True, slots=True)
class Division:
    """Which pp coordinate owns each unit and each module that contains units, by path; and what was counted."""

    owners: Mapping[str, int]
    flops: Mapping[str, int]
    """Of each unit; empty when nothing was run."""


def divide_modules(model: nn.Module, ranks: int, flops: Mapping[str, int]) -> Division:
    """Cut the units of a model, in the order of its module tree, into as many runs as there are ranks.

    Args:
        flops: for every module path what its calls took; empty when that is not known.

    Raises PlanError: the model has fewer modules with parameters than there are ranks.
    """
    nodes = _tree(model)
    units = _units(nodes, ranks)
    if len(units) < ranks:
        raise PlanError(
            f"pp={ranks} needs as many modules with parameters, and {type(model).__name__} has {len(units)}: use at "
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
    return Division(with_containers(owners), {path: flops[path] for path in paths if path in flops})


def with_containers(owners: Mapping[str, int]) -> dict[str, int]:
    """Modules around units, the root apart, go to the owner of the first unit in them, which saves it a message."""
    found = dict(owners)
    for path, owner in owners.items():
        around = path.rpartition(".")[0]
        while around:
            found.setdefault(around, owner)
            around = around.rpartition(".")[0]
    return found


def count_flops(model: nn.Module, run: Callable[[], Any]) -> dict[str, int]:
    """For every module path, what its calls took while ``run()`` ran. Buffers and generators are left as they were."""
    paths = {id(module): path for path, module in model.named_modules()}
    counted: Counter[str] = Counter()
    original = nn.Module.__call__
    counter = FlopCounterMode(display=False)

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = paths.get(id(module))
        before = counter.get_total_flops() if path is not None else 0
        try:
            return original(module, *args, **kwargs)
        finally:
            if path is not None:
                counted[path] += counter.get_total_flops() - before

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        with _untouched(model), torch.no_grad(), counter:
            run()
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]
    return dict(counted)


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    buffers = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    values = [(b, b.clone()) for _, held in buffers for b in held.values() if b is not None]
    with torch.random.fork_rng():
        try:
            yield
        finally:
            for module, held in buffers:
                module._buffers.update(held)
            with torch.no_grad():
                for buffer, value in values:
                    buffer.copy_(value)


def _tree(model: nn.Module) -> list[Node]:
    nodes: list[Node] = []
    place: dict[str, int] = {}
    for path, module in model.named_modules():
        place[path] = len(nodes)
        if path:
            around = path.rpartition(".")[0]
            nodes[place[around]].children.append(len(nodes))
        shapes = Counter(tuple(parameter.shape) for parameter in module.parameters())
        nodes.append(Node(path, shapes=shapes))
    return nodes


def _units(nodes: Sequence[Node], least: int) -> list[int]:
    """Blocks, and what stands beside them; opened further, the largest first, while there are fewer than ``least``."""
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
