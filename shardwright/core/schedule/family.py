"""A schedule family: the sizes it admits, the placement of its stages and the order it gives each rank."""

from collections.abc import Callable
from dataclasses import dataclass

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule.actions import Action
from shardwright.core.schedule.costs import StageCosts

Order = tuple[Action, ...]
Table = tuple[Order, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that a schedule is asked for. `memory_limit_bytes` has one entry per rank.

    Raises:
        ScheduleError: a size is not a positive integer.
    """

    ranks: int
    microbatches: int
    virtual_stages: int = 1
    costs: StageCosts | None = None
    memory_limit_bytes: tuple[int, ...] | None = None
    active_microbatches: int | None = None
    slices: int = 1

    def __post_init__(self) -> None:
        for name in ("ranks", "microbatches", "virtual_stages", "slices"):
            positive_integer(name, getattr(self, name))
        if self.active_microbatches is not None:
            positive_integer("active_microbatches", self.active_microbatches)

    @property
    def stages(self) -> int:
        return self.ranks * self.virtual_stages


Generate = Callable[[Sizes], Table]


def by_rank(rank_order: Callable[[int, Sizes], Order]) -> Generate:
    """The tables of a family that gives every rank its order by itself."""
    return lambda sizes: tuple(rank_order(rank, sizes) for rank in range(sizes.ranks))


@dataclass(frozen=True, slots=True)
class Family:
    """One named schedule. `refusal` gives the reason why sizes are not admitted, with sizes that are, or None;
    `bounds_active` says whether `active_microbatches` is an argument of it, `trains` whether it has backwards,
    `follows_costs` whether its order follows from the times of actions, `takes_slices` whether microbatches may go
    through it in slices of their sequences.
    """

    name: str
    source: str
    placement: Callable[[int, int], tuple[int, ...]]
    generate: Generate
    refusal: Callable[[Sizes], str | None]
    bounds_active: bool = False
    trains: bool = True
    follows_costs: bool = False
    takes_slices: bool = False


def positive_integer(name: str, value: object) -> None:
    """Raise ScheduleError unless the value is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ScheduleError(f"{name}={value!r} is not possible: expected an integer of at least 1")


def one_stage_per_rank(sizes: Sizes) -> str | None:
    """The refusal of the families that keep one stage on each rank."""
    if sizes.virtual_stages != 1:
        return f"it keeps one stage on each rank: virtual_stages={sizes.virtual_stages} must be 1"
    return None


def two_stages_per_rank(sizes: Sizes) -> str | None:
    """The refusal of the families whose stages go down the ranks and come back up."""
    if sizes.virtual_stages != 2:
        return f"its stages go down the ranks and back up: virtual_stages={sizes.virtual_stages} must be 2"
    return None
