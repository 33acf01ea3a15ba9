"""The parts of a plan's input that depend on the graph alone, read once for all its plans."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from shardwright.core.cost.op_kinds import PRECISION_BYTES
from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.cost.unknown_memory import unknown_memory_text
from shardwright.core.cost.unpriced import unpriced_text
from shardwright.core.cost.value_flow import SharedValue
from shardwright.core.cost.work import UnitWork
from shardwright.core.layout.unit_layouts import RealisedUnit
from shardwright.core.model.fold import Unit, fold
from shardwright.core.model.graph import Graph
from shardwright.core.model.structure import structure_of
from shardwright.core.solver import Frame
from shardwright.core.values.found_once import found_once

REMEMBERED_GRAPHS = 8
REMEMBERED_LAYOUTS = 64
Found = TypeVar("Found")


class Reading:
    """The facts that depend on a graph alone: its units, its structure, and the work of units counted so far."""

    def __init__(self, graph: Graph, nesting: int = 0) -> None:
        self.graph = graph
        self.folded = fold(graph, nesting)
        self.structure, self.binding = structure_of(self.folded)
        self.counter = WorkCounter(graph)
        self.batch_readers = self.counter.batch_readers(self.folded.units)
        self.buffer_users = self.counter.buffer_users(self.folded.units)
        self.remembered_bytes = tuple(map(self.counter.batch_statistics_bytes, self.folded.units))
        self.passing_by = self.counter.passing_by(self.folded.units)
        self.frame = Frame(self.folded, self.counter)
        self._found: dict[object, Any] = {}

    def remembered(self, key: object, find: Callable[[], Found]) -> Found:
        """The value that was found under this key before, or is found now."""
        if key not in self._found:
            if len(self._found) >= REMEMBERED_LAYOUTS:
                self._found.clear()
            self._found[key] = find()
        found: Found = self._found[key]
        return found

    @found_once
    def shared(self, *, fuses_dropout: bool) -> tuple[SharedValue, ...]:
        """The values that several units share (`ValueFlow.shared`). What a runtime holds of units is counted by the
        framework itself where the graph has footprints."""
        return self.counter.shared(self.folded.units, fuses_dropout=fuses_dropout or bool(self.graph.footprints))

    @found_once
    def work(
        self, unit: Unit, batch: int, precision: str, layouts: RealisedUnit | None, *, gathered_stays: bool
    ) -> UnitWork:
        counted = self.counter.count(unit, batch, precision, layouts, gathered_stays=gathered_stays)
        return self._as_held(counted, unit, batch, precision, layouts)

    def _as_held(
        self, counted: UnitWork, unit: Unit, batch: int, precision: str, layouts: RealisedUnit | None
    ) -> UnitWork:
        """The bytes as the framework's runtime holds them, where the graph says so. For a unit that several ranks
        share, one rank holds the share that the ops give."""
        if not self.graph.footprints:
            return counted
        footprint = self.graph.footprints_of(precision)[unit.fold_class]
        whole = counted if layouts is None else self.counter.count(unit, batch, precision)
        width = 1.0
        if not self.graph.knows_footprints_of(precision):
            width -= footprint.wide_share * (1 - PRECISION_BYTES[precision] / PRECISION_BYTES["fp32"])

        def held(lines: Sequence[tuple[int, int]], ours: int, all_of_it: int) -> int:
            most = max((fixed + each * batch for fixed, each in lines), default=0)
            return round(max(0, most) * width * (ours / all_of_it if all_of_it else 1.0))

        passing, adding, merged_passing, merged_working = (
            footprint.of_shards
            if footprint.of_shards and layouts is not None
            else (footprint.passing, footprint.adding, footprint.merged_passing, footprint.merged_working)
        )
        again = [held(lines, counted.passing_bytes, whole.passing_bytes) for lines in footprint.working_again]
        return replace(
            counted,
            saved_bytes=(saved := held([footprint.kept], counted.saved_bytes, whole.saved_bytes)),
            saved_selective_bytes=min(
                saved, held([footprint.kept_selective], counted.saved_selective_bytes, whole.saved_selective_bytes)
            ),
            passing_bytes=held(passing, counted.passing_bytes, whole.passing_bytes),
            kept_by_calls_bytes=None
            if footprint.kept_by_calls is None
            else (
                held(footprint.kept_by_calls[:1], counted.saved_bytes, whole.saved_bytes),
                held(footprint.kept_by_calls[1:], counted.saved_bytes, whole.saved_bytes),
            ),
            working_again_bytes=(again[0], again[1]) if again else None,
            merged_bytes=None
            if footprint.merged_kept is None
            else (
                held([footprint.merged_kept], counted.saved_bytes, whole.saved_bytes),
                held(merged_passing, counted.passing_bytes, whole.passing_bytes),
                held(merged_working, counted.passing_bytes, whole.passing_bytes),
            ),
            adding_bytes=held(adding, counted.passing_bytes, whole.passing_bytes) if adding else None,
            unfused_dropout_bytes=0,
            unfused_dropout_selective_bytes=0,
            given_bytes=0,
            put_off_bytes=None,
            input_grad_bytes=None,
            weight_grad_bytes=0,
            fetched_bytes=saved + held(passing, counted.passing_bytes, whole.passing_bytes),
            fetched_unfused_bytes=None,
            left_bytes=(0, 0),
            looped_bytes=held([footprint.gathered_in_loops], 1, 1),
            scales_bytes=held([footprint.scales], counted.passing_bytes, whole.passing_bytes),
            between_bytes=held([footprint.between], counted.saved_bytes, whole.saved_bytes),
        )


_readings: OrderedDict[tuple[int, int], Reading] = OrderedDict()


def read(graph: Graph, nesting: int = 0) -> Reading:
    """The reading of a graph, made once for the graphs used last: plans of one model differ in their pins. ``nesting``
    is as in `fold`.

    Graphs are known by identity, and each is kept alive by its reading: hashing a graph would walk through all of its
    ops.
    """
    key = id(graph), nesting
    found = _readings.get(key)
    if found is None:
        found = _readings[key] = Reading(graph, nesting)
    _readings.move_to_end(key)
    while len(_readings) > REMEMBERED_GRAPHS:
        _readings.popitem(last=False)
    return found


def unpriced_of(graph: Graph) -> str | None:
    """The text of `unpriced_text` for a graph, found once."""
    return read(graph).remembered("unpriced", lambda: unpriced_text(graph))


def unknown_memory_of(graph: Graph) -> str | None:
    """The text of `unknown_memory_text` for a graph, found once."""
    return read(graph).remembered("unknown memory", lambda: unknown_memory_text(graph))
