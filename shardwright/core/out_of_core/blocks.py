"""A chain of blocks whose activations do not fit, and what becomes of those of each block (KARMA, arXiv 2008.11421)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardwright.core.errors import ShardwrightError

Label = Literal["keep", "recompute", "offload"]
"""What becomes of a block's activations between its forward and its backward."""
LABELS: tuple[Label, ...] = ("keep", "offload", "recompute")


FIGURES = ("forward_s", "backward_s", "out_s", "in_s", "kept_bytes", "entering_bytes", "passing_bytes")
"""What is measured of a block."""


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a chain. Seconds and bytes are of one microbatch.

    Raises:
        ShardwrightError: a figure is negative, or more enters a block than it keeps.
    """

    forward_s: float
    backward_s: float
    out_s: float
    """Seconds in which its activations go to the host."""
    in_s: float
    """Seconds in which they come back."""
    kept_bytes: int
    """What it keeps for its backward."""
    entering_bytes: int = 0
    """The part of these that it is computed again from."""
    passing_bytes: int = 0
    """What its passes hold for a while beside."""
    may_recompute: bool = True
    """Whether it may be computed again."""

    def __post_init__(self) -> None:
        for name in FIGURES:
            if not getattr(self, name) >= 0:
                raise ShardwrightError(f"Block({name}={getattr(self, name)}): expected 0 or more")
        if self.entering_bytes > self.kept_bytes:
            raise ShardwrightError(
                f"Block(entering_bytes={self.entering_bytes}, kept_bytes={self.kept_bytes}): what enters a block is a "
                f"part of what it keeps"
            )

    def left_bytes(self, label: Label) -> int:
        """What is on the device between the block's passes, once activations on their way to the host are there."""
        return self.kept_bytes if label == "keep" else self.entering_bytes if label == "recompute" else 0


def require_room(blocks: Sequence[Block], memory_bytes: int) -> None:
    """Raise ShardwrightError where the largest block's own passes do not fit."""
    if not blocks:
        raise ShardwrightError("no blocks were given: expected one or more")
    largest = max(range(len(blocks)), key=lambda i: blocks[i].kept_bytes + blocks[i].passing_bytes)
    needed = blocks[largest].kept_bytes + blocks[largest].passing_bytes
    if needed > memory_bytes:
        raise ShardwrightError(
            f"block {largest} alone takes {needed} bytes in its backward, and the limit is {memory_bytes}: give at "
            f"least that much, smaller microbatches or smaller blocks"
        )
