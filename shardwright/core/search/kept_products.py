"""The modes of recompute that a search chooses from: among them, under "products", which modules' products are kept.

A unit that keeps no result computes everything again. Each result that it keeps spares the product that makes it, and
takes its bytes. The choices are the sets of modules of which no other spares as many FLOPs in as few bytes: the front
of a knapsack.
"""

from shardwright.core.cost.work import UnitWork
from shardwright.core.errors import PlanError, nearest
from shardwright.core.search.request import Request
from shardwright.core.tables.cost_tables import CostTables
from shardwright.core.values.recompute_modes import NAMED, Recompute, keeping_products_of, kept_modules, kind_of

SEARCHED: tuple[Recompute, ...] = ("none", "selective", "full")
"""The modes that a free search tries."""
MOST = 16
"""The most sets of modules that a search tries, evenly spread over their front."""


def recompute_choices(tables: CostTables, request: Request) -> tuple[Recompute, ...]:
    """The modes that a search for ``request`` chooses from, the one that saves least first.

    Raises:
        PlanError: modules are named that make no product in any unit that is recomputed (the nearest is named), or
            there are none such.
    """
    asked = request.recompute
    if asked == "auto":
        return SEARCHED
    if request.other_recompute is not None:
        _require_products(tables, "other_recompute", request.other_recompute)
    _require_products(tables, "recompute", asked)
    if asked != NAMED:
        return (asked,)
    return ("none", *(keeping_products_of(modules) for modules in reversed(_front(tables))), "full")


def _require_products(tables: CostTables, name: str, mode: str) -> None:
    """Raise PlanError for a mode that names, or is to name, modules that make no product where units are recomputed."""
    if kind_of(mode) != NAMED:
        return
    made = {each.module for unit in _recomputed(tables) for each in unit.results}
    if not made:
        raise PlanError(
            f"{name}={mode!r}: no unit of {tables.graph.model_name} that would be recomputed makes a product: take "
            f"'none' or 'full'"
        )
    unknown = sorted(kept_modules(mode) - made) if mode != NAMED else []
    if unknown:
        raise PlanError(
            f"{name}={mode!r}: {unknown[0]!r} is no module of a unit that makes a product: {nearest(unknown[0], made)}"
        )


def _recomputed(tables: CostTables) -> list[UnitWork]:
    """The work of the units that are recomputed."""
    units = zip(tables.folded.units, tables.recomputable, strict=True)
    return [tables.counter.count(unit, 1, tables.precision) for unit, may in units if may]


def _front(tables: CostTables) -> list[frozenset[str]]:
    """The sets of modules of which no other spares as many FLOPs in as few bytes, from the fewest bytes on; at most
    `MOST` of them. Modules whose products would not be computed again are in none."""
    execution = tables.execution
    is_compiled = execution.kernels == "compiled"
    gains: dict[str, tuple[int, int]] = {}
    for unit in _recomputed(tables):
        for made in unit.results:
            if made.is_read[is_compiled] or not execution.stops_early:
                size_bytes, flops = gains.get(made.module, (0, 0))
                gains[made.module] = size_bytes + made.size_bytes, flops + made.product.flops
    front: list[tuple[int, int, frozenset[str]]] = [(0, 0, frozenset())]
    for module, (size_bytes, flops) in sorted(gains.items()):
        more = [(held + size_bytes, spared + flops, modules | {module}) for held, spared, modules in front]
        candidates = sorted([*front, *more], key=lambda each: (each[0], -each[1], len(each[2])))
        front = []
        for each in candidates:
            if not front or each[1] > front[-1][1]:
                front.append(each)
    found = [modules for *_, modules in front if modules]
    step = max(1.0, (len(found) - 1) / (MOST - 1))
    return [found[round(number * step)] for number in range(min(MOST, len(found)))]
