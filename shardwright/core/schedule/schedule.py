"""The schedule: an action table, and the builders of the named ones and of the searched one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwright.core.errors import ScheduleError, nearest
from shardwright.core.schedule.action_table import ActionTable, Argument
from shardwright.core.schedule.auto import shortest
from shardwright.core.schedule.catalogue import FAMILIES
from shardwright.core.schedule.costs import per_rank_limit
from shardwright.core.schedule.family import Sizes
from shardwright.core.schedule.peak_memory import bytes_of, peak_live
from shardwright.core.schedule.simulate import Costs, costs_by_slice, require_costs

AUTO = "auto"
"""The schedule that is searched for the costs and the memory given, instead of following a pattern."""
MOST_CELLS = 1 << 18
"""The most stages · microbatches of a schedule that is built: more take minutes and gigabytes."""


@dataclass(frozen=True, slots=True)
class Schedule(ActionTable):
    """A schedule: the actions of each rank in their order. The fields are those of `ActionTable`."""

    @classmethod
    def build(
        cls,
        name: str,
        *,
        ranks: int,
        microbatches: int,
        virtual_stages: int = 1,
        slices: int = 1,
        costs: Costs | None = None,
        memory_limit_bytes: int | Sequence[int] | None = None,
        active_microbatches: int | None = None,
    ) -> "Schedule":
        """Build a named schedule.

        Args:
            name: `gpipe`, `1f1b`, ... (`schedule_names()` lists them), or `auto`.
            ranks, microbatches: the number of each.
            virtual_stages: the number of stages on each rank.
            slices: into how many slices each microbatch's sequence is cut, for the schedules that take several.
            costs: the costs of each stage, with slices those of each slice in turn; used by `auto`, and to judge
                `memory_limit_bytes`. Default: all the same.
            memory_limit_bytes: bytes of activations that a rank may hold; one for all ranks or one for each.
            active_microbatches: the number of microbatches that may be under way at once; `simple` and `interleaved`
                only.

        Raises:
            ScheduleError: an unknown name, sizes that the schedule does not admit (the message says which it would), or
                a memory limit that it does not keep.
        """
        family = FAMILIES.get(name) if isinstance(name, str) else None
        if family is None and name != AUTO:
            raise ScheduleError(f"no schedule is named {name!r}: {nearest(str(name), (*FAMILIES, AUTO))}")
        first = None if costs is None else require_costs(costs)[0]
        sizes = Sizes(ranks, microbatches, virtual_stages, first, None, active_microbatches, slices)
        require_buildable(sizes.stages, microbatches * slices)
        if slices > 1 and (family is None or not family.takes_slices):
            takers = ", ".join(other.name for other in FAMILIES.values() if other.takes_slices)
            raise ScheduleError(f"{name} runs microbatches whole, not in slices={slices}; these take slices: {takers}")
        if active_microbatches is not None and (family is None or not family.bounds_active):
            takers = ", ".join(other.name for other in FAMILIES.values() if other.bounds_active)
            raise ScheduleError(f"{name} has no active_microbatches: leave it out, or take one that has: {takers}")
        sizes = replace(sizes, memory_limit_bytes=per_rank_limit(memory_limit_bytes, ranks))
        if first is not None:
            first.require_stages(sizes.stages)
        if family is not None and (reason := family.refusal(sizes)):
            raise ScheduleError(f"{name} does not admit these sizes: {reason}")
        arguments: list[tuple[str, Argument]] = [
            ("ranks", ranks),
            ("microbatches", microbatches),
            ("virtual_stages", virtual_stages),
        ]
        if active_microbatches is not None:
            arguments.append(("active_microbatches", active_microbatches))
        if slices > 1:
            arguments.append(("slices", slices))
        if family is None:
            placement, table = shortest(sizes)
        else:
            placement, table = family.placement(ranks, virtual_stages), family.generate(sizes)
        schedule = cls(name, tuple(arguments), ranks, sizes.stages, microbatches, placement, table, slices=slices)
        if sizes.memory_limit_bytes is not None:
            _require_memory(schedule, sizes.memory_limit_bytes, costs)
        return schedule


def require_buildable(stages: int, microbatches: int) -> None:
    """Raise ScheduleError unless a schedule of so many stages and microbatches is small enough to be made."""
    if stages * microbatches > MOST_CELLS:
        raise ScheduleError(
            f"{stages} stages and {microbatches} microbatches: a schedule has at most {MOST_CELLS} of both together "
            f"(stages · microbatches), here {stages * microbatches}: use at most "
            f"{max(1, MOST_CELLS // stages)} microbatches, larger ones then"
        )


def _require_memory(schedule: Schedule, limits: tuple[int, ...], costs: Costs | None) -> None:
    slices = tuple(map(bytes_of, costs_by_slice(schedule, costs)))
    for rank, order in enumerate(schedule.table):
        held = peak_live(order, slices=slices)
        if held > limits[rank]:
            raise ScheduleError(
                f"memory_limit_bytes={limits[rank]} on rank {rank} is too little for {schedule.name} with these sizes: "
                f"the least that {schedule.name} keeps is {held}; 'auto' builds a schedule within a limit"
            )


def schedule_names() -> tuple[str, ...]:
    """The names of the schedules that follow from sizes alone. `Schedule.build` takes `auto` besides, which depends on
    costs and memory as well: whoever stores such a schedule must store its table.
    """
    return tuple(FAMILIES)
