"""A tensor that is read from others whose entries lie in another order: transposed, grouped, stacked or divided."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from shardwright.core.checkpoint.axis_boxes import Dims, runs_in, runs_of, sizes_of
from shardwright.core.checkpoint.boxes import Box
from shardwright.core.checkpoint.tensor_file import Bytes
from shardwright.core.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Rearranged:
    """A tensor of the other framework, and the tensors that it is read from."""

    dims: Dims
    source_dims: Dims
    axes: Mapping[str, int]
    fixed: Mapping[str, tuple[int, int]]
    """The indices of axes that are in the target's name alone: the source has all of them."""
    stacked: tuple[str, ...]
    """The axes that are in the source's name alone."""
    sources: Mapping[tuple[int, ...], str]
    """The source's label for every index of the stacked axes."""

    @property
    def shape(self) -> tuple[int, ...]:
        return sizes_of(self.dims, self.axes)

    def boxes(self, box: Box, read: Callable[[str, Box], Bytes]) -> Iterator[tuple[Box, Bytes]]:
        """The pieces of a box; ``read`` gives a box of a source."""
        own = [axis for group in self.dims for axis in group]
        theirs = [axis for group in self.source_dims for axis in group]
        order = [theirs.index(axis) for axis in own if axis in theirs]
        rest = [at for at, axis in enumerate(theirs) if axis not in own]
        for run in runs_in(self.dims, self.axes, box):
            for index in product(*(range(a, a + n) for a, n in (run.ranges[axis] for axis in self.stacked))):
                at = {axis: (place, 1) for axis, place in zip(self.stacked, index, strict=True)}
                wanted = {**run.ranges, **self.fixed, **at}
                for part in runs_of(self.source_dims, self.axes, {axis: wanted[axis] for axis in theirs}):
                    data = read(self.sources[index], part.box)
                    by_axes = data.reshape(*(part.ranges[axis][1] for axis in theirs), data.shape[-1])
                    ordered = by_axes.transpose(*rest, *order, len(theirs))
                    held = {axis: (at | part.ranges)[axis] for axis in own}
                    ordered = ordered.reshape(*(held[axis][1] for axis in own), data.shape[-1])
                    for place in runs_of(self.dims, self.axes, held):
                        cut = tuple(
                            slice(place.ranges[axis][0] - held[axis][0], sum(place.ranges[axis]) - held[axis][0])
                            for axis in own
                        )
                        yield place.box, ordered[cut].reshape(*place.box.shape, data.shape[-1])


def solve_sizes(
    axes: dict[str, int], equations: Sequence[tuple[Dims, Sequence[int] | None, str]], relation: str
) -> None:
    """Find the sizes of axes from the shapes of tensors, where one axis of a dim is not known. Raises CheckpointError
    where a shape does not fit, or the size of an axis stays unknown."""
    for dims, shape, name in equations:
        if shape is not None and len(shape) != len(dims):
            raise CheckpointError(f"{relation}: {name} has shape {tuple(shape)}, of {len(shape)} dims")
    for _ in axes.keys() | {axis for dims, _, _ in equations for group in dims for axis in group}:
        for dims, shape, name in equations:
            for group, size in zip(dims, shape, strict=True) if shape is not None else ():
                unknown = [axis for axis in group if axis not in axes]
                known = math.prod(axes[axis] for axis in group if axis in axes)
                if len(unknown) == 1 and known and size % known == 0:
                    axes[unknown[0]] = size // known
                elif not unknown and known != size:
                    told = ", ".join(f"{axis} {axes[axis]}" for axis in group) or "1"
                    raise CheckpointError(
                        f"{relation}: {name} has shape {tuple(shape or ())}, in which {size} should be {told}"
                    )
    for dims, _, _ in equations:
        for axis in (axis for group in dims for axis in group):
            if axis not in axes:
                raise CheckpointError(
                    f"{relation}: no shape tells the size of {axis!r}: give it, as sizes = {{{axis} = 12}} in the map"
                )
