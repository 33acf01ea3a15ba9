"""The stages of the ops that no unit holds, chosen so that the fewest bytes cross between stages.

A plan says where units run. The ops between them (a sum of two branches, a pooling, the loss) may run on any stage from
the latest that they read from to the first that reads from them. This takes a choice that sends the fewest bytes over
every border between stages: a minimum cut for each border, whose solutions are nested.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProgramOp:
    """One op of a program, as a cut into stages sees it."""

    reads: Sequence[int]
    """The values that the op reads; values that no op of the program makes are on every stage."""
    makes: Sequence[int]
    stage: int | None = None
    """The stage that the plan gives the op; None where it is open."""
    homes: frozenset[int] = frozenset()
    """The stages that hold the parameters that an open op uses. It runs at the first of them that is not behind the ops
    before it, and in any case at the only one."""


def open_stages(ops: Sequence[ProgramOp], stages: int, size_bytes: Callable[[int], int]) -> list[int]:
    """The stage of every op of a program that runs in order. No op runs before an op that it reads, so an op may run
    later than the stage that the plan gives it.

    ``size_bytes`` is the size of a value of the program. Among choices that send as much, ops run as late as they can.
    """
    program = _Program(ops, stages, size_bytes)
    found = list(program.earliest)
    for group in program.open_groups():
        for index in group:
            found[index] = program.latest[index]
        first, last = min(program.earliest[i] for i in group), max(program.latest[i] for i in group)
        for stage in reversed(range(first, last)):
            for index in program.up_to(stage, group):
                found[index] = min(found[index], stage)
    return found


class _Program:
    """The ops with their makers, readers and bounds."""

    def __init__(self, ops: Sequence[ProgramOp], stages: int, size_bytes: Callable[[int], int]) -> None:
        self.size_bytes = size_bytes
        self.maker = {value: index for index, op in enumerate(ops) for value in op.makes}
        self.reads = [
            tuple(dict.fromkeys(v for v in op.reads if self.maker.get(v, index) < index))
            for index, op in enumerate(ops)
        ]
        """The values of earlier ops that each op reads."""
        self.readers: dict[int, list[int]] = {}
        for index, values in enumerate(self.reads):
            for value in values:
                self.readers.setdefault(value, []).append(index)
        self.makes = [tuple(v for v in op.makes if v in self.readers) for op in ops]
        known = self._known(ops)
        self.earliest: list[int] = []
        for own, values in zip(known, self.reads, strict=True):
            self.earliest.append(max([own or 0, *(self.earliest[self.maker[v]] for v in values)]))
        self.latest = [stages - 1 if own is None else at for own, at in zip(known, self.earliest, strict=True)]
        for index in reversed(range(len(ops))):
            for value in self.reads[index]:
                before = self.maker[value]
                self.latest[before] = max(self.earliest[before], min(self.latest[before], self.latest[index]))

    @staticmethod
    def _known(ops: Sequence[ProgramOp]) -> list[int | None]:
        """The stages of the ops that are placed by the plan or by the parameters that they use; None for the others."""
        found: list[int | None] = []
        so_far = 0
        for op in ops:
            own = op.stage
            if own is None:
                own = min(op.homes if len(op.homes) == 1 else {h for h in op.homes if h >= so_far}, default=None)
            found.append(own)
            so_far = max(so_far, own or 0)
        return found

    def open_groups(self) -> list[list[int]]:
        """The ops that have a choice, in groups that share no value."""
        import networkx as nx  # which nothing else needs to train: loading it takes a while

        graph: nx.Graph = nx.Graph()
        for index in range(len(self.reads)):
            if self.earliest[index] < self.latest[index]:
                graph.add_node(index)
                graph.add_edges_from((index, -1 - value) for value in (*self.reads[index], *self.makes[index]))
        return [sorted(node for node in part if node >= 0) for part in nx.connected_components(graph)]

    def up_to(self, stage: int, group: Sequence[int]) -> list[int]:
        """The ops of a group that run on this stage or before, where the fewest bytes leave these stages: as few ops as
        reach that minimum."""
        import networkx as nx

        def side(index: int) -> int | str:
            if self.latest[index] <= stage:
                return "before"
            return "behind" if self.earliest[index] > stage else index

        # Edges lead back: of the sides of a cut networkx makes that of the sink the smallest.
        flow = nx.DiGraph()
        flow.add_nodes_from(["before", "behind"])
        for value in dict.fromkeys(v for index in group for v in (*self.reads[index], *self.makes[index])):
            made, readers = side(self.maker[value]), {side(reader) for reader in self.readers[value]}
            if made != "behind":
                flow.add_edge(("value", value), made, capacity=self.size_bytes(value))
                flow.add_edges_from((reader, ("value", value)) for reader in sorted(readers - {"before"}, key=str))
                flow.add_edges_from((made, reader) for reader in sorted(readers - {"before", "behind"}, key=str))
        method = nx.algorithms.flow.shortest_augmenting_path
        _, (_, reached) = nx.minimum_cut(flow, "behind", "before", flow_func=method)
        return [index for index in group if side(index) == "before" or index in reached]
