"""The parameters that an optimizer updates on a rank, and what it makes for a while as it does."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwright.core.tables.optimizers import update_bytes
from shardwright.core.values.found_once import found_once


@dataclass(frozen=True)
class UpdatedParameters:
    """The trained parameters of a model at one tensor degree, in the order of the optimizer."""

    rows: tuple[tuple[int, tuple[int, ...], int], ...] = ()
    """The entries of each on one rank, the units that use it, and the entries of all that are divided together with
    it. Empty where an optimizer makes nothing for a while as it updates them."""
    units: int = 0
    """The number of the model's units."""

    def made_bytes(self, held: tuple[tuple[int, int], ...], ways: int, optimizer: str, *, together: bool) -> int:
        """The bytes that an optimizer makes for a while as it updates the parameters of stages of units ``held``, of
        which a rank has one part of ``ways``: in a loop, or ``together``."""
        return self._made_bytes(held, ways, optimizer, together=together) if self.rows else 0

    @found_once
    def _made_bytes(self, held: tuple[tuple[int, int], ...], ways: int, optimizer: str, *, together: bool) -> int:
        sizes, together_with, uses = self._by_unit
        here = np.any([uses[:, a:b].any(axis=1) for a, b in held], axis=0)
        share = -(-sizes // ways)
        # What is divided is one flat buffer, of which a rank has one part: a small parameter of it whole perhaps.
        pieces = share if together else np.minimum(sizes, -(-together_with // ways))
        return update_bytes(pieces[here].tolist(), optimizer, together=together)

    @cached_property
    def _by_unit(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """The entries of each parameter, those that are divided together with it, and whether each unit uses it."""
        uses = np.zeros((len(self.rows), self.units), dtype=np.bool_)
        for number, (_, users, _) in enumerate(self.rows):
            uses[number, list(users)] = True
        sizes, together_with = (np.array([row[column] for row in self.rows]) for column in (0, 2))
        return sizes, together_with, uses


NONE_MADE = UpdatedParameters()
"""Of optimizers that make nothing for a while."""
