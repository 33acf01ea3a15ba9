"""The ops of a model's units on the tensor axis, as a plan keeps them: folded, and independent of one capture.

Units that run the same ops in the same way share a form. A form names ops and tensors by their places in the unit, so
that any capture of the same ops can be laid out by it.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwright.core.errors import LayoutError, PlanError
from shardwright.core.layout.placements import Layout, Placement, placement_of
from shardwright.core.layout.signature import Signature
from shardwright.core.layout.unit_layouts import Link, RealisedUnit
from shardwright.core.model.fold import Unit
from shardwright.core.model.graph import Graph
from shardwright.core.values.fields import Amount, Count, Text


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor of a unit and its placement: ``"3: S0"``."""

    tensor: int
    place: Placement

    def __str__(self) -> str:
        return f"{self.tensor}: {self.place}"

    @classmethod
    def parse(cls, text: str) -> "Placed":
        """The value of a text. Raises LayoutError for any other text."""
        tensor, colon, place = text.partition(": ")
        if not (colon and tensor.isascii() and tensor.isdigit()):
            raise LayoutError(f"{text!r}: expected a tensor of the unit and how it lies, as '3: S0'")
        return cls(int(tensor), placement_of(place))


_CONVERSION = re.compile(
    r"(?P<tensor>\d{1,9}) (?:to (?P<reader>\d{1,9})\.(?P<position>\d{1,9})|(?P<end>to all|out)): "
    r"(?P<before>\S+) → (?P<after>\S+)(?:; (?P<gradient_before>\S+) → (?P<gradient_after>\S+))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Conversion:
    """A link of a unit as text: ``"5 to 7.1: S0 → R; P → R"`` is tensor 5 on its way to operand 1 of op 7 and, after
    the semicolon, its gradient on the way back. ``to all``: to all readers at once; ``out``: to later units."""

    tensor: int
    reader: int | None
    position: int
    value: tuple[Placement, Placement]
    gradient: tuple[Placement, Placement] | None
    leaves: bool

    def __str__(self) -> str:
        to = "out" if self.leaves else "to all" if self.reader is None else f"to {self.reader}.{self.position}"
        back = "" if self.gradient is None else f"; {self.gradient[0]} → {self.gradient[1]}"
        return f"{self.tensor} {to}: {self.value[0]} → {self.value[1]}{back}"

    @classmethod
    def parse(cls, text: str) -> "Conversion":
        """The value of a text. Raises LayoutError for any other text."""
        found = _CONVERSION.fullmatch(text)
        if found is None:
            raise LayoutError(f"{text!r}: expected a conversion, as '5 to 7.1: S0 → R; P → R'")
        gradient = found["gradient_before"], found["gradient_after"]
        return cls(
            int(found["tensor"]),
            None if found["reader"] is None else int(found["reader"]),
            int(found["position"] or 0),
            (placement_of(found["before"]), placement_of(found["after"])),
            None if gradient[0] is None else (placement_of(gradient[0]), placement_of(gradient[1])),
            found["end"] == "out",
        )


@dataclass(frozen=True, slots=True)
class UnitProgram:
    """One form: the placements that every op of a unit reads and makes, and the conversions between them."""

    ops: tuple[Signature, ...]
    conversions: tuple[Conversion, ...]
    parameters: tuple[Placed, ...]
    enters: tuple[Placed, ...]
    leaves: tuple[Placed, ...]
    form: Text
    """A digest of the ops and their wiring."""

    @classmethod
    def of(cls, graph: Graph, unit: Unit, found: RealisedUnit, form: str) -> "UnitProgram":
        """The form of a unit whose layouts, on one axis, are known."""
        (axis, _), places = found.axes[0], {t: i for i, t in enumerate(unit_tensors(graph, unit))}

        def placed(lies: Sequence[tuple[int, Layout]]) -> tuple[Placed, ...]:
            return tuple(Placed(places[tensor], layout.on(axis)) for tensor, layout in lies)

        conversions = tuple(
            Conversion(
                places[link.tensor],
                None if link.reader is None else link.reader - found.first_op,
                link.position,
                (link.before[0], link.after[0]),
                (link.gradient_before[0], link.gradient_after[0]) if link.flows else None,
                link.leaves,
            )
            for link in found.links
        )
        return cls(
            tuple(signatures[0] for signatures in found.signatures),
            conversions,
            placed(found.parameters),
            placed(found.enters),
            placed(found.leaves),
            form,
        )

    def on(self, graph: Graph, unit: Unit, axis: str, ranks: int) -> RealisedUnit:
        """The layouts of a unit that has this form. Raises PlanError for a unit with other ops or tensors."""
        tensors = unit_tensors(graph, unit)
        if len(self.ops) != unit.end_op - unit.first_op:
            raise PlanError(f"unit {unit.index} runs {unit.end_op - unit.first_op} ops, and its form {len(self.ops)}")
        named = [c.tensor for c in self.conversions] + [p.tensor for p in self.parameters + self.enters + self.leaves]
        readers = [c.reader for c in self.conversions if c.reader is not None]
        if max(named, default=0) >= len(tensors) or max(readers, default=0) >= len(self.ops):
            raise PlanError(f"the form of unit {unit.index} names tensors or ops that the unit lacks")
        held = {placed.tensor for placed in self.parameters}

        def lies(placed: Sequence[Placed]) -> tuple[tuple[int, Layout], ...]:
            return tuple((tensors[p.tensor], Layout.of({axis: p.place})) for p in placed)

        links = tuple(
            Link(
                tensors[c.tensor],
                None if c.reader is None else unit.first_op + c.reader,
                c.position,
                (c.value[0],),
                (c.value[1],),
                () if c.gradient is None else (c.gradient[0],),
                () if c.gradient is None else (c.gradient[1],),
                c.gradient is not None,
                c.tensor in held,
                c.leaves,
            )
            for c in self.conversions
        )
        return RealisedUnit(
            unit.index,
            unit.first_op,
            ((axis, ranks),),
            tuple((signature,) for signature in self.ops),
            links,
            lies(self.parameters),
            lies(self.enters),
            lies(self.leaves),
        )


@dataclass(frozen=True, slots=True)
class Program:
    """The program of a model on the tensor axis in one framework. Raises PlanError for a unit whose form is missing."""

    ranks: Count
    sequence_parallel: bool
    units: tuple[Amount, ...]
    """The index of each unit's form."""
    forms: tuple[UnitProgram, ...]
    digest: Text = ""
    """A short hash of all other fields, computed by default. Raises PlanError where another hash is given."""

    def __post_init__(self) -> None:
        if any(form >= len(self.forms) for form in self.units):
            raise PlanError(f"units: names a form that the {len(self.forms)} in forms lack")
        said = (self.ranks, self.sequence_parallel, self.units, self.forms)
        own = hashlib.sha256(repr(said).encode()).hexdigest()[:16]
        if self.digest not in ("", own):
            raise PlanError(
                f"digest: {self.digest!r} does not belong to this program ({own!r}): it was edited; restore it, or "
                f"make it anew with plan.rebind(graph)"
            )
        object.__setattr__(self, "digest", own)

    def of_unit(self, unit: int) -> UnitProgram:
        """The form of a unit."""
        return self.forms[self.units[unit]]


def unit_tensors(graph: Graph, unit: Unit) -> tuple[int, ...]:
    """The tensors of a unit in the order in which its ops first read or make them."""
    found: dict[int, None] = {}
    for op in graph.ops[unit.first_op : unit.end_op]:
        found.update(dict.fromkeys((*op.inputs, *op.outputs)))
    return tuple(found)


AS_TEXT: dict[type, Callable[[str], object]] = {
    Signature: Signature.parse,
    Placed: Placed.parse,
    Conversion: Conversion.parse,
}
"""The functions that read values back that a plan file holds as text."""
