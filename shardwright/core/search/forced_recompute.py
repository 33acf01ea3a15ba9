"""The recomputation that memory forces, before there is a cut: of units that are alike, shared out among the ranks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.core.tables.least_counted import least_counted_bytes
from shardwright.core.tables.memory_request import MemoryRequest
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
    whole: UnitTable,
    ranked: RankTables,
    live: Sequence[int],
    held: int,
    state: tuple[float, float],
    request: MemoryRequest,
) -> Forced:
    """The least that a pipeline takes whose ranks keep no more units than cuts have room for
    (`RankTables.kept_units`).

    A rank with n units that are alike keeps k of them at most, and takes n·(t + a) - k·a seconds: t is a unit's time, a
    that of computing it again. Stages keep units in turns, as long as the room that the count for cuts leaves has space
    for one more of the fullest stage.

    Args:
        whole: the units that keep everything.
        ranked: the ranks, all alike, with every unit recomputed.
        live: the least number of live microbatches of one stage on every rank.
        held: the number of stages on each rank.
        state: the least bytes of a parameter at the peak, and of a trained one beside.
        request: what is asked of memory, as it is counted for cuts.
    """
    best = Forced(0.0, 0.0)
    table = ranked.tables[0]
    alike = Counter(zip(live, ranked.limits_bytes, strict=True))  # ranks of equal room are counted once
    many = np.array([*alike.values()])
    alive, limits = (np.array(each, dtype=np.float64)[:, None] for each in zip(*alike, strict=True))
    for units, added in ranked.kinds:
        elements, trained, kept, working = added
        unit = units[0]
        once, again = float(whole.seconds[unit]), float(table.again_s[unit])
        more = table.units[unit].saved_bytes - table.units[unit].entering_bytes
        if again <= 0 or more <= 0 or once <= 0:
            continue
        counts = np.arange(1.0, len(units) + 1)
        left = limits - least_counted_bytes(table, units, added, alive, held, request)
        keeps = np.minimum(np.maximum(held * np.floor(left / (alive * more)), 0.0), counts)
        seconds = counts * (once + again) - keeps * again
        # With n units in ``held`` stages, one stage has at least n / held, whose activations count.
        each = state[0] * elements + state[1] * trained + alive * kept / held
        seconds[counts * each > (limits - working) * (1 + 1e-9)] = np.inf
        found = Forced(_least_rank_s(seconds, many), again * _least_again(keeps, seconds, many))
        if found.rank_s > best.rank_s:
            best = found
    return best


Counted = NDArray[np.float64]
"""Figures of shape (ranks, units): of a rank with one unit, with two, and so on."""


def _least_rank_s(seconds: Counted, many: NDArray[np.int64]) -> float:
    """The time within which the ranks do all units: those that a rank does are as many as the entries of its row up to
    that time, as rows rise. Infinity where no cut fits."""
    count = seconds.shape[1]
    every = np.repeat(seconds, many, axis=0).ravel()
    every.partition(count - 1)
    return float(every[count - 1])


def _least_again(keeps: Counted, seconds: Counted, many: NDArray[np.int64]) -> float:
    """The number of units that are computed again at least. At whatever price of a unit in kept ones, all ranks
    together keep no more than each gains at most with any number of units, and what all units cost."""
    count = keeps.shape[1]
    counts = np.arange(1.0, count + 1)
    possible = np.isfinite(seconds)
    last = np.where(possible, counts, 0.0).max(axis=1)
    full = np.where(keeps >= counts, counts, 0.0).max(axis=1)
    ends = np.where(possible, keeps, np.inf).min(axis=1)
    falling = (full - np.minimum(full, ends)) / np.maximum(1.0, last - full)
    most = np.inf
    for price in {float(falling.min()), float(falling.max())}:
        gains = np.where(possible, keeps + price * counts, 0.0).max(axis=1)
        most = min(most, float((np.maximum(0.0, gains) * many).sum()) - price * count)
    return max(0.0, count - most)
