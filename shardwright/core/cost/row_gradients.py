"""The bytes that the sum of a gradient of a few rows moves and holds, as rows and made whole first.

What a lookup gives is a gradient of the rows that were looked up. As rows it is gathered: every rank then holds what
all ranks have, and moves more the more ranks there are. Made whole (dense) it is summed in place, whatever their number
(Horovod's densified gradients, arXiv 1905.04035).
"""

from dataclasses import dataclass
from typing import Literal

from shardwright.core.errors import ShardwrightError

Policy = Literal["auto", "dense", "sparse"]
POLICIES: tuple[Policy, ...] = ("auto", "dense", "sparse")
INDEX_BYTES = 8
"""The bytes of a row's number."""


@dataclass(frozen=True, slots=True)
class RowGradient:
    """A gradient of a table of which each rank has some rows.

    Raises:
        ShardwrightError: a figure is negative, or there is no rank.
    """

    table_rows: int
    row_bytes: int
    most_rows: int
    """The rows of the rank that has most: in a gather of equal parts every rank sends as many."""
    ranks: int

    def __post_init__(self) -> None:
        for name, least in (("table_rows", 0), ("row_bytes", 0), ("most_rows", 0), ("ranks", 1)):
            if getattr(self, name) < least:
                raise ShardwrightError(f"RowGradient({name}={getattr(self, name)}): expected {least} or more")

    def moved_bytes(self, policy: Literal["dense", "sparse"]) -> float:
        """The bytes that each rank sends in rings: 2 (P - 1) / P of the table, or (P - 1) times its rows."""
        others = self.ranks - 1
        if policy == "dense":
            return 2 * others / self.ranks * self.table_rows * self.row_bytes
        return float(others * self.most_rows * (self.row_bytes + INDEX_BYTES))

    def held_bytes(self, policy: Literal["dense", "sparse"]) -> int:
        """The bytes that each rank has at once: the table, or the rows of all ranks."""
        if policy == "dense":
            return self.table_rows * self.row_bytes
        return self.ranks * self.most_rows * (self.row_bytes + INDEX_BYTES)

    def chosen(self, limit_bytes: int | None = None) -> Literal["dense", "sparse"]:
        """The form that moves less. One that holds more than ``limit_bytes`` is taken only where the other holds more
        still. (Rows that move less than the table never hold more than twice as much.)"""
        held = {policy: self.held_bytes(policy) for policy in ("dense", "sparse")}
        if limit_bytes is not None and (held["dense"] > limit_bytes) != (held["sparse"] > limit_bytes):
            return "dense" if held["dense"] <= limit_bytes else "sparse"
        return "sparse" if self.moved_bytes("sparse") < self.moved_bytes("dense") else "dense"
