"""What a timeline holds: whatever ran on a resource for a time."""

from collections.abc import Mapping, Sequence
from typing import Protocol


class Work(Protocol):
    """A piece of work: an action of a schedule, a unit of a job. It has what pictures and traces show of it."""

    @property
    def text(self) -> str:
        """Its short text."""

    @property
    def letter(self) -> str:
        """One letter, for the terminal."""

    @property
    def series(self) -> str:
        """What it is one of: the actions of a kind, the units of a job. Pictures give each a colour."""

    @property
    def numbers(self) -> Mapping[str, int | None]:
        """Its numbers by name."""

    @property
    def is_transfer(self) -> bool:
        """Whether it only moves a tensor."""

    @property
    def flat(self) -> "Sequence[Work]":
        """The parts that ran together, or itself."""
