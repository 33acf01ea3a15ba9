"""Values that a model reads between its units and that every rank can compute: from the batch, and by drawing the same
random numbers again.

A program recorded for one batch holds for all others in which these values are the same: the rows of images in a batch,
whether a mask has a zero, which layers are dropped at random. Where they differ, the step is recorded anew.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from shardwright.backends.torch.capture.held_tensors import tensors_in
from shardwright.backends.torch.program.draft_steps import Draft
from shardwright.backends.torch.program.program import (
    ConstantRef,
    Guard,
    Leaf,
    Literal,
    NumberRef,
    Program,
    Step,
    Tree,
    Value,
    ValueRef,
    steps_behind,
)
from shardwright.backends.torch.program.randomness import Moment, kept_generators


def what_was_read(result: Any) -> Any:
    """The part of a function's result that may decide the steps after it: a value, or the shapes of tensors."""
    tensors = tensors_in(result)
    if tensors:
        return tuple(tuple(tensor.shape) for tensor in tensors)
    return result.copy() if isinstance(result, np.ndarray) else result


class _Retrace:
    """A computation of values anew from the batch and from random numbers, in the order of the program.

    Args:
        inputs: of one microbatch.
        moment: the moment by which numbers are drawn.
    """

    def __init__(
        self, values: Sequence[Value], steps: Sequence[Step | Draft], inputs: Sequence[torch.Tensor], moment: Moment
    ) -> None:
        self._values, self._steps, self._inputs, self._moment = values, steps, inputs, moment
        self._env: dict[int, torch.Tensor] = {}
        self.device = inputs[0].device if inputs else torch.device("cpu")

    def has(self, values: frozenset[int]) -> bool:
        """Whether these values are there already."""
        return all(value in self._env or self._values[value].input is not None for value in values)

    def run(self, wanted: Iterable[int]) -> Iterator[bool]:
        """Run the steps that these values follow from, in order. After each, yields whether it made tensors of the
        shapes that the program has."""
        for index in sorted(steps_behind(self._values, self._steps, wanted)):
            step = self._steps[index]
            if step.random:
                self._moment.draw_like(self._values, self._steps, step, self.device)
            found = tensors_in(self.call(step.function, step.arguments))
            same = len(found) == len(step.outputs)
            for value, tensor in zip(step.outputs, found, strict=False):
                if value is not None:
                    self._env[value] = tensor
                    same = same and tuple(tensor.shape) == self._values[value].shape
            for new, old in step.renewals:
                if self.has(frozenset((old,))):
                    self._env[new] = self._resolve(ValueRef(old))
            yield same

    def call(self, function: Any, arguments: Tree) -> Any:
        args, kwargs = arguments.build(self._resolve)
        return function(*args, **kwargs)

    def _resolve(self, leaf: Leaf) -> Any:
        if isinstance(leaf, ValueRef):
            if leaf.value not in self._env:
                made = self._values[leaf.value].input
                assert made is not None
                self._env[leaf.value] = self._inputs[made].clone()
            return self._env[leaf.value]
        if isinstance(leaf, ConstantRef):
            return leaf.tensor
        if isinstance(leaf, NumberRef):
            return leaf.expression.now()
        assert isinstance(leaf, Literal)
        return leaf.value


def holds(program: Program, inputs: Sequence[torch.Tensor], moment: Moment) -> bool:
    """Whether these inputs of a microbatch give, at this moment, the values with which a program was recorded.

    Where random numbers decide, torch's, Python's and NumPy's generators are left anywhere: see `kept_generators`.
    """
    if not program.guards:
        return True
    retrace = _Retrace(program.values, program.steps, inputs, moment)

    def agree(guards: Sequence[Guard]) -> bool:
        return all(_same(what_was_read(retrace.call(g.function, g.arguments)), g.found) for g in guards)

    pending = list(program.guards)
    with torch.no_grad():
        for same in retrace.run(v for guard in program.guards for v in guard.reads):
            ready = [g for g in pending if retrace.has(g.reads)]
            pending = [g for g in pending if not retrace.has(g.reads)]
            if not same or not agree(ready):
                return False
        return agree(pending)


def decide(
    values: Sequence[Value], drafts: Sequence[Draft], inputs: Sequence[torch.Tensor], moment: Moment, read: Draft
) -> Any:
    """The result of a function that reads a value, at a moment, while the program is being recorded."""
    retrace = _Retrace(values, drafts, inputs, moment)
    with torch.no_grad(), kept_generators(True, retrace.device):
        for _ in retrace.run(read.reads):
            pass
        return retrace.call(read.function, read.arguments)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)
