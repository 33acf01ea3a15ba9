"""What a result of a step is to the samples of its batch: some entries for each of them, or something of all."""

from dataclasses import dataclass, field

from shardwright.core.model.loss.places import LostError, growing
from shardwright.core.model.loss.program import LossOp, LossProgram, Shape
from shardwright.core.model.loss.values import Place
from shardwright.core.model.loss.verdict import Finding, Verdict


@dataclass(frozen=True, slots=True)
class ResultOfBatch:
    """What one value that a step returns is to the samples of its batch.

    Attributes:
        place: of the samples, each of which has entries of its own; None: it is something of all samples.
        verdict: how something of all samples follows from them. Its finding says too why a value whose size depends on
            the batch has no place.
        grows: whether its size depends on the batch.
    """

    place: Place | None
    verdict: Verdict = field(default_factory=Verdict)
    grows: bool = False

    @property
    def adds_up(self) -> bool:
        """Whether it is something of all samples, and is not known to be a mean over them or to be the same for every
        batch."""
        if self.place is not None:
            return False
        return self.verdict.finding is not None or not all(one.is_normalized for one in self.verdict.combinations)


def place_by_shape(small: Shape, large: Shape, sizes: tuple[int, int]) -> tuple[Place | None, Finding | None]:
    """The place of the samples in a value of these shapes at two batch sizes, if each has so many entries one after the
    other; None where no dim grows with the batch, and the reason why it is not told."""
    program = LossProgram(sizes, {0: (small, large)}, {}, ())
    try:
        found = growing(program, 0, LossOp("fill", "the step", (), (0,)))
    except LostError as error:
        return None, error.finding
    return (None, None) if found is None else (Place(found[0], 1, found[1]), None)
