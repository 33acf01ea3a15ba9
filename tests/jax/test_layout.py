"""Layouts and meshes in JAX's terms."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shardwright.backends.jax.loss.gradients import split_squares
from shardwright.backends.jax.machine.mesh import bind
from shardwright.backends.jax.state.shardings import also_over, lower_layout, optimizer_shardings, parameter_shardings
from shardwright.core.errors import ClusterError, LayoutError
from shardwright.core.layout.mesh import Mesh
from shardwright.core.layout.placements import Layout, Partial, Split
from tests.comparison import Comparison
from tests.jax.collectives import of_program

MESH = Mesh.of(pp=1, dp=4, tp=2)


@pytest.fixture(scope="module")
def bound() -> jax.sharding.Mesh:
    return bind(MESH)


LAYOUTS = [
    Layout(),
    Layout.of(tp=Split(1)),
    Layout.of(dp=Split(0), tp=Split(1)),
    Layout.of(tp=Split(0), dp=Split(0)),
    Layout.of(dp=Split(1)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_devices_hold_what_the_core_says(layout: Layout, bound: jax.sharding.Mesh) -> None:
    shape = (16, 24)
    whole = np.arange(16 * 24).reshape(shape)
    array = jax.device_put(whole, lower_layout(layout, bound))
    for piece in array.addressable_shards:
        assert piece.data.shape == layout.local_shape(shape, MESH)
    assert len({str(piece.index) for piece in array.addressable_shards}) == layout.pieces(MESH)


def test_ranks_are_devices_in_order(bound: jax.sharding.Mesh) -> None:
    array = jax.device_put(np.arange(8).reshape(8, 1), lower_layout(Layout.of(dp=Split(0)), bound))
    for piece in array.addressable_shards:
        place = MESH.coordinates(jax.devices().index(piece.device))["dp"]
        Comparison().equal(list(piece.data[:, 0]), [2 * place, 2 * place + 1]).require()


def test_blocks_are_a_plain_split(bound: jax.sharding.Mesh) -> None:
    fused = lower_layout(Layout.of(tp=Split(1, (8, 8, 8))), bound)
    assert fused.spec == PartitionSpec(None, "tp")


def test_partial_values_are_refused(bound: jax.sharding.Mesh) -> None:
    with pytest.raises(LayoutError, match="P on axis 'tp': a JAX array holds no partial values"):
        lower_layout(Layout.of(tp=Partial()), bound)


def test_a_parameter_that_does_not_divide_is_named(bound: jax.sharding.Mesh) -> None:
    with pytest.raises(LayoutError, match=r"w of shape \(3, 4\) cannot be cut 2 ways along dim 0"):
        parameter_shardings(("w",), {"w": np.ones((3, 4))}, {"w": Layout.of(tp=Split(0))}, bound)


def test_states_spread_over_replicas(bound: jax.sharding.Mesh) -> None:
    def spec(shape: tuple[int, ...], *entries: str | None) -> PartitionSpec:
        return also_over("dp", shape, NamedSharding(bound, PartitionSpec(*entries))).spec

    assert spec((16, 64), None, "tp") == PartitionSpec(None, ("tp", "dp"))
    assert spec((64, 16), None, "tp") == PartitionSpec("dp", "tp")
    assert spec((3, 5)) == PartitionSpec()
    assert spec((16,), "dp") == PartitionSpec("dp")


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(1e-3),
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)),
        optax.adafactor(1e-3, min_dim_size_to_factor=4),
        optax.multi_transform({"a": optax.adam(1e-3), "b": optax.sgd(0.1)}, {"w": "a", "b": "b"}),
    ],
    ids=["adamw", "chain", "adafactor", "multi_transform"],
)
def test_optimizer_state_follows_its_parameter(
    optimizer: optax.GradientTransformation, bound: jax.sharding.Mesh
) -> None:
    params = {"w": np.ones((8, 16), np.float32), "b": np.ones(16, np.float32)}
    shardings = parameter_shardings(("b", "w"), params, {"w": Layout.of(tp=Split(1))}, bound)
    shapes, found = optimizer_shardings(optimizer, params, shardings, bound)
    state = jax.jit(optimizer.init, out_shardings=found)(params)
    for leaf, sharding, made in zip(*map(jax.tree.leaves, (shapes, found, state)), strict=True):
        expected = PartitionSpec(None, "tp") if leaf.shape == (8, 16) else PartitionSpec()
        assert sharding.spec == expected
        assert made.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_the_number_of_devices_must_be_the_meshs() -> None:
    with pytest.raises(ClusterError, match=r"for 4 devices \(dp 2 × tp 2\), and there are 8: give 4 of them"):
        bind(Mesh.of(dp=2, tp=2))


def test_norms_of_split_gradients_cross_together_where_they_are_split_alike(bound: jax.sharding.Mesh) -> None:
    """Of arrays split over tp, over both axes and not at all, two of each."""
    specs = [PartitionSpec("tp"), PartitionSpec(None, "tp"), PartitionSpec("dp", "tp"), PartitionSpec(("dp", "tp")),
             PartitionSpec(), PartitionSpec(None)]  # fmt: skip
    at = [NamedSharding(bound, spec) for spec in specs]
    drawn = np.random.default_rng(0)
    whole = [drawn.standard_normal((8, 8)).astype(np.float32) for _ in at]
    run = jax.jit(lambda *gradients: split_squares(gradients, at), in_shardings=at)
    wanted = [np.square(array.astype(np.float64)).sum() for array in whole]
    Comparison().values(np.asarray(run(*whole)), np.array(wanted, np.float32), relative=1e-6, absolute=0.0).require()
    assert of_program(run.lower(*whole).compile().as_text()) == {("all-reduce", 8): 2}
