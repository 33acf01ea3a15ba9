"""The support of each registered backend, as a table for the documentation (`docs/backends.md`).

python -c "from shardwright.report.support import support_table; print(support_table())"
"""

from collections.abc import Callable

from shardwright.backends.registry import LEVELS, registered
from shardwright.core.capabilities import Capabilities

_ABILITIES: dict[str, Callable[[Capabilities], object]] = {
    "split backward passes": lambda has: has.split_backward,
    "recompute": lambda has: ", ".join(has.recomputes),
    "two modes of recompute in one plan": lambda has: has.mixes_recompute,
    "recompute under split backward passes": lambda has: has.recomputes_in_halves,
    "`shard`": lambda has: ", ".join(map(str, has.shard_levels)),
    "shard groups": lambda has: has.shard_groups,
    "gathers and sums as the plan says": lambda has: has.exchanges_as_planned,
    "divided sequences": lambda has: has.sequence_parallel,
    "offload": lambda has: has.offload,
    "states on the host": lambda has: ", ".join(has.states_on_host) or False,
    "one process drives all devices": lambda has: has.single_controller,
    "hosts with unlike numbers of devices": lambda has: not has.hosts_are_alike,
    "slices of models with shifts, convolutions or experts": lambda has: not has.not_in_slices,
}
"""The rows beside the levels: the features that a plan may ask for."""


def support_table() -> str:
    """A table with a row for each level that a backend can claim and each feature that a plan may ask for, and a column
    for each backend."""
    found = list(registered().values())
    rows = [["", *(each.name for each in found)], ["---"] * (len(found) + 1)]
    rows += [[level, *("yes" if level in each.levels else "–" for each in found)] for level in LEVELS]
    for name, ability in _ABILITIES.items():
        rows.append([name, *(_said(ability(each.capabilities)) for each in found)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _said(value: object) -> str:
    return {True: "yes", False: "–"}.get(value, str(value)) if isinstance(value, bool) else str(value)
