"""Choices with costs of their own and costs of pairs, minimised exactly.

Every node has options. An option has a cost and a weight (seconds, bytes), and an edge adds a cost for each pair of
options.
The least total comes from eliminating nodes one by one (dynamic programming over a tree decomposition; Bertelè and
Brioschi, Nonserial Dynamic Programming, 1972). Blocks of real models are close to series-parallel, so tables stay
small.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardwright.core.errors import PlanError
from shardwright.core.values.found_once import found_once

Table = NDArray[np.float64]
MAX_TABLE = 40_000_000
"""The entries of the largest table that elimination may build; a graph that needs more does not suit this method."""


ORDERS = 12
EASY = 20_000
"""The entries of all tables together up to which the first order is good enough."""


@dataclass
class Network:
    """A network that is built node by node and solved by `least`."""

    costs: list[Table] = field(default_factory=list)
    weights: list[Table] = field(default_factory=list)
    edges: dict[tuple[int, int], Table] = field(default_factory=dict)

    def node(self, costs: Sequence[float], weights: Sequence[float] | None = None) -> int:
        """Add a node with these costs per option (infinite: not allowed) and return its number."""
        self.costs.append(np.asarray(costs, dtype=np.float64))
        self.weights.append(np.asarray(weights if weights is not None else np.zeros(len(costs)), dtype=np.float64))
        return len(self.costs) - 1

    def edge(self, first: int, second: int, costs: Table) -> None:
        """Add the costs of pairs, [option of first, option of second]."""
        if len(self.costs[first]) == 1:  # no choice on one side: the cost is the other node's own
            self.costs[second] = self.costs[second] + costs[0]
            return
        if len(self.costs[second]) == 1:
            self.costs[first] = self.costs[first] + costs[:, 0]
            return
        key, table = ((first, second), costs) if first < second else ((second, first), costs.T)
        self.edges[key] = self.edges[key] + table if key in self.edges else np.asarray(table, dtype=np.float64)

    def total(self, chosen: Sequence[int]) -> tuple[float, float]:
        """The (cost, weight) of one option for every node."""
        cost = sum(float(self.costs[n][c]) for n, c in enumerate(chosen))
        cost += sum(float(table[chosen[a], chosen[b]]) for (a, b), table in self.edges.items())
        return cost, sum(float(self.weights[n][c]) for n, c in enumerate(chosen))

    def least(self, price: float = 0.0, fixed: Mapping[int, int] | None = None) -> tuple[float, tuple[int, ...]]:
        """The least cost + price · weight, and its options. Raises PlanError where nothing is allowed."""
        value, choices = self.tables((), price, fixed)
        return float(value), choices(())

    def tables(
        self, kept: Sequence[int], price: float = 0.0, fixed: Mapping[int, int] | None = None
    ) -> tuple[Table, "Choices"]:
        """The least for every combination of options of the nodes in ``kept``, and the choices that attain it."""
        held = fixed or {}
        factors: list[tuple[tuple[int, ...], Table]] = []
        for node, (cost, weight) in enumerate(zip(self.costs, self.weights, strict=True)):
            own = cost + price * weight
            if node in held:
                own = np.where(np.arange(len(own)) == held[node], own, np.inf)
            factors.append(((node,), own))
        factors += [((a, b), table) for (a, b), table in self.edges.items()]
        sizes = [len(c) for c in self.costs]
        order: list[tuple[int, tuple[int, ...], NDArray[np.intp]]] = []
        touching: dict[int, set[int]] = {n: set() for n in range(len(sizes))}
        live: dict[int, tuple[tuple[int, ...], Table]] = dict(enumerate(factors))
        for key, (scope, _) in live.items():
            for n in scope:
                touching[n].add(key)
        fresh = len(factors)
        for node in self._order(tuple(kept)):
            scope = tuple(sorted(self._scope(node, touching, live) - {node}))
            scope = (*scope, node)
            if _size(set(scope), sizes) > MAX_TABLE:
                raise PlanError(
                    f"the ops of one unit are too entangled to solve exactly: a table of {len(scope)} nodes would be "
                    "needed. Cut the unit into smaller modules, or pin some of its layouts"
                )
            summed = np.zeros([sizes[n] for n in scope])
            for key in sorted(touching[node]):
                of, table = live.pop(key)
                summed += _aligned(table, of, scope)
                for n in of:
                    touching[n].discard(key)
            best = np.argmin(summed, axis=-1)
            order.append((node, scope[:-1], best))
            live[fresh] = (scope[:-1], np.take_along_axis(summed, best[..., None], axis=-1)[..., 0])
            for n in scope[:-1]:
                touching[n].add(fresh)
            fresh += 1
        result = np.zeros([sizes[n] for n in kept])
        for of, table in live.values():
            result = result + _aligned(table, of, tuple(kept))
        if not np.isfinite(result).any():
            raise PlanError("no combination of layouts is allowed: some pins contradict each other or the framework")
        return result, Choices(tuple(kept), tuple(order), len(sizes))

    def is_solvable(self, kept: Sequence[int]) -> bool:
        """Whether `tables` can build the tables that it needs."""
        sizes = [len(c) for c in self.costs]
        near = _neighbours(len(sizes), self.edges)
        for node in self._order(tuple(kept)):
            if _size(near[node] | {node}, sizes) > MAX_TABLE:
                return False
            _eliminate(near, node)
        return True

    @found_once
    def _order(self, kept: tuple[int, ...]) -> tuple[int, ...]:
        """An order of elimination: the best of a few greedy, seeded ones, by the entries of all tables together."""
        sizes = [len(c) for c in self.costs]
        best = _greedy(sizes, self.edges, kept, 0)
        for seed in range(1, ORDERS if best[0] > EASY else 1):
            best = min(best, _greedy(sizes, self.edges, kept, seed))
        return best[1]

    def _scope(
        self, node: int, touching: Mapping[int, set[int]], live: Mapping[int, tuple[tuple[int, ...], Table]]
    ) -> set[int]:
        return {node}.union(*(live[key][0] for key in touching[node]))


@dataclass(frozen=True)
class Choices:
    """The choices that attain each entry of a table: call it with an option for every kept node."""

    kept: tuple[int, ...]
    order: tuple[tuple[int, tuple[int, ...], NDArray[np.intp]], ...]
    nodes: int

    def __call__(self, options: Sequence[int]) -> tuple[int, ...]:
        chosen = dict(zip(self.kept, options, strict=True))
        for node, scope, best in reversed(self.order):
            chosen[node] = int(best[tuple(chosen[n] for n in scope)])
        return tuple(chosen[n] for n in range(self.nodes))


def _greedy(
    sizes: Sequence[int], edges: Iterable[tuple[int, int]], kept: Sequence[int], seed: int
) -> tuple[int, tuple[int, ...]]:
    """The pair (entries of all tables, order) when the node with the cheapest table goes first. Seeds weigh what
    remains after a step against the cost of the step, and break ties."""
    draws = np.random.default_rng(seed)
    keeps_weight = (0.0, 0.5, 1.0)[seed % 3]
    near = _neighbours(len(sizes), edges)
    noise = 1 + (0.3 if seed > 2 else 0.0) * draws.random(len(sizes))
    left = set(range(len(sizes))) - set(kept)
    order, total = [], 0

    def score(node: int) -> float:
        table = _size(near[node], sizes)
        return float(noise[node] * table * sizes[node] ** (1 - keeps_weight))

    scores = {node: score(node) for node in left}
    while left:
        node = min(left, key=lambda n: (scores[n], n))
        total += _size(near[node] | {node}, sizes)
        order.append(node)
        left.discard(node)
        _eliminate(near, node)
        for other in near[node] & left:
            scores[other] = score(other)
    return total, tuple(order)


def _neighbours(nodes: int, edges: Iterable[tuple[int, int]]) -> list[set[int]]:
    near: list[set[int]] = [set() for _ in range(nodes)]
    for a, b in edges:
        near[a].add(b)
        near[b].add(a)
    return near


def _eliminate(near: list[set[int]], node: int) -> None:
    """Eliminate a node: its neighbours become each other's neighbours."""
    for other in near[node]:
        near[other] |= near[node]
        near[other] -= {other, node}


def _size(scope: set[int], sizes: Sequence[int]) -> int:
    product = 1
    for n in scope:
        product *= sizes[n]
    return product


def _aligned(table: Table, of: tuple[int, ...], scope: tuple[int, ...]) -> Table:
    """The table with its dims in the order of ``scope``, and size 1 where it does not depend on a node."""
    order = sorted(range(len(of)), key=lambda i: scope.index(of[i]))
    moved = np.transpose(table, order)
    shape = [1] * len(scope)
    for i, position in enumerate(order):
        shape[scope.index(of[position])] = moved.shape[i]
    return moved.reshape(shape)
