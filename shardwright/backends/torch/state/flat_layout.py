"""The layout of several parameters in one flat buffer that is cut into shards.

Every rank of a shard group has as many entries, whatever the sizes of the parameters, so that every rank sends and
receives as many bytes (the balanced fusion buffers of SageMaker's data parallelism). A parameter that lies across a
border between shards is cut there, anywhere in its entries. Where optimizers need whole matrices shards are unequal,
and balanced over all buffers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

ALIGNMENT = 16
"""The number of entries to which parameters and shards are aligned, for fast loads."""


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The places of parameters in a flat buffer.

    Attributes:
        sizes: the number of entries of each parameter.
        offsets: the first entry of each parameter in the buffer.
        borders: the first entry of every rank's shard, and the end of the last.
    """

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    borders: tuple[int, ...]

    @classmethod
    def cut(cls, sizes: Sequence[int], ways: int) -> "FlatLayout":
        """One parameter after the other, in equal shards."""
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end = _aligned(end + size)
        shard = _aligned(-(-end // ways))
        return cls(tuple(sizes), tuple(offsets), tuple(rank * shard for rank in range(ways + 1)))

    @classmethod
    def whole_parameters(cls, sizes: Sequence[int], held: Sequence[int]) -> "FlatLayout":
        """Every parameter whole in one shard, for optimizers that need whole matrices: the largest first, each in the
        shard of the rank that has the fewest entries by then. ``held``: the entries that each rank has already, of
        other buffers. So no rank has more than its share of all and one parameter (Graham, 1969)."""
        filled, at = [0] * len(held), [(0, 0)] * len(sizes)
        for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            rank = min(range(len(held)), key=lambda r: held[r] + filled[r])
            at[index] = rank, filled[rank]
            filled[rank] = _aligned(filled[rank] + sizes[index])
        borders = (0, *accumulate(filled))
        return cls(tuple(sizes), tuple(borders[rank] + place for rank, place in at), borders)

    @property
    def entries(self) -> int:
        """The number of entries of the buffer, with what alignment adds."""
        return self.borders[-1]

    def shard(self, rank: int) -> slice:
        """The entries of a rank's shard."""
        return slice(self.borders[rank], self.borders[rank + 1])

    def shard_entries(self, rank: int) -> int:
        """The number of entries of a rank's shard."""
        return self.borders[rank + 1] - self.borders[rank]

    def span(self, index: int, rank: int) -> tuple[int, int]:
        """The (first, end) entries of a parameter that lie in a rank's shard; (0, 0) where none do."""
        offset, size = self.offsets[index], self.sizes[index]
        shard = self.shard(rank)
        first, end = max(offset, shard.start), min(offset + size, shard.stop)
        return (first - offset, end - offset) if first < end else (0, 0)


def _aligned(entries: int) -> int:
    return -(-entries // ALIGNMENT) * ALIGNMENT
