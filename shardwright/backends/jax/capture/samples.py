"""The batch dim of a sample's arrays, and batches of other sizes."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.tree_util import PyTreeDef

from shardwright.backends.jax.capture.tree import abstract, flat_names, require_order
from shardwright.core.errors import CaptureError


def positional(function: Callable[..., Any]) -> int:
    """The number of required positional arguments of a function."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)


def resolve_batch_dims(sample: Any, batch_dims: Any) -> tuple[int | None, ...]:
    """The batch dim of each leaf of ``sample``, None for leaves without one.

    ``batch_dims``: None for the first dim of every leaf that has dims, a number for all of them, or a tree whose
    structure is a prefix of ``sample``'s, with a number or None at its leaves (a dict may leave keys out: the first
    dim). Raises CaptureError when the leaves disagree on the batch size.
    """
    require_order(sample, "the sample")
    leaves, structure = jax.tree.flatten(sample)
    for leaf, name in zip(leaves, flat_names(sample), strict=True):
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSUMm":
            raise CaptureError(f"{name or 'the sample'} is an array of {leaf.dtype}: give arrays of numbers")
        if not hasattr(leaf, "shape"):
            raise CaptureError(
                f"{name or 'the sample'} is a {type(leaf).__name__}: give arrays (numpy.asarray), and what is "
                "none to the function by itself (functools.partial)"
            )
    if batch_dims is None or (isinstance(batch_dims, int) and not isinstance(batch_dims, bool)):
        dims = tuple((batch_dims or 0) if leaf.shape else None for leaf in leaves)
    else:
        if isinstance(sample, dict) and isinstance(batch_dims, dict):
            unknown = sorted(set(batch_dims) - set(sample))
            if unknown:
                raise CaptureError(f"batch_dims names {unknown}, which the sample does not hold: {sorted(sample)}")
            batch_dims = {key: batch_dims.get(key, 0) for key in sample}
        given = jax.tree.flatten(batch_dims, is_leaf=lambda leaf: leaf is None)[1]
        try:
            full = jax.tree.broadcast(batch_dims, sample, is_leaf=lambda leaf: leaf is None)
        except ValueError as error:
            raise CaptureError(f"batch_dims of structure {given} does not fit a sample of {structure}") from error
        dims = tuple(jax.tree.leaves(full, is_leaf=lambda leaf: leaf is None))
    for dim, leaf, name in zip(dims, leaves, flat_names(sample), strict=True):
        if dim is not None and (not isinstance(dim, int) or isinstance(dim, bool)):
            raise CaptureError(
                f"batch_dims gives {name or 'the sample'} {dim!r:.80}: expected the number of the dim that counts "
                f"samples, or None where there is none"
            )
        if dim is not None and not 0 <= dim < len(leaf.shape):
            raise CaptureError(f"batch_dims gives {name or 'the sample'} dim {dim}, but its shape is {leaf.shape}")
    batch_size(sample, dims)
    return dims


def batch_size(sample: Any, dims: tuple[int | None, ...]) -> int:
    """The number of samples. Raises CaptureError when there is none, or when leaves disagree."""
    leaves = jax.tree.leaves(sample)
    sizes = {
        name or "sample": leaf.shape[dim]
        for name, leaf, dim in zip(flat_names(sample), leaves, dims, strict=True)
        if dim is not None
    }
    if not sizes:
        raise CaptureError("no array of the sample has a batch dim: give arrays whose first dim counts samples")
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise CaptureError(
            f"the sample's arrays disagree on the batch size ({listed}): name their batch dims in batch_dims="
        )
    return int(next(iter(sizes.values())))


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """The leaves of a batch, arrays or shapes, and the structure that puts them together again."""

    leaves: tuple[Any, ...]
    structure: PyTreeDef
    dims: tuple[int | None, ...]
    """The batch dim of every leaf."""

    def resized(self, samples: int) -> Any:
        """The shapes of the batch with so many samples."""
        shapes = [abstract(leaf) for leaf in self.leaves]
        return at_batch(jax.tree.unflatten(self.structure, shapes), self.dims, samples)


def at_batch(sample: Any, dims: tuple[int | None, ...], size: int) -> Any:
    """The shapes of the sample with ``size`` samples."""
    leaves, structure = jax.tree.flatten(sample)
    resized = [
        leaf if dim is None else jax.ShapeDtypeStruct((*leaf.shape[:dim], size, *leaf.shape[dim + 1 :]), leaf.dtype)
        for leaf, dim in zip(leaves, dims, strict=True)
    ]
    return jax.tree.unflatten(structure, resized)


def of_no_mesh(leaf: Any) -> Any:
    """A batch's array without explicit axes: with them, JAX would ask for the sharding of each of our reshapes."""
    at = getattr(leaf, "sharding", None)
    if not isinstance(leaf, jax.Array) or not isinstance(at, NamedSharding):
        return leaf
    if jax.sharding.AxisType.Explicit not in at.mesh.axis_types:
        return leaf
    return jax.device_put(leaf, NamedSharding(jax.sharding.Mesh(at.mesh.devices, at.mesh.axis_names), at.spec))
