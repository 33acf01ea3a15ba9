"""Gradients of a few rows in JAX, against those that JAX has for the whole table."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import shardwright.jax as sw
from shardwright.core.cost.row_gradients import RowGradient
from tests.comparison import Comparison

ROWS, WIDTH = 30, 4


def table() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (ROWS, WIDTH))


def loss_of(rows: jax.Array, ways: jax.Array) -> jax.Array:
    return (jnp.sin(rows) * ways).sum()


def over(devices: int, function: Any) -> Any:
    mesh = jax.make_mesh((devices,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
    given, made = PartitionSpec("dp"), PartitionSpec()
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(given, given), out_specs=made, check_vma=False))


@pytest.mark.parametrize("policy", ["auto", "dense", "sparse"])
@pytest.mark.parametrize(("devices", "tokens"), [(2, 3), (4, 24), (8, 40), (4, 1)])
def test_sums_are_those_of_whole_tables(policy: Any, devices: int, tokens: int) -> None:
    indices = jax.random.randint(jax.random.key(1), (devices * tokens,), -3, ROWS // 2)  # -1 is the last row
    ways = jax.random.normal(jax.random.key(2), (devices * tokens, WIDTH))

    def step(own: jax.Array, own_ways: jax.Array) -> jax.Array:
        made = jax.grad(loss_of)(table()[own], own_ways)
        found = sw.reduce_gradient(sw.Rows.looked_up(table(), own, made), policy, axis_name="dp")
        if policy != "auto":
            assert isinstance(found, sw.Rows) == (policy == "sparse")
        return found.dense() if isinstance(found, sw.Rows) else found

    wanted = jax.grad(lambda whole: loss_of(whole[indices], ways))(table())
    Comparison("sum").values(over(devices, step)(indices, ways), wanted, relative=1e-5, absolute=1e-5).require()


def test_a_gathered_row_is_there_once() -> None:
    indices = jnp.array([3, 3, 5, ROWS, 5, 3, ROWS, ROWS])  # one device has fewer rows, one has none
    values = jnp.ones((8, WIDTH))
    mesh_of = over(4, lambda own, v: sw.reduce_gradient(sw.Rows(own, v, ROWS), "sparse", axis_name="dp"))
    found = mesh_of(indices, values)
    assert found.indices.tolist() == [3, 5] + [ROWS] * 6
    assert found.values[:2, 0].tolist() == [3, 2]
    assert not found.values[2:].any()


def test_auto_takes_what_moves_less() -> None:
    def form(tokens: int, limit_bytes: int | None = None) -> bool:
        is_rows = []

        def step(own: jax.Array, values: jax.Array) -> jax.Array:
            found = sw.reduce_gradient(sw.Rows(own, values, ROWS), axis_name="dp", limit_bytes=limit_bytes)
            is_rows.append(isinstance(found, sw.Rows))
            return jnp.zeros(())

        over(4, step)(jnp.zeros(4 * tokens, int), jnp.zeros((4 * tokens, WIDTH)))
        return is_rows[0]

    for tokens in range(1, 30):
        of = RowGradient(ROWS, 4 * WIDTH, tokens, 4)
        assert form(tokens) == (of.moved_bytes("sparse") < of.moved_bytes("dense")), tokens
    assert form(6)
    assert not form(6, limit_bytes=500)


def test_narrow_indices_reach_every_row() -> None:
    bytes_of = jnp.array([7, 200, -300 % 256, 7], jnp.uint8)
    whole = jnp.zeros((256, WIDTH))
    rows = sw.Rows.looked_up(whole, bytes_of, jnp.ones((4, WIDTH)))
    wanted = jax.grad(lambda t: t[bytes_of].sum())(whole)
    Comparison("narrow").equal([rows.dense(), rows.coalesced().dense()], [wanted, wanted]).require()
    beyond = sw.Rows.looked_up(table(), jnp.array([0, -300, 5, 500]), jnp.ones((4, WIDTH)))
    wanted = jax.grad(lambda t: t[jnp.array([0, 5])].sum())(table())
    Comparison("beyond").equal([beyond.dense(), beyond.coalesced().dense()], [wanted, wanted]).require()


def test_rows_are_a_pytree() -> None:
    rows = sw.Rows(jnp.array([1, 1]), jnp.ones((2, WIDTH)), ROWS)
    doubled = jax.tree.map(lambda leaf: leaf * 2, rows)
    assert doubled.table_rows == ROWS
    assert doubled.indices.tolist() == [2, 2]
    assert jax.jit(lambda r: r.coalesced())(rows).values.tolist() == [[2.0] * WIDTH, [0.0] * WIDTH]


def test_bad_input() -> None:
    with pytest.raises(sw.ShardwrightError, match=r"policy='rows': .*known: auto, dense, sparse"):
        sw.reduce_gradient(table(), "rows", axis_name="dp")  # type: ignore[arg-type]
    with pytest.raises(sw.ShardwrightError, match=r"has shape \(30, 4\), and table\[indices\] \(2, 4\)"):
        sw.Rows.looked_up(table(), jnp.array([1, 2]), table())
    with pytest.raises(sw.ShardwrightError, match="no dims"):
        sw.reduce_gradient(jnp.ones(()), axis_name="dp")
