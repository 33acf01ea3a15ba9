"""How long a JAX pipeline takes to its first step, against one jit of the same model: tracing, compiling and one step.

    python benchmarks/jax_first_step.py                          # GPT-2 of 12 layers, 2 and 4 stages
    python benchmarks/jax_first_step.py --layers 24 --stages 4

Every figure is of a process of its own, one way after the other in every repetition: `single` is a jit of loss,
gradients over microbatches and update written by hand; the others `train_step` under 1F1B. The model is captured and
planned before, its state made, and a small jit compiled, so that importing and starting JAX count nowhere. XLA may
compile with every core in each.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims

from tests.comparison import Comparison

ROOT = Path(__file__).resolve().parents[1]
BATCH, MICROBATCH, LENGTH = 8, 2, 32


def run(stages: int, layers: int) -> dict[str, float]:
    """One way, in this process."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={max(1, stages)}"
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    import shardwright.jax as sw
    from examples import gpt2_flax

    config = gpt2_flax.Config(n_layer=layers, n_head=4, n_embd=64, vocab_size=256, n_positions=LENGTH)
    batch = {"input_ids": np.random.default_rng(0).integers(0, 256, (BATCH, LENGTH), np.int32)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    jax.block_until_ready(jax.jit(lambda x: x @ x)(jnp.eye(8)))
    if stages:
        abstract = nnx.eval_shape(lambda: gpt2_flax.create(config))
        graph = sw.capture(abstract, batch, gpt2_flax.next_token_loss)
        plan = sw.plan(
            graph, sw.Cluster("cpu", nodes=1, devices_per_node=stages), batch=BATCH, pp=stages, dp=1, tp=1,
            microbatch=MICROBATCH, schedule="1f1b", virtual_stages=1, precision="fp32", recompute="none", shard=0,
        )  # fmt: skip
        train = sw.train_step(gpt2_flax.next_token_loss, optimizer, plan)
        state = train.init(gpt2_flax.create(config))
        start = time.perf_counter()
        state, loss = train(state, batch)
        jax.block_until_ready((state, loss))
        took = time.perf_counter() - start
        done = train.compiled
        assert done is not None
        return {"first_s": took, "loss": float(loss), "programs": done.programs, "compiled": done.compiled}

    graphdef, params, rest = nnx.split(gpt2_flax.create(config), nnx.Param, ...)
    state = jax.jit(optimizer.init)(params)

    def step(params, state, batch):
        def loss(params, part):
            return gpt2_flax.next_token_loss(nnx.merge(graphdef, params, jax.tree.map(lambda x: x, rest)), part)

        def one(carry, part):
            return jax.tree.map(jnp.add, carry, jax.value_and_grad(loss)(params, part)), None

        parts = jax.tree.map(lambda x: x.reshape(-1, MICROBATCH, *x.shape[1:]), batch)
        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        (total, gradients), _ = jax.lax.scan(one, zeros, parts)
        count = BATCH // MICROBATCH
        updates, state = optimizer.update(jax.tree.map(lambda g: g / count, gradients), state, params)
        return optax.apply_updates(params, updates), state, total / count

    start = time.perf_counter()
    params, state, loss = jax.block_until_ready(jax.jit(step, donate_argnums=(0, 1))(params, state, batch))
    return {"first_s": time.perf_counter() - start, "loss": float(loss), "programs": 1, "compiled": 1}


def in_a_process(stages: int, layers: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--run", str(stages), "--layers", str(layers)]
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=True, env={**os.environ, "PYTHONPATH": path}
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--stages", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--run", type=int, help="one way in this process: its stages, 0 for the single jit")
    given = parser.parse_args()
    if given.run is not None:
        print(json.dumps(run(given.run, given.layers)))
        return 0
    samples: dict[int, list[dict[str, float]]] = {stages: [] for stages in (0, *given.stages)}
    for _ in range(given.repetitions):
        for stages, found in samples.items():
            found.append(in_a_process(stages, given.layers))
    print(f"GPT-2 of {given.layers} layers; seconds, medians of {given.repetitions} processes")
    print("| stages | first step | over the single jit | programs | compiled |")
    print("|---|---|---|---|---|")
    same = Comparison("losses of the first step")
    ratios: dict[int, float] = {}
    for stages, found in samples.items():
        first = statistics.median(one["first_s"] for one in found)
        ratio = statistics.median(o["first_s"] / s["first_s"] for o, s in zip(found, samples[0], strict=True))
        same.where = f"{stages} stages"
        same.losses([one["loss"] for one in found], [samples[0][0]["loss"]] * len(found))
        if stages:
            ratios[stages] = ratio
        name = stages or "single"
        print(f"| {name} | {first:.2f} | {ratio:.2f} | {found[0]['programs']} | {found[0]['compiled']} |")
    judged = claims.jax_first_step(ratios, same.failures())
    print("\n" + judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    sys.exit(main())
