"""Products in fp8: forward and both gradients are those of a reference by hand; what is not finite is not lost; models
train as a loop by hand does, in every form of training."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import linen, nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import shardwright.jax as sw
from shardwright.backends.jax.program.fp8_products import FORWARD, GRADIENT, LARGEST, product, scale_for
from shardwright.core.errors import MissingCapabilityError
from shardwright.core.model.graph import Graph
from tests import fp8_by_hand as by_hand
from tests.comparison import Comparison
from tests.jax.chains import Run, named
from tests.jax.test_precision import STEPS, distance
from tests.jax.test_precision import by_hand as trained_by_hand

pytestmark = pytest.mark.usefixtures("quick_compilation")

PLAIN, TURNED = (((1,), (0,)), ((), ())), (((1,), (1,)), ((), ()))
"""Rows [n, in] with a weight [in, out], and with one [out, in]."""


def bf16(*shape: int, seed: int = 0, scale: float = 1.0) -> jax.Array:
    return (jax.random.normal(jax.random.key(seed), shape) * scale).astype(jnp.bfloat16)


def numbers(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


@partial(jax.jit, static_argnums=3)
def run(rows: jax.Array, weight: jax.Array, gradient: jax.Array, dims: Any = PLAIN) -> tuple[jax.Array, ...]:
    """The product and both gradients."""
    made, backward = jax.vjp(lambda rows, weight: product(rows, weight, dims), rows, weight)
    return made, *backward(gradient)


def require_by_hand(rows: jax.Array, weight: jax.Array, gradient: jax.Array) -> None:
    """``weight`` is [out, in]."""
    wanted = by_hand.linear(numbers(rows), numbers(weight), numbers(gradient))
    names = ("product", "gradient of the rows", "gradient of the weight")
    one = run(rows, weight, gradient, TURNED)
    *others, turned = run(rows, weight.T, gradient, PLAIN)
    for found in (one, (*others, turned.T)):
        for name, got, value in zip(names, found, wanted, strict=True):
            assert got.dtype == jnp.bfloat16
            # Of sums in another order, the last bit of bf16 may differ: 2^-8 of the terms, where they cancel.
            absolute = 2.0**-16 * float(np.abs(value).max(initial=0.0)) + 1e-300
            Comparison(name).values(numbers(got), value, relative=2.0**-7, absolute=absolute).require()


# Against the reference by hand --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(32, 64, 48), (34, 16, 16), (1, 32, 16)])
def test_the_product_and_both_gradients_are_those_by_hand(shape: tuple[int, int, int]) -> None:
    n, k, m = shape
    require_by_hand(bf16(n, k), bf16(m, k, seed=1, scale=0.03), bf16(n, m, seed=2, scale=1e-6))


ENTRIES = st.one_of(
    st.just(0.0), st.floats(-448, 448, width=16), st.floats(-(2.0**-20), 2.0**-20, width=32), st.just(1e30)
)


@settings(max_examples=30)
@given(st.data())
def test_any_values(data: st.DataObject) -> None:
    shapes = (5, 16), (3, 16), (5, 3)
    drawn = [data.draw(arrays.arrays(np.float32, shape, elements=ENTRIES)) for shape in shapes]
    scales = [data.draw(st.sampled_from((1e-20, 1e-3, 1.0))) for _ in drawn]
    rows, weight, gradient = (
        jnp.asarray(np.clip(a * s, -1e15, 1e15).astype(ml_dtypes.bfloat16)) for a, s in zip(drawn, scales, strict=True)
    )
    require_by_hand(rows, weight, gradient)


def test_rows_of_more_dims_are_rows() -> None:
    rows, weight, gradient = bf16(2, 5, 32), bf16(32, 16, seed=1), bf16(2, 5, 16, seed=2)
    made, of_rows, of_weight = run(rows, weight, gradient, (((2,), (0,)), ((), ())))
    flat = run(rows.reshape(10, 32), weight, gradient.reshape(10, 16))
    found = (made.reshape(10, 16), of_rows.reshape(10, 32), of_weight)
    same = Comparison().values([numbers(a) for a in found], [numbers(a) for a in flat], relative=0.0, absolute=0.0)
    same.require()


def test_zeros_stay_zeros_and_no_rows_are_no_rows() -> None:
    for found in run(*(jnp.zeros(shape, jnp.bfloat16) for shape in ((4, 16), (16, 16), (4, 16)))):
        assert not found.any()
    empty = run(jnp.zeros((0, 16), jnp.bfloat16), bf16(16, 32), jnp.zeros((0, 32), jnp.bfloat16))
    assert [a.shape for a in empty] == [(0, 32), (0, 16), (16, 32)]
    assert not empty[2].any()


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", range(3))
def test_what_is_not_finite_reaches_every_entry_of_the_products_that_it_is_in(bad: float, where: int) -> None:
    operands = [bf16(32, 16), bf16(16, 48, seed=1), bf16(32, 48, seed=2)]
    operands[where] = operands[where].at[5, 3].set(bad)
    made, of_rows, of_weight = run(*operands)
    read = {0: (made, of_weight), 1: (made, of_rows), 2: (of_rows, of_weight)}[where]
    other = {0: of_rows, 1: of_weight, 2: made}[where]
    assert all(bool(jnp.isnan(result).all()) for result in read)
    assert bool(jnp.isfinite(other).all())


def test_scales_are_powers_of_two_that_fill_the_range() -> None:
    for dtype in (FORWARD, GRADIENT):
        assert float(jnp.finfo(dtype).max) == LARGEST[dtype]
        for largest in (1.0, 448.0, 447.0, 3.4e38, 1e-12, 57344.0, 0.3):
            scale = float(scale_for(jnp.full((2,), largest, jnp.float32), dtype))
            assert np.frexp(scale)[0] == 0.5
            assert largest * scale <= LARGEST[dtype] < 2 * largest * scale * (1 + 1e-6)


def test_replicas_have_scales_of_their_own() -> None:
    rows = jnp.stack([bf16(8, 16), 1000 * bf16(8, 16, seed=1)])
    weight, gradient = bf16(16, 16, seed=2), jnp.stack([1e-4 * bf16(8, 16, seed=3), bf16(8, 16, seed=4)])
    together = jax.vmap(run, in_axes=(0, None, 0))(rows, weight, gradient)
    apart = [run(rows[i], weight, gradient[i]) for i in range(2)]
    for found, wanted in zip(together, zip(*apart, strict=True), strict=True):
        same = Comparison().values(numbers(found), numbers(jnp.stack(wanted)), relative=2.0**-7, absolute=1e-6)
        same.require()


# Trained ------------------------------------------------------------------------------------------------------------

WIDTH, VOCABULARY, LENGTH, BATCH, MICROBATCH = 16, 32, 4, 16, 2
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
        self.blocks = nnx.List([Block(rngs, dot) for _ in range(4)])
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
    plan = sw.plan(graph_of(kind), cluster, batch=BATCH, microbatch=MICROBATCH, precision=precision, **pins)
    return plan


@cache
def reference(kind: str, *, is_narrow: bool) -> Run:
    """A loop by hand, with products by hand in fp8, or in bf16."""
    dot = multiplied_by_hand if is_narrow else jax.lax.dot_general
    if kind != "nnx":
        loss, make = LOSSES[kind]
        return trained_by_hand(partial(loss, dot=dot), make(), steps(), "bf16", 1.0)
    model = Model(nnx.Rngs(1), dot)
    model.embed.dtype = jnp.bfloat16  # that of its results, which is its table's unless it is said
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def module(params: Any, batch: Any) -> jax.Array:
        return module_loss(nnx.merge(graphdef, params, jax.tree.map(lambda leaf: leaf, rest)), batch)

    return trained_by_hand(module, params, steps(), "bf16", 1.0)


def trained(kind: str, plan: sw.Plan, **options: Any) -> tuple[list[float], dict[str, np.ndarray]]:
    loss, make = LOSSES[kind]
    train = sw.train_step(loss, optax.adamw(1e-2), plan, devices=jax.devices()[: plan.mesh.size], **options)
    state, losses = train.init(make()), []
    for batch in steps():
        state, value = train(state, batch)
        losses.append(float(value))
    params = train.params(state, at=jax.devices()[0])
    return losses, named(nnx.state(params, nnx.Param) if kind == "nnx" else params)


def report(kind, losses, params):
    narrow, wide = reference(kind, is_narrow=True), reference(kind, is_narrow=False)
    print(kind, distance(params, narrow.params) / distance(narrow.params, wide.params), max(abs(a-b)/b for a,b in zip(losses,narrow.losses)), max(abs(a-b)/b for a,b in zip(losses,wide.losses)), losses[-1])
