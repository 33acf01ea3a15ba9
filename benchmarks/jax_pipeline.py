"""How near a JAX pipeline comes to its bound: one thread per device, two stages, stage times of 5 and 20 ms.

    python benchmarks/jax_pipeline.py                       # both stage times, m = 8
    python benchmarks/jax_pipeline.py --stage-ms 20 --repetitions 5 --schedules 1f1b

Two virtual devices of one thread run layers of tanh(x · w) in two stages. By itself XLA's CPU backend gives a device
more than its thread: YNNPACK divides every product among the threads of all devices, so that stages which run at once
take each other's cores (hundreds of context switches a step, and steps that scatter). It is left out of every way here;
`--ynnpack` puts it back. In one run, one repetition of each after the other:

- single: all layers and microbatches in one jit; both devices do it at the same time, so that each core is as busy as
  in a pipeline (the slower counts);
- ours: `train_step` under each of the schedules, a program for each stage;
- `one_program`: the same plan, all stages as one SPMD program (GPipe), ours too;
- two pipelines that are one SPMD program each, written by hand. `ppermute`: `shard_map`, every device one stage,
  activations handed round. `praxis`: a vmap over stages and a shifted buffer, stages split by the compiler, as praxis'
  circular pipeline does. Both keep everything and differentiate the whole loop.

All others are GPipe. The bound of 1F1B and of GPipe is single · (m + p - 1) / (m · p). Beside it stands the schedule
simulated with the stage functions' own times, medians of measured steps with their transfers. Both take every action to
last as long as its like.

Loss and new parameters must be those of the single jit. Figures are medians of repetitions, shares medians of the
shares of one repetition.
"""

import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false"
if "--ynnpack" not in sys.argv:
    os.environ["XLA_FLAGS"] += " --xla_cpu_experimental_ynn_fusion_type="

import argparse
import ctypes
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardwright.jax as sw
from shardwright.core.schedule.measured_costs import measured_costs
from tests.comparison import Comparison

# Freed memory stays with the process, as with the allocators of GPUs: else every way spends a fifth of its time on page
# faults, in which the two devices wait for each other.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
if hasattr(ctypes.CDLL(None), "mallopt"):
    ctypes.CDLL(None).mallopt(M_MMAP_MAX, 0)
    ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 2**31 - 1)

STAGES, MICROBATCHES, LAYERS, ROWS, WIDTH, CHUNK = 2, 8, 4, 128, 128, 4
RATE = 1e-3


def layers(weights: Iterable[jax.Array], x: jax.Array, repeats: int) -> jax.Array:
    """weights: of each layer [width, width], used again and again; x: [rows, width].

    Layers are checkpointed, as large models' are, and every `CHUNK` products in them again: so a backward works on what
    stays in its core's own cache. With everything kept, tiny products would measure the memory that all cores share.
    """

    @jax.checkpoint
    def chunk(weight: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(CHUNK):
            x = jnp.tanh(x @ weight)
        return x

    @jax.checkpoint
    def layer(weight: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (chunk(weight, x), None), x, None, length=repeats)[0]

    for weight in weights:
        x = layer(weight, x)
    return x


def stacked() -> jax.Array:
    """The layers of every stage, [stages, layers, width, width]; near the identity, so that deep ones do not die."""
    return jnp.eye(WIDTH) + 0.1 * jax.random.normal(jax.random.key(0), (STAGES, LAYERS, WIDTH, WIDTH)) / WIDTH**0.5


class Scale(nnx.Module):
    def __init__(self) -> None:
        self.scale = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.scale.get_value()


class Layer(nnx.Module):
    def __init__(self, weight: jax.Array, repeats: int) -> None:
        self.w, self.repeats = nnx.Param(weight), repeats

    def __call__(self, x: jax.Array) -> jax.Array:
        return layers([self.w.get_value()], x, self.repeats)


class Model(nnx.Module):
    """What comes before and after the layers is next to nothing, but one program for all stages wants something."""

    def __init__(self, repeats: int) -> None:
        self.first, self.last = Scale(), Scale()
        self.h = nnx.List([Layer(weight, repeats) for weight in stacked().reshape(-1, WIDTH, WIDTH)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        for layer in self.h:
            x = layer(x)
        return self.last(x)


def loss_fn(model: Model, batch: dict[str, jax.Array]) -> jax.Array:
    return (model(batch["x"]) ** 2).mean()


@cache
def batch() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).standard_normal((ROWS * MICROBATCHES, WIDTH)).astype(np.float32)}


def repeats_for(stage_ms: float) -> int:
    """Repeats of a chunk in every layer for which a stage takes so long, forward and backward, both devices busy."""
    repeats = 8
    ways = [single(repeats, device) for device in jax.devices()]
    took = [max(side_by_side([way.step for way in ways])) for _ in range(20)]
    repeat_s = statistics.median(took[10:]) / (MICROBATCHES * STAGES * repeats)
    return max(1, round(stage_ms / 1e3 / repeat_s))


def _timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def side_by_side(runs: Sequence[Callable[[], Any]]) -> list[float]:
    """Seconds of each, all at the same time."""
    barrier = threading.Barrier(len(runs))
    took = [0.0] * len(runs)

    def one(index: int) -> None:
        barrier.wait()
        took[index] = _timed(runs[index])

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return took


# --- ways to run a step


class Ours:
    """`train_step` under a plan."""

    def __init__(self, repeats: int, schedule: str, one_program: bool) -> None:
        graph = sw.capture(nnx.eval_shape(lambda: Model(repeats)), batch(), loss_fn)
        cluster = sw.Cluster("cpu", nodes=1, devices_per_node=STAGES)
        self.plan = sw.plan(
            graph, cluster, batch=ROWS * MICROBATCHES, pp=STAGES, dp=1, tp=1, microbatch=ROWS, schedule=schedule,
            virtual_stages=1, precision="fp32", recompute="auto", shard=0,
        )  # fmt: skip
        self.train = sw.train_step(loss_fn, optax.sgd(RATE), self.plan, one_program=one_program)
        self.state = self.train.init(lambda: Model(repeats))
        self.host_s = 0.0

    def step(self) -> jax.Array:
        start = time.perf_counter()
        self.state, loss = self.train(self.state, batch())
        self.host_s = time.perf_counter() - start
        jax.block_until_ready((self.state, loss))
        return loss

    def weights_now(self) -> np.ndarray:
        return np.stack([layer.w.get_value() for layer in self.train.params(self.state).h])

    def stage_times(self, steps: int = 5) -> sw.StageCosts:
        """Seconds of the stage functions, as they ran in measured steps."""
        timelines = []
        for _ in range(steps):
            self.state, _, timeline = self.train.measure(self.state, batch())
            timelines.append(timeline)
        return measured_costs(timelines)


class Written:
    """A step of a loss over stacked stages [stages, layers, width, width], as one jit."""

    def __init__(self, weights: Any, loss: Callable[..., Any], weights_at: Any, whole: Any) -> None:
        self.optimizer = optax.sgd(RATE)

        def step(weights: jax.Array, state: Any, xs: jax.Array) -> Any:
            value, gradient = jax.value_and_grad(loss)(weights, xs)
            updates, state = self.optimizer.update(gradient, state, weights)
            return optax.apply_updates(weights, updates), state, value

        self.run = jax.jit(step, donate_argnums=(0, 1))
        self.weights = jax.device_put(weights, weights_at)
        self.state = self.optimizer.init(self.weights)
        self.xs = jax.device_put(batch()["x"].reshape(MICROBATCHES, ROWS, WIDTH), whole)

    def step(self) -> jax.Array:
        self.weights, self.state, loss = jax.block_until_ready(self.run(self.weights, self.state, self.xs))
        return loss


def single(repeats: int, device: jax.Device) -> Written:
    """Microbatch after microbatch on one device, gradients added up."""

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        return (layers(weights, x, repeats) ** 2).mean() / MICROBATCHES

    @jax.custom_vjp
    def mean(weights: list[jax.Array], xs: jax.Array) -> jax.Array:
        return sum((loss(weights, x) for x in xs), jnp.zeros(()))

    def forward(weights: list[jax.Array], xs: jax.Array) -> Any:
        def one(carry: Any, x: jax.Array) -> Any:
            return jax.tree.map(jnp.add, carry, jax.value_and_grad(loss)(weights, x)), None

        return jax.lax.scan(one, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, weights)), xs)[0]

    mean.defvjp(forward, lambda gradients, seed: ([g * seed for g in gradients], None))
    return Written(list(stacked().reshape(-1, WIDTH, WIDTH)), mean, device, device)


def ppermute(repeats: int) -> Written:
    """GPipe as one program: every device runs its stage and hands on what it made."""
    mesh = Mesh(np.array(jax.devices()), ("pp",))
    shift = [(rank, (rank + 1) % STAGES) for rank in range(STAGES)]

    def pipeline(weights: jax.Array, xs: jax.Array) -> jax.Array:
        rank = jax.lax.axis_index("pp")

        def tick(carry: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            x = jnp.where(rank == 0, xs[jnp.minimum(t, MICROBATCHES - 1)], carry)
            y = layers(weights[0], x, repeats)
            return jax.lax.ppermute(y, "pp", shift), y

        start = jax.lax.pcast(jnp.zeros((ROWS, WIDTH)), "pp", to="varying")
        _, ys = jax.lax.scan(tick, start, jnp.arange(MICROBATCHES + STAGES - 1))
        losses = (ys[STAGES - 1 :] ** 2).mean()
        return jax.lax.psum(jnp.where(rank == STAGES - 1, losses, 0.0), "pp")

    mapped = jax.shard_map(
        pipeline, mesh=mesh, in_specs=(PartitionSpec("pp"), PartitionSpec()), out_specs=PartitionSpec()
    )
    return Written(stacked(), mapped, NamedSharding(mesh, PartitionSpec("pp")), NamedSharding(mesh, PartitionSpec()))


def praxis(repeats: int) -> Written:
    """The same by a vmap over stages and a buffer that shifts along them; the compiler makes the transfers."""
    mesh = Mesh(np.array(jax.devices()), ("pp",))
    stages = NamedSharding(mesh, PartitionSpec("pp"))

    def pipeline(weights: jax.Array, xs: jax.Array) -> jax.Array:
        def tick(buffer: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            shifted = jnp.roll(buffer, 1, axis=0)
            entering = jnp.where(jnp.arange(STAGES)[:, None, None] == 0, xs[jnp.minimum(t, MICROBATCHES - 1)], shifted)
            y = jax.vmap(lambda w, x: layers(w, x, repeats))(
                weights, jax.lax.with_sharding_constraint(entering, stages)
            )
            y = jax.lax.with_sharding_constraint(y, stages)
            return y, y[-1]

        start = jax.lax.with_sharding_constraint(jnp.zeros((STAGES, ROWS, WIDTH)), stages)
        _, ys = jax.lax.scan(tick, start, jnp.arange(MICROBATCHES + STAGES - 1))
        return (ys[STAGES - 1 :] ** 2).mean()

    return Written(stacked(), pipeline, stages, NamedSharding(mesh, PartitionSpec()))


def check(way: str, loss: Any, found: Any, wanted: Any) -> None:
    """Stop unless a way gives the single jit's loss and parameters."""
    same = Comparison(way).losses(loss, wanted[0])
    same.values(np.ravel(found), np.ravel(wanted[1]), relative=1e-4, absolute=1e-6).require()


def measure(stage_ms: float, schedules: Sequence[str], repetitions: int) -> dict[str, float]:
    """Print the table; the median of bound over step of each way."""
    repeats = repeats_for(stage_ms)
    alone = [single(repeats, device) for device in jax.devices()]
    ours = {f"ours, {schedule}": Ours(repeats, schedule, False) for schedule in schedules}
    whole = {"ours, one_program": Ours(repeats, "gpipe", True)}
    written = {"ppermute": ppermute(repeats), "praxis": praxis(repeats)}
    ways: dict[str, Ours | Written] = {**ours, **whole, **written}
    wanted = (alone[0].step(), np.stack(alone[0].weights))
    alone[1].step()
    for name, way in ways.items():
        loss = way.step()
        weights = way.weights if isinstance(way, Written) else way.weights_now()
        check(name, loss, weights, wanted)
    samples: dict[str, list[float]] = {name: [] for name in ("single", *ways)}
    hosts: dict[str, list[float]] = {name: [] for name in ours}
    for _ in range(repetitions + 2):
        samples["single"].append(max(side_by_side([way.step for way in alone])))
        for name, way in ways.items():
            samples[name].append(_timed(way.step))
        for name, own in ours.items():
            hosts[name].append(own.host_s)
    samples = {name: of_way[2:] for name, of_way in samples.items()}
    share = (MICROBATCHES + STAGES - 1) / (MICROBATCHES * STAGES)
    costs: dict[str, sw.StageCosts] = {}
    print(f"\nstages of {stage_ms:g} ms: {LAYERS} layers of {repeats} times {CHUNK} products")
    print("| way | step | bound / step | middle half | the host is busy | bound by the stage functions / step |")
    print("|---|---|---|---|---|---|")
    medians: dict[str, float] = {}
    for name, of_way in samples.items():
        shares = [share * one / own for one, own in zip(samples["single"], of_way, strict=True)]
        cells = [_ms([statistics.median(of_way)])]
        if name != "single":
            low, middle, high = statistics.quantiles(shares, n=4)
            medians[name] = middle
            cells += [f"{middle:.3f}", f"{low:.3f} to {high:.3f}"]
        if name in ours:
            costs[name] = ours[name].stage_times()
            stages_s = sw.simulate(ours[name].plan.build_schedule(), costs[name]).makespan_s
            cells += [_ms([statistics.median(hosts[name])]), f"{stages_s / statistics.median(of_way):.3f}"]
        print(f"| {name} | {' | '.join(cells)} |" + " |" * (5 - len(cells)))
    for name, own in ours.items():
        counts = own.train.counts
        assert counts is not None
        print(
            f"{name}: {counts.dispatches} dispatches and {counts.transfers} transfers a step. Stage functions: forward "
            f"{_ms(costs[name].forward_s)}, backward {_ms(costs[name].backward_s)}",
            flush=True,
        )
    return medians


def _ms(values: Sequence[float]) -> str:
    return " and ".join(f"{1e3 * value:.1f}" for value in values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage-ms", type=float, nargs="*", default=[5.0, 20.0], help="forward + backward of a stage")
    parser.add_argument("--schedules", nargs="*", default=["1f1b", "eager-1f1b", "gpipe"])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--ynnpack", action="store_true", help="products as XLA divides them by itself")
    given = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    if cores < STAGES:
        raise SystemExit(f"this measures {STAGES} devices of a core each, and there are {cores} cores")
    print(f"{STAGES} stages, {MICROBATCHES} microbatches; milliseconds, medians of {given.repetitions}")
    found = {f"{ms:g} ms": measure(ms, given.schedules, given.repetitions) for ms in given.stage_ms}
    judged = claims.jax_pipeline(found)
    print("\n" + judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    sys.exit(main())
