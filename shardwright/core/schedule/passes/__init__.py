"""Passes: each takes a schedule and returns another that does the same work."""
