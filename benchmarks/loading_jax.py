"""Loading of checkpoints in JAX, on two virtual CPU devices: the time beside that of Orbax's own load.

    python benchmarks/loading_jax.py [--write benchmarks/results/loading.md]

Parameters and AdamW's states of 1 GiB together, that were written by two replicas with `shard=3`, are loaded under a
tensor axis by `train.resume_from_checkpoint`; and by Orbax's ``PyTreeCheckpointer`` into arrays with the same
shardings, from a folder that it wrote of arrays that had these shardings already, its easiest case. Rounds in turn,
files in the system's cache, medians; what was loaded is compared to the bit.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import claims

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

import shardwright.jax as sw

GIB = 2**30
INNER, SAMPLES = 1024, 8
BLOCK_BYTES = 3 * 4 * (8 * INNER**2 + 5 * INNER)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(INNER, 4 * INNER, rngs=rngs)
        self.down = nnx.Linear(4 * INNER, INNER, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.relu(self.up(x)))


class Net(nnx.Module):
    def __init__(self, blocks: int, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Block(rngs) for _ in range(blocks)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


def loss(model: Net, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean(jnp.square(model(batch["x"])))


def started(blocks: int, seed: int, **pins: Any) -> tuple[sw.TrainStep, sw.TrainState]:
    def create() -> Net:
        return Net(blocks, nnx.Rngs(seed))

    batch = {"x": jnp.ones((SAMPLES, INNER))}
    graph = sw.capture(nnx.eval_shape(create), batch, loss)
    asked = {"pp": 1, "dp": 1, "tp": 1, "microbatch": 2, "recompute": "none", "precision": "fp32", "shard": 0} | pins
    plan = sw.plan(graph, sw.Cluster("cpu", devices_per_node=2), batch=SAMPLES, **asked)
    train = sw.train_step(loss, optax.adamw(1e-3), plan, log_every=0)
    state, _ = train(train.init(create), batch)
    return train, state


def tree_of(state: sw.TrainState) -> dict[str, Any]:
    """What Orbax is given: the arrays of the same state."""
    return {"params": state.params, "optimizer": state.optimizer}


def whole(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def timed(gib: float, rounds: int, scratch: Path) -> tuple[dict[str, list[float]], int, int]:
    """Seconds of each load by kind, the bytes of the state, and how many of its arrays are cut."""
    blocks = max(2, round(gib * GIB / BLOCK_BYTES))
    first, state = started(blocks, 0, dp=2, shard=3)
    first.save_checkpoint(scratch, "last", state)
    expected = whole(tree_of(state))
    del first, state
    train, state = started(blocks, 1, tp=2)
    state, _ = train.resume_from_checkpoint(scratch, state)
    leaves = jax.tree.leaves(tree_of(state))
    size, cut = sum(leaf.nbytes for leaf in leaves), sum(not leaf.sharding.is_fully_replicated for leaf in leaves)
    peer = ocp.PyTreeCheckpointer()
    peer.save(scratch / "orbax", args=ocp.args.PyTreeSave(item=tree_of(state)))
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree_of(state))
    restore = ocp.args.PyTreeRestore(item=abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract))

    def ours() -> Any:
        nonlocal state
        state, _ = train.resume_from_checkpoint(scratch, state)
        return tree_of(state)

    loads: dict[str, Callable[[], Any]] = {
        "ours": ours, "Orbax": lambda: peer.restore(scratch / "orbax", args=restore),
    }  # fmt: skip
    times: dict[str, list[float]] = {kind: [] for kind in loads}
    for number in range(rounds + 1):
        for kind in ("ours", "Orbax") if number % 2 else ("Orbax", "ours"):
            begun = time.perf_counter()
            found = jax.block_until_ready(loads[kind]())
            took = time.perf_counter() - begun
            if number:  # the first one warms the cache
                times[kind].append(took)
            else:
                same = all(np.array_equal(a, b) for a, b in zip(whole(found), expected, strict=True))
                assert same, f"{kind} loads other values"
            del found
    return times, size, cut


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="the size of what is loaded")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        times, size, cut = timed(options.gib, options.rounds, Path(scratch))
    medians = {kind: statistics.median(seconds) for kind, seconds in times.items()}
    ratio = medians["ours"] / medians["Orbax"]
    by_round = " ".join(f"{a / b:.2f}" for a, b in zip(times["ours"], times["Orbax"], strict=True))
    header = "| state, GiB | arrays cut | ours, s | Orbax, s | ours / Orbax | by round |\n|---|---|---|---|---|---|\n"
    text = (
        f"\n{header}| {size / GIB:.2f} | {cut} | {medians['ours']:.2f} | {medians['Orbax']:.2f} | {ratio:.2f} | "
        f"{by_round} |\n"
    )
    print(text)
    if options.write:
        with options.write.open("a", encoding="utf-8") as file:
            file.write(text)
    judged = claims.loading_jax(ratio)
    print(judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    sys.exit(main())
