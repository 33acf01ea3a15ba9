"""What units cost at every tensor degree and microbatch size: counted once, shared by all candidates of a search."""

from collections import OrderedDict

from shardwright.core.cluster import Cluster
from shardwright.core.cost.collectives import send_s
from shardwright.core.cost.unit import UnitCost, throughput_s, unit_cost
from shardwright.core.cost.work import PRECISION_BYTES, UnitWork, WorkCounter
from shardwright.core.fold import Folded, Unit, crossing_bytes, fold
from shardwright.core.graph import Graph
from shardwright.core.layout import Layout
from shardwright.core.memory import Recompute
from shardwright.core.mesh import Mesh
from shardwright.core.rules.axes import Dim
from shardwright.core.stages import MemoryRequest, UnitTable
from shardwright.core.structure import Binding, Structure, structure_of
from shardwright.core.tensor_parallel import UnitSplit, choose_splits

REMEMBERED_GRAPHS = 8


class _Reading:
    """What depends on a graph alone: its units, its structure, and the work of units as far as it was counted."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.folded = fold(graph)
        self.structure, self.binding = structure_of(self.folded)
        self.counter = WorkCounter(graph)
        self._work: dict[object, UnitWork] = {}

    def work(
        self, unit: Unit, batch: int, precision: str, dims: frozenset[Dim], degree: int, *, sequence_parallel: bool
    ) -> UnitWork:
        key = (unit.index, batch, precision, dims, degree, sequence_parallel)
        if key not in self._work:
            self._work[key] = self.counter.count(
                unit, batch, precision, dims, degree, sequence_parallel=sequence_parallel
            )
        return self._work[key]


_readings: OrderedDict[int, _Reading] = OrderedDict()


def _read(graph: Graph) -> _Reading:
    """The reading of a graph, made once for the graphs used last: plans of one model differ in what they pin.

    Graphs are known by identity, each kept alive by its reading: to hash one means to walk through all of its ops.
    """
    found = _readings.get(id(graph))
    if found is None:
        found = _readings[id(graph)] = _Reading(graph)
    _readings.move_to_end(id(graph))
    while len(_readings) > REMEMBERED_GRAPHS:
        _readings.popitem(last=False)
    return found


LARGE_BYTES = 2**32
"""Of a reduction whose latency no longer counts."""


class CostTables:
    """The folded model on one kind of device, in one precision."""

    def __init__(
        self,
        graph: Graph,
        cluster: Cluster,
        precision: str | None,
        optimizer: str,
        gradient_precision: str | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        self.graph, self.cluster, self.optimizer = graph, cluster, optimizer
        self.gradient_precision, self.sequence_parallel = gradient_precision, sequence_parallel
        self.device = cluster.device(0)
        self.precision = precision or next((p for p in ("bf16", "fp16") if p in self.device.peak_flops_per_s), "fp32")
        self._read = _read(graph)
        self.folded: Folded = self._read.folded
        self.structure: Structure = self._read.structure
        self.binding: Binding = self._read.binding
        self.counter = self._read.counter
        self._splits: dict[int, dict[int, UnitSplit]] = {}
        self._tables: dict[tuple[int, int, int, Recompute], UnitTable] = {}
        self._costs: dict[tuple[int, int], tuple[UnitCost, ...]] = {}
        self._held: dict[int, tuple[tuple[tuple[tuple[int, ...], int], ...], int]] = {}
        self._boundary: tuple[tuple[int, int], ...] | None = None

    def split(self, tp: int) -> dict[int, UnitSplit]:
        if tp not in self._splits:
            group = self.cluster.group(range(tp))
            state = MemoryRequest(
                0, self.precision, self.optimizer, 0, 1, self.gradient_precision
            ).state_bytes_per_element

            reduce_s_per_byte = group.all_reduce_s(LARGE_BYTES) / LARGE_BYTES

            def occupancy(work: UnitWork, elements: int) -> float:
                """Seconds × bytes held: a tensor axis is there to save both."""
                seconds = throughput_s(work, self.device, self.precision, reduce_s_per_byte)
                return seconds * (elements * state + work.saved_bytes)

            self._splits[tp] = choose_splits(self.folded, self.counter, tp, occupancy, self.precision)
        return self._splits[tp]

    def layouts(self, tp: int) -> tuple[tuple[str, Layout], ...]:
        """Layouts by structural class; units of one structural class take those of its first unit."""
        splits = self.split(tp)
        found: dict[str, Layout] = {}
        seen: set[int] = set()
        for unit, structural in zip(self.folded.units, self.structure.unit_classes, strict=True):
            if structural not in seen:
                seen.add(structural)
                for role, layout in splits[unit.fold_class].layouts().items():
                    found[f"{structural}/{role}"] = layout
        return tuple(sorted(found.items()))

    def unsplit(self, tp: int) -> tuple[tuple[str, str], ...]:
        splits = self.split(tp)
        found: dict[str, str] = {}
        for unit, structural in zip(self.folded.units, self.structure.unit_classes, strict=True):
            for role, reason in splits[unit.fold_class].unsplit:
                found.setdefault(f"{structural}/{role}", reason)
        return tuple(sorted(found.items()))

    def table(self, mesh: Mesh, microbatch: int, recompute: Recompute) -> UnitTable:
        tp = mesh.axis_size("tp")
        key = (mesh.axis_size("dp") * tp, tp, microbatch, recompute)
        if key not in self._tables:
            self._tables[key] = self._make_table(mesh, microbatch, recompute)
        return self._tables[key]

    def _make_table(self, mesh: Mesh, microbatch: int, recompute: Recompute) -> UnitTable:
        tp = mesh.axis_size("tp")
        classes = self.class_costs(tp, microbatch)

        boundary = tuple(fixed + slope * microbatch for fixed, slope in self._boundaries())
        if self.sequence_parallel:
            boundary = tuple(-(-size // tp) for size in boundary)
        seconds = tuple(0.0 for _ in boundary)
        if mesh.axis_size("pp") > 1:
            known = {size: self._send_s(size, mesh) for size in set(boundary)}
            seconds = tuple(known[size] for size in boundary)
        ties, largest = self._held_parameters(tp)
        return UnitTable(
            tuple(classes[unit.fold_class] for unit in self.folded.units),
            boundary,
            seconds,
            ties,
            largest,
            recompute,
            self.repeated,
        )

    def _held_parameters(self, tp: int) -> tuple[tuple[tuple[tuple[int, ...], int], ...], int]:
        """What one rank holds of parameters at a tensor degree: of each tied one its users and entries, and the entries
        of the largest of all. Counted once for each degree."""
        if tp not in self._held:
            graph, units, classes, splits = self.graph, self.folded.units, self.folded.classes, self.split(tp)
            cut = {c: {tensor for tensor, _ in split.dims} for c, split in splits.items()}
            ties: list[tuple[tuple[int, ...], int]] = []
            largest = 0
            for parameter, users in self._users().items():
                # Only its class's first unit names the tensor that is split: repeated blocks are all alike.
                first = units[users[0]]
                place = first.parameters.index(parameter)
                named = graph.parameters[units[classes[first.fold_class][0]].parameters[place]].tensor
                entries = graph.tensors[graph.parameters[parameter].tensor].elements(1)
                elements = entries // (tp if named in cut[first.fold_class] else 1)
                largest = max(largest, elements)
                if len(users) > 1:
                    ties.append((users, elements))
            self._held[tp] = (tuple(ties), largest)
        return self._held[tp]

    @property
    def _added_bytes(self) -> int:
        """What adding one gradient entry to the sum over microbatches moves: it is read, the sum read and written."""
        width = PRECISION_BYTES[self.precision]
        return width + 2 * PRECISION_BYTES[self.gradient_precision or self.precision]

    @property
    def repeated(self) -> tuple[bool, ...]:
        """For every unit whether there are others like it."""
        members = self.folded.classes
        return tuple(len(members[unit.fold_class]) > 1 for unit in self.folded.units)

    def _send_s(self, size_bytes: int, mesh: Mesh) -> float:
        """Seconds of a message to the next stage, all ranks of the stage sending theirs at once.

        The ranks of a tensor group hold the same tensor: each sends a piece, and the receivers gather them over their
        own link, where that is faster (arXiv 2104.04473, section 4.1). Split sequences are sent as they are.
        """
        tp, per_stage = mesh.axis_size("tp"), mesh.axis_size("dp") * mesh.axis_size("tp")
        per_node = max(1, self.cluster.world_size // self.cluster.nodes)
        link = self.cluster.link_between(0, mesh.rank({"pp": 1}), concurrent=min(per_stage, per_node))
        whole = send_s(size_bytes, link)
        if tp == 1 or self.sequence_parallel:
            return whole
        return min(whole, send_s(size_bytes / tp, link) + self.cluster.group(range(tp)).all_gather_s(size_bytes))

    def _boundaries(self) -> tuple[tuple[int, int], ...]:
        """For every unit the bytes that enter it from before: (fixed, for each sample)."""
        if self._boundary is None:
            counter, starts = self.counter, [unit.first_op for unit in self.folded.units]

            def crossing(batch: int) -> list[int]:
                def sent_bytes(tensor: int) -> int:
                    if not counter.needs_gradient(tensor):
                        return 0  # what needs no gradient comes from the inputs, which every stage has
                    return counter.size_bytes(tensor, batch, self.precision)

                positions = crossing_bytes(self.graph, sent_bytes)
                return [int(positions[start]) for start in starts]

            self._boundary = tuple(
                (2 * one - two, two - one) for one, two in zip(crossing(1), crossing(2), strict=True)
            )
        return self._boundary

    def _users(self) -> dict[int, tuple[int, ...]]:
        users: dict[int, list[int]] = {}
        for unit in self.folded.units:
            for parameter in unit.parameters:
                users.setdefault(parameter, []).append(unit.index)
        return {parameter: tuple(units) for parameter, units in users.items()}

    def class_costs(self, tp: int, microbatch: int) -> tuple[UnitCost, ...]:
        if (tp, microbatch) not in self._costs:
            group = self.cluster.group(range(tp)) if tp > 1 else None
            splits = self.split(tp)
            found = []
            for members in self.folded.classes:
                unit = self.folded.units[members[0]]
                dims = splits[unit.fold_class].dims
                work = self._read.work(
                    unit, microbatch, self.precision, dims, tp, sequence_parallel=self.sequence_parallel and tp > 1
                )
                cut = {tensor for tensor, _ in dims}
                elements = sum(
                    self.graph.tensors[t].elements(1) // (tp if t in cut else 1)
                    for t in (self.graph.parameters[p].tensor for p in unit.parameters)
                )
                trained = sum(
                    self.graph.tensors[p.tensor].elements(1) // (tp if p.tensor in cut else 1)
                    for p in (self.graph.parameters[index] for index in unit.parameters)
                    if p.trainable
                )
                found.append(
                    unit_cost(
                        work,
                        self.device,
                        self.precision,
                        reduce_s=group.all_reduce_s if group else None,
                        parameters=elements,
                        gradient_bytes=trained * self._added_bytes,
                    )
                )
            self._costs[tp, microbatch] = tuple(found)
        return self._costs[tp, microbatch]
