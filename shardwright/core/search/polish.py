"""Choices of the search, polished: pipelines with few microbatches are cut anew, by the makespan of their schedule.

The search cuts by the slowest stage, which takes microseconds for each of thousands of choices. What a cut by the
makespan gains is worth its milliseconds only for the choices that may then be the answer, or are shown beside it.
"""

from collections.abc import Iterable
from dataclasses import replace

from shardwright.core.partition.partitioners import DEFAULT
from shardwright.core.search.bounds import FEW_MICROBATCHES
from shardwright.core.search.cut_bounds import Cut
from shardwright.core.search.recut import Recut
from shardwright.core.search.scoring import Draft, Scored, Scorer, Timed

MOST_MICROBATCHES = FEW_MICROBATCHES
"""The number of microbatches up to which pipelines are cut anew. Beyond it the least largest stage time decides:
filling and draining a pipeline of p stages are then at most (p - 1) / (m + p - 1) of a step, and do not differ much
from cut to cut."""
WINDOW = 0.5
"""The share of the best time by which a choice may be slower before it is cut anew, and then be the best. An even cut
may be slower by a quarter (`PRICE_OF_EVENNESS`), and one of few and unequal units by more: of the chains of
`benchmarks/few_microbatches.py` one gains 28% by its new cut."""
MOST_POLISHED = 48
"""The number of pipelines whose cuts are looked at for the answer of one search, those of the least time first: each
takes about a hundredth of a second. Those of runners-up are looked at whatever their
number."""
MOST_TRIED = 400
"""The number of new cuts whose memory is counted for a faster answer of one search, each in some thousandths of a
second; where nothing fits otherwise, all are."""
MISSED = 0.005
"""The share of a step by which the quick look at a pipeline's cuts may miss the fastest: more are looked at where that
could decide."""
LEAST_GAIN = 2e-3
"""The share of its time by which a choice must be faster under a new cut. A smaller lead is not worth less even
stages."""


class Polisher:
    """The polisher of one search's choices, with the cuts that it has looked at."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer, request = scorer, scorer.request
        # Twins' units cost a little more or less than each other's, and of cuts that are about as fast each would take
        # its own: plans for several runtimes keep the even cut, which both have.
        is_shared = len(request.runtimes) > 1
        self._is_free = request.stage_starts is None and request.partitioner == DEFAULT and not is_shared
        self._known: dict[object, Recut] = {}
        self._tried = 0

    def is_few(self, choice: Cut | Draft | Timed | Scored) -> bool:
        """Whether a choice is a pipeline with so few microbatches that it is cut anew. With a single one nothing is
        gained: it passes all units, however they are cut."""
        if isinstance(choice, Cut | Draft):
            pp, microbatches = choice.shape.degrees[0], choice.shape.microbatches
        else:
            pp, microbatches = choice.decision.pp, choice.decision.microbatches
        return self._is_free and pp > 1 and 1 < microbatches <= MOST_MICROBATCHES

    def polished(self, scored: Scored) -> Scored:
        """The choice under the fastest cut that fits, or the choice itself where that gains too little."""
        if not self.is_few(scored):
            return scored
        seconds = scored.predicted.step_time_s
        cut = self.scorer.as_cut(scored)
        return self._faster(cut, self._recut(cut), seconds, seconds * (1 - LEAST_GAIN)) or scored

    def fastest(
        self, best: Scored | None, others: Iterable[tuple[float, Cut | Draft | Timed | Scored]], within_s: float
    ) -> Scored | None:
        """The fastest of a search's choices once they are cut anew: the best, and others with the seconds that they
        cannot get below as they are cut, or do not fit in. None where none takes at most ``within_s``."""
        found = None if best is None else self.polished(best)
        few = [(seconds, number, one) for number, (seconds, one) in enumerate(others) if self.is_few(one)]
        self._tried = 0
        for seconds, _, choice in sorted(few, key=lambda one: one[:2]):
            least = within_s if found is None else found.predicted.step_time_s * (1 - LEAST_GAIN)
            if seconds > least * (1 + WINDOW) or (found is not None and self._tried >= MOST_TRIED):
                break
            cut = self.scorer.as_cut(choice)
            if self._key(cut) in self._known or len(self._known) < MOST_POLISHED:
                found = self._faster(cut, self._recut(cut), seconds, least) or found
        return found

    def _faster(self, cut: Cut, recut: Recut, seconds: float, below_s: float) -> Scored | None:
        """A choice under the fastest cut that fits, if that takes less than ``below_s``; ``seconds``: a time of the
        choice as it is cut, or one that it does not get below."""
        before_s = seconds - recut.priced_s(cut.starts)
        if before_s + float(recut.pipeline_s.min()) >= below_s * (1 + MISSED):
            return None
        recut.deepen()
        if before_s + float(recut.pipeline_s.min()) >= below_s:
            return None
        fastest = None
        for policy in cut.policies:
            for starts in recut.fastest_first(cut.shape, policy, self.scorer.bounds, below_s, before_s):
                self._tried += 1
                scored = self.scorer.scored(replace(cut, policies=(policy,), starts=starts))
                if scored is not None:
                    if scored.predicted.step_time_s < below_s:
                        fastest, below_s = scored, scored.predicted.step_time_s
                    break
        return fastest

    def _recut(self, cut: Cut) -> Recut:
        key = self._key(cut)
        if key not in self._known:
            ranked = self.scorer.bounds.ranked(cut.shape, cut.policies[0].recompute)
            self._known[key] = Recut(cut.shape, cut.pipelining, ranked, cut.starts)
        return self._known[key]

    def _key(self, cut: Cut) -> object:
        """What policies share, and meshes whose ranks cost the same."""
        ranked = self.scorer.bounds.ranked(cut.shape, cut.policies[0].recompute)
        return id(ranked), cut.pipelining, cut.shape.microbatches
