"""What a pipeline keeps from forward to backward, and what it computes again, by the plan's units."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import shardwright.jax as sw
from shardwright.backends.jax.pipeline.stage_functions import StageFunction
from shardwright.core.schedule.actions import Kind
from tests.comparison import Comparison
from tests.jax.chains import Run, named, plan_of, recording, reference, require_same_gradients

pytestmark = pytest.mark.usefixtures("quick_compilation")

LAYERS, WIDTH, BATCH, MICROBATCH = 4, 8, 32, 16


def matrix(seed: int, rows: int, columns: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (rows, columns)) / rows**0.5


def layer(seed: int) -> dict[str, jax.Array]:
    return {
        "i": matrix(seed, WIDTH, 4 * WIDTH),
        "b": jnp.full(4 * WIDTH, 0.1),
        "o": matrix(50 + seed, 4 * WIDTH, WIDTH),
    }


def block(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x + jnp.tanh(jnp.sin(x @ p["i"] + p["b"])) @ p["o"]


def layers() -> dict[str, Any]:
    return {"layers": [layer(number) for number in range(LAYERS)]}


def unrolled(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
    x = batch["x"]
    for p in params["layers"]:
        x = block(p, x)
    return (x**2).mean()


def stacks() -> dict[str, Any]:
    return jax.tree.map(lambda *rows: jnp.stack(rows), *layers()["layers"])


def scanned(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
    return (jax.lax.scan(lambda x, p: (block(p, x), None), batch["x"], params)[0] ** 2).mean()


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + linen.Dense(WIDTH, name="o")(jnp.tanh(jnp.sin(linen.Dense(4 * WIDTH, name="i")(x))))


class LinenTower(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for number in range(LAYERS):
            x = LinenBlock(name=f"layer_{number}")(x)
        return x


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.i, self.o = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.o(jnp.tanh(jnp.sin(self.i(x))))


class Tower(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for one in self.layers:
            x = one(x)
        return x


def tower() -> Tower:
    return Tower(nnx.Rngs(0))


def linen_params() -> Any:
    return LinenTower().init(jax.random.key(0), jnp.zeros((2, WIDTH)))


def of_model(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    return (model(batch["x"]) ** 2).mean()


def of_linen(variables: Any, batch: dict[str, jax.Array]) -> jax.Array:
    return (LinenTower().apply(variables, batch["x"]) ** 2).mean()


def of_state(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    return of_model(nnx.merge(nnx.graphdef(tower()), params), batch)


@dataclass(frozen=True)
class Case:
    create: Callable[[], Any]
    loss: Callable[..., Any]
    alone: Callable[..., Any]
    """The loss of parameters as a pytree."""

    @property
    def params(self) -> Any:
        made = self.create()
        return nnx.state(made) if isinstance(made, nnx.Module) else made

    def graph(self) -> sw.Graph:
        sample = {"x": jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)}
        if self.loss is of_model:
            return sw.capture(nnx.eval_shape(self.create), sample, self.loss)
        return sw.capture(self.loss, (jax.eval_shape(self.create), sample))


CASES = {
    "nnx": Case(tower, of_model, of_state),
    "linen": Case(linen_params, of_linen, of_linen),
    "function": Case(layers, unrolled, unrolled),
    "scan": Case(stacks, scanned, scanned),
}


def batches(steps: int = 2) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"x": rng.standard_normal((BATCH, WIDTH)).astype(np.float32)} for _ in range(steps)]


def kept_bytes(train: sw.TrainStep) -> int:
    """What all stages hand from one forward to its backward, beside what enters them."""
    made = (
        (key, out)
        for launches in train.pipeline.launches
        for key, out in zip(
            launches[Kind.FORWARD].function.makes, jax.tree.leaves(launches[Kind.FORWARD].run.out_info), strict=True
        )
    )
    return sum(out.size * out.dtype.itemsize for key, out in made if key[0] == "kept")


def trained(case: Case, plan: sw.Plan, expected: Run, **others: Any) -> sw.TrainStep:
    """A training step that gave the loss and every gradient of the unsplit model."""
    train = sw.train_step(case.loss, recording(optax.sgd(1e-2)), plan, devices=jax.devices()[: plan.mesh.size])
    state = train.init(case.create(), **others)
    for step, (batch, said) in enumerate(zip(batches(), expected.losses, strict=True)):
        state, loss = train(state, batch)
        assert float(loss) == pytest.approx(said, rel=1e-5)
        if step == 0:
            found = named(train.params(replace(state, params=state.optimizer[1])))
            require_same_gradients({n.removesuffix(".value"): g for n, g in found.items()}, expected.gradients)
    return train


def recomputing(graph: sw.Graph, pp: int, recompute: str = "full", kept: int = 0) -> sw.Plan:
    plan = plan_of(graph, pp, batch=BATCH, microbatch=MICROBATCH, recompute=recompute)
    kept_units = plan.recomputed_units[1 : 1 + kept]
    return replace(plan, decision=replace(plan.decision, kept_units=kept_units))


@pytest.mark.parametrize("name", CASES)
def test_units_keep_what_enters_them_unless_the_plan_keeps_all_of_them(name: str) -> None:
    case = CASES[name]
    graph = case.graph()
    expected = reference(case.alone, case.params, optax.sgd(1e-2), batches(), MICROBATCH)
    none, full, one = (
        kept_bytes(trained(case, plan, expected))
        for plan in (recomputing(graph, 2, "none"), recomputing(graph, 2), recomputing(graph, 2, kept=1))
    )
    entering, inside = MICROBATCH * WIDTH * 4, MICROBATCH * 4 * WIDTH * 4
    assert none >= LAYERS * 2 * inside  # what goes into sin and what into the second product
    # Every layer's input but what enters a stage, and the result; a loop has the inputs of all its layers in one array.
    assert full <= (LAYERS + 2) * entering
    assert full + 2 * inside <= one < none - 2 * inside


def test_units_are_kept_beside_products_too() -> None:
    case = CASES["function"]
    graph = case.graph()
    expected = reference(case.alone, case.params, optax.sgd(1e-2), batches(), MICROBATCH)
    products = recomputing(graph, 2, "elementwise")
    again = [unit for unit, mode in enumerate(products.unit_modes) if mode == "elementwise"]
    some = replace(products, decision=replace(products.decision, kept_units=tuple(again[1:])))
    every, fewer = (kept_bytes(trained(case, plan, expected)) for plan in (products, some))
    assert every < fewer
    assert kept_bytes(trained(case, in_two_modes(products), expected)) <= every - 2 * MICROBATCH * 4 * WIDTH * 4


def in_two_modes(plan: sw.Plan) -> sw.Plan:
    """The plan where the first unit that is computed again keeps its products, and the others nothing."""
    again = [unit for unit, mode in enumerate(plan.unit_modes) if mode != "none"]
    decision = replace(plan.decision, other_recompute="full", other_units=tuple(again[1:]))
    return replace(plan, decision=decision)


def test_modules_are_computed_again_in_two_modes() -> None:
    """In one program, the products that run again are those of the units that keep none."""
    case = CASES["nnx"]
    expected = reference(case.alone, case.params, optax.sgd(1e-2), batches(), MICROBATCH)
    plans = [recomputing(case.graph(), 1, mode) for mode in ("elementwise", "full")]
    counts = []
    for plan in (plans[0], in_two_modes(plans[0]), plans[1]):
        train = trained(case, plan, expected)
        counts.append(train.lower(train.init(case.create()), batches()[0]).as_text().count("dot_general"))
    # The first product of each unit runs again, of the second nothing is read.
    assert [count - counts[0] for count in counts] == [0, LAYERS - 1, LAYERS], counts


def test_a_loop_over_layers_is_computed_again_in_one_mode() -> None:
    case = CASES["scan"]
    plan = in_two_modes(recomputing(case.graph(), 1, "elementwise"))
    train = sw.train_step(case.loss, optax.sgd(1e-2), plan, devices=jax.devices()[:1])
    with pytest.raises(sw.ShardwrightError, match=r"other_recompute='full' for units .* iterations of a loop"):
        train(train.init(case.create()), batches()[0])


@pytest.mark.parametrize("name", [pytest.param("linen", marks=pytest.mark.slow), "function", "scan"])
def test_one_stage_of_no_modules_keeps_what_enters_its_units_too(name: str) -> None:
    case = CASES[name]
    graph = case.graph()
    expected = reference(case.alone, case.params, optax.sgd(1e-2), batches(), MICROBATCH)
    full, one = (kept_bytes(trained(case, recomputing(graph, 1, kept=kept), expected)) for kept in (0, 1))
    entering, inside = MICROBATCH * WIDTH * 4, MICROBATCH * 4 * WIDTH * 4
    assert full <= (LAYERS + 2) * entering
    assert full + 2 * inside <= one
    products = kept_bytes(trained(case, recomputing(graph, 1, "selective"), expected))
    assert LAYERS * inside <= products <= LAYERS * (inside + 2 * entering)  # none keeps two of them in every layer
    predicted, without = (recomputing(graph, 1, what).predicted.memory_by_stage_rank[0] for what in ("full", "none"))
    assert predicted.activations_bytes < without.activations_bytes / 2


def products(function: StageFunction) -> int:
    """The matrix products of a stage function, those of its inner programs included."""
    return str(jax.make_jaxpr(function.function)(*function.avals)).count("dot_general[")


@pytest.mark.parametrize("name", ["nnx", pytest.param("linen", marks=pytest.mark.slow), "function"])
def test_units_are_computed_again_for_input_gradients_alone(name: str) -> None:
    """Under a split backward: the second half has the products of weight gradients, of what the first leaves to it."""
    case = CASES[name]
    plans = [
        plan_of(case.graph(), 2, batch=BATCH, microbatch=MICROBATCH, schedule="zb-h1", recompute=recompute)
        for recompute in ("none", "full")
    ]
    assert "full" in plans[1].unit_modes
    expected = reference(case.alone, case.params, optax.sgd(1e-2), batches(), MICROBATCH)
    none, full = (trained(case, plan, expected).pipeline.launches[1] for plan in plans)
    halves = (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
    of_stage = LAYERS  # matrices of the second stage, which has half of the layers
    assert [products(none[half].function) for half in halves] == [of_stage, of_stage]
    first, second = (products(full[half].function) for half in halves)
    # A layer's last product is made again only where something reads it, as a loss does.
    assert of_stage + LAYERS // 2 <= first <= 2 * of_stage
    assert second == of_stage
    weights = {leaf.shape for leaf in jax.tree.leaves(layer(0)) if leaf.ndim == 2}
    passed = [key for key in full[Kind.INPUT_GRAD].function.makes if key[0] == "between"]
    assert passed
    made = zip(full[Kind.INPUT_GRAD].function.makes, jax.tree.leaves(full[Kind.INPUT_GRAD].run.out_info), strict=True)
    assert not any(out.shape in weights for key, out in made if key[0] == "between")


class Switched(Block):
    def __call__(
        self, x: jax.Array, deep: bool, act: Any, shape: tuple[int, ...], dtype: Any, *, norm: nnx.Module, scale: Any
    ) -> jax.Array:
        y = norm(act(self.i(x)).reshape(-1, *shape).astype(dtype).reshape(len(x), -1))
        return x + self.o(jnp.tanh(y) if deep else y) * scale


class SwitchedTower(nnx.Module):
    def __init__(self, norm: Callable[..., nnx.Module] = nnx.LayerNorm) -> None:
        self.layers = nnx.List([Switched(nnx.Rngs(seed)) for seed in range(LAYERS)])
        self.norm = norm(4 * WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        for number, one in enumerate(self.layers):
            x = one(
                x,
                number % 2 == 0,
                jnp.sin,
                (2, 2 * WIDTH),
                jnp.float32,
                norm=self.norm,
                scale=x.mean(-1, keepdims=True),
            )
        return x


@pytest.mark.parametrize("recompute", [pytest.param("selective", marks=pytest.mark.slow), "full"])
def test_what_a_unit_is_given_is_an_array_a_module_or_a_python_value(recompute: str) -> None:
    """What it branches on, functions, shapes and dtypes stay as they are."""

    def of_params(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        return of_model(nnx.merge(nnx.graphdef(SwitchedTower()), params), batch)

    case = Case(SwitchedTower, of_model, of_params)
    expected = reference(of_params, case.params, optax.sgd(1e-2), batches(), MICROBATCH)
    trained(case, recomputing(case.graph(), 1, recompute), expected)


@pytest.mark.parametrize("recompute", ["selective", pytest.param("full", marks=pytest.mark.slow)])
def test_statistics_that_a_unit_is_given_are_those_of_a_model_that_keeps_all(recompute: str) -> None:
    def states(recompute: str) -> list[Any]:
        case = Case(lambda: SwitchedTower(nnx.BatchNorm), of_model, of_model)
        plan = recomputing(case.graph(), 1, recompute)
        train = sw.train_step(of_model, optax.sgd(1e-2), plan, devices=jax.devices()[:1], reduction="mean")
        state = train.init(case.create())
        for batch in batches():
            state, _ = train(state, batch)
        return jax.tree.leaves((state.params, state.other))

    Comparison(recompute).values(states(recompute), states("none"), relative=1e-5, absolute=1e-6).require()


# --- dropout, statistics, ties and skips


def noisy_params() -> dict[str, Any]:
    return {"embed": matrix(9, WIDTH, WIDTH), **layers()}


def noisy(params: dict[str, Any], batch: dict[str, Any], *, rngs: Any, state: Any) -> tuple[jax.Array, Any, Any]:
    """Dropout by layer, a running mean of what each makes, a skip from the first to the last, a matrix used twice."""
    first = x = batch["x"] @ params["embed"]
    means = []
    for number, p in enumerate(params["layers"]):
        y = block(p, x)
        mask = jax.random.bernoulli(jax.random.fold_in(rngs, number), 0.8, y.shape)
        x = jnp.where(mask, y / 0.8, 0.0)
        means.append(0.9 * state[number] + 0.1 * jax.lax.stop_gradient(x.mean(0)))
    return (((x + first) @ params["embed"].T) ** 2).mean(), means


def test_dropout_statistics_ties_and_skips_stay_what_they_were() -> None:
    def start() -> list[jax.Array]:
        return [jnp.zeros(WIDTH) for _ in range(LAYERS)]

    def captured(params: Any, batch: Any) -> jax.Array:
        return noisy(params, batch, rngs=jax.random.key(0), state=start())[0]

    sample = {"x": jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)}
    graph = sw.capture(captured, (jax.eval_shape(noisy_params), sample))
    found = []
    for plan in (recomputing(graph, 1, "none"), recomputing(graph, 2), recomputing(graph, 2, kept=1)):
        train = sw.train_step(noisy, recording(optax.sgd(1e-2)), plan, devices=jax.devices()[: plan.mesh.size])
        state, losses = train.init(noisy_params(), state=start(), seed=3), []
        for batch in batches():
            state, loss = train(state, batch)
            losses.append(float(loss))
        gradients = named(train.params(replace(state, params=state.optimizer[1])))
        found.append((losses, gradients, [np.asarray(mean) for mean in jax.tree.leaves(state.other)], train))
    (losses, gradients, means, _), *others = found
    for again, its, other, _ in others:
        same = Comparison().losses(again, losses).gradients(its, gradients)
        same.values(other, means, relative=1e-4, absolute=1e-6, what="statistics").require()
    inside = MICROBATCH * 4 * WIDTH * 4
    assert kept_bytes(others[0][3]) + 2 * inside <= kept_bytes(others[1][3])


# --- parameters that do not tell units


def shared_params() -> dict[str, Any]:
    return {**layer(0), "head": matrix(9, WIDTH, WIDTH)}


def shared(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
    """The same layer over and over."""
    x = batch["x"]
    for _ in range(LAYERS):
        x = block(params, x)
    return ((x @ params["head"]) ** 2).mean()


def test_units_that_share_their_parameters_are_told_by_their_order() -> None:
    case = Case(shared_params, shared, shared)
    expected = reference(shared, shared_params(), optax.sgd(1e-2), batches(), MICROBATCH)
    graph = case.graph()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        full, one = (kept_bytes(trained(case, recomputing(graph, 1, kept=kept), expected)) for kept in (0, 2))
    assert full < one


def test_what_has_side_effects_is_done_once() -> None:
    seen: list[float] = []

    def watched(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
        x = batch["x"]
        for p in params["layers"]:
            x = block(p, x)
            jax.debug.callback(lambda value: seen.append(float(value)), x.sum())
        return (x**2).mean()

    case = Case(layers, watched, watched)
    plan = recomputing(CASES["function"].graph(), 2)
    expected = reference(unrolled, layers(), optax.sgd(1e-2), batches(), MICROBATCH)
    trained(case, plan, expected)
    jax.effects_barrier()
    assert len(seen) == len(batches()) * LAYERS * BATCH // MICROBATCH


def test_units_that_cannot_be_told_are_named() -> None:
    """Another function of the same parameters, which reads the repeated ones at once."""

    def joined(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
        p = jax.tree.map(lambda *rows: sum(rows), *params["layers"])
        return (block(p, batch["x"]) ** 2).mean()

    train = sw.train_step(joined, optax.sgd(1e-2), recomputing(CASES["function"].graph(), 1), devices=jax.devices()[:1])
    with pytest.warns(UserWarning, match=r"the plan computes units \[.*\] again"):
        train(train.init(layers()), batches()[0])
