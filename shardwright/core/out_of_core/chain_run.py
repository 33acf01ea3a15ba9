"""One forward and one backward of a chain of labelled blocks, on three resources: compute, the link to the host, and
the link back.

Passes run in order. A block's activations leave as soon as its forward is done, and come back in the order of the
backward, as early as there is room beside all that earlier backwards will still need: so that none ever waits for one
behind it. Nothing runs that does not fit. On CPUs, where copies take the device's own time, a pass takes longer by the
copies of its block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardwright.core.out_of_core.blocks import Block, Label

Lane = Literal["compute", "out", "in"]


@dataclass(frozen=True, slots=True)
class Span:
    """A pass or a copy of one block. ``what``: F, B, R (forward again), or S for a copy."""

    lane: Lane
    what: str
    block: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class ChainRun:
    """When everything ran, and the most bytes at once."""

    makespan_s: float
    peak_bytes: int
    spans: tuple[Span, ...]


def run_chain(
    blocks: Sequence[Block], labels: Sequence[Label], memory_bytes: int, until_s: float = float("inf"), *,
    copies_beside: bool = True,
) -> ChainRun | None:  # fmt: skip
    """The run of a chain under a memory limit. None where it comes to a stop for want of memory, or lasts longer than
    ``until_s``. ``copies_beside``: whether copies run beside computing."""
    return _Run(blocks, labels, memory_bytes, copies_beside).run(until_s)


class _Run:
    def __init__(
        self, blocks: Sequence[Block], labels: Sequence[Label], memory_bytes: int, copies_beside: bool
    ) -> None:
        self.blocks, self.labels, self.copies_beside = blocks, labels, copies_beside
        self.free = self.least_free = memory_bytes
        self.memory_bytes = memory_bytes
        count = len(blocks)
        self.passes: list[tuple[str, int]] = [("F", i) for i in range(count)]
        for i in reversed(range(count)):
            if labels[i] == "recompute":
                self.passes.append(("R", i))
            self.passes.append(("B", i))
        self.turn = 0
        """The next pass."""
        self.coming = [i for i in reversed(range(count)) if labels[i] == "offload"]
        """The blocks to bring back, the next one first."""
        self.leaving: list[int] = []
        self.is_there = [label != "offload" for label in labels]
        """Whether what a block's backward reads is on the device, or computed again there."""
        self.has_left = [False] * count
        self.busy: dict[Lane, tuple[float, str, int]] = {}
        """What runs on each lane: until when."""
        self.spans: list[Span] = []
        # What the backwards from the last block down to this one allocate beside what is there: reserved.
        self.again = [
            of.kept_bytes - of.entering_bytes if label == "recompute" else 0
            for of, label in zip(blocks, labels, strict=True)
        ]

    def run(self, until_s: float) -> ChainRun | None:
        now = 0.0
        while self.turn < len(self.passes) or self.busy:
            self._start(now)
            if not self.busy:
                return None
            now = min(end for end, _, _ in self.busy.values())
            if now > until_s:
                return None
            for lane in [lane for lane, (end, _, _) in self.busy.items() if end <= now]:
                self._finish(lane)
        return ChainRun(now, self.memory_bytes - self.least_free, tuple(self.spans))

    def _start(self, now: float) -> None:
        if "compute" not in self.busy and self.turn < len(self.passes):
            what, block = self.passes[self.turn]
            needed = self._needed(what, block)
            if (what != "B" or self.is_there[block]) and needed <= self.free:
                self.turn += 1
                self._take(needed)
                self._run("compute", what, block, now, self._seconds(what, block))
        if "out" not in self.busy and self.leaving:
            block = self.leaving.pop(0)
            self._run("out", "S", block, now, self.blocks[block].out_s * self.copies_beside)
        if "in" not in self.busy and self.coming and self.turn >= len(self.blocks):
            block = self.coming[0]
            if self.has_left[block] and self.blocks[block].kept_bytes + self._reserved(block) <= self.free:
                self.coming.pop(0)
                self._take(self.blocks[block].kept_bytes)
                self._run("in", "S", block, now, self.blocks[block].in_s * self.copies_beside)

    def _needed(self, what: str, block: int) -> int:
        of = self.blocks[block]
        if what == "B":
            return of.passing_bytes
        kept = of.entering_bytes if what == "F" and self.labels[block] == "recompute" else of.kept_bytes
        return (self.again[block] if what == "R" else kept) + of.passing_bytes

    def _seconds(self, what: str, block: int) -> float:
        of = self.blocks[block]
        copied = self.labels[block] == "offload" and not self.copies_beside
        if what == "B":
            return of.backward_s + of.in_s * copied
        return of.forward_s + of.out_s * copied

    def _reserved(self, block: int) -> int:
        """What the passes before a block's backward have still to allocate, without what each frees in between."""
        passing = total = 0
        for what, before in self.passes[self.turn :]:
            if before < block or (before == block and what != "F"):
                break
            passing = max(passing, self.blocks[before].passing_bytes)
            total += self.again[before] if what == "R" else 0
        return total + max(passing, self.blocks[block].passing_bytes)

    def _take(self, size: int) -> None:
        self.free -= size
        self.least_free = min(self.least_free, self.free)

    def _run(self, lane: Lane, what: str, block: int, now: float, seconds: float) -> None:
        self.busy[lane] = now + seconds, what, block
        self.spans.append(Span(lane, what, block, now, now + seconds))

    def _finish(self, lane: Lane) -> None:
        _, what, block = self.busy.pop(lane)
        of = self.blocks[block]
        if lane == "compute":
            self.free += of.passing_bytes
            if what == "B":
                self.free += of.kept_bytes
            elif what == "F" and self.labels[block] == "offload":
                self.leaving.append(block)
        elif lane == "out":
            self.has_left[block] = True
            self.free += of.kept_bytes
        else:
            self.is_there[block] = True
