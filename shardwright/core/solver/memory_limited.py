"""The least time under a limit on weight: all units in a row as one mixed-integer programme.

A price on weight finds only answers on the convex hull of (weight, time), and small models have few of these, far
apart. The programme (binaries for options, shares for pairs: the local polytope of Schlesinger, 1976) finds the answers
between them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shardwright.core.layout.placements import Placement
from shardwright.core.solver.network import Network

MAX_PAIRS = 20_000
"""The most pairs of options, over all edges, for which the programme is solved: a few seconds of HiGHS."""
MAX_BRANCHES = 500
"""The number of branches that HiGHS may try: a count, so that equal models get equal layouts on any machine."""
RELATIVE_GAP = 1e-4
"""The relative gap at which HiGHS may stop."""
TOLERANCE = 1e-6
"""The error of HiGHS in an objective of about 1."""


@dataclass(frozen=True, slots=True)
class Part:
    """One unit of the row."""

    network: Network
    enters: int | None
    """The node of the value that comes from the previous unit; its options are those of that unit's ``leaves``."""
    leaves: int | None
    fixed: Mapping[int, int]
    """The option of each node where there is no choice."""
    parameters: Mapping[int, tuple[int, Sequence[tuple[Placement, ...]]]]
    """The node of each parameter's tensor, and the placements of its options. A tensor has one placement in all of its
    units."""


@dataclass(frozen=True, slots=True)
class Row:
    """All units as one network."""

    network: Network
    nodes: tuple[tuple[int, ...], ...]
    """The nodes of each unit in the network."""

    @classmethod
    def of(cls, parts: Sequence[Part]) -> "Row":
        whole, found = Network(), list[tuple[int, ...]]()
        before: int | None = None
        users: dict[int, tuple[int, Sequence[tuple[Placement, ...]]]] = {}
        for part in parts:
            nodes: list[int] = []
            for node, (cost, weight) in enumerate(zip(part.network.costs, part.network.weights, strict=True)):
                if node in part.fixed:
                    cost = np.where(np.arange(len(cost)) == part.fixed[node], cost, np.inf)
                if node == part.enters and before is not None:
                    whole.costs[before] = whole.costs[before] + cost
                    whole.weights[before] = whole.weights[before] + weight
                    nodes.append(before)
                else:
                    nodes.append(whole.node(list(cost), list(weight)))
            for (a, b), table in part.network.edges.items():
                whole.edge(nodes[a], nodes[b], table)
            for tensor, (node, places) in part.parameters.items():
                if tensor in users:
                    other, theirs = users[tensor]
                    alike = np.array([[a == b for b in places] for a in theirs])
                    whole.edge(other, nodes[node], np.where(alike, 0.0, np.inf))
                users[tensor] = nodes[node], places
            before = None if part.leaves is None else nodes[part.leaves]
            found.append(tuple(nodes))
        return cls(whole, tuple(found))

    def least_within(self, limit: float, price: float, known: float) -> tuple[list[tuple[int, ...]] | None, float]:
        """The options of every unit's nodes with the least cost + price · weight and at most ``limit`` of weight, and a
        bound below which no answer within the limit is. None and 0 where the programme is too large, or HiGHS found
        nothing. ``known`` is the cost of some answer."""
        if sum(table.size for table in self.network.edges.values()) > MAX_PAIRS:
            return None, 0.0
        chosen, bound = _programme(self.network, limit, price, known)
        return None if chosen is None else [tuple(chosen[n] for n in nodes) for nodes in self.nodes], bound


def _programme(network: Network, limit: float, price: float, known: float) -> tuple[tuple[int, ...] | None, float]:
    """The options of the least cost, and a bound, from HiGHS. The programme has one binary for every option and one
    share for every pair of an edge; the shares of the pairs of one option add up to its binary."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # which most plans do without: loading it takes a while
    from scipy.sparse import coo_array

    starts = np.cumsum([0, *(len(c) for c in network.costs)])
    count, rows = int(starts[-1]), len(network.costs)
    of = np.repeat(np.arange(rows), np.diff(starts))
    terms: list[tuple[NDArray[np.intp], NDArray[np.intp], float]] = [(of, np.arange(count), 1.0)]
    for (a, b), table in network.edges.items():
        pairs = count + np.arange(table.size)
        for node, option in zip((a, b), np.indices(table.shape), strict=True):
            options = np.arange(len(network.costs[node]))
            terms += [(rows + option.ravel(), pairs, 1.0), (rows + options, starts[node] + options, -1.0)]
            rows += len(options)
        count += table.size
    row, column = (np.concatenate([term[i] for term in terms]) for i in (0, 1))
    value = np.concatenate([np.full(len(term[0]), term[2]) for term in terms])
    matrix = coo_array((value, (row, column)), shape=(rows, count)).tocsr()
    sums = np.zeros(rows)
    sums[: len(network.costs)] = 1
    weight = np.concatenate([*network.weights, np.zeros(count - starts[-1])])
    weigh = coo_array(weight[None] * (1e3 / limit)).tocsr()  # HiGHS holds rows to 1e-6: a limit to 1e-9 of itself
    objective = np.concatenate([*network.costs, *(table.ravel() for table in network.edges.values())]) + price * weight
    allowed = np.isfinite(objective)
    scale = known or 1.0
    found = milp(
        np.where(allowed, objective, 0.0) / scale,
        integrality=np.arange(count) < starts[-1],
        bounds=Bounds(np.zeros(count), allowed.astype(float)),
        constraints=[LinearConstraint(matrix, sums, sums), LinearConstraint(weigh, -np.inf, 1e3)],
        options={"node_limit": MAX_BRANCHES, "mip_rel_gap": RELATIVE_GAP},
    )
    if found.status > 1:  # neither solved nor out of branches
        return None, 0.0
    bound = 0.0 if found.mip_dual_bound is None else (float(found.mip_dual_bound) - TOLERANCE) * scale
    if found.x is None:
        return None, bound
    return tuple(int(np.argmax(found.x[a:b])) for a, b in pairwise(starts)), bound
