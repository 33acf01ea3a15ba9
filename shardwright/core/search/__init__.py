"""The search for a plan: what may be chosen, what each choice costs, and why the others lost."""

from shardwright.core.search.find import Progress, make_plan

__all__ = ["Progress", "make_plan"]
