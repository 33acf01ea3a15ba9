"""Pipeline schedules: actions, families, passes, checks, text and files."""

from shardwright.core.schedule.actions import Action, Kind
from shardwright.core.schedule.costs import StageCosts
from shardwright.core.schedule.schedule import AUTO, Schedule, schedule_names

__all__ = ["AUTO", "Action", "Kind", "Schedule", "StageCosts", "schedule_names"]
