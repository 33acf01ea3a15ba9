"""The problem that `auto` solves: stages with times on ranks with memory, as plain arrays, and bounds on every answer.

Microbatches are alike, so each stage may take them in order: whatever runs k-th may be called microbatch k, and what it
needs has then run k times too. A rank's order is thus a word over its stages and kinds; the microbatches follow.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule.actions import Action, B, F, I, Kind, W
from shardwright.core.schedule.costs import StageCosts
from shardwright.core.schedule.family import Table

Word = list[int]
"""The order of one rank: 3 * stage + kind, where kind is 0 for F, 1 for I and 2 for W."""
KINDS = (F, I, W)


@dataclass(frozen=True, slots=True)
class Problem:
    """Times in seconds per stage (per boundary for transfers), memory in bytes per stage and per rank."""

    ranks: int
    microbatches: int
    placement: tuple[int, ...]
    forward_s: tuple[float, ...]
    input_grad_s: tuple[float, ...]
    weight_grad_s: tuple[float, ...]
    transfer_s: tuple[float, ...]
    activation_bytes: tuple[int, ...]
    limit_bytes: tuple[float, ...]
    freed_by_input_grad_bytes: tuple[int, ...]

    @classmethod
    def of(
        cls, placement: tuple[int, ...], microbatches: int, costs: StageCosts, limits: Sequence[int] | None
    ) -> "Problem":
        """The problem of some costs on a placement; without limits, memory is no bound.

        Raises:
            ScheduleError: a limit does not hold even one microbatch; says the least that does.
        """
        ranks = max(placement) + 1
        transfer = tuple(
            0.0 if placement[s] == placement[s + 1] else costs.transfer_s[s] for s in range(len(placement) - 1)
        )
        problem = cls(
            ranks,
            microbatches,
            placement,
            costs.forward_s,
            costs.input_grad_s,
            costs.weight_grad_s,
            transfer,
            costs.activation_bytes,
            tuple(limits) if limits is not None else (float("inf"),) * ranks,
            costs.freed_by_input_grad_bytes or (0,) * len(placement),
        )
        for rank, (least, limit) in enumerate(zip(problem.least_bytes(), problem.limit_bytes, strict=True)):
            if limit < least:
                raise ScheduleError(
                    f"memory_limit_bytes={limit} on rank {rank} is met by no schedule: before its last stage can go "
                    f"backward, one microbatch is held on all stages of the rank; the least is {least}"
                )
        return problem

    @property
    def stages(self) -> int:
        return len(self.placement)

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage in range(self.stages) if self.placement[stage] == rank]

    def least_bytes(self) -> list[int]:
        """The bytes that one microbatch takes on each rank. Every schedule needs that, and one microbatch at a time
        needs no more."""
        least = [0] * self.ranks
        for stage, rank in enumerate(self.placement):
            least[rank] += self.activation_bytes[stage]
        return least

    def held_changes(self) -> list[int]:
        """The bytes by which each letter changes the activations that its rank holds: forwards as they begin, gradients
        as they end. The rule is that of `core.schedule.peak_memory.walk_activations`."""
        found: list[int] = []
        for size, freed in zip(self.activation_bytes, self.freed_by_input_grad_bytes, strict=True):
            found += [size, -freed, freed - size]
        return found

    def lower_bound_s(self) -> float:
        """A makespan that no schedule beats.

        A rank can start no earlier than its first stage's input arrives, and has all its work to do. With one stage per
        rank there is more: until the first gradient is back, the rank can run only as many forwards as its memory
        holds; and when its last input gradient is done, at most so many weight gradients are left to it while the
        stages above still wait for theirs.
        """
        f, i, w, move, m = self.forward_s, self.input_grad_s, self.weight_grad_s, self.transfer_s, self.microbatches
        stages = self.stages
        arrive = [0.0] * stages
        for s in range(1, stages):
            arrive[s] = arrive[s - 1] + f[s - 1] + move[s - 1]
        back = [0.0] * stages  # From the end of the last stage's forward to the start of a stage's input gradient.
        for s in range(stages - 2, -1, -1):
            back[s] = back[s + 1] + i[s + 1] + move[s]
        leave = [0.0] * stages  # From the end of a stage's last input gradient to the end of everything.
        leave[0] = w[0]
        for s in range(1, stages):
            leave[s] = move[s - 1] + i[s - 1] + leave[s - 1]
        best = arrive[-1] + f[-1] + back[0] + i[0] + w[0]
        for rank in range(self.ranks):
            held = self.stages_of(rank)
            first = held[0]
            work = m * sum(f[s] + i[s] + w[s] for s in held)
            if len(held) > 1:
                best = max(best, arrive[first] + work)
                continue
            room = owed = m
            limit, size = self.limit_bytes[rank], self.activation_bytes[first]
            if size:
                room = int(min(m, limit // size))
            # The last input gradient holds all of its own activations, and of the others what is owed to weights.
            if put_off := size - self.freed_by_input_grad_bytes[first]:
                owed = int(min(m, (limit - size) // put_off + 1))
            trip = arrive[-1] + f[-1] + back[first] - arrive[first]
            idle = max(0.0, trip - room * f[first])
            best = max(best, arrive[first] + work + idle)
            best = max(best, arrive[first] + work + idle - owed * w[first] + leave[first])
        return best

    def table(self, words: Sequence[Word]) -> Table:
        """The actions of words, for each rank."""
        rows = []
        for word in words:
            count: dict[int, int] = {}
            row = []
            for code in word:
                mb = count.get(code, 0)
                count[code] = mb + 1
                row.append(Action(code // 3, KINDS[code % 3], mb))
            rows.append(tuple(row))
        return tuple(rows)

    def words(self, table: Table) -> list[Word]:
        """The words of a table's actions, whole backwards split and overlapped pairs one after the other."""
        kinds: dict[Kind, tuple[int, ...]] = {F: (0,), I: (1,), W: (2,), B: (1, 2)}
        return [
            [3 * part.stage + kind for action in order for part in action.flat for kind in kinds[part.kind]]
            for order in table
        ]
