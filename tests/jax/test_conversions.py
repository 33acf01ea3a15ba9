"""Conversions as XLA compiles them move the bytes that the core predicts: read from the compiled program."""

import re
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shardwright.core.layout.conversion_bytes import table_bytes
from shardwright.core.layout.placements import Partial, Placement, Replicate, Split
from tests.comparison import Comparison

RANKS, SHAPE = 4, (8, 12)
SIZE = 8 * 12 * 4
PLACES: tuple[Placement, ...] = (Split(0), Split(1), Replicate(), Partial())
COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\(")


def spec(place: Placement) -> PartitionSpec:
    """Partial values are kept as terms along a dim of their own."""
    if isinstance(place, Partial):
        return PartitionSpec("tp")
    return PartitionSpec(*("tp" if isinstance(place, Split) and place.dim == d else None for d in range(2)))


def convert(before: Placement, after: Placement, x: jax.Array) -> jax.Array:
    """On local values, as a runtime does it."""
    if isinstance(before, Partial):
        x = x[0]
        if isinstance(after, Split):
            return jax.lax.psum_scatter(x, "tp", scatter_dimension=after.dim, tiled=True)
        return jax.lax.psum(x, "tp") if isinstance(after, Replicate) else x[None]
    if isinstance(before, Split):
        if isinstance(after, Split):
            return x if before == after else jax.lax.all_to_all(x, "tp", after.dim, before.dim, tiled=True)
        if isinstance(after, Replicate):
            return jax.lax.all_gather(x, "tp", axis=before.dim, tiled=True)
        start = [jax.lax.axis_index("tp") * n if d == before.dim else 0 for d, n in enumerate(x.shape)]
        return jax.lax.dynamic_update_slice(jnp.zeros(SHAPE, x.dtype), x, start)[None]  # zeros but for the own piece
    if isinstance(after, Split):
        size = x.shape[after.dim] // RANKS
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("tp") * size, size, after.dim)
    if isinstance(after, Partial):  # one rank keeps the value, the others nothing
        return jnp.where(jax.lax.axis_index("tp") == 0, x, 0.0)[None]
    return x


def moved_bytes(text: str) -> float:
    """What all ranks together move, by the shapes of the collectives' results on one rank."""
    total = 0.0
    for result, name in COLLECTIVE.findall(text):
        shapes = re.findall(r"f32\[([\d,]*)\]", result)  # several where the result is a tuple
        own = sum(4 * int(np.prod([int(d) for d in dims.split(",") if d])) for dims in shapes)
        total += {
            "all-gather": (RANKS - 1) * own,
            "all-reduce": 2 * (RANKS - 1) * own,
            "reduce-scatter": (RANKS - 1) * own * RANKS,
            "all-to-all": (RANKS - 1) * own,
            "collective-permute": RANKS * own,
        }[name]
    return total


@pytest.mark.parametrize(("before", "after"), list(product(PLACES, PLACES)), ids=str)
def test_value_and_bytes(before: Placement, after: Placement) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:RANKS]), ("tp",))
    whole = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    given = whole
    if isinstance(before, Partial):
        terms = np.random.default_rng(1).normal(size=(RANKS - 1, *SHAPE)).astype(np.float32)
        given = np.concatenate([terms, (whole - terms.sum(0))[None]])

    def run(x: jax.Array) -> jax.Array:
        return convert(before, after, x)

    inside = jax.shard_map(run, mesh=mesh, in_specs=spec(before), out_specs=spec(after), check_vma=False)
    placed = jax.device_put(given, NamedSharding(mesh, spec(before)))
    compiled = jax.jit(inside).lower(placed).compile()
    found = np.asarray(compiled(placed))
    found = found.sum(0) if isinstance(after, Partial) else found
    Comparison().values(found, whole, relative=1e-7, absolute=1e-5).require()
    assert moved_bytes(compiled.as_text()) == pytest.approx(table_bytes(before, after, RANKS, SIZE))


@pytest.mark.parametrize(("before", "after"), list(product(PLACES[:3], PLACES[:3])), ids=str)
def test_shardings_alone_move_no_more(before: Placement, after: Placement) -> None:
    """What the compiler makes of two NamedShardings."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:RANKS]), ("tp",))
    given, wanted = NamedSharding(mesh, spec(before)), NamedSharding(mesh, spec(after))
    x = jax.device_put(np.ones(SHAPE, np.float32), given)
    text = jax.jit(lambda v: v + 1.0, out_shardings=wanted).lower(x).compile().as_text()
    assert moved_bytes(text) == pytest.approx(table_bytes(before, after, RANKS, SIZE))
