"""Units measured one by one, in JAX."""

import jax
import jax.numpy as jnp
from flax import nnx

import shardwright as sw
from shardwright.measure import measure_units


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(3)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return x


def loss(model: Net, batch: jax.Array) -> jax.Array:
    return jnp.mean(model(batch) ** 2)


def test_every_class_of_units_is_measured_at_every_size() -> None:
    net, sample = Net(nnx.Rngs(0)), jnp.ones((4, 16))
    before = jax.tree.map(jnp.copy, nnx.state(net))
    units = measure_units(net, sample, loss, microbatches=(2, 8), steps=2)
    plan = sw.plan(sw.capture(net, sample, loss), sw.Cluster("cpu"), batch=4, precision="fp32")
    assert {(u.unit_class, u.microbatch) for u in units} == {
        (c, size) for c in set(plan.costs.unit_classes) for size in (2, 8)
    }
    assert {u.model for u in units} == {f"jax:{plan.model.digest}"}
    assert sum(u.forward_s for u in units) > 0
    assert sum(u.backward_s for u in units) > 0
    same = jax.tree.map(lambda a, b: bool((a == b).all()), before, nnx.state(net))
    assert all(jax.tree.leaves(same)), "the model that was given is trained"


def test_an_odd_number_of_devices_is_one_pipeline() -> None:
    cluster = sw.Cluster("cpu", devices_per_node=3)
    units = measure_units(Net(nnx.Rngs(0)), jnp.ones((4, 16)), loss, microbatches=(2,), cluster=cluster, steps=2)
    # What one small unit takes may be less than the clock tells apart where other programs have the cores.
    for in_stages in (False, True):
        assert sum(u.forward_s + u.backward_s for u in units if u.in_stages is in_stages) > 0
