"""A flat program over several meshes: equations on values of one mesh run there, and scalars cross between meshes.

The program is the optimizer's: nearly everything in it concerns one parameter, and a norm of all of them is made of
scalars. Equations of one mesh whose operands are there form one compiled piece; scalars made of several meshes' scalars
are made on each. Between pieces only small values are handed on; others are made again, so that nothing is held twice.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from shardwright.backends.jax.capture.tree import abstract
from shardwright.backends.jax.machine.process_transfers import absent, is_here, several_processes
from shardwright.backends.jax.pipeline.compilation import Compiler, lower
from shardwright.backends.jax.pipeline.deduplication import signature
from shardwright.backends.jax.pipeline.transfers import Route
from shardwright.backends.jax.program.cross_mesh_sums import regrouped
from shardwright.backends.jax.program.equations import Equation, FlatProgram, aval_of, evaluate, value_of
from shardwright.backends.jax.program.mesh_shards import Piece, divided, prepared, summed_later
from shardwright.core.errors import PlanError

SCALAR_BYTES = 16
"""The size up to which values are handed on from one piece of a mesh to its next; larger ones are made again. Up to
this size, values that follow from several meshes' are made on every mesh rather than on one."""
_Pack = tuple[int, str, int]
"""A key of packed values: the piece that gives them, their dtype, and the mesh that they are on."""


@dataclass(frozen=True, slots=True)
class Place:
    """The stage and sharding of an array, with ``rows`` for a piece of a stack."""

    stage: int
    sharding: NamedSharding
    rows: tuple[int, int] | None = None


class PlacedProgram:
    """The compiled pieces of a program, and the order to run them in."""

    def __init__(
        self,
        flat: FlatProgram,
        arguments: Sequence[Place],
        shared: Sequence[bool],
        outputs: Sequence[Place],
        whole: Sequence[NamedSharding],
        donate: Sequence[bool],
        successors: Mapping[int, int],
        compiler: Compiler,
    ) -> None:
        """Compile a program over meshes. ``shared`` arguments (scalars) are sent to whoever needs them beforehand;
        ``whole`` are the replicated shardings of all meshes; ``successors`` are outputs → the argument that each takes
        the place of."""
        self.whole, self.donate = list(whole), list(donate)
        self._in_turn = [several_processes(list(at.mesh.devices.flat)) for at in self.whole]
        """Whether the pieces of each mesh run one after the other: those that meet in collectives over processes."""
        self._nothing: dict[Hashable, jax.Array] = {}
        """The results, and packs of small values, of pieces that other processes run."""
        self.position = {value: index for index, value in enumerate(flat.arguments)}
        self.arguments, self.outputs = list(arguments), list(outputs)
        self._place_all(flat, shared)
        self._place_all(regrouped(flat, self.home), shared)
        self.maker: dict[int, Equation] = {v: e for e in self.flat.equations for v in e.outputs}
        pieces = summed_later(self.flat, self._pieces(), SCALAR_BYTES)
        pieces = prepared(self.flat, pieces, self.home, SCALAR_BYTES)
        self.pieces = divided(self.flat, pieces, self.home, self._spot)
        for piece in self.pieces:
            piece.arguments = self._in_order_of_results(piece, successors)
        self._compile(compiler)
        self.first_moves = sorted({
            (value, piece.stage) for piece in self.pieces for value in piece.arguments
            if self.arguments[self.position[value]].stage != piece.stage
        })  # fmt: skip
        self._plan()

    def _place_all(self, flat: FlatProgram, shared: Sequence[bool]) -> None:
        self.flat = flat
        self.effects: list[tuple[Equation, int, int]] = []
        """The equations with side effects, with the level and the mesh on which each runs once."""
        self.home: dict[int, int | None] = dict.fromkeys(flat.constants)
        self.level: dict[int, int] = dict.fromkeys(flat.constants, -1)
        for value, place, common in zip(flat.arguments, self.arguments, shared, strict=True):
            self.home[value] = None if common else place.stage
            self.level[value] = -1
        for equation in flat.equations:
            at, level = self._place(equation)
            if equation.effects:
                _refuse_ordered(equation)
                at, level = at or 0, max(0, level)
                self.effects.append((equation, level, at))
            for value in equation.outputs:
                self.home[value], self.level[value] = at, level

    def _place(self, equation: Equation) -> tuple[int | None, int]:
        """The mesh of an equation (None: any) and its level, which counts the exchanges before it."""
        values = list(equation.values)
        homed = [value for value in values if self.home[value] is not None]
        homes = {self.home[value] for value in homed}
        level = max((self.level[value] for value in values), default=-1)
        if not homed:
            return None, level
        if equation.effects:
            return self._at_largest(values, homed)
        exchanged = max(level, 1 + max(self.level[value] for value in homed))
        is_scalar = all(self.flat.size_bytes(value) <= SCALAR_BYTES for value in (*values, *equation.outputs))
        if is_scalar and any(self.home[value] is None and self.level[value] > 0 for value in values):
            return None, exchanged  # a sum over all meshes goes on: one exchange serves the whole of it
        if len(homes) == 1:
            return self.home[homed[0]], max(0, level)
        if is_scalar:
            return None, exchanged
        return self._at_largest(values, homed)

    def _at_largest(self, values: Sequence[int], homed: Sequence[int]) -> tuple[int | None, int]:
        """The mesh of the largest operand, where the others are sent, and the level."""
        home = self.home[max(homed, key=self.flat.size_bytes)]
        return home, max(0, *(self.level[v] + (self.home[v] not in (None, home)) for v in values))

    def _spot(self, value: int) -> Any:
        return self.arguments[self.position[value]].sharding.spec if value in self.position else None

    def _pieces(self) -> list[Piece]:
        pieces: dict[tuple[int, int], Piece] = {}
        wanted: dict[tuple[int, int], list[int]] = {}

        def piece(level: int, stage: int) -> tuple[int, int]:
            key = (max(0, level), stage)
            pieces.setdefault(key, Piece(*key))
            wanted.setdefault(key, [])
            return key

        for position, atom in enumerate(self.flat.outputs):
            at = self.outputs[position].stage
            if not isinstance(atom, int):
                key = piece(0, at)
            else:
                own, level = self.home[atom], self.level[atom]
                key = piece(level + (own is not None and own != at), at)
                wanted[key].append(atom)
            pieces[key].results = (*pieces[key].results, position)
        for equation, level, at in self.effects:
            key = piece(level, at)
            pieces[key].equations.append(equation)
            wanted[key] += equation.values
        # From the last level back: what a piece lacks is made by an earlier one, or again in itself.
        last = max((level for level, _ in pieces), default=0)
        for level in range(last, -1, -1):
            for key in [k for k in pieces if k[0] == level]:
                self._fill(pieces[key], wanted[key], piece, pieces, wanted)
        return sorted(pieces.values(), key=lambda p: (p.level, p.stage))

    def _fill(self, piece: Piece, wanted: list[int], make: Any, pieces: Any, all_wanted: Any) -> None:
        """Give a piece the equations that it can run for its wanted values, and ask others for the rest."""
        missing = list(dict.fromkeys(wanted))
        chosen = {id(equation) for equation in piece.equations}
        arguments: dict[int, None] = {}
        reads: dict[int, None] = {}
        seen = set(missing)
        while missing:
            value = missing.pop()
            if value in self.position:
                arguments[value] = None
                continue
            if value in self.flat.constants:
                continue
            home, level = self.home[value], self.level[value]
            elsewhere = home is not None and home != piece.stage
            earlier = home is not None and level < piece.level
            if elsewhere or (earlier and (self.flat.is_small(value, SCALAR_BYTES) or self.maker[value].effects)):
                key = make(level, home)
                if value not in pieces[key].gives:
                    pieces[key].gives.append(value)
                    all_wanted[key].append(value)
                reads[value] = None
                continue
            equation = self.maker[value]
            chosen.add(id(equation))
            for read in equation.values:
                if read not in seen:
                    seen.add(read)
                    missing.append(read)
        piece.equations = [e for e in self.flat.equations if id(e) in chosen]
        piece.arguments = tuple(sorted(arguments))
        piece.reads = tuple(reads)

    # --- compiling and running

    def _in_order_of_results(self, piece: Piece, successors: Mapping[int, int]) -> tuple[int, ...]:
        """A piece's arguments, first those that its results take the place of. JAX gives the memory of donated
        arguments to results of their shape in the order in which both stand; memory that another result still reads
        would have to be copied first."""
        replaced = [self.flat.arguments[successors[r]] for r in piece.results if r in successors]
        return tuple(dict.fromkeys([*(v for v in replaced if v in piece.arguments), *piece.arguments]))

    def _compile(self, compiler: Compiler) -> None:
        """Begin to compile the pieces. Small values go from piece to piece packed, those of one dtype together."""
        self.packs = [self._packed(piece) for piece in self.pieces]
        givers: dict[int, dict[int, int]] = {}
        """The small values → the first piece on each mesh that gives them."""
        for number, piece in enumerate(self.pieces):
            for value in piece.gives:
                givers.setdefault(value, {}).setdefault(piece.stage, number)

        def giver(value: int, stage: int) -> tuple[int, str]:
            of_mesh = givers[value]
            return of_mesh.get(stage, next(iter(of_mesh.values()))), str(self.flat.avals[value].dtype)

        self.bundles = [sorted({giver(v, piece.stage) for v in piece.reads}) for piece in self.pieces]
        last_reader = {value: number for number, piece in enumerate(self.pieces) for value in piece.arguments}
        self._waiting: dict[int, Callable[[], Any]] = {}
        longest_first = sorted(enumerate(self.pieces), key=lambda numbered: -len(numbered[1].equations))
        for number, piece in longest_first:
            if not is_here(self.whole[piece.stage]):
                continue
            shapes = [abstract(self.flat.avals[v]) for v in piece.arguments]
            shardings = [self._at(v, piece.stage) for v in piece.arguments]
            for source, name in self.bundles[number]:
                shapes.append(jax.ShapeDtypeStruct((self._length(source, name),), name))
                shardings.append(self.whole[piece.stage])
            donate = tuple(
                index
                for index, v in enumerate(piece.arguments)
                if self.donate[self.position[v]]
                and self.arguments[self.position[v]].stage == piece.stage
                and last_reader[v] == number
            )
            packed = [self.whole[piece.stage]] * len(self.packs[number])
            outs = [self.outputs[r].sharding for r in piece.results] + packed
            # An optimizer's arithmetic on one parameter waits for no other: by itself XLA would begin with all at once.
            ahead = self._function(number, piece), shapes, tuple(shardings), tuple(outs), donate
            lowering = partial(lower, *ahead, by_memory=True)
            key = self._key(number, piece)
            if key is not None:
                key = (key, tuple(at.spec for at in (*shardings, *outs)), donate)
            devices = tuple(self.whole[piece.stage].mesh.devices.flat)
            self._waiting[number] = compiler.start(lowering, devices, key)

    def _key(self, number: int, piece: Piece) -> Hashable | None:
        """A key that is equal for pieces that make the same of what they are given, packed alike."""
        bundled = [self.packs[source][name] for source, name in self.bundles[number]]
        given = [*piece.arguments, *(value for values in bundled for value in values)]
        packs = self.packs[number]
        made = [
            *(self.flat.outputs[r] for r in piece.results),
            *(value for values in packs.values() for value in values),
        ]
        program = signature(self.flat, piece.equations, given, made)
        if program is None:
            return None
        sizes = tuple(len(values) for values in (*bundled, *packs.values()))
        return program, len(piece.arguments), len(piece.results), sizes

    def _packed(self, piece: Piece) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for value in piece.gives:
            found.setdefault(str(self.flat.avals[value].dtype), []).append(value)
        return found

    def finish(self) -> None:
        """Wait until all pieces are compiled."""
        for number, wait in self._waiting.items():
            self.pieces[number].run = wait()
        self._waiting = {}

    def _at(self, value: int, stage: int) -> NamedSharding:
        return NamedSharding(self.whole[stage].mesh, self.arguments[self.position[value]].sharding.spec)

    def _function(self, number: int, piece: Piece) -> Any:
        def run(*given: Any) -> tuple[Any, ...]:
            known = dict(zip(piece.arguments, given, strict=False)) | self.flat.constants
            for (source, name), packed in zip(self.bundles[number], given[len(piece.arguments) :], strict=True):
                start = 0
                for value in self.packs[source][name]:
                    aval = self.flat.avals[value]
                    known[value] = packed[start : start + aval.size].reshape(aval.shape)
                    start += aval.size
            evaluate(piece.equations, known)
            found = [value_of(self.flat, self.flat.outputs[r], known) for r in piece.results]
            packs = [jnp.concatenate([known[v].ravel() for v in values]) for values in self.packs[number].values()]
            return (*found, *packs)

        return run

    def _plan(self) -> None:
        """Work out beforehand what a call does: the source of every operand of a piece, and the values that are moved
        before the pieces of a level run."""
        first = [(self.flat.avals[v], self.arguments[self.position[v]].sharding, self._at(v, stage))
                 for v, stage in self.first_moves]  # fmt: skip
        self.first_route = Route(*zip(*first, strict=True), from_state=True) if first else None
        self.levels: list[tuple[list[int], list[_Pack], list[_Pack], Route | None]] = []
        there = {(n, name, piece.stage) for n, piece in enumerate(self.pieces) for name in self.packs[n]}
        for _, level in groupby(enumerate(self.pieces), key=lambda numbered: numbered[1].level):
            numbers = [number for number, _ in level]
            wanted = dict.fromkeys((*b, self.pieces[n].stage) for n in numbers for b in self.bundles[n])
            targets = [key for key in wanted if key not in there]
            sources = [(number, name, self.pieces[number].stage) for number, name, _ in targets]
            ways = [(jax.ShapeDtypeStruct((self._length(number, name),), name), self.whole[stage], self.whole[target])
                    for (number, name, stage), (_, _, target) in zip(sources, targets, strict=True)]  # fmt: skip
            there.update(targets)
            self.levels.append((numbers, sources, targets, Route(*zip(*ways, strict=True)) if ways else None))
        moved = {key: index for index, key in enumerate(self.first_moves)}
        self.operands = [
            [(moved.get((v, piece.stage)), self.position[v]) for v in piece.arguments] for piece in self.pieces
        ]

    def _length(self, number: int, name: str) -> int:
        """The number of entries of the values that a piece gives in one dtype, packed."""
        return sum(int(self.flat.avals[value].size) for value in self.packs[number][name])

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        """The results of the program, each on its mesh. Donated arguments are gone after it."""
        self.finish()
        away: list[Any] = []
        if self.first_route is not None:
            away = self.first_route([arguments[self.position[v]] for v, _ in self.first_moves])
        results: list[Any] = [None] * len(self.flat.outputs)
        given: dict[_Pack, Any] = {}
        before: Any = None
        for numbers, sources, targets, route in self.levels:
            if route is not None:
                given.update(zip(targets, route([given[source] for source in sources]), strict=True))
            for number in numbers:
                piece = self.pieces[number]
                if piece.run is None:  # of a stage of other processes
                    for position in piece.results:
                        results[position] = self._absent(position)
                    for name in self.packs[number]:
                        given[number, name, piece.stage] = self._absent_pack(number, name)
                    continue
                operands = [arguments[at] if moved is None else away[moved] for moved, at in self.operands[number]]
                operands += [given[(*b, piece.stage)] for b in self.bundles[number]]
                if self._in_turn[piece.stage] and before is not None:
                    before.block_until_ready()
                made = piece.run(*operands)
                if self._in_turn[piece.stage]:
                    before = made[-1]
                for position, value in zip(piece.results, made, strict=False):
                    results[position] = value
                for name, packed in zip(self.packs[number], made[len(piece.results) :], strict=True):
                    given[number, name, piece.stage] = packed
        return results

    def _absent(self, position: int) -> jax.Array:
        if position not in self._nothing:
            aval = aval_of(self.flat, self.flat.outputs[position])
            self._nothing[position] = absent(aval, self.outputs[position].sharding)
        return self._nothing[position]

    def _absent_pack(self, number: int, name: str) -> jax.Array:
        if (number, name) not in self._nothing:
            aval = jax.ShapeDtypeStruct((self._length(number, name),), name)
            self._nothing[number, name] = absent(aval, self.whole[self.pieces[number].stage])
        return self._nothing[number, name]

    @property
    def dispatches(self) -> int:
        """The number of compiled pieces that a call starts."""
        return sum(piece.run is not None for piece in self.pieces)


def _refuse_ordered(equation: Equation) -> None:
    if equation.is_ordered:
        raise PlanError(
            f"the optimizer has a side effect in a fixed order ({equation.primitive.name} with ordered=True): pipeline "
            "stages update their parameters without waiting for each other; use ordered=False"
        )
