"""The search for a plan: its choices, the cost of each, and the reason why the others lost."""

from shardwright.core.search.search import make_plan

__all__ = ["make_plan"]
