"""The search for a plan: what may be chosen, what each choice costs, and why the others lost."""

from shardwright.core.search.search import make_plan

__all__ = ["make_plan"]
