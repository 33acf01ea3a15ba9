"""Gradients of a few rows of a table, as (indices, rows), and their sums over replicas (`core.cost.row_gradients`).

JAX differentiates a lookup into a gradient of the whole table. Where the gradient is taken with respect to the rows
that were looked up, it is of these alone, and replicas can tell each other the rows.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Self

import jax
import jax.numpy as jnp

from shardwright.core.cost.row_gradients import POLICIES, Policy, RowGradient
from shardwright.core.errors import ShardwrightError, nearest


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """A gradient [table_rows, …] of which some rows are there. A pytree of two arrays.

    Attributes:
        indices: [n], the row of the table that each is of. One may be there several times: they add up. ``table_rows``
            stands for no row.
        values: [n, …].
    """

    indices: jax.Array
    values: jax.Array
    table_rows: int = field(metadata={"static": True})

    @classmethod
    def looked_up(cls, table: jax.Array, indices: jax.Array, gradient: jax.Array) -> Self:
        """The gradient of ``table``, of which ``table[indices]`` was taken and has this gradient.

        Raises:
            ShardwrightError: the gradient has not the shape of ``table[indices]``.
        """
        row = table.shape[1:]
        if gradient.shape != (*indices.shape, *row):
            raise ShardwrightError(
                f"the gradient has shape {gradient.shape}, and table[indices] {(*indices.shape, *row)}: give the one "
                f"with respect to the rows that were looked up"
            )
        flat = indices.reshape(-1).astype(jnp.int32)
        return cls(jnp.where(flat < 0, flat + table.shape[0], flat), gradient.reshape(-1, *row), table.shape[0])

    def dense(self) -> jax.Array:
        """The whole gradient."""
        whole = jnp.zeros((self.table_rows, *self.values.shape[1:]), self.values.dtype)
        return whole.at[self._places()].add(self.values, mode="drop")

    def _places(self) -> jax.Array:
        """The indices, of which those that are none of the table's are ``table_rows``."""
        wide = self.indices.astype(jnp.int32)  # narrow ones may not reach to ``table_rows``
        return jnp.where((wide < 0) | (wide >= self.table_rows), self.table_rows, wide)

    def coalesced(self) -> Self:
        """The same with each row once, in the order of the table, and no rows behind them."""
        size = min(len(self.indices), self.table_rows)
        places = self._places()
        found, place = jnp.unique(places, size=size, fill_value=self.table_rows, return_inverse=True)
        place = jnp.where(places < self.table_rows, place.reshape(-1), size)
        values = jnp.zeros((size, *self.values.shape[1:]), self.values.dtype)
        return type(self)(found, values.at[place].add(self.values, mode="drop"), self.table_rows)


def reduce_gradient(
    gradient: Rows | jax.Array, policy: Policy = "auto", *, axis_name: Any, limit_bytes: int | None = None
) -> Rows | jax.Array:
    """The sum over an axis of a gradient [rows, …], of which each device has some rows (arXiv 1905.04035).

    To be called where ``axis_name`` is bound, as inside `jax.shard_map`. All devices have as many indices, as shapes
    are static; one with fewer rows fills up with the index ``table_rows``.

    Args:
        policy: "dense": the gradient is made whole and summed, and the result is an array. "sparse": rows are gathered,
            and the result is `Rows`, each once. "auto": what moves fewer bytes.
        limit_bytes: the most bytes that "auto" may hold at once, where one of the two forms can do with so many.

    Raises:
        ShardwrightError: the policy is unknown, or the gradient has no rows.
    """
    if policy not in POLICIES:
        raise ShardwrightError(f"policy={policy!r}: {nearest(str(policy), POLICIES)}")
    if not isinstance(gradient, Rows):
        if not gradient.ndim:
            raise ShardwrightError("the gradient has no dims: expected [rows, …]")
        gradient = Rows(jnp.arange(len(gradient)), gradient, len(gradient))
    own, ways = gradient.coalesced(), jax.lax.axis_size(axis_name)
    row_bytes = math.prod(own.values.shape[1:]) * own.values.dtype.itemsize
    of = RowGradient(own.table_rows, row_bytes, len(own.indices), ways)
    if (of.chosen(limit_bytes) if policy == "auto" else policy) == "dense":
        whole: jax.Array = jax.lax.psum(own.dense(), axis_name)
        return whole
    indices, values = (jax.lax.all_gather(part, axis_name, tiled=True) for part in (own.indices, own.values))
    return Rows(indices, values, own.table_rows).coalesced()
