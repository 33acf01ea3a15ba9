"""The event engine once more, for words: the same sums in the same order, without building a timeline."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.core.schedule.auto.problem import Problem, Word


@dataclass(frozen=True, slots=True)
class Trace:
    """One run of words. Letters are numbered over all ranks in order; `cause` is the letter that each waited for last,
    or -1."""

    makespan_s: float
    ends_s: list[float]
    cause: list[int]
    clock_s: list[float]


class Evaluator:
    """An engine for the words of one problem. What does not depend on the words is worked out once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        last, placement, move = problem.stages - 1, problem.placement, problem.transfer_s
        self.seconds: list[float] = []
        self.changes = problem.held_changes()
        # The way of what a letter makes: the letter that needs it, the link it takes (-1: none), and the seconds there.
        self.goes: list[tuple[int, int, float]] = []
        for s in range(last + 1):
            self.seconds += [problem.forward_s[s], problem.input_grad_s[s], problem.weight_grad_s[s]]
            forward, backward = (3 * s + 1, -1, 0.0), (-1, -1, 0.0)
            if s < last:
                forward = (3 * s + 3, self._way(placement[s], placement[s + 1]), move[s])
            if s:
                backward = (3 * s - 2, self._way(placement[s], placement[s - 1]), move[s - 1])
            self.goes += [forward, backward, (-1, -1, 0.0)]
        self.first = [0]
        for rank in range(problem.ranks):
            self.first.append(self.first[-1] + 3 * problem.microbatches * len(problem.stages_of(rank)))
        self.rank_of = [r for r in range(problem.ranks) for _ in range(self.first[r], self.first[r + 1])]

    def _way(self, source: int, target: int) -> int:
        return -1 if source == target else source * self.problem.ranks + target

    def run(self, words: Sequence[Sequence[int]]) -> Trace | None:
        """The run of words that hold every letter as often as there are microbatches, or None when they deadlock."""
        seconds, goes, ranks, m = self.seconds, self.goes, self.problem.ranks, self.problem.microbatches
        free, last = [0.0] * (ranks * ranks), [-1] * (ranks * ranks)
        ready: list[list[float]] = [[] for _ in goes]
        bringer: list[list[int]] = [[] for _ in goes]
        ready[0], bringer[0] = [0.0] * m, [-1] * m
        used = [0] * len(goes)
        at, clock = [0] * ranks, [0.0] * ranks
        left = self.first[-1]
        ends, cause = [0.0] * left, [-1] * left
        while left:
            before = left
            for rank in range(ranks):
                word, position, now, first = words[rank], at[rank], clock[rank], self.first[rank]
                length = len(word)
                while position < length:
                    code = word[position]
                    letter = first + position
                    if code % 3 == 2:
                        if position:
                            cause[letter] = letter - 1
                        now += seconds[code]
                    else:
                        queue, n = ready[code], used[code]
                        if n >= len(queue):
                            break
                        if queue[n] > now:
                            now = queue[n]
                            cause[letter] = bringer[code][n]
                        elif position:
                            cause[letter] = letter - 1
                        used[code] = n + 1
                        now += seconds[code]
                        to, way, travel = goes[code]
                        if way >= 0:
                            if now >= free[way]:
                                free[way], last[way] = now + travel, letter
                            else:
                                free[way] += travel
                            ready[to].append(free[way])
                            bringer[to].append(last[way])
                        elif to >= 0:
                            ready[to].append(now)
                            bringer[to].append(letter)
                    ends[letter] = now
                    position += 1
                left -= position - at[rank]
                at[rank], clock[rank] = position, now
            if left == before:
                return None
        return Trace(max(clock), ends, cause, clock)

    def makespan_s(self, words: Sequence[Sequence[int]]) -> float:
        """The makespan of words, or infinity when they deadlock."""
        trace = self.run(words)
        return float("inf") if trace is None else trace.makespan_s

    def legal(self, rank: int, word: Word) -> bool:
        """Whether a rank may run its letters in this order: F before I before W of a stage, and within its memory."""
        changes, limit = self.changes, self.problem.limit_bytes[rank]
        live, seen = 0, [0] * len(self.goes)
        for code in word:
            seen[code] += 1
            live += changes[code]
            if live > limit or (code % 3 and seen[code - 1] < seen[code]):
                return False
        return True
