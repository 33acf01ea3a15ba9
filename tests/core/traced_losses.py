"""Losses written in numpy that are traced into the core's loss programs as they are computed: an oracle for
`core.model.loss` that knows no framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwright.core.model.loss import LossOp, LossProgram, Source, Verdict, read_loss, shares_of_microbatches
from shardwright.core.rules import op_rules as labels
from shardwright.core.rules.op_rules import Labelled

Arrays = dict[str, np.ndarray]
SIZES = (2, 3)


@dataclass
class Trace:
    """One run: the arrays of all values, and the ops without what differs between two runs."""

    arrays: list[np.ndarray] = field(default_factory=list)
    ops: list[dict] = field(default_factory=list)
    sources: dict[int, str] = field(default_factory=dict)

    def source(self, array: np.ndarray, kind: str) -> Traced:
        self.sources[len(self.arrays)] = kind
        self.arrays.append(np.asarray(array, np.float64))
        return Traced(self, len(self.arrays) - 1)

    def op(self, how: str, inputs: Sequence[Traced], array: np.ndarray, labelled: Labelled | None, **more) -> Traced:
        self.arrays.append(np.asarray(array, np.float64))
        number = len(self.arrays) - 1
        given = {"labels": (), "special": ()}
        if labelled is not None:
            given = {"labels": labelled.labels, "special": labelled.special}
        self.ops.append({"how": how, "inputs": tuple(t.number for t in inputs), "outputs": (number,), **given, **more})
        return Traced(self, number)


@dataclass
class Traced:
    trace: Trace
    number: int

    @property
    def array(self) -> np.ndarray:
        return self.trace.arrays[self.number]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def _pointwise(self, how: str, array: np.ndarray, *others: Traced, **more) -> Traced:
        inputs = (self, *others)
        return self.trace.op(how, inputs, array, labels.elementwise([t.shape for t in inputs], [array.shape]), **more)

    def map(self, function: Callable[..., np.ndarray], *others: Traced) -> Traced:
        return self._pointwise("map", function(self.array, *(t.array for t in others)), *others)

    def __add__(self, other: Traced | float) -> Traced:
        if isinstance(other, Traced):
            return self._pointwise("add", self.array + other.array, other)
        return self._pointwise("add", self.array + other, number=float(other))

    def __sub__(self, other: Traced) -> Traced:
        return self._pointwise("add", self.array - other.array, other)

    def __mul__(self, other: Traced | float) -> Traced:
        if isinstance(other, Traced):
            return self._pointwise("multiply", self.array * other.array, other)
        return self._pointwise("scale", self.array * other, number=float(other))

    def __truediv__(self, other: Traced | float) -> Traced:
        if isinstance(other, Traced):
            with np.errstate(all="ignore"):
                return self._pointwise("divide", self.array / other.array, other)
        return self * (1.0 / other)

    def at_least(self, least: float) -> Traced:
        return self._pointwise("at_least", np.maximum(self.array, least), number=least)

    def where(self, first: Traced, second: Traced) -> Traced:
        return self._pointwise("select", np.where(self.array > 0, first.array, second.array), first, second)

    def detach(self) -> Traced:
        return self.trace.op("detach", (self,), self.array, None, differentiable=False)

    def _reduce(self, how: str, array: np.ndarray, dims: Sequence[int] | None) -> Traced:
        dims = range(self.array.ndim) if dims is None else dims
        labelled = labels.reduction(self.shape, tuple(dims))
        if how == "map":
            labelled = Labelled(labelled.labels, tuple((d % self.array.ndim, "whole") for d in dims))
        return self.trace.op(how, (self,), array, labelled)

    def sum(self, *dims: int) -> Traced:
        return self._reduce("sum", self.array.sum(dims or None), dims or None)

    def mean(self, *dims: int) -> Traced:
        return self._reduce("mean", self.array.mean(dims or None), dims or None)

    def max(self, *dims: int) -> Traced:
        return self._reduce("map", self.array.max(dims or None), dims or None)

    def reshape(self, *shape: int) -> Traced:
        return self.trace.op("reshape", (self,), self.array.reshape(shape), None)

    def transpose(self) -> Traced:
        return self.trace.op("same", (self,), self.array.T, labels.transpose(range(self.array.ndim)[::-1]))

    def __matmul__(self, other: Traced) -> Traced:
        labelled = labels.matmul(self.shape, other.shape)
        return self.trace.op("contract", (self, other), self.array @ other.array, labelled)

    def cut(self, dim: int, start: int, stop: int) -> Traced:
        array = np.take(self.array, range(start, stop), dim)
        labelled = labels.parts(self.shape, dim, [array.shape], [start])
        return self.trace.op("cut", (self,), array, labelled, dims=(dim,), offset=start)

    def concat(self, other: Traced, dim: int) -> Traced:
        array = np.concatenate([self.array, other.array], dim)
        labelled = labels.concatenation([self.shape, other.shape], dim)
        return self.trace.op("concat", (self, other), array, labelled, dims=(dim,))

    def pick(self, *indices: Traced) -> Traced:
        """`self[index, …]`, of the first dims; the indices have one dim."""
        array = self.array[tuple(i.array.astype(int) for i in indices)]
        rows = tuple(range(self.array.ndim))
        many = len(indices)
        out = (len(rows), *rows[many:])
        special = tuple((d, "whole" if many > 1 else "index") for d in range(many))
        labelled = Labelled((rows, *([(len(rows),)] * many), out), special)
        return self.trace.op("lookup", (self, *indices), array, labelled, dims=tuple(range(many)))

    def places(self) -> Traced:
        return self.trace.op("position", (), np.arange(self.shape[0]), None)

    def ones(self) -> Traced:
        return self.trace.op(
            "fill", (), np.ones(self.shape), Labelled((labels.elementwise([], [self.shape]).labels[0],))
        )


Loss = Callable[..., Traced]
"""Of the batch by names, and ``t``, a parameter of one entry."""


def run(loss: Loss, batch: Arrays, parameter: float) -> tuple[Trace, Traced]:
    trace = Trace()
    given = {name: trace.source(array, "samples") for name, array in batch.items()}
    result = loss(**given, t=trace.source(np.array(parameter), "trained"))
    return trace, result


def part(batch: Arrays, start: int, stop: int) -> Arrays:
    return {name: array[start:stop] for name, array in batch.items()}


def read(loss: Loss, batch: Arrays) -> tuple[Verdict, int]:
    """The verdict; and the number of values, so that callers can see that something was traced."""
    (a, result), (b, other) = (run(loss, part(batch, 0, size), 0.7) for size in SIZES)
    assert len(a.ops) == len(b.ops)
    assert result.number == other.number
    ops = []
    for x, y in zip(a.ops, b.ops, strict=True):
        fields = {k: v for k, v in x.items() if k not in ("number", "offset")}
        if "number" in x:
            fields["number"] = (x["number"], y["number"])
        if "offset" in x:
            fields["offsets"] = ((x["offset"],), (y["offset"],))
        ops.append(LossOp(name=x["how"], **fields))
    shapes = {n: (p.shape, q.shape) for n, (p, q) in enumerate(zip(a.arrays, b.arrays, strict=True))}
    sources = {n: Source(kind) for n, kind in a.sources.items()}
    return read_loss(LossProgram(SIZES, shapes, sources, tuple(ops)), result.number), len(a.arrays)


def put_together(verdict: Verdict, loss: Loss, batch: Arrays, sizes: Sequence[int], parameter: float) -> float:
    """The loss of the batch from those of its microbatches."""
    ends = np.cumsum(sizes)
    runs = [run(loss, part(batch, end - size, end), parameter) for size, end in zip(sizes, ends, strict=True)]
    counts = {
        c.count.value: [float(trace.arrays[c.count.value]) for trace, _ in runs]
        for c in verdict.combinations
        if c.count is not None
    }
    shares = shares_of_microbatches(verdict.combinations, verdict.constant, sizes, counts)
    return sum(share * float(result.array) for share, (_, result) in zip(shares, runs, strict=True))
