"""Losses that are no mean over samples: told from the function's program, carried out or asked for by name."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import shardwright.jax as sw
from shardwright.backends.jax.capture.tree import abstract
from shardwright.backends.jax.loss.reductions import Reader, Traced
from tests.comparison import Comparison
from tests.jax.spmd_model import batches, plain_params
from tests.jax.test_loss_forms import FORMS, logits_of, plan_of, step_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

cross_entropy = optax.softmax_cross_entropy_with_integer_labels
Loss = Callable[[Any, Any], Any]


def token_losses(params: Any, batch: Any) -> jax.Array:
    found: jax.Array = cross_entropy(logits_of(params, batch), batch["y"])
    return found


def counted(batch: Any) -> jax.Array:
    return (batch["y"] < 1 + batch["x"][:, :1]).astype(jnp.float32)


def masked(params: Any, batch: Any) -> jax.Array:
    """Its microbatches count unlike numbers of tokens; and the count is kept from zero."""
    return (token_losses(params, batch) * counted(batch)).sum() / counted(batch).sum().clip(1)


def summed(params: Any, batch: Any) -> jax.Array:
    return token_losses(params, batch).sum()


def contrastive(params: Any, batch: Any) -> jax.Array:
    """Every sample against all others of its batch."""
    z = logits_of(params, batch).mean(1)
    z = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
    return cross_entropy(5.0 * z @ z.T, jnp.arange(len(z))).mean()


def require_whole(form: str, train: sw.TrainStep, loss: Loss) -> None:
    """The step is that of the whole batch on one device."""
    params, batch = plain_params(), batches(1)[0]
    state, found = train(train.init(params), batch)
    wanted, gradients = jax.value_and_grad(loss)(params, batch)
    same = Comparison(f"{loss.__name__}, {form}")
    same.losses([found], [wanted])
    same.values([train.grad_norm], [optax.tree.norm(gradients)], relative=1e-5, absolute=0.0, what="norm")
    after = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
    same.values(train.params(state), after, relative=1e-4, absolute=1e-5, what="parameters")
    same.require("losses", "norm", "parameters")


@pytest.mark.parametrize(
    ("form", "loss"),
    [
        *((form, masked) for form in FORMS),
        *(pytest.param(form, summed, marks=pytest.mark.slow if form == "one program" else ()) for form in FORMS),
    ],
)
def test_a_loss_is_that_of_the_whole_batch(form: str, loss: Loss) -> None:
    require_whole(form, step_of(form, loss), loss)


def test_a_count_in_microbatches_of_one_sample() -> None:
    plan = plan_of(1, 2, masked, microbatch=1)
    train = sw.train_step(masked, optax.sgd(0.1), plan, devices=jax.devices()[:2])
    require_whole("one sample each", train, masked)


def test_samples_that_are_coupled() -> None:
    """Exact where one microbatch holds the batch, whatever dp; else refused, unless it is said what is meant."""
    devices = jax.devices()[:2]
    plan = plan_of(1, 2, contrastive, microbatch=8)
    require_whole("seen together", sw.train_step(contrastive, optax.sgd(0.1), plan, devices=devices), contrastive)
    plan = plan_of(1, 2, contrastive, microbatch=4)
    train = sw.train_step(contrastive, optax.sgd(0.1), plan, devices=devices)
    match = (
        r"the loss of contrastive depends on several samples together: .*4 microbatches.*microbatch = batch / dp.*mean"
    )
    with pytest.raises(sw.ShardwrightError, match=match):
        train(train.init(plain_params()), batches(1)[0])
    batch = batches(1)[0]
    parts = [{k: v[at : at + 4] for k, v in batch.items()} for at in range(0, 16, 4)]
    wanted = np.mean([float(contrastive(plain_params(), part)) for part in parts])
    said = sw.train_step(contrastive, optax.sgd(0.1), plan, devices=devices, reduction="mean")
    planned = plan_of(1, 2, contrastive, microbatch=4, loss_scope="replica")
    for train in (said, sw.train_step(contrastive, optax.sgd(0.1), planned, devices=devices)):
        assert float(train(train.init(plain_params()), batch)[1]) == pytest.approx(wanted, rel=1e-5)
    alone = plan_of(1, 2, contrastive, microbatch=8, loss_scope="replica")
    train = sw.train_step(contrastive, optax.sgd(0.1), alone, devices=devices)
    halves = [{k: v[at : at + 8] for k, v in batch.items()} for at in (0, 8)]
    wanted = np.mean([float(contrastive(plain_params(), half)) for half in halves])
    assert float(train(train.init(plain_params()), batch)[1]) == pytest.approx(wanted, rel=1e-5)


class Normed(linen.Module):
    keeps: bool = False

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            norm = linen.BatchNorm(use_running_average=self.keeps, use_bias=False)
            x = norm(jnp.tanh(linen.Dense(8, use_bias=False)(x)))
        return x


def normed(keeps: bool, samples: int, given: str | None, **degrees: int) -> tuple[float, float]:
    """The loss of a second step, and that of the plain model on the whole batch."""
    model = Normed(keeps)
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    variables = model.init(jax.random.key(0), x)
    params, kept = variables["params"], variables["batch_stats"]

    def loss(params: Any, batch: Any, *, state: Any = kept) -> Any:
        out, after = model.apply({"params": params, "batch_stats": state}, batch, mutable=["batch_stats"])
        return (out**3).mean(), after["batch_stats"]

    graph = sw.capture(lambda params, batch: loss(params, batch)[0], (params, x))
    sizes = {"pp": 1, "dp": 1, "tp": 1} | degrees
    world = sizes["pp"] * sizes["dp"]
    cluster = sw.Cluster("cpu", devices_per_node=world)
    plan = sw.plan(graph, cluster, batch=16, microbatch=samples, schedule="gpipe", loss_scope=given, **sizes)
    train = sw.train_step(loss, optax.sgd(0.1), plan, devices=jax.devices()[:world])
    state, _ = train(train.init(params, state=kept), x)
    (_, after), gradients = jax.value_and_grad(loss, has_aux=True)(params, x)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
    return float(train(state, x)[1]), float(loss(params, x, state=after)[0])


def splits(samples: int) -> list[Any]:
    """Microbatches and degrees: replicas, stages, and both, which show what each shows."""
    alone = [(samples, {"dp": 2}), (2 * samples, {"pp": 2})]
    return [*(pytest.param(*case, marks=pytest.mark.slow) for case in alone), (samples, {"pp": 2, "dp": 2})]


@pytest.mark.parametrize(("samples", "degrees"), splits(8), ids=str)
def test_batch_norms_see_the_whole_batch_where_one_microbatch_holds_it(samples: int, degrees: dict[str, int]) -> None:
    found, wanted = normed(False, samples, None, **degrees)
    assert found == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize(("samples", "degrees"), splits(4), ids=str)
def test_batch_norms_of_microbatches_are_asked_for(samples: int, degrees: dict[str, int]) -> None:
    with pytest.raises(sw.ShardwrightError, match=r"norms its batch at BatchNorm_0.*loss_scope='replica'.*'global'"):
        normed(False, samples, None, **degrees)
    found, wanted = normed(False, samples, "replica", **degrees)
    assert found != pytest.approx(wanted, rel=1e-4)
    found, wanted = normed(True, samples, None, **degrees)  # by what it has kept: no sample sees another
    assert found == pytest.approx(wanted, rel=1e-4)


@jax.jit
def jitted(params: Any, batch: Any) -> jax.Array:
    found: jax.Array = cross_entropy(jax.nn.softmax(logits_of(params, batch)), batch["y"])
    return found


@jax.checkpoint
def checkpointed(params: Any, batch: Any) -> jax.Array:
    return jitted(params, batch)


@pytest.mark.parametrize(("each", "recompute"), [(jitted, "none"), (checkpointed, "auto")])
def test_functions_that_jax_remembers_are_read(each: Any, recompute: str) -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        found: jax.Array = each(params, batch).mean()
        return found

    plan = plan_of(1, 1, loss, microbatch=4, recompute=recompute)
    require_whole("four each", sw.train_step(loss, optax.sgd(0.1), plan, devices=jax.devices()[:1]), loss)


ALONE: dict[str, Loss] = {
    "over at least two": lambda p, b: token_losses(p, b).sum() / max(len(b["x"]), 2),
    "twice alone": lambda p, b: token_losses(p, b).mean() * (2.0 if len(b["x"]) == 1 else 1.0),
    "another op alone": lambda p, b: jnp.tanh(token_losses(p, b)).mean() if len(b["x"]) == 1 else summed(p, b),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_is_done_with_one_sample_alone_is_looked_at(name: str) -> None:
    train = sw.train_step(
        ALONE[name], optax.sgd(0.1), plan_of(1, 1, ALONE[name], microbatch=1), devices=jax.devices()[:1]
    )
    with pytest.raises(sw.ShardwrightError, match=r"cannot be told to be a mean over samples.*one sample"):
        train(train.init(plain_params()), batches(1)[0])


def test_an_answer_is_given_once() -> None:
    with pytest.raises(sw.ShardwrightError, match="expected 'mean', 'sum' or None"):
        sw.train_step(summed, optax.sgd(0.1), plan_of(1, 1), devices=jax.devices()[:1], reduction="max")
    both = sw.train_step(
        lambda p, b: sw.weighted(summed(p, b), 1.0), optax.sgd(0.1), plan_of(1, 1), devices=jax.devices()[:1],
        reduction="sum",
    )  # fmt: skip
    with pytest.raises(sw.ShardwrightError, match="reduction='sum' was given, and the loss function returns a weight"):
        both(both.init(plain_params()), batches(1)[0])


def test_a_metric_that_does_not_follow_is_refused() -> None:
    def with_worst(params: Any, batch: Any) -> Any:
        losses = token_losses(params, batch)
        return losses.mean(), {"worst": losses.max()}

    train = sw.train_step(with_worst, optax.sgd(0.1), plan_of(1, 1), devices=jax.devices()[:1], has_aux=True)
    with pytest.raises(
        sw.ShardwrightError, match=r"metric aux\['worst'\] is a number for each microbatch .* each sample"
    ):
        train(train.init(plain_params()), batches(1)[0])


# --- what is read of a program


PARAMS = {"w": jnp.ones((8, 5)), "b": jnp.ones((5,))}


def at(size: int) -> Any:
    def shape(*rest: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size, *rest), dtype)

    return {"x": shape(4, 8), "y": shape(4, dtype=jnp.int32), "m": shape(4), "c": shape(dtype=jnp.int32)}


def logits(p: Any, b: Any) -> jax.Array:
    return jnp.tanh(b["x"] @ p["w"] + p["b"])


def each(p: Any, b: Any) -> jax.Array:
    found: jax.Array = cross_entropy(logits(p, b), b["y"])
    return found


PENALTY = 1e-3
READ: dict[str, tuple[Loss, str]] = {
    "mean": (lambda p, b: each(p, b).mean(), "mean"),
    "sum over the number": (lambda p, b: each(p, b).sum() / b["x"].shape[0], "mean"),
    "with a penalty": (lambda p, b: each(p, b).mean() + PENALTY * (p["w"] ** 2).sum(), "mean"),
    "of two means": (lambda p, b: each(p, b).mean() + 0.1 * (logits(p, b) ** 2).mean(), "mean"),
    "vmapped": (lambda p, b: jax.vmap(lambda x, y: cross_entropy(x @ p["w"], y).mean())(b["x"], b["y"]).mean(), "mean"),
    "looked up under vmap": (
        lambda p, b: jax.vmap(jax.vmap(lambda y: jnp.take(p["w"], y, axis=0).sum()))(b["y"]).mean(),
        "mean",
    ),
    "filled by NaN": (
        lambda p, b: jnp.where(b["y"] < 5, each(p, b), jnp.nan).mean(),
        "mean",
    ),
    "one hot": (lambda p, b: -(jax.nn.one_hot(b["y"], 5) * jax.nn.log_softmax(logits(p, b))).sum(-1).mean(), "mean"),
    "indexed": (
        lambda p, b: -jax.nn.log_softmax(logits(p, b).mean(1))[jnp.arange(len(b["c"])), b["c"] % 5].mean(),
        "mean",
    ),
    "shifted": (lambda p, b: cross_entropy(logits(p, b)[:, :-1], b["y"][:, 1:]).mean(), "mean"),
    "flattened": (lambda p, b: cross_entropy(logits(p, b).reshape(-1, 5), b["y"].reshape(-1)).mean(), "mean"),
    "of a transform": (lambda p, b: jnp.abs(jnp.fft.fft(logits(p, b), axis=1)).mean(), "mean"),
    "of hits": (lambda p, b: (logits(p, b).argmax(-1) == b["y"]).mean(), "mean"),
    "hits": (lambda p, b: (logits(p, b).argmax(-1) == b["y"]).sum().astype(jnp.float32), "sum"),
    "a loop": (
        lambda p, b: jax.lax.scan(lambda c, x: (c + jnp.tanh(x @ p["w"]).sum(), None), 0.0, b["x"].swapaxes(0, 1))[0],
        "sum",
    ),
    "a product with a mask": (lambda p, b: b["m"].reshape(-1) @ each(p, b).reshape(-1), "sum"),
    "masked": (lambda p, b: (each(p, b) * b["m"]).sum() / b["m"].sum(), "weighted mean"),
    "masked with eps": (lambda p, b: (each(p, b) * b["m"]).sum() / (b["m"].sum() + 1e-6), "weighted mean"),
    "masked means": (lambda p, b: (each(p, b) * b["m"]).mean() / b["m"].mean(), "weighted mean"),
    "where": (lambda p, b: jnp.where(b["y"] > 0, each(p, b), 0.0).sum() / (b["y"] > 0).sum(), "weighted mean"),
    "mean where": (lambda p, b: jnp.mean(each(p, b), where=b["y"] > 0), "weighted mean"),
    "average": (lambda p, b: jnp.average(each(p, b), weights=b["m"]), "weighted mean"),
    "a decaying loop": (lambda p, b: jax.lax.fori_loop(0, 3, lambda _, c: 0.5 * c + each(p, b).mean(), 0.0), "mean"),
    "over a power of the number": (lambda p, b: each(p, b).sum() * jnp.power(float(len(b["x"])), -1.0), "mean"),
    "over a root of the number": (lambda p, b: each(p, b).sum() / jnp.sqrt(len(b["x"])), "unknown"),
    "over at least eight": (lambda p, b: each(p, b).sum() / jnp.maximum(len(b["x"]), 8), "unknown"),
    "the first eight": (lambda p, b: each(p, b)[:8].mean(), "unknown"),
    "another of many samples": (lambda p, b: each(p, b).mean() if len(b["x"]) > 8 else each(p, b).sum(), "unknown"),
    "kept from a number": (lambda p, b: jnp.maximum(each(p, b), 4 / len(b["x"])).mean(), "unknown"),
    "to a power of the number": (lambda p, b: (logits(p, b) ** len(b["x"])).mean(), "unknown"),
    "over a jitted number": (lambda p, b: each(p, b).sum() / jax.jit(lambda z: 1.0 * len(z))(each(p, b)), "mean"),
    "over a branch's number": (
        lambda p, b: each(p, b).sum() / jax.lax.cond(p["w"][0, 0] > -9, lambda: 1.0 * len(b["x"]), lambda: 1.0),
        "unknown",
    ),
    "times numbers": (lambda p, b: (each(p, b).sum() * jnp.array([1.0, 2.0 / len(b["x"])])).sum(), "unknown"),
    "masked by a key of its own": (
        lambda p, b: (each(p, b) * jax.random.bernoulli(jax.random.key(0), 0.5, each(p, b).shape)).mean(),
        "unknown",
    ),
    "a root of a mean": (lambda p, b: jnp.sqrt((logits(p, b) ** 2).mean()), "coupled"),
    "the worst": (lambda p, b: each(p, b).max(), "coupled"),
    "balance": (lambda p, b: (jax.nn.softmax(logits(p, b)).mean((0, 1)) ** 2).sum(), "coupled"),
    "log of a mean": (lambda p, b: -jnp.log(jnp.exp(-each(p, b)).mean()), "coupled"),
    "a sum and a penalty": (lambda p, b: each(p, b).sum() + PENALTY * (p["w"] ** 2).sum(), "of several kinds"),
    "two weights": (lambda p, b: each(p, b).mean() + (each(p, b) * b["m"]).sum() / b["m"].sum(), "of several kinds"),
    "neighbours": (lambda p, b: (logits(p, b) * logits(p, b)[::-1]).mean(), "unknown"),
    "the first sample": (lambda p, b: each(p, b)[0].mean(), "unknown"),
    "a count of what is finite": (lambda p, b: jnp.nanmean(each(p, b)), "unknown"),
}


@pytest.mark.parametrize("kind", READ)
def test_what_a_loss_is_read_as(kind: str) -> None:
    loss, wanted = READ[kind]
    traced = Traced(
        kind,
        lambda arrays, batch, _: [loss(arrays, batch)],
        jax.tree.map(abstract, PARAMS),
        (True, True),
        at,
        4,
        12,
        (0,) * 4,
    )
    reduction, verdict = Reader.of(traced).reduction(0)
    assert verdict.reduction == wanted
    assert (reduction is None) == (verdict.finding is not None)
