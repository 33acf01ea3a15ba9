"""The bytes of the halves of a split backward: what an input gradient frees, leaves to its weight gradient and holds
for a while, and what a weight gradient does. (Zero-bubble schedules, Qi et al., arXiv 2401.10241, section 2.)
"""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cost.unit_seconds import UnitCost
from shardwright.core.partition.exact import Matrix, range_sums
from shardwright.core.tables.stage_working import working_of
from shardwright.core.tables.unit_table import UnitTable
from shardwright.core.values.recompute_modes import Mode


def halves_of(table: UnitTable) -> "BackwardHalves":
    """The halves of the backwards of a rank's units, counted once."""
    found = table.halves.setdefault("found", BackwardHalves(table))
    assert isinstance(found, BackwardHalves)
    return found


class BackwardHalves:
    """The bytes of stages of units a … b-1 of one table, for one microbatch."""

    def __init__(self, table: UnitTable) -> None:
        self.table = table

    @cached_property
    def range_freed(self) -> Matrix:
        """The bytes of activations, kept for one microbatch by a stage of units a … b-1, that the input gradient of a
        split backward is the last to read: the weight gradient needs only the factors of the gradients of weights.
        Below 0 where it leaves more: the forward of recomputed units has run again by then, offloaded ones are back,
        and their factors stay as those of kept ones do. A value that arrived from another rank counts as if it
        stayed."""
        left = range_sums([self._put_off_bytes(unit) for unit in range(len(self.table.units))])
        again = range_sums([mode != "none" for mode in self.table.modes])
        arrived = np.array([0, *self.table.boundary_bytes[1:], 0])[:, None]
        with np.errstate(invalid="ignore"):  # there are no stages below the diagonal
            freed: Matrix = self.table.range_kept - left - arrived
            return freed if self._knows_put_off else np.where(again > 0, freed, np.maximum(0, freed))

    @cached_property
    def _knows_put_off(self) -> bool:
        return all(unit.put_off_bytes is not None for unit in self.table.units)

    @cached_property
    def is_known(self) -> bool:
        """Whether it is known what the halves of a split backward hold for a while."""
        return all(unit.input_grad_bytes is not None for unit in self.table.units)

    def _put_off_bytes(self, unit: int) -> int:
        """The bytes that the input gradient of a unit leaves to its weight gradient; all that is saved where they are
        not known."""
        known = self.table.units[unit].put_off_bytes
        return self.table.units[unit].saved_bytes if known is None else known

    @cached_property
    def _input_grad_bytes(self) -> NDArray[np.float64]:
        """The bytes that each unit's input gradient holds beside kept activations, with all that stays of its own for
        the weight gradient."""

        def beside(unit: UnitCost, mode: Mode, whole: float) -> float:
            known = unit.input_grad_bytes
            if known is None:
                return whole
            if mode == "offload" and not self.table.swaps_beside:
                return whole - unit.fetched_bytes + known[1]
            return whole - unit.passing_bytes + known[0]

        made = zip(self.table.units, self.table.modes, working_of(self.table).beside_bytes, strict=True)
        return np.array([beside(unit, mode, float(whole)) for unit, mode, whole in made])

    @cached_property
    def range_input_grad_working(self) -> Matrix:
        """As `range_working`, of the input gradient of a split backward: the units behind the one at hand have left
        what their weight gradients need."""
        end = len(self.table.units)
        left = np.cumsum([0, *(self._put_off_bytes(unit) for unit in range(end))]).astype(np.float64)
        in_order = np.tri(end, dtype=bool).T
        # Counted from what all units before a unit leave, so that the fullest unit of a stage is one running maximum.
        last = np.where(in_order, self.table.range_kept[:-1, 1:] + self._input_grad_bytes - left[1:], -np.inf)
        before = np.full_like(last, -np.inf)
        before[:, 1:] = np.maximum.accumulate(last, axis=1)[:, :-1]
        if self.table.given_stay:
            before += np.array([*self.table.boundary_bytes[1:], 0])
            last += np.array([*(u.given_bytes for u in self.table.units[:-1]), 0])
        working: Matrix = np.zeros_like(self.table.range_kept)
        most = np.where(in_order, np.maximum(before, last) + left[1:] - self.table.range_kept[:-1, 1:], 0.0)
        working[:-1, 1:] = np.maximum(0.0, most)
        return working

    def weight_grad_passes(self, first: int, end: int) -> NDArray[np.float64]:
        """The bytes that are left to the weight gradients of a stage while each unit's run, the last unit first."""
        left = np.cumsum([self._put_off_bytes(unit) for unit in range(first, end)])
        return left + (self.table.boundary_bytes[first] if first else 0)

    def left_behind(self, first: int, end: int) -> NDArray[np.float64]:
        """The bytes that the input gradient of each unit of a stage finds left to weight gradients by the units behind
        it, and those that its own adds to what a whole backward holds."""
        left = np.cumsum([self._put_off_bytes(unit) for unit in range(first, end)])
        own = self._input_grad_bytes[first:end] - working_of(self.table).beside_bytes[first:end]
        found: NDArray[np.float64] = left[-1] - left + np.maximum(0.0, own)
        return found

    def weight_grad_working(self, first: int, end: int) -> int:
        """The most bytes that a weight gradient of a stage makes for a while."""
        return max(unit.weight_grad_bytes for unit in self.table.units[first:end])

    @cached_property
    def range_between(self) -> Matrix:
        """The bytes that the input gradient of a split backward makes for the weight gradient, of one microbatch on a
        stage of units a … b-1: what each unit makes, and the gradients that go from unit to unit. The first stage has
        no input gradient."""
        found = range_sums([unit.between_bytes for unit in self.table.units])
        if not self.table.operands_stay:
            return np.zeros_like(found)
        found[:, 1:] += np.maximum(
            0, range_sums(self.table.boundary_bytes)[:, 1:] - np.array([*self.table.boundary_bytes, 0])[:, None]
        )
        found[0] = 0
        return found
