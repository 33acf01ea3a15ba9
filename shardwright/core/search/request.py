"""The request of a user to the search."""

from dataclasses import dataclass, fields
from typing import Any, Self

from shardwright.core.capabilities import Capabilities
from shardwright.core.errors import PlanError
from shardwright.core.layout.pinned_layout import Pin
from shardwright.core.plan.decision import Decision
from shardwright.core.search.options import Options
from shardwright.core.values.fields import fields_of

NUMBERS = (
    "batch", "precision", "optimizer", "loss_scope", "gradient_precision", "like", "pins", "runtimes", "left_free",
)  # fmt: skip
"""The fields of a request that are no choice of the plan's form."""

KEPT_OTHERWISE = {"layouts", "frameworks", "devices", "offload", "slices"}
"""The options that a plan has otherwise: as pins, runtimes, its cluster, units and lengths that were chosen for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Options):
    """A request for a plan of one captured model."""

    pins: tuple[Pin, ...] = ()
    """Parameters whose layouts are pinned, by ``layouts`` and by the model itself (`core.rules.pins.pins_of`)."""
    runtimes: tuple[Capabilities, ...] = ()
    """The runtimes that must all be able to carry the plan out; empty for that of the captured graph. Pinned options
    are planned all the same."""
    left_free: float = 0.0
    """The share of each device's memory that plans leave free: the headroom that was given, or that which memory's
    error asks for."""

    sums_as_level: bool = False
    """Whether gradients are summed when the shard level says so, although ``reduce_after`` is None, which else means
    that it is searched."""

    @property
    def beside_decision(self) -> dict[str, Any]:
        """The options that were given, are no part of a decision and are not kept in another form, for counting a plan
        anew."""
        return {name: value for name, value in self.given.items() if name in beside_decision()}

    def unpinned(self, **pins: Any) -> Self:
        """The same batch, optimizer, layouts and kinds of numbers, for the same runtimes, with no other pins than
        ``pins``."""
        return type(self)(**{name: getattr(self, name) for name in NUMBERS}, **pins)


def beside_decision() -> list[str]:
    """The options of `plan()` that are no part of a decision and are not kept in another form."""
    elsewhere = {each.name for each in fields(Decision)} | KEPT_OTHERWISE
    return [each.name for each in fields_of(Options) if each.option is not None and each.name not in elsewhere]


def request_for(options: Options, pins: tuple[Pin, ...], runtimes: tuple[Capabilities, ...]) -> Request:
    """The request for one model: the options with the pinned layouts and the runtimes that must carry the plan out.

    Raises PlanError for products in fp8 that one of the runtimes does not compute.
    """
    for runtime in runtimes:
        if (lack := runtime.lack_of_precision(options.precision or "")) is not None:
            raise PlanError(lack)
    asked = {each.name: getattr(options, each.name) for each in fields(Options)}
    return Request(**asked, pins=pins, runtimes=runtimes)
