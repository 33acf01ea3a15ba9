"""The layouts of a model at every tensor degree, chosen once and shared by all candidates of a search."""

from shardwright.core.cluster.cluster import Cluster
from shardwright.core.layout.pinned_layout import Pin
from shardwright.core.layout.placements import Layout
from shardwright.core.model.fold import Folded
from shardwright.core.model.graph import Graph
from shardwright.core.model.structure import Binding, Structure
from shardwright.core.rules.pins import resolve
from shardwright.core.solver.op_layouts import (
    AXIS,
    Rates,
    SlotAlternatives,
    TensorLayouts,
    Terms,
    choose,
    choose_form,
    pins_of,
    slot_alternatives,
    slot_layouts,
    unsplit,
)
from shardwright.core.tables.graph_reading import read
from shardwright.core.tables.memory import Precision, SumPrecision, state_bytes_per_element
from shardwright.core.values.found_once import found_once

LARGE_BYTES = 2**32
"""Size in bytes of a reduction whose latency is negligible next to bandwidth."""


class LayoutTables:
    """The folded model on one kind of device, in one precision, and its layouts on a tensor axis."""

    def __init__(
        self,
        graph: Graph,
        cluster: Cluster,
        precision: Precision,
        optimizer: str,
        gradient_precision: SumPrecision | None,
        sequence_parallel: bool | None,
        pins: tuple[Pin, ...],
        nesting: int = 0,
    ) -> None:
        self.captured = graph  # kept alive: tables are remembered by its identity
        graph = graph.for_precision(precision)
        self.graph, self.cluster, self.precision, self.optimizer = graph, cluster, precision, optimizer
        self.gradient_precision, self._sequence_parallel, self._pins = gradient_precision, sequence_parallel, pins
        self.device = cluster.device(0)
        self._read = read(graph, nesting)
        self.frame = self._read.frame
        self.folded: Folded = self._read.folded
        self.structure: Structure = self._read.structure
        self.binding: Binding = self._read.binding
        resolve(graph, pins, {AXIS: 1})  # bad pins raise, whatever the degrees

    def chosen(self, tp: int) -> TensorLayouts:
        """The layouts on a tensor axis of ``tp`` ranks."""
        return self._chosen(tp)[0]

    @found_once
    def _chosen(self, tp: int) -> tuple[TensorLayouts, tuple[tuple[str, Layout], ...], tuple[tuple[str, str], ...]]:
        """The layouts at a degree, the same by slot, and the pins that could not be kept, each with the reason."""
        return self._read.remembered(("chosen", *self._layout_terms(tp)), lambda: self._choose(tp))

    def _layout_terms(self, tp: int) -> tuple[Terms, bool | None, tuple[Pin, ...]]:
        """Everything that layouts depend on beside the graph; many clusters share it."""
        state = state_bytes_per_element(self.precision, self.optimizer, gradient_precision=self.gradient_precision)
        form = self._sequence_parallel if tp > 1 else False
        return Terms(tp, self.rates(tp), self.precision, state), form, self._pins if tp > 1 else ()

    def _choose(self, tp: int) -> tuple[TensorLayouts, tuple[tuple[str, Layout], ...], tuple[tuple[str, str], ...]]:
        terms, form, given = self._layout_terms(tp)
        asked = resolve(self.graph, given, {AXIS: tp})
        found, refused = choose_form(self.frame, terms, form, dict(asked.places))
        # Costs are counted for the plan's layouts: from its slots alone, as a runtime reads them.
        layouts = slot_layouts(self.frame, self.structure, found)
        pins = pins_of(self.frame, self.structure, dict(layouts))
        return choose(self.frame, found.terms, pins), layouts, (*asked.unsplit, *refused)

    def rates(self, tp: int) -> Rates:
        """The rates of large work on the device and on the tensor axis."""
        device = self.device
        ring_bytes = 2 * (tp - 1) / tp * LARGE_BYTES
        return Rates(
            device.flops_per_s(self.precision) * device.matmul_efficiency,
            device.memory_bandwidth_bytes_per_s * device.memory_efficiency,
            ring_bytes / self.cluster.group(range(tp)).all_reduce_s(LARGE_BYTES) if tp > 1 else 1.0,
        )

    def sequence_parallel(self, tp: int) -> bool:
        """Whether values that go from unit to unit are divided along the sequence."""
        return self.chosen(tp).terms.sequence_parallel

    def layouts(self, tp: int) -> tuple[tuple[str, Layout], ...]:
        """The layouts by slot."""
        return self._chosen(tp)[1]

    def unsplit(self, tp: int) -> tuple[tuple[str, str], ...]:
        """The matrices that stay whole and the pins that could not be kept, each with the reason."""
        said = dict(unsplit(self.frame, self.structure, self.chosen(tp)))
        slot_of: dict[str, str] = {}
        for unit, structural in zip(self.binding.units, self.structure.unit_classes, strict=True):
            for role, name, _ in unit.parameters:
                slot_of.setdefault(name, f"{structural}/{role}")
        for name, reason in self._chosen(tp)[2]:
            slot = slot_of.get(name, name)
            said[slot] = f"{reason}; {said[slot]}" if slot in said else reason
        return tuple(sorted(said.items()))

    def layout_alternatives(self, tp: int) -> SlotAlternatives:
        """The other layouts of every parameter, each with the cost that it would have had."""
        if tp == 1:
            return ()
        chosen = self.chosen(tp)

        def find() -> SlotAlternatives:
            pins = dict(resolve(self.graph, self._pins, {AXIS: tp}).places)
            kept = {t: p for t, p in pins.items() if self.graph.tensors[t].name not in dict(self._chosen(tp)[2])}
            return slot_alternatives(self.frame, self.structure, chosen, kept)

        return self._read.remembered(("alternatives", *self._layout_terms(tp)), find)

    def variants(self, tp: int) -> tuple[int, ...]:
        """The index of each unit in `class_costs`: equal units with equal layouts share one."""
        return self.chosen(tp).variants
