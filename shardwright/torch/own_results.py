"""What a rank gets back of a step over the samples of all ranks of the tensor axis, which have batches of their own:
the entries of its own samples, and what is of all of them."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.backends.torch.loss.read import StepReading
from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.pipeline.step_results import Returned
from shardwright.core.errors import MissingCapabilityError, PlanWarning
from shardwright.core.model.loss import Finding, ResultOfBatch, Verdict
from shardwright.torch.peers import own_entries

_OWN = "ranks of the tensor axis have batches of their own ('prescaled_batch': False)"
_UNKNOWN = ResultOfBatch(None, Verdict(finding=Finding("unknown", "the step was not read")))


@dataclass(frozen=True, slots=True)
class OwnResults:
    """The results of one step for this rank.

    Attributes:
        step: the name of the step.
        reading: of what its results are to the samples.
        samples: of each microbatch, of all ranks of the tensor axis; None: its arguments have different numbers of
            them.
        is_passed_on: whether a step of another model gets the results. What it cannot get is missing then, and no
            error before it is used.
    """

    step: str
    reading: StepReading
    samples: Sequence[int] | None
    is_passed_on: bool

    def require(self) -> None:
        """Raise MissingCapabilityError for a result that depends on the number of samples, and of which this rank's
        part cannot be told."""
        if self.is_passed_on:
            return
        for position, result in enumerate(self.reading.results or ()):
            if result.grows and self.samples is None:
                raise self._refused(position, "the arguments have different numbers of samples")
            if result.grows and result.place is None:
                raise self._refused(position, "" if result.verdict.finding is None else result.verdict.finding.reason)

    def taken(
        self, returned: Mapping[int, Returned], bound: BoundMesh
    ) -> tuple[dict[int, Returned], frozenset[int], list[int]]:
        """The results of this rank by their positions, the positions of those that are missing, and of those that are
        totals over the samples of all."""
        found: dict[int, Returned] = {}
        missing, totals = set(), []
        for position, result in returned.items():
            of_batch = self._of(position, result)
            place = of_batch.place
            if self.is_passed_on and (place is None or self.samples is None or (place.dim, place.outer) != (0, 1)):
                missing.add(position)
            elif place is not None and self.samples is not None:
                own = own_entries(result.outputs, self.samples, place, bound)
                found[position] = replace(result, outputs=own, everywhere=None, weights=None)
            else:
                found[position] = result
                totals += [position] if of_batch.adds_up else []
        return found, frozenset(missing), totals

    def say_of_totals(self, totals: Sequence[int]) -> None:
        """Warn of results that are totals over the samples of all ranks."""
        which = f"leaf {totals[0]} of its result" if len(totals) == 1 else f"leaves {totals} of its result"
        warnings.warn(
            f"the step {self.step} returns what is not known to be a mean over samples ({which}), and {_OWN}: the step "
            f"runs on the samples of all of them, and counts these too. Return what there is for each sample, of which "
            f"a rank gets its own",
            PlanWarning,
            stacklevel=5,
        )

    def _of(self, position: int, result: Returned) -> ResultOfBatch:
        """What a result is to the samples. Raises MissingCapabilityError where that is not known of a tensor of several
        entries."""
        known = self.reading.results
        if known is not None and position < len(known):
            return known[position]
        if result.outputs[0].numel() > 1 and not self.is_passed_on:
            raise self._refused(position, self.reading.hindered or "another number of results was read before")
        return _UNKNOWN

    def _refused(self, position: int, reason: str) -> MissingCapabilityError:
        return MissingCapabilityError(
            f"{_OWN}, and it cannot be told which part of leaf {position} of what the step {self.step} returns is of "
            f"this rank's samples ({reason}): return a tensor with an entry for each sample, or set "
            f"prescaled_batch=True and give these ranks the same batch"
        )
