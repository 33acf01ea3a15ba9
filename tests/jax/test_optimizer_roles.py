"""Which leaves of optax states are moments and counts: of chains, wrappers and masks."""

import jax
import jax.numpy as jnp
import optax
import pytest

from shardwright.backends.jax.state.optimizer_roles import roles_of

PARAMS = {"a": jnp.ones(3), "b": [jnp.ones(2)]}
ADAM = {"mu": "exp_avg", "nu": "exp_avg_sq", "count": "step"}


def under(prefix: str) -> dict[str, str]:
    return {f"{prefix}.{field}": role for field, role in ADAM.items()}


CASES = {
    "adam": (optax.adam(1e-3), under("0")),
    "adamw, clipped, on a schedule": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1.0, 0.0, 3))),
        under("1.0") | {"1.2.count": "schedule"},
    ),
    "sgd with momentum": (optax.sgd(1e-2, 0.9), {"0.trace": "momentum_buffer"}),
    "sgd": (optax.sgd(1e-2), {}),
    "options in the state": (
        optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
        under("inner_state.0") | {"count": "schedule"}
        | {f"hyperparams.{name}": "option" for name in ("b1", "b2", "eps", "eps_root", "learning_rate")},
    ),
    "two optimizers": (
        optax.multi_transform({"x": optax.adam(1e-3), "y": optax.sgd(1e-3, 0.9)}, {"a": "x", "b": "y"}),
        under("inner_states.x.inner_state.0") | {"inner_states.y.inner_state.0.trace": "momentum_buffer"},
    ),
    "masked": (optax.masked(optax.adam(1e-3), {"a": True, "b": False}), under("inner_state.0")),
    "amsgrad, which torch defines otherwise": (optax.amsgrad(1e-3), {}),
    "rmsprop": (optax.rmsprop(1e-3), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_leaves_are_known_by_what_holds_them(case: str) -> None:
    optimizer, expected = CASES[case]
    state = optimizer.init(PARAMS)
    assert roles_of(state) == expected
    assert roles_of(jax.eval_shape(optimizer.init, PARAMS)) == expected
