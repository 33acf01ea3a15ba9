"""What a loss function may return, metrics beside it, what is trained, and the norm of gradients: the same in one
program, in stages of their own programs and in stages that are one program."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardwright.jax as sw
from tests.comparison import Comparison
from tests.jax.spmd_model import BATCH, VOCABULARY, batches, plain_params

pytestmark = pytest.mark.usefixtures("quick_compilation")

FORMS = {
    "one program": ({"pp": 1, "dp": 2}, False),
    "stages": ({"pp": 2, "dp": 2}, False),
    "one program for all stages": ({"pp": 2, "dp": 2}, True),
}


def logits_of(params: Any, batch: Any) -> jax.Array:
    x = params["embed"][batch["x"]]
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["w"])
    return x @ params["head"]


def per_token(params: Any, batch: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Losses and whether the token was hit, and whether it counts: unlike numbers in unlike microbatches."""
    logits = logits_of(params, batch)
    counted = (batch["y"] < 1 + batch["x"][:, :1]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses, (logits.argmax(-1) == batch["y"]), counted


def loss_fn(params: Any, batch: Any) -> Any:
    losses, hits, counted = per_token(params, batch)
    aux = {
        "accuracy": sw.weighted((hits * counted).sum() / counted.sum(), counted.sum()),
        "hits": (hits & (counted > 0)).sum(),
        "each": losses.sum(1),
        "turned": {"losses": losses.T},
        "coefficient": 0.25,
        "classes": jnp.int32(VOCABULARY),
        "as the loss": (losses * counted).sum() / counted.sum(),
        "embedded": jnp.abs(params["embed"][batch["x"]]).sum((1, 2)),
    }
    return sw.weighted((losses * counted).sum() / counted.sum(), counted.sum()), aux


def whole(params: Any, batch: Any) -> tuple[Any, Any]:
    """The loss and the metrics of the batch as one."""
    loss, aux = loss_fn(params, batch)
    return loss.value, aux | {"accuracy": aux["accuracy"].value}


def plan_of(pp: int, dp: int, function: Any = loss_fn, batch: Any = None, **pins: Any) -> sw.Plan:
    batch = batches(1)[0] if batch is None else batch
    graph = sw.capture(function, (jax.eval_shape(plain_params), batch))
    given = {"microbatch": 2, "precision": "fp32", "recompute": "none", "shard": 0, "schedule": "gpipe"}
    cluster = sw.Cluster("cpu", nodes=1, devices_per_node=pp * dp)
    return sw.plan(graph, cluster, batch=BATCH, pp=pp, dp=dp, tp=1, virtual_stages=1, **(given | pins))


def step_of(form: str, function: Any = loss_fn, optimizer: Any = None, **options: Any) -> sw.TrainStep:
    degrees, one_program = FORMS[form]
    plan = plan_of(**degrees, function=function)
    devices = jax.devices()[: plan.mesh.size]
    optimizer = optimizer or optax.sgd(0.1)
    return sw.train_step(function, optimizer, plan, devices=devices, one_program=one_program, **options)


@pytest.mark.parametrize("form", FORMS)
def test_metrics_and_the_norm_are_those_of_the_whole_batch(form: str) -> None:
    train = step_of(form, has_aux=True)
    params, batch = plain_params(), batches(1)[0]
    state, loss, aux = train(train.init(params), batch)
    (wanted, metrics), gradients = jax.value_and_grad(whole, has_aux=True)(params, batch)
    same = Comparison(form)
    same.losses([loss], [wanted])
    same.values(aux, metrics, relative=1e-5, absolute=1e-6, what="metrics", same_dtype=False)
    same.values([train.grad_norm], [optax.tree.norm(gradients)], relative=1e-5, absolute=0.0, what="norm")
    after = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
    same.values(train.params(state), after, relative=1e-4, absolute=1e-6, what="parameters")
    same.require("losses", "metrics", "norm", "parameters")


def trained_half(path: tuple[Any, ...], value: Any) -> bool:
    assert value.ndim == 2
    return path[0] in ("embed", "layers")


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=pytest.mark.slow if form == "one program" else ()) for form in FORMS]
)
def test_only_what_is_named_is_trained(form: str) -> None:
    """The optimizer, and the norm that it clips by, see nothing of the rest."""
    make = optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(1e-2, weight_decay=0.1))
    train = step_of(form, lambda p, b: loss_fn(p, b)[0], make, wrt=trained_half)
    params, batch = plain_params(), batches(1)[0]
    state = train.init(params)
    assert not any(leaf.shape == params["head"].shape for leaf in jax.tree.leaves(state.optimizer))
    state, _ = train(state, batch)
    chosen = {name: params[name] for name in ("embed", "layers")}
    gradients = jax.grad(lambda chosen: whole(params | chosen, batch)[0])(chosen)
    updates, _ = make.update(gradients, make.init(chosen), chosen)
    same = Comparison(form)
    same.values([train.grad_norm], [optax.tree.norm(gradients)], relative=1e-5, absolute=0.0, what="norm")
    same.values(
        train.params(state), params | optax.apply_updates(chosen, updates), relative=1e-4, absolute=1e-5, what="weights"
    )
    same.require("norm", "weights")
    state, _ = train(state, batch)
    Comparison("head").equal(train.params(state)["head"], params["head"]).require()


def test_an_nnx_filter_says_what_is_trained() -> None:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.body, self.head = nnx.Linear(4, 8, rngs=rngs), nnx.LoRALinear(8, 2, lora_rank=1, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.head(jnp.tanh(self.body(x)))

    def loss(net: Net, batch: Any) -> jax.Array:
        return ((net(batch) - 1.0) ** 2).mean()

    def create() -> Net:
        return Net(nnx.Rngs(0))

    batch = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    graph = sw.capture(nnx.eval_shape(create), batch, loss)
    plan = sw.plan(graph, sw.Cluster("cpu", nodes=1, devices_per_node=1), batch=8, microbatch=4, precision="fp32")
    train = sw.train_step(loss, optax.sgd(0.5), plan, devices=jax.devices()[:1], wrt=nnx.LoRAParam)
    state = train.init(create)
    before = jax.tree.map(np.asarray, dict(nnx.to_flat_state(nnx.state(train.params(state), nnx.Param))))
    state, _ = train(state, batch)
    state, _ = train(state, batch)  # of two factors of which one is zero, one has no gradient at first
    after = dict(nnx.to_flat_state(nnx.state(train.params(state), nnx.Param)))
    moved = {path[-1] for path in before if not np.array_equal(before[path].get_value(), after[path].get_value())}
    assert moved == {"lora_a", "lora_b"}
    with pytest.raises(sw.ShardwrightError, match="selects none of the"):
        sw.train_step(loss, optax.sgd(0.5), plan, devices=jax.devices()[:1], wrt=nnx.BatchStat).init(create)


def refused(function: Any, match: str, **options: Any) -> None:
    train = sw.train_step(function, optax.sgd(0.1), plan_of(1, 1), devices=jax.devices()[:1], **options)
    with pytest.raises(sw.ShardwrightError, match=match):
        train(train.init(plain_params()), batches(1)[0])


def plain(params: Any, batch: Any) -> jax.Array:
    return per_token(params, batch)[0].mean()


REFUSED = {
    "a bare pair": (lambda p, b: (plain(p, b), jnp.float32(0.5)), r"could be its weight or a metric.*has_aux=True", {}),
    "a list": (lambda p, b: [plain(p, b)], "a list of 1 values", {}),
    "no metrics": (plain, r"has_aux=True: expected \(loss, aux\)", {"has_aux": True}),
    "nothing": (lambda p, b: None, "a loss that is None", {}),
    "a dict": (lambda p, b: {"loss": plain(p, b)}, "a loss that is a dict", {}),
    "an integer": (lambda p, b: plain(p, b).astype(jnp.int32), "a loss of int32", {}),
    "one entry": (lambda p, b: plain(p, b)[None], r"a loss that is an array of shape \(1,\)", {}),
    "a vector of weights": (lambda p, b: sw.weighted(plain(p, b), b["x"]), "a weight that is an array of shape", {}),
    "words": (lambda p, b: (plain(p, b), {"name": "x"}), r"metric aux\['name'\] is a str", {"has_aux": True}),
    "a truth": (
        lambda p, b: (plain(p, b), plain(p, b) > 1),
        "metric aux is a number for each microbatch",
        {"has_aux": True},
    ),
    "pairs of samples": (
        lambda p, b: (plain(p, b), b["x"][:, :1] * b["x"][:, 0]),
        r"metric aux has shape \(2, 2\) with 2 samples and \(4, 4\) with 4",
        {"has_aux": True},
    ),
    "a tag": (plain, "wrt='head' does not fit", {"wrt": "head"}),
    "another tree": (plain, "wrt= of another structure", {"wrt": {"embed": True}}),
    "numbers": (plain, "wrt= holds int", {"wrt": {"embed": 1, "layers": 1, "head": 1}}),
    "none": (plain, "selects none of the 6 parameters", {"wrt": lambda path, value: False}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_by_name(case: str) -> None:
    function, match, options = REFUSED[case]
    refused(function, match, **options)


def test_state_is_told_by_its_name() -> None:
    refused(lambda p, b, *, state=None: (plain(p, b), jnp.float32(0.5)), r"train.init was given no state")
    train = sw.train_step(
        lambda p, b, *, state=None: (plain(p, b), jnp.float32(0.5)), optax.sgd(0.1), plan_of(1, 1),
        devices=jax.devices()[:1],
    )  # fmt: skip
    with pytest.raises(sw.ShardwrightError, match="state of another form"):
        train(train.init(plain_params(), state={"seen": jnp.zeros(())}), batches(1)[0])
    counting = sw.train_step(
        lambda p, b, *, state=None: (plain(p, b), {"each": per_token(p, b)[0]}, {"seen": state["seen"] + 1}),
        optax.sgd(0.1), plan_of(1, 1), devices=jax.devices()[:1], has_aux=True,
    )  # fmt: skip
    state, _, aux = counting(counting.init(plain_params(), state={"seen": jnp.zeros(())}), batches(1)[0])
    assert float(state.other["seen"]) == BATCH // 2
    assert aux["each"].shape == batches(1)[0]["x"].shape
