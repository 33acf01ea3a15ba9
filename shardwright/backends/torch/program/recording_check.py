"""The comparison of recordings that have stand-ins for changing numbers with recordings that have none.

Code in C takes a stand-in for the number that it nearly is, and its result is no expression: the recording would then
be right at the values of one step alone. So it must give, at the values of a recording without stand-ins, exactly the
program of that. Where it does not, the values are recorded anew whenever they change.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwright.backends.torch.program.program import ConstantRef, Leaf, Literal, NumberRef, Program, Step, name_of
from shardwright.backends.torch.program.python_numbers import Expression, Place
from shardwright.backends.torch.program.python_places import MISSING, PLAIN, Holder, same
from shardwright.backends.torch.program.refusals import computes_with_a_clock
from shardwright.backends.torch.program.step_recorder import StepRecorder

_ALIKE = ("path", "occurrence", "outputs", "grad_enabled", "autocast", "renewals", "random")
Recorded = tuple[Program, StepRecorder]
Places = Sequence[tuple[Holder, Any]]
Record = Callable[[Places, Sequence[Any] | None], Recorded]


@dataclass(slots=True)
class Varying:
    """The Python values that changed between the recordings of one kind of microbatch.

    Attributes:
        places: those that stand-ins are tried for.
        refused: those for which stand-ins do not work.
        plain: the last recording without stand-ins.
    """

    places: dict[Place, tuple[Holder, Any]] = field(default_factory=dict)
    refused: set[Place] = field(default_factory=set)
    plain: Program | None = None

    def add(self, places: Places) -> None:
        """Add places whose values changed."""
        for holder, key in places:
            place = id(holder.target), key
            if place not in self.refused and _can_vary(holder.value(key)):
                self.places[place] = holder, key

    def refuse(self) -> None:
        """Refuse all places that have stand-ins now: these do not work."""
        self.refused |= set(self.places)
        self.places.clear()


def record_varying(record: Record, varying: Varying) -> Recorded:
    """A recording for the present Python values, and for others where that is certain.

    Args:
        record: makes one with stand-ins in some places, and where clocks are read, unless it is given their readings.

    Raises:
        CaptureError: as `StepRecorder.record` does, without stand-ins.
        UnrecordableError, a CaptureError: the readings of clocks are not followed into the program.
    """
    found = _tried(record, varying)
    if found is not None and varying.plain is not None and alike(found[0], varying.plain):
        return found
    live = found or record((), None)
    clocks = live[0].python.clocks
    plain = record((), tuple(clocks.values())) if clocks or found is not None else live
    varying.plain = plain[0]
    if found is not None and alike(found[0], plain[0]):
        return found
    if varying.places:
        varying.refuse()
    if clocks and found is not None:
        live = record((), None)
        plain = record((), tuple(live[0].python.clocks.values()))
        varying.plain = plain[0]
    if clocks and not alike(live[0], plain[0]):
        raise computes_with_a_clock(live[1].model, clocks)
    plain, unvaried = (live, plain) if clocks else (plain, plain)
    written = [(effect.holder, effect.key) for effect in plain[0].python.effects if _can_vary(effect.value)]
    varying.add(written)
    found = _tried(record, varying) if written else None
    if found is None:
        return plain
    if alike(found[0], unvaried[0]):
        return found
    varying.refuse()
    return plain


def _tried(record: Record, varying: Varying) -> Recorded | None:
    """A recording with stand-ins; None where there is none, or code that ran does not take them."""
    if not varying.places:
        return None
    try:
        return record(tuple(varying.places.values()), None)
    except Exception:  # of the user's code, which was given what is not quite a number
        return None


def _can_vary(value: Any) -> bool:
    return type(value) in (int, float) or isinstance(value, torch.Tensor)


def alike(varying: Program, plain: Program) -> bool:
    """Whether a recording with stand-ins equals the one without, at the values of the latter."""
    known: dict[int, Any] = {}
    at = dict(plain.python.clocks)
    at |= {(id(g.holder.target), k): v for g in plain.python.guarded for k, v in zip(g.keys, g.values, strict=True)}

    def value(item: Any) -> Any:
        return item.value(known, at) if isinstance(item, Expression) else item

    def same_leaf(one: Leaf, other: Leaf) -> bool:
        if isinstance(one, NumberRef):
            given = other.tensor if isinstance(other, ConstantRef) else getattr(other, "value", MISSING)
            return same(value(one.expression), given)
        if isinstance(one, Literal) and isinstance(other, Literal):
            if isinstance(one.value, PLAIN) or isinstance(other.value, PLAIN):
                return same(one.value, other.value)
            return type(one.value) is type(other.value) and _name(one.value) == _name(other.value)
        if isinstance(one, ConstantRef) and isinstance(other, ConstantRef):
            return one.tensor is other.tensor or (
                one.tensor.dtype == other.tensor.dtype and torch.equal(one.tensor, other.tensor)
            )
        return one == other

    def same_step(one: Step, other: Step) -> bool:
        return (
            all(getattr(one, name) == getattr(other, name) for name in _ALIKE)
            and _name(one.function) == _name(other.function)
            and one.arguments.spec == other.arguments.spec
            and all(map(same_leaf, one.arguments.leaves, other.arguments.leaves))
        )  # fmt: skip

    if len(varying.steps) != len(plain.steps) or len(varying.losses) != len(plain.losses):
        return False
    if varying.result.spec != plain.result.spec or len(varying.guards) != len(plain.guards):
        return False
    effects, wanted = ({e.place: e.value for e in p.python.effects} for p in (varying, plain))
    try:
        return (
            all(same(value(expression), given) for expression, given in varying.python.conditions)
            and all(map(same_step, varying.steps, plain.steps))
            and all(map(same_leaf, varying.result.leaves, plain.result.leaves))
            and all(
                one.value == other.value
                and (
                    one.weight is other.weight or (one.weight and other.weight and same_leaf(one.weight, other.weight))
                )
                for one, other in zip(varying.losses, plain.losses, strict=True)
            )
            and all(str(one.found) == str(other.found) for one, other in zip(varying.guards, plain.guards, strict=True))
            and effects.keys() == wanted.keys()
            and all(same(value(effects[place]), wanted[place]) for place in wanted)
        )
    except Exception:  # of expressions, at values for which they were not recorded
        return False


def _name(function: Any) -> str:
    return "" if function is None else name_of(function)
