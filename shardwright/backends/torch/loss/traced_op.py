"""One op of a step body, traced at two batch sizes, with its arguments at both."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwright.backends.torch.capture.ops import Ref
from shardwright.backends.torch.capture.recorder import Recorded
from shardwright.backends.torch.loss.trace import LossTrace, Made
from shardwright.backends.torch.loss.trace_pairs import numbers_of
from shardwright.core.model.loss import LossOp
from shardwright.core.model.loss.program import How, Shape


class Counted:
    """The number by which `nll_loss` divides: the summed weights of the targets that it does not ignore."""

    def __init__(self, target: int, weight: int | None, ignored: int) -> None:
        self.target, self.weight, self.ignored = target, weight, ignored


class TracedValues:
    """The values of two traces by their numbers, a small and a large one, and some values that no op of torch makes.

    Attributes:
        shapes: at both batch sizes.
        counted: the values that are counts of `nll_loss`.
    """

    def __init__(self, small: LossTrace, large: LossTrace) -> None:
        self.traces = small, large
        self.shapes = {n: (a.shape, b.shape) for n, (a, b) in enumerate(zip(small.values, large.values, strict=True))}
        self.counted: dict[int, Counted] = {}

    def new_value(self, shapes: tuple[Shape, Shape]) -> int:
        """A value that no op of torch makes."""
        number = len(self.shapes)
        self.shapes[number] = shapes
        return number


class TracedOp:
    """One recorded op, with its arguments at both batch sizes."""

    def __init__(
        self, values: TracedValues, op: LossOp, a: Recorded, b: Recorded, made: tuple[Made | None, Made | None],
        name: str, piece: str,
    ) -> None:  # fmt: skip
        self.values, self.op, self.a, self.b, self.name, self.piece = values, op, a, b, name, piece
        self.made = made[0]
        none: dict[str, Any] = {}
        self.arguments = [none if one is None else one.arguments for one in made]

    def how(self, how: How, **changes: Any) -> LossOp:
        return replace(self.op, how=how, **changes)

    def number(self, name: str) -> tuple[float, float] | None:
        """A number argument at both sizes; None where it is no number."""
        first, second = (arguments.get(name) for arguments in self.arguments)
        if not isinstance(first, (int, float)) or not isinstance(second, (int, float)):
            return None
        return float(first), float(second)

    def value_of(self, name: str) -> int | None:
        """The number of the value that an argument is; None where it is no tensor."""
        found = self.arguments[0].get(name)
        if not isinstance(found, Ref) or self.made is None:
            return None
        return self.made.inputs[found.slot]

    def constant(self, number: tuple[float, float]) -> tuple[LossOp, int]:
        """An op that makes a number, for ops that take it as a tensor."""
        value = self.values.new_value(((), ()))
        return LossOp("fill", self.op.name, (), (value,), ((),), where=self.op.where, number=number), value

    def repeated(self, source: int, out: int, new: Mapping[int, int]) -> list[LossOp]:
        """The ops that repeat the entries of dims of ``source`` to make ``out``: a broadcast and a reshape. ``new``
        gives, for a dim, whether the repeating dim comes before it (0) or after it (1)."""
        widened: list[list[int]] = [[], []]
        labels: list[int] = []
        for dim, sizes in enumerate(zip(*self.values.shapes[source], strict=True)):
            times = [
                made[dim] // size if size else 1 for size, made in zip(sizes, self.values.shapes[out], strict=True)
            ]
            adds = dim in new and times != [1, 1]
            for position in (0, 1) if adds else (0,):
                is_new = adds and position == new[dim]
                labels.append(-1 if is_new else dim)
                for of_size, size, more in zip(widened, sizes, times, strict=True):
                    of_size.append(more if is_new else size)
        value = self.values.new_value((tuple(widened[0]), tuple(widened[1])))
        kept = tuple(range(len(self.values.shapes[source][0])))
        broadcast = self.how("same", inputs=(source,), outputs=(value,), labels=(kept, tuple(labels)), special=())
        return [broadcast, self.how("reshape", inputs=(value,), labels=(), special=())]

    def has_same_numbers(self) -> bool:
        """Whether the numbers among the arguments are the same at both batch sizes."""
        a, b = (numbers_of(arguments) for arguments in self.arguments)
        return a == b
