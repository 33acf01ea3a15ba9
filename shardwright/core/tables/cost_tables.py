"""The unit costs at every tensor degree and microbatch size, counted once and shared by all candidates of a search."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise

from shardwright.core.cluster.cluster import Cluster
from shardwright.core.cluster.collectives import send_s
from shardwright.core.cluster.groups import Group
from shardwright.core.cluster.hardware import Device, Link, load_profile, profile_names
from shardwright.core.cluster.hardware.device import MeasuredUnit
from shardwright.core.cost.op_kinds import PRECISION_BYTES
from shardwright.core.cost.shared_values import as_they_lie
from shardwright.core.cost.unit_seconds import UnitCost, seconds_of, unit_cost
from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.cost.value_flow import SharedValue
from shardwright.core.errors import PlanError
from shardwright.core.execution import Execution
from shardwright.core.layout.pinned_layout import Pin
from shardwright.core.model.fold import Unit, crossing_bytes
from shardwright.core.model.fp8_products import Fp8Products
from shardwright.core.model.graph import Graph
from shardwright.core.model.structure import measured_name, unit_form
from shardwright.core.solver.op_layouts import digest
from shardwright.core.tables.call_entries import CallEntries, entries_of, updated_of
from shardwright.core.tables.layout_tables import LayoutTables
from shardwright.core.tables.measured_units import as_counted, calibrated, runs_of_form
from shardwright.core.tables.memory import (
    Precision,
    SumPrecision,
    recomputable_units,
)
from shardwright.core.tables.unit_table import Tie, UnitTable
from shardwright.core.tables.updated_parameters import NONE_MADE, UpdatedParameters
from shardwright.core.values.found_once import found_once
from shardwright.core.values.recompute_modes import Recompute


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a rank on a cluster, as far as its costs depend on it."""

    device: Device
    tensor_group: Group
    """The group of the rank's peers on the tensor axis, with itself."""
    entering: Link | None
    """The link over which the previous stage sends, all of its ranks at once; None where there is no such stage."""
    in_stages: bool
    """Whether the mesh has several pipeline ranks."""


def _best_precision(cluster: Cluster) -> Precision:
    """The 16-bit precision in which all devices compute faster than in fp32, or fp32 where there is none."""
    peaks = [group.device.peak_flops_per_s for group in cluster.groups]

    def is_faster(name: str) -> bool:
        return all(each.get(name, 0.0) > each.get("fp32", 0.0) for each in peaks)

    halves: tuple[Precision, ...] = ("bf16", "fp16")
    return next((name for name in halves if is_faster(name)), "fp32")


def _require_fp8(cluster: Cluster) -> None:
    """Raise PlanError for a cluster of which some device has no products in fp8."""
    for group in cluster.groups:
        if "fp8" not in group.device.peak_flops_per_s:
            able = (name for name in profile_names() if "fp8" in load_profile(name).device.peak_flops_per_s)
            raise PlanError(
                f"precision='fp8': {group.device.name} has no matrix products in fp8. Plan for 'bf16', or for a device "
                f"that has them: {', '.join(able)}"
            )


def is_one_stage(pp: int, recompute: str) -> bool:
    """Whether a rank runs all units and computes nothing again."""
    return pp == 1 and recompute == "none"


class CostTables(LayoutTables):
    """The folded model on one kind of device, in one precision, and what its units cost."""

    def __init__(
        self,
        graph: Graph,
        cluster: Cluster,
        precision: Precision | None,
        optimizer: str,
        gradient_precision: SumPrecision | None = None,
        sequence_parallel: bool | None = None,
        pins: tuple[Pin, ...] = (),
        execution: Execution | None = None,
        loading_horizon: int = 1,
        nesting: int = 0,
    ) -> None:
        self.execution = execution or graph.execution
        precision = precision or _best_precision(cluster)
        if precision == "fp8":
            _require_fp8(cluster)
        super().__init__(graph, cluster, precision, optimizer, gradient_precision, sequence_parallel, pins, nesting)
        graph = self.graph
        self._loading_horizon = loading_horizon
        numbers = optimizer, gradient_precision, sequence_parallel, pins, self.execution, loading_horizon
        self._numbers = *numbers, nesting
        self.counter = self._read.counter
        self.fp8_products = self.counter.fp8 if self.precision == "fp8" else Fp8Products((), {}, ())
        """The products in fp8; none in other precisions."""
        if self.precision == "fp8" and not self.fp8_products.slots:
            said = "; ".join(f"{slot}: {why}" for slot, why in self.fp8_products.others[:3]) or "it has no matrices"
            raise PlanError(
                f"precision='fp8': no linear product of {graph.model_name} can be computed in it ({said}); plan for "
                f"'bf16'"
            )
        self._costs: dict[tuple[int, int, Device, Group, bool], tuple[UnitCost, ...]] = {}

    @cached_property
    def has_frozen_in_fp32(self) -> bool:
        """Whether parameters that are not trained are in fp32 between steps."""
        tensors = (self.graph.tensors[p.tensor] for p in self.graph.parameters if not p.trainable)
        return any(tensor.dtype == "float32" for tensor in tensors)

    def on(self, cluster: Cluster) -> "CostTables":
        """The same model and numbers on another cluster."""
        return CostTables(self.graph, cluster, self.precision, *self._numbers)

    def slow_tensor_axis(self, tp: int, microbatch: int) -> str | None:
        """A warning, with figures, where a tensor axis across nodes takes each of its ranks at least as long as the
        part of the axis that fits into one node would; None otherwise."""
        per_node = max(1, self.cluster.world_size // self.cluster.nodes)
        if tp <= per_node:
            return None
        fewer = max(n for n in range(1, per_node + 1) if tp % n == 0)

        def microbatch_s(degree: int) -> float:
            costs = self.class_costs(
                degree, microbatch, Place(self.device, self.cluster.group(range(degree)), None, False)
            )
            return sum(costs[variant].total_s for variant in self.variants(degree))

        ours, theirs = microbatch_s(tp), microbatch_s(fewer)
        if ours < theirs:
            return None
        return (
            f"tp={tp} runs across nodes, at {self.rates(tp).link_bytes_per_s / 1e9:.3g} GB/s: a microbatch of "
            f"{microbatch} takes each rank {ours * 1e3:.3g} ms, and {theirs * 1e3:.3g} ms with tp={fewer}; use "
            f"tp={fewer}, and the other ranks for replicas or stages"
        )

    def host_share(self, microbatch: int) -> float:
        """The share of a microbatch on one device in which that waits for its host."""
        costs = self.class_costs(1, microbatch, Place(self.device, self.cluster.group(range(1)), None, False))
        held = [costs[variant] for variant in self.variants(1)]
        total = sum(cost.total_s for cost in held)
        return sum(cost.host_wait_s for cost in held) / total if total > 0 else 0.0

    @found_once
    def table(
        self, tp: int, microbatch: int, recompute: Recompute, place: Place, *, is_whole: bool = False
    ) -> UnitTable:
        """The unit costs on a rank at that place, at that tensor degree. ``is_whole``: `is_one_stage`, where a
        runtime of compiled stages has one program for the step."""
        chosen = self.chosen(tp)
        boundary = tuple(fixed + slope * microbatch for fixed, slope in self.boundaries())
        if chosen.terms.sequence_parallel:
            boundary = tuple(-(-size // tp) for size in boundary)
        known = {size: self.message_s(size, tp, place) for size in set(boundary)}
        seconds = tuple(known[size] for size in boundary)
        if place.entering is not None:
            unlinked = self.table(tp, microbatch, recompute, replace(place, entering=None), is_whole=is_whole)
            return unlinked.linked(seconds)
        ties, largest = self._held_parameters(tp)

        def size_bytes(tensor: int) -> int:
            return self.counter.size_bytes(tensor, microbatch, self.precision)

        classes, traits = self.class_costs(tp, microbatch, place), self.graph.memory_traits
        units = tuple(classes[variant] for variant in chosen.variants)
        is_merged = is_whole and traits.stages_are_programs and all(unit.merged_bytes for unit in units)
        if is_merged:
            units = tuple(unit.in_one_program() for unit in units)
        if not place.in_stages and not is_whole:
            units = tuple(unit.by_calls() for unit in units)
        fuses = place.device.fuses_dropout
        twice = self._twice(units, microbatch, is_merged=is_merged) if self.graph.footprints else ()
        return UnitTable(
            units,
            boundary,
            seconds,
            ties,
            largest,
            recompute,
            self.recomputable,
            host_bytes_per_s=place.device.host_link_bandwidth_bytes_per_s,
            host_memory_bytes=math.inf if (host := place.device.host_memory_bytes) is None else host,
            swaps_beside=place.device.kind != "cpu",
            loading_horizon=self._loading_horizon,
            shared=tuple((value, size_bytes(value.tensor) // ways) for value, ways in self._shared(tp, fuses)),
            arrivals=() if traits.stages_are_programs else self._arrivals(tp, microbatch, fuses),
            twice_bytes=twice,
            batch=tuple(
                (given.size_bytes(microbatch), given.has_batch, by)
                for given, by in ((self.graph.tensors[t], by) for t, by in self._read.batch_readers)
            ),
            model_buffers=tuple((self.graph.tensors[t].size_bytes(1), by) for t, by in self._read.buffer_users),
            remembered_bytes=self._read.remembered_bytes if traits.replicas_norm_apart else (),
            batch_is_everywhere=not self.graph.capabilities.single_controller,
            tie_width=PRECISION_BYTES[self.precision] if traits.gradients_when_made else 0,
            waiting_bytes=tuple(sum(map(size_bytes, values)) for values in self._read.passing_by),
            constant_bytes=tuple(fixed + slope * microbatch for fixed, slope in self.boundaries(flowing=False)),
            given_stay=not traits.stages_are_programs,
            ties_have_one_home=traits.ties_have_one_home,
            found_bytes=PRECISION_BYTES[self.precision] if traits.stages_are_programs else 0,
            updated=self._updated(tp) if traits.updates_make_values else NONE_MADE,
            adds_in_turn=place.in_stages and traits.adds_in_turn_on_cpu and place.device.kind == "cpu",
            operands_stay=place.in_stages and traits.stages_are_programs,
            looked_up=self._looked_up(tp) if traits.stages_are_programs else (),
            working_bytes=self._working(units, twice if tp == 1 else ()) if is_merged else (),
            is_one_program=not (place.in_stages or is_whole) and traits.stages_are_programs,
            calls=self._calls(tp) if traits.gathers_units else (),
        )

    @staticmethod
    def _working(units: Sequence[UnitCost], twice: Sequence[int]) -> tuple[int, ...]:
        """The bytes that each unit of one program holds beside what is kept. What it and the unit before keep less
        together than each for itself is made again of what that one keeps; where both keep the same value, it counts
        once more. ``twice``: as in `UnitTable.twice_bytes`; of shards empty, as of them kept values count to the end.
        """
        again = (0, *twice[:-1]) if twice else (0,) * len(units)
        held = [unit.merged_bytes[2] for unit in units if unit.merged_bytes]
        return tuple(size + max(0, more) for size, more in zip(held, again, strict=True))

    @found_once
    def _calls(self, tp: int) -> tuple[tuple[CallEntries, ...], ...]:
        """The parameter entries of every call of each unit, as in `UnitTable.calls`."""
        users = self._users()
        return tuple(
            entries_of(self.graph, self.counter.calls(unit), users, partial(self._entries, unit=unit.index, tp=tp))
            for unit in self.folded.units
        )

    @found_once
    def _updated(self, tp: int) -> UpdatedParameters:
        """The trained parameters, in the order in which the model names them."""
        calls = [(unit.index, call) for unit in self.folded.units for call in self.counter.calls(unit)]
        rows = updated_of(self.graph, calls, self._users(), partial(self._entries, tp=tp))
        return UpdatedParameters(rows, len(self.folded.units))

    def _looked_up(self, tp: int) -> tuple[int, ...]:
        """The entries of trained tables, on one rank and for each unit, that only the unit's look-ups read."""
        kinds: dict[int, set[str]] = {}
        for op in self.graph.ops:
            for tensor in op.inputs:
                kinds.setdefault(tensor, set()).add(op.kind)
        found = [0] * len(self.folded.units)
        for number, users in self._users().items():
            parameter = self.graph.parameters[number]
            if parameter.trainable and len(users) == 1 and kinds.get(parameter.tensor) == {"gather"}:
                found[users[0]] += self._entries(number, users[0], tp)
        return tuple(found)

    def _gathered_stays(self, tp: int) -> bool:
        """Whether a value that is gathered for an op and read by its backward is kept as it was gathered."""
        if tp == 1 or self.graph.footprints:
            return False
        return self.execution.keeps_gathered or not self.sequence_parallel(tp)

    def _shared(self, tp: int, fuses_dropout: bool) -> tuple[tuple[SharedValue, int], ...]:
        """The values that several units share in one memory, each with its number of shards."""
        values = self._read.shared(fuses_dropout=fuses_dropout)
        if tp == 1:
            return tuple((value, 1) for value in values)
        chosen, stays = self.chosen(tp), self._gathered_stays(tp)
        return self._read.remembered(
            ("shared", stays, fuses_dropout, *self._layout_terms(tp)),
            lambda: as_they_lie(self.counter, self.folded.units, values, chosen.realised, gathered_stays=stays),
        )

    def _arrivals(self, tp: int, microbatch: int, fuses_dropout: bool) -> tuple[int, ...]:
        """The bytes of each shared value as a message of one microbatch."""
        ways = tp if self.sequence_parallel(tp) else 1
        return tuple(
            self.counter.size_bytes(value.tensor, microbatch, self.precision) // ways
            for value in self._read.shared(fuses_dropout=fuses_dropout)
        )

    def _twice(self, units: Sequence[UnitCost], microbatch: int, *, is_merged: bool) -> tuple[int, ...]:
        """The bytes that each unit and the next one both keep; of a unit divided over ranks, one rank's share."""
        sizes = {
            (pair.first, pair.second): pair.merged_size if is_merged else pair.size
            for pair in self.graph.kept_twice_of(self.precision)
        }
        footprints, found = self.graph.footprints_of(self.precision), []
        for unit, both in enumerate(pairwise(own.fold_class for own in self.folded.units)):
            fixed, each = sizes.get(both, (0, 0))
            kept = [footprints[own].merged_kept if is_merged else footprints[own].kept for own in both]
            whole = sum(f + e * microbatch for f, e in filter(None, kept))
            held = units[unit].saved_bytes + units[unit + 1].saved_bytes
            found.append(round((fixed + each * microbatch) * held / max(1, whole)))
        return (*found, 0)

    @found_once
    def _held_parameters(self, tp: int) -> tuple[tuple[Tie, ...], int]:
        """The parameters of one rank at a tensor degree: those that are tied, and the entries of the largest of all."""
        ties: list[Tie] = []
        largest = 0
        for parameter, users in self._users().items():
            elements = self._entries(parameter, users[0], tp)
            largest = max(largest, elements)
            if len(users) > 1:
                ties.append(Tie(users, elements, self.graph.parameters[parameter].trainable))
        return tuple(ties), largest

    def _entries(self, parameter: int, unit: int, tp: int) -> int:
        """The entries on one rank of a parameter that ``unit`` uses."""
        tensor = self.graph.parameters[parameter].tensor
        layout = dict(self.chosen(tp).solution.units[unit].parameters)[tensor]
        return self.graph.tensors[tensor].elements(1) // (1 if layout.is_replicated else tp)

    @property
    def _added_bytes(self) -> int:
        """The bytes moved to add a gradient entry to a sum: entry and sum are read, and the sum is written."""
        width = PRECISION_BYTES[self.precision]
        return width + 2 * PRECISION_BYTES[self.gradient_precision or self.precision]

    @property
    def recomputable(self) -> tuple[bool, ...]:
        """Whether each unit is recomputed where all are, as in `Plan.recomputed_units`."""
        return recomputable_units(self.structure.unit_classes)

    def message_s(self, size_bytes: int, tp: int, place: Place) -> float:
        """Seconds of a message from the previous stage, when all ranks of the stage send at once.

        The ranks of a tensor group hold the same tensor. Each sends a shard of it, and the receivers gather the shards
        over their own link, where that is faster (arXiv 2104.04473, section 4.1). Divided sequences are sent as they
        are. Where passes were measured, so was what the host does between them.
        """
        if place.entering is None:
            return 0.0
        by_host = 0.0 if place.device.measured_units else self.execution.message_s
        whole = send_s(size_bytes, place.entering)
        if tp > 1 and not self.sequence_parallel(tp):
            divided = send_s(size_bytes / tp, place.entering) + place.tensor_group.all_gather_s(size_bytes)
            whole = min(whole, divided)
        return whole + by_host

    def boundaries(self, *, flowing: bool = True) -> tuple[tuple[int, int], ...]:
        """The bytes that enter each unit from before, as (fixed, for each sample), of values through which a gradient
        flows; without ``flowing``, of the other values that earlier units made. (Every stage has the batch.)"""
        counter, starts = self.counter, [unit.first_op for unit in self.folded.units]

        def crossing(batch: int) -> list[int]:
            def sent_bytes(tensor: int) -> int:
                if counter.needs_gradient(tensor) is not flowing:
                    return 0
                return counter.size_bytes(tensor, batch, self.precision)

            positions = crossing_bytes(self.graph, sent_bytes)
            return [int(positions[start]) for start in starts]

        def find() -> tuple[tuple[int, int], ...]:
            return tuple((2 * one - two, two - one) for one, two in zip(crossing(1), crossing(2), strict=True))

        return self._read.remembered(("boundaries", self.precision, flowing), find)

    def _users(self) -> dict[int, tuple[int, ...]]:
        users: dict[int, list[int]] = {}
        for unit in self.folded.units:
            for parameter in unit.parameters:
                users.setdefault(parameter, []).append(unit.index)
        return {parameter: tuple(units) for parameter, units in users.items()}

    def _runs_of(self, unit: Unit, place: Place, tp: int) -> list[MeasuredUnit]:
        """The measured runs of a unit's class at a tensor degree, with the same layouts; only those in stages, or not,
        as here, if there are any."""
        device = place.device
        if not device.measured_units:
            return []
        layouts = digest(self.layouts(tp), self.sequence_parallel(tp)) if tp > 1 else ""
        model = measured_name(self.graph.framework, self.structure.digest)
        mine = (model, self.variants(tp)[unit.index], self.precision, tp, layouts)
        runs = [
            m for m in device.measured_units if (m.model, m.unit_class, m.precision, m.tensor_degree, m.layouts) == mine
        ]
        return [m for m in runs if m.in_stages == place.in_stages] or runs

    def class_costs(self, tp: int, microbatch: int, place: Place) -> tuple[UnitCost, ...]:
        """The cost of one unit of each variant on a rank at that place."""
        in_stages = bool(place.device.measured_units) and place.in_stages
        key = (tp, microbatch, place.device, place.tensor_group, in_stages)
        if key not in self._costs:
            units = (self.folded.units[first] for first in self.chosen(tp).firsts)
            self._costs[key] = tuple(self._cost(unit, tp, microbatch, place) for unit in units)
        return self._costs[key]

    def _cost(self, unit: Unit, tp: int, microbatch: int, place: Place) -> UnitCost:
        """The cost of a unit, counted from its ops and corrected by measured runs where there are any."""
        cost = self.counted(unit, tp, microbatch, place)
        inside_a_node = place.tensor_group.outside is None
        if tp > 1 and inside_a_node and (runs := self._runs_of(unit, place, tp)):
            counted = partial(self.counted, unit, tp, place=place)
            return calibrated(cost, runs, microbatch, counted, with_collectives=True)
        whole = partial(self.counted, unit, 1, place=place)
        if runs := self._runs_of(unit, place, 1):
            return calibrated(cost, runs, microbatch, whole)
        if not place.device.measured_units:
            return cost
        framework, form = measured_name(self.graph.framework, ""), unit_form(self.graph, unit)
        entries = (whole(microbatch) if tp > 1 else cost).parameter_elements
        own = [run for run in place.device.measured_units if run.model.startswith(framework)]
        runs = runs_of_form(own, form, self.precision, entries, in_stages=place.in_stages)
        counted_then = {run.microbatch: as_counted(cost, run) for run in runs}
        return calibrated(cost, runs, microbatch, counted_then.__getitem__)

    def counted(
        self, unit: Unit, tp: int, microbatch: int, place: Place, counter: WorkCounter | None = None
    ) -> UnitCost:
        """The cost of a unit, or of some of its ops in a row, counted from them, on one of ``tp`` ranks that share it.
        ``counter``: of another graph of the same ops, as of a slice of the model's sequence, without footprints."""
        layouts = self.chosen(tp).realised(unit.index) if tp > 1 else None
        like = unit if layouts is None else self.folded.units[layouts.unit]
        if layouts is not None:
            own = self.folded.units[unit.index]
            ends = (like.first_op + op - own.first_op for op in (unit.first_op, unit.end_op))
            like = replace(like, first_op=next(ends), end_op=next(ends)) if own != unit else like
        if counter is None:
            stays = self._gathered_stays(tp)
            work = self._read.work(like, microbatch, self.precision, layouts, gathered_stays=stays)
        else:
            stays = tp > 1 and (self.execution.keeps_gathered or not self.sequence_parallel(tp))
            work = counter.count(like, microbatch, self.precision, layouts, gathered_stays=stays)
        held = {p: self._entries(p, unit.index, tp) for p in unit.parameters}
        trained = sum(n for p, n in held.items() if self.graph.parameters[p].trainable)
        return unit_cost(
            work,
            place.device,
            self.precision,
            collective_s=seconds_of(place.tensor_group, tp) if tp > 1 else None,
            execution=self.execution,
            chunks=self.execution.tensor_chunks or tp,
            parameters=sum(held.values()),
            trained=trained,
            gradient_bytes=trained * self._added_bytes,
            parameter_tensors=sum(n >= self.execution.whole_entries for n in held.values()),
        )
