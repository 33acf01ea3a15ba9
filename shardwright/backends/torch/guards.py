"""Values that a model reads between its units and that follow from the batch alone.

Every rank has the batch, so a program recorded for one batch holds for all others in which these values are the same:
the rows of images in a batch, whether a mask has a zero. Where they differ, the step is recorded anew.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shardwright.backends.torch.program import ConstantRef, Leaf, Literal, Program, Tree, ValueRef, tensors_in

READING = frozenset({
    "item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__complex__", "__index__",
    "__contains__", "equal", "allclose", "is_nonzero",
})  # fmt: skip
"""Functions of tensors whose result is the value of one, whether or not they run an op for it."""


def masks_of(op: Any, args: Any) -> list[torch.Tensor] | None:
    """The masks whose number of entries decides the shape of what an aten op gives; None: it is decided otherwise."""
    if op is torch.ops.aten.masked_select.default:
        return [args[1]]
    if op in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default):
        return [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
    return None


def what_was_read(result: Any) -> Any:
    """Of a function's result what the steps after it may have been chosen by: a value, or the shapes of tensors."""
    tensors = tensors_in(result)
    if tensors:
        return tuple(tuple(tensor.shape) for tensor in tensors)
    return result.copy() if isinstance(result, np.ndarray) else result


def holds(program: Program, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether a program was recorded with the values that these inputs of a microbatch give too."""
    if not program.guards:
        return True
    env = {i: inputs[value.input].clone() for i, value in enumerate(program.values) if value.input is not None}
    needed = _needed(program)

    def resolve(leaf: Leaf) -> Any:
        if isinstance(leaf, ValueRef):
            return env[leaf.value]
        if isinstance(leaf, ConstantRef):
            return leaf.tensor
        assert isinstance(leaf, Literal)
        return leaf.value

    def run(function: Any, arguments: Tree) -> Any:
        args, kwargs = arguments.build(resolve)
        return function(*args, **kwargs)

    pending = list(program.guards)
    with torch.no_grad():
        for step in program.steps:
            if step.index not in needed:
                continue
            found = tensors_in(run(step.function, step.arguments))
            if len(found) != len(step.outputs):
                return False
            for value, tensor in zip(step.outputs, found, strict=True):
                if value is not None:
                    env[value] = tensor
                    if tuple(tensor.shape) != program.values[value].shape:
                        return False
            for new, old in step.renewals:
                if old in env:
                    env[new] = env[old]
            ready = [g for g in pending if g.reads <= env.keys()]
            pending = [g for g in pending if not g.reads <= env.keys()]
            if not all(_same(what_was_read(run(g.function, g.arguments)), g.found) for g in ready):
                return False
        return all(_same(what_was_read(run(g.function, g.arguments)), g.found) for g in pending)


def _needed(program: Program) -> set[int]:
    steps: set[int] = set()
    pending = [v for guard in program.guards for v in guard.reads]
    while pending:
        made = program.values[pending.pop()].step
        if made is not None and made not in steps:
            steps.add(made)
            pending.extend(program.steps[made].reads)
    return steps


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)
