"""The labels of a chain's blocks under which one forward and backward ends first, within a memory limit.

KARMA (arXiv 2008.11421, section 3) finds blocks and labels by a two-tier optimisation with a model of overlap; here
the timeline itself is what is minimised (`chain_run`). Up to `EXACT` blocks every labelling is either run or ruled out
by a bound. Beyond, the best of patterns and of single changes to them is taken, and a lower bound says how far from the
optimum it can be.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.core.out_of_core.blocks import LABELS, Block, Label, require_room
from shardwright.core.out_of_core.chain_run import ChainRun, run_chain

EXACT = 12
"""The number of blocks up to which the labels found are the best."""
SAME = 1e-9
"""Times that differ by less, as a share, are the same."""
SHARES = 16
"""The steps in which patterns take shares of the blocks."""
PASSES_OF_CHANGES = 3
"""How often changes to every block are tried, beyond `EXACT`."""


@dataclass(frozen=True, slots=True)
class Labelling:
    """The labels of a chain, how it runs with them, and a time that no labels can be below."""

    labels: tuple[Label, ...]
    run: ChainRun
    bound_s: float

    @property
    def is_best(self) -> bool:
        """Whether no other labels are faster."""
        return self.run.makespan_s <= self.bound_s * (1 + SAME)


def best_labels(
    blocks: Sequence[Block], memory_bytes: int, *, may_offload: bool = True, copies_beside: bool = True
) -> Labelling | None:
    """The labels with the shortest makespan; of equally short ones, those that keep most, then recompute least. None
    where no labels fit. ``copies_beside``: whether copies run beside computing, as not on CPUs.

    Raises:
        ShardwrightError: no blocks were given, or one alone does not fit.
    """
    require_room(blocks, memory_bytes)
    search = _Search(blocks, memory_bytes, LABELS if may_offload else ("keep", "recompute"), copies_beside)
    for labels in search.patterns():
        search.try_labels(labels)
    if len(blocks) > EXACT:
        search.change_single_labels()
        return search.found(search.least_s())
    search.every()
    return search.found(None)


class _Search:
    def __init__(
        self, blocks: Sequence[Block], memory_bytes: int, labels: tuple[Label, ...], copies_beside: bool = True
    ) -> None:
        self.blocks, self.memory_bytes, self.labels, self.copies_beside = blocks, memory_bytes, labels, copies_beside
        self.best: tuple[ChainRun, tuple[Label, ...]] | None = None
        self._tried: set[tuple[Label, ...]] = set()
        self.computing_s = sum(b.forward_s + b.backward_s for b in blocks)

    def found(self, bound_s: float | None) -> Labelling | None:
        if self.best is None:
            return None
        run, labels = self.best
        return Labelling(labels, run, run.makespan_s if bound_s is None else min(bound_s, run.makespan_s))

    def _labels_of(self, block: int) -> tuple[Label, ...]:
        """The labels that a block may have."""
        return self.labels if self.blocks[block].may_recompute else tuple(x for x in self.labels if x != "recompute")

    def try_labels(self, labels: tuple[Label, ...]) -> bool:
        """Whether labels are better than the best so far. A block that may not be computed again is offloaded."""
        instead: Label = "offload" if "offload" in self.labels else "keep"
        labels = tuple(
            instead if label == "recompute" and not block.may_recompute else label
            for label, block in zip(labels, self.blocks, strict=True)
        )
        if labels in self._tried:
            return False
        self._tried.add(labels)
        until = float("inf") if self.best is None else self.best[0].makespan_s * (1 + SAME)
        run = run_chain(self.blocks, labels, self.memory_bytes, until, copies_beside=self.copies_beside)
        if run is None or (self.best is not None and not self._is_better(run, labels)):
            return False
        self.best = run, labels
        return True

    def _is_better(self, run: ChainRun, labels: tuple[Label, ...]) -> bool:
        assert self.best is not None
        before, others = self.best
        if run.makespan_s < before.makespan_s * (1 - SAME):
            return True
        return _plainness(labels) < _plainness(others)

    # Patterns ----------------------------------------------------------------------------------------------------

    def patterns(self) -> Iterator[tuple[Label, ...]]:
        """All of one label; the last blocks kept; and of those before them a share, evenly spread, recomputed."""
        count = len(self.blocks)
        kept = sorted({round(count * share / SHARES) for share in range(SHARES + 1)})
        for staying in reversed(kept):
            before = count - staying
            for again in sorted({round(before * share / SHARES) for share in range(SHARES + 1)}):
                if "offload" not in self.labels and again < before:
                    continue
                spread: list[Label] = [
                    "recompute" if (i + 1) * again // before > i * again // before else "offload" for i in range(before)
                ]
                behind: list[Label] = ["keep"] * staying
                yield (*spread, *behind)
                if 0 < again < before:
                    yield (*spread[::-1], *behind)

    def change_single_labels(self) -> None:
        """Change the labels of single blocks, and swap those of two neighbours, as long as that helps."""
        for _ in range(PASSES_OF_CHANGES):
            helped = False
            for i in reversed(range(len(self.blocks))):
                if self.best is None:
                    return
                labels = self.best[1]
                for label in self._labels_of(i):
                    helped |= self.try_labels((*labels[:i], label, *labels[i + 1 :]))
                if i:
                    labels = self.best[1]
                    helped |= self.try_labels((*labels[: i - 1], labels[i], labels[i - 1], *labels[i + 1 :]))
            if not helped:
                return

    # Every labelling ---------------------------------------------------------------------------------------------

    def every(self) -> None:
        """Run every labelling that no bound rules out, labelled from the last block to the first."""
        self._label((), 0, 0.0, 0.0)

    def _label(self, behind: tuple[Label, ...], left_bytes: int, again_s: float, travelling_s: float) -> None:
        """``behind``: the labels of the last blocks; what these leave on the device, their seconds of recomputation and
        of copies back."""
        if self.best is not None and self._bound_s(again_s, travelling_s) > self.best[0].makespan_s * (1 + SAME):
            return
        block = len(self.blocks) - len(behind) - 1
        if block < 0:
            self.try_labels(behind)
            return
        of = self.blocks[block]
        for label in self._labels_of(block):
            left = left_bytes + of.left_bytes(label)
            if left > self.memory_bytes:
                continue
            again = again_s + (of.forward_s if label == "recompute" else 0.0)
            copied = label == "offload"
            if not self.copies_beside:
                again += (of.out_s + of.in_s) * copied
            self._label((label, *behind), left, again, travelling_s + of.in_s * copied)

    def _bound_s(self, again_s: float, travelling_s: float) -> float:
        """Compute does all passes, and copies that take its time; others back begin when the last forward does."""
        forwards = sum(b.forward_s for b in self.blocks[:-1])
        return max(self.computing_s + again_s, forwards + travelling_s)

    def least_s(self) -> float:
        """A bound of every labelling's time: blocks may have labels in parts, and copies wait for nothing.

        Variables: for each block the parts kept, offloaded and recomputed (`LABELS`); the seconds of the forwards and
        of the backwards. When the last forward begins, what is kept or computed again is there.
        """
        from scipy.optimize import linprog  # which plans within the memory do without: loading it takes a while

        count = len(self.blocks)
        costs = np.zeros(3 * count + 2)
        costs[-2:] = 1.0
        forward, backward = 3 * count, 3 * count + 1
        rows, limits = [], []

        def at_least(time: tuple[int, ...], constant: float, terms: dict[int, float]) -> None:
            row = np.zeros(3 * count + 2)
            for at, value in terms.items():
                row[at] = value
            row[list(time)] = -1.0
            rows.append(row)
            limits.append(-constant)

        ahead = sum(b.forward_s for b in self.blocks)
        at_least((forward,), ahead, {})
        more = {2 * count + i: b.forward_s for i, b in enumerate(self.blocks)}
        if not self.copies_beside:
            more |= {count + i: b.out_s + b.in_s for i, b in enumerate(self.blocks)}
        at_least((backward,), self.computing_s - ahead, more)
        both = self.blocks[-1].forward_s
        at_least((backward,), -both, {count + i: b.in_s for i, b in enumerate(self.blocks)})
        held = np.zeros(3 * count + 2)
        held[:count] = [b.kept_bytes for b in self.blocks]
        held[2 * count : 3 * count] = [b.entering_bytes for b in self.blocks]
        rows.append(held)
        limits.append(self.memory_bytes)
        whole = np.zeros((count, 3 * count + 2))
        for i in range(count):
            whole[i, [i, count + i, 2 * count + i]] = 1.0
        may = [LABELS[at // count] in self._labels_of(at % count) for at in range(3 * count)]
        upper = [*((0.0, float(each)) for each in may), (0.0, None), (0.0, None)]
        found = linprog(costs, np.array(rows), np.array(limits), whole, np.ones(count), upper)
        return float(found.fun) if found.success else 0.0


def _plainness(labels: tuple[Label, ...]) -> tuple[int, int]:
    return -labels.count("keep"), labels.count("recompute")
