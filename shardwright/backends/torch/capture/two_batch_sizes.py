"""The alignment of two runs of one model at two batch sizes: each op of one run with its counterpart in the other.

Both runs have the same ops, except in modules that read values. There the first run's ops stand for both, with their
sizes at the first batch, and only the tensors that leave such a module have to agree.

The second run may compute in 16 bits, as the steps of a plan in bf16 do. It then has casts between 16 bits and float32
that change nothing in the first run, and the values that it has in float32 are marked (`Tensor.stays_wide`).
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardwright.backends.torch.capture.op_memory import OpMemories
from shardwright.backends.torch.capture.recorder import Recorded, Recorder, Value
from shardwright.core.errors import CaptureError, UnrecordableError
from shardwright.core.model.graph import Op, Tensor
from shardwright.core.model.op_memory import OpMemory
from shardwright.core.rules.op_rules import meet

WIDE, NARROW = "float32", "bfloat16"
_SINGLE_AND_HALF = (WIDE, NARROW, "float16")
CASTS = frozenset({"aten.to", "aten._to_copy"})


@dataclass(slots=True)
class _Region:
    """The ops of one call of a module that reads values."""

    call: int
    ops: list[Recorded]


class Alignment:
    """The runs ``a`` and ``b``, at batch ``sizes[0]`` and ``sizes[1]``.

    Args:
        outputs: the numbers of the values that each run returned.
        narrow: whether the second run computed in 16 bits.

    Raises CaptureError where they differ; UnrecordableError where values may be the reason.
    """

    def __init__(
        self,
        a: Recorder,
        b: Recorder,
        outputs: tuple[Sequence[int], Sequence[int]],
        sizes: tuple[int, int],
        with_values: bool,
        narrow: bool,
    ) -> None:
        self.a, self.b, self.sizes = a, b, sizes
        self.memories = OpMemories(sizes, narrow=narrow)
        self.with_values, self.narrow = with_values, narrow
        self._of_b: dict[int, int] = {}
        self._cast_of: dict[int, int] = {}
        """Result of a cast of the second run alone → the first run's value that was cast; the results are numbered
        after the values of the first run."""
        self._partner: dict[int, int] = {}
        self._made_in_b = {n for op in b.ops for n in op.outputs}
        self._used = (_used_by(a, outputs[0]), _used_by(b, outputs[1]))
        self._calls_of_a = {(call.path, call.occurrence): index for index, call in enumerate(a.calls)}
        self._ops: list[Op] = []
        self._align()
        self.has_casts = bool(self._cast_of)
        """Whether the second run casts what the first does not."""
        for x, y in zip(outputs[0], outputs[1], strict=True):
            if not self._same_value(x, y):
                raise self._error(
                    f"what {a.calls[0].path or 'the model'} returns is made otherwise at batch {sizes[1]}"
                )
        self._outputs = tuple(self._of_b[y] for y in outputs[1])

    def tensors(self, *, with_casts: bool) -> list[Tensor]:
        """The values of the first run, with sizes that are linear in the batch; ``with_casts``: and the results of
        casts of the second alone."""
        found = []
        for n in range(len(self.a.values) + (len(self._cast_of) if with_casts else 0)):
            x = self._value(n)
            partner = self._partner.get(n)
            y = x if partner is None else self.b.values[partner]
            is_wide = self.narrow and y.dtype == WIDE and x.role not in ("parameter", "input")
            if n in self._cast_of:
                found.append(Tensor.from_two(x.shape, y.shape, x.dtype, stays_wide=y.dtype == WIDE))
            else:
                left = n in self.a.left_in_objects
                found.append(
                    Tensor.from_two(x.shape, y.shape, x.dtype, x.role, x.name, stays_wide=is_wide, is_left=left)
                )
        self._require_linear(found)
        return found

    def ops(self, *, with_casts: bool) -> list[Op]:
        """The ops of the first run; with ``with_casts`` those of the second, which casts where the first does not."""
        if with_casts or not self.has_casts:
            return self._ops
        found = []
        for op in self._ops:
            if not self._cast_of.keys().isdisjoint(op.inputs):
                op = replace(op, inputs=tuple(self._cast_of.get(n, n) for n in op.inputs))
            if op.outputs[0] not in self._cast_of:
                found.append(op)
        return found

    def outputs(self, *, with_casts: bool) -> tuple[int, ...]:
        """The numbers of the values that the graph returns."""
        return self._outputs if with_casts else tuple(self._cast_of.get(n, n) for n in self._outputs)

    def _add(self, x: Recorded, y: Recorded | None) -> None:
        labelled = x.labelled if y is None or x.labelled is y.labelled else meet(x.labelled, y.labelled)
        inputs = x.inputs if y is None else tuple(self._of_b[m] for m in y.inputs)
        self._ops.append(
            Op(
                x.kind, x.name, inputs, x.outputs, labelled.labels, labelled.special, labelled.offsets, x.call,
                self._memory(x, y),
            )
        )  # fmt: skip

    def _memory(self, x: Recorded, y: Recorded | None) -> OpMemory | None:
        """The memory of the call that an op is a part of, or else of its own."""
        if x.whole is not None:
            found = self.memories.of(x.whole, None if y is None else y.whole)[x.part]
            if found.is_known:
                return found
        if x.form is None:
            return None
        found = self.memories.of(x.form, None if y is None else y.form)[x.piece]
        return found if found.is_known or not x.form.is_product else None

    # -- ops -----------------------------------------------------------------------------------------------------

    def _align(self) -> None:
        one = list(_pieces(self.a))
        met, extra = 0, 0
        after: Recorded | _Region | None = None
        """The first piece of the second run that the first run does not have."""
        for y in _pieces(self.b):
            if isinstance(y, Recorded) and self._is_cast(y):
                self._add_cast(y)
                extra += 1
            elif met == len(one):
                after = after or y
            else:
                self._pair(one[met], y)
                met += 1
        if met < len(one) or after is not None:
            missing, of = (one[met], self.a) if after is None else (after, self.b)
            op = missing.ops[0] if isinstance(missing, _Region) else missing
            raise self._error(
                f"batch {self.sizes[0]} runs {len(self.a.ops)} ops and batch {self.sizes[1]} runs "
                f"{len(self.b.ops) - extra}: the first that only one of them has is {op.name} in {self._path(of, op)!r}"
            )

    def _pair(self, x: Recorded | _Region, y: Recorded | _Region) -> None:
        if isinstance(x, _Region) and isinstance(y, _Region) and self._path(self.a, x) == self._path(self.b, y):
            self._pair_regions(x, y)
        elif isinstance(x, _Region) or isinstance(y, _Region):
            raise self._error(f"{self._path(self.a, x)!r} reads values at one of the batches alone")
        else:
            self._pair_ops(x, y)

    def _is_cast(self, y: Recorded) -> bool:
        """Whether an op of the second run casts between 16 bits and float32 what the first run has in float32."""
        if not self.narrow or y.name not in CASTS or len(y.inputs) != 1:
            return False
        given, made = (self.b.values[m].dtype for m in (*y.inputs, *y.outputs))
        (m,) = y.inputs
        if m not in self._of_b and not (m < len(self.a.values) and self._same_value(m, m)):  # a tensor of the model
            return False
        number = self._of_b[m]
        return given != made and {given, made} == {WIDE, NARROW} and self._value(number).dtype == WIDE

    def _add_cast(self, y: Recorded) -> None:
        (given,), (made,) = y.inputs, y.outputs
        source, number = self._of_b[given], len(self.a.values) + len(self._cast_of)
        self._cast_of[number] = self._cast_of.get(source, source)
        self._of_b[made], self._partner[number] = number, made
        call = self.b.calls[y.call]
        home = self._calls_of_a.get((call.path, call.occurrence))
        if home is None:
            raise self._error(f"{call.path!r} is called at one of the batches alone")
        labelled = y.labelled
        self._ops.append(
            Op("elementwise", y.name, (source,), (number,), labelled.labels, labelled.special, labelled.offsets, home)
        )

    def _value(self, number: int) -> Value:
        """The first run's value of this number, or the one that a cast of the second run was made of."""
        return self.a.values[self._cast_of.get(number, number)]

    def _pair_ops(self, x: Recorded, y: Recorded) -> None:
        path, other = self._path(self.a, x), self._path(self.b, y)
        number = len(self._ops)
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
        self._add(x, y)

    def _pair_regions(self, x: _Region, y: _Region) -> None:
        if self._grow_alike(x, y):
            before = dict(self._of_b), dict(self._partner), list(self._ops)
            try:
                for one, other in zip(x.ops, y.ops, strict=True):
                    self._pair_ops(one, other)
            except CaptureError:  # the same ops on other tensors
                self._of_b, self._partner, self._ops = before
            else:
                return
        left, right = self._leaving(0, x), self._leaving(1, y)
        if len(left) != len(right) or not all(self._same_kind(n, m) for n, m in zip(left, right, strict=True)):
            raise self._error(
                f"{self._path(self.a, x)!r}, which reads values, makes {len(left)} tensors that are used outside of it "
                f"at batch {self.sizes[0]}, and {len(right)} or others at batch {self.sizes[1]}"
            )
        self._match(left, right)
        for op in x.ops:
            self._add(op, None)

    def _grow_alike(self, x: _Region, y: _Region) -> bool:
        """Whether two regions run the same ops, on tensors of the same sizes or of sizes as the batch."""
        if [(op.kind, op.name) for op in x.ops] != [(op.kind, op.name) for op in y.ops]:
            return False
        for one, other in zip(x.ops, y.ops, strict=True):
            shapes = (
                [recorder.values[n].shape for n in (*op.inputs, *op.outputs)]
                for recorder, op in ((self.a, one), (self.b, other))
            )
            for small, large in itertools.zip_longest(*shapes):
                if small is None or large is None or len(small) != len(large):
                    return False
                if any(n != m and n * self.sizes[1] != m * self.sizes[0] for n, m in zip(small, large, strict=True)):
                    return False
        return True

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
            found = self._of_b.get(m, -1)
            return self._cast_of.get(found, found) == n
        if m in self._made_in_b or not self._same_kind(n, m) or self.a.values[n].role != self.b.values[m].role:
            return False
        self._match((n,), (m,))
        return True

    def _same_kind(self, n: int, m: int) -> bool:
        x, y = self.a.values[n], self.b.values[m]
        alike = x.dtype == y.dtype or (self.narrow and x.dtype in _SINGLE_AND_HALF and y.dtype in (WIDE, NARROW))
        return len(x.shape) == len(y.shape) and alike

    def _require_linear(self, tensors: Sequence[Tensor]) -> None:
        """Raise CaptureError for a size that grows faster than the batch: at batch 1 it would be negative."""
        for n, value in enumerate(tensors):
            if any(fixed + slope < 0 for fixed, slope in zip(value.fixed, value.per_sample, strict=True)):
                op = next(op for op in self.a.ops if self._cast_of.get(n, n) in op.outputs)
                partner = self.b.values[self._partner[n]]
                raise CaptureError(
                    f"{op.name} in {self._path(self.a, op)!r} makes a tensor of shape {self._value(n).shape} at "
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
