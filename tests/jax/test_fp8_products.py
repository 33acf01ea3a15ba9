"""Products in fp8: forward and both gradients are those of a reference by hand; what is not finite is not lost."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from jax.sharding import NamedSharding, PartitionSpec

from shardwright.backends.jax.program.fp8_products import FORWARD, GRADIENT, LARGEST, product, scale_for
from tests import fp8_by_hand as by_hand
from tests.comparison import Comparison

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


@pytest.mark.parametrize("split", [PartitionSpec(None, "tp"), PartitionSpec("tp", None)])
def test_the_scale_of_an_operand_that_lies_in_shards_is_that_of_the_whole(split: PartitionSpec) -> None:
    """One shard has entries a thousand times those of the other."""
    rows, weight, gradient = bf16(8, 32), bf16(32, 32, seed=1), bf16(8, 32, seed=2)
    weight = weight.at[:, :16].multiply(1000) if split[1] else weight.at[:16].multiply(1000)
    at = NamedSharding(jax.make_mesh((2,), ("tp",), devices=jax.devices()[:2]), split)
    found, wanted = run(rows, jax.device_put(weight, at), gradient), run(rows, weight, gradient)
    for one, other in zip(found, wanted, strict=True):
        largest = float(jnp.abs(other).max())
        Comparison().values(numbers(one), numbers(other), relative=2.0**-7, absolute=2.0**-7 * largest).require()


DIMS = [
    (((1,), (0,)), ((), ())),
    (((0, 2), (3, 1)), ((1,), (0,))),
    (((3,), (1,)), ((0, 1), (3, 2))),
    (((1, 0, 2), (0, 1, 2)), ((), ())),
    (((), ()), ((2,), (1,))),
]
"""Summed and matched dims of a left of four dims and a right of four."""


@pytest.mark.parametrize("dims", DIMS)
def test_any_dims_are_summed_and_matched(dims: Any) -> None:
    (of_left, of_right), (matched_left, matched_right) = dims
    left_sizes, right_sizes = [2, 3, 4, 5], [6, 7, 8, 9]
    for one, other in (*zip(of_left, of_right, strict=True), *zip(matched_left, matched_right, strict=True)):
        right_sizes[other] = left_sizes[one]
    # Small whole numbers, and their sums of so few, are exact in 8 bits and in bf16.
    left, right = (
        jax.random.randint(jax.random.key(i), sizes, -2, 3).astype(jnp.bfloat16)
        for i, sizes in enumerate((left_sizes, right_sizes))
    )
    wanted, back = jax.vjp(lambda left, right: jax.lax.dot_general(left, right, dims), left, right)
    gradient = jax.random.randint(jax.random.key(2), wanted.shape, -1, 2).astype(jnp.bfloat16)
    found = run(left, right, gradient, dims)
    for got, value in zip(found, (wanted, *back(gradient)), strict=True):
        Comparison().values(numbers(got), numbers(value), relative=2.0**-7, absolute=0.0).require()


def products_of_eight_bits(program: str) -> int:
    """The products in a program's text, as it is handed to XLA, both of whose operands are 8-bit arrays."""
    lines = (line for line in program.splitlines() if "stablehlo.dot_general" in line)
    return sum(line.rsplit(" : ", 1)[-1].split(" -> ")[0].count("f8E") == 2 for line in lines)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_the_operands_of_all_three_products_are_of_eight_bits(platform: str) -> None:
    """A compiler may leave out a cast and the cast back, and did: nothing is cast back before a product."""
    traced = run.trace(bf16(256, 128), bf16(128, 64, seed=1), bf16(256, 64, seed=2))
    assert products_of_eight_bits(traced.lower(lowering_platforms=(platform,)).as_text()) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(256, 128, 64), (2048, 2048, 4096)])
def test_gpus_multiply_in_eight_bits(shape: tuple[int, int, int]) -> None:
    if jax.default_backend() != "gpu" or float(jax.devices()[0].compute_capability) < 8.9:
        pytest.skip("needs a JAX that sees a GPU of compute capability 8.9 or more")
    jax.config.update("jax_disable_most_optimizations", False)
    n, k, m = shape
    rows, weight, gradient = bf16(n, k), bf16(k, m, seed=1), bf16(n, m, seed=2)
    program = run.lower(rows, weight, gradient).compile().as_text()
    assert "f8e4m3fn[" in program
    assert "f8e5m2[" in program
    wanted = by_hand.linear(numbers(rows), numbers(weight.T), numbers(gradient))
    made, of_rows, of_weight = run(rows, weight, gradient)
    # cuBLAS keeps sums in fewer bits. Products in bf16 are thirty times as far.
    for got, value in zip((made, of_rows, of_weight.T), wanted, strict=True):
        near = 2.0**-9 * float(np.abs(value).max())
        Comparison().values(numbers(got), value, relative=2.0**-7, absolute=near).require()
