"""The traffic of decisions over the data axis, unit by unit, as a system overlaps it with computing."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from shardwright.core.cluster.groups import Group
from shardwright.core.cluster.hardware import Device
from shardwright.core.cost.op_kinds import PRECISION_BYTES
from shardwright.core.execution import COMPILED_DISPATCH, Execution
from shardwright.core.layout.mesh import Mesh
from shardwright.core.plan.decision import Decision
from shardwright.core.schedule.actions import B, F, I, Kind, W
from shardwright.core.schedule.named_schedule import named_schedule
from shardwright.core.schedule.passes_between import Between, Passes, passes_between
from shardwright.core.tables.exchange import (
    NONE,
    Exchange,
    UnitTraffic,
    one_stage_of_several,
    whole_step,
    with_across,
    with_buckets,
)
from shardwright.core.tables.gathered_stages import gathers_per_stage, most_gathers
from shardwright.core.tables.mesh_links import Links
from shardwright.core.tables.rank_tables import RankTables
from shardwright.core.tables.unit_table import UnitTable
from shardwright.core.values.found_once import found_once

SLOWED = {"gpu": 0.15, "tpu": 0.0, "trainium": 0.0, "cpu": 1.0}
"""The share of a device's compute rate that a message under way takes. GPU, prior: NCCL runs on 16 to 24 of 108 to 132
multiprocessors. TPU and Trainium: engines of their own send. CPU: the cores that compute copy the messages."""

CHANNELS_OF_A_PORT = 4
"""The channels of a collective between nodes of GPUs for each port that its group has on a node; each channel runs on
one multiprocessor. Derived: NCCL (2.18 to 2.28, src/graph/connect.cc) makes two of each path that its search finds, as
many as ports, and four on devices of compute capability 9 where that makes fewer than 16."""

MOST_CHANNELS = 16
"""The most channels of such a collective. Derived: two for each of a node's eight ports, as above."""

READS_NO_WEIGHTS = frozenset({"none", "offload", "selective", "elementwise"})
"""The modes of recompute that run no products with weights again."""


@dataclass(frozen=True, slots=True)
class RankExchange:
    """The traffic of one pipeline rank."""

    stages: tuple[Exchange, ...]
    """What each of its stages waits for in every pass, in the order of the stages."""
    tail_s: float
    """What its step waits once."""
    hidden_s: float


@dataclass(frozen=True, slots=True)
class _Widths:
    """The bytes of one entry of a parameter as it is gathered, and of a gradient as it is summed."""

    parameter: int
    gradient: int


class Exchanges:
    """The traffic over the data axis on one cluster in one precision, as one system carries it out."""

    def __init__(self, links: Links, precision: str, execution: Execution) -> None:
        self.links, self.precision, self.execution = links, precision, execution
        self._known: dict[object, Exchange] = {}
        self._traffics: dict[object, _ShardTraffic] = {}
        self._last: tuple[Decision, RankTables, tuple[RankExchange, ...]] | None = None

    def widths(self, decision: Decision) -> _Widths:
        """The bytes of an entry on its way."""
        return _Widths(PRECISION_BYTES[self.precision], PRECISION_BYTES[decision.gradient_precision or self.precision])

    def _traffic(self, decision: Decision, rank: int) -> "_ShardTraffic":
        """The traffic of the shard groups of a rank."""
        degrees = decision.placement_order, decision.pp, decision.dp, decision.tp
        key = rank, degrees, decision.shard_group, decision.hierarchical_gathers, decision.shard == 3
        if key not in self._traffics:
            self._traffics[key] = _ShardTraffic(self, decision, rank)
        return self._traffics[key]

    def slowed(self, decision: Decision, mesh: Mesh, rank: int) -> float:
        """The share of the compute rate that a message over the data axis takes, of the slowest device of a rank."""
        return self._slowed(mesh, rank, decision.shard_group, decision.gathered_stages is not None)

    @found_once
    def _slowed(self, mesh: Mesh, rank: int, ways: int | None, gathered: bool) -> float:
        """The same. Gathers and sums of stages that the schedule gathers are under way at once, and what of them hides
        is not laid on lanes: they take the most, whatever their channels."""
        devices = self.links.devices(mesh, rank)
        if gathered:
            return max(SLOWED[device.kind] for device in devices)
        inside, across, _ = self.links.shard_groups(mesh, rank, ways)
        groups = (inside,) if across is None else (inside, across)
        return max(_slowed(device, group) for device in devices for group in groups)

    def of(self, decision: Decision, tables: RankTables, placement: Sequence[int]) -> tuple[RankExchange, ...]:
        """The exchange of every pipeline rank."""
        if decision.dp == 1 and decision.offload_states == "none":
            return tuple(RankExchange((NONE,) * placement.count(rank), 0.0, 0.0) for rank in range(decision.pp))
        # A pipeline is simulated with what its passes wait for, and then its step is timed: the same is asked twice.
        if self._last is not None and self._last[0] is decision and self._last[1] is tables:
            return self._last[2]
        ends = tables.ends(decision.stage_starts)
        own = [[ends[stage] for stage, at in enumerate(placement) if at == rank] for rank in range(decision.pp)]
        found = tuple(self._of_rank(decision, tables.tables[rank], held, rank) for rank, held in enumerate(own))
        self._last = decision, tables, found
        return found

    def _of_rank(
        self, decision: Decision, table: UnitTable, held: Sequence[tuple[int, int]], rank: int
    ) -> RankExchange:
        slowed = self.slowed(decision, decision.mesh, rank)
        if decision.gathered_stages is not None:
            return self._by_stages(decision, table, held, rank, slowed)
        stages = [self._units(decision, table, ends, rank) for ends in held]
        together = self._together(decision, table, held, stages, rank)
        if decision.pp == 1:
            found = self._found(whole_step, together, decision, slowed)
            return RankExchange((*[NONE] * (len(stages) - 1), found), found.tail_s, found.hidden_s)
        passes = [self._found(one_stage_of_several, units, decision, slowed) for units in stages]
        last = passes[0] if len(passes) == 1 else self._found(one_stage_of_several, together, decision, slowed)
        traffic = sum(each.hidden_s + each.exposed_s(decision.microbatches) for each in passes)
        waited = sum(replace(each, tail_s=0.0).exposed_s(decision.microbatches) for each in passes) + last.tail_s
        return RankExchange(tuple(passes), last.tail_s, max(0.0, traffic - waited))

    @staticmethod
    def _together(
        decision: Decision,
        table: UnitTable,
        held: Sequence[tuple[int, int]],
        stages: Sequence[Sequence[UnitTraffic]],
        rank: int,
    ) -> list[UnitTraffic]:
        """The units of all stages of a rank, and between two stages the passes of other microbatches that the schedule
        runs there, as a unit without traffic. The idle time there is left out."""
        between = _between(decision, rank) if len(stages) > 1 and decision.pp > 1 else ()
        if not between:
            return [unit for units in stages for unit in units]
        numbers = sorted(stage for stage, at in enumerate(decision.stage_ranks) if at == rank)
        seconds: dict[tuple[int, Kind], float] = {}
        for stage, (a, b) in zip(numbers, held, strict=True):
            weights = sum(unit.weight_grad_s for unit in table.units[a:b])
            inputs = sum(unit.input_grad_s for unit in table.units[a:b]) + float(table.again_s[a:b].sum())
            forward = sum(unit.forward_s for unit in table.units[a:b])
            seconds |= {(stage, F): forward, (stage, I): inputs, (stage, W): weights, (stage, B): inputs + weights}

        def of(passes: Passes) -> float:
            return sum(many * seconds[stage, kind] for stage, kind, many in passes)

        found = list(stages[0])
        for each, units in zip(between, stages[1:], strict=True):
            found += [UnitTraffic(of(each.forwards), of(each.backwards)), *units]
        return found

    def _found(
        self, find: Callable[..., Exchange], units: Sequence[UnitTraffic], decision: Decision, slowed: float
    ) -> Exchange:
        key = find, tuple(units), decision.microbatches, slowed, decision.reduces_each
        if key not in self._known:
            self._known[key] = find(
                units, decision.microbatches, self.execution, slowed, sums_each=decision.reduces_each
            )
        return self._known[key]

    def _units(self, decision: Decision, table: UnitTable, ends: tuple[int, int], rank: int) -> tuple[UnitTraffic, ...]:
        """The units of a stage with their traffic."""
        a, b = ends
        again, width = table.again_s[a:b], self.widths(decision)
        units = tuple(
            UnitTraffic(u.forward_s, u.input_grad_s + u.weight_grad_s + float(more))
            for u, more in zip(table.units[a:b], again, strict=True)
        )
        held = np.diff(table.range_elements[a, a + 1 : b + 1], prepend=0.0) * width.parameter
        sums = np.diff(table.range_trained[a, a + 1 : b + 1], prepend=0.0) * width.gradient
        if decision.shard == 0:
            return self._whole(decision, units, sums.tolist(), self.links.axis(decision.mesh, rank, "dp"))
        if decision.shard < 3:
            updated = np.diff(table.range_trained[a, a + 1 : b + 1], prepend=0.0) * width.parameter
            units = self._divided(decision, units, sums.tolist(), updated.tolist(), rank)
        else:
            messages = [u.parameter_tensors if self.execution.by_parameter else 1 for u in table.units[a:b]]
            entries = np.diff(table.range_elements[a, a + 1 : b + 1], prepend=0.0).tolist()
            more = [
                self._gathered_once_more(*unit) if mode not in READS_NO_WEIGHTS else 0
                for *unit, mode in zip(entries, messages, table.modes[a:b], strict=True)
            ]
            units = self._sharded(decision, units, held.tolist(), sums.tolist(), messages, more, rank)
        return units if decision.offload_states == "none" else _by_the_host(decision, units, table, ends, width)

    def bucket_bytes(self, decision: Decision) -> float:
        """The bytes of a full bucket of gradients; 0: those of a unit."""
        if not self.execution.gradients:
            return math.inf
        if decision.bucket_bytes:
            return decision.bucket_bytes
        return self.execution.bucket_elements * self.widths(decision).gradient

    def _whole(
        self, decision: Decision, units: tuple[UnitTraffic, ...], sums: Sequence[float], group: Group
    ) -> tuple[UnitTraffic, ...]:
        return with_buckets(units, sums, self.bucket_bytes(decision), group.all_reduce_s)

    def _divided(
        self,
        decision: Decision,
        units: tuple[UnitTraffic, ...],
        sums: Sequence[float],
        updated: Sequence[float],
        rank: int,
    ) -> tuple[UnitTraffic, ...]:
        """Gradients are scattered, shards updated and parameters gathered again. With shard groups, each rank adds up
        its shard with the other groups before the update (arXiv 2205.00119, section 3.4)."""
        traffic = self._traffic(decision, rank)
        found = with_buckets(units, sums, self.bucket_bytes(decision), traffic.scatter_s)
        found = with_across(found, sums, self.bucket_bytes(decision), traffic.across_s)
        if not self.execution.updated_parameters:
            return (replace(found[0], update_gather_s=traffic.gather_s(sum(updated))), *found[1:])
        return tuple(
            replace(unit, update_gather_s=traffic.gather_s(size) if size else 0.0)
            for unit, size in zip(found, updated, strict=True)
        )

    def _sharded(
        self,
        decision: Decision,
        units: tuple[UnitTraffic, ...],
        held: Sequence[float],
        sums: Sequence[float],
        messages: Sequence[int],
        more: Sequence[int],
        rank: int,
    ) -> tuple[UnitTraffic, ...]:
        """Every pass gathers a unit's parameters, and its gradients are scattered; the parameters of small units, and
        of those with no messages, stay whole, and their gradients are summed once."""
        traffic = self._traffic(decision, rank)
        found, staying = [], 0.0
        for unit, size, made, count, again in zip(units, held, sums, messages, more, strict=True):
            if size < decision.whole_below_bytes or not count:
                staying += made
                found.append(unit)
                continue
            found.append(
                replace(
                    unit,
                    gather_s=count * traffic.gather_s(size / count),
                    again_gather_s=again * traffic.gather_s(size / count),
                    sum_s=count * traffic.scatter_s(made / count),
                    across_s=traffic.across_s(made) if made else 0.0,
                )
            )
        if staying:
            group = self.links.axis(decision.mesh, rank, "dp")
            found[0] = replace(found[0], across_s=found[0].across_s + group.all_reduce_s(staying))
        return tuple(found)

    def _gathered_once_more(self, entries: float, messages: int) -> int:
        """The number of a unit's parameters, of equal sizes, that are released once it has been computed again: what
        follows them is read by the rest of that forward, and by as much of the backward."""
        if not self.execution.live_entries:
            return 0
        return sum(2 * behind * entries >= messages * self.execution.live_entries for behind in range(messages))

    def _by_stages(
        self, decision: Decision, table: UnitTable, held: Sequence[tuple[int, int]], rank: int, slowed: float
    ) -> RankExchange:
        """Stages that the schedule gathers whole. Computing hides their traffic, where one may be gathered ahead, but
        for the first gather and the last sum of a stage."""
        traffic, width = self._traffic(decision, rank), self.widths(decision)
        gathers = gathers_in_step(decision)
        sums = decision.microbatches if decision.reduces_each else 1
        moved, compute, ends = 0.0, 0.0, 0.0
        for a, b in held:
            gather_s = traffic.gather_s(float(table.range_elements[a, b]) * width.parameter)
            sum_s = traffic.scatter_s(float(table.range_trained[a, b]) * width.gradient)
            moved += gathers * gather_s + sums * sum_s
            ends = max(ends, gather_s + (0.0 if decision.reduces_each else sum_s))
            compute += float(table.seconds[a:b].sum()) * decision.microbatches
        across = sum(traffic.across_s(float(table.range_trained[ends]) * width.gradient) for ends in held)
        hides = self.execution.prefetched_units and decision.look_ahead != 0
        hidden = min(moved, compute) if hides else 0.0
        exposed = max(moved - hidden * (1 - slowed), ends)
        return RankExchange((NONE,) * len(held), exposed + across, max(0.0, moved - exposed))

    # Bounds ------------------------------------------------------------------------------------------------------

    def least_end_s(self, held: "Held", mesh: Mesh, decision: Decision, rank: int) -> float:
        """Seconds after a step began before which the traffic of a rank that holds at least so much, and its computing,
        are not done: all of it is moved, not while the rank computes where nothing is hidden, and where it is hidden
        computing slows."""
        moved = self.least_moved_s(held, mesh, decision, rank)
        return max(moved, held.busy_s + self._least_beside_s(held, mesh, decision, rank, moved))

    def least_mean_end_s(self, held: "Held", mesh: Mesh, decision: Decision, rank: int) -> float:
        """The same of the rank that holds and computes most, where ``held`` is the mean of all ranks, which are alike.
        What a byte takes falls with the size, so that all of it together gives the least for each."""
        pp = mesh.axis_size("pp")
        whole = replace(held, trained=held.trained * pp, held=held.held * pp)
        moved = self.least_moved_s(whole, mesh, decision, rank)
        beside = self._least_beside_s(whole, mesh, decision, rank, moved)
        # Under shard 3 one rank may hold most and another train most.
        own = moved / pp if decision.shard == 3 else self.least_moved_s(held, mesh, decision, rank)
        return max(own, held.busy_s + beside / pp)

    def _least_beside_s(self, held: "Held", mesh: Mesh, decision: Decision, rank: int, moved_s: float) -> float:
        """Seconds that the traffic of a rank takes beside its computing at least: all of it, or what it slows that."""
        if decision.gathered_stages is not None and decision.dp > 1 and held.trained:
            # Sums between shard groups come after all else (`_by_stages`).
            traffic = self._traffic(decision, rank)
            across_s = traffic.across_s(held.trained * self.widths(decision).gradient)
            slowed = self.slowed(decision, mesh, rank) if self._hides(mesh, decision, rank) else 1.0
            return across_s + slowed * max(0.0, moved_s - across_s)
        # Sums of all microbatches but the last may lie beside other stages' idle time.
        sums_apart = mesh.axis_size("pp") > 1 and decision.gathered_stages is None and decision.reduces_each
        if sums_apart and decision.shard == 2 and self.execution.gradients:
            return 0.0
        if not self._hides(mesh, decision, rank):
            return moved_s
        if sums_apart and decision.shard == 3:
            width = self.widths(decision).gradient
            moved_s -= self._traffic(decision, rank).scatter_s(held.trained * width)
        return self.slowed(decision, mesh, rank) * max(0.0, moved_s)

    def least_moved_s(self, held: "Held", mesh: Mesh, decision: Decision, rank: int) -> float:
        """Seconds below which the traffic of a step does not get, of a rank that holds at least so much."""
        trained, parameters = held.trained, held.held
        if decision.dp == 1 or not (trained or parameters):
            return 0.0
        width = self.widths(decision)
        if decision.shard == 0:
            return self.links.axis(mesh, rank, "dp").all_reduce_s(trained * width.gradient) if trained else 0.0
        traffic = self._traffic(decision, rank)
        if decision.shard < 3:
            times = decision.microbatches if decision.reduces_each else 1
            moved = times * traffic.scatter_s(trained * width.gradient) + traffic.gather_s(trained * width.parameter)
            return moved + traffic.across_s(trained * width.gradient)
        if decision.gathered_stages is not None:
            sums = decision.microbatches if decision.reduces_each else 1
            moved = gathers_in_step(decision) * traffic.gather_s(parameters * width.parameter)
            moved += sums * traffic.scatter_s(trained * width.gradient)
            return moved + traffic.across_s(trained * width.gradient)
        small = held.units * decision.whole_below_bytes / width.parameter + held.staying
        parameters, trained = max(0.0, parameters - small), max(0.0, trained - small)
        # On one rank the last unit stays for the backward.
        again = parameters if mesh.axis_size("pp") > 1 else max(0.0, parameters - held.largest)
        moved = traffic.gather_s(parameters * width.parameter) + traffic.gather_s(again * width.parameter)
        return decision.microbatches * moved + traffic.scatter_s(trained * width.gradient)

    def _hides(self, mesh: Mesh, decision: Decision, rank: int) -> bool:
        """Whether a rank may compute while traffic is under way."""
        if self.slowed(decision, mesh, rank) == 1.0 and decision.gathered_stages is None:
            return False
        if decision.shard == 3:
            return self.execution.prefetched_units > 0
        return self.execution.gradients or self.execution.updated_parameters


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds and does, or the mean of all ranks."""

    trained: float
    """The parameter entries that it trains."""
    held: float
    """All of them."""
    busy_s: float
    """The seconds that it computes in a step; 0 where idle time is lent."""
    units: int
    """The number of units of the model."""
    largest: float
    """The parameter entries of the largest unit."""
    staying: float
    """Those of all units of the model of which no parameter is gathered (`Execution.whole_entries`)."""


class _ShardTraffic:
    """The seconds of gathers and sums inside a shard group, and of the sums between groups, by bytes."""

    def __init__(self, owner: Exchanges, decision: Decision, rank: int) -> None:
        self.inside, self.across, self.ways = owner.links.shard_groups(decision.mesh, rank, decision.shard_group)
        self.staged, execution = decision.hierarchical_gathers, owner.execution
        self.least_per_byte_s = self.listed_s = 0.0
        if decision.shard == 3 and self.inside.ranks > 1:
            if execution.gathered_bytes_per_s:
                self.least_per_byte_s = 1 / execution.gathered_bytes_per_s
            if execution.lists_ranks:
                issued_s = max(device.dispatched_s for device in owner.links.devices(decision.mesh, rank))
                self.listed_s = self.inside.ranks * issued_s * COMPILED_DISPATCH

    def gather_s(self, size_bytes: float) -> float:
        return self._as_carried_out_s(self.inside.all_gather_s, size_bytes)

    def scatter_s(self, size_bytes: float) -> float:
        return self._as_carried_out_s(self.inside.reduce_scatter_s, size_bytes)

    def _as_carried_out_s(self, linked_s: Callable[..., float], size_bytes: float) -> float:
        """Seconds of a collective that its links carry in so many, as the system carries it out."""
        if not size_bytes:
            return 0.0
        return max(linked_s(size_bytes, in_stages=self.staged), size_bytes * self.least_per_byte_s) + self.listed_s

    def across_s(self, size_bytes: float) -> float:
        """Of one rank's share of so many bytes."""
        return self.across.all_reduce_s(size_bytes / self.ways) if self.across is not None and size_bytes else 0.0


def _slowed(device: Device, group: Group) -> float:
    """The share of a device's compute rate that a message inside a group takes."""
    most = SLOWED[device.kind]
    if device.kind != "gpu" or not device.compute_units or group.outside is None or not group.ranks_per_node:
        return most
    return min(most, min(MOST_CHANNELS, CHANNELS_OF_A_PORT * group.ranks_per_node) / device.compute_units)


def _by_the_host(
    decision: Decision, units: tuple[UnitTraffic, ...], table: UnitTable, ends: tuple[int, int], width: _Widths
) -> tuple[UnitTraffic, ...]:
    """The units with what goes to the host and comes from there: this rank's share of their parameters, as the
    optimizer has them, and of the sums of their gradients."""
    a, b = ends
    rate = table.host_bytes_per_s * ((decision.shard_group or decision.dp) if decision.shard else 1)
    trained = np.diff(table.range_trained[a, a + 1 : b + 1], prepend=0.0)
    held = np.diff(table.range_elements[a, a + 1 : b + 1], prepend=0.0) if decision.shard == 3 else trained
    comes = held * max(width.parameter, PRECISION_BYTES["fp32"]) / rate
    goes = trained * width.gradient / rate
    found = []
    for unit, come, go in zip(units, comes.tolist(), goes.tolist(), strict=True):
        gathered = (come, 0.0) if decision.shard == 3 else (0.0, come)  # before each pass, or once a step
        found.append(
            replace(
                unit,
                gather_s=unit.gather_s + gathered[0],
                update_gather_s=unit.update_gather_s + gathered[1],
                sum_s=unit.sum_s + go,
            )
        )
    return tuple(found)


def _between(decision: Decision, rank: int) -> tuple[Between, ...]:
    """What a rank runs between its stages, by a schedule of few enough microbatches to be made quickly: those of the
    first and the last rounds are alike in longer ones."""
    if decision.generated:
        return passes_between(decision.compute_schedule(None).table[rank])
    few = 5 * decision.pp
    microbatches = decision.microbatches if decision.microbatches <= few else few
    return _between_of(decision.schedule, decision.pp, microbatches, decision.virtual_stages)[rank]


@lru_cache(maxsize=256)
def _between_of(name: str, ranks: int, microbatches: int, virtual_stages: int) -> tuple[tuple[Between, ...], ...]:
    schedule = named_schedule(name, ranks, microbatches, virtual_stages)
    return tuple(passes_between(order) for order in schedule.table)


def gathers_in_step(decision: Decision) -> float:
    """The number of times that a step gathers each sharded parameter."""
    if decision.gathered_stages is None:
        return 2.0 * decision.microbatches
    if decision.generated:
        return most_gathers(decision.build_schedule(None).table) / decision.virtual_stages
    sizes = decision.pp, decision.microbatches, decision.virtual_stages
    return gathers_per_stage(decision.schedule, *sizes, decision.gathered_stages, decision.look_ahead)
