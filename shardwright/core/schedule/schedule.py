"""The schedule: for each rank of a pipeline, an ordered list of actions."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shardwright.core.errors import ScheduleError, nearest
from shardwright.core.schedule.actions import Action
from shardwright.core.schedule.catalogue import FAMILIES
from shardwright.core.schedule.complete import require_complete
from shardwright.core.schedule.costs import StageCosts, per_rank_limit
from shardwright.core.schedule.family import Sizes, Table, positive_integer
from shardwright.core.schedule.live import peak_live

AUTO = "auto"
"""The schedule that is searched for the costs and the memory given, instead of following a pattern."""
Argument = int | float | str | None
MOST_CELLS = 1 << 18
"""Stages · microbatches of the largest schedule that is built: more take minutes and gigabytes."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """For each rank, what it does in which order; and which rank holds which stage.

    Args:
        name: the family that made it, or `custom`.
        arguments: what the family was asked for, as pairs; enough to build it again, but for `auto`.
        ranks, stages, microbatches: how many of each; every rank holds `virtual_stages` = stages / ranks of them.
        placement: for each stage, the rank that holds it.
        table: for each rank, its actions in order.
        credits: how many tensors may be made and not yet used on each boundary between ranks; None is no bound.

    A schedule is whole: every forward is in the table once, on the rank that holds its stage, and so is every backward,
    behind it, unless there are none at all (`trains`). That it also ends, the ranks waiting for one another, is what
    `checks.require_ends` and a simulation say.

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
    trains: bool = field(init=False, repr=False, compare=False)
    """Whether it has backwards: without them it is for evaluation alone."""

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
        trains = require_complete(self.name, self.table, self.placement, self.microbatches)
        object.__setattr__(self, "trains", trains)

    def _require_types(self) -> None:
        for name in ("ranks", "stages", "microbatches"):
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

    @classmethod
    def build(
        cls,
        name: str,
        *,
        ranks: int,
        microbatches: int,
        virtual_stages: int = 1,
        costs: StageCosts | None = None,
        memory_limit_bytes: int | Sequence[int] | None = None,
        active_microbatches: int | None = None,
    ) -> "Schedule":
        """Build a named schedule.

        Args:
            name: `gpipe`, `1f1b`, ... (`schedule_names()` lists them), or `auto`.
            ranks, microbatches: how many of each.
            virtual_stages: stages on each rank.
            costs: what each stage costs; used by `auto`, and to judge `memory_limit_bytes`. Default: all the same.
            memory_limit_bytes: bytes of activations that a rank may hold; one for all ranks or one for each.
            active_microbatches: how many microbatches may be under way at once; `simple` and `interleaved` only.

        Raises:
            ScheduleError: an unknown name, sizes that the schedule does not admit (the message says which it would), or
                a memory limit that it does not keep.
        """
        family = FAMILIES.get(name) if isinstance(name, str) else None
        if family is None and name != AUTO:
            raise ScheduleError(f"no schedule is named {name!r}: {nearest(str(name), (*FAMILIES, AUTO))}")
        if costs is not None and not isinstance(costs, StageCosts):
            raise ScheduleError(f"costs={costs!r}: expected StageCosts, such as StageCosts.uniform(stages)")
        sizes = Sizes(ranks, microbatches, virtual_stages, costs, None, active_microbatches)
        require_buildable(sizes.stages, microbatches)
        if active_microbatches is not None and (family is None or not family.bounds_active):
            takers = ", ".join(other.name for other in FAMILIES.values() if other.bounds_active)
            raise ScheduleError(f"{name} has no active_microbatches: leave it out, or take one that has: {takers}")
        sizes = replace(sizes, memory_limit_bytes=per_rank_limit(memory_limit_bytes, ranks))
        if costs is not None:
            costs.require_stages(sizes.stages)
        if family is not None and (reason := family.refusal(sizes)):
            raise ScheduleError(f"{name} does not admit these sizes: {reason}")
        arguments: list[tuple[str, Argument]] = [
            ("ranks", ranks),
            ("microbatches", microbatches),
            ("virtual_stages", virtual_stages),
        ]
        if active_microbatches is not None:
            arguments.append(("active_microbatches", active_microbatches))
        if family is None:
            # Here, because this search plays schedules through.
            from shardwright.core.schedule.auto import shortest

            placement, table = shortest(sizes)
        else:
            placement, table = family.placement(ranks, virtual_stages), family.generate(sizes)
        schedule = cls(name, tuple(arguments), ranks, sizes.stages, microbatches, placement, table)
        if sizes.memory_limit_bytes is not None:
            _require_memory(schedule, sizes.memory_limit_bytes, costs)
        return schedule

    @property
    def virtual_stages(self) -> int:
        """Stages on each rank."""
        return self.stages // self.ranks

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


def require_buildable(stages: int, microbatches: int) -> None:
    """Raises ScheduleError unless a schedule of so many stages and microbatches is small enough to be made."""
    if stages * microbatches > MOST_CELLS:
        raise ScheduleError(
            f"{stages} stages and {microbatches} microbatches: a schedule has at most {MOST_CELLS} of both together "
            f"(stages · microbatches), here {stages * microbatches}: use at most "
            f"{max(1, MOST_CELLS // stages)} microbatches, larger ones then"
        )


def _require_memory(schedule: Schedule, limits: tuple[int, ...], costs: StageCosts | None) -> None:
    bytes_per_stage = costs.activation_bytes if costs else (1,) * schedule.stages
    for rank, order in enumerate(schedule.table):
        held = peak_live(order, bytes_per_stage)
        if held > limits[rank]:
            raise ScheduleError(
                f"memory_limit_bytes={limits[rank]} on rank {rank} is too little for {schedule.name} with these sizes: "
                f"the least that {schedule.name} keeps is {held}; 'auto' builds a schedule within a limit"
            )


def schedule_names() -> tuple[str, ...]:
    """The names of the schedules that follow from sizes alone. `Schedule.build` takes `auto` besides, which depends on
    costs and memory as well: who stores such a schedule must store its table.
    """
    return tuple(FAMILIES)
