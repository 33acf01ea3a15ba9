"""The modes of recompute that a search chooses from: among them, under "products", which modules' products are kept.

A unit that keeps no result computes everything again. Each result that it keeps spares the product that makes it, and
takes its bytes; so the modules whose products take most FLOPs for a byte of results come first, and the choices are the
first one of that order, the first two, and so on (the greedy order of a knapsack, as of PyTorch's automatic choice,
`torch.distributed._tools.sac_estimator`).
"""

from shardwright.core.cost.work import UnitWork
from shardwright.core.errors import PlanError, nearest
from shardwright.core.search.request import Request
from shardwright.core.tables.cost_tables import CostTables
from shardwright.core.values.recompute_modes import NAMED, Recompute, keeping_products_of, kept_modules, kind_of

SEARCHED: tuple[Recompute, ...] = ("none", "selective", "full")
"""The modes that a free search tries."""


def recompute_choices(tables: CostTables, request: Request) -> tuple[Recompute, ...]:
    """The modes that a search for ``request`` chooses from, the one that saves least first.

    Raises:
        PlanError: modules are named that make no product in any unit that is recomputed (the nearest is named), or
            there are none such.
    """
    asked = request.recompute
    if asked == "auto":
        return SEARCHED
    if kind_of(asked) != NAMED:
        return (asked,)
    made = {each.module: each for unit in _recomputed(tables) for each in unit.results}
    if not made:
        raise PlanError(
            f"recompute={asked!r}: no unit of {tables.graph.model_name} that would be recomputed makes a product: take "
            f"'none' or 'full'"
        )
    if asked != NAMED:
        unknown = sorted(kept_modules(asked) - set(made))
        if unknown:
            raise PlanError(
                f"recompute={asked!r}: {unknown[0]!r} is no module of a unit that makes a product: "
                f"{nearest(unknown[0], made)}"
            )
        return (asked,)
    gains = _flops_of_a_byte(tables)
    order = sorted(gains, key=lambda module: (-gains[module], module))
    kept = [keeping_products_of(frozenset(order[:count])) for count in range(len(order), 0, -1)]
    return ("none", *kept, "full")


def _recomputed(tables: CostTables) -> list[UnitWork]:
    """The work of the units that are recomputed."""
    units = zip(tables.folded.units, tables.recomputable, strict=True)
    return [tables.counter.count(unit, 1, tables.precision) for unit, may in units if may]


def _flops_of_a_byte(tables: CostTables) -> dict[str, float]:
    """The FLOPs that a byte of the results of each module spares, by its path inside of a unit; none of those that
    would not be computed again."""
    execution = tables.execution
    is_compiled = execution.kernels == "compiled"
    flops: dict[str, int] = {}
    size_bytes: dict[str, int] = {}
    for unit in _recomputed(tables):
        for made in unit.results:
            if made.is_read[is_compiled] or not execution.stops_early:
                flops[made.module] = flops.get(made.module, 0) + made.product.flops
                size_bytes[made.module] = size_bytes.get(made.module, 0) + made.size_bytes
    return {module: flops[module] / max(1, size_bytes[module]) for module in flops}
