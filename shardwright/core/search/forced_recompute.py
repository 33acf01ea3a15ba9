"""The recomputation that memory forces, before there is a cut: of units that are alike, shared out among the ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.core.tables.rank_tables import RankTables
from shardwright.core.tables.unit_table import UnitTable


@dataclass(frozen=True, slots=True)
class Forced:
    """Seconds of one microbatch that no cut gets below."""

    rank_s: float
    """The time of the slowest rank with the units that are alike."""
    again_s: float
    """The recomputation of all ranks together."""


def forced(
    whole: UnitTable, ranked: RankTables, live: Sequence[int], held: int, held_bytes: float, trained_bytes: float
) -> Forced:
    """The least that a pipeline takes whose ranks keep no more units than memory has room for.

    A rank with n units that are alike, of which it keeps k, needs n·c + k·g ≤ L bytes and takes n·(t + a) - k·a
    seconds: t is a unit's time, a that of computing it again. With k between 0 and n, either may be any real number
    here, so that what follows is below every cut (k is eliminated after Fourier and Motzkin).

    Args:
        whole: the units that keep everything.
        ranked: the ranks, all alike, with every unit recomputed.
        live: the least number of live microbatches of one stage on every rank.
        held: the number of stages on each rank.
        held_bytes, trained_bytes: the least bytes of a parameter, and of a trained one beside.
    """
    best = Forced(0.0, 0.0)
    table = ranked.tables[0]
    for units, (elements, trained, kept, working) in ranked.kinds:
        unit = units[0]
        once, again = float(whole.seconds[unit]), float(table.again_s[unit])
        more = table.units[unit].saved_bytes - table.units[unit].entering_bytes
        if again <= 0 or more <= 0 or once <= 0:
            continue
        count, alive = len(units), np.array(live, dtype=np.float64)
        # With n units in ``held`` stages, one stage has at least n / held, whose activations count.
        room = np.maximum(0.0, np.array(ranked.limits_bytes, dtype=np.float64) - working)
        each = held_bytes * elements + trained_bytes * trained + alive * kept / held
        own = alive * more / held
        found = Forced(
            _least_rank_s(count, once, again, room, each, own), _least_again_s(count, again, room, each, own)
        )
        if found.rank_s > best.rank_s:
            best = found
    return best


Bytes = np.ndarray[tuple[int], np.dtype[np.float64]]
"""Bytes by rank."""


def _least_rank_s(count: int, once: float, again: float, room: Bytes, each: Bytes, own: Bytes) -> float:
    """The time t at which the ranks have room for all units, each within t. What a rank has room for is the least of
    three straight lines, so that of all together is straight between the times at which any two lines cross."""
    most = room / np.maximum(each, 1e-300)
    offset, slope = again * room / own, once + again + again * each / own
    high = count * (once + again)
    crossings = np.concatenate([offset * once / (slope - once), most * slope - offset, most * once])
    times = np.array([0.0, *np.unique(crossings[(crossings > 0) & (crossings < high)]), high])[:, None]
    units = np.minimum(np.minimum(times / once, (times + offset) / slope), most).sum(axis=1)
    if units[-1] < count:
        return high  # no cut fits
    at = int(np.argmax(units >= count))
    (before, after), (less, more) = times[at - 1 : at + 1, 0].tolist(), units[at - 1 : at + 1].tolist()
    return float(before + (after - before) * (count - less) / (more - less))


def _least_again_s(count: int, again: float, room: Bytes, each: Bytes, own: Bytes) -> float:
    """Every rank keeps all of so many units as it has room for; each further one takes the room of kept ones."""
    kept = float((room / (each + own)).sum())
    if kept >= count:
        return 0.0
    return again * (count - max(0.0, kept - (count - kept) * float((each / own).min())))
