"""The training that a plan is for: how long it takes and what it costs, and the step that a deadline or budget asks."""

import math
import re
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from shardwright.core.cluster.cluster import Cluster
from shardwright.core.errors import PlanError
from shardwright.core.values.fields import Amount, Seconds

Dollars = Annotated[float, Ge(0), Le(1e15)]
DAY_S = 86400.0
UNITS_S = {"min": 60.0, "h": 3600.0, "d": DAY_S, "day": DAY_S, "days": DAY_S, "w": 7 * DAY_S, "week": 7 * DAY_S,
           "weeks": 7 * DAY_S}  # fmt: skip
"""The units of a duration, in seconds."""
MOST_S = 1e12
"""The longest duration, that of `Seconds`."""


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """What was said about the training, and the price of all devices of the plan together."""

    tokens: Annotated[float, Ge(0), Le(1e30)] = 0.0
    """The tokens to train on; 0: not said."""
    samples: Amount = 0
    """The samples to train on; 0: not said."""
    deadline_s: Seconds | None = None
    budget_usd: Dollars | None = None
    usd_per_hour: Dollars | None = None
    """The price of all devices together, in US dollars; None: not known."""

    @property
    def is_sized(self) -> bool:
        """Whether the length of the training was said."""
        return bool(self.tokens or self.samples)

    def steps(self, batch: int, tokens_per_step: int) -> int:
        """The steps of the training, the last one counted whole. Raises PlanError for tokens of a batch without."""
        if self.samples:
            return math.ceil(self.samples / batch)
        if not tokens_per_step:
            raise PlanError(
                f"tokens={self.tokens:g}: the model takes no tokens (no input of whole numbers, samples × positions): "
                f"give samples= instead"
            )
        return math.ceil(self.tokens / tokens_per_step)

    def longest_step_s(self, batch: int, tokens_per_step: int) -> float:
        """Seconds that a step takes at most if the training is to meet its deadline and its budget."""
        least = math.inf
        if self.deadline_s is None and self.budget_usd is None:
            return least
        steps = self.steps(batch, tokens_per_step)
        if self.deadline_s is not None:
            least = self.deadline_s / steps
        if self.budget_usd is not None and self.usd_per_hour:
            least = min(least, self.budget_usd / self.usd_per_hour * 3600 / steps)
        return least

    def taking(self, step_s: float, batch: int, tokens_per_step: int) -> "Training | None":
        """The whole training at so many seconds a step; None where its length was not said."""
        if not self.is_sized:
            return None
        steps = self.steps(batch, tokens_per_step)
        seconds = steps * step_s
        usd = None if self.usd_per_hour is None else self.usd_per_hour * seconds / 3600
        return Training(steps, seconds / DAY_S, usd)


UNSAID = TrainingRun()
"""Nothing was said about the training."""


@dataclass(frozen=True, slots=True)
class Training:
    """A whole training run."""

    steps: int
    days: float
    usd: float | None
    """What it costs, in US dollars; None where a price is not known."""

    @property
    def length(self) -> str:
        """The days in words, hours where it is less than one."""
        return days_text(self.days)

    def __str__(self) -> str:
        cost = "price not known" if self.usd is None else f"{self.usd:,.0f} USD"
        return f"{self.steps:,} steps: {self.length}, {cost}"


def days_text(days: float) -> str:
    """Days in words, hours where it is less than one."""
    if days < 1:
        return "1 hour" if days * 24 == 1 else f"{24 * days:.3g} hours"
    return "1 day" if days == 1 else f"{days:.3g} days"


def usd_per_hour(cluster: Cluster, price: float | None = None) -> float | None:
    """The price of all devices of a cluster per hour, at ``price`` for each or at their own; None where one has no
    price."""
    total = 0.0
    for group in cluster.groups:
        own = group.device.price_usd_per_hour if price is None else price
        if own is None:
            return None
        total += own * group.devices
    return total


def duration_s(given: float | str, name: str) -> float:
    """Seconds of a duration: a number of days, or a number with a unit, as "36h", "10d", "2w".

    Raises PlanError for anything else, for what is not above 0 and for more than any training takes.
    """
    expected = f'expected days, as 10, or a duration, as "36h", "10d" or "2w" ({", ".join(UNITS_S)})'
    seconds: float | None = None
    if isinstance(given, str):
        read = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]*)\s*", given.lower())
        if read is not None and (read[2] or "d") in UNITS_S:
            seconds = float(read[1]) * UNITS_S[read[2] or "d"]
    elif isinstance(given, int | float) and not isinstance(given, bool) and given <= MOST_S:
        seconds = given * DAY_S
    if seconds is None or not 0 < seconds <= MOST_S:
        raise PlanError(f"{name}={given!r}: {expected}, above 0")
    return seconds
