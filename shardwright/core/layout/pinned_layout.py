"""The layout of one parameter as somebody asked for it."""

from dataclasses import dataclass

from shardwright.core.layout.placements import Layout, Placement, Replicate


@dataclass(frozen=True, slots=True)
class Pin:
    """The layout of one parameter on the axes that ``layout`` names and on those in ``whole``, and who asked for it."""

    name: str
    layout: Layout
    source: str
    whole: tuple[str, ...] = ()
    """The axes on which the parameter is replicated on purpose."""

    def on(self, axis: str) -> Placement | None:
        """The placement on an axis; None where the pin leaves it free."""
        placement = self.layout.on(axis)
        return placement if not isinstance(placement, Replicate) or axis in self.whole else None
