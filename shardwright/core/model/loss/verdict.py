"""The findings about a loss, and their words."""

from dataclasses import dataclass
from typing import Literal

from shardwright.core.model.loss.combination import Combination

FindingKind = Literal["coupled", "mixed", "unknown"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The reason why the loss of a batch does not follow from the losses of its microbatches.

    Attributes:
        kind: "coupled": a term depends on several samples together; "mixed": its terms follow in different ways;
            "unknown": it cannot be told.
        reason: a sentence without its full stop.
    """

    kind: FindingKind
    reason: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The way in which the loss of a batch follows from those of its microbatches.

    Attributes:
        combinations: the ways in which the loss's terms add up. Several are one where they give the same shares of a
            batch at hand; see `combination.shares_of_microbatches`. None at all: the loss does not depend on the
            samples.
        constant: whether a term does not depend on the samples, such as a penalty on weights.
        finding: the reason why it cannot be said; then there are no combinations.
    """

    combinations: tuple[Combination, ...] = ()
    constant: bool = False
    finding: Finding | None = None

    @property
    def is_certain(self) -> bool:
        """Whether the gradient of a batch can be had from those of its microbatches, unless a batch at hand forbids."""
        return self.finding is None

    @property
    def needs_counts(self) -> bool:
        """Whether numbers of the batch at hand are needed, beside the number of its samples."""
        return any(c.count is not None for c in self.combinations)

    @property
    def reduction(self) -> str:
        """The name of the reduction, in a word or two."""
        if self.finding is not None:
            return {"coupled": "coupled", "mixed": "of several kinds", "unknown": "unknown"}[self.finding.kind]
        kinds = [c.reduction for c in self.combinations]
        return " and ".join(dict.fromkeys(kinds)) or "constant"
