"""Memory of JAX steps over what `flax.nnx` ships: each layer four times in a row, under several plans.

    python benchmarks/memory_layers.py [--only NAME …] [--plans NAME …] [--write benchmarks/results/memory_layers.md]

Predicted: the plan, before anything is compiled. Compiled: `TrainStep.memory_bytes`, which is `memory_analysis` of the
compiled step, or of a pipeline's programs with the arrays that lie beside them. Aim: never below, at most 3% above.
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FLAGS = "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

import shardwright as sw  # noqa: E402
import shardwright.jax as swj  # noqa: E402

DEPTH, MIB = 4, 2**20
ONE: dict[str, Any] = {"pp": 1, "dp": 1, "tp": 1}
PLANS: dict[str, dict[str, Any]] = {
    "one microbatch": ONE | {"microbatches": 1},
    "one device": ONE,
    "recompute": ONE | {"recompute": "full"},
    "dp 2": ONE | {"dp": 2},
    "dp 2, shard 3": ONE | {"dp": 2, "shard": 3},
    "dp 2, shard 3, recompute": ONE | {"dp": 2, "shard": 3, "recompute": "full"},
    "tp 2": ONE | {"tp": 2},
    "pp 2": ONE | {"pp": 2, "schedule": "1f1b"},
    "pp 2, recompute": ONE | {"pp": 2, "schedule": "1f1b", "recompute": "full"},
}
MICROBATCHES = 4


class Stack(nnx.Module):
    """Layers one after the other, each as ``run`` calls it."""

    def __init__(self, make: Callable[[nnx.Rngs], nnx.Module], run: Callable[[Any, jax.Array], jax.Array]) -> None:
        self.layers = nnx.List([make(nnx.Rngs(number)) for number in range(DEPTH)])
        self.run = run

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = self.run(layer, x)
        return x


class Residual(nnx.Module):
    """A layer beside an identity, with what it is made with."""

    def __init__(self, inner: nnx.Module) -> None:
        self.inner = inner

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.inner(x)


class Normed(nnx.Module):
    """A norm between two linear layers."""

    def __init__(self, norm: nnx.Module, width: int, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(width, 2 * width, rngs=rngs)
        self.norm = norm
        self.last = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jax.nn.relu(self.norm(self.first(x))))


def call(layer: Any, x: jax.Array) -> jax.Array:
    return layer(x)


def active(layer: Any, x: jax.Array) -> jax.Array:
    return jax.nn.gelu(layer(x))


def squared(model: Stack, batch: dict[str, jax.Array]) -> jax.Array:
    return (model(batch["x"]) ** 2).mean()


W, T, B = 256, 64, 8
IMAGE = (B, 16, 16, 32)
SEQUENCE = (B, T, W)
Case = tuple[Callable[[], nnx.Module], dict[str, jax.Array], Callable[..., Any]]


def stacked(make: Callable[[nnx.Rngs], nnx.Module], shape: Sequence[int], run: Callable[..., Any] = call) -> Case:
    drawn = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
    return functools.partial(Stack, make, run), {"x": drawn}, squared


LAYERS: dict[str, Callable[[], Case]] = {
    "Linear": lambda: stacked(lambda r: nnx.Linear(W, W, rngs=r), SEQUENCE, active),
    "Linear, wide": lambda: stacked(lambda r: nnx.Linear(1024, 1024, rngs=r), (B, 1024), active),
    "LinearGeneral": lambda: stacked(
        lambda r: nnx.LinearGeneral((4, W // 4), (4, W // 4), axis=(-2, -1), rngs=r), (B, T, 4, W // 4), active
    ),
    "Einsum": lambda: stacked(lambda r: nnx.Einsum("btd,de->bte", (W, W), (W,), rngs=r), SEQUENCE, active),
    "LoRALinear": lambda: stacked(lambda r: nnx.LoRALinear(W, W, lora_rank=8, rngs=r), SEQUENCE, active),
    "Conv": lambda: stacked(lambda r: nnx.Conv(32, 32, (3, 3), rngs=r), IMAGE, active),
    "Conv, strided": lambda: stacked(
        lambda r: nnx.Sequential(
            nnx.Conv(32, 64, (3, 3), strides=2, rngs=r), nnx.ConvTranspose(64, 32, (3, 3), strides=(2, 2), rngs=r)
        ),
        IMAGE,
        active,
    ),
    "Conv, depthwise": lambda: stacked(
        lambda r: nnx.Sequential(
            nnx.Conv(32, 32, (3, 3), feature_group_count=32, rngs=r), nnx.Conv(32, 32, (1, 1), rngs=r)
        ),
        IMAGE,
        active,
    ),
    "ConvTranspose": lambda: stacked(lambda r: nnx.ConvTranspose(32, 32, (3, 3), rngs=r), IMAGE, active),
    "BatchNorm": lambda: stacked(lambda r: Normed(nnx.BatchNorm(2 * W, rngs=r), W, r), SEQUENCE),
    "LayerNorm": lambda: stacked(lambda r: Normed(nnx.LayerNorm(2 * W, rngs=r), W, r), SEQUENCE),
    "RMSNorm": lambda: stacked(lambda r: Normed(nnx.RMSNorm(2 * W, rngs=r), W, r), SEQUENCE),
    "GroupNorm": lambda: stacked(lambda r: Normed(nnx.GroupNorm(2 * W, num_groups=8, rngs=r), W, r), SEQUENCE),
    "InstanceNorm": lambda: stacked(lambda r: Normed(nnx.InstanceNorm(2 * W, rngs=r), W, r), SEQUENCE),
    "MultiHeadAttention": lambda: stacked(
        lambda r: Residual(nnx.MultiHeadAttention(num_heads=4, in_features=W, decode=False, rngs=r)), SEQUENCE
    ),
    "RNN of LSTMCell": lambda: stacked(lambda r: nnx.RNN(nnx.LSTMCell(W // 2, W // 2, rngs=r)), (B, T, W // 2)),
    "RNN of OptimizedLSTMCell": lambda: stacked(
        lambda r: nnx.RNN(nnx.OptimizedLSTMCell(W // 2, W // 2, rngs=r)), (B, T, W // 2)
    ),
    "RNN of GRUCell": lambda: stacked(lambda r: nnx.RNN(nnx.GRUCell(W // 2, W // 2, rngs=r)), (B, T, W // 2)),
    "RNN of SimpleCell": lambda: stacked(lambda r: nnx.RNN(nnx.SimpleCell(W // 2, W // 2, rngs=r)), (B, T, W // 2)),
    "Dropout": lambda: stacked(
        lambda r: nnx.Sequential(nnx.Linear(W, W, rngs=r), nnx.Dropout(0.1, rngs=r)), SEQUENCE, active
    ),
    "PReLU": lambda: stacked(lambda r: nnx.Sequential(nnx.Linear(W, W, rngs=r), nnx.PReLU()), SEQUENCE),
}


class Embedded(nnx.Module):
    """A large table that is read, layers, and the table again as the head."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.table = nnx.Embed(4096, W, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(W, W, rngs=rngs) for _ in range(DEPTH)])

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.table(ids)
        for layer in self.layers:
            x = x + jax.nn.gelu(layer(x))
        return self.table.attend(x)


def token_loss(model: Embedded, batch: dict[str, jax.Array]) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["x"]).mean()


def embedded() -> Case:
    return Embedded, {"x": jnp.asarray(np.random.default_rng(0).integers(0, 4096, (B, T), dtype=np.int32))}, token_loss


class Root(nnx.Module):
    """A root that loops over its own parameters: no module is called."""

    def __init__(self) -> None:
        drawn = np.random.default_rng(0).standard_normal((DEPTH, W, W)) / W**0.5
        self.weights = nnx.List([nnx.Param(jnp.asarray(each, jnp.float32)) for each in drawn])

    def __call__(self, x: jax.Array) -> jax.Array:
        for weight in self.weights:
            x = jax.nn.gelu(x @ weight[...])
        return x


def rooted() -> Case:
    return Root, {"x": jnp.ones(SEQUENCE)}, squared


LAYERS |= {"Embed": embedded, "parameters of the root": rooted}


def of_model(name: str) -> Callable[[], Case]:
    def made() -> Case:
        import jax_models

        model, sample, loss = getattr(jax_models, name)()
        return lambda: model, sample, loss

    return made


MODELS = {name: of_model(name) for name in ("gpt2", "bert", "t5", "resnet", "ncf")}


def step_bytes(graph: Any, case: Case, pins: dict[str, Any]) -> tuple[Sequence[int], Sequence[int]]:
    """The bytes of every device: predicted, and of the compiled step."""
    make, sample, loss = case
    pins = dict(pins)
    devices, count = pins["pp"] * pins["dp"] * pins["tp"], pins.pop("microbatches", MICROBATCHES) * pins["dp"]
    size = len(next(iter(sample.values())))
    fixed = {"precision": "fp32", "recompute": "none", "shard": 0, "microbatch": size, "loss_scope": "replica"}
    cluster = sw.Cluster("cpu", devices_per_node=devices)
    plan = sw.plan(graph, cluster, batch=count * size, frameworks=["jax"], optimizer="adamw", **(fixed | pins))
    train = swj.train_step(loss, optax.adamw(1e-3), plan, devices=jax.devices()[:devices])
    batch = {key: np.concatenate([np.asarray(value)] * count) for key, value in sample.items()}
    return plan.predicted.peak_memory_bytes, train.memory_bytes(train.init(make()), batch)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[*LAYERS, *MODELS], default=[*LAYERS, *MODELS], metavar="NAME")
    parser.add_argument("--plans", nargs="*", choices=list(PLANS), default=list(PLANS), metavar="NAME")
    parser.add_argument("--write", type=Path, help="the file that the table is added to")
    parser.add_argument("--quick", action="store_true", help="compile without most optimizations: the same memory")
    options = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", options.quick)
    lines = [
        "| layer or model | plan | predicted, MiB | compiled, MiB | predicted / compiled, by device |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for name in options.only:
        case = (LAYERS | MODELS)[name]()
        graph = sw.capture(nnx.eval_shape(case[0]) if name in LAYERS else case[0](), case[1], case[2])
        for kind in options.plans:
            before, after = step_bytes(graph, case, PLANS[kind])
            ratios = " ".join(f"{said / found:.3f}" for said, found in zip(before, after, strict=True))
            lines.append(f"| {name} | {kind} | {max(before) / MIB:.2f} | {max(after) / MIB:.2f} | {ratios} |")
            print(lines[-1], flush=True)
    if options.write:
        with options.write.open("a") as file:
            file.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
