"""Figures that hold and figures that do not, for the judge of each benchmark."""

from collections.abc import Callable

from claims import Claims

NAN = float("nan")
Judged = dict[str, tuple[Callable[[], Claims], list[Callable[[], Claims]]]]
"""For each judge figures that hold, and some of which each breaks one."""
