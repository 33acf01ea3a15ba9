"""The ways of tensors between the stages of a schedule, and the links that they take."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.core.events import Resource
from shardwright.core.schedule.action_table import ActionTable
from shardwright.core.schedule.costs import StageCosts


@dataclass(frozen=True, slots=True)
class Route:
    """The way from one stage to the next, or to the one before."""

    first: int
    """The number of the first pass of the stage that it leads to."""
    source: int
    target: int
    link: Resource
    """The link from the one rank to the other, which it shares with the ways between other stages of these ranks."""
    seconds: tuple[float, ...]
    """Of a transfer, for each slice."""

    @property
    def is_local(self) -> bool:
        """Whether both stages are on one rank."""
        return self.source == self.target


Routes = tuple[Route | None, ...]
"""By the stage that they leave; None where there is no stage to go to."""


def routes_of(schedule: ActionTable, costs: Sequence[StageCosts]) -> tuple[Routes, Routes]:
    """The ways to the next stages, and those back. ``costs`` are of each slice."""
    links: dict[tuple[int, int], Resource] = {}

    def route(stage: int, to: int) -> Route | None:
        if not 0 <= to < schedule.stages:
            return None
        source, target = schedule.placement[stage], schedule.placement[to]
        link = links.setdefault((source, target), Resource())
        return Route(to * schedule.passes, source, target, link, tuple(one.transfer_s[min(stage, to)] for one in costs))

    stages = range(schedule.stages)
    return tuple(route(at, at + 1) for at in stages), tuple(route(at, at - 1) for at in stages)
