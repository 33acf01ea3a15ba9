"""What a plan was counted from, as its file keeps it: the captured graph, the devices, and what was asked beside the
decision. With it an edited plan is counted anew without the model (`core.search.rescore`)."""

import hashlib
import json
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

from annotated_types import Len

from shardwright.core.capabilities import Capabilities
from shardwright.core.cluster.cluster import Cluster
from shardwright.core.cluster.hardware import profile_names
from shardwright.core.errors import ClusterError, PlanError, nearest
from shardwright.core.layout.pinned_layout import Pin
from shardwright.core.model.graph import Graph
from shardwright.core.model.graph_document import GraphDocument, documents_of, graph_of

REMEMBERED_GRAPHS = 8
"""The number of graphs whose tables are remembered, and of tables whose graph is: plans of one model differ in their
pins, and each is counted several times."""


@dataclass(frozen=True)
class PlanInput:
    """The input of a plan beside its decision."""

    digest: str
    """A digest of the tables of the graph. They are not for editing: a plan file in which they were is refused."""
    cluster: Cluster
    """The devices that the plan uses, without those that were left out."""
    options: tuple[tuple[str, bool | int | float | str], ...]
    """The options of `plan()` that were given and are no part of the decision."""
    pins: tuple[Pin, ...]
    """The parameters whose layouts were pinned, by the model itself too."""
    runtimes: tuple[Capabilities, ...]
    """The runtimes that must be able to carry the plan out."""
    graphs: Annotated[tuple[GraphDocument, ...], Len(1, 2)]
    """The tables of the captured graph, and of its graph of 16-bit steps where it has one."""

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
        digest, documents = _documents(graph)
        return cls(digest, cluster, tuple(sorted(options.items())), pins, runtimes, documents)

    @cached_property
    def cluster_text(self) -> str:
        """The devices as text, the same for equal devices."""
        return json.dumps(self.cluster.to_document(), sort_keys=True)

    def require_intact(self) -> None:
        """Raise PlanError where the tables of the graph are not those that the digest is of."""
        if (own := _digest(self.graphs)) != self.digest:
            raise PlanError(
                f"digest: {self.digest!r} does not belong to these graphs ({own!r}): the captured graph was edited; "
                f"plan again, or restore it"
            )

    def graph(self) -> Graph:
        """The captured graph. Raises PlanError where its tables are those of no graph."""
        found = _GRAPHS.pop(self.digest, None)
        if found is None or found[0] != self.graphs:
            found = self.graphs, graph_of(self.graphs)
        _GRAPHS[self.digest] = found
        while len(_GRAPHS) > REMEMBERED_GRAPHS:
            _GRAPHS.popitem(last=False)
        return found[1]


def cluster_of(document: dict[str, Any]) -> Cluster:
    """The cluster of a plan file's document. Raises ClusterError as `Cluster.from_document`, and for a device that is
    named and not in the catalogue: a plan file reads no other file."""
    groups = document.get("groups", [document])
    for group in groups if isinstance(groups, list) else []:
        device = group.get("device") if isinstance(group, dict) else None
        if isinstance(device, str) and device not in profile_names():
            raise ClusterError(f"cluster: device {device!r} is not known; {nearest(device, profile_names())}")
    return Cluster.from_document(document, "cluster")


_DOCUMENTS: OrderedDict[int, tuple[Graph, tuple[str, tuple[GraphDocument, ...]]]] = OrderedDict()
_GRAPHS: OrderedDict[str, tuple[tuple[GraphDocument, ...], Graph]] = OrderedDict()


def _documents(graph: Graph) -> tuple[str, tuple[GraphDocument, ...]]:
    """The digest and the tables of a graph, which is known by identity and kept alive."""
    found = _DOCUMENTS.pop(id(graph), None)
    if found is None:
        documents = documents_of(graph)
        found = graph, (_digest(documents), documents)
    _DOCUMENTS[id(graph)] = found
    while len(_DOCUMENTS) > REMEMBERED_GRAPHS:
        _DOCUMENTS.popitem(last=False)
    return found[1]


def _digest(documents: tuple[GraphDocument, ...]) -> str:
    return hashlib.sha256(repr(documents).encode()).hexdigest()[:16]
