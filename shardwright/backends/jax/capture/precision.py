"""The dtypes of parameters: float32 between steps, where the optimizer sees them, and 16 bits in steps that compute so.

(Mixed precision with master weights: Micikevicius et al., arXiv 1710.03740, section 3.1.)
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

COMPUTE: Mapping[str, Any] = {
    "fp32": None, "bf16": jnp.dtype(jnp.bfloat16), "fp16": jnp.dtype(jnp.float16), "fp8": jnp.dtype(jnp.bfloat16),
}  # fmt: skip
"""The dtype in which the steps of a plan of each precision compute; None: that of the parameters. The products in 8
bits of a plan in fp8 have operands and results in bf16 (`program.fp8_products`)."""
_SINGLE_AND_HALF = (jnp.dtype(jnp.float32), jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16))


def step_dtype(own: Any, compute: Any) -> Any:
    """The dtype in which a step takes an array of dtype ``own``, where it computes in ``compute``; None: its own.
    Double precision, complex numbers, integers and random keys stay as they are."""
    return compute if compute is not None and own in _SINGLE_AND_HALF else own


def computed_in(compute: Any, leaf: Any) -> Any:
    """An array, or the shape of one, in the dtype in which a step takes it; anything else as it is."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=step_dtype(leaf.dtype, compute))
    if not isinstance(leaf, jax.Array | np.ndarray) or step_dtype(leaf.dtype, compute) == leaf.dtype:
        return leaf
    return leaf.astype(compute)


def between_steps(params: Any, trained: Sequence[bool], compute: Any) -> Any:
    """The parameters, arrays or shapes, as they are between steps that compute in ``compute``: those that are trained
    in float32. Others stay as they are."""
    if compute is None:
        return params
    wide = jnp.dtype(jnp.float32)

    def one(leaf: Any, flag: bool) -> Any:
        if not flag or step_dtype(leaf.dtype, wide) == leaf.dtype:
            return leaf
        return leaf.update(dtype=wide) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf.astype(wide)

    leaves, structure = jax.tree.flatten(params)
    return jax.tree.unflatten(structure, [one(*pair) for pair in zip(leaves, trained, strict=True)])
