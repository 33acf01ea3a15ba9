"""Transformer blocks on the tensor axis in JAX: a plan's layouts beside shardings written by hand.

    python benchmarks/jax_tensor_parallel.py [--devices 2] [--hidden 512] [--length 256] [--batch 4] [--layers 2]

Both run the same blocks, forward and backward with one SGD update, in one jitted step on virtual CPU devices of one
process. By hand means NamedSharding on the parameters as Megatron has them (arXiv 1909.08053, section 3: query, key,
value and the first product of the feed-forward by columns, the others by rows) and a constraint on what each sublayer
adds. Steps are taken in turn, so that the machine's moods hit both alike, and the median of each is given, with the
median of the ratios of neighbours. The parameters after a step are compared first.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims

from tests.comparison import Comparison


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("devices", 2), ("hidden", 512), ("heads", 8), ("length", 256), ("batch", 4), ("layers", 2),
                          ("rounds", 30)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={given.devices}")
    text, ratio = compare(given)
    print(text)
    if given.write:
        given.write.write_text(text)
    judged = claims.jax_tensor_parallel(ratio)
    print(judged.verdict())
    return judged.exit_code


def compare(given: argparse.Namespace) -> tuple[str, float]:
    """The table, and the median of ours over by hand."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    import shardwright.jax as sw

    hidden, heads, layers = given.hidden, given.heads, given.layers
    devices = jax.devices()[: given.devices]

    def make() -> list[dict[str, jax.Array]]:
        keys = iter(jax.random.split(jax.random.key(0), 6 * layers))

        def matrix(rows: int, columns: int) -> jax.Array:
            return jax.random.normal(next(keys), (rows, columns)) * rows**-0.5

        return [
            {
                **{name: matrix(hidden, hidden) for name in ("q", "k", "v", "o")},
                "up": matrix(hidden, 4 * hidden),
                "down": matrix(4 * hidden, hidden),
                "norm_1": jnp.ones(hidden),
                "norm_2": jnp.ones(hidden),
            }
            for _ in range(layers)
        ]

    def normalised(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale

    def run(params: Any, x: jax.Array, whole: Any) -> jax.Array:
        for layer in params:
            h = normalised(x, layer["norm_1"])
            q, k, v = ((h @ layer[n]).reshape(*h.shape[:2], heads, -1) for n in ("q", "k", "v"))
            mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(h.shape)
            x = x + whole(mixed @ layer["o"])
            h = normalised(x, layer["norm_2"])
            x = x + whole(jax.nn.gelu(h @ layer["up"]) @ layer["down"])
        return (x * x).mean()

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return run(params, batch, lambda value: value)

    x = np.random.default_rng(0).standard_normal((given.batch, given.length, hidden)).astype(np.float32)
    optimizer = optax.sgd(1e-3)
    plan = sw.plan(
        sw.capture(loss, (jax.eval_shape(make), jax.ShapeDtypeStruct(x.shape, x.dtype))),
        sw.Cluster("h100", nodes=1, devices_per_node=given.devices),
        batch=given.batch, pp=1, tp=given.devices, dp=1, microbatch=given.batch, recompute="none", shard=0,
        precision="fp32", sequence_parallel=False,
    )  # fmt: skip
    train = sw.train_step(loss, optimizer, plan, devices=devices)
    ours = train.init(make)

    mesh = jax.sharding.Mesh(np.array(devices), ("tp",))
    places = {**dict.fromkeys(("q", "k", "v", "up"), PartitionSpec(None, "tp")),
              **dict.fromkeys(("o", "down"), PartitionSpec("tp", None))}  # fmt: skip
    shardings = [
        {name: NamedSharding(mesh, places.get(name, PartitionSpec())) for name in layer}
        for layer in jax.eval_shape(make)
    ]
    everywhere = NamedSharding(mesh, PartitionSpec())

    def hand_step(params: Any, state: Any, batch: jax.Array) -> Any:
        def total(params: Any) -> jax.Array:
            return run(params, batch, lambda value: jax.lax.with_sharding_constraint(value, everywhere))

        value, gradients = jax.value_and_grad(total)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    step = jax.jit(
        hand_step, in_shardings=(shardings, everywhere, everywhere), out_shardings=(shardings, everywhere, everywhere),
        donate_argnums=(0, 1),
    )  # fmt: skip
    hand = jax.jit(make, out_shardings=shardings)()
    hand_state = optimizer.init(hand)

    ours, our_loss = train(ours, x)
    hand, hand_state, hand_loss = step(hand, hand_state, x)
    same = Comparison("ours").losses(our_loss, hand_loss)
    same.values(train.params(ours), hand, relative=1e-4, absolute=1e-6).require()
    seconds: dict[str, list[float]] = {"by hand": [], "shardwright": []}
    for turn in range(given.rounds):
        order = ("by hand", "shardwright") if turn % 2 else ("shardwright", "by hand")
        for name in order:
            started = time.perf_counter()
            if name == "by hand":
                hand, hand_state, hand_loss = step(hand, hand_state, x)
                hand_loss.block_until_ready()
            else:
                ours, our_loss = train(ours, x)
                our_loss.block_until_ready()
            seconds[name].append(time.perf_counter() - started)
    ratios = [a / b for a, b in zip(seconds["shardwright"], seconds["by hand"], strict=True)]
    command = " ".join(
        f"--{n} {getattr(given, n)}" for n in ("devices", "hidden", "length", "batch", "layers", "rounds")
    )
    lines = [
        "# Transformer blocks on the tensor axis in JAX",
        "",
        f"    python benchmarks/jax_tensor_parallel.py {command}",
        "",
        f"{layers} blocks of {hidden}, {given.batch} × {given.length} tokens, fp32, {given.devices} virtual devices, "
        f"jax {jax.__version__} on the CPU. Forward, backward and update; {given.rounds} rounds in turn.",
        "",
        "| | median ms | by hand = 1 |",
        "|---|---|---|",
        f"| by hand | {statistics.median(seconds['by hand']) * 1e3:.1f} | 1 |",
        f"| shardwright | {statistics.median(seconds['shardwright']) * 1e3:.1f} | {statistics.median(ratios):.3f} |",
    ]
    return "\n".join(lines) + "\n", statistics.median(ratios)


if __name__ == "__main__":
    sys.exit(main())
