"""Runs that cross from PyTorch to JAX and back: the same bits, and losses as if they had stayed."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

import shardwright.jax as sw
from shardwright.backends.torch.state.plain_states import saved_state
from shardwright.core.checkpoint.copied import write_copy
from shardwright.core.checkpoint.name_map import NameMap
from shardwright.core.checkpoint.reader import Reader
from shardwright.core.errors import CheckpointError
from tests.comparison import Comparison
from tests.models.own import ResidualNetwork
from tests.torch.launch import on_ranks
from tests.twins import crossing
from tests.twins import flax_models as flax
from tests.twins.crossing import NAMES

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("quick_compilation")]
DRIFT = 1e-3
"""By how much losses of a run that crossed may differ from those of one that stayed."""
DEGREES: dict[str, dict[str, int]] = {
    "gpt2": {"pp": 2, "tp": 2}, "bert": {"dp": 2, "tp": 2, "shard": 3}, "ncf": {"dp": 2},
}  # fmt: skip
"""Under which plan each twin goes on in JAX."""


STEPS, MODELS = 4, ("gpt2", "ncf")
"""The steps on each side, and the models, of the tests that are not slow."""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """The folder of checkpoints of runs in PyTorch, and the losses of those that stayed."""
    folder = tmp_path_factory.mktemp("crossing")
    return folder, start(folder, MODELS, STEPS)


def start(folder: Path, models: Sequence[str], steps: int) -> dict[str, list[float]]:
    """Train in PyTorch over two stages: the losses after a checkpoint of each model."""
    return launched(folder, "start", steps, {"pipeline_parallel_degree": 2}, models)


def launched(folder: Path, mode: str, steps: int, degrees: dict[str, int], models: Sequence[str]) -> dict[str, Any]:
    out = folder / "out.json"
    asked = (str(folder), str(out), mode, str(steps), json.dumps(degrees), *models)
    outcome = on_ranks("crossing.py", 2, *asked, timeout_s=240)
    assert outcome.code == 0, outcome.text[-6000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def optimizer(name: str) -> optax.GradientTransformation:
    """The optimizer of a twin: for `OPTIONS_CROSS` with other options, which are to come from the checkpoint."""
    b1, b2 = crossing.BETAS
    if name in crossing.OPTIONS_CROSS:
        own: Any = optax.inject_hyperparams(optax.adamw)(learning_rate=0.5, b1=0.5, b2=0.5, eps=0.1, weight_decay=0.9)
    else:
        own = optax.adamw(crossing.RATE, b1, b2, crossing.EPSILON, weight_decay=crossing.DECAY)
    return optax.chain(optax.clip_by_global_norm(1e6), own)


def step_of(name: str, **pins: Any) -> tuple[sw.TrainStep, sw.TrainState]:
    create, loss = crossing.flax_model(name)
    graph = sw.capture(nnx.eval_shape(create), crossing.flax_inputs(name, 0), loss)
    pins = {"pp": 1, "dp": 1, "tp": 1, "microbatch": 2, "recompute": "none", "precision": "fp32", "shard": 0} | pins
    ranks = pins["pp"] * pins["dp"] * pins["tp"]
    plan = sw.plan(graph, sw.Cluster("cpu", devices_per_node=ranks), batch=crossing.SAMPLES, **pins)
    train = sw.train_step(loss, optimizer(name), plan, devices=jax.devices()[:ranks], log_every=0)
    return train, train.init(create)


def require_crossing(folder: Path, stayed: dict[str, list[float]], models: Sequence[str], steps: int) -> None:
    """Require that runs which go on in JAX, and from there back in PyTorch, have the state and the losses of those that
    stayed."""
    comparison = Comparison("losses of runs that crossed")
    for name in models:
        train, state = step_of(name, **DEGREES[name])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state, user = train.resume_from_checkpoint(folder, state, f"{name}-torch", names=NAMES[name])
        require_said([str(one.message) for one in caught], name in crossing.OPTIONS_CROSS)
        train.save_checkpoint(folder, f"{name}-jax", state, user)
        losses = []
        for step in range(steps, 2 * steps):
            state, loss = train(state, crossing.flax_inputs(name, step))
            losses.append(float(loss))
        assert int(state.step) == 2 * steps
        comparison.losses({name: losses}, {name: stayed[name][:steps]}, relative=DRIFT, moving=5e-3)
        train.save_checkpoint(folder, f"{name}-away", state, user)
    back = launched(folder, "back", steps, {"shard": 3}, models)
    for name in models:
        Comparison.of_ranks([back[name]["state"]]).require()
        wanted = {f"{name} back": stayed[name][steps:]}
        comparison.losses({f"{name} back": back[name]["losses"]}, wanted, relative=DRIFT)
    comparison.require()


def require_said(said: Sequence[str], options_cross: bool) -> None:
    """Require that options which an optax chain does not tell are named, with the values of the run in PyTorch."""
    named = [text for text in said if "give the optimizer here" in text]
    if options_cross:
        assert not named
    else:
        (text,) = named
        b1, b2 = crossing.BETAS
        options = {"learning_rate": crossing.RATE, "b1": b1, "b2": b2, "eps": crossing.EPSILON}
        for option, value in (options | {"weight_decay": crossing.DECAY}).items():
            assert f"{option}={value:.7g}" in text


def test_runs_go_there_and_back(started: tuple[Path, dict[str, list[float]]]) -> None:
    require_crossing(*started, MODELS, STEPS)


@pytest.mark.slow
def test_twenty_steps_on_each_side(tmp_path: Path) -> None:
    require_crossing(tmp_path, start(tmp_path, tuple(NAMES), 20), tuple(NAMES), 20)


def test_every_weight_and_moment_is_there_in_the_twins_layout(started: tuple[Path, Any]) -> None:
    """Each entry of the weights in JAX is the one that Hugging Face's names have, for the fused matrix by hand."""
    folder, _ = started
    train, state = step_of("gpt2")
    state, _ = train.resume_from_checkpoint(folder, state, "gpt2-torch", names="gpt2")
    kept: dict[str, Any] = _saved(folder / "gpt2.pt")
    params = train.params(state)
    comparison = Comparison()
    comparison.equal(np.asarray(params.h[1].attn.c_attn.kernel), kept["model.transformer.h.1.attn.c_attn.weight"])
    comparison.equal(np.asarray(params.wte.embedding), kept["model.transformer.wte.weight"])
    comparison.require()


RESNET = NameMap.of(
    {
        "blocks.{block}.{conv}.weight[out, in, y, x]": "blocks.{block}.{conv}.kernel[y, x, in, out]",
        "stem.weight[out, in, y, x]": "stem.kernel[y, x, in, out]",
        "head.weight[out, in]": "head.kernel[in, out]",
        "{norm...}.running_mean": "other/{norm...}.mean",
        "{norm...}.running_var": "other/{norm...}.var",
        "{norm...}.weight": "{norm...}.scale",
        "{module...}.bias": "{module...}.bias",
    },
    values={"conv": ("first", "second", "skip")}, torch_only=["{norm...}.num_batches_tracked"],
)  # fmt: skip


def test_weights_and_statistics_of_a_convolutional_network_cross(tmp_path: Path) -> None:
    """Without training: what the network in JAX answers, with running statistics, is what the one in PyTorch does."""
    torch.manual_seed(0)
    network = ResidualNetwork(4, 5)
    for name, buffer in network.named_buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
    write_copy(saved_state(network.state_dict()), tmp_path, "start")
    images = torch.randn(3, 3, 16, 16)
    network.eval()
    with torch.no_grad():
        wanted = network(images, torch.zeros(3, dtype=torch.long))["logits"]

    def create() -> flax.ResNet:
        return flax.ResNet(4, 5, nnx.Rngs(0))

    batch = {"images": jnp.asarray(images.permute(0, 2, 3, 1).numpy()), "labels": jnp.zeros(3, jnp.int32)}
    graph = sw.capture(nnx.eval_shape(create), batch, flax.resnet_loss)
    pins: dict[str, Any] = {"pp": 1, "dp": 1, "tp": 1, "microbatch": 3, "precision": "fp32", "shard": 0}
    plan = sw.plan(graph, sw.Cluster("cpu", devices_per_node=1), batch=3, **pins)
    train = sw.train_step(flax.resnet_loss, optax.sgd(1e-3), plan, devices=jax.devices()[:1], log_every=0)
    state, _ = train.resume_from_checkpoint(tmp_path, train.init(create), names=RESNET)
    model = train.params(state)
    model.eval()
    found = np.asarray(model(batch["images"]))
    Comparison("logits").values(found, wanted.numpy(), relative=1e-4, absolute=1e-4).require()


def _saved(path: Path) -> dict[str, Any]:
    return {name: value.numpy() for name, value in torch.load(path, weights_only=True).items()}


def test_a_run_of_the_other_framework_is_refused_without_a_map(started: tuple[Path, Any]) -> None:
    folder, _ = started
    train, state = step_of("ncf")
    with pytest.raises(CheckpointError, match=r"written by a torch run.*names=.*gpt2"):
        train.resume_from_checkpoint(folder, state, "ncf-torch")


def test_a_map_of_another_model_is_refused(started: tuple[Path, Any]) -> None:
    folder, _ = started
    train, state = step_of("ncf")
    with pytest.raises(CheckpointError, match="the map of gpt2 has no relation for"):
        train.resume_from_checkpoint(folder, state, "ncf-torch", names="gpt2")


def test_an_optimizer_that_keeps_something_else_is_refused(started: tuple[Path, Any]) -> None:
    folder, _ = started
    create, loss = crossing.flax_model("ncf")
    train, _ = step_of("ncf")
    other = sw.train_step(loss, optax.rmsprop(1e-3), train.plan, devices=jax.devices()[:1], log_every=0)
    with pytest.raises(CheckpointError, match=r"optimizer's 0\.nu.* has no counterpart"):
        other.resume_from_checkpoint(folder, other.init(create), "ncf-torch", names=NAMES["ncf"])
    state, _ = other.resume_from_checkpoint(
        folder, other.init(create), "ncf-torch", names=NAMES["ncf"], load_optimizer=False
    )
    assert int(state.step) == STEPS


def test_a_damaged_file_is_named(started: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = started
    tag = tmp_path / "ncf-torch"
    tag.mkdir()
    for path in (folder / "ncf-torch").iterdir():
        (tag / path.name).write_bytes(path.read_bytes())
    victim = next(path for path in tag.iterdir() if path.name.startswith("model"))
    data = bytearray(victim.read_bytes())
    data[-3] ^= 1
    victim.write_bytes(data)
    train, state = step_of("ncf")
    assert Reader.open(tmp_path).framework == "torch"
    with pytest.raises(CheckpointError, match=victim.name):
        train.resume_from_checkpoint(tmp_path, state, names=NAMES["ncf"])
