"""Matrix products of bf16 arrays in fp8, with both gradients, and the equations of a traced program that are such.

Operands of the forward pass are float8_e4m3fn, which has the finer steps, and gradients float8_e5m2, which has the
wider range (Micikevicius et al., arXiv 2209.05433). The scale of an array follows from its largest entry as it is now
(dynamic scaling), and is a power of two, so that scaling rounds nothing. Results are in bf16, of sums in float32.

The operands of the products are the 8-bit arrays themselves, so that GPUs which multiply such numbers do. The scales
are divided out of the result. An operand that was cast back first, as XLA's GemmRewriter takes it too, is not safe: on
an H200 XLA took both casts out (jax 0.11.2), and the step was one in bf16. Arrays are whole (logical) ones, so that a
scale is that of the whole operand wherever its shards lie.

An infinity or NaN in an operand makes every entry of the product NaN: nothing saturates in silence.
"""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn

from shardwright.backends.jax.capture.inner_programs import CHECKPOINTS, JITS, inner_program
from shardwright.backends.jax.capture.module_inputs import user_line
from shardwright.backends.jax.capture.steps import Path, Program
from shardwright.core.errors import MissingCapabilityError, PlanError

FORWARD, GRADIENT = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
"""The dtypes of the operands of the forward pass, and of gradients."""
LARGEST = {FORWARD: 448.0, GRADIENT: 57344.0}
"""The largest finite number of each."""
SMALLEST = 1e-12
"""The largest entry that an array is taken to have at least, for a scale that float32 can hold (torchao's)."""
_EXPONENT = 0x7F800000
"""The exponent of a float32 number among its bits: alone it is the power of two below the number."""
FOLLOWED = frozenset({"convert_element_type", "transpose", "slice", "squeeze"})
"""The steps after which a weight is still the weight: a cast, a matrix that is turned, a row of a stack of matrices."""
OPENED = JITS | CHECKPOINTS | {"scan"}
"""The primitives whose inner program is run equation by equation, so that a product inside it can be another one."""
Numbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""The summed and the matched dims of both operands, as `jax.lax.dot_general` takes them."""


def scale_for(array: jax.Array, dtype: Any) -> jax.Array:
    """The power of two by which an array fills the range of an 8-bit dtype: a float32 scalar. Of an array with a NaN it
    is infinite, of one with an infinity 0."""
    largest = jnp.max(jax.lax.abs(array), initial=0).astype(jnp.float32)
    quotient = jnp.float32(LARGEST[dtype]) / jnp.maximum(largest, jnp.float32(SMALLEST))
    bits = jax.lax.bitcast_convert_type(quotient, jnp.int32)
    return jax.lax.bitcast_convert_type(bits & _EXPONENT, jnp.float32)


def narrow(array: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """An array in 8 bits, times its scale."""
    return (array * scale.astype(array.dtype)).astype(dtype)  # a power of two changes the exponents alone


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def product(left: jax.Array, right: jax.Array, numbers: Numbers) -> jax.Array:
    """`jax.lax.dot_general` of two arrays in fp8, with a result of their dtype. Its gradients are products in fp8 of
    the gradient of the result with each of the two."""
    return _forward(left, right, numbers)[0]


def _forward(left: jax.Array, right: jax.Array, numbers: Numbers) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    scales = scale_for(left, FORWARD), scale_for(right, FORWARD)
    narrowed = narrow(left, scales[0], FORWARD), narrow(right, scales[1], FORWARD)
    # Fewer bits of a sum may be kept (cuBLAS's fast accumulation) in forward passes alone.
    made = _multiplied(*narrowed, numbers, scales, left.dtype, is_fast=True)
    return made, (left, right, *scales)


def _backward(numbers: Numbers, kept: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    left, right, *scales = kept
    scale = scale_for(gradient, GRADIENT)
    narrowed = narrow(gradient, scale, GRADIENT)
    of_left = _multiplied(
        narrowed, narrow(right, scales[1], FORWARD), _of_left(numbers, left.ndim, right.ndim), (scale, scales[1]),
        left.dtype,
    )  # fmt: skip
    of_right = _multiplied(
        narrow(left, scales[0], FORWARD), narrowed, _of_right(numbers, left.ndim, right.ndim), (scales[0], scale),
        right.dtype,
    )  # fmt: skip
    return of_left.transpose(_order_of_left(numbers, left.ndim)), of_right.transpose(
        _order_of_right(numbers, right.ndim)
    )


product.defvjp(_forward, _backward)


def _multiplied(
    left: jax.Array, right: jax.Array, numbers: Numbers, scales: tuple[jax.Array, jax.Array], dtype: Any, *,
    is_fast: bool = False,
) -> jax.Array:  # fmt: skip
    """The product of two 8-bit arrays without their scales."""
    precision = jax.lax.Precision.DEFAULT if is_fast else jax.lax.Precision.HIGHEST
    made = jax.lax.dot_general(left, right, numbers, precision=precision, preferred_element_type=dtype)
    undone = [jax.lax.reciprocal(scale) for scale in scales]
    # The smaller factor first: what is between is no larger than the result.
    for factor in (jnp.minimum(*undone), jnp.maximum(*undone)):
        made = made * factor.astype(dtype)
    return made


def _kept(contracted: Sequence[int], matched: Sequence[int], dims: int) -> list[int]:
    """The dims of an operand that its product has too, but for the matched ones."""
    return [dim for dim in range(dims) if dim not in (*contracted, *matched)]


def _of_left(numbers: Numbers, left_dims: int, right_dims: int) -> Numbers:
    """The dims by which the gradient of a product (its dims: matched, of the left, of the right) meets the right."""
    (of_left, of_right), (matched_left, matched_right) = numbers
    matched, own = len(matched_left), len(_kept(of_left, matched_left, left_dims))
    other = _kept(of_right, matched_right, right_dims)
    return (range(matched + own, matched + own + len(other)), other), (range(matched), matched_right)


def _of_right(numbers: Numbers, left_dims: int, right_dims: int) -> Numbers:
    """The dims by which the left meets the gradient of a product."""
    (of_left, _), (matched_left, _) = numbers
    other = _kept(of_left, matched_left, left_dims)
    matched = len(matched_left)
    return (other, range(matched, matched + len(other))), (matched_left, range(matched))


def _order_of_left(numbers: Numbers, dims: int) -> list[int]:
    """The places of the left's dims in its gradient as it is made: matched, its own, then those of the right that are
    summed over, in the right's order."""
    (of_left, of_right), (matched, _) = numbers
    made = [*matched, *_kept(of_left, matched, dims), *(own for _, own in sorted(zip(of_right, of_left, strict=True)))]
    return [made.index(dim) for dim in range(dims)]


def _order_of_right(numbers: Numbers, dims: int) -> list[int]:
    """The places of the right's dims in its gradient as it is made: matched, those of the left that are summed over, in
    the left's order, then its own."""
    (of_left, of_right), (_, matched) = numbers
    made = [*matched, *(own for _, own in sorted(zip(of_left, of_right, strict=True))), *_kept(of_right, matched, dims)]
    return [made.index(dim) for dim in range(dims)]


# --- the products of a program


def products_with(
    weights: Collection[str], names: Sequence[str], closed: ClosedJaxpr, program: Program
) -> frozenset[Path]:
    """The paths of the products of a traced program with these weights.

    names: those of the program's first arguments; ``program`` is the flat form of ``closed``. Raises PlanError where a
    weight is read by anything but a product, or multiplied in another dtype than bf16, MissingCapabilityError where its
    product is inside of a function with its own derivative rule.
    """
    known = {value: name for value, name in zip(program.arguments, names, strict=False) if name in weights}
    found = set()
    for step in program.steps:
        read = [known[value] for value in step.inputs if value in known]
        if not read:
            continue
        if step.name in FOLLOWED:
            known.update(dict.fromkeys(step.outputs, read[0]))
            continue
        if step.name != "dot_general" or step.path is None:
            raise PlanError(
                f"the plan computes the products with {read[0]} in fp8, and {step.name} reads it: this is not the "
                "function that was planned, or a twin of it; plan with this one, or for 'bf16'"
            )
        around = _along(closed, step.path)
        dtypes = [program.dtypes[value] for value in step.inputs if value is not None]
        if dtypes != ["bfloat16"] * 2:
            raise PlanError(
                f"the plan computes the product with {read[0]} in fp8, and its operands are {' and '.join(dtypes)} at "
                f"{user_line(around[-1])}: cast what is float32 (a mask, a constant, a layer's dtype=) to the dtype of "
                "what it meets, or plan for 'bf16'"
            )
        closing = [equation.primitive.name for equation in around[:-1] if equation.primitive.name not in OPENED]
        if closing:
            raise MissingCapabilityError(
                f"the plan computes the product with {read[0]} in fp8, and it is inside of a function with its own "
                f"derivative rule ({closing[0]}) at {user_line(around[-1])}, whose products are its own: take it out "
                "of that function, or plan for 'bf16'"
            )
        found.add(step.path)
    return frozenset(found)


def _along(closed: ClosedJaxpr, path: Path) -> list[JaxprEqn]:
    """The equations from the outermost, whose inner programs hold it, to the one at a path."""
    found: list[JaxprEqn] = []
    program: ClosedJaxpr | None = closed
    for position in path:
        assert program is not None
        found.append(program.jaxpr.eqns[position])
        program = inner_program(found[-1].params)
    return found
