"""Stages from units: what any run of units costs in time and memory, and the best cut into stages."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cost.unit import UnitCost
from shardwright.core.memory import MemoryUse, Recompute, kept_bytes, state_bytes
from shardwright.core.partition.exact import Matrix, min_max_cut, range_sums


@dataclass(frozen=True)
class UnitTable:
    """The units of a model at one tensor degree and one microbatch size, in order."""

    units: tuple[UnitCost, ...]
    boundary_bytes: tuple[int, ...]
    """For every unit, the bytes that enter it from before."""
    boundary_s: tuple[float, ...]
    ties: tuple[tuple[tuple[int, ...], int], ...]
    """(units that share a parameter, in order; its entries on one rank) of every tied parameter."""
    recompute: Recompute

    @cached_property
    def seconds(self) -> NDArray[np.float64]:
        """Forward and backward of every unit, what is computed again included."""
        again = 1.0 if self.recompute == "full" else 0.0
        return np.array([u.total_s + again * u.forward_s for u in self.units])

    @cached_property
    def range_seconds(self) -> Matrix:
        """``[a, b]``: a stage of units a … b-1, with the transfer of what enters it and of its gradient."""
        entering = np.array([*self.boundary_s, 0.0])
        entering[0] = 0.0
        sums: Matrix = range_sums(self.seconds) + 2 * entering[:, None]
        return sums

    @cached_property
    def range_elements(self) -> Matrix:
        """Parameters on a rank that holds units a … b-1; a parameter that several of them use counts once."""
        elements = range_sums([u.parameter_elements for u in self.units])
        for users, size in self.ties:
            for one, next_one in itertools.pairwise(users):
                elements[: one + 1, next_one + 1 :] -= size
        return elements

    @cached_property
    def range_kept(self) -> Matrix:
        return range_sums([kept_bytes(u, self.recompute) for u in self.units])

    @cached_property
    def range_working(self) -> Matrix:
        """What the backward of one microbatch holds beside the kept activations: the largest value and its gradient,
        and under full recompute all that one unit computes again."""
        again = [max(0, u.saved_bytes - u.entering_bytes) if self.recompute == "full" else 0 for u in self.units]
        return _range_max(again) + 2 * _range_max([u.largest_bytes for u in self.units])

    def range_memory(self, live: float, request: "MemoryRequest") -> Matrix:
        """Peak bytes of a stage with ``live`` microbatches under way."""
        return request.state_bytes_per_element * self.range_elements + live * self.range_kept + self.range_working

    def cut(self, stages: int, live: Sequence[int], request: "MemoryRequest") -> list[int] | None:
        """The first unit of every stage: least largest stage time among the cuts that fit, then least parameters."""
        ranks = len(live)
        fits = None
        if stages == ranks:
            fits = np.stack([self.range_memory(n, request) <= request.limit_bytes for n in live])
        return min_max_cut(self.range_seconds, self.range_elements, stages, fits)

    def memory(
        self, starts: Sequence[int], placement: Sequence[int], live: Sequence[int], request: "MemoryRequest"
    ) -> tuple[MemoryUse, ...]:
        """What every pipeline rank holds, its stages together."""
        ends = (*starts[1:], len(self.units))
        found = []
        for rank, count in enumerate(live):
            held = [(a, b) for stage, (a, b) in enumerate(zip(starts, ends, strict=True)) if placement[stage] == rank]
            elements = int(sum(self.range_elements[a, b] for a, b in held) - self._tied_twice(held))
            parameters, gradients, states = state_bytes(
                elements, request.precision, request.optimizer, request.shard, request.ways
            )
            kept = int(max(self.range_kept[a, b] for a, b in held))
            working = int(max(self.range_working[a, b] for a, b in held))
            sent = sum(self.boundary_bytes[a] * 2 for a, _ in held if a) if len(live) > 1 else 0
            found.append(MemoryUse(parameters, gradients, states, kept * count + working, sent))
        return tuple(found)

    def _tied_twice(self, held: Sequence[tuple[int, int]]) -> int:
        """Entries of parameters that two stages of one rank share."""
        extra = 0
        for users, size in self.ties:
            stages = sum(any(a <= u < b for u in users) for a, b in held)
            extra += size * max(0, stages - 1)
        return extra


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    """What decides the bytes of a parameter, and how many there may be."""

    limit_bytes: int
    precision: str
    optimizer: str
    shard: int
    ways: int
    """Ranks that share the sharded part."""

    @property
    def state_bytes_per_element(self) -> float:
        """Bytes of one parameter with its gradient and optimizer state, on one rank."""
        many = 1 << 20
        return sum(state_bytes(many, self.precision, self.optimizer, self.shard, self.ways)) / many


def _range_max(values: Sequence[int]) -> Matrix:
    """``[a, b]``: the largest of ``values[a:b]`` for a < b, 0 elsewhere."""
    n = len(values)
    found = np.zeros((n + 1, n + 1))
    for start in range(n):
        found[start, start + 1 :] = np.maximum.accumulate(np.asarray(values[start:], dtype=np.float64))
    return found
