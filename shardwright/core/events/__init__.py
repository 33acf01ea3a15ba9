"""The event engine: resources, what holds them and for how long, and the policies that are asked when they are free."""

from shardwright.core.events.engine import Engine, Policy
from shardwright.core.events.log import Log
from shardwright.core.events.resources import NOTHING, Memory, Resource
from shardwright.core.events.work import Work

__all__ = ["NOTHING", "Engine", "Log", "Memory", "Policy", "Resource", "Work"]
