"""The parameter entries of the calls that a runtime gathers, and whose gradients it sums, one after the other."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

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
    last: int = 0
    """The place of the last of these in the model's order."""
    tied: tuple[tuple[tuple[int, ...], int, int], ...] = ()
    """The trained ones that other calls use too, each by itself: the units that use it, its entries, and its place in
    the model's order."""


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
                max(alone, default=0),
                tuple((users[number], entries(number), number) for number in tied),
            )
        )
    return tuple(found)


def kinds_of(units: Sequence[int], calls: Sequence[Sequence[CallEntries]]) -> tuple[int | None, ...]:
    """A number for each unit, the same for units that are the same in ``units`` and whose calls use as many parameters;
    None where other units use one of these too, and for all units where calls follow each other in another order than
    their parameters."""
    places = [call.last for own in calls for call in own if call.trained]
    if not calls or places != sorted(places):
        return (None,) * len(units)
    numbers: dict[object, int] = {}
    found: list[int | None] = []
    for unit, own in zip(units, calls, strict=True):
        kind = unit, tuple(replace(call, last=0) for call in own)
        is_apart = not any(call.tied for call in own)
        found.append(numbers.setdefault(kind, len(numbers)) if is_apart else None)
    return tuple(found)


def updated_of(
    graph: Graph,
    calls: Iterable[tuple[int, ParameterCall]],
    users: Mapping[int, tuple[int, ...]],
    entries: Callable[[int, int], int],
) -> tuple[tuple[int, tuple[int, ...], int], ...]:
    """The trained parameters in the order in which the model names them: the entries of each on one rank, the units
    that use it, and the entries of all that are divided together with it. ``calls`` are those of every unit, with the
    unit; ``entries`` gives those of a parameter that a unit uses."""
    trained = [number for number in sorted(users) if graph.parameters[number].trainable]
    divided: dict[int, int] = {}
    for unit, call in calls:
        alone = [n for n in call.parameters if graph.parameters[n].trainable and n not in call.tied]
        divided |= dict.fromkeys(alone, sum(entries(n, unit) for n in alone))
    sizes = {number: entries(number, users[number][0]) for number in trained}
    return tuple((sizes[n], users[n], divided.get(n, sizes[n])) for n in trained)
