"""What units cost at every tensor degree and microbatch size: counted once, shared by all candidates of a search."""

from shardwright.core.cluster import Cluster
from shardwright.core.cost.collectives import send_s
from shardwright.core.cost.unit import UnitCost, unit_cost
from shardwright.core.cost.work import UnitWork, WorkCounter
from shardwright.core.fold import Folded, crossing_bytes, fold
from shardwright.core.graph import Graph
from shardwright.core.layout import Layout
from shardwright.core.memory import Recompute
from shardwright.core.mesh import Mesh
from shardwright.core.stages import MemoryRequest, UnitTable
from shardwright.core.structure import Binding, Structure, structure_of
from shardwright.core.tensor_parallel import UnitSplit, choose_splits


class CostTables:
    """The folded model on one kind of device, in one precision."""

    def __init__(self, graph: Graph, cluster: Cluster, precision: str | None, optimizer: str) -> None:
        self.graph, self.cluster, self.optimizer = graph, cluster, optimizer
        self.device = cluster.device(0)
        self.precision = precision or next((p for p in ("bf16", "fp16") if p in self.device.peak_flops_per_s), "fp32")
        self.folded: Folded = fold(graph)
        self.structure: Structure
        self.binding: Binding
        self.structure, self.binding = structure_of(self.folded)
        self.counter = WorkCounter(graph)
        self._splits: dict[int, dict[int, UnitSplit]] = {}
        self._tables: dict[tuple[int, int, int, Recompute], UnitTable] = {}
        self._costs: dict[tuple[int, int], tuple[UnitCost, ...]] = {}
        self._boundary: tuple[tuple[int, int], ...] | None = None

    def split(self, tp: int) -> dict[int, UnitSplit]:
        if tp not in self._splits:
            link = self.cluster.link_for_group(range(tp))
            state = MemoryRequest(0, self.precision, self.optimizer, 0, 1).state_bytes_per_element

            def occupancy(work: UnitWork, elements: int) -> float:
                """Seconds × bytes held: a tensor axis is there to save both."""
                cost = unit_cost(work, self.device, self.precision, degree=tp, link=link)
                return cost.total_s * (elements * state + work.saved_bytes)

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
        graph, tp = self.graph, mesh.axis_size("tp")
        classes = self.class_costs(tp, microbatch)

        boundary = tuple(fixed + slope * microbatch for fixed, slope in self._boundaries())
        seconds = tuple(0.0 for _ in boundary)
        if mesh.axis_size("pp") > 1:
            link = self.cluster.link_between(0, mesh.rank({"pp": 1}))
            seconds = tuple(send_s(size, link) for size in boundary)
        splits = self.split(tp)
        ties = []
        for parameter, users in self._users().items():
            if len(users) > 1:
                tensor = graph.parameters[parameter].tensor
                first = self.folded.units[users[0]]
                is_split = any(t == tensor for t, _ in splits[first.fold_class].dims)
                ties.append((users, graph.tensors[tensor].elements(1) // (tp if is_split else 1)))
        return UnitTable(
            tuple(classes[unit.fold_class] for unit in self.folded.units), boundary, seconds, tuple(ties), recompute
        )

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
            link = self.cluster.link_for_group(range(tp)) if tp > 1 else None
            splits = self.split(tp)
            found = []
            for members in self.folded.classes:
                unit = self.folded.units[members[0]]
                dims = splits[unit.fold_class].dims
                work = self.counter.count(unit, microbatch, self.precision, dims, tp)
                cut = {tensor for tensor, _ in dims}
                elements = sum(
                    self.graph.tensors[t].elements(1) // (tp if t in cut else 1)
                    for t in (self.graph.parameters[p].tensor for p in unit.parameters)
                )
                found.append(unit_cost(work, self.device, self.precision, degree=tp, link=link, parameters=elements))
            self._costs[tp, microbatch] = tuple(found)
        return self._costs[tp, microbatch]
