"""The names that Flax parameters give their dims: NNX's partitioning metadata, Linen's boxes."""

from collections.abc import Iterable
from typing import Any

import jax
from flax import nnx
from flax.core import meta

from shardwright.backends.jax.capture.tree import dotted

LogicalAxes = tuple[tuple[str, tuple[str | None, ...]], ...]
"""The pairs of a parameter and, for every dim, a name or None."""


def nnx_axes(variables: Iterable[tuple[tuple[Any, ...], nnx.Variable[Any]]]) -> LogicalAxes:
    """The names that ``nnx.with_partitioning`` or ``nnx.Param(…, sharding=…)`` gave to (path, variable) pairs."""
    found = []
    for path, variable in variables:
        names = variable.get_metadata().get("out_sharding")
        if names:
            found.append((dotted(path), _plain(names)))
    return tuple(found)


def linen_axes(variables: Any, names: tuple[str, ...]) -> LogicalAxes:
    """The names that ``nn.with_partitioning`` or ``nn.with_logical_partitioning`` gave to a tree of variables.
    ``names`` are the leaves' names."""
    boxes = jax.tree.leaves(variables, is_leaf=lambda leaf: isinstance(leaf, meta.AxisMetadata))
    found = []
    for name, box in zip(names, boxes, strict=True):
        if isinstance(box, meta.Partitioned):
            found.append((name, _plain(box.names)))
    return tuple(found)


def _plain(names: Iterable[Any]) -> tuple[str | None, ...]:
    """The names of dims, where the first of several mesh axes on one dim stands for all: a tensor axis is one."""
    return tuple(name[0] if isinstance(name, tuple) and name else name or None for name in names)
