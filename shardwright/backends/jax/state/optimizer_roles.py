"""Which leaves of an optax state are the moments and the counts that every framework's optimizers have.

A state's leaves are known by the classes that hold them: `optax.ScaleByAdamState` and its like. `core.checkpoint.
translated` has the words.
"""

from typing import Any

import jax
import optax

from shardwright.core.checkpoint.translated import OPTION, SCHEDULE, STEP

_FIELDS: tuple[tuple[type, dict[str, str]], ...] = (
    (optax.ScaleByAdamState, {"mu": "exp_avg", "nu": "exp_avg_sq", "count": STEP}),
    (optax.TraceState, {"trace": "momentum_buffer"}),
    (optax.ScaleByScheduleState, {"count": SCHEDULE}),
    (optax.InjectStatefulHyperparamsState, {"count": SCHEDULE}),
)
"""AMSGrad's largest second moment is not among them: optax corrects its bias before the comparison, and torch after."""
_SCHEDULES = "hyperparams_states"
_OPTIONS = ("hyperparams", _SCHEDULES)
"""The fields of `optax.inject_hyperparams` with the options of the optimizer, and the schedules of some of them."""


def roles_of(state: Any) -> dict[str, str]:
    """The roles of the leaves of an optax state, by the name that comes before the parameter's: ``{"0.mu": "exp_avg",
    "0.nu": "exp_avg_sq", "0.count": "step"}`` for Adam. Leaves of other classes have none."""
    found: dict[str, str] = {}
    _find(state, (), found)
    return found


def _find(node: Any, path: tuple[Any, ...], found: dict[str, str]) -> None:
    fields = next((fields for kind, fields in _FIELDS if isinstance(node, kind)), {})
    for field, role in fields.items():
        found[_name((*path, jax.tree_util.GetAttrKey(field)))] = role
    if isinstance(node, optax.InjectStatefulHyperparamsState):
        for field in _OPTIONS:
            at = (*path, jax.tree_util.GetAttrKey(field))
            for below, _ in jax.tree_util.tree_leaves_with_path(getattr(node, field)):
                is_count = field == _SCHEDULES and _name(below[-1:]) == "count"
                found[_name((*at, *below))] = SCHEDULE if is_count else OPTION
        _find(node.inner_state, (*path, jax.tree_util.GetAttrKey("inner_state")), found)
    elif not fields:
        for below, child in jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda one: one is not node):
            if below:  # an array is a leaf by itself
                _find(child, (*path, *below), found)


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
