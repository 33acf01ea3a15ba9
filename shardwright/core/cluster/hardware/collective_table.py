"""Measured times of collectives, by kind, number of ranks and bytes, and what lies between them."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Literal, get_args

from annotated_types import Ge, Gt

from shardwright.core.cluster.hardware import check
from shardwright.core.errors import ClusterError, nearest

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "send"]


@dataclass(frozen=True, slots=True)
class MeasuredCollective:
    """The measured time of one collective of ``ranks`` ranks, while all others ran the same in groups of their own.

    size_bytes: one member's whole tensor: what is reduced, what a gather gives, what a scatter splits, or what one rank
        sends to another.

    Raises ClusterError for an unknown kind, or a number that cannot be.
    """

    kind: CollectiveKind
    ranks: Annotated[int, Ge(2)]
    size_bytes: Annotated[int, Ge(1)]
    seconds: Annotated[float, Gt(0)]

    def __post_init__(self) -> None:
        if self.kind not in get_args(CollectiveKind):
            known = nearest(str(self.kind), get_args(CollectiveKind))
            raise ClusterError(f"measured collective: kind {self.kind!r} is not known; {known}")
        owner = f"measured {self.kind} of {self.size_bytes} bytes"
        check.whole(owner, "ranks", self.ranks, at_least=2)
        check.whole(owner, "size_bytes", self.size_bytes, at_least=1)
        check.positive(owner, "seconds", self.seconds)
        if self.kind == "send" and self.ranks != 2:
            raise ClusterError(f"{owner}: a message goes from one rank to another, ranks must be 2; given {self.ranks}")

    @property
    def port_bytes_per_s(self) -> float:
        """The rate at which bytes left each rank."""
        share = {"send": 1.0, "all_reduce": 2 * (self.ranks - 1) / self.ranks}
        return self.size_bytes * share.get(self.kind, (self.ranks - 1) / self.ranks) / self.seconds


class CollectiveTable:
    """Measured collectives of one link; empty where there are none.

    Raises ClusterError when one of them was measured twice.
    """

    __slots__ = ("_curves", "_hash", "_samples")

    def __init__(self, samples: Iterable[MeasuredCollective] = ()) -> None:
        self._samples = tuple(samples)
        found: dict[tuple[str, int], dict[int, float]] = {}
        for each in self._samples:
            curve = found.setdefault((each.kind, each.ranks), {})
            if each.size_bytes in curve:
                raise ClusterError(
                    f"{each.kind} of {each.ranks} ranks and {each.size_bytes} bytes stands twice among what was "
                    f"measured: keep one of them"
                )
            curve[each.size_bytes] = each.seconds
        self._curves = {key: _rising(curve) for key, curve in found.items()}
        self._hash = hash(self._samples)  # groups that share a link are looked up by it over and over

    def __iter__(self) -> Iterator[MeasuredCollective]:
        return iter(self._samples)

    def __len__(self) -> int:
        return len(self._samples)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CollectiveTable) and self._samples == other._samples

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type["CollectiveTable"], tuple[tuple[MeasuredCollective, ...]]]:
        return type(self), (self._samples,)  # another process has another hash

    def __repr__(self) -> str:
        return f"CollectiveTable({self._samples!r})"

    def seconds(self, kind: CollectiveKind, ranks: int, size_bytes: float) -> float | None:
        """The seconds of a collective; None where this kind was not measured of as many ranks.

        Between two sizes the logarithm of the time lies on the line over that of the size. Below the smallest it takes
        as long, which is latency; above the largest the bandwidth is that of the largest. A size that took longer than
        a larger one is taken to need no longer: other programs only ever make it longer.
        """
        curve = self._curves.get((kind, ranks))
        if curve is None:
            return None
        sizes, times = curve
        if size_bytes <= sizes[0]:
            return times[0]
        if size_bytes >= sizes[-1]:
            return times[-1] * (size_bytes / sizes[-1])
        after = bisect_right(sizes, size_bytes)
        near, far = sizes[after - 1], sizes[after]
        share = math.log(size_bytes / near) / math.log(far / near)
        return float(times[after - 1] * (times[after] / times[after - 1]) ** share)


def _rising(curve: dict[int, float]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The sizes in order, and times that never fall: each the least of those of its own and of larger sizes."""
    sizes = tuple(sorted(curve))
    least = accumulate((curve[size] for size in reversed(sizes)), min)
    return sizes, tuple(least)[::-1]
