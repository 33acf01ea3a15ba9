"""The factor of losses in float16, so that small gradients do not vanish: fixed, or found while training goes on.

A dynamic factor is halved where gradients overflow, in a step that is then skipped, and doubled after a number of steps
without overflow (Micikevicius et al., arXiv 1710.03740, section 3.2). The arguments, their names and their defaults are
those of SageMaker's model-parallel library.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.core.errors import ShardwrightError, nearest

_DYNAMIC = ("scale_factor", "scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis")


@dataclass(slots=True)
class LossScale:
    """The factor of the loss, step by step.

    Attributes:
        scale: the factor of the next step.
        is_dynamic: whether it follows the overflows.
        scale_factor: by how much it falls and rises.
        scale_window: the number of steps without overflow after which it rises.
        min_scale: where it stops falling.
        delayed_shift: the number of overflows that it takes to fall.
        consecutive_hysteresis: whether a step without overflow starts that count anew; else a rise does.

    Raises:
        ShardwrightError: a value that is not possible.
    """

    scale: float = 1.0
    is_dynamic: bool = False
    scale_factor: float = 2.0
    scale_window: int = 1000
    min_scale: float = 1.0
    delayed_shift: int = 1
    consecutive_hysteresis: bool = False
    steps: int = 0
    """The steps so far, skipped ones among them."""
    last_overflow: int = -1
    """The number of the last step that overflowed; -1 before the first."""
    hysteresis_left: int = 0
    """The overflows until the factor falls; 0 stands for ``delayed_shift`` before the first step."""

    def __post_init__(self) -> None:
        if not 0 < self.scale < float("inf"):
            raise ShardwrightError(f"a loss scale of {self.scale!r}: expected a finite number above 0")
        if not self.scale_factor > 1:
            raise ShardwrightError(f"scale_factor={self.scale_factor!r}: expected a number above 1")
        for name in ("scale_window", "delayed_shift"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ShardwrightError(f"{name}={getattr(self, name)!r}: expected a whole number of at least 1")
        if not self.min_scale > 0:
            raise ShardwrightError(f"min_scale={self.min_scale!r}: expected a number above 0")
        self.hysteresis_left = self.hysteresis_left or self.delayed_shift

    def update(self, overflowed: bool) -> None:
        """Note the end of a step."""
        if self.is_dynamic and overflowed:
            if self.hysteresis_left == 1:
                self.scale = max(self.scale / self.scale_factor, self.min_scale)
            else:
                self.hysteresis_left -= 1
            self.last_overflow = self.steps
        elif self.is_dynamic:
            rises = (self.steps - self.last_overflow) % self.scale_window == 0
            if rises:
                self.scale *= self.scale_factor
            if rises or self.consecutive_hysteresis:
                self.hysteresis_left = self.delayed_shift
        self.steps += 1


def loss_scale_of(static: float | None, dynamic: bool, given: Mapping[str, Any]) -> LossScale | None:
    """The scaling that SageMaker's arguments ask for: ``static_loss_scale``, ``dynamic_loss_scale`` and
    ``dynamic_loss_args``; None where they ask for nothing. Raises ShardwrightError."""
    if not dynamic:
        if given:
            raise ShardwrightError(
                f"{next(iter(given))} goes with dynamic_loss_scale=True: leave it out, or let the scale be dynamic"
            )
        return None if static is None or static == 1.0 else LossScale(float(static))
    if static not in (None, 1.0):
        raise ShardwrightError(f"static_loss_scale={static} and dynamic_loss_scale=True are both given: keep one")
    for name in given:
        if name not in (*_DYNAMIC, "init_scale"):
            raise ShardwrightError(f"a dynamic loss scale has no {name!r}: {nearest(name, (*_DYNAMIC, 'init_scale'))}")
    options = {name: value for name, value in given.items() if name != "init_scale"}
    return LossScale(float(given.get("init_scale", 2.0**32)), True, **options)
