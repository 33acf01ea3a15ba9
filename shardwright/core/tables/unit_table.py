"""Stages made of units: the time and memory of any run of units."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cost.unit_seconds import UnitCost
from shardwright.core.cost.value_flow import SharedValue
from shardwright.core.partition.exact import Matrix, range_sums
from shardwright.core.schedule.peak_memory import StageMemory
from shardwright.core.tables.call_entries import CallEntries, kinds_of
from shardwright.core.tables.memory import (
    kept_bytes,
    left_in_objects,
    modes_of,
    recomputed_s,
)
from shardwright.core.tables.updated_parameters import NONE_MADE, UpdatedParameters
from shardwright.core.values.found_once import found_once
from shardwright.core.values.recompute_modes import Mode, Recompute, goes_by_op

FOUND_OF_UNITS = (
    "stage_memories",
    "stage_passes",
    "least_of_alike",
    "unlike_units",
    "known_sums",
    "halves",
    "stage_contents",
    "content_numbers",
    "passes_by_content",
    "call_kinds",
    "range_kept",
    "range_elements",
    "range_trained",
    "working",
)
"""What is found of the units of a table, whatever the links between stages."""


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter that several units use."""

    users: tuple[int, ...]
    """The units that use it, in order."""
    elements: int
    """The entries of the parameter on one rank."""
    is_trained: bool


@dataclass(frozen=True)
class UnitTable:
    """The units of a model at one tensor degree and one microbatch size, in order."""

    units: tuple[UnitCost, ...]
    boundary_bytes: tuple[int, ...]
    """The bytes that enter each unit from before."""
    boundary_s: tuple[float, ...]
    ties: tuple[Tie, ...]
    largest_parameter: int
    """The entries of the largest parameter, on one rank."""
    recompute: Recompute
    recomputable: tuple[bool, ...]
    """Whether each unit is recomputed where all are (`core.tables.memory.recomputable_units`)."""
    kept: frozenset[int] = frozenset()
    """The units that keep their activations although they could be recomputed."""
    offloaded: frozenset[int] = frozenset()
    """The units whose activations are on the host between forward and backward."""
    other_recompute: Recompute | None = None
    """The mode of the units in ``others``."""
    others: frozenset[int] = frozenset()
    """The units that are computed again in another mode than the rest."""
    host_bytes_per_s: float = math.inf
    """The bandwidth of the link to the host, in one direction."""
    host_memory_bytes: float = math.inf
    """What the rank has for itself of the host's memory."""
    swaps_beside: bool = True
    """Whether activations go to the host and come back while the device computes."""
    loading_horizon: int = 1
    """The number of units whose activations come back ahead of the one whose backward runs."""
    shared: tuple[tuple[SharedValue, int], ...] = ()
    """The values that several units share, and their bytes on one rank."""
    arrivals: tuple[int, ...] = ()
    """The bytes of each shared value where it comes from another rank and stays until its gradient goes back there.
    Empty where a value that arrives stays only as long as it is read."""
    twice_bytes: tuple[int, ...] = ()
    """The bytes by which each unit and the next one keep less together than separately, where both keep all; they are
    counted in place of what the two share. Empty where this is not known."""
    batch: tuple[tuple[int, bool, tuple[int, ...]], ...] = ()
    """The bytes of every tensor of the batch for one microbatch, whether each microbatch has its own part of it, and
    the units that read it."""
    model_buffers: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """The bytes of every buffer of the model, and the units that use it."""
    remembered_bytes: tuple[int, ...] = ()
    """The bytes of running statistics that each of several replicas remembers, for each unit. Empty: none."""
    batch_is_everywhere: bool = False
    """Whether every rank is given the whole batch, whatever it reads of it."""
    tie_width: int = 0
    """The bytes of one entry of a tied parameter's gradient where autograd makes it, which adds up those of its uses
    out of place; 0: in place."""
    waiting_bytes: tuple[int, ...] = ()
    """The bytes of waiting gradients for each unit, of values made before it and read after it. Empty: none."""
    constant_bytes: tuple[int, ...] = ()
    """The bytes that enter each unit from before, of values without a gradient. Empty: none."""
    given_stay: bool = False
    """Whether the gradients that a stage is given by the next one stay to the end of its backward."""
    ties_have_one_home: bool = False
    """The trait of the same name in `MemoryTraits`."""
    found_bytes: int = 0
    """The bytes of the gradient of one parameter entry that waits until a stage's backward is done and its gradients
    are added up together; 0 where each is added as soon as it is made."""
    updated: UpdatedParameters = NONE_MADE
    """The parameters that the optimizer updates."""
    adds_in_turn: bool = False
    """Whether one such gradient waits at a time."""
    operands_stay: bool = False
    """Whether the activations of all units stay until the backward of their stage is done, of which they are operands;
    else those of a unit are gone after its own."""
    looked_up: tuple[int, ...] = ()
    """The trained parameter entries of each unit that are in tables read by look-ups of this unit alone: their
    gradients come when the passes of a stage that begins here are over. Empty: none."""

    working_bytes: tuple[int, ...] = ()
    """The bytes that each unit's passes hold beside kept activations with the gradients that wait. Empty: they wait
    beside the fullest moment."""

    is_one_program: bool = False
    """Whether one compiled program computes units again in a whole step."""

    calls: tuple[tuple[CallEntries, ...], ...] = ()
    """The calls of each unit that use parameters. Empty: each unit is one call."""

    unlinked: "UnitTable | None" = field(default=None, repr=False, compare=False)
    """The same table where messages between stages take no time; None: it is this one. Tables that differ in their
    links alone count their bytes, and the seconds of their passes, once."""

    @cached_property
    def modes(self) -> list[Mode]:
        """The treatment of each unit's activations under the policy of the whole."""
        other = self.other_recompute, self.others
        return modes_of(self.recompute, self.recomputable, self.kept, self.offloaded, other)

    @cached_property
    def idle_lent(self) -> float:
        """The least share of idle time that was measured to be lent while any unit ran."""
        return min(unit.idle_lent for unit in self.units)

    @cached_property
    def swapped_s(self) -> NDArray[np.float64]:
        """The time that the activations of each unit take to the host, and again back."""
        sent = [u.saved_bytes if mode == "offload" else 0 for u, mode in zip(self.units, self.modes, strict=True)]
        return np.array(sent) / self.host_bytes_per_s

    @found_once
    def passes_s(self, first: int, end: int) -> tuple[float, float]:
        """Seconds of the forward and of the backward of a stage of units ``first`` … ``end`` - 1 for one microbatch.

        Offloaded activations travel while the stage computes, out in the forward and back in the backward, and the
        longer of the two counts (KARMA, arXiv 2008.11421, for blocks that are alike: max(F, S) and max(B + rF, S));
        where copies take the device's own time, both do.
        """
        if self.unlinked is not None:
            return self.unlinked.passes_s(first, end)
        units, swapped = self.units[first:end], float(self.swapped_s[first:end].sum())
        backward = sum(u.input_grad_s + u.weight_grad_s for u in units) + float(self.again_s[first:end].sum())
        return self.with_swaps(sum(u.forward_s for u in units), swapped), self.with_swaps(backward, swapped)

    @found_once
    def weight_grad_s(self, first: int, end: int) -> float:
        """Seconds of the weight gradients of a stage for one microbatch."""
        if self.unlinked is not None:
            return self.unlinked.weight_grad_s(first, end)
        return sum(u.weight_grad_s for u in self.units[first:end])

    def stage_sums(self, first: int, end: int) -> tuple[float, float, float]:
        """What of a stage does not depend on which units are computed again: seconds that are spent once a step, those
        of tensor collectives in one microbatch that products hide, and the share of the counted optimizer time that
        the step on its parameters takes; 1 where it trains nothing."""
        if (first, end) not in self.known_sums:
            units = self.units[first:end]
            trained = sum(u.trained_elements for u in units)
            share = sum(u.update_share * u.trained_elements for u in units) / trained if trained else 1.0
            once_s, hidden_s = sum(u.step_s for u in units), sum(u.collective_hidden_s for u in units)
            self.known_sums[first, end] = once_s, hidden_s, share
        return self.known_sums[first, end]

    @cached_property
    def known_sums(self) -> dict[tuple[int, int], tuple[float, float, float]]:
        """The sums of stages found so far."""
        return {}

    def with_swaps(self, computing_s: float, swapped_s: float) -> float:
        """Seconds of a pass that computes so long, and whose activations travel so long."""
        return max(computing_s, swapped_s) if self.swaps_beside else computing_s + swapped_s

    @cached_property
    def again_s(self) -> NDArray[np.float64]:
        """Seconds of recomputation for each unit."""
        modes = self.modes
        return np.array([recomputed_s(u, mode) for u, mode in zip(self.units, modes, strict=True)])

    @cached_property
    def seconds(self) -> NDArray[np.float64]:
        """Seconds of each unit's forward and backward, with recomputation."""
        total: NDArray[np.float64] = np.array([u.total_s for u in self.units]) + self.again_s
        return total

    @cached_property
    def range_seconds(self) -> Matrix:
        """Seconds ``[a, b]`` of a stage of units a … b-1, with the transfer of what enters it and of its gradient."""
        entering = np.array([*self.boundary_s, 0.0])
        entering[0] = 0.0
        if not self.offloaded:
            sums: Matrix = range_sums(self.seconds) + 2 * entering[:, None]
            return sums
        swapped = range_sums(self.swapped_s)
        ahead = range_sums([u.forward_s for u in self.units])
        back = range_sums(self.seconds)
        possible = np.isfinite(ahead)
        back[possible] -= ahead[possible]
        if self.swaps_beside:
            longer: Matrix = np.maximum(ahead, swapped) + np.maximum(back, swapped) + 2 * entering[:, None]
        else:
            longer = ahead + back + 2 * swapped + 2 * entering[:, None]
        return longer

    @cached_property
    def range_elements(self) -> Matrix:
        """The parameters on a rank that holds units a … b-1; a parameter that several of them use counts once."""
        return self._once([u.parameter_elements for u in self.units], self.ties)

    @cached_property
    def range_trained(self) -> Matrix:
        """The trained parameters on a rank that holds units a … b-1; these alone have gradients."""
        return self._once([u.trained_elements for u in self.units], [tie for tie in self.ties if tie.is_trained])

    def _once(self, elements: Sequence[int], ties: Sequence[Tie]) -> Matrix:
        pairs = ((one, after, tie.elements) for tie in ties for one, after in itertools.pairwise(tie.users))
        found: Matrix = range_sums(elements) - _sums_of_pairs(pairs, len(self.units))
        return found

    def trained_from(self, first: int, end: int, others: Sequence[tuple[int, int]]) -> NDArray[np.float64]:
        """The trained entries of each unit of a stage and of those after it, without those that the stages ``others``,
        of the same rank, use too."""
        entries: NDArray[np.float64] = self.range_trained[first:end, end].copy()
        for tie in self.ties:
            mine = [unit - first for unit in tie.users if first <= unit < end]
            if tie.is_trained and mine and any(a <= unit < b for unit in tie.users for a, b in others):
                entries[: mine[-1] + 1] -= tie.elements
        return entries

    def shares_parameters(self, one: tuple[int, int], other: tuple[int, int]) -> bool:
        """Whether two stages, each given by its first unit and its end, use the same trained parameter."""
        return any(
            tie.is_trained and all(any(a <= unit < b for unit in tie.users) for a, b in (one, other))
            for tie in self.ties
        )

    def linked(self, boundary_s: tuple[float, ...]) -> "UnitTable":
        """The same table where what enters each unit from another stage takes so many seconds."""
        made = replace(self, boundary_s=boundary_s, unlinked=self.unlinked or self)
        vars(made).update((name, getattr(self, name)) for name in FOUND_OF_UNITS)
        return made

    @cached_property
    def stage_memories(self) -> dict[object, StageMemory]:
        """The stage memories counted so far (`core.tables.stage_memory`); many cuts have the same stages."""
        return {}

    @cached_property
    def stage_passes(self) -> dict[object, dict[tuple[int, int], object]]:
        """The passes of stages counted so far (`core.tables.gathered_units`), by what is asked of memory."""
        return {}

    @cached_property
    def least_of_alike(self) -> dict[object, int]:
        """The least bytes of units that are alike, as found so far (`core.tables.gathered_units`)."""
        return {}

    @cached_property
    def unlike_units(self) -> dict[int, list[int]]:
        """The units of one kind that differ in what their passes hold, by the first of the kind."""
        return {}

    @cached_property
    def halves(self) -> dict[str, object]:
        """The halves of split backwards, once they are counted (`core.tables.backward_halves`)."""
        return {}

    @cached_property
    def working(self) -> dict[str, object]:
        """What passes hold for a while, once it is counted (`core.tables.stage_working`)."""
        return {}

    @cached_property
    def stage_contents(self) -> dict[tuple[int, int], int | None]:
        """The numbers of what stages hold, as found so far (`core.tables.gathered_units.content_number`)."""
        return {}

    @cached_property
    def content_numbers(self) -> dict[object, int]:
        """What stages hold, numbered."""
        return {}

    @cached_property
    def passes_by_content(self) -> dict[object, object]:
        """The same by what they depend on, whichever units of the table they are of."""
        return {}

    @cached_property
    def call_kinds(self) -> tuple[int | None, ...]:
        """The kind of each unit, by what it costs and what its calls use."""
        return kinds_of([*map(id, self.units)], self.calls)

    def keeping(self, units: frozenset[int], offloaded: frozenset[int]) -> "UnitTable":
        """The same table where ``units`` are kept and not recomputed, and ``offloaded`` ones are offloaded."""
        return self._with_modes(kept=units, offloaded=offloaded)

    def mixing(self, mode: Recompute, units: frozenset[int]) -> "UnitTable":
        """The same table where ``units`` are computed again in another mode."""
        return self._with_modes(other_recompute=mode if units else None, others=units)

    def _with_modes(self, **changes: Any) -> "UnitTable":
        made = replace(self, **changes, unlinked=None)
        unchanged = (
            "call_kinds",
            "passes_by_content",
            "content_numbers",
            "range_elements",
            "range_trained",
            "known_sums",
        )
        vars(made).update((name, getattr(self, name)) for name in unchanged)
        return made

    @cached_property
    def range_kept(self) -> Matrix:
        """The bytes of activations that a stage of units a … b-1 keeps for one microbatch; a value that several of its
        units share counts once. What a unit leaves in objects stays where a unit behind it runs again with them."""
        modes = self.modes
        runs_again = [mode == "full" or goes_by_op(mode) for mode in modes]
        of_units = zip(self.units, modes, strict=True)
        held = [kept_bytes(u, mode, beside_recomputed=any(runs_again)) for u, mode in of_units]
        left = [left_in_objects(u, mode) if any(runs_again) else 0 for u, mode in zip(self.units, modes, strict=True)]
        kept = range_sums([size - of_objects for size, of_objects in zip(held, left, strict=True)])
        given = [unit for unit, again in enumerate(runs_again) if again and self.units[unit].left_bytes[0]]
        nearest = [next((after for after in given if after > unit), None) for unit in range(len(self.units))]
        kept += _sums_of_pairs(
            ((unit, after, left[unit]) for unit, after in enumerate(nearest) if after is not None and left[unit]),
            len(self.units),
        )
        neighbours = enumerate(itertools.pairwise(modes)) if self.twice_bytes else ()
        whole = {(unit, unit + 1) for unit, both in neighbours if both == ("none", "none")}
        pairs = [
            (one, after, size)
            for value, size in self.shared
            for one, after in itertools.pairwise(sorted(self.holders(value)))
            if (one, after) not in whole
        ]
        pairs += [(unit, after, self.twice_bytes[unit]) for unit, after in whole]
        found: Matrix = kept - _sums_of_pairs(pairs, len(self.units)) + self._arrived()
        return found

    def holders(self, value: SharedValue) -> set[int]:
        """The units that hold a shared value: those that keep it, and those that it enters and that are recomputed."""
        kept = {unit for unit in value.keepers if self.modes[unit] not in ("full", "offload")}
        return kept | {unit for unit in value.enterers if self.modes[unit] == "full"}

    def _arrived(self) -> Matrix:
        """The bytes of the values that enter a stage of units a … b-1, that stay there until their gradients go back,
        and that none of its units keeps: those that several units share, and those of an offloaded first unit."""
        end = len(self.units)
        begin: Matrix = np.zeros((end + 1, end + 2))  # what is added from a stage's end on
        for (value, _), size in zip(self.shared, self.arrivals, strict=False):
            holders = self.holders(value)
            if holders.issuperset(value.enterers):
                continue
            firsts = np.arange(value.maker + 1, max(value.enterers) + 1)
            entered = _next_of(sorted(value.enterers), firsts)
            held = _next_of([*sorted(holders), end], firsts)
            one, other = entered < held, np.maximum(entered, held)
            begin[firsts[one], entered[one] + 1] += size
            begin[firsts[one], other[one] + 1] -= size
        for unit in self.offloaded - {0} if not self.found_bytes else ():
            entering = zip(self.shared, self.arrivals, strict=False)
            shared = sum(size for (v, _), size in entering if v.maker < unit <= max(v.enterers, default=-1))
            begin[unit, unit + 1] += max(0, self.boundary_bytes[unit] - shared)
        found: Matrix = np.cumsum(begin, axis=1)[:, :-1]
        return found

    def batch_bytes(self, held: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """The bytes of the batch on a rank of these stages: those that all microbatches share, and those of one
        microbatch's part."""
        sizes = [0, 0]
        for size, is_divided, readers in self.batch:
            if self.batch_is_everywhere or any(a <= unit < b for unit in readers for a, b in held):
                sizes[is_divided] += size
        return sizes[0], sizes[1]

    def model_buffers_bytes(self, held: Sequence[tuple[int, int]], *, replicated: bool) -> int:
        """The bytes of the model's buffers on a rank of these stages; ``replicated``: with those remembered."""
        used = sum(size for size, users in self.model_buffers if any(a <= unit < b for unit in users for a, b in held))
        return used + (sum(sum(self.remembered_bytes[a:b]) for a, b in held) if replicated else 0)

    def tied_twice(self, held: Sequence[tuple[int, int]], *, trained: bool = False) -> int:
        """The entries of parameters that two stages of one rank share; with ``trained``, only of trained ones."""
        extra = 0
        for tie in self.ties:
            stages = sum(any(a <= u < b for u in tie.users) for a, b in held)
            extra += tie.elements * max(0, stages - 1) if tie.is_trained or not trained else 0
        return extra

    def updated_elsewhere(self, held: Sequence[tuple[int, int]]) -> int:
        """The entries of the parameters that a rank's stages use whose optimizer states are on another rank."""
        if not self.ties_have_one_home:
            return 0
        return sum(
            tie.elements
            for tie in self.ties
            if tie.is_trained
            and any(a <= u < b for u in tie.users for a, b in held)
            and not any(a <= tie.users[0] < b for a, b in held)
        )


def _sums_of_pairs(pairs: Iterable[tuple[int, int, int]], units: int) -> Matrix:
    """The sums, for a stage of units a … b-1, of the sizes of all pairs (unit, later unit, size) that it holds."""
    found: Matrix = np.zeros((units + 1, units + 1))
    for one, after, size in pairs:
        found[one, after + 1] += size
    return np.cumsum(np.cumsum(found[::-1], axis=0)[::-1], axis=1)


def _next_of(numbers: Sequence[int], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first of the rising ``numbers`` that is not below each wanted one."""
    rising = np.array(numbers, dtype=np.int64)
    return rising[np.searchsorted(rising, wanted)]
