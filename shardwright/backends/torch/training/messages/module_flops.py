"""The data by which a model is divided along its module tree: the tree, and the operations of its modules."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shardwright.core.model.blocks import Node


def module_tree(model: nn.Module) -> list[Node]:
    """The modules of a model, each before those in it, with the shapes of the parameters inside."""
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


def count_flops(model: nn.Module, run: Callable[[], Any]) -> dict[str, int]:
    """The floating-point operations of the calls of each module, by path, while ``run()`` ran. Buffers and generators
    are left as they were."""
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
