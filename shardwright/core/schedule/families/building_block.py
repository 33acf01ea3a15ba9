"""Schedules from a building block: one microbatch's passes in fixed slots, repeated, then squeezed.

The method is that of Qi et al., arXiv 2405.15362, sections 3 and 4. A block fixes when each rank runs its two forwards
and its two input gradients of a microbatch; every microbatch repeats it six slots later (two forwards, two input
gradients and two weight gradients fill six slots), and weight gradients go into the slots left over. The time for which
a block holds its activations sets the memory. Squeezing then moves passes into earlier free slots where that leaves the
peak as it is.
"""

from collections.abc import Sequence

from shardwright.core.schedule.actions import Action, F, I, Kind, W, cell
from shardwright.core.schedule.family import Sizes, Table
from shardwright.core.schedule.peak_memory import peak_live

PERIOD = 6
Block = Sequence[tuple[int, int, int, int]]
"""The slots of each rank: F on the way down, F on the way up, I on the way up, I on the way down."""
Cells = dict[int, Action]
"""The actions of one rank by slot."""


def repeat(block: Block, sizes: Sizes) -> Table:
    """The schedule of a block with two stages per rank, down and back up."""
    last = sizes.stages - 1
    ranks = []
    for rank, (down_f, up_f, up_i, down_i) in enumerate(block):
        passes = ((down_f, rank, F), (up_f, last - rank, F), (up_i, last - rank, I), (down_i, rank, I))
        batches = range(sizes.microbatches)
        ranks.append({slot + PERIOD * mb: cell(stage, kind, mb) for slot, stage, kind in passes for mb in batches})
    filled = [fill(cells) for cells in ranks]
    limit = max(peak_live([cells[slot] for slot in sorted(cells)]) for cells in filled)
    squeezed = _squeeze(filled, limit, last)
    bare = [{slot: action for slot, action in cells.items() if action.kind is not W} for cells in squeezed]
    tail = max(slot for slot, action in bare[0].items() if action.kind is F and action.stage == 0)
    ended = [fill(cells) for cells in _squeeze_tail(bare, limit, last, tail)]
    return tuple(tuple(cells[slot] for slot in sorted(cells)) for cells in ended)


def fill(cells: Cells) -> Cells:
    """Put each weight gradient into the first free slot after its input gradient, oldest first."""
    filled = dict(cells)
    owed: list[Action] = []
    slot, end = min(cells), max(cells)
    while slot <= end or owed:
        action = cells.get(slot)
        if action is None and owed:
            done = owed.pop(0)
            filled[slot] = cell(done.stage, W, done.microbatch)
        elif action is not None and action.kind is I:
            owed.append(action)
        slot += 1
    return filled


def _needs(action: Action, last: int) -> tuple[int, Kind, int | None] | None:
    """The action that must be done before another, as its stage, kind and microbatch; None where there is none."""
    stage, mb = action.stage, action.microbatch
    if action.kind is F:
        return (stage - 1, F, mb) if stage else None
    if action.kind is I:
        return (stage, F, mb) if stage == last else (stage + 1, I, mb)
    return (stage, I, mb)


def _by_slot(ranks: Sequence[Cells]) -> list[tuple[int, int]]:
    return sorted((slot, rank) for rank, cells in enumerate(ranks) for slot in cells)


def _squeeze(ranks: Sequence[Cells], limit: int, last: int) -> list[Cells]:
    """Move every cell, in the order of slots, to the first free slot after what it needs that keeps the limit."""
    end = max(max(cells) for cells in ranks) + 2
    live = []
    for cells in ranks:
        held, row = 0, []
        for slot in range(end):
            action = cells.get(slot)
            held += action is not None and action.kind is F
            row.append(held)
            held -= action is not None and action.kind is W
        live.append(row)
    now = [dict(cells) for cells in ranks]
    at: dict[tuple[int, Kind, int | None], int] = {}
    for slot, rank in _by_slot(ranks):
        action, row = ranks[rank][slot], live[rank]
        needs = _needs(action, last)
        first = at[needs] + 1 if needs else 0
        if action.kind is F:
            # A forward moved up holds its activation in all the slots between: none of them may be full.
            full = next((s for s in range(slot - 1, first - 1, -1) if row[s] >= limit), first - 1)
            first = full + 1
        goal = next((s for s in range(first, slot) if s not in now[rank]), slot)
        if goal != slot:
            now[rank][goal] = now[rank].pop(slot)
        if action.kind is F:
            row[goal:slot] = [held + 1 for held in row[goal:slot]]
        elif action.kind is W:
            row[goal + 1 : slot + 1] = [held - 1 for held in row[goal + 1 : slot + 1]]
        at[(action.stage, action.kind, action.microbatch)] = goal
    return now


def _squeeze_tail(ranks: Sequence[Cells], limit: int, last: int, tail: int) -> list[Cells]:
    """Let forwards and input gradients displace weight gradients once no microbatch enters any more."""
    now = [dict(cells) for cells in ranks]
    last_forward = [max(slot for slot, action in cells.items() if action.kind is F) for cells in ranks]
    before = [_state(cells, tail) for cells in ranks]
    windows = [{slot: action for slot, action in cells.items() if slot >= tail} for cells in now]
    at: dict[tuple[int, Kind, int | None], int] = {}
    for slot, rank in _by_slot(ranks):
        action = ranks[rank][slot]
        goal = slot
        if slot > tail:
            needs = _needs(action, last)
            for early in range(max(at[needs] + 1 if needs else 0, tail), slot):
                if early in windows[rank]:
                    continue
                moved = dict(windows[rank])
                moved[early] = moved.pop(slot)
                if early > last_forward[rank] or _tail_peak(moved, *before[rank], tail) <= limit:
                    goal = early
                    windows[rank] = moved
                    now[rank][goal] = now[rank].pop(slot)
                    break
        at[(action.stage, action.kind, action.microbatch)] = goal
    return now


def _state(cells: Cells, until: int) -> tuple[int, int]:
    """The number of activations held, and that of weight gradients owed, when a slot begins."""
    live = owed = 0
    for slot in range(min(cells), until):
        live, owed = _after(cells.get(slot), live, owed)
    return live, owed


def _tail_peak(cells: Cells, live: int, owed: int, tail: int) -> int:
    """The most activations held from a slot on, with weight gradients in the free slots."""
    most = live
    for slot in range(tail, max(cells) + 1):
        live, owed = _after(cells.get(slot), live, owed)
        most = max(most, live)
    return most


def _after(action: Action | None, live: int, owed: int) -> tuple[int, int]:
    """The numbers of activations held and of weight gradients owed after a slot. A free slot takes a weight gradient
    that is owed."""
    if action is None:
        return live - (owed > 0), owed - (owed > 0)
    return live + (action.kind is F), owed + (action.kind is I)
