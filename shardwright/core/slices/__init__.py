"""Slices of a sequence: how long each is, and what it costs."""
