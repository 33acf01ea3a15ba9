"""The place of the batch in what an op makes, from its place in what the op reads."""

from dataclasses import replace
from math import prod

from shardwright.core.model.loss.program import LossOp, LossProgram, Shape
from shardwright.core.model.loss.values import Place, Value
from shardwright.core.model.loss.verdict import Finding

_ANOTHER_WAY = "puts the samples of the batch together in another way than by a sum or a mean"


class LostError(Exception):
    """The error that nothing more is known of a value; carries the finding."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.reason)
        self.finding = finding


def lost(kind: str, op: LossOp, what: str) -> LostError:
    """An error with a finding of ``kind``. ``what`` is the end of a sentence whose subject is the op."""
    place = f" in {op.where!r}" if op.where else ""
    assert kind in ("coupled", "mixed", "unknown")
    return LostError(Finding(kind, f"{op.name}{place} {what}"))  # type: ignore[arg-type]


def growing(program: LossProgram, number: int, op: LossOp) -> tuple[int, int] | None:
    """The dim of a value that grows with the batch, and its entries per sample; None where none does."""
    a, b = program.shapes[number]
    if len(a) != len(b):
        raise lost("unknown", op, "makes a tensor whose number of dims depends on the batch size")
    dims = [d for d, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    if not dims:
        return None
    small, large = program.sizes
    if len(dims) > 1:
        raise lost("coupled", op, "makes pairs of samples: two dims of its result are the batch")
    (dim,) = dims
    slope, rest = divmod(b[dim] - a[dim], large - small)
    if rest or slope < 1 or a[dim] != slope * small:
        raise lost(
            "unknown", op,
            f"makes a dim of {a[dim]} entries at batch {small} and {b[dim]} at batch {large}, which are not so many "
            f"for each sample",
        )  # fmt: skip
    return dim, slope


def of_reshape(op: LossOp, place: Place, before: Shape, after: Shape, batch: int) -> Place:
    """The place of the batch after a reshape, which keeps the order of all entries."""
    inner = place.inner * prod(before[place.dim + 1 :])
    for dim, size in enumerate(after):
        following = prod(after[dim + 1 :])
        if inner % following:
            continue
        within = inner // following
        if size and size % (batch * within) == 0 and size > 1:
            return Place(dim, size // (batch * within), within, place.free)
    raise lost("unknown", op, "takes the batch apart, so that a dim of its result holds parts of several samples")


def of_labels(op: LossOp, program: LossProgram, inputs: list[Value]) -> tuple[list[Place | None], bool]:
    """The place of the batch in every output, and whether the op sums over it.

    Raises LostError where the op does not work on samples one by one.
    """
    carrying = [(i, value.place) for i, value in enumerate(inputs) if value.place is not None]
    summed = False
    places: list[Place | None] = []
    ordered = [(i, p) for i, p in carrying if not p.free] or carrying
    if ordered and any((p.outer, p.inner) != (ordered[0][1].outer, ordered[0][1].inner) for _, p in ordered):
        raise lost("coupled", op, "brings samples together in different orders")
    batch_labels = set()
    for i, place in carrying:
        label = op.labels[i][place.dim]
        role = op.role(label)
        if label < 0:
            raise lost("unknown", op, "is not known to work on samples one by one")
        if role == "statistic":
            raise lost("coupled", op, "takes statistics over the samples of the batch")
        if not any(label in labels for labels in op.labels[len(op.inputs) :]) and role != "sum":
            raise lost("coupled", op, _ANOTHER_WAY)
        if role in ("index", "whole"):
            raise lost("unknown", op, "is not known to work on samples one by one")
        summed |= role == "sum"
        batch_labels.add(label)
    if len(batch_labels) > 1:
        raise lost("coupled", op, "brings every sample together with every other")
    for position, number in enumerate(op.outputs):
        labels = op.labels[len(op.inputs) + position]
        found = growing(program, number, op)
        if found is None:
            if carrying and not summed:
                raise lost("unknown", op, "is not known to keep the samples of its operand")
            places.append(None)
            continue
        dim, slope = found
        if not carrying:
            places.append(Place(dim, 1, slope, free=True))
            continue
        if labels[dim] not in batch_labels:
            raise lost("unknown", op, "is not known to work on samples one by one")
        source = ordered[0][1]
        if source.outer * source.inner != slope:
            raise lost("unknown", op, "is not known to keep the samples of its operand")
        places.append(replace(source, dim=dim))
    if summed and op.how not in ("sum", "mean", "contract"):
        raise lost("coupled", op, _ANOTHER_WAY)
    return places, summed
