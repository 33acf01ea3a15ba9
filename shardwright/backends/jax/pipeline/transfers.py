"""The transfer of arrays from stage to stage, along routes that are worked out beforehand.

`jax.device_put` looks up the source, the target and the split of every array anew: 70 µs of Python, as much as two
dispatches. The function that it ends in (`compat.direct_copy`) takes a fifth of that; where JAX has it no more,
everything goes by `jax.device_put`, with the same results. Between processes arrays go by `machine.process_transfers`.
"""

from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding

from shardwright.backends.jax.compat import direct_copy
from shardwright.backends.jax.machine.process_transfers import across


class Route:
    """A route of several arrays at once, each from one sharding to another. Calling it gives the arrays there; those
    that lie there already are handed on as they are."""

    def __init__(
        self,
        avals: Sequence[jax.ShapeDtypeStruct],
        sources: Sequence[jax.sharding.Sharding],
        targets: Sequence[NamedSharding],
        *,
        from_state: bool = False,
    ) -> None:
        """avals: shapes and dtypes; sources: the shardings that the arrays are expected at. They come from others too,
        but not as fast. from_state: the arrays may be donated after the call."""
        self._from_state = from_state
        self.sources, self.targets = list(sources), list(targets)
        self._far = not all(at.is_fully_addressable for at in (*sources, *targets))
        alike = not self._far and all(_split_alike(*way) for way in zip(avals, sources, targets, strict=True))
        self._copy = direct_copy() if alike else None
        self._still = all(source == at for source, at in zip(sources, targets, strict=True))

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        if self._far:
            return across(arrays, self.targets, from_state=self._from_state)
        if self._copy is None or any(
            getattr(array, "sharding", None) != at or array.is_deleted()
            for array, at in zip(arrays, self.sources, strict=True)
        ):
            found: list[jax.Array] = jax.device_put(list(arrays), self.targets) if arrays else []
            return found
        return list(arrays) if self._still else self._copy(arrays, self.targets)


def _split_alike(aval: jax.ShapeDtypeStruct, source: jax.sharding.Sharding, target: NamedSharding) -> bool:
    """Whether the n-th device of both shardings holds the same part of an array."""
    if jax.numpy.issubdtype(aval.dtype, jax.dtypes.extended):
        return False
    parts = [list(at.devices_indices_map(aval.shape).values()) for at in (source, target)]
    return parts[0] == parts[1]
