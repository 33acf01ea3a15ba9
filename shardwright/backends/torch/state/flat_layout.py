"""The layout of several parameters in one flat buffer that is cut into equal shards.

Every rank of a shard group has as many entries, whatever the sizes of the parameters, so that every rank sends and
receives as many bytes (the balanced fusion buffers of SageMaker's data parallelism). A parameter that lies across a
border between shards is cut there, anywhere in its entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 16
"""The number of entries to which parameters and shards are aligned, for fast loads."""


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The places of parameters in a flat buffer.

    Attributes:
        sizes: the number of entries of each parameter.
        offsets: the first entry of each parameter in the buffer.
        shard: the number of entries of every rank's shard.
        ways: the number of shards.
    """

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    shard: int
    ways: int

    @classmethod
    def cut(cls, sizes: Sequence[int], ways: int) -> "FlatLayout":
        """One parameter after the other, in equal shards."""
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end = _aligned(end + size)
        return cls(tuple(sizes), tuple(offsets), _aligned(-(-end // ways)), ways)

    @classmethod
    def whole_parameters(cls, sizes: Sequence[int], ways: int) -> "FlatLayout":
        """Every parameter whole in one shard, for optimizers that need whole matrices: the largest first, each in the
        shard with the fewest entries."""
        filled, at = [0] * ways, [(0, 0)] * len(sizes)
        for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            rank = filled.index(min(filled))
            at[index] = rank, filled[rank]
            filled[rank] = _aligned(filled[rank] + sizes[index])
        shard = max(filled)
        return cls(tuple(sizes), tuple(rank * shard + place for rank, place in at), shard, ways)

    @property
    def entries(self) -> int:
        """The number of entries of the buffer, with what alignment adds."""
        return self.shard * self.ways

    def span(self, index: int, rank: int) -> tuple[int, int]:
        """The (first, end) entries of a parameter that lie in a rank's shard; (0, 0) where none do."""
        offset, size = self.offsets[index], self.sizes[index]
        first, end = max(offset, rank * self.shard), min(offset + size, (rank + 1) * self.shard)
        return (first - offset, end - offset) if first < end else (0, 0)


def _aligned(entries: int) -> int:
    return -(-entries // ALIGNMENT) * ALIGNMENT
