"""The alignment of two runs of one model at two batch sizes: each op of one run with its counterpart in the other.

Both runs have the same ops, except in modules that read values. There the first run's ops stand for both, with their
sizes at the first batch, and only the tensors that leave such a module have to agree.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwright.backends.torch.capture.recorder import Recorded, Recorder
from shardwright.core.errors import CaptureError, UnrecordableError
from shardwright.core.model.graph import Op, Tensor
from shardwright.core.rules.op_rules import meet


@dataclass(slots=True)
class _Region:
    """The ops of one call of a module that reads values."""

    call: int
    ops: list[Recorded]


class Alignment:
    """The runs ``a`` and ``b``, at batch ``sizes[0]`` and ``sizes[1]``.

    Args:
        outputs: the numbers of the values that each run returned.

    Raises CaptureError where they differ; UnrecordableError where values may be the reason.
    """

    def __init__(
        self,
        a: Recorder,
        b: Recorder,
        outputs: tuple[Sequence[int], Sequence[int]],
        sizes: tuple[int, int],
        with_values: bool,
    ) -> None:
        self.a, self.b, self.sizes = a, b, sizes
        self.with_values = with_values
        self._of_b: dict[int, int] = {}
        self._partner: dict[int, int] = {}
        self._made_in_b = {n for op in b.ops for n in op.outputs}
        self._used = (_used_by(a, outputs[0]), _used_by(b, outputs[1]))
        self.pairs: list[tuple[Recorded, Recorded | None]] = []
        self._align()
        for x, y in zip(outputs[0], outputs[1], strict=True):
            if not self._same_value(x, y):
                raise self._error(
                    f"what {a.calls[0].path or 'the model'} returns is made otherwise at batch {sizes[1]}"
                )

    def tensors(self) -> list[Tensor]:
        """The values of the first run, with sizes that are linear in the batch."""
        found = []
        for n, x in enumerate(self.a.values):
            partner = self._partner.get(n)
            y = x if partner is None else self.b.values[partner]
            found.append(Tensor.from_two(x.shape, y.shape, x.dtype, x.role, x.name))
        self._require_linear(found)
        return found

    def ops(self) -> list[Op]:
        found = []
        for x, y in self.pairs:
            labelled = x.labelled if y is None or x.labelled is y.labelled else meet(x.labelled, y.labelled)
            found.append(
                Op(x.kind, x.name, x.inputs, x.outputs, labelled.labels, labelled.special, labelled.offsets, x.call)
            )
        return found

    # -- ops -----------------------------------------------------------------------------------------------------

    def _align(self) -> None:
        one, other = list(_pieces(self.a)), list(_pieces(self.b))
        for x, y in zip(one, other, strict=False):
            if isinstance(x, _Region) and isinstance(y, _Region) and self._path(self.a, x) == self._path(self.b, y):
                self._pair_regions(x, y)
            elif isinstance(x, _Region) or isinstance(y, _Region):
                raise self._error(f"{self._path(self.a, x)!r} reads values at one of the batches alone")
            else:
                self._pair_ops(x, y)
        if len(one) != len(other):
            longer, of = (one, self.a) if len(one) > len(other) else (other, self.b)
            extra = longer[min(len(one), len(other))]
            op = extra.ops[0] if isinstance(extra, _Region) else extra
            raise self._error(
                f"batch {self.sizes[0]} runs {len(self.a.ops)} ops and batch {self.sizes[1]} runs {len(self.b.ops)}: "
                f"the first that only one of them has is {op.name} in {self._path(of, op)!r}"
            )

    def _pair_ops(self, x: Recorded, y: Recorded) -> None:
        path, other = self._path(self.a, x), self._path(self.b, y)
        number = len(self.pairs)
        if x.name != y.name or path != other or self._occurrence(self.a, x) != self._occurrence(self.b, y):
            raise self._error(
                f"op {number} is {x.name} in {path!r} at batch {self.sizes[0]} and {y.name} in {other!r} at batch "
                f"{self.sizes[1]}"
            )
        alike = x.kind == y.kind and len(x.inputs) == len(y.inputs) and len(x.outputs) == len(y.outputs)
        if not alike or not all(self._same_value(n, m) for n, m in zip(x.inputs, y.inputs, strict=True)):
            raise self._error(f"op {number} ({x.name} in {path!r}) works on other tensors at batch {self.sizes[1]}")
        self._match(x.outputs, y.outputs)
        for n, m in zip((*x.inputs, *x.outputs), (*y.inputs, *y.outputs), strict=True):
            if not self._same_kind(n, m):
                raise self._error(
                    f"op {number} ({x.name} in {path!r}) has a tensor of shape {self.a.values[n].shape} at batch "
                    f"{self.sizes[0]} and {self.b.values[m].shape} at batch {self.sizes[1]}"
                )
        self.pairs.append((x, y))

    def _pair_regions(self, x: _Region, y: _Region) -> None:
        left, right = self._leaving(0, x), self._leaving(1, y)
        if len(left) != len(right) or not all(self._same_kind(n, m) for n, m in zip(left, right, strict=True)):
            raise self._error(
                f"{self._path(self.a, x)!r}, which reads values, makes {len(left)} tensors that are used outside of it "
                f"at batch {self.sizes[0]}, and {len(right)} or others at batch {self.sizes[1]}"
            )
        self._match(left, right)
        self.pairs += [(op, None) for op in x.ops]

    def _leaving(self, which: int, region: _Region) -> list[int]:
        """The values that a region makes and that are used outside of it, in order."""
        inside: dict[int, int] = {}
        for op in region.ops:
            for n in op.inputs:
                inside[n] = inside.get(n, 0) + 1
        made = [n for op in region.ops for n in op.outputs]
        return [n for n in made if self._used[which].get(n, 0) > inside.get(n, 0)]

    # -- values --------------------------------------------------------------------------------------------------

    def _match(self, of_a: Sequence[int], of_b: Sequence[int]) -> None:
        for n, m in zip(of_a, of_b, strict=True):
            self._of_b[m], self._partner[n] = n, m

    def _same_value(self, n: int, m: int) -> bool:
        """Whether value ``m`` of the second run is value ``n`` of the first. Values that no op makes are paired when
        they are met."""
        if m in self._of_b or n in self._partner:
            return self._of_b.get(m) == n
        if m in self._made_in_b or not self._same_kind(n, m) or self.a.values[n].role != self.b.values[m].role:
            return False
        self._match((n,), (m,))
        return True

    def _same_kind(self, n: int, m: int) -> bool:
        x, y = self.a.values[n], self.b.values[m]
        return len(x.shape) == len(y.shape) and x.dtype == y.dtype

    def _require_linear(self, tensors: Sequence[Tensor]) -> None:
        """Raise CaptureError for a size that grows faster than the batch: at batch 1 it would be negative."""
        for n, value in enumerate(tensors):
            if any(fixed + slope < 0 for fixed, slope in zip(value.fixed, value.per_sample, strict=True)):
                op = next(op for op in self.a.ops if n in op.outputs)
                partner = self.b.values[self._partner[n]]
                raise CaptureError(
                    f"{op.name} in {self._path(self.a, op)!r} makes a tensor of shape {self.a.values[n].shape} at "
                    f"batch {self.sizes[0]} and {partner.shape} at batch {self.sizes[1]}: a dim that does not grow "
                    f"linearly with it. Keep pairs of samples in two dims ([batch, batch]), not flattened into one"
                )

    # -- words ---------------------------------------------------------------------------------------------------

    @staticmethod
    def _path(recorder: Recorder, piece: Recorded | _Region) -> str:
        return recorder.calls[piece.call].path or "the model itself"

    @staticmethod
    def _occurrence(recorder: Recorder, op: Recorded) -> int:
        return recorder.calls[op.call].occurrence

    def _error(self, what: str) -> CaptureError:
        if self.with_values:
            return UnrecordableError(
                f"{what}. The model reads values of tensors and runs by them: it cannot be recorded, but it can run by "
                f"message passing"
            )
        return UnrecordableError(
            f"{what}. The model must run the same ops at batch {self.sizes[0]} and {self.sizes[1]}: does it branch on "
            f"the batch size, or is the batch of an input not dim 0 (then say so with batch_dims=)? A model that does "
            f"so cannot be planned, but it can run by message passing"
        )


def _pieces(recorder: Recorder) -> Iterator[Recorded | _Region]:
    """The ops of a run, those of each module call that reads values together. The model's own ops are not put
    together."""
    region_of: list[int | None] = []
    for index, call in enumerate(recorder.calls):
        outer = region_of[call.parent] if index else None
        region_of.append(index if outer is None and index and index in recorder.reading else outer)
    region: _Region | None = None
    for op in recorder.ops:
        home = region_of[op.call]
        if region is not None and home != region.call:
            yield region
            region = None
        if home is None:
            yield op
        elif region is None:
            region = _Region(home, [op])
        else:
            region.ops.append(op)
    if region is not None:
        yield region


def _used_by(recorder: Recorder, outputs: Sequence[int]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for n in (*(n for op in recorder.ops for n in op.inputs), *outputs):
        counts[n] = counts.get(n, 0) + 1
    return counts
