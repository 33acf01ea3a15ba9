"""The NamedSharding of a `core.layout.placements.Layout`, and shardings of parameters, optimizer state and batches."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from shardwright.backends.jax.capture.tree import followed
from shardwright.backends.jax.machine.mesh import DataAxes, data_axes
from shardwright.core.errors import LayoutError
from shardwright.core.layout.placements import Layout, Partial, Split


def lower_layout(layout: Layout, bound_mesh: jax.sharding.Mesh) -> NamedSharding:
    """The sharding that splits the same dims over the same axes.

    A PartitionSpec splits a dim as one block. For ``Split(dim, blocks=…)`` it is right for an array whose dim is
    held in the order of `backends.jax.tensor_parallel.blocks`. Raises LayoutError for partial values, which no array
    can hold between two programs.
    """
    dims: dict[int, list[str]] = {}
    for axis, placement in layout.placements:
        if isinstance(placement, Partial):
            raise LayoutError(
                f"{placement} on axis {axis!r}: a JAX array holds no partial values; split or replicate it"
            )
        if isinstance(placement, Split):
            dims.setdefault(placement.dim, []).append(axis)
    order = bound_mesh.axis_names
    entries: list[Any] = [None] * (max(dims, default=-1) + 1)
    for dim, axes in dims.items():
        axes.sort(key=order.index)
        entries[dim] = axes[0] if len(axes) == 1 else tuple(axes)
    return NamedSharding(bound_mesh, PartitionSpec(*entries))


def replicated(bound_mesh: jax.sharding.Mesh) -> NamedSharding:
    return NamedSharding(bound_mesh, PartitionSpec())


def parameter_shardings(
    names: Sequence[str], params: Any, layouts: Mapping[str, Layout], bound_mesh: jax.sharding.Mesh
) -> Any:
    """A sharding for every leaf of ``params``; ``names`` are the leaves' names. Raises LayoutError when a leaf does not
    divide."""
    leaves, structure = jax.tree.flatten(params)
    found = []
    for name, leaf in zip(names, leaves, strict=True):
        sharding = lower_layout(layouts.get(name, Layout()), bound_mesh)
        _check_divides(name, leaf.shape, sharding)
        found.append(sharding)
    return jax.tree.unflatten(structure, found)


def _check_divides(name: str, shape: tuple[int, ...], sharding: NamedSharding) -> None:
    for dim, ways in enumerate(_ways(sharding)):
        if dim >= len(shape) or shape[dim] % ways:
            raise LayoutError(
                f"{name} of shape {shape} cannot be cut {ways} ways along dim {dim}: use degrees that divide it"
            )


def axes_of(sharding: NamedSharding) -> set[str]:
    """The axes that split some dim."""
    return {axis for e in sharding.spec if e is not None for axis in ((e,) if isinstance(e, str) else e)}


def _ways(sharding: NamedSharding) -> list[int]:
    sizes = dict(sharding.mesh.shape)
    entries = (() if e is None else (e,) if isinstance(e, str) else e for e in sharding.spec)
    return [math.prod(sizes[axis] for axis in axes) for axes in entries]


def also_over(axis: str, shape: tuple[int, ...], sharding: NamedSharding) -> NamedSharding:
    """The sharding with its largest dim that divides split over ``axis`` too (ZeRO, arXiv 1910.02054: a state that only
    the update reads need not be held whole by every replica); as it was when no dim divides or ``axis`` splits one
    already."""
    size = dict(sharding.mesh.shape)[axis]
    ways = [*_ways(sharding), *([1] * (len(shape) - len(sharding.spec)))]
    fitting = [d for d in range(len(shape)) if shape[d] % (ways[d] * size) == 0]
    if size == 1 or not fitting or axis in axes_of(sharding):
        return sharding
    dim = max(fitting, key=lambda d: shape[d] // ways[d])
    entries = [*sharding.spec, *([None] * (len(shape) - len(sharding.spec)))]
    held = entries[dim]
    before = () if held is None else (held,) if isinstance(held, str) else tuple(held)
    entries[dim] = (*before, axis) if before else axis
    return NamedSharding(sharding.mesh, PartitionSpec(*entries))


def copies_at(at: NamedSharding, dim: int, axes: DataAxes) -> NamedSharding:
    """The sharding of copies of an array, one for every replica along a new ``dim``, which is split over ``axes``. Each
    copy is split as ``at`` says."""
    entries = [*at.spec, *([None] * (dim - len(at.spec)))]
    return NamedSharding(at.mesh, PartitionSpec(*entries[:dim], axes, *entries[dim:]))


def spread_over(axis: str, tree: Any, shardings: Any) -> Any:
    """The shardings of `also_over` for every leaf."""
    return jax.tree.map(lambda leaf, sharding: also_over(axis, leaf.shape, sharding), tree, shardings)


def optimizer_shardings(
    optimizer: optax.GradientTransformation, params: Any, shardings: Any, bound_mesh: jax.sharding.Mesh
) -> tuple[Any, Any]:
    """The shapes and the shardings of the optimizer's state. A leaf whose path ends in a parameter's path, and which
    has its shape, lies as the parameter does; counters, factored statistics and the rest are replicated."""
    state = jax.eval_shape(optimizer.init, params)
    whole = replicated(bound_mesh)

    def follow(shape: tuple[int, ...] | None, sharding: NamedSharding | None, leaf: Any) -> NamedSharding:
        return sharding if sharding is not None and leaf.shape == shape else whole

    return state, follow_parameters(follow, state, params, shardings)


def follow_parameters(function: Callable[..., Any], state: Any, params: Any, values: Any) -> Any:
    """The results of ``function(shape, value, leaf)`` for every leaf of an optimizer's state: the shape and the value
    of the parameter whose path the leaf's path ends in, or (None, None). ``values`` is a tree like ``params``."""
    parameters = jax.tree.leaves(params)
    structure: Any = jax.tree.structure(params)
    found = structure.flatten_up_to(values)
    leaves, of_state = jax.tree.flatten(state)
    made = [
        function(None, None, leaf) if at is None else function(parameters[at.number].shape, found[at.number], leaf)
        for at, leaf in zip(followed(state, params), leaves, strict=True)
    ]
    return jax.tree.unflatten(of_state, made)


def batch_sharding(mesh: jax.sharding.Mesh, dim: int | None) -> NamedSharding:
    """The sharding of a batch's array: along dp by the batch dim, whole everywhere without one."""
    if dim is None:
        return replicated(mesh)
    return NamedSharding(mesh, PartitionSpec(*([None] * dim), data_axes(mesh.axis_names)))


def put(leaf: Any, sharding: NamedSharding) -> Any:
    """A batch's array on the devices where a step takes it. Over several processes each gives the whole batch, and JAX
    compares what they give (`jax.device_put`); an array that has the sharding already
    (`jax.make_array_from_process_local_data`) stays."""
    if isinstance(leaf, jax.Array):
        if leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            return leaf
        if leaf.is_fully_addressable and not sharding.is_fully_addressable:
            leaf = np.asarray(leaf)
    elif sharding.is_fully_addressable:
        return leaf  # a jitted function takes it as it is
    held = np.asarray(leaf) if not isinstance(leaf, jax.Array) else None
    if held is not None and jnp.issubdtype(held.dtype, jnp.inexact) and np.isnan(held).any():
        # To JAX's comparison a NaN differs from itself; the processes compare their batches by `Agreement` too.
        return jax.make_array_from_callback(held.shape, sharding, lambda index: held[index])
    return jax.device_put(leaf, sharding)
