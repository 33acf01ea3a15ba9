"""The bytes that the passes of a stage hold for a while, beside the activations that it keeps."""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cost.unit_seconds import UnitCost
from shardwright.core.partition.exact import Matrix, range_sums
from shardwright.core.tables.added_gradients import adding_bytes
from shardwright.core.tables.memory import kept_bytes, left_in_objects
from shardwright.core.tables.unit_table import UnitTable
from shardwright.core.values.recompute_modes import Mode


def working_of(table: UnitTable) -> "StageWorking":
    """What the passes over the units of a table hold for a while, counted once."""
    found = table.working.setdefault("found", StageWorking(table))
    assert isinstance(found, StageWorking)
    return found


class StageWorking:
    """The bytes of stages of units a … b-1 of one table, for one microbatch."""

    def __init__(self, table: UnitTable) -> None:
        self.table = table

    @cached_property
    def beside_bytes(self) -> NDArray[np.float64]:
        """The bytes that each unit's passes hold beside kept activations: values and gradients under way, and all that
        is recomputed, what is left in objects once more among it. Where copies run beside, an offloaded unit in use
        exists beside those on their way (`loading_horizon`); else what the op at hand keeps comes back for it."""

        def again(unit: UnitCost, mode: Mode) -> int:
            if mode == "offload" and self.table.swaps_beside:
                return (1 + self.table.loading_horizon) * unit.saved_bytes
            if mode == "offload":
                return unit.fetched_bytes - unit.passing_bytes
            again = unit.saved_bytes - kept_bytes(unit, mode) + left_in_objects(unit, mode)
            return max(0, again) if mode != "none" else 0

        beside = np.array(
            [
                unit.passing_bytes + again(unit, mode) if known is None else known
                for unit, mode, known in zip(self.table.units, self.table.modes, self._working_again, strict=True)
            ],
            dtype=np.float64,
        )
        beside += np.array(self.table.waiting_bytes or 0)
        for value, size in self.table.shared if self.table.offloaded else ():
            # On the way to a unit far behind, as over the bottom of a U-Net, where no unit between keeps it.
            if value.maker >= 0 and value.enterers and not self.table.holders(value):
                beside[value.maker + 2 : max(value.enterers) + 1] += size
        return beside

    @cached_property
    def _working_again(self) -> list[int | None]:
        """The bytes that one program holds beside kept activations where it computes a unit again, with the gradients
        that wait; None for each unit of which that is not known."""
        if not self.table.is_one_program or self.table.offloaded:
            return [None] * len(self.table.units)
        known = zip(self.table.units, self.table.modes, strict=True)
        return [
            unit.working_again_bytes[mode == "selective"]
            if unit.working_again_bytes is not None and mode in ("full", "selective")
            else None
            for unit, mode in known
        ]

    @cached_property
    def leaving_bytes(self) -> Matrix:
        """The bytes ``[a, u]`` of the last offloaded unit before unit u of a stage that begins with unit a: where
        copies run beside, it is on the device until another is sent. One that is offloaded counts that itself."""
        end = len(self.table.units)
        found: Matrix = np.zeros((end, end))
        for first in range(end) if self.table.swaps_beside and self.table.offloaded else ():
            sent = 0
            for unit in range(first, end):
                if self.table.modes[unit] == "offload":
                    sent = self.table.units[unit].saved_bytes
                else:
                    found[first, unit] = sent
        return found

    def beside_at(self, first: int, end: int) -> NDArray[np.float64]:
        """`beside_bytes` of the units of a stage, with those that are leaving."""
        found: NDArray[np.float64] = self.beside_bytes[first:end] + self.leaving_bytes[first, first:end]
        return found

    def forward_bytes(self, first: int, end: int) -> int | None:
        """The bytes that the forward of a stage holds beside kept activations; None where it is not known by itself, as
        where values pass by some unit on their way to one behind it."""
        units = self.table.units[first:end]
        if not all(unit.phases for unit in units) or any(self.table.waiting_bytes[first:end]):
            return None
        ahead = np.array([unit.forward_beside_bytes - unit.passing_bytes for unit in units])
        kept = self.table.range_kept[first, first + 1 : end + 1]
        return max(0, int((kept + self.beside_at(first, end) + ahead).max() - kept[-1]))

    def backward_again(self, first: int, end: int) -> int | None:
        """The bytes that a backward of the stage behind the first one holds beside kept activations; None where that is
        as much as the first one does, or not known by itself."""
        units = self.table.units[first:end]
        known = [unit.backward_again_bytes for unit in units]
        if all(size is None for size in known):
            return None
        less = [0 if size is None else size - unit.passing_bytes for size, unit in zip(known, units, strict=True)]
        kept = self.table.range_kept[first, first + 1 : end + 1]
        held = kept + self.beside_at(first, end) + self.given_bytes(first, end) + np.array(less)
        held = held + self.tie_sums(first, end) + self.ties_waiting(first, end)
        return max(0, int(held.max() - kept[-1]))

    @cached_property
    def range_working(self) -> Matrix:
        """The bytes that the passes of one microbatch hold beside the kept activations. The backward of a unit finds
        the units after it finished."""
        known = np.array([size is not None for size in self._working_again])
        waiting = self.table.found_bytes * np.where(known, 0, [u.trained_elements for u in self.table.units])
        if self.table.working_bytes:
            passing = np.array([u.passing_bytes for u in self.table.units])
            waiting = np.maximum(0, np.array(self.table.working_bytes) - passing)
        found = self._working(self.beside_bytes + waiting)
        return self._with_tie_sums(found, again=False)

    @cached_property
    def range_working_again(self) -> Matrix:
        """As `range_working`, for microbatches after the first: the gradient of a tied parameter's last use waits for
        those of the others, beside the gradient of the microbatches before."""
        return self._with_tie_sums(self.range_working, again=True)

    def tie_sums(self, first: int, end: int) -> NDArray[np.float64]:
        """The bytes of sums of a tied parameter's gradients beside the gradients themselves, in the backward of each
        unit of a stage that has all its uses."""
        found = np.zeros(end - first)
        for (user, last), size in self._tie_bytes.items():
            if first <= user and last < end:
                found[user - first] += size
        return found

    def ties_waiting(self, first: int, end: int) -> NDArray[np.float64]:
        """The bytes of a tied parameter's gradient that wait in the backward of each unit of a stage, from its last use
        on the stage to its first."""
        found = np.zeros(end - first)
        for tie in self.table.ties:
            here = [user for user in tie.users if first <= user < end]
            if tie.is_trained and len(here) > 1:
                found[here[0] - first : here[-1] - first] += tie.elements * self.table.tie_width
        return found

    @cached_property
    def _tie_bytes(self) -> dict[tuple[int, int], int]:
        """The bytes of the gradients of tied parameters, by their first and their last user."""
        found: dict[tuple[int, int], int] = {}
        for tie in self.table.ties:
            if tie.is_trained and self.table.tie_width:
                between = tie.users[0], tie.users[-1]
                found[between] = found.get(between, 0) + tie.elements * self.table.tie_width
        return found

    def _with_tie_sums(self, working: Matrix, *, again: bool) -> Matrix:
        units = np.arange(len(self.table.units) + 1)
        for (first, last), size in self._tie_bytes.items():
            beside = self.beside_bytes.copy()
            beside[first] += size
            if again:
                beside[first:last] += size
            has_both = (units[:, None] <= first) & (units[None, :] > last)
            working = np.where(has_both, np.maximum(working, self._working(beside)), working)
        return working

    def gathering(self, first: int, end: int, width: int) -> int:
        """The bytes that the passes of a stage hold beside kept activations where each unit's sharded parameters, of
        ``width`` bytes an entry, are whole while it runs."""
        whole = width * np.array([u.parameter_elements for u in self.table.units])
        return int(self._working(self.beside_bytes + whole)[first, end])

    @cached_property
    def _range_passing(self) -> Matrix:
        return self._working(self.beside_bytes)

    def given_bytes(self, first: int, end: int) -> NDArray[np.float64]:
        """The bytes that each unit's backward holds in addition because the gradients from the next stage stay; the
        last unit reads them itself."""
        found = np.zeros(end - first)
        if self.table.given_stay and end < len(self.table.units):
            found[:] = self.table.boundary_bytes[end]
            found[-1] = self.table.units[end - 1].given_bytes
        return found

    def _working(self, of_units: NDArray[np.float64]) -> Matrix:
        in_order, beside = np.tri(len(of_units), dtype=bool).T, of_units + self.leaving_bytes
        if self.table.operands_stay:
            fullest: Matrix = np.zeros_like(self.table.range_kept)
            fullest[:-1, 1:] = np.maximum.accumulate(np.where(in_order, beside, 0.0), axis=1)
            return fullest + range_sums([u.looped_bytes for u in self.table.units]) + self._range_scales
        last = np.where(in_order, self.table.range_kept[:-1, 1:] + beside, 0.0)
        before = np.zeros_like(last)
        before[:, 1:] = np.maximum.accumulate(last, axis=1)[:, :-1]
        if self.table.given_stay:
            before += np.where(before > 0, np.array([*self.table.boundary_bytes[1:], 0]), 0.0)
            own = np.array([*(u.given_bytes for u in self.table.units[:-1]), 0])
            last = np.where(in_order, last + own, 0.0)
        working: Matrix = np.zeros_like(self.table.range_kept)
        working[:-1, 1:] = np.maximum(0.0, np.maximum(before, last) - self.table.range_kept[:-1, 1:])
        return working

    def stage_working(self, first: int, end: int, *, summed: bool = False, again: bool = False) -> int:
        """The bytes that the passes of one of several stages hold beside kept activations, with the gradients that
        wait. Where these are ``summed`` over replicas, the largest exists twice for a while, as term and as sum. What
        one use of a tied parameter adds to its gradient waits for the others.
        ``again``: there are microbatches after the first."""
        if not self.table.found_bytes:
            return int((self.range_working_again if again else self.range_working)[first, end])
        found = self.table.found_bytes * self.table.range_trained[first, end]
        last = self.table.found_bytes * self.table.looked_up[first] if self.table.looked_up else 0
        largest = min(found, self.table.found_bytes * self.table.largest_parameter)
        tied = 0
        if self.table.adds_in_turn:
            tied = sum(
                tie.elements
                for tie in self.table.ties
                if tie.is_trained and sum(first <= user < end for user in tie.users) > 1
            )
            found = min(found, largest + self.table.found_bytes * tied)
            last = min(last, found)
        sliced = self.table.batch_bytes(((first, end),))[
            1
        ]  # a stage is handed the whole batch, and takes its part of it
        apart = found + max(0, self._range_passing[first, end] - last)
        if self._range_adding is None:
            return int(apart + (largest if summed else 0) + sliced)
        added = self._range_adding[first, end] + self.table.found_bytes * tied
        return int((max(added, apart + largest) if summed else added) + sliced)

    def whole_working(self, *, summed: bool) -> int:
        """The same of the one stage of a step that is one program."""
        units = len(self.table.units)
        trained = self.table.range_trained[0, units]
        adds_at_once = self.table.working_bytes or None not in self._working_again
        twice = self.table.found_bytes * min(trained, self.table.largest_parameter) if summed and adds_at_once else 0
        return int(self.range_working[0, units] + twice)

    @cached_property
    def _range_adding(self) -> Matrix | None:
        """The bytes of `adding_bytes`; None where gradients wait, or the framework does not say what units hold so."""
        known = [u.adding_bytes - u.passing_bytes for u in self.table.units if u.adding_bytes is not None]
        if not self.table.adds_in_turn or len(known) < len(self.table.units):
            return None
        beside = self.beside_bytes - np.array(self.table.waiting_bytes or 0) + np.array(known)
        looped = [u.looped_bytes for u in self.table.units]
        return adding_bytes(beside, self.table.boundary_bytes, looped) + self._range_scales

    @cached_property
    def _range_scales(self) -> Matrix:
        """The bytes of arrays that the units of a stage all multiply with: those of the unit that has most."""
        in_order = np.tri(len(self.table.units), dtype=bool).T
        sizes = np.array([u.scales_bytes for u in self.table.units], dtype=np.float64)
        found: Matrix = np.zeros_like(self.table.range_kept)
        found[:-1, 1:] = np.maximum.accumulate(np.where(in_order, sizes, 0.0), axis=1)
        return found

    def range_memory(self, live: float, held_bytes: float, trained_bytes: float) -> Matrix:
        """The peak bytes of a stage with ``live`` microbatches under way. A parameter entry takes ``held_bytes``, and
        ``trained_bytes`` more if it is trained."""
        memory: Matrix = live * self.table.range_kept + self.range_working
        # States on the host take nothing, also of no range of units, which has infinitely many entries.
        for each, entries in ((held_bytes, self.table.range_elements), (trained_bytes, self.table.range_trained)):
            memory = memory + each * entries if each else memory
        return memory
