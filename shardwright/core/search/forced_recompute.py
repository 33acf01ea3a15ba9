"""The recomputation that memory forces, before there is a cut: of units that are alike, shared out among the ranks."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.core.tables.least_counted import least_counted_bytes
from shardwright.core.tables.memory_request import MemoryRequest
from shardwright.core.tables.rank_tables import RankTables
from shardwright.core.tables.unit_table import UnitTable


class Forced(NamedTuple):
    """Seconds of one microbatch that no cut gets below."""

    rank_s: float
    """The time of the slowest rank with the units that are alike."""
    again_s: float
    """The recomputation of all ranks together."""


class Way(NamedTuple):
    """A way to divide the work of a pipeline."""

    live: tuple[int, ...]
    """The least number of live microbatches of one stage on every rank."""
    held: int
    """The number of stages on each rank."""
    state: tuple[float, float]
    """The least bytes of a parameter at the peak, and of a trained one beside."""


def forced(whole: UnitTable, ranked: RankTables, ways: Sequence[Way], request: MemoryRequest) -> list[Forced]:
    """The least that a pipeline takes, in each of some ways, whose ranks keep no more units than cuts have room for
    (`RankTables.kept_units`).

    A rank with n units that are alike keeps k of them at most, and takes n·(t + a) - k·a seconds: t is a unit's time, a
    that of computing it again. Stages keep units in turns, as long as the room that the count for cuts leaves has space
    for one more of the fullest stage.

    Args:
        whole: the units that keep everything.
        ranked: the ranks, all alike, with every unit recomputed.
        ways: of as many ranks; they are counted together, as a search asks for many.
        request: what is asked of memory, as it is counted for cuts.
    """
    best = [Forced(0.0, 0.0)] * len(ways)
    table = ranked.tables[0]
    # Arrays are of shape (ways, ranks, units).
    alive = np.array([way.live for way in ways], dtype=np.float64)[:, :, None]
    held = np.array([way.held for way in ways], dtype=np.float64)[:, None, None]
    state = np.array([way.state for way in ways], dtype=np.float64)[:, :, None, None]
    limits = np.array(ranked.limits_bytes, dtype=np.float64)[:, None]
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
        # With n units in some stages, one stage has at least n / stages, whose activations count.
        each = state[:, 0] * elements + state[:, 1] * trained + alive * kept / held
        seconds[counts * each > (limits - working) * (1 + 1e-9)] = np.inf
        rank_s, computed = _least_rank_s(seconds), _least_again(keeps, seconds)
        found = [Forced(*pair) for pair in zip(rank_s.tolist(), (again * computed).tolist(), strict=True)]
        best = [max(pair, key=lambda one: one.rank_s) for pair in zip(best, found, strict=True)]
    return best


Counted = NDArray[np.float64]
"""Figures of shape (ways, ranks, units): of a rank with one unit, with two, and so on."""


def _least_rank_s(seconds: Counted) -> Counted:
    """The time within which the ranks do all units, in each way: those that a rank does are as many as the entries of
    its row up to that time, as rows rise. Infinity where no cut fits."""
    ways, _, count = seconds.shape
    every = seconds.reshape(ways, -1)
    found: Counted = np.partition(every, count - 1, axis=1)[:, count - 1]
    return found


def _least_again(keeps: Counted, seconds: Counted) -> Counted:
    """The number of units that are computed again at least, in each way. At whatever price of a unit in kept ones, all
    ranks together keep no more than each gains at most with any number of units, and what all units cost."""
    count = keeps.shape[2]
    counts = np.arange(1.0, count + 1)
    possible = np.isfinite(seconds)
    last = possible.sum(axis=2)
    full = (keeps >= counts).sum(axis=2)
    ends = np.where(possible, keeps, np.inf).min(axis=2)
    falling = (full - np.minimum(full, ends)) / np.maximum(1.0, last - full)
    most = np.full(len(keeps), np.inf)
    for price in (falling.min(axis=1), falling.max(axis=1)):
        gains = np.where(possible, keeps + price[:, None, None] * counts, 0.0).max(axis=2)
        most = np.minimum(most, gains.sum(axis=1) - price * count)
    found: Counted = np.maximum(0.0, count - most)
    return found
