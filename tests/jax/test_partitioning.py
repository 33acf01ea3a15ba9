"""Layouts that Flax models ask for themselves."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

import shardwright as sw
from shardwright.core.errors import LayoutError

CLUSTER = sw.Cluster("cpu", devices_per_node=4)
X = jax.ShapeDtypeStruct((2, 16), jnp.float32)


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, names: tuple[str | None, ...]) -> None:
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
        self.up = nnx.Linear(16, 64, kernel_init=kernel, rngs=rngs)
        self.down = nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.relu(self.up(x)))


def nnx_graph(names: tuple[str | None, ...]) -> sw.Graph:
    with nnx.use_eager_sharding(False):
        model = Mlp(nnx.Rngs(0), names)
    return sw.capture(model, X, lambda out: jnp.mean(out**2))


def linen_graph(names: tuple[str | None, ...]) -> sw.Graph:
    class Model(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            kernel = linen.with_logical_partitioning(linen.initializers.lecun_normal(), names)
            return linen.Dense(16, name="down")(jax.nn.relu(linen.Dense(64, kernel_init=kernel, name="up")(x)))

    model = Model()
    return sw.capture((model, jax.eval_shape(model.init, jax.random.key(0), X)), X, lambda out: jnp.mean(out**2))


def lies(graph: sw.Graph, layouts: object) -> sw.Layout:
    plan = sw.plan(graph, CLUSTER, batch=8, pp=1, dp=1, tp=4, layouts=layouts)
    return next(layout for name, layout in plan.parameter_layouts("jax").items() if name.startswith("up.kernel"))


@pytest.mark.parametrize("graph_of", [nnx_graph, linen_graph])
def test_logical_axes_are_pinned_by_rules(graph_of) -> None:  # type: ignore[no-untyped-def]
    graph = graph_of(("embed", "mlp"))
    assert dict(graph.logical_axes).popitem()[1] == ("embed", "mlp")
    assert lies(graph, [("embed", "tp"), ("mlp", None)]) == sw.Layout.of(tp=sw.Split(0))
    assert lies(graph, [("mlp", "tp")]) == sw.Layout.of(tp=sw.Split(1))
    assert lies(graph, [("mlp", None), ("embed", None)]).is_replicated


def test_a_mesh_axis_by_name_needs_no_rule() -> None:
    assert lies(nnx_graph(("tp", None)), None) == sw.Layout.of(tp=sw.Split(0))


def test_rules_that_name_none_of_the_axes_are_refused() -> None:
    with pytest.raises(LayoutError, match="no rule for the logical axes 'heads' matches: the model's are embed, mlp"):
        lies(nnx_graph(("embed", "mlp")), [("heads", "tp")])
