"""A model whose blocks are alike, and a step of it by one of several processes: `python -m tests.jax.spmd_model RANK
PROCESSES PORT` prints the losses of two steps, the devices that hold the blocks, what stages as programs of their own
say to several processes, and the losses of a plain function."""

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardwright.jax as sw

WIDTH, VOCABULARY, LENGTH, BATCH = 8, 12, 4, 16


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        return x + mask * self.down(jnp.tanh(self.up(self.norm(x))))


class Model(nnx.Module):
    """Token ids → logits; every block reads a mask made of the ids, and the head is the embedding."""

    def __init__(self, blocks: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(blocks)])

    def __call__(self, ids: jax.Array) -> jax.Array:
        mask = (ids > 1)[..., None].astype(jnp.float32)
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.attend(x)


def loss_fn(model: Model, batch: dict[str, jax.Array]) -> sw.Weighted:
    counted = (batch["y"] < VOCABULARY // 2).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
    return sw.weighted((losses * counted).sum() / counted.sum(), counted.sum())


def maker(blocks: int) -> Callable[[], Model]:
    return lambda: Model(blocks, nnx.Rngs(2))


def batches(steps: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{name: rng.integers(0, VOCABULARY, (BATCH, LENGTH), np.int32) for name in ("x", "y")} for _ in range(steps)]


def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.1))


def plan_of(blocks: int, pp: int, dp: int = 1, **pins: object) -> sw.Plan:
    sample = {name: jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32) for name in ("x", "y")}
    graph = sw.capture(nnx.eval_shape(maker(blocks)), sample, loss_fn)
    cluster = sw.Cluster("cpu", nodes=1, devices_per_node=pp * dp)
    given = {"microbatch": 2, "precision": "fp32", "recompute": "none", "shard": 0, "schedule": "gpipe"}
    given |= {"virtual_stages": 1} | pins
    return sw.plan(graph, cluster, batch=BATCH, pp=pp, dp=dp, tp=1, **given)  # type: ignore[arg-type]


def plain_params() -> dict[str, Any]:
    def weight(number: int, shape: tuple[int, int]) -> jax.Array:
        return jax.random.normal(jax.random.key(number), shape) / WIDTH

    layers = [{"w": weight(number, (WIDTH, WIDTH))} for number in range(4)]
    return {"embed": weight(4, (VOCABULARY, WIDTH)), "layers": layers, "head": weight(5, (WIDTH, VOCABULARY))}


def plain_loss(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
    x = params["embed"][batch["x"]]
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["w"])
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], batch["y"]).mean()


def plain_losses(pp: int) -> list[float]:
    """Those of two steps on eight devices, the second with a batch on one device."""
    graph = sw.capture(plain_loss, (jax.eval_shape(plain_params), batches(1)[0]))
    plan = sw.plan(
        graph, sw.Cluster("cpu", nodes=1, devices_per_node=8), batch=BATCH, pp=pp, dp=8 // pp, tp=1, microbatch=1,
        precision="fp32", recompute="none", shard=0, schedule="gpipe", virtual_stages=1,
    )  # fmt: skip
    train = sw.train_step(plain_loss, optimizer(), plan, one_program=True)
    state = train.init(plain_params())
    losses = []
    first, second = batches(2)
    for batch in (first, jax.device_put(second, jax.local_devices()[0])):
        state, loss = train(state, batch)
        losses.append(float(loss))
    return losses


def disagreements(rank: int) -> Iterator[tuple[str, str]]:
    """What is said where process 1 has something else than process 0, at the first step and at a later one."""
    (batch,) = batches(1)
    other = {**batch, "y": batch["y"][::-1]}
    narrow = plan_of(4, 4, 2, microbatch=1) if rank else plan_of(4, 4, 2)
    cases = {
        "plan": (narrow, [batch]),
        "batch": (plan_of(4, 4, 2), [other if rank else batch]),
        "later batch": (plan_of(4, 1, 8, microbatch=1), [batch, batch, other if rank else batch, batch, batch]),
    }
    for what, (plan, steps) in cases.items():
        train = sw.train_step(loss_fn, optimizer(), plan, one_program=True)
        state = train.init(maker(4))
        try:
            for step in steps:
                state, loss = train(state, step)
                jax.block_until_ready((loss, train.grad_norm))
            yield what, "nothing"
        except sw.ShardwrightError as error:
            yield what, str(error)


def main(rank: int, processes: int, port: int) -> None:
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    train = sw.train_step(loss_fn, optimizer(), plan_of(4, 4, 2), one_program=True)
    state = train.init(maker(4))
    losses = []
    for batch in batches(2):
        state, loss = train(state, batch)
        losses.append(float(loss))
    held = sorted({shard.device.id for shard in state.params["stacks"][0].addressable_shards})
    print(f"losses {losses} devices {len(held)}", flush=True)
    across = jax.devices()[::2] + jax.devices()[1::2]  # every stage has devices of both processes
    try:
        sw.train_step(loss_fn, optimizer(), plan_of(4, 2, 4), devices=across)
    except sw.ShardwrightError as error:
        print(f"refused: {type(error).__name__}: {error}", flush=True)
    for what, said in disagreements(rank):
        print(f"{what} refused: {said}", flush=True)
    print(f"plain {plain_losses(4)}", flush=True)
    print(f"alone {plain_losses(1)}", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    main(*(int(argument) for argument in sys.argv[1:]))
