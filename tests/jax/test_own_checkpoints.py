"""Activation checkpointing that a JAX model does itself: what a plan says of it, and what training makes of it."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import shardwright.jax as sw
from shardwright import Plan, rescore
from shardwright.core.errors import PlanError
from shardwright.core.model.fold import fold
from shardwright.core.schedule.actions import Kind
from tests.comparison import Comparison
from tests.jax.chains import named, plan_of, recording
from tests.jax.test_recompute import kept_bytes, products

pytestmark = pytest.mark.usefixtures("quick_compilation")

LAYERS, WIDTH, BATCH, MICROBATCH = 4, 8, 32, 16
POLICIES = jax.checkpoint_policies
Around = Callable[[Callable[..., Any]], Callable[..., Any]]


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def remat(**options: Any) -> Around:
    return lambda function: nnx.remat(function, **options)


class Block(nnx.Module):
    """Dropout lies inside of what is computed again."""

    def __init__(self, rngs: nnx.Rngs, part: Around) -> None:
        self.i, self.o = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.part = part

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.o(self.drop(self.part(lambda module, x: jnp.tanh(jnp.sin(module(x))))(self.i, x)))


class Tower(nnx.Module):
    def __init__(self, around: Around = plain, part: Around = plain) -> None:
        rngs = nnx.Rngs(0)
        self.enter = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.layers = nnx.List([Block(rngs, part) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)
        self.around = around

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.enter(x)
        for one in self.layers:
            x = self.around(lambda module, x: module(x))(one, x)
        return self.head(x)


def of_model(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    return (model(batch["x"]) ** 2).mean()


def captured(make: Callable[[], Any], loss: Any = of_model) -> sw.Graph:
    sample = {"x": jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)}
    made = jax.eval_shape(make) if loss is not of_model else nnx.eval_shape(make)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return sw.capture(made, sample, loss) if loss is of_model else sw.capture(loss, (made, sample))


def planned(make: Callable[[], Any], loss: Any = of_model, pp: int = 1, **asked: Any) -> sw.Plan:
    return plan_of(captured(make, loss), pp, batch=BATCH, microbatch=MICROBATCH, **({"recompute": "auto"} | asked))


# --- what the plan says


def flags(around: Around = plain, part: Around = plain) -> tuple[list[bool], list[bool]]:
    """Of the products of one block: whether they lie in a checkpoint that keeps nothing, and whether they run again."""
    graph = captured(lambda: Tower(around, part))
    unit = fold(graph).units[1]
    ops = [op for op in graph.ops[unit.first_op : unit.end_op] if op.kind == "contraction"]
    return [op.in_checkpoint for op in ops], [op.is_run_again for op in ops]


def test_what_runs_again_is_told_by_the_policy() -> None:
    nothing: Any = [False, False]
    assert flags() == (nothing, nothing)
    assert flags(remat()) == flags(remat(policy=POLICIES.nothing_saveable)) == ([True, True], [True, False])
    assert flags(remat(policy=POLICIES.everything_saveable)) == (nothing, nothing)
    assert flags(remat(policy=POLICIES.dots_saveable)) == (nothing, nothing)
    assert flags(remat(policy=POLICIES.dots_with_no_batch_dims_saveable)) == (nothing, nothing)
    assert flags(remat(policy=POLICIES.save_only_these_names("other"))) == ([True, True], [True, False])
    assert flags(part=remat()) == ([True, False], [True, False])


def test_a_plan_recomputes_the_units_that_the_model_checkpoints() -> None:
    plan, as_plain = planned(lambda: Tower(remat())), planned(Tower, recompute="full")
    assert plan.unit_modes == as_plain.unit_modes == ("none", *["full"] * LAYERS, "none")
    assert plan.decision.recompute == "full"
    assert plan.work == as_plain.work
    assert plan.predicted.step_time_s == pytest.approx(as_plain.predicted.step_time_s)
    assert plan.predicted.peak_memory_bytes == pytest.approx(as_plain.predicted.peak_memory_bytes, rel=0.02)
    with pytest.raises(PlanError, match=r"recompute='none' keeps units that are to be recomputed: layers\.0 and 3 oth"):
        planned(lambda: Tower(remat()), recompute="none")


@pytest.mark.parametrize("how", ["part", "policy"])
def test_other_checkpoints_are_counted_as_they_run(how: str) -> None:
    own = {"part": {"part": remat()}, "policy": {"around": remat(policy=POLICIES.dots_saveable)}}[how]
    plan, kept = planned(lambda: Tower(**own), recompute="none"), planned(Tower, recompute="none")
    assert set(plan.unit_modes) == {"none"}
    inside = WIDTH * 4 * WIDTH * 2 * BATCH
    assert plan.work.recomputed_flops == (LAYERS * inside if how == "part" else 0)
    assert plan.predicted.step_time_s > kept.predicted.step_time_s
    assert plan.predicted.memory[0].activations_bytes < kept.predicted.memory[0].activations_bytes
    full = planned(lambda: Tower(**own), recompute="full")  # in place of them
    assert full.predicted.step_time_s == pytest.approx(planned(Tower, recompute="full").predicted.step_time_s)


def test_a_saved_plan_counts_them_too(tmp_path: Path) -> None:
    plan = planned(lambda: Tower(part=remat()), recompute="none")
    plan.save(tmp_path / "plan.json")
    again = rescore(Plan.load(tmp_path / "plan.json"), microbatch=8)
    assert again.work.recomputed_flops == plan.work.recomputed_flops


# --- what training makes of it


def trained(make: Callable[[], Any], loss: Any, plan: sw.Plan) -> tuple[sw.TrainStep, list[float], dict[str, Any]]:
    """A training step that ran twice, with its losses and the gradients of the first run."""
    train = sw.train_step(loss, recording(optax.sgd(1e-2)), plan, devices=jax.devices()[: plan.mesh.size])
    rng, losses, gradients = np.random.default_rng(0), [], {}
    state = train.init(make, seed=3) if loss is not of_model else train.init(make)
    for _ in range(2):
        state, found = train(state, {"x": rng.standard_normal((BATCH, WIDTH)).astype(np.float32)})
        losses.append(float(found))
        made = train.params(replace(state, params=state.optimizer[1]))
        gradients = gradients or named(nnx.state(made, nnx.Param) if isinstance(made, nnx.Module) else made)
    return train, losses, gradients


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + linen.Dense(WIDTH, name="o")(jnp.tanh(jnp.sin(linen.Dense(4 * WIDTH, name="i")(x))))


class LinenTower(linen.Module):
    around: Any = plain

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for number in range(LAYERS):
            x = self.around(LinenBlock)(name=f"layer_{number}")(x)
        return x


def linen_params() -> Any:
    return LinenTower().init(jax.random.key(0), jnp.zeros((2, WIDTH)))


def of_linen(around: Any) -> Any:
    return lambda variables, batch: (LinenTower(around).apply(variables, batch["x"]) ** 2).mean()


def layers() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 2 * LAYERS)
    shapes = [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)] * LAYERS
    made = [jax.random.normal(key, shape) / shape[0] ** 0.5 for key, shape in zip(keys, shapes, strict=True)]
    return {"layers": [{"i": made[2 * n], "o": made[2 * n + 1]} for n in range(LAYERS)]}


def of_function(around: Any) -> Any:
    def loss(params: Any, batch: dict[str, jax.Array], *, rngs: Any = None) -> jax.Array:
        def block(p: Any, x: jax.Array, key: Any) -> jax.Array:
            mask = jax.random.bernoulli(key, 0.8, x.shape)
            return x + jnp.where(mask, jnp.tanh(jnp.sin(x @ p["i"])) @ p["o"], 0.0)

        x, key = batch["x"], jax.random.key(1) if rngs is None else rngs
        for number, p in enumerate(params["layers"]):
            x = around(block)(p, x, jax.random.fold_in(key, number))
        return (x**2).mean()

    return loss


def stacks() -> Any:
    return jax.tree.map(lambda *rows: jnp.stack(rows), *layers()["layers"])


def of_scan(around: Any) -> Any:
    def body(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh(jnp.sin(x @ p["i"])) @ p["o"], None

    return lambda params, batch: (jax.lax.scan(around(body), batch["x"], params)[0] ** 2).mean()


Case = tuple[Callable[[], Any], Any]
"""What makes the model, and its loss."""


def case(name: str, *, checkpointed: bool) -> Case:
    match name:
        case "nnx":
            return (lambda: Tower(remat() if checkpointed else plain)), of_model
        case "a part":
            return (lambda: Tower(part=remat() if checkpointed else plain)), of_model
        case "a policy":
            return (lambda: Tower(remat(policy=POLICIES.dots_saveable) if checkpointed else plain)), of_model
        case "linen":
            return linen_params, of_linen(linen.remat if checkpointed else plain)
        case "scan":
            return stacks, of_scan(jax.checkpoint if checkpointed else plain)
    return layers, of_function(jax.checkpoint if checkpointed else plain)


SLOW = ("a part", "a policy", "scan")
NAMES = [*("nnx", "linen", "function"), *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_plain_model(name: str, pp: int) -> None:
    """As the model has them, and recomputed by the plan: with the same dropout."""
    make, loss = case(name, checkpointed=False)
    _, losses, gradients = trained(make, loss, planned(make, loss, pp, recompute="none"))
    ours, own_loss = case(name, checkpointed=True)
    for recompute in ("auto", "full"):
        _, found, its = trained(ours, own_loss, planned(ours, own_loss, pp, recompute=recompute))
        Comparison(f"{name} {recompute}").losses(found, losses).gradients(its, gradients).require()


@pytest.mark.parametrize("name", ["nnx", "linen", "function", pytest.param("a part", marks=pytest.mark.slow)])
def test_blocks_run_once_more_and_not_twice(name: str) -> None:
    """In stages: the products of the backward, and the bytes that wait for it."""
    made = [case(name, checkpointed=checkpointed) for checkpointed in (False, True)]
    plans = [planned(make, loss, 2, recompute="full") for make, loss in made]
    steps = [trained(make, loss, plan)[0] for (make, loss), plan in zip(made, plans, strict=True)]
    backward, expected = (
        [products(launches[Kind.BACKWARD].function) for launches in train.pipeline.launches] for train in steps[::-1]
    )
    assert backward == expected
    masks = LAYERS * MICROBATCH * WIDTH  # of a function, which may be made in one unit and read in the next
    assert kept_bytes(steps[1]) <= kept_bytes(steps[0]) + (masks if name == "function" else 0)


@pytest.mark.parametrize(
    "own", [{"around": remat()}, {"part": remat()}, {"around": remat(policy=POLICIES.dots_saveable)}]
)
@pytest.mark.parametrize("recompute", ["full", "elementwise"])
def test_one_program_runs_them_once_more_too(own: dict[str, Around], recompute: str) -> None:
    """The step of NNX modules, whose calls are wrapped as they are traced: the products of its program."""

    def found(make: Callable[[], Any], **asked: Any) -> int:
        plan = planned(make, **asked)
        train = sw.train_step(of_model, optax.sgd(1e-2), plan, devices=jax.devices()[:1])
        state = train.init(make)
        batch = {"x": np.zeros((BATCH, WIDTH), np.float32)}
        step, leaves = train._step_for(state, batch)
        return str(step.run.trace(state, leaves).jaxpr).count("dot_general[")

    assert found(lambda: Tower(**own), recompute=recompute) == found(Tower, recompute=recompute)


def test_a_policy_that_keeps_everything_holds_what_the_plain_model_does() -> None:
    """Not the roundings to the same precision that JAX puts around what a policy keeps, each a copy, nor what its
    backward reads until all of it is done."""
    keeping = of_linen(lambda block: linen.remat(block, policy=POLICIES.everything_saveable))
    steps, predicted, held = {}, {}, {}
    for loss in (of_linen(plain), keeping):
        plan = planned(linen_params, loss, recompute="none", precision="fp32")
        train, *steps[loss] = trained(linen_params, loss, plan)
        batch = {"x": np.zeros((BATCH, WIDTH), np.float32)}
        held[loss] = train.memory_bytes(train.init(linen_params, seed=3), batch)
        predicted[loss] = plan.predicted.peak_memory_bytes
    (one, other), (said, own) = held.values(), predicted.values()
    assert own == said
    assert other == pytest.approx(one, rel=0.01)
    (losses, gradients), (its_losses, its) = steps.values()
    Comparison("everything kept").losses(its_losses, losses).gradients(its, gradients).require()
