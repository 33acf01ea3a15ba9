"""One legal way to place an op's operands along one axis, and what follows from it.

OneFlow calls it an SBP signature (arXiv 2110.15032, section 3.1): the placement of every input, and the placements of
the outputs that local ops then give without communication.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from shardwright.core.errors import LayoutError
from shardwright.core.layout.placements import Placement, Reduction, placement_of

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
