"""One legal way to place an op's operands along one axis, and what follows from it.

OneFlow calls it an SBP signature (arXiv 2110.15032, section 3.1): the placement of every input, and the placements of
the outputs that local ops then give without communication.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

from shardwright.core.errors import LayoutError
from shardwright.core.layout.placements import Partial, Placement, Reduction, Replicate, placement_of

Need = Literal["", "offset", "combine"]
"""The need of the local op beside its shards: nothing; the offset at which its shard starts (a lookup in a shard of a
table); or a small reduction inside it (the statistics of a softmax or a normalisation along a split dim)."""

REDUCTIONS: tuple[Reduction, ...] = ("sum", "mean", "max", "min")
IDEMPOTENT: tuple[Reduction, ...] = ("mean", "max", "min")
"""The reductions of equal terms that give the term back: a replicated value is a partial one for these as it lies."""
LINEAR: tuple[Reduction, ...] = ("sum", "mean")


@dataclass(frozen=True, slots=True)
class Signature:
    """The placements of every input and every output of an op along one axis."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    need: Need = ""

    def __str__(self) -> str:
        text = f"{', '.join(map(str, self.inputs))} → {', '.join(map(str, self.outputs))}"
        return f"{text} ({self.need})" if self.need else text

    @classmethod
    def parse(cls, text: str) -> "Signature":
        """The signature of a text as `str` gives it. Raises LayoutError for any other text."""
        inputs, arrow, outputs = text.partition(" → ")
        if not arrow:
            raise LayoutError(f"{text!r} is no signature: expected placements, as 'S0, R → P'")
        need: Need = next((n for n in get_args(Need) if n and outputs.endswith(f" ({n})")), "")
        outputs = outputs.removesuffix(f" ({need})")
        return cls(_placements(inputs), _placements(outputs), need)


def _placements(text: str) -> tuple[Placement, ...]:
    return tuple(map(placement_of, text.split(", "))) if text else ()


def stands_for(given: Placement, wanted: Placement) -> bool:
    """Whether a value that lies as ``given`` already lies as ``wanted``: the same, or equal copies where an idempotent
    partial value is wanted."""
    return given == wanted or (isinstance(given, Replicate) and isinstance(wanted, Partial) and wanted.op in IDEMPOTENT)


def matching(signatures: Iterable[Signature], inputs: Sequence[Placement]) -> tuple[Signature, ...]:
    """The signatures that inputs placed like this can use as they lie."""
    return tuple(
        s for s in signatures if all(stands_for(given, wanted) for given, wanted in zip(inputs, s.inputs, strict=True))
    )


def implied_outputs(placement: Placement) -> tuple[Placement, ...]:
    """The placement, and those that it stands for."""
    if isinstance(placement, Replicate):
        return (placement, *(Partial(op) for op in IDEMPOTENT))
    return (placement,)


def commute(placements: Iterable[Placement]) -> bool:
    """Whether the partial values of one tensor along several axes may be reduced in any order: sums and means may, and
    maxima among themselves; a maximum of sums is not the sum of maxima, so a tensor never holds both."""
    ops = {p.op for p in placements if isinstance(p, Partial)}
    return ops <= {"sum", "mean"} or len(ops) == 1


def joint(per_axis: Sequence[Sequence[Signature]]) -> tuple[tuple[Signature, ...], ...]:
    """The joint signatures for all axes of a mesh, one signature for each axis: all choices whose operands hold no
    mixed partial values.

    Axes are independent otherwise: the shards of one axis compute the op again, on smaller operands. Whether dims that
    several axes split divide is for the caller to check (`core.rules.legal_signatures.divides`).
    """
    found = []
    for chosen in product(*per_axis):
        operands = zip(*((*s.inputs, *s.outputs) for s in chosen), strict=True)
        if all(commute(places) for places in operands):
            found.append(chosen)
    return tuple(found)
