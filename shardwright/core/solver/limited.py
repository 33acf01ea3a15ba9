"""The least cost under a limit of weight: a price on weight first, a mixed-integer programme where that leaves a
gap."""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from shardwright.core.errors import PlanError
from shardwright.core.solver.network import Network

GAP = 0.01
"""The relative distance from the bound above which the mixed-integer programme is asked."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One option for every node."""

    chosen: tuple[int, ...]
    cost: float
    weight: float
    gap: float
    """(cost - bound) / cost: no answer within the limit is cheaper than the bound. 0 is exact."""


def least_within(network: Network, limit: float, *, time_limit_s: float = 10.0) -> Answer:
    """The cheapest options whose weights add up to ``limit`` at most.

    A price on weight gives a bound and an answer (Lagrangian relaxation; Everett 1963); the price is bisected. If the
    answer is further than `GAP` from the bound, HiGHS solves the whole as a mixed-integer programme. Raises PlanError
    when not even the lightest options fit.
    """
    cost, chosen = network.least()
    weight = network.total(chosen)[1]
    if weight <= limit:
        return Answer(chosen, cost, weight, 0.0)
    heaviest = sum(
        float(np.max(np.where(np.isfinite(c), w, 0))) for c, w in zip(network.costs, network.weights, strict=True)
    )
    spread = max(cost, 1e-12) * 1e6
    low, high = 0.0, spread / max(heaviest, 1.0)
    _, lightest = network.least(high)
    lightest_cost, lightest_weight = network.total(lightest)
    if lightest_weight > limit:
        raise PlanError(f"not even the lightest layouts fit: they weigh {lightest_weight:.3g} of {limit:.3g} bytes")
    best, bound = (lightest_cost, lightest_weight, lightest), cost
    for _ in range(60):
        price = (low + high) / 2
        value, tried = network.least(price)
        found, found_weight = network.total(tried)
        bound = max(bound, value - price * limit)
        if found_weight <= limit:
            high = price
            if found < best[0]:
                best = (found, found_weight, tried)
        else:
            low = price
        if best[0] - bound <= 1e-9 * max(best[0], 1e-30) or high - low < 1e-12 * high:
            break
    answer = Answer(best[2], best[0], best[1], max(0.0, (best[0] - bound) / best[0]) if best[0] else 0.0)
    return answer if answer.gap <= GAP else programme(network, limit, answer, time_limit_s)


def programme(network: Network, limit: float, known: Answer, time_limit_s: float) -> Answer:
    """The same as a mixed-integer programme: one binary for every option, one share for every pair of an edge."""
    starts = np.cumsum([0, *(len(c) for c in network.costs)])
    cost = np.concatenate(network.costs)
    weight = np.concatenate(network.weights)
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    lower: list[float] = []
    upper: list[float] = []

    def constrain(terms: list[tuple[int, float]], low: float, high: float) -> None:
        for column, value in terms:
            rows.append(len(lower))
            columns.append(column)
            values.append(value)
        lower.append(low)
        upper.append(high)

    for node in range(len(network.costs)):
        constrain([(int(i), 1.0) for i in range(starts[node], starts[node + 1])], 1, 1)
    pair_costs: list[float] = []
    first_pair = int(starts[-1])
    for (a, b), table in network.edges.items():
        base = first_pair + len(pair_costs)
        pair_costs += [float(v) for v in table.reshape(-1)]
        for i in range(table.shape[0]):
            constrain(
                [*((base + i * table.shape[1] + j, 1.0) for j in range(table.shape[1])), (int(starts[a]) + i, -1.0)],
                0,
                0,
            )
        for j in range(table.shape[1]):
            constrain(
                [*((base + i * table.shape[1] + j, 1.0) for i in range(table.shape[0])), (int(starts[b]) + j, -1.0)],
                0,
                0,
            )
    constrain([(i, float(w)) for i, w in enumerate(weight) if w], 0, limit)
    objective = np.concatenate([cost, np.asarray(pair_costs)])
    allowed = np.isfinite(objective)
    scale = max(float(np.max(np.abs(objective[allowed]), initial=0.0)), 1e-30)
    count = len(objective)
    matrix = coo_array((values, (rows, columns)), shape=(len(lower), count)).tocsr()
    found = milp(
        np.where(allowed, objective, 0.0) / scale,
        integrality=np.concatenate([np.ones(first_pair), np.zeros(count - first_pair)]),
        bounds=Bounds(np.zeros(count), allowed.astype(float)),
        constraints=LinearConstraint(matrix, np.asarray(lower), np.asarray(upper)),
        options={"time_limit": time_limit_s, "mip_rel_gap": 1e-6},
    )
    if found.x is None:
        return known
    chosen = tuple(int(np.argmax(found.x[starts[n] : starts[n + 1]])) for n in range(len(network.costs)))
    total, weighs = network.total(chosen)
    if total >= known.cost or weighs > limit * (1 + 1e-9):
        return known
    bound = float(found.mip_dual_bound) * scale if found.mip_dual_bound is not None else 0.0
    return Answer(chosen, total, weighs, max(0.0, (total - bound) / total) if total else 0.0)
