"""Slices as stages of their own: the form in which a runtime that knows stages alone runs a schedule of slices."""

from dataclasses import dataclass

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule.actions import SHARDING, Action, Kind
from shardwright.core.schedule.schedule import Schedule


def stage_of_slice(stage: int, slice_: int, stages: int) -> int:
    """The number of the stage that one slice of a stage becomes, among ``stages`` of the schedule of slices: values
    flow from one slice to the next, and from stage to stage, always to a higher number."""
    return slice_ * stages + stage


@dataclass(frozen=True, slots=True)
class StageNames:
    """The names of stages of which slices may have become stages of their own.

    Args:
        stages: of the schedule of slices.
        slices: of each sequence; 1: there are none.
    """

    stages: int
    slices: int = 1

    def text(self, stage: int) -> str:
        """``stage 1``, or ``stage 1, slice 2``, for messages."""
        slice_, own = divmod(stage, self.stages)
        return f"stage {own}, slice {slice_}" if self.slices > 1 else f"stage {stage}"

    def action(self, action: Action) -> Action:
        """The action of the schedule of slices that one became."""
        if self.slices == 1 or action.kind is Kind.OVERLAP:
            return action
        slice_, own = divmod(action.stage, self.stages)
        return Action(own, action.kind, action.microbatch, (), slice_)


def as_stage(action: Action, stages: int) -> Action:
    """The same action of the stage that its slice becomes; one without a slice is given back as it is."""
    if action.kind is Kind.OVERLAP:
        forward, backward = action.parts
        return Action.overlap(as_stage(forward, stages), as_stage(backward, stages))
    if action.slice is None:
        return action
    return Action(stage_of_slice(action.stage, action.slice, stages), action.kind, action.microbatch)


def slices_as_stages(schedule: Schedule) -> Schedule:
    """The schedule with every slice of a stage as a stage of its own, on the same rank: the same actions in the same
    order. A schedule without slices is given back as it is.

    Raises ScheduleError for a schedule that gathers stages or reduces their gradients.
    """
    if schedule.slices == 1:
        return schedule
    stages = schedule.stages

    def moved(action: Action) -> Action:
        if action.kind in SHARDING:
            raise ScheduleError(
                f"{action.text} in a schedule of {schedule.slices} slices: parameters are gathered, and gradients "
                f"reduced, for whole stages; leave out gathered_stages and reduce_after, or take slices=1"
            )
        return as_stage(action, stages)

    return Schedule(
        schedule.name, schedule.arguments, schedule.ranks, stages * schedule.slices, schedule.microbatches,
        schedule.placement * schedule.slices, tuple(tuple(map(moved, order)) for order in schedule.table),
        schedule.credits,
    )  # fmt: skip
