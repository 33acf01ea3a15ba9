"""Training of unlike stages, in one process or as one of several: `python -m tests.jax.process_training CASES.json RANK
PROCESSES PORT FOLDER sw|jax` runs cases one after the other and keeps what each gave in FOLDER. The processes begin
with `sw.init`, or with `jax.distributed.initialize`, after which collectives carry arrays between them."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardwright.jax as sw
from examples import gpt2_flax
from tests.jax import chains, zoo_nnx

GPT2 = gpt2_flax.Config(n_layer=4, n_head=2, n_embd=16, vocab_size=32, n_positions=16)
Model = tuple[Callable[[], nnx.Module], Callable[..., Any], Callable[[int], list[dict[str, np.ndarray]]]]


def _gpt2() -> gpt2_flax.GPT2:
    return gpt2_flax.create(GPT2, seed=3)


def gpt2_batches(steps: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"input_ids": rng.integers(0, GPT2.vocab_size, (8, 10), np.int32)} for _ in range(steps)]


def weighted_loss(model: gpt2_flax.GPT2, batch: dict[str, jax.Array]) -> sw.Weighted:
    """Microbatches weigh differently: only tokens below a bound count."""
    tokens = batch["input_ids"]
    counted = (tokens[:, 1:] < GPT2.vocab_size // 2).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens)[:, :-1], tokens[:, 1:])
    return sw.weighted((losses * counted).sum() / counted.sum(), counted.sum())


def with_metrics(model: chains.Chain, batch: dict[str, jax.Array]) -> Any:
    """The loss, and metrics made on the last stage: joined, a mean, a sum of integers."""
    logits = model(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    right = (logits.argmax(-1) == batch["y"]).sum()
    return losses.mean(), {"row": losses.mean(1), "mean": losses.mean(), "right": right}


def infinite(model: chains.Chain, batch: dict[str, jax.Array]) -> jax.Array:
    """A loss that is not finite where a sample begins with a certain id."""
    bad = (batch["x"][:, 0] == chains.VOCABULARY - 1).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
    return (losses.mean(1) + jnp.log(1 - bad)).mean()


def factored(model: chains.Chain, batch: dict[str, jax.Array]) -> jax.Array:
    """The factor is of one sample's loss, so that the gradients of one microbatch of one replica can be made to
    overflow."""
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
    return (losses.astype(jnp.float32).mean(1) * batch["factor"]).mean()


def factored_batches(steps: int) -> list[dict[str, np.ndarray]]:
    return [batch | {"factor": np.ones(chains.BATCH, np.float32)} for batch in chains.batches(steps)]


MODELS: dict[str, Model] = {
    "gpt2": (_gpt2, weighted_loss, gpt2_batches),
    "t5": (zoo_nnx.MODELS["t5"][0], zoo_nnx.t5_loss, lambda steps: zoo_nnx.batches("t5", steps)),
    "resnet": (zoo_nnx.MODELS["resnet"][0], zoo_nnx.resnet_loss, lambda steps: zoo_nnx.batches("resnet", steps)),
    "chain": (chains.maker(4), chains.loss_fn, chains.batches),
    "dropout": (chains.maker(4, 0.3), chains.plain_loss, chains.batches),
    "metrics": (chains.maker(4), with_metrics, chains.batches),
    "infinite": (chains.maker(4), infinite, chains.batches),
    "overflow": (chains.maker(4), factored, factored_batches),
}


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        spans: whether every stage has a device of each process.
        nonfinite: of `train_step`; a batch that makes the loss infinite comes second then.
        init: whether the model is given as a function that makes it.
        precision: with "fp16" losses are scaled, and of "overflow" the second step's gradients do.
    """

    model: str
    pp: int
    dp: int = 1
    tp: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1
    shard: int = 0
    microbatch: int = 2
    steps: int = 3
    spans: bool = False
    nonfinite: str = "warn"
    init: bool = False
    recompute: str = "none"
    precision: str = "fp32"
    shard_group: int | None = None

    @property
    def name(self) -> str:
        marks = [f"{self.model}-pp{self.pp}", f"dp{self.dp}", f"tp{self.tp}", self.schedule]
        marks += [self.precision] * (self.precision != "fp32") + [f"group{self.shard_group}"] * bool(self.shard_group)
        marks += [f"shard{self.shard}"] * bool(self.shard) + ["spans"] * self.spans + ["init"] * self.init
        return "-".join([*marks, *([self.recompute] if self.recompute != "none" else [])])


@dataclass
class Result:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    params: dict[str, np.ndarray] = field(default_factory=dict)
    aux: list[dict[str, np.ndarray]] = field(default_factory=list)
    """The metrics of every step; where losses are scaled, whether it overflowed and the factor after it."""
    said: str = ""


def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.1))


def plan_of(case: Case) -> sw.Plan:
    create, loss, batches = MODELS[case.model]
    sample = {key: jax.ShapeDtypeStruct(a.shape, a.dtype) for key, a in batches(1)[0].items()}
    plain = (lambda model, batch: loss(model, batch)[0]) if case.model == "metrics" else loss
    graph = sw.capture(nnx.eval_shape(create), sample, plain)
    device = "h100" if case.precision == "fp8" else "cpu"  # plans in fp8 are for devices that have it
    cluster = sw.Cluster(device, nodes=1, devices_per_node=case.pp * case.dp * case.tp)
    size = len(next(iter(sample.values())).shape) and next(iter(sample.values())).shape[0]
    return sw.plan(
        graph, cluster, batch=size, pp=case.pp, dp=case.dp, tp=case.tp, microbatch=case.microbatch,
        precision=case.precision, recompute=case.recompute, shard=case.shard, shard_group=case.shard_group,
        schedule=case.schedule, virtual_stages=case.virtual_stages,
        loss_scope="replica",
    )  # fmt: skip


def spread(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """The devices, neighbours of different processes."""
    own: dict[int, list[jax.Device]] = {}
    for device in devices:
        own.setdefault(device.process_index, []).append(device)
    return [device for row in zip(*own.values(), strict=True) for device in row]


def run(case: Case, devices: Sequence[jax.Device], plan: sw.Plan | None = None) -> Result:
    """What a run gives to this process."""
    create, loss, batches = MODELS[case.model]
    devices = spread(devices) if case.spans else devices
    has_aux, scaled = case.model == "metrics", case.precision == "fp16"
    scaling: dict[str, Any] = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**12}}
    train = sw.train_step(
        loss, optimizer(), plan or plan_of(case), devices=devices, has_aux=has_aux,
        nonfinite=case.nonfinite,  # type: ignore[arg-type]
        **(scaling if scaled else {}),
    )  # fmt: skip
    state = train.init(create if case.init else create())
    found = Result()
    steps = batches(case.steps)
    if case.model == "infinite":
        for batch in steps:
            batch["x"][:, 0] = 0
        steps[1]["x"][5, 0] = chains.VOCABULARY - 1
    if case.model == "overflow":
        steps[1]["factor"][5] = 2.0**14
    try:
        for batch in steps:
            state, value, *aux = train(state, batch)
            found.losses.append(float(value))
            skipped = bool(train.overflow) if scaled else False
            found.norms.append(0.0 if skipped else float(train.grad_norm))
            if scaled:
                found.aux.append({"skipped": np.asarray(skipped), "scale": np.asarray(float(state.loss_scale))})
            found.aux += [{key: np.asarray(a) for key, a in each.items()} for each in aux]
        train.settle()
    except sw.ShardwrightError as error:
        found.said = f"{type(error).__name__}: {error}"
    trained = train.params(state)
    found.params = chains.named(nnx.state(trained, nnx.Any(nnx.Param, nnx.BatchStat)))
    assert int(state.step) == len(found.losses) or found.said
    return found


def main(cases: str, rank: int, processes: int, port: int, folder: str, begun_by: str) -> None:
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    begin, end = {"sw": (sw.init, sw.shutdown), "jax": (jax.distributed.initialize, jax.distributed.shutdown)}[begun_by]
    begin(f"127.0.0.1:{port}", processes, rank)
    for given in json.loads(Path(cases).read_text(encoding="utf-8")):
        case = Case(**given)
        begun = time.monotonic()
        found = run(case, jax.devices())
        np.savez(
            Path(folder) / f"{case.name}.{rank}.npz", losses=found.losses, norms=found.norms, said=found.said,
            **{f"p:{name}": value for name, value in found.params.items()},
            **{f"a:{n}:{name}": v for n, aux in enumerate(found.aux) for name, v in aux.items()},
        )  # fmt: skip
        print(f"{case.name}: {time.monotonic() - begun:.1f} s", flush=True)
    end()


if __name__ == "__main__":
    main(sys.argv[1], *(int(number) for number in sys.argv[2:5]), *sys.argv[5:7])
