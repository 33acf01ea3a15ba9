"""What a plan was counted from, as its file keeps it: the captured graph, the devices, and what was asked beside the
decision. With it an edited plan is counted anew without the model (`core.search.rescore`)."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Generic, TypeVar

from annotated_types import Len

from shardwright.core.capabilities import Capabilities
from shardwright.core.cluster.cluster import Cluster
from shardwright.core.cluster.hardware import profile_names
from shardwright.core.errors import ClusterError, PlanError, nearest
from shardwright.core.layout.pinned_layout import Pin
from shardwright.core.model.graph import Graph
from shardwright.core.model.graph_document import GraphDocument, documents_of, graph_of

Given = TypeVar("Given")
Found = TypeVar("Found")
REMEMBERED_GRAPHS = 8
"""The number of graphs whose tables are remembered, and of tables whose graph is: plans of one model differ in their
pins, and each is counted several times."""


@dataclass(frozen=True)
class PlanInput:
    """The input of a plan beside its decision."""

    digest: str
    """A digest of the tables of the graph, without the memory of units, which follows from it."""
    cluster: Cluster
    """The devices that the plan uses, without those that were left out."""
    options: tuple[tuple[str, bool | int | float | str], ...]
    """The options of `plan()` that were given and are no part of the decision."""
    pins: tuple[Pin, ...]
    """The parameters whose layouts were pinned, by the model itself too."""
    runtimes: tuple[Capabilities, ...]
    """The runtimes that must be able to carry the plan out."""
    source: "Graph | tuple[GraphDocument, ...]" = field(compare=False, repr=False)
    """The captured graph; or its tables, as a file has them."""

    @classmethod
    def of(
        cls,
        graph: Graph,
        cluster: Cluster,
        options: dict[str, Any],
        pins: tuple[Pin, ...],
        runtimes: tuple[Capabilities, ...],
    ) -> "PlanInput":
        """The input of a plan that was made from these."""
        return cls(_OWN_DIGESTS.of(id(graph), graph), cluster, tuple(sorted(options.items())), pins, runtimes, graph)

    @cached_property
    def cluster_text(self) -> str:
        """The devices as text, the same for equal devices."""
        return json.dumps(self.cluster.to_document(), sort_keys=True)

    def graph(self) -> Graph:
        """The captured graph. Raises PlanError where its tables are those of no graph."""
        return self.source if isinstance(self.source, Graph) else _GRAPHS.of(self.digest, self.source)

    def document(self) -> "InputDocument":
        """The input as a file has it. What the graph has not told yet, as of the memory of units in 16 bits, is found
        now."""
        graphs = _DOCUMENTS.of(id(self.source), self.source) if isinstance(self.source, Graph) else self.source
        return InputDocument(_digest(graphs), self.cluster, self.options, self.pins, self.runtimes, graphs)

    def __reduce__(self) -> tuple[Any, ...]:
        return InputDocument.input, (self.document(),)


@dataclass(frozen=True)
class InputDocument:
    """The input of a plan in its file."""

    digest: str
    """A digest of the tables of the graph. They are not for editing: a plan file in which they were is refused."""
    cluster: Cluster
    options: tuple[tuple[str, bool | int | float | str], ...]
    pins: tuple[Pin, ...]
    runtimes: tuple[Capabilities, ...]
    graphs: Annotated[tuple[GraphDocument, ...], Len(1, 2)]
    """The tables of the captured graph, and of its graph of 16-bit steps where it has one."""

    def input(self) -> PlanInput:
        """The input that the plan of the file has."""
        own = _digest(tuple(document.without_unit_memory() for document in self.graphs))
        return PlanInput(own, self.cluster, self.options, self.pins, self.runtimes, self.graphs)

    def require_intact(self) -> None:
        """Raise PlanError where the tables of the graph are not those that the digest is of."""
        if (own := _digest(self.graphs)) != self.digest:
            raise PlanError(
                f"digest: {self.digest!r} does not belong to these graphs ({own!r}): the captured graph was edited; "
                f"plan again, or restore it"
            )


def cluster_of(document: dict[str, Any]) -> Cluster:
    """The cluster of a plan file's document. Raises ClusterError as `Cluster.from_document`, and for a device that is
    named and not in the catalogue: a plan file reads no other file."""
    groups = document.get("groups", [document])
    for group in groups if isinstance(groups, list) else []:
        device = group.get("device") if isinstance(group, dict) else None
        if isinstance(device, str) and device not in profile_names():
            raise ClusterError(f"cluster: device {device!r} is not known; {nearest(device, profile_names())}")
    return Cluster.from_document(document, "cluster")


def _digest(documents: tuple[GraphDocument, ...]) -> str:
    return hashlib.sha256(repr(documents).encode()).hexdigest()[:16]


class _Remembered(Generic[Given, Found]):
    """What was found of the last few objects, by a key, which are kept alive."""

    def __init__(self, find: Callable[[Given], Found]) -> None:
        self._find = find
        self._known: OrderedDict[int | str, tuple[Given, Found]] = OrderedDict()

    def of(self, key: int | str, given: Given) -> Found:
        known = self._known.pop(key, None)
        if known is None or not (known[0] is given or known[0] == given):
            known = given, self._find(given)
        self._known[key] = known
        while len(self._known) > REMEMBERED_GRAPHS:
            self._known.popitem(last=False)
        return known[1]


_DOCUMENTS = _Remembered[Graph, tuple[GraphDocument, ...]](documents_of)
_GRAPHS = _Remembered[tuple[GraphDocument, ...], Graph](graph_of)
_OWN_DIGESTS = _Remembered[Graph, str](lambda graph: _digest(documents_of(graph, with_unit_memory=False)))
