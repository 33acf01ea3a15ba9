"""Which leaves of an optax state are the moments and the counts that every framework's optimizers have.

A state's leaves are known by the classes that hold them: `optax.ScaleByAdamState` and its like. `core.checkpoint.
translated` has the words.
"""

from typing import Any

import jax
import optax

from shardwright.core.checkpoint.translated import SCHEDULE, STEP

_FIELDS: tuple[tuple[type, dict[str, str]], ...] = (
    (optax.ScaleByAdamState, {"mu": "exp_avg", "nu": "exp_avg_sq", "count": STEP}),
    (optax.ScaleByAmsgradState, {"mu": "exp_avg", "nu": "exp_avg_sq", "nu_max": "max_exp_avg_sq", "count": STEP}),
    (optax.TraceState, {"trace": "momentum_buffer"}),
    (optax.ScaleByScheduleState, {"count": SCHEDULE}),
)
_KINDS = tuple(kind for kind, _ in _FIELDS)


def roles_of(state: Any) -> dict[str, str]:
    """The roles of the leaves of an optax state, by the name that comes before the parameter's: ``{"0.mu": "exp_avg",
    "0.nu": "exp_avg_sq", "0.count": "step"}`` for Adam. Leaves of other classes have none."""
    found = {}
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda one: isinstance(one, _KINDS)):
        fields = next((fields for kind, fields in _FIELDS if isinstance(node, kind)), {})
        for field, role in fields.items():
            keys = (*path, jax.tree_util.GetAttrKey(field))
            found[jax.tree_util.keystr(keys, simple=True, separator=".")] = role
    return found
