"""Stages from units: what any run of units costs in time and memory, and the best cut into stages."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cost.unit import UnitCost
from shardwright.core.memory import (
    MemoryUse,
    Recompute,
    kept_bytes,
    recomputed_s,
    state_bytes,
    state_bytes_per_element,
    unit_recompute,
)
from shardwright.core.partition.exact import Matrix, min_max_cut, range_sums

EVEN_SHARE = 1.15
"""How far above an equal share of the parameters a pipeline rank may be, beside one parameter that cannot be cut."""
PRICE_OF_EVENNESS = 1.25
"""How much longer the slowest stage may take for it."""


@dataclass(frozen=True)
class UnitTable:
    """The units of a model at one tensor degree and one microbatch size, in order."""

    units: tuple[UnitCost, ...]
    boundary_bytes: tuple[int, ...]
    """For every unit, the bytes that enter it from before."""
    boundary_s: tuple[float, ...]
    ties: tuple[tuple[tuple[int, ...], int], ...]
    """(units that share a parameter, in order; its entries on one rank) of every tied parameter."""
    largest_parameter: int
    """Entries of the largest parameter, on one rank."""
    recompute: Recompute
    repeated: tuple[bool, ...]
    """Whether a unit has others like it: full recompute is of these. What comes before and after them, embeddings and
    head, is kept: the backward of the head follows its forward at once, so that recomputing it would save nothing."""

    def modes(self) -> list[Recompute]:
        """What each unit does under the policy of the whole."""
        return [unit_recompute(self.recompute, again) for again in self.repeated]

    @cached_property
    def again_s(self) -> NDArray[np.float64]:
        """What is computed again of every unit."""
        modes = self.modes()
        return np.array([recomputed_s(u, mode) for u, mode in zip(self.units, modes, strict=True)])

    @cached_property
    def seconds(self) -> NDArray[np.float64]:
        """Forward and backward of every unit, what is computed again included."""
        total: NDArray[np.float64] = np.array([u.total_s for u in self.units]) + self.again_s
        return total

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
        return range_sums([kept_bytes(u, mode) for u, mode in zip(self.units, self.modes(), strict=True)])

    @cached_property
    def range_working(self) -> Matrix:
        """What the passes of one microbatch hold beside the kept activations: values and gradients under way, and under
        full recompute all that one unit computes again. The backward of a unit finds the units after it done with."""
        again = [
            max(0, u.saved_bytes - kept_bytes(u, mode)) if mode != "none" else 0
            for u, mode in zip(self.units, self.modes(), strict=True)
        ]
        kept = np.array([kept_bytes(u, mode) for u, mode in zip(self.units, self.modes(), strict=True)], dtype=float)
        through = np.cumsum(kept)
        beside = through + np.array([u.passing_bytes for u in self.units]) + np.array(again)
        working: Matrix = np.maximum(0.0, _range_max(beside) - np.concatenate([[0.0], through])[None, :])
        return working

    def range_memory(self, live: float, request: "MemoryRequest") -> Matrix:
        """Peak bytes of a stage with ``live`` microbatches under way."""
        return request.state_bytes_per_element * self.range_elements + live * self.range_kept + self.range_working

    def cut(self, stages: int, live: Sequence[int], request: "MemoryRequest") -> list[int] | None:
        """The first unit of every stage: least largest stage time among the cuts that fit, then least parameters.

        Cuts that spread the parameters evenly (no rank above `EVEN_SHARE` of its share and the largest parameter) come
        first, unless they are slower by more than `PRICE_OF_EVENNESS`.
        """
        ranks = len(live)
        if stages != ranks:
            return min_max_cut(self.range_seconds, self.range_elements, stages)
        fits = np.stack([self.range_memory(n, request) <= request.limit_bytes for n in live])
        fastest = min_max_cut(self.range_seconds, self.range_elements, stages, fits)
        even_elements = EVEN_SHARE * self.range_elements[0, len(self.units)] / ranks + self.largest_parameter
        if fastest is None or self._largest(self.range_elements, fastest) <= even_elements:
            return fastest
        even = min_max_cut(
            self.range_seconds, self.range_elements, stages, fits & (self.range_elements <= even_elements)
        )
        if even is None:
            return fastest
        slower = self._largest(self.range_seconds, even) / self._largest(self.range_seconds, fastest)
        return even if slower <= PRICE_OF_EVENNESS else fastest

    def _largest(self, matrix: Matrix, starts: Sequence[int]) -> float:
        """The largest entry of a cut's stages."""
        ends = (*starts[1:], len(self.units))
        return max(float(matrix[a, b]) for a, b in zip(starts, ends, strict=True))

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
                elements, request.precision, request.optimizer, request.shard, request.ways, request.gradient_precision
            )
            kept = int(max(self.range_kept[a, b] for a, b in held))
            working = int(max(self.range_working[a, b] for a, b in held))
            sent = sum(self.boundary_bytes[a] * 2 for a, _ in held if a) if len(live) > 1 else 0
            found.append(MemoryUse(parameters, gradients, states, kept * count, working + sent))
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
    gradient_precision: str | None = None

    @property
    def state_bytes_per_element(self) -> float:
        """Bytes of one parameter with its gradient and optimizer state, on one rank."""
        return state_bytes_per_element(self.precision, self.optimizer, self.shard, self.ways, self.gradient_precision)


def _range_max(values: Sequence[int] | NDArray[np.float64]) -> Matrix:
    """``[a, b]``: the largest of ``values[a:b]`` for a < b, 0 elsewhere."""
    n = len(values)
    found = np.zeros((n + 1, n + 1))
    for start in range(n):
        found[start, start + 1 :] = np.maximum.accumulate(np.asarray(values[start:], dtype=np.float64))
    return found
