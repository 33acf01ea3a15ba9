"""Pieces of a program over several meshes, divided into what is alike on all meshes and the rest.

An optimizer does the same to every layer, so what the stages' pieces have in common makes a piece of its own, of one
text, which is compiled once and loaded for each of them; compiling the layers again with every stage's embedding or
head is most of what an update's compilation takes.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import groupby
from typing import Any

from shardwright.backends.jax.program.cross_mesh_sums import ASSOCIATIVE
from shardwright.backends.jax.program.equations import Equation, FlatProgram, aval_of, needed


@dataclass(slots=True, eq=False)
class Piece:
    """The equations that one mesh runs between two exchanges, or a part of them."""

    level: int
    stage: int
    equations: list[Equation] = field(default_factory=list)
    arguments: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    """The small values that earlier pieces give."""
    results: tuple[int, ...] = ()
    """The positions of the program's outputs made here."""
    gives: list[int] = field(default_factory=list)
    """The small values that later pieces read."""
    run: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class _Component:
    """Equations that share arrays of the mesh's own with no others; one parameter's, as a rule."""

    equations: tuple[int, ...]
    """The positions of the equations among the piece's."""
    results: tuple[int, ...]
    gives: tuple[int, ...]
    kind: Hashable
    """A key that is equal for components that do the same to other arrays."""


def divided(
    flat: FlatProgram, pieces: Sequence[Piece], home: Mapping[int, int | None], spot: Callable[[int], Hashable]
) -> list[Piece]:
    """The pieces of every level, each divided into what all of the level's have in common, and the rest. Where the
    common part is less than half of some piece, or one has side effects, the level's pieces stay whole.

    home: the mesh of every value, None for those that any may make; spot: a function that gives the split of an
    argument.
    """
    alike = _Alike(flat, home)
    found: list[Piece] = []
    for _, members in groupby(pieces, key=lambda piece: piece.level):
        level = list(members)
        if any(equation.effects for piece in level for equation in piece.equations):
            found += level
            continue
        components = [alike.components(piece, spot) for piece in level]
        kinds = [Counter(component.kind for component in own) for own in components]
        common = reduce(lambda one, other: one & other, kinds)
        if len(level) == 1 or not common or 2 * common.total() < max(kind.total() for kind in kinds):
            found += level
            continue
        for piece, own in zip(level, components, strict=True):
            found += alike.divide(piece, own, list(common.elements()))
    return found


def summed_later(flat: FlatProgram, pieces: Sequence[Piece], limit: int) -> list[Piece]:
    """The pieces, with sums of scalars moved from those with results above ``limit`` bytes to those that read the sums:
    a norm of all gradients would else join the updates of all parameters of a mesh, and none would be alike on every
    mesh."""
    maker = {value: equation for equation in flat.equations for value in equation.outputs}
    moved: set[int] = set()

    def terms(value: int) -> tuple[list[int], list[int]]:
        """The values that a moved sum adds up, and the equations that do so."""
        if id(maker.get(value)) not in moved:
            return [value], []
        found = [terms(term) for term in maker[value].values]
        return [v for own, _ in found for v in own], [id(maker[value]), *(e for _, own in found for e in own)]

    left = []
    for piece in pieces:
        inside = {value for equation in piece.equations for value in equation.outputs}
        uses = Counter(value for equation in piece.equations for value in equation.values)
        uses.update(atom for r in piece.results if isinstance(atom := flat.outputs[r], int))
        updates = any(isinstance(a := flat.outputs[r], int) and not flat.is_small(a, limit) for r in piece.results)
        pending, gives = (list(piece.gives), []) if updates else ([], piece.gives)
        while pending:
            value = pending.pop()
            equation = maker.get(value)
            if (
                equation is not None
                and not uses[value]
                and _adds(flat, equation)
                and inside.issuperset(equation.values)
            ):
                moved.add(id(equation))
                gives = [given for given in gives if given != value]  # where it was needed here until now
                uses.subtract(equation.values)
                pending += equation.values
            elif value not in gives:
                gives.append(value)
        kept = [equation for equation in piece.equations if id(equation) not in moved]
        left.append(replace(piece, equations=kept, gives=gives))
    found = []
    for piece in left:
        read = [terms(value) for value in piece.reads]
        chosen = {id(equation) for equation in piece.equations}.union(*(equations for _, equations in read))
        reads = tuple(dict.fromkeys(value for values, _ in read for value in values))
        found.append(replace(piece, equations=[e for e in flat.equations if id(e) in chosen], reads=reads))
    return found


def _adds(flat: FlatProgram, equation: Equation) -> bool:
    return equation.primitive.name in ASSOCIATIVE and all(
        flat.avals[value].shape == () for value in (*equation.values, *equation.outputs)
    )


def prepared(flat: FlatProgram, pieces: Sequence[Piece], home: Mapping[int, int | None], limit: int) -> list[Piece]:
    """The pieces, each that reads what others give with a small one before it. The small one makes the scalars that
    follow from those values alone (a norm, the factor of clipping). Otherwise the compiler would make them again in the
    kernel of every parameter.

    limit: the most bytes of a value that is handed on.
    """
    found = []
    for piece in pieces:
        known = {*piece.reads, *flat.constants, *(value for value in piece.arguments if home[value] is None)}
        first = []
        for equation in piece.equations:
            small = all(flat.is_small(v, limit) and v not in piece.gives for v in equation.outputs)
            if piece.reads and small and not equation.effects and known.issuperset(equation.values):
                first.append(equation)
                known.update(equation.outputs)
        before = {id(equation) for equation in first}
        made = {value for equation in first for value in equation.outputs}
        after = [equation for equation in piece.equations if id(equation) not in before]
        given = dict.fromkeys(value for e in after for value in e.values if value in made)
        if not given:
            found.append(replace(piece, level=2 * piece.level + 1))
            continue
        ends = [atom for r in piece.results if isinstance(atom := flat.outputs[r], int)]
        again = {id(equation) for equation in needed(first, ends)}
        rest = [e for e in piece.equations if id(e) not in before or id(e) in again]
        source = replace(piece, reads=(*piece.reads, *given))
        found.append(_reading(flat, source, 2 * piece.level, needed(first, given), (), tuple(given)))
        found.append(_reading(flat, source, 2 * piece.level + 1, rest, piece.results, piece.gives))
    return sorted(found, key=lambda piece: (piece.level, piece.stage))


def _reading(
    flat: FlatProgram,
    piece: Piece,
    level: int,
    equations: Sequence[Equation],
    results: Sequence[int],
    gives: Sequence[int],
) -> Piece:
    """A piece of some of a piece's equations, with the arguments and values that they and the results read."""
    made = {value for e in equations for value in e.outputs}
    ends = [*(atom for r in results if isinstance(atom := flat.outputs[r], int)), *gives]
    read = dict.fromkeys(value for value in (*(v for e in equations for v in e.values), *ends) if value not in made)
    arguments = tuple(value for value in piece.arguments if value in read)
    reads = tuple(value for value in piece.reads if value in read)
    return Piece(level, piece.stage, list(equations), arguments, reads, tuple(results), list(gives))


class _Alike:
    def __init__(self, flat: FlatProgram, home: Mapping[int, int | None]) -> None:
        self.flat, self.home = flat, home
        self.seen: dict[Hashable, int] = {}
        self.number: dict[int, int] = {}
        """The values that any mesh may make → the same number for those made in the same way."""
        for equation in flat.equations:
            if equation.outputs and home[equation.outputs[0]] is None:
                kind = _kind(flat, equation, [self._of(atom) for atom in equation.inputs])
                for position, value in enumerate(equation.outputs):
                    self.number[value] = self.seen.setdefault((kind, position), len(self.seen))

    def _of(self, atom: Any) -> Hashable:
        """A key of an operand from outside of a component."""
        if not isinstance(atom, int):
            return (str(atom.val), atom.aval)
        return ("made", self.number[atom]) if atom in self.number else ("value", atom)

    def components(self, piece: Piece, spot: Callable[[int], Hashable]) -> list[_Component]:
        """The components of a piece, in the order of the program."""
        group = {value: [value] for value in piece.arguments if self.home[value] is not None}
        for equation in piece.equations:
            own = [group[value] for value in equation.values if value in group]
            if own:
                merged = own[0]
                for other in own[1:]:
                    if other is not merged:
                        merged += other
                        group.update(dict.fromkeys(other, merged))
                merged += equation.outputs
                group.update(dict.fromkeys(equation.outputs, merged))
        members = {id(values): values for values in group.values()}
        parts: dict[int, tuple[list[int], list[int], list[int]]] = {key: ([], [], []) for key in members}
        for index, equation in enumerate(piece.equations):
            if equation.outputs[0] in group:
                parts[id(group[equation.outputs[0]])][0].append(index)
        for result in piece.results:
            atom = self.flat.outputs[result]
            if isinstance(atom, int) and atom in group:
                parts[id(group[atom])][1].append(result)
        for value in piece.gives:
            if value in group:
                parts[id(group[value])][2].append(value)
        return [self._component(piece, *parts[key], values, spot) for key, values in members.items()]

    def _component(
        self,
        piece: Piece,
        equations: list[int],
        results: list[int],
        gives: list[int],
        members: list[int],
        spot: Callable[[int], Hashable],
    ) -> _Component:
        inside = set(members)
        local: dict[int, int] = {}
        kind: list[Hashable] = []
        for index in equations:
            operands: list[Hashable] = []
            for atom in piece.equations[index].inputs:
                if not isinstance(atom, int) or atom not in inside:
                    operands.append(self._of(atom))
                    continue
                if atom not in local:
                    kind.append((self.flat.avals[atom], spot(atom)))
                operands.append(local.setdefault(atom, len(local)))
            local.update((value, len(local) + n) for n, value in enumerate(piece.equations[index].outputs))
            kind.append(_kind(self.flat, piece.equations[index], operands))
        made: list[Any] = [self.flat.outputs[r] for r in results]
        kind.append(tuple(local.get(value) for value in made))
        kind.append(tuple(local.get(value) for value in gives))
        return _Component(tuple(equations), tuple(results), tuple(gives), tuple(kind))

    def divide(self, piece: Piece, components: Sequence[_Component], order: Sequence[Hashable]) -> list[Piece]:
        """A piece as two: components of the given kinds in that order, and the rest, where there is any."""
        of_kind: dict[Hashable, list[_Component]] = {}
        for component in reversed(components):
            of_kind.setdefault(component.kind, []).append(component)
        first = [of_kind[kind].pop() for kind in order]
        own = [component for component in components if component in of_kind[component.kind]]
        results, gives = ({x for c in first for x in getattr(c, name)} for name in ("results", "gives"))
        parts = [self._part(piece, first, [r for c in first for r in c.results], [v for c in first for v in c.gives])]
        others = [r for r in piece.results if r not in results], [v for v in piece.gives if v not in gives]
        if own or any(others):
            parts.append(self._part(piece, own, *others))
        return parts

    def _part(
        self, piece: Piece, components: Sequence[_Component], results: Sequence[int], gives: Sequence[int]
    ) -> Piece:
        """A piece of some components, with what any mesh may make that they and the given results read."""
        maker = {value: index for index, e in enumerate(piece.equations) for value in e.outputs}
        chosen: dict[int, None] = {}

        def take(indices: Sequence[int]) -> None:
            missing, wanted = list(indices), set(indices)
            while missing:
                for value in piece.equations[missing.pop()].values:
                    index = maker.get(value)
                    if index is not None and index not in wanted:
                        wanted.add(index)
                        missing.append(index)
            chosen.update(dict.fromkeys(sorted(wanted)))

        for component in components:
            take(component.equations)
        atoms = [self.flat.outputs[r] for r in results]
        ends = [*(atom for atom in atoms if isinstance(atom, int)), *gives]
        take([maker[value] for value in ends if value in maker])
        return _reading(self.flat, piece, piece.level, [piece.equations[i] for i in sorted(chosen)], results, gives)


def _kind(flat: FlatProgram, equation: Equation, operands: Sequence[Hashable]) -> Hashable:
    params = str(sorted(equation.params.items(), key=lambda item: item[0])) if equation.params else ""
    return equation.primitive, params, tuple(operands), tuple(aval_of(flat, value) for value in equation.outputs)
