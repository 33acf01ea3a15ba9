"""What becomes of the activations of all units of a stage, chosen together: kept, recomputed or offloaded.

The labels are those with the shortest timeline of passes and copies (`core.out_of_core`), for a budget that is taken
down until plans, which count more than the timeline knows, count no more than there is. Of few units each label is then
tried for itself, by what plans count.
"""

from collections.abc import Callable, Sequence

from shardwright.core.errors import ShardwrightError
from shardwright.core.out_of_core.blocks import LABELS, Block, Label
from shardwright.core.out_of_core.labels import EXACT, best_labels
from shardwright.core.plan.decision import Decision
from shardwright.core.tables.memory import MemoryUse
from shardwright.core.tables.rank_tables import RankTables
from shardwright.core.tables.unit_table import UnitTable

TRIES = 12
"""The number of budgets with which labels are looked for, each smaller by what those before lacked."""
SAME = 1e-9
"""The relative difference below which times are equal."""

Memory = Callable[[Decision, RankTables, Sequence[int]], tuple[MemoryUse, ...]]
"""A function for the memory of the ranks, from a decision, the unit costs and the live microbatches of each rank."""
Kept = tuple[RankTables, tuple[int, ...], tuple[MemoryUse, ...]]
"""The unit costs with some units kept, these units, and the memory of the ranks."""
Labels = dict[int, Label]
"""The label of each unit."""


def labelled(
    decision: Decision, ranked: RankTables, live: Sequence[int], memory_of: Memory, found: Kept | None
) -> Kept | None:
    """The labels of all units of every stage, where they are faster than what was ``found``; else that. Where it is
    None, not even all units recomputed fit; None where no labels fit either.

    Several stages have few units each, or are left as they were found.
    """
    ends = ranked.ends(decision.stage_starts)
    if len(ends) > 1 and max(b - a for a, b in ends) > EXACT:
        return found
    search = _Labels(decision, ranked, live, memory_of)
    best = search.fastest() or (search.smallest() if found is None else None)
    if best is None or (found is not None and search.seconds(best) >= search.seconds(found) * (1 - SAME)):
        return found
    return best


class _Labels:
    """The search for the labels of one decision."""

    def __init__(self, decision: Decision, ranked: RankTables, live: Sequence[int], memory_of: Memory) -> None:
        self.decision, self.ranked, self.live, self.memory_of = decision, ranked, live, memory_of
        ends = zip(ranked.ends(decision.stage_starts), decision.stage_ranks, strict=True)
        last = ranked.units - 1  # its backward follows its forward at once
        self.stages = [
            (rank, [u for u in range(a, b) if (u < last or table.recomputable[u]) and table.units[u].saved_bytes])
            for (a, b), rank in ends
            for table in [ranked.tables[rank]]
        ]
        self.units = [unit for _, units in self.stages for unit in units]
        self.may_recompute = ranked.tables[0].recomputable

    def seconds(self, choice: Kept) -> float:
        """The time of the slowest rank for one microbatch."""
        return max(work.seconds for work in choice[0].work(self.decision.stage_starts, self.decision.stage_ranks))

    def fastest(self) -> Kept | None:
        """The fastest labels that fit; None where the timeline has none."""
        room = [float(sum(self._table(rank).units[u].saved_bytes for u in units)) for rank, units in self.stages]
        for _ in range(TRIES):
            labels: Labels = {}
            for (rank, units), left in zip(self.stages, room, strict=True):
                own = _by_timeline(self._table(rank), units, left)
                if own is None:
                    return None
                labels |= own
            choice, over = self._tried(labels)
            if max(over) <= 0:
                return self._changed(choice, labels)
            lacks = [max(0, over[rank]) / self.live[rank] for rank, _ in self.stages]
            room = [left - less for left, less in zip(room, lacks, strict=True)]
        return None

    def smallest(self) -> Kept | None:
        """The first of the labels that take little memory and fit: all offloaded, or recomputed as far as may be."""
        for other in LABELS[1::-1]:
            again: Labels = {unit: "recompute" if self.may_recompute[unit] else other for unit in self.units}
            for labels in (dict.fromkeys(self.units, LABELS[1]), again):
                choice, over = self._tried(labels)
                if max(over) <= 0:
                    return self._changed(choice, labels)
        return None

    def _table(self, rank: int) -> UnitTable:
        return self.ranked.tables[rank]

    def _tried(self, labels: Labels) -> tuple[Kept, list[int]]:
        """The choice, and the bytes by which each rank has too little."""
        kept = tuple(sorted(unit for unit, label in labels.items() if label == "keep"))
        tables = self.ranked.keeping(kept, [unit for unit, label in labels.items() if label == "offload"])
        use = self.memory_of(self.decision, tables, self.live)
        return (tables, kept, use), self.ranked.over_by_rank(use)

    def _changed(self, choice: Kept, labels: Labels) -> Kept:
        """The choice with other labels of single units, where units are few and that is faster."""
        for unit in reversed(self.units) if len(self.units) <= EXACT else ():
            for label in LABELS:
                if label == labels[unit] or (label == "recompute" and not self.may_recompute[unit]):
                    continue
                other, over = self._tried(labels | {unit: label})
                if max(over) <= 0 and self.seconds(other) < self.seconds(choice) * (1 - SAME):
                    choice, labels = other, labels | {unit: label}
        return choice


def _by_timeline(table: UnitTable, units: Sequence[int], room: float) -> Labels | None:
    """The labels of some units of one stage, with ``room`` bytes for the activations of one microbatch beside those of
    units on their way; None where none fit. Units that are not recomputed in full are kept or offloaded."""
    if not units:
        return {}
    costs = [table.units[unit] for unit in units]
    seconds = [cost.saved_bytes / table.host_bytes_per_s for cost in costs]
    blocks = [
        Block(
            cost.forward_s, cost.input_grad_s + cost.weight_grad_s, copy_s, copy_s, cost.saved_bytes,
            min(cost.entering_bytes, cost.saved_bytes), may_recompute=table.recomputable[unit],
        )
        for unit, cost, copy_s in zip(units, costs, seconds, strict=True)
    ]  # fmt: skip
    on_the_way = (1 + table.loading_horizon * table.swaps_beside) * max(cost.saved_bytes for cost in costs)
    try:
        found = best_labels(blocks, int(room + on_the_way), copies_beside=table.swaps_beside)
    except ShardwrightError:  # not even the largest fits
        return None
    return None if found is None else dict(zip(units, found.labels, strict=True))
