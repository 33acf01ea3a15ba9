"""Plans in fp8: models train as a loop by hand does, in every form of training; which products they compute so."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import shardwright.jax as sw
from shardwright.backends.jax.pipeline.stage_functions import FunctionsOfStage
from shardwright.backends.jax.program.fp8_products import GRADIENT
from shardwright.backends.jax.training.arguments import require_fp8
from shardwright.core.errors import MissingCapabilityError, PlanError, PlanWarning
from shardwright.core.model.graph import Graph
from tests import fp8_by_hand as by_hand
from tests.comparison import Comparison
from tests.jax.chains import Run, named
from tests.jax.test_fp8_products import bf16, numbers
from tests.jax.test_precision import STEPS, distance
from tests.jax.test_precision import by_hand as trained_by_hand

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Trained ------------------------------------------------------------------------------------------------------------

WIDTH, VOCABULARY, LENGTH, BATCH, MICROBATCH = 16, 32, 4, 16, 4
Dot = Callable[..., jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def dot_by_hand(rows: jax.Array, weight: jax.Array, dims: Any) -> jax.Array:
    """The product of rows and a weight [in, out], in NumPy."""
    shape = jax.ShapeDtypeStruct((*rows.shape[:-1], weight.shape[-1]), rows.dtype)

    def multiply(rows: Any, weight: Any) -> np.ndarray:
        given = by_hand.narrow(_flat(rows), by_hand.FORWARD), by_hand.narrow(_flat(weight).T, by_hand.FORWARD)
        return by_hand.product(*given).reshape(shape.shape).astype(shape.dtype)

    return jax.pure_callback(multiply, shape, rows, weight)


def _dot_backward(dims: Any, kept: Any, gradient: jax.Array) -> Any:
    rows, weight = kept

    def multiply(*given: Any) -> Any:
        rows, weight, gradient = map(_flat, given)
        _, of_rows, of_weight = by_hand.linear(rows, weight.T, gradient)
        return of_rows.reshape(given[0].shape).astype(given[0].dtype), of_weight.T.astype(given[1].dtype)

    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (rows, weight)]
    return jax.pure_callback(multiply, tuple(shapes), rows, weight, gradient)


dot_by_hand.defvjp(lambda rows, weight, dims: (dot_by_hand(rows, weight, dims), (rows, weight)), _dot_backward)


def _flat(array: Any) -> np.ndarray:
    return numbers(array).reshape(-1, array.shape[-1])


def multiplied_by_hand(rows: jax.Array, weight: jax.Array, dims: Any, **_: Any) -> jax.Array:
    return dot_by_hand(rows, weight, dims)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dot: Dot):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs, dot_general=dot)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs, dot_general=dot)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(x)))


class Model(nnx.Module):
    """Token ids → logits."""

    def __init__(self, rngs: nnx.Rngs, dot: Dot = jax.lax.dot_general):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs, dot) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LinenModel(linen.Module):
    dot: Dot = jax.lax.dot_general

    @linen.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        x = linen.Embed(VOCABULARY, WIDTH)(ids)
        for _ in range(2):
            x = x + linen.Dense(WIDTH, dot_general=self.dot)(jnp.tanh(linen.Dense(WIDTH, dot_general=self.dot)(x)))
        return linen.Dense(VOCABULARY)(x)


def cross_entropy(logits: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def module_loss(model: Model, batch: dict[str, jax.Array]) -> jax.Array:
    return cross_entropy(model(batch["x"]), batch)


def linen_loss(params: Any, batch: dict[str, jax.Array], dot: Dot = jax.lax.dot_general) -> jax.Array:
    return cross_entropy(LinenModel(dot).apply(params, batch["x"]), batch)


def plain_loss(params: Any, batch: dict[str, jax.Array], dot: Dot = jax.lax.dot_general) -> jax.Array:
    x = params["embed"][batch["x"]]
    for weight in params["layers"]:
        x = x + jnp.tanh(dot(x, weight, (((2,), (0,)), ((), ()))))
    return cross_entropy(x @ params["head"], batch)


def plain_params() -> dict[str, Any]:
    shapes = {"embed": (VOCABULARY, WIDTH), "head": (WIDTH, VOCABULARY)}
    keys = iter(jax.random.split(jax.random.key(0), 6))
    made: dict[str, Any] = {n: jax.random.normal(next(keys), shape) / WIDTH for n, shape in shapes.items()}
    return made | {"layers": [jax.random.normal(next(keys), (WIDTH, WIDTH)) / 4 for _ in range(4)]}


def linen_params() -> Any:
    return LinenModel().init(jax.random.key(1), jnp.zeros((2, LENGTH), jnp.int32))


LOSSES: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "nnx": (module_loss, lambda: Model(nnx.Rngs(1))),
    "linen": (linen_loss, linen_params),
    "function": (plain_loss, plain_params),
}


@cache
def steps() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    shape = (BATCH, LENGTH)
    return [{name: rng.integers(0, VOCABULARY, shape, np.int32) for name in ("x", "y")} for _ in range(STEPS)]


@cache
def graph_of(kind: str) -> Graph:
    loss, make = LOSSES[kind]
    batch = steps()[0]
    return sw.capture(make(), batch, loss) if kind == "nnx" else sw.capture(loss, (make(), batch))


def plan_of(kind: str, precision: str = "fp8", **pins: Any) -> sw.Plan:
    pins = {"pp": 1, "dp": 1, "tp": 1, "shard": 0, "recompute": "none", "schedule": "1f1b", "virtual_stages": 1} | pins
    cluster = sw.Cluster("h100", devices_per_node=pins["pp"] * pins["dp"] * pins["tp"])
    return sw.plan(graph_of(kind), cluster, batch=BATCH, microbatch=MICROBATCH, precision=precision, **pins)


@cache
def reference(kind: str, *, is_narrow: bool) -> Run:
    """A loop by hand, with products by hand in fp8, or in bf16."""
    dot = multiplied_by_hand if is_narrow else jax.lax.dot_general
    if kind != "nnx":
        loss, make = LOSSES[kind]
        return trained_by_hand(partial(loss, dot=dot), make(), steps(), "bf16", 1.0, MICROBATCH)
    model = Model(nnx.Rngs(1), dot)
    model.embed.dtype = jnp.bfloat16  # that of its results, which is its table's unless it is said
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def module(params: Any, batch: Any) -> jax.Array:
        return module_loss(nnx.merge(graphdef, params, jax.tree.map(lambda leaf: leaf, rest)), batch)

    return trained_by_hand(module, params, steps(), "bf16", 1.0, MICROBATCH)


def trained(kind: str, plan: sw.Plan, **options: Any) -> tuple[list[float], dict[str, np.ndarray]]:
    loss, make = LOSSES[kind]
    devices = jax.devices()[: plan.mesh.size]
    train = sw.train_step(loss, optax.adamw(1e-2), plan, devices=devices, log_every=0, **options)
    state, losses = train.init(make()), []
    for batch in steps():
        state, value = train(state, batch)
        losses.append(float(value))
    params = train.params(state, at=jax.devices()[0])
    return losses, named(nnx.state(params, nnx.Param) if kind == "nnx" else params)


NEAR = 0.05
"""How far parameters may be from those by hand, in distances of fp8 from bf16. Without XLA's optimizations they are the
same bits."""
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dp 2, shard 3": ("nnx", {"dp": 2, "shard": 3}, {}),
    "pp 2, zb-h1": ("nnx", {"pp": 2, "schedule": "zb-h1"}, {}),
    "function, pp 2 × dp 2 in one program": (
        "function",
        {"pp": 2, "dp": 2, "schedule": "gpipe"},
        {"one_program": True},
    ),
    "linen, one device": ("linen", {}, {}),
    "one device": ("nnx", {}, {}),
    "dp 2": ("nnx", {"dp": 2}, {}),
    "pp 2 × dp 2, shard 2, recompute": ("nnx", {"pp": 2, "dp": 2, "shard": 2, "recompute": "full"}, {}),
    "recompute": ("nnx", {"recompute": "full"}, {}),
    "recompute, selective": ("nnx", {"recompute": "selective"}, {}),
    "linen, pp 2": ("linen", {"pp": 2}, {}),
    "function, recompute": ("function", {"recompute": "full"}, {}),
}
FAST = list(CASES)[:3]


@pytest.mark.parametrize("case", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in CASES])
def test_twenty_steps_are_those_of_a_loop_by_hand(case: str) -> None:
    kind, pins, options = CASES[case]
    losses, params = trained(kind, plan_of(kind, **pins), **options)
    require_near(kind, losses, params, NEAR)


@pytest.mark.parametrize(
    "pins",
    [{"tp": 2}, pytest.param({"pp": 2, "dp": 2, "tp": 2, "shard": 1, "schedule": "zb-h1"}, marks=pytest.mark.slow)],
)
def test_on_a_tensor_axis_they_are_within_the_rounding_to_eight_bits(pins: dict[str, Any]) -> None:
    """Sums in another order, rounded to bf16, may move an operand to the next number of 8 bits."""
    plan = plan_of("nnx", **pins)
    assert any(layout.placements for layout in plan.parameter_layouts("jax").values())
    losses, params = trained("nnx", plan)
    require_near("nnx", losses, params, 1.5)


def require_near(kind: str, losses: list[float], params: dict[str, np.ndarray], near: float) -> None:
    narrow, wide = reference(kind, is_narrow=True), reference(kind, is_narrow=False)
    Comparison().losses(losses, narrow.losses, relative=2.0**-7, moving=1e-2).require()
    apart = distance(narrow.params, wide.params)
    assert apart > 0
    found = distance(params, narrow.params) / apart
    assert found <= near, found


# Which products -----------------------------------------------------------------------------------------------------


def casts_in(kind: str, plan: sw.Plan) -> tuple[int, int]:
    """The number of casts to each of the two dtypes in the program of a step."""
    loss, make = LOSSES[kind]
    train = sw.train_step(loss, optax.sgd(0.1), plan, devices=jax.devices()[: plan.mesh.size], log_every=0)
    text = train.lower(train.init(make()), steps()[0]).as_text()
    made = [line.rsplit("->", 1)[-1] for line in text.splitlines() if "stablehlo.convert" in line]
    return sum("f8E4M3FN>" in each for each in made), sum("f8E5M2>" in each for each in made)


@pytest.mark.parametrize(("kind", "count"), [("nnx", 4), ("linen", 4), ("function", 4)])
def test_the_matrices_that_the_plan_names_are_multiplied_in_fp8_and_only_they(kind: str, count: int) -> None:
    plan = plan_of(kind)
    parameters = plan.fp8_parameters("jax")
    assert len(parameters) == count
    assert not any("embed" in name.lower() or "head" in name or "Dense_4" in name for name in parameters)
    # Each is cast for the product, and once more for the gradients; the gradient is cast once for both.
    assert casts_in(kind, plan) == (4 * count, count)
    assert "products in bf16" in sw.explain(plan)


def test_a_plan_that_names_fewer_matrices_computes_fewer_in_fp8() -> None:
    plan = plan_of("nnx")
    for slots in (plan.decision.fp8_weights[:1], ()):
        fewer = replace(plan, decision=replace(plan.decision, fp8_weights=slots))
        count = len(fewer.fp8_parameters("jax"))
        assert count == 2 * len(slots)
        assert casts_in("nnx", fewer) == (4 * count, count)


def test_the_gradients_of_products_pass_between_the_halves_of_a_backward_in_eight_bits() -> None:
    """A product is one in fp8 to XLA where the program that multiplies reads 8-bit numbers."""
    train = sw.train_step(plain_loss, optax.sgd(0.1), plan_of("function", pp=2), devices=jax.devices()[:2], log_every=0)
    train(train.init(plain_params()), steps()[0])
    micro = train.pipeline.micro
    halves = FunctionsOfStage(micro.cut, 1, micro.operands).build()
    assert halves.input_grad is not None
    for half, casts in ((halves.input_grad, (2, 2)), (halves.weight_grad, (2, 0))):
        program = str(jax.make_jaxpr(half.function)(*half.avals))
        assert program.count("dot_general[") == 3  # the head's is in bf16
        assert (program.count("new_dtype=float8_e4m3fn"), program.count("new_dtype=float8_e5m2")) == casts
    handed = {
        aval.dtype
        for key, aval in zip(halves.weight_grad.reads, halves.weight_grad.avals, strict=True)
        if key[0] == "between" and aval.dtype.itemsize == 1
    }
    assert handed == {GRADIENT}


def small(loss: Callable[..., Any], params: Any, **pins: Any) -> tuple[sw.TrainStep, dict[str, Any], float]:
    """A step of a plan in fp8, the parameters after one update, and the loss before it."""
    pins = {"pp": 1, "dp": 1, "tp": 1, "shard": 0, "recompute": "none", "microbatch": 8} | pins
    x = np.linspace(-1, 1, 8 * 16, dtype=np.float32).reshape(8, 16)
    graph = sw.capture(loss, (params, {"x": x}))
    plan = sw.plan(graph, sw.Cluster("h100", devices_per_node=pins["pp"]), batch=8, precision="fp8", **pins)
    train = sw.train_step(loss, optax.sgd(0.1), plan, devices=jax.devices()[: pins["pp"]], log_every=0)
    state, value = train(train.init(params), {"x": x})
    return train, train.params(state, at=jax.devices()[0]), float(value)


MATRICES = {"first": np.ones((16, 32), np.float32), "second": np.ones((32, 48), np.float32)}


def test_a_matrix_that_is_turned_is_multiplied_in_fp8() -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.square(batch["x"] @ params["first"].T @ params["second"]).mean()

    train, *_ = small(loss, MATRICES | {"first": np.ones((32, 16), np.float32)})
    assert train.plan.fp8_parameters("jax") == {"first"}
    assert dict(train.plan.not_in_fp8) == {"1/w0": "its product is the last one before the loss"}


def stacked_loss(params: Any, batch: Any) -> jax.Array:
    def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ weight), None

    x, _ = jax.lax.scan(layer, batch["x"] @ params["first"], params["layers"])
    return jnp.square(x @ params["second"]).mean()


def test_layers_in_one_stack_are_multiplied_in_fp8_row_by_row() -> None:
    """Each row has a scale of its own: as the same layers apart."""

    def apart(params: Any, batch: Any) -> jax.Array:
        x = batch["x"] @ params["first"]
        for weight in params["layers"]:
            x = x + jnp.tanh(x @ weight)
        return jnp.square(x @ params["second"]).mean()

    layers = np.stack([np.asarray(bf16(32, 32, seed=n, scale=0.1 * 8**n), np.float32) for n in range(3)])
    first = np.asarray(bf16(16, 32, scale=0.2), np.float32)
    found = []
    for loss, held in ((stacked_loss, layers), (apart, list(layers))):
        train, params, value = small(loss, MATRICES | {"first": first, "layers": held})
        assert len(train.plan.fp8_parameters("jax")) == (2 if held is layers else 4)
        assert {why for _, why in train.plan.not_in_fp8} == {"its product is the last one before the loss"}
        found.append({**params, "layers": np.stack(list(params["layers"])), "loss": value})
    Comparison().values(found[0], found[1], relative=1e-6, absolute=1e-7).require()


@pytest.mark.slow
def test_a_stack_is_divided_among_stages() -> None:
    params = MATRICES | {"layers": np.asarray(bf16(4, 32, 32, scale=0.2), np.float32)}
    one, two = (small(stacked_loss, params, pp=pp, microbatch=2, schedule="1f1b") for pp in (1, 2))
    Comparison().values({**two[1], "loss": two[2]}, {**one[1], "loss": one[2]}, relative=1e-5, absolute=1e-6).require()


# What is refused ----------------------------------------------------------------------------------------------------


def test_a_product_inside_of_a_derivative_rule_of_its_own_is_refused() -> None:
    @jax.custom_vjp
    def own(x: jax.Array, weight: jax.Array) -> jax.Array:
        return x @ weight

    own.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))

    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.square(own(batch["x"], params["first"]) @ params["second"]).mean()

    with pytest.raises(
        MissingCapabilityError, match=r"product with first in fp8.*\(custom_vjp_call\) at test_fp8.py:\d+.*'bf16'"
    ):
        small(loss, MATRICES)


def test_a_product_in_float32_is_refused_with_its_line() -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.square((jnp.ones(16) * batch["x"]) @ params["first"] @ params["second"]).mean()

    with (
        pytest.warns(PlanWarning, match="computed in float32"),
        pytest.raises(PlanError, match=r"first in fp8, and its operands are float32 and bfloat16 at test_fp8.py:\d+"),
    ):
        small(loss, MATRICES)


def test_another_function_than_the_one_that_was_planned_is_refused() -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.square(batch["x"] @ params["first"] @ params["second"]).mean()

    def other(params: Any, batch: Any) -> jax.Array:
        return jnp.square(batch["x"] @ jnp.abs(params["first"]) @ params["second"]).mean()

    batch = {"x": np.ones((8, 16), np.float32)}
    plan = sw.plan(sw.capture(loss, (MATRICES, batch)), sw.Cluster("h100"), batch=8, precision="fp8", pp=1)
    train = sw.train_step(other, optax.sgd(0.1), plan, devices=jax.devices()[:1], log_every=0)
    with pytest.raises(PlanError, match=r"products with first in fp8, and abs reads it: .*plan with this one"):
        train(train.init(MATRICES), batch)
    with pytest.raises(MissingCapabilityError, match=r"other in jax does not: it is read by abs; plan from this model"):
        plan.rebind(sw.capture(other, (MATRICES, batch)))


def test_a_gpu_without_such_products_is_refused() -> None:
    plan = plan_of("function")

    def gpu(capability: str) -> Any:
        return SimpleNamespace(platform="gpu", device_kind="NVIDIA A100", compute_capability=capability)

    with pytest.raises(MissingCapabilityError, match=r"NVIDIA A100 has none \(compute capability 8.0, and 8.9 is"):
        require_fp8(plan, [gpu("9.0"), gpu("8.0")])
    require_fp8(plan, [gpu("8.9"), gpu("10.0"), gpu("gfx942"), *jax.devices()[:1]])
    require_fp8(plan_of("function", "bf16"), [gpu("8.0")])
