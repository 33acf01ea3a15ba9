# python examples/quickstart_jax.py
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import shardwright.jax as sw

jax.config.update("jax_num_cpu_devices", 8)  # eight virtual devices; leave out on a machine that has its own
model = nnx.Sequential(nnx.Linear(64, 256, rngs=nnx.Rngs(0)), jax.nn.relu, nnx.Linear(256, 64, rngs=nnx.Rngs(1)))


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


batch = {"x": jax.random.normal(jax.random.key(0), (32, 64)), "y": jnp.ones((32, 64))}
graph = sw.capture(model, batch, loss_fn)
plan = sw.plan(graph, sw.Cluster("cpu", devices_per_node=8), batch=32, dp=4, tp=2, pp=1, precision="fp32")
train = sw.train_step(loss_fn, optax.adamw(1e-3), plan)
state = train.init(model)
for _ in range(5):
    state, loss = train(state, batch)
    print(f"loss {loss:.4f}")
