"""How near a JAX pipeline comes to its bound: one thread per device, two stages, stage times of 5 and 20 ms.

    python benchmarks/jax_pipeline.py                       # both stage times, m = 8
    python benchmarks/jax_pipeline.py --stage-ms 20 --steps 5

The bound is the schedule simulated with each stage function's own time, measured alone in the same run, and nothing
else: no dispatch, no transfer, no update. Beside it, in the same run and on the same model: two pipelines that are one
SPMD program each, written by hand. `ppermute`: `shard_map`, every device one stage, activations handed round (GPipe).
`praxis`: a vmap over stages and a shifted buffer, stages split by the compiler, as praxis' circular pipeline does. Both
recompute nothing and differentiate the whole loop.
"""

import os

os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardwright.jax as sw
from shardwright.core.schedule.actions import Kind

STAGES, MICROBATCHES, ROWS, WIDTH = 2, 8, 64, 128


def block(weight: jax.Array, x: jax.Array, depth: int) -> jax.Array:
    """One stage's work: as many products in a row as its time takes."""
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ weight), None), x, None, length=depth)[0]


def loss_fn(depth: int) -> Callable[..., jax.Array]:
    def loss(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
        x = batch["x"]
        for stage in range(STAGES):
            x = block(params["h"][stage]["w"], x, depth)
        return (x**2).mean()

    return loss


def parameters() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), STAGES)
    return {"h": [{"w": jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5} for key in keys]}


def batch() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).standard_normal((ROWS * MICROBATCHES, WIDTH)).astype(np.float32)}


def depth_for(stage_ms: float) -> int:
    """Products whose forward takes a third of the stage's time: a backward takes twice as long."""
    weight, x = jnp.eye(WIDTH), jnp.ones((ROWS, WIDTH))
    run = jax.jit(block, static_argnums=2)
    run(weight, x, 200).block_until_ready()
    took = min(_timed(lambda: run(weight, x, 200).block_until_ready()) for _ in range(10))
    return max(1, round(200 * stage_ms / 3e3 / took))


def _timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def ours(depth: int, schedule: str, steps: int) -> dict[str, Any]:
    graph = sw.capture(loss_fn(depth), (jax.eval_shape(parameters), batch()))
    cluster = sw.Cluster("cpu", nodes=1, devices_per_node=STAGES)
    plan = sw.plan(
        graph, cluster, batch=ROWS * MICROBATCHES, pp=STAGES, dp=1, tp=1, microbatch=ROWS, schedule=schedule,
        virtual_stages=1, precision="fp32", recompute="none", shard=0,
    )  # fmt: skip
    train = sw.train_step(loss_fn(depth), optax.sgd(1e-3), plan)
    state = train.init(parameters)
    start = time.perf_counter()
    state, loss = train(state, batch())
    jax.block_until_ready(loss)
    first_s = time.perf_counter() - start
    times, hosts = [], []
    for _ in range(steps):
        jax.block_until_ready(state)
        start = time.perf_counter()
        state, loss = train(state, batch())
        hosts.append(time.perf_counter() - start)
        jax.block_until_ready((state, loss))
        times.append(time.perf_counter() - start)
    alone = stage_times(train, state)
    costs = sw.StageCosts(
        tuple(t.get(Kind.FORWARD, 0.0) for t in alone),
        tuple(t.get(Kind.BACKWARD, 0.0) for t in alone),
        (0.0,) * STAGES,
        (0.0,) * (STAGES - 1),
        (1,) * STAGES,
    )
    _, _, timeline = train.measure(state, batch())
    assert train.counts is not None
    return {
        "step_s": statistics.median(times),
        "host_s": statistics.median(hosts),
        "bound_s": sw.simulate(plan.build_schedule(), costs).makespan_s,
        "measured_s": timeline.makespan_s,
        "dispatches": train.counts.dispatches,
        "transfers": train.counts.transfers,
        "first_s": first_s,
        "alone": alone,
    }


def stage_times(train: sw.TrainStep, state: sw.TrainState) -> list[dict[Kind, float]]:
    """Seconds of every stage function, run alone on zeros like its operands."""
    found = []
    for launches in train.pipeline.launches:
        times = {}
        for kind, launch in launches.items():
            shardings = launch.run.input_shardings[0]

            def operands(launch: Any = launch, shardings: Any = shardings) -> list[Any]:
                made = [jnp.full(a.shape, 0.1, a.dtype) for a in launch.function.avals]
                return jax.block_until_ready(jax.device_put(made, list(shardings)))

            jax.block_until_ready(launch.run(*operands()))
            samples = []
            for _ in range(10):
                given = operands()
                samples.append(_timed(lambda given=given, run=launch.run: jax.block_until_ready(run(*given))))
            times[kind] = statistics.median(samples)
        found.append(times)
    return found


# --- peers


def ppermute(depth: int) -> tuple[Callable[..., Any], Any, Any]:
    """GPipe as one program: every device runs its stage and hands on what it made."""
    mesh = Mesh(np.array(jax.devices()), ("pp",))
    shift = [(rank, (rank + 1) % STAGES) for rank in range(STAGES)]

    def pipeline(weights: jax.Array, xs: jax.Array) -> jax.Array:
        rank = jax.lax.axis_index("pp")

        def tick(carry: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            x = jnp.where(rank == 0, xs[jnp.minimum(t, MICROBATCHES - 1)], carry)
            y = block(weights[0], x, depth)
            return jax.lax.ppermute(y, "pp", shift), y

        start = jax.lax.pcast(jnp.zeros((ROWS, WIDTH)), "pp", to="varying")
        _, ys = jax.lax.scan(tick, start, jnp.arange(MICROBATCHES + STAGES - 1))
        losses = (ys[STAGES - 1 :] ** 2).mean()
        return jax.lax.psum(jnp.where(rank == STAGES - 1, losses, 0.0), "pp")

    mapped = jax.shard_map(
        pipeline, mesh=mesh, in_specs=(PartitionSpec("pp"), PartitionSpec()), out_specs=PartitionSpec()
    )
    return mapped, NamedSharding(mesh, PartitionSpec("pp")), NamedSharding(mesh, PartitionSpec())


def praxis(depth: int) -> tuple[Callable[..., Any], Any, Any]:
    """The same by a vmap over stages and a buffer that shifts along them; the compiler makes the transfers."""
    mesh = Mesh(np.array(jax.devices()), ("pp",))
    stages = NamedSharding(mesh, PartitionSpec("pp"))

    def pipeline(weights: jax.Array, xs: jax.Array) -> jax.Array:
        def tick(buffer: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            shifted = jnp.roll(buffer, 1, axis=0)
            entering = jnp.where(jnp.arange(STAGES)[:, None, None] == 0, xs[jnp.minimum(t, MICROBATCHES - 1)], shifted)
            y = jax.vmap(lambda w, x: block(w, x, depth))(weights, jax.lax.with_sharding_constraint(entering, stages))
            y = jax.lax.with_sharding_constraint(y, stages)
            return y, y[-1]

        start = jax.lax.with_sharding_constraint(jnp.zeros((STAGES, ROWS, WIDTH)), stages)
        _, ys = jax.lax.scan(tick, start, jnp.arange(MICROBATCHES + STAGES - 1))
        return (ys[STAGES - 1 :] ** 2).mean()

    return pipeline, stages, NamedSharding(mesh, PartitionSpec())


def peer(make: Callable[[int], tuple[Callable[..., Any], Any, Any]], depth: int, steps: int) -> float:
    """Seconds of a step of loss, gradients and update."""
    loss, at, whole = make(depth)
    optimizer = optax.sgd(1e-3)

    @jax.jit
    def step(weights: jax.Array, state: Any, xs: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(loss)(weights, xs)
        updates, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state, value

    weights = jax.device_put(jnp.stack([layer["w"] for layer in parameters()["h"]]), at)
    state = optimizer.init(weights)
    xs = jax.device_put(batch()["x"].reshape(MICROBATCHES, ROWS, WIDTH), whole)
    weights, state, _ = jax.block_until_ready(step(weights, state, xs))
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        weights, state, _ = jax.block_until_ready(step(weights, state, xs))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage-ms", type=float, nargs="*", default=[5.0, 20.0], help="forward + backward of a stage")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--steps", type=int, default=15)
    given = parser.parse_args()
    print(
        f"{STAGES} stages, {MICROBATCHES} microbatches, {given.schedule}; milliseconds, medians of {given.steps} steps"
    )
    print("| stage | bound | step | bound / step | host | dispatches | transfers | ppermute | praxis | first step |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for stage_ms in given.stage_ms:
        depth = depth_for(stage_ms)
        mine = ours(depth, given.schedule, given.steps)
        others = [peer(make, depth, given.steps) for make in (ppermute, praxis)]
        ms = {name: f"{1e3 * value:.1f}" for name, value in mine.items() if name.endswith("_s")}
        share = mine["bound_s"] / mine["step_s"]
        print(
            f"| {stage_ms:g} | {ms['bound_s']} | {ms['step_s']} | {share:.3f} | {ms['host_s']} "
            f"| {mine['dispatches']} | {mine['transfers']} | {1e3 * others[0]:.1f} | {1e3 * others[1]:.1f} "
            f"| {ms['first_s']} |"
        )


if __name__ == "__main__":
    main()
