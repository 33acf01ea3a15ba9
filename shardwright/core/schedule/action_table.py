"""The table of a schedule: an ordered list of actions for each rank of a pipeline."""

import hashlib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TypeVar

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule.actions import Action, Kind
from shardwright.core.schedule.family import Table, positive_integer
from shardwright.core.schedule.legality import require_complete

Argument = int | float | str | None


@dataclass(frozen=True, slots=True)
class ActionTable:
    """The actions of each rank in their order, and the rank that holds each stage.

    Args:
        name: the family that made it, or `custom`.
        arguments: the arguments of the family, as pairs; enough to build it again, but for `auto`.
        ranks, stages, microbatches: the number of each; every rank holds `virtual_stages` = stages / ranks of them.
        placement: the rank that holds each stage.
        table: the actions of each rank, in order.
        credits: the number of tensors that may be made and not yet used on each boundary between ranks; None is no
            bound.
        slices: into how many slices each microbatch's sequence is cut. With more than one, every pass names its slice;
            a stage runs the forwards of a microbatch's slices in their order, and the backwards in reverse.

    A schedule is whole: every forward is in the table once, on the rank that holds its stage, and so is every backward,
    behind it, unless there are none at all (`trains`). Whether it also ends, the ranks waiting for one another, is what
    `checks.check_ends` and a simulation say.

    Raises:
        ScheduleError: the sizes and the placement do not fit together, or an action is missing, doubled, on the wrong
            rank or too early; the grid marks it.
    """

    name: str
    arguments: tuple[tuple[str, Argument], ...]
    ranks: int
    stages: int
    microbatches: int
    placement: tuple[int, ...]
    table: Table = field(repr=False)
    credits: int | None = None
    slices: int = 1
    trains: bool = field(init=False, repr=False, compare=False)
    """Whether the schedule has backwards: without them it is for evaluation alone."""

    def __post_init__(self) -> None:
        self._require_types()
        if len(self.table) != self.ranks:
            raise ScheduleError(f"the table has {len(self.table)} rows: expected one for each of {self.ranks} ranks")
        if len(self.placement) != self.stages:
            raise ScheduleError(f"the placement has {len(self.placement)} entries: expected {self.stages}")
        on = Counter(self.placement)
        held = [on[rank] for rank in range(self.ranks)]
        if len(set(held)) != 1 or sum(held) != self.stages:
            raise ScheduleError(f"the ranks hold {held} stages: expected as many on each, {self.stages} in all")
        if self.credits is not None and self.credits < 1:
            raise ScheduleError(f"credits={self.credits} would let nothing through: expected at least 1")
        trains = require_complete(self.name, self.table, self.placement, self.microbatches, self.slices)
        object.__setattr__(self, "trains", trains)

    def _require_types(self) -> None:
        for name in ("ranks", "stages", "microbatches", "slices"):
            positive_integer(name, getattr(self, name))
        if self.credits is not None and type(self.credits) is not int:
            raise ScheduleError(f"credits={self.credits!r}: expected a whole number, or None for no bound")
        if not isinstance(self.name, str):
            raise ScheduleError(f"the name of a schedule is text, not {self.name!r}")
        if not isinstance(self.placement, tuple) or any(type(rank) is not int for rank in self.placement):
            raise ScheduleError(f"placement={self.placement!r}: expected a tuple with the rank of each stage")
        rows = isinstance(self.table, tuple) and all(isinstance(order, tuple) for order in self.table)
        if not rows or any(type(action) is not Action for order in self.table for action in order):
            raise ScheduleError("the table is a tuple with a tuple of Actions for each rank; Action.parse makes one")

    @property
    def virtual_stages(self) -> int:
        """The number of stages on each rank."""
        return self.stages // self.ranks

    @property
    def passes(self) -> int:
        """The number of forwards of each stage: one for each slice of each microbatch."""
        return self.microbatches * self.slices

    def pass_of(self, part: Action) -> int:
        """The number of an action's microbatch and slice among all of these."""
        return (part.microbatch or 0) * self.slices + (part.slice or 0)

    def stage_to_rank(self, stage: int) -> int:
        """The rank that holds a stage.

        Raises:
            ScheduleError: there is no such stage.
        """
        if not 0 <= stage < self.stages:
            raise ScheduleError(f"stage {stage} is not in this schedule: it has stages 0 to {self.stages - 1}")
        return self.placement[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in order."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is split into input gradient and weight gradient."""
        return any(part.kind in ("I", "W") for order in self.table for action in order for part in action.flat)

    @property
    def digest(self) -> str:
        """A SHA-256 of placement, credits and table: two schedules with the same digest do the same."""
        text = hashlib.sha256(f"{self.microbatches}/{self.placement}/{self.credits}\n".encode())
        for order in self.table:
            text.update((",".join(action.text for action in order) + "\n").encode())
        return text.hexdigest()


TableT = TypeVar("TableT", bound=ActionTable)
"""The type of a schedule that a pass is given and gives back."""


def has_any(schedule: ActionTable, kinds: Collection[Kind]) -> bool:
    """Whether any action of a schedule is of one of these kinds."""
    return any(action.kind in kinds for order in schedule.table for action in order)


def without(schedule: TableT, kinds: Collection[Kind]) -> TableT:
    """The schedule without the actions of these kinds."""
    table = tuple(tuple(action for action in order if action.kind not in kinds) for order in schedule.table)
    return replace(schedule, table=table)
