"""The unit costs on every rank of a pipeline, and the best cut into stages."""

import itertools
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cost.op_kinds import PRECISION_BYTES
from shardwright.core.errors import PlanError
from shardwright.core.partition.even_cut import even_cut
from shardwright.core.partition.exact import may_be_cut
from shardwright.core.schedule import StageCosts
from shardwright.core.tables.backward_halves import halves_of
from shardwright.core.tables.gathered_units import content_number, sharing_bytes, staying_bytes
from shardwright.core.tables.least_counted import may_fit_as_counted
from shardwright.core.tables.memory import MemoryUse, collectives_s
from shardwright.core.tables.memory_request import MemoryRequest
from shardwright.core.tables.rank_holdings import Holdings, holdings_of
from shardwright.core.tables.stage_messages import piling_up_bytes
from shardwright.core.tables.stage_working import working_of
from shardwright.core.tables.unit_table import UnitTable
from shardwright.core.values.found_once import found_once
from shardwright.core.values.recompute_modes import Recompute

UNCOUNTED_BYTES = 16 * 1024
"""The bytes that no graph shows: losses and their seeds, an optimizer's count of its steps for each parameter, rows of
statistics on their way between ranks."""
MOST_TRIES = 4
"""The number of cuts tried with less memory each time, where what the stage matrices leave out does not fit."""

REMEMBERED_KEEPING = 16
"""The number of tables with some units kept that are remembered beside those that keep none."""


@dataclass(frozen=True, slots=True)
class RankWork:
    """The work of one pipeline rank."""

    seconds: float
    """Seconds of one microbatch, forward and backward."""
    collective_s: float
    """The seconds of these that are tensor collectives."""
    once_s: float
    """Seconds of the work that is done once a step, whatever the number of microbatches."""
    elements: int
    """The parameter entries that the rank trains."""
    held_elements: int
    """All parameter entries that the rank holds."""
    collective_hidden_s: float
    """The seconds of tensor collectives in one microbatch that products hide, beside ``collective_s``."""
    updated_elements: float
    """The entries that the rank trains, each times the measured share of the optimizer's step."""


@dataclass(frozen=True)
class RankTables:
    """The units on every pipeline rank. Ranks that cost the same share one table."""

    tables: tuple[UnitTable, ...]
    limits_bytes: tuple[int, ...]
    """The memory of every pipeline rank's smallest device."""
    idle_lent: float = 0.0
    """The share of idle time that is lent, as in `StageCosts`."""
    unlinked: "RankTables | None" = field(default=None, repr=False, compare=False)
    """The same ranks where messages between stages take no time; None: these. Ranks that differ in their links alone
    count their bytes once."""

    @property
    def ranks(self) -> int:
        return len(self.tables)

    @property
    def units(self) -> int:
        return len(self.tables[0].units)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether every rank costs the same."""
        return all(table is self.tables[0] for table in self.tables)

    def ends(self, starts: Sequence[int]) -> list[tuple[int, int]]:
        """The (first unit, end) of every stage."""
        return list(itertools.pairwise((*starts, self.units)))

    def stages_of_ranks(self, starts: Sequence[int], placement: Sequence[int]) -> list[list[tuple[int, int]]]:
        """The (first unit, end) of the stages of every rank."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.tables]
        for rank, ends in zip(placement, self.ends(starts), strict=True):
            found[rank].append(ends)
        return found

    # Bounds ------------------------------------------------------------------------------------------------------

    @property
    def of_bytes(self) -> "RankTables":
        """The tables by which bytes are counted, which depend on no link."""
        return self.unlinked or self

    @cached_property
    def known_memory(self) -> dict[object, tuple[MemoryUse, ...]]:
        """The memory of cuts under schedules, as found so far."""
        return {}

    @cached_property
    def kinds(self) -> tuple[tuple[tuple[int, ...], tuple[float, ...]], ...]:
        """The units of every kind that occurs more than once, and the least that one of them adds to all
        before it: parameter entries, trained entries, kept bytes (without what the units before it share with it), and
        the bytes of its passes."""
        counts: dict[int, list[int]] = {}
        for index, unit in enumerate(self.tables[0].units):
            counts.setdefault(id(unit), []).append(index)
        table = self.tables[0]
        added = [np.diff(held[0]) for held in (table.range_elements, table.range_trained, table.range_kept)]
        added.append(working_of(table).range_working[np.arange(self.units), np.arange(self.units) + 1])
        return tuple(
            (tuple(members), tuple(float(each[members].min()) for each in added))
            for members in counts.values()
            if len(members) > 1
        )

    def has_room(self, live: Sequence[int], held: int, held_bytes: float, trained_bytes: float) -> bool:
        """Whether the ranks have room for the units that are alike, leaving the others out; False means that no cut
        fits. ``held`` is the number of stages on each rank."""
        for units, (elements, trained, kept, working) in self.of_bytes.kinds:
            count = len(units)
            state, room = held_bytes * elements + trained_bytes * trained, 0
            for limit, alive in zip(self.limits_bytes, live, strict=True):
                # With n units in ``held`` stages, one stage has at least n / held, whose activations count.
                each = state + alive * kept / held
                room += max(0, int((limit - working) / each)) if each > 0 else count
                if room >= count:
                    break
            if room < count:
                return False
        return True

    # Cutting -----------------------------------------------------------------------------------------------------

    def cut(self, placement: Sequence[int], live: Sequence[int], request: MemoryRequest) -> list[int] | None:
        """The first unit of every stage: least largest stage time among the cuts that fit, then least parameters.

        Cuts that spread the parameters evenly come first (`partition.even_cut`). None when no cut fits.
        """
        found = self._found_cut(tuple(placement), tuple(live), request)
        return None if found is None else list(found)

    @found_once
    def _found_cut(
        self, placement: tuple[int, ...], live: tuple[int, ...], request: MemoryRequest
    ) -> tuple[int, ...] | None:
        held = len(placement) // self.ranks
        state = request.held_bytes, request.trained_bytes
        if len(placement) > self.units or not self.has_room(live, held, *state):
            return None
        of = self.of_bytes
        if not may_fit_as_counted(of.tables[0], of.kinds, self.limits_bytes, live, held, request):
            return None
        free = self.free_cut(placement)
        if max(self._over_by_rank(free, placement, live, request)) <= 0:
            return free
        room = self.limits_bytes
        for _ in range(MOST_TRIES):
            starts = self._cut(placement, live, state, room)
            if starts is None:
                return None
            use = self.total_bytes(starts, placement, live, request)
            over = [size - limit for (size, _), limit in zip(use, self.limits_bytes, strict=True)]
            if max(over) <= 0:
                return starts
            room = tuple(left - max(0, more) for left, more in zip(room, over, strict=True))
        return None

    def _over_by_rank(
        self, starts: Sequence[int], placement: Sequence[int], live: Sequence[int], request: MemoryRequest
    ) -> list[int]:
        """The bytes that each rank lacks under a cut, as in `over_by_rank`."""
        rows = zip(self.total_bytes(starts, placement, live, request), self.limits_bytes, self.tables, strict=True)
        return [int(max(size - limit, on_host - table.host_memory_bytes)) for (size, on_host), limit, table in rows]

    @found_once
    def free_cut(self, placement: tuple[int, ...]) -> tuple[int, ...]:
        """The cut where memory does not bind, which is the same for all memory policies."""
        found = self._fastest(placement, None)
        if found is None:
            raise PlanError(f"{len(placement)} stages of {self.units} units: no cut was found")
        return tuple(found)

    @found_once
    def _cut(
        self, placement: tuple[int, ...], live: tuple[int, ...], state: tuple[float, float], room: tuple[int, ...]
    ) -> tuple[int, ...] | None:
        held = len(placement) // self.ranks
        # A rank's stages share its memory for parameters; its activations are counted by the largest of them.
        held_bytes, trained_bytes = (each * held for each in state)
        known: dict[tuple[int, int, int], NDArray[np.bool_]] = {}
        fits = []
        for rank in placement:
            key = (id(self.tables[rank]), live[rank], room[rank])
            if key not in known:
                known[key] = (
                    working_of(self.tables[rank]).range_memory(live[rank], held_bytes, trained_bytes) <= room[rank]
                )
            fits.append(known[key])
        if not may_be_cut(fits):
            return None
        found = self._fastest(placement, np.stack(fits))
        return None if found is None else tuple(found)

    def _fastest(self, placement: Sequence[int], fits: NDArray[np.bool_] | None) -> list[int] | None:
        table = self.tables[0]
        times = [self.tables[rank].range_seconds for rank in placement]
        return even_cut(times, table.range_elements, table.largest_parameter, self.ranks, fits)

    # What a cut comes to -----------------------------------------------------------------------------------------

    def memory(
        self, starts: Sequence[int], placement: Sequence[int], live: Sequence[int], request: MemoryRequest
    ) -> tuple[MemoryUse, ...]:
        """The memory of every pipeline rank, with all of its stages."""
        return self.of_bytes._memory(tuple(starts), tuple(placement), tuple(live), request)

    @found_once
    def _memory(
        self, starts: tuple[int, ...], placement: tuple[int, ...], live: tuple[int, ...], request: MemoryRequest
    ) -> tuple[MemoryUse, ...]:
        held = self._held(starts, placement, summed=request.is_replicated, again=request.microbatches > 1)
        buffers = self.buffers(starts, placement, request)
        staying = self._staying(starts, placement, request.of_staying)
        rows = zip(live, held, staying, buffers, strict=True)
        return tuple(
            MemoryUse(
                *states,
                own.kept * count,
                beside,
                host_bytes=own.away * count + on_host,
                batch_bytes=own.batch[0] + own.batch[1] * request.microbatches,
                model_buffers_bytes=own.buffers[request.is_replicated],
                update_bytes=update,
            )
            for count, own, (states, on_host, update), beside in rows
        )

    def total_bytes(
        self, starts: Sequence[int], placement: Sequence[int], live: Sequence[int], request: MemoryRequest
    ) -> list[tuple[int, int]]:
        """The bytes of every rank's device, and of its host, as `memory` counts them, in a fraction of its time."""
        of, starts, placement = self.of_bytes, tuple(starts), tuple(placement)
        held = of._held(starts, placement, summed=request.is_replicated, again=request.microbatches > 1)
        buffers, staying = of.buffers(starts, placement, request), of._staying(starts, placement, request.of_staying)
        found = []
        for count, own, (states, on_host, update), beside in zip(live, held, staying, buffers, strict=True):
            whole = own.batch[0] + own.batch[1] * request.microbatches + own.buffers[request.is_replicated]
            size = sum(states) + whole + max(own.kept * count + beside, update)
            found.append((size, own.away * count + on_host))
        return found

    @found_once
    def _staying(
        self, starts: tuple[int, ...], placement: tuple[int, ...], request: MemoryRequest
    ) -> tuple[tuple[tuple[int, int, int], int, int], ...]:
        """What stays on every rank whatever the schedule: the (parameters, gradients, optimizer) bytes, those of state
        on its host, and what its optimizer holds beside."""
        held = self._held(starts, placement, summed=request.is_replicated, again=request.microbatches > 1)
        known: dict[object, tuple[tuple[int, int, int], int, int]] = {}
        found = []
        for rank, (own, content) in enumerate(zip(held, self._contents(starts, placement), strict=True)):
            sizes = own.elements, own.trained, own.updated
            if (content, sizes) not in known:
                parameters, gradients, kept = request.state_bytes(*sizes)
                parameters += staying_bytes(self.tables[rank], own.stages, request)
                update = self._update_bytes(rank, own.stages, request)
                known[content, sizes] = (parameters, gradients, kept), request.host_state_bytes(*sizes), update
            found.append(known[content, sizes])
        return tuple(found)

    @found_once
    def _contents(self, starts: tuple[int, ...], placement: tuple[int, ...]) -> tuple[object, ...]:
        """For every rank what its stages hold, equal on ranks that hold the same."""
        found: list[list[object]] = [[id(table)] for table in self.tables]
        for rank, ends in zip(placement, self.ends(starts), strict=True):
            number = content_number(self.tables[rank], ends)
            found[rank].append(ends if number is None else (number, float(self.tables[rank].range_kept[ends])))
        return tuple(map(tuple, found))

    def _update_bytes(self, rank: int, stages: tuple[tuple[int, int], ...], request: MemoryRequest) -> int:
        """The bytes that the optimizer holds beside its states, with all else that no graph shows."""
        ways = request.ways if request.shard else 1
        if request.on_host and not request.on_cpus:
            return 0
        made = self.tables[rank].updated.made_bytes(stages, ways, request.optimizer, together=not request.on_cpus)
        return made + UNCOUNTED_BYTES if made else 0

    def buffers(self, starts: Sequence[int], placement: Sequence[int], request: MemoryRequest) -> list[int]:
        """The bytes that passes hold for a while, on every rank."""
        of, starts, placement = self.of_bytes, tuple(starts), tuple(placement)
        found = of._buffers(starts, placement, request.without_messages)
        return [size + more for size, more in zip(found, of._piled_up(starts, placement, request), strict=True)]

    def messages(self, starts: Sequence[int], placement: Sequence[int], request: MemoryRequest) -> list[int]:
        """The bytes of messages among them, without those of values that have no gradient."""
        of, starts, placement = self.of_bytes, tuple(starts), tuple(placement)
        held = of._held(starts, placement, summed=request.is_replicated, again=request.microbatches > 1)
        piled_up = of._piled_up(starts, placement, request)
        return [own.sent - own.constant + more for own, more in zip(held, piled_up, strict=True)]

    def _piled_up(self, starts: tuple[int, ...], placement: tuple[int, ...], request: MemoryRequest) -> list[int]:
        """The bytes of messages beyond two on either side, on every rank."""
        found = [0] * self.ranks
        if request.piles_up:
            held = self._held(starts, placement, summed=request.is_replicated, again=request.microbatches > 1)
            for rank, (table, own, messages) in enumerate(zip(self.tables, held, request.under_way, strict=True)):
                if max(messages) > 2:
                    found[rank] = max(piling_up_bytes(table, ends, messages) for ends in own.stages)
        return found

    @found_once
    def _buffers(self, starts: tuple[int, ...], placement: tuple[int, ...], request: MemoryRequest) -> tuple[int, ...]:
        held = self._held(starts, placement, summed=request.is_replicated, again=request.microbatches > 1)
        passing, buckets = (find(starts, placement, request) for find in (self.passing, self.buckets))
        rows = zip(held, passing, buckets, strict=True)
        return tuple(own.sent + passing + bucket + UNCOUNTED_BYTES for own, passing, bucket in rows)

    def buckets(self, starts: Sequence[int], placement: Sequence[int], request: MemoryRequest) -> list[int]:
        """The bytes of one bucket of whole gradients on every rank, which is there from the first of them on."""
        again, of = request.microbatches > 1, self.of_bytes
        held = of._held(tuple(starts), tuple(placement), summed=request.is_replicated, again=again)
        most = 0 if request.shares_sums else request.bucket_bytes
        return [min(most, request.gradient_width * own.trained) for own in held]

    def passing(self, starts: Sequence[int], placement: Sequence[int], request: MemoryRequest) -> list[int]:
        """These bytes without messages and buckets: temporary values, and what is gathered of what is sharded."""
        return list(self.of_bytes._passing(tuple(starts), tuple(placement), request.of_passing))

    @found_once
    def _passing(self, starts: tuple[int, ...], placement: tuple[int, ...], request: MemoryRequest) -> tuple[int, ...]:
        held = self._held(starts, placement, summed=request.is_replicated, again=request.microbatches > 1)
        working = [own.working for own in held]
        if request.stages_are_programs and request.shard == 3:
            whole = self._gathering(starts, placement, request)
            working = [max(own, more) for own, more in zip(working, whole, strict=True)]
        if request.shares_sums:
            known: dict[object, int] = {}
            for rank, content in enumerate(self._contents(starts, placement)):
                if content not in known:
                    known[content] = sharing_bytes(self.tables[rank], held[rank].stages, request)
                working[rank] = max(working[rank], known[content])
        return tuple(working)

    def _gathering(self, starts: Sequence[int], placement: Sequence[int], request: MemoryRequest) -> list[int]:
        """The most bytes that passes of compiled stages hold on every rank where parameters are sharded."""
        found, width = [0] * self.ranks, PRECISION_BYTES[request.precision]
        for rank, (a, b) in zip(placement, self.ends(starts), strict=True):
            table = self.tables[rank]
            waiting = 0 if request.is_one_program else table.found_bytes * int(table.range_trained[a, b])
            found[rank] = max(found[rank], working_of(table).gathering(a, b, width) + waiting)
        return found

    @found_once
    def _held(
        self, starts: tuple[int, ...], placement: tuple[int, ...], *, summed: bool, again: bool
    ) -> list[Holdings]:
        """The holdings of every rank; ``summed`` and ``again`` as in `holdings_of`."""
        several = len(placement) > 1
        return [
            holdings_of(table, held, are_several=several, sends=self.ranks > 1, summed=summed, again=again)
            for table, held in zip(self.tables, self.stages_of_ranks(starts, placement), strict=True)
        ]

    def keeping(self, units: Collection[int], offloaded: Collection[int] = ()) -> "RankTables":
        """The same tables where ``units`` are kept and not recomputed, and ``offloaded`` ones are offloaded. The last
        few are remembered with all that was counted of them: policies and schedules of a cut keep the same units."""
        key, known = (frozenset(units), frozenset(offloaded)), self._known_keeping
        found = known.pop(key, None)
        if found is None:
            made = {id(table): table.keeping(*key) for table in self.tables}
            found = replace(self, tables=tuple(made[id(table)] for table in self.tables), unlinked=None)
        known[key] = found
        if len(known) > REMEMBERED_KEEPING:
            known.pop(next(iter(known)))
        return found

    @cached_property
    def _known_keeping(self) -> dict[tuple[frozenset[int], frozenset[int]], "RankTables"]:
        return {}

    def mixing(self, mode: Recompute, units: Collection[int]) -> "RankTables":
        """The same tables where ``units`` are computed again in another mode."""
        some = frozenset(units)
        made = {id(table): table.mixing(mode, some) for table in self.tables}
        return replace(self, tables=tuple(made[id(table)] for table in self.tables), unlinked=None)

    def over_bytes(self, memory: Sequence[MemoryUse]) -> int:
        """The bytes that the fullest rank lacks, of its device or of its host, 0 when all fits."""
        return max(0, *self.over_by_rank(memory))

    def over_by_rank(self, memory: Sequence[MemoryUse]) -> list[int]:
        """The bytes that each rank lacks, of its device or of its host; less than 0 where it has room."""
        rows = zip(memory, self.limits_bytes, self.tables, strict=True)
        return [
            int(max(use.total_bytes - limit, use.host_bytes - table.host_memory_bytes)) for use, limit, table in rows
        ]

    def stage_costs(self, starts: Sequence[int], placement: Sequence[int]) -> StageCosts:
        """The costs of a cut's stages for one microbatch."""
        return self._stage_costs(tuple(starts), tuple(placement))

    @found_once
    def _stage_costs(self, starts: tuple[int, ...], placement: tuple[int, ...]) -> StageCosts:
        stages = list(zip([self.tables[rank] for rank in placement], self.ends(starts), strict=True))
        kept = tuple(int(table.range_kept[ends]) for table, ends in stages)
        freed = tuple(max(0, int(halves_of(table).range_freed[ends])) for table, ends in stages)
        times = self.stage_seconds(starts, placement)
        return replace(times, activation_bytes=kept, freed_by_input_grad_bytes=freed)

    @found_once
    def stage_seconds(self, starts: tuple[int, ...], placement: tuple[int, ...]) -> StageCosts:
        """The same costs with no bytes of activations, which take longer to count and which no time depends on."""
        tables = [self.tables[rank] for rank in placement]
        passes = [(*table.passes_s(*ends), ends) for table, ends in zip(tables, self.ends(starts), strict=True)]
        weights = tuple(table.weight_grad_s(*ends) for table, (*_, ends) in zip(tables, passes, strict=True))
        inputs = tuple(back - own for (_, back, _), own in zip(passes, weights, strict=True))
        transfer = tuple(table.boundary_s[start] for table, start in zip(tables[1:], starts[1:], strict=True))
        forward = tuple(ahead for ahead, *_ in passes)
        return StageCosts(forward, inputs, weights, transfer, (0,) * len(starts), idle_lent=self.idle_lent)

    def passed_on_bytes(
        self, starts: Sequence[int], placement: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The bytes of activations of one microbatch on every stage, and those that the input gradient of a split
        backward frees of them; negative where it makes more for the weight gradient than it frees."""
        tables = self.of_bytes.tables
        ends = [(tables[rank], ends) for rank, ends in zip(placement, self.ends(starts), strict=True)]
        freed = (halves_of(table).range_freed[at] - halves_of(table).range_between[at] for table, at in ends)
        return tuple(int(table.range_kept[at]) for table, at in ends), tuple(map(int, freed))

    def input_grads(self, starts: Sequence[int], placement: Sequence[int]) -> list[int]:
        """The bytes by which an input gradient of every rank holds more for a while than its other passes do."""
        found = [0] * self.ranks
        for rank, at in zip(placement, self.ends(starts), strict=True):
            halves = halves_of(self.tables[rank])
            if halves.is_known:
                own = max(int(halves.range_input_grad_working[at]), halves.weight_grad_working(*at))
                found[rank] = max(found[rank], own - int(working_of(self.tables[rank]).range_working[at]))
        return found

    def work(self, starts: Sequence[int], placement: Sequence[int]) -> list["RankWork"]:
        """The work of every rank, with all of its stages."""
        return self._work(tuple(starts), tuple(placement))

    @found_once
    def _work(self, starts: tuple[int, ...], placement: tuple[int, ...]) -> list["RankWork"]:
        found = [RankWork(0.0, 0.0, 0.0, 0, 0, 0.0, 0.0)] * self.ranks
        for stage, (a, b) in enumerate(self.ends(starts)):
            rank, table = placement[stage], self.tables[placement[stage]]
            before, units = found[rank], table.units[a:b]
            once_s, hidden_s, update_share = table.stage_sums(a, b)
            found[rank] = RankWork(
                before.seconds + sum(table.passes_s(a, b)),
                before.collective_s + sum(map(collectives_s, units, table.modes[a:b])),
                before.once_s + once_s,
                before.elements + int(table.range_trained[a, b]),
                before.held_elements + int(table.range_elements[a, b]),
                before.collective_hidden_s + hidden_s,
                before.updated_elements + float(table.range_trained[a, b]) * update_share,
            )
        return found

    def slowest_s(self, starts: Sequence[int], placement: Sequence[int]) -> float:
        """Seconds of one microbatch on the slowest rank of a cut."""
        return max(work.seconds for work in self.work(starts, placement))

    def tied(self, starts: Sequence[int], placement: Sequence[int]) -> list[tuple[tuple[int, ...], int]]:
        """The (pipeline ranks, entries) of every trained parameter that several ranks hold."""
        found = []
        for tie in self.tables[0].ties:
            ranks = sorted({placement[bisect_right(starts, unit) - 1] for unit in tie.users})
            if len(ranks) > 1 and tie.is_trained:
                found.append((tuple(ranks), tie.elements))
        return found

    def with_limit(self, limit_bytes: int) -> "RankTables":
        """The same tables on devices of another memory."""
        return replace(self, limits_bytes=(limit_bytes,) * self.ranks, unlinked=None)
