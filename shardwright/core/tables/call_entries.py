"""The parameter entries of the calls that a runtime gathers, and whose gradients it sums, one after the other."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwright.core.model.graph import Graph
from shardwright.core.model.parameter_calls import ParameterCall


@dataclass(frozen=True, slots=True)
class CallEntries:
    """The entries of one call's parameters on one rank."""

    entries: int
    """All of them."""
    looked_up: int = 0
    """Those that its backward pass does not read."""
    trained: int = 0
    """The trained ones that no other call uses: their gradients are summed together."""
    is_single: bool = False
    """Whether these are one parameter."""
    tied: tuple[tuple[tuple[int, ...], int], ...] = ()
    """The trained ones that other calls use too, each by itself: the units that use it, and its entries."""


def entries_of(
    graph: Graph,
    calls: Sequence[ParameterCall],
    users: Mapping[int, tuple[int, ...]],
    entries: Callable[[int], int],
) -> tuple[CallEntries, ...]:
    """The entries of a unit's calls. ``users``: parameter → the units that use it; ``entries`` gives those of a
    parameter on one rank."""
    found, seen = [], set[int]()
    for call in calls:
        trained = [number for number in call.parameters if graph.parameters[number].trainable]
        alone = [number for number in trained if number not in call.tied]
        tied = [number for number in trained if number in call.tied and number not in seen]
        seen.update(tied)
        found.append(
            CallEntries(
                sum(map(entries, call.parameters)),
                sum(map(entries, call.looked_up)),
                sum(map(entries, alone)),
                len(alone) == 1,
                tuple((users[number], entries(number)) for number in tied),
            )
        )
    return tuple(found)
