"""Checks of physical constants, shared by every value in this folder."""

import math
from collections.abc import Mapping

from shardwright.core.errors import ClusterError

ORIGINS = ("data sheet", "paper", "price list", "measured", "fitted", "prior", "derived", "user")
"""The words with which the text of an origin begins, before its colon. A *prior* is a published or assumed value that a
fit may move."""


def positive(
    owner: str, constant: str, value: object, *, zero_allowed: bool = False, at_most: float = math.inf
) -> None:
    """Raise ClusterError unless ``value`` is finite, above zero (or zero, where allowed) and within a bound."""
    lowest = "at least 0" if zero_allowed else "above 0"
    bound = "" if math.isinf(at_most) else f" and at most {at_most:g}"
    expected = f"{owner}: {constant} must be a finite number {lowest}{bound}; given {value!r}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ClusterError(expected)
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero_allowed) or value > at_most:
        raise ClusterError(expected)


def whole(owner: str, constant: str, value: object, *, at_least: int) -> None:
    """Raise ClusterError unless ``value`` is an integer of at least ``at_least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ClusterError(f"{owner}: {constant} must be an integer of at least {at_least}; given {value!r}")


def origins(owner: str, given: Mapping[str, str]) -> None:
    """Raise ClusterError unless each origin begins with one of ``ORIGINS`` and goes on to say which."""
    for constant, origin in given.items():
        kind, _, detail = origin.partition(":")
        if kind not in ORIGINS or not detail.strip():
            raise ClusterError(
                f"{owner}: the origin of {constant} must read 'KIND: which one', KIND being one of "
                f"{', '.join(ORIGINS)}; given {origin!r}"
            )
