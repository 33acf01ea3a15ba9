"""Look-ups by terms: what the ranks' terms add up to is what one look-up gives, its errors too."""

import jax
import jax.numpy as jnp
import pytest

from shardwright.backends.jax.program.split_lookups import can_look_up, look_up
from tests.comparison import Comparison

TABLE = jnp.arange(24.0).reshape(8, 3) + 1


@pytest.mark.parametrize("ways", [1, 2, 4])
def test_the_sum_of_all_terms_is_the_look_up(ways: int) -> None:
    ids = jnp.array([[0, 7, 3], [-1, 4, -8]])
    terms = look_up(TABLE, ids, ways)
    assert terms.shape == (ways, 2, 3, 3)
    Comparison().equal(terms.sum(0), jnp.take(TABLE, ids, axis=0)).require()
    assert all(int((terms[:, i, j] != 0).any(-1).sum()) == 1 for i in range(2) for j in range(3))


def test_numbers_outside_the_table_give_nan_as_they_do_there() -> None:
    ids = jnp.array([8, -9, 2])
    Comparison().equal(look_up(TABLE, ids, 2).sum(0), jnp.take(TABLE, ids, axis=0), nan_is_nan=True).require()


def test_gradients_are_those_of_the_look_up() -> None:
    ids = jnp.array([1, 5, 1])
    weigh = jnp.arange(9.0).reshape(3, 3)
    found = jax.grad(lambda t: (look_up(t, ids, 4).sum(0) * weigh).sum())(TABLE)
    Comparison().equal(found, jax.grad(lambda t: (jnp.take(t, ids, axis=0) * weigh).sum())(TABLE)).require()


@pytest.mark.parametrize(("mode", "expected"), [(None, True), ("fill", True), ("clip", False), ("wrap", False)])
def test_only_look_ups_whose_errors_show(mode: str | None, expected: bool) -> None:
    (equation,) = jax.make_jaxpr(lambda t, i: jnp.take(t, i, axis=0, mode=mode))(TABLE, jnp.array([1])).eqns
    assert can_look_up(equation) is expected
    (across,) = jax.make_jaxpr(lambda t, i: jnp.take(t, i, axis=1, mode=mode))(TABLE, jnp.array([1])).eqns
    assert not can_look_up(across)
