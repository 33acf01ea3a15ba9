"""A flat program over several meshes: what lives on one runs there, and scalars cross between them.

Made for the optimizer: nearly everything in it concerns one parameter, and what concerns all of them (a norm) is made
of scalars. Equations of one mesh whose operands are there form one compiled piece; scalars made of several meshes'
scalars are made on each. Between pieces only small values are handed on; others are made again, so that nothing is held
twice.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from shardwright.backends.jax.compiled import Compiler, lower
from shardwright.backends.jax.equations import Equation, FlatProgram, aval_of, evaluate

SMALL_BYTES = 4096
"""Values up to this size are exchanged and made on every mesh rather than moved to one."""
SCALAR_BYTES = 16
"""Values up to this size are handed on from one piece of a mesh to its next; larger ones are made again."""


@dataclass(slots=True, eq=False)
class _Piece:
    """What one mesh runs between two exchanges."""

    level: int
    stage: int
    equations: list[Equation] = field(default_factory=list)
    arguments: tuple[int, ...] = ()
    bundles: tuple[tuple[int, int, str], ...] = ()
    """Small values of earlier pieces come packed: (level, stage, dtype)."""
    results: tuple[int, ...] = ()
    """Positions of the program's outputs made here."""
    packed: dict[str, list[int]] = field(default_factory=dict)
    """Per dtype, the small values that others take."""
    run: Any = None


class PlacedProgram:
    """Compiled pieces and the order to run them in."""

    def __init__(
        self,
        flat: FlatProgram,
        argument_homes: Sequence[int],
        shared: Sequence[bool],
        argument_shardings: Sequence[NamedSharding],
        output_homes: Sequence[int],
        output_shardings: Sequence[NamedSharding],
        whole: Sequence[NamedSharding],
        donate: Sequence[bool],
        compiler: Compiler,
    ) -> None:
        """``shared`` arguments (scalars) are sent to whoever needs them beforehand; ``whole`` are the replicated
        shardings of all meshes."""
        self.flat, self.whole, self.donate = flat, list(whole), list(donate)
        self.position = {value: index for index, value in enumerate(flat.arguments)}
        self.argument_homes, self.argument_shardings = list(argument_homes), list(argument_shardings)
        self.output_homes, self.output_shardings = list(output_homes), list(output_shardings)
        self.home: dict[int, int | None] = dict.fromkeys(flat.constants)
        self.level: dict[int, int] = dict.fromkeys(flat.constants, -1)
        for value, home, common in zip(flat.arguments, argument_homes, shared, strict=True):
            self.home[value] = None if common else home
            self.level[value] = -1
        self.maker: dict[int, Equation] = {v: e for e in flat.equations for v in e.outputs}
        for equation in flat.equations:
            at, level = self._place(equation)
            for value in equation.outputs:
                self.home[value], self.level[value] = at, level
        self.pieces = self._pieces()
        self._compile(compiler)
        self.first_moves = sorted({
            (value, piece.stage) for piece in self.pieces for value in piece.arguments
            if self.argument_homes[self.position[value]] != piece.stage
        })  # fmt: skip

    def _place(self, equation: Equation) -> tuple[int | None, int]:
        """The mesh (None: any) and the level (exchanges before it)."""
        values = list(equation.values)
        homes = {home for value in values if (home := self.home[value]) is not None}
        level = max((self.level[value] for value in values), default=-1)
        if not homes:
            return None, level
        if len(homes) == 1:
            return next(iter(homes)), max(0, level)
        homed = [value for value in values if self.home[value] is not None]
        if all(self.flat.size_bytes(value) <= SMALL_BYTES for value in (*homed, *equation.outputs)):
            return None, 1 + max(self.level[value] for value in homed)
        largest = max(homed, key=self.flat.size_bytes)
        home = self.home[largest]
        return home, max(0, *(self.level[v] + (self.home[v] not in (None, home)) for v in values))

    def _pieces(self) -> list[_Piece]:
        pieces: dict[tuple[int, int], _Piece] = {}
        wanted: dict[tuple[int, int], list[int]] = {}

        def piece(level: int, stage: int) -> tuple[int, int]:
            key = (max(0, level), stage)
            pieces.setdefault(key, _Piece(*key))
            wanted.setdefault(key, [])
            return key

        for position, atom in enumerate(self.flat.outputs):
            at = self.output_homes[position]
            if not isinstance(atom, int):
                key = piece(0, at)
            else:
                own, level = self.home[atom], self.level[atom]
                key = piece(level + (own is not None and own != at), at)
                wanted[key].append(atom)
            pieces[key].results = (*pieces[key].results, position)
        # From the last level back: what a piece lacks is made by an earlier one, or again in itself.
        last = max((level for level, _ in pieces), default=0)
        for level in range(last, -1, -1):
            for key in [k for k in pieces if k[0] == level]:
                self._fill(pieces[key], wanted[key], piece, pieces, wanted)
        return sorted(pieces.values(), key=lambda p: (p.level, p.stage))

    def _fill(self, piece: _Piece, wanted: list[int], make: Any, pieces: Any, all_wanted: Any) -> None:
        """Take what can be made here; ask others for the rest."""
        missing = list(dict.fromkeys(wanted))
        chosen: dict[int, Equation] = {}
        arguments: dict[int, None] = {}
        bundles: dict[tuple[int, int, str], None] = {}
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
            earlier = home is not None and level < piece.level and self.flat.size_bytes(value) <= SCALAR_BYTES
            if elsewhere or earlier:
                key = make(level, home)
                name = str(self.flat.avals[value].dtype)
                packed = pieces[key].packed.setdefault(name, [])
                if value not in packed:
                    packed.append(value)
                    all_wanted[key].append(value)
                bundles[(key[0], key[1], name)] = None
                continue
            equation = self.maker[value]
            chosen[id(equation)] = equation
            for read in equation.values:
                if read not in seen:
                    seen.add(read)
                    missing.append(read)
        piece.equations = [e for e in self.flat.equations if id(e) in chosen]
        piece.arguments = tuple(sorted(arguments))
        piece.bundles = tuple(bundles)

    # --- compiling and running

    def _compile(self, compiler: Compiler) -> None:
        by_key = {(p.level, p.stage): p for p in self.pieces}
        last_reader = {value: (p.level, p.stage) for p in self.pieces for value in p.arguments}
        self._waiting: list[Callable[[], Any]] = []
        for piece in self.pieces:
            avals = [self.flat.avals[v] for v in piece.arguments]
            shardings = [self._at(v, piece.stage) for v in piece.arguments]
            for level, stage, name in piece.bundles:
                count = sum(int(self.flat.avals[v].size) for v in by_key[(level, stage)].packed[name])
                avals.append(jax.ShapeDtypeStruct((count,), name))
                shardings.append(self.whole[piece.stage])
            donate = tuple(
                index
                for index, v in enumerate(piece.arguments)
                if self.donate[self.position[v]]
                and self.argument_homes[self.position[v]] == piece.stage
                and last_reader[v] == (piece.level, piece.stage)
            )
            outs = [self.output_shardings[r] for r in piece.results] + [self.whole[piece.stage]] * len(piece.packed)
            shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
            lowered = lower(self._function(piece, by_key), shapes, tuple(shardings), tuple(outs), donate)
            self._waiting.append(compiler.start(lowered, tuple(self.whole[piece.stage].mesh.devices.flat)))

    def finish(self) -> None:
        """Wait until all pieces are compiled, which happens in the background. Before the first call."""
        for piece, wait in zip(self.pieces, self._waiting, strict=True):
            piece.run = wait()
        self._waiting = []

    def _at(self, value: int, stage: int) -> NamedSharding:
        own = self.argument_shardings[self.position[value]]
        return NamedSharding(self.whole[stage].mesh, own.spec)

    def _function(self, piece: _Piece, by_key: Mapping[tuple[int, int], _Piece]) -> Any:
        def run(*given: Any) -> tuple[Any, ...]:
            known = dict(zip(piece.arguments, given, strict=False)) | self.flat.constants
            for (level, stage, name), packed in zip(piece.bundles, given[len(piece.arguments) :], strict=True):
                start = 0
                for value in by_key[(level, stage)].packed[name]:
                    aval = self.flat.avals[value]
                    known[value] = packed[start : start + aval.size].reshape(aval.shape)
                    start += aval.size
            evaluate(piece.equations, known)
            atoms = [self.flat.outputs[r] for r in piece.results]
            found = [known[a] if isinstance(a, int) else jnp.asarray(a.val, aval_of(self.flat, a).dtype) for a in atoms]
            packs = [jnp.concatenate([known[v].ravel() for v in values]) for values in piece.packed.values()]
            return (*found, *packs)

        return run

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        """What the program returns, each on its mesh. Donated arguments are gone after it."""
        moved = self._move([(arguments[self.position[v]], self._at(v, stage)) for v, stage in self.first_moves])
        away = dict(zip(self.first_moves, moved, strict=True))
        results: list[Any] = [None] * len(self.flat.outputs)
        bundles: dict[tuple[int, int, str, int], Any] = {}
        for level in range(self.pieces[-1].level + 1 if self.pieces else 0):
            current = [p for p in self.pieces if p.level == level]
            wanted = [(*b, p.stage) for p in current for b in p.bundles if (*b, p.stage) not in bundles]
            sent = self._move([(bundles[(*w[:3], w[1])], self.whole[w[3]]) for w in wanted])
            bundles.update(zip(wanted, sent, strict=True))
            for piece in current:
                given = [away.get((v, piece.stage), arguments[self.position[v]]) for v in piece.arguments]
                given += [bundles[(*b, piece.stage)] for b in piece.bundles]
                made = piece.run(*given)
                for position, value in zip(piece.results, made, strict=False):
                    results[position] = value
                for name, packed in zip(piece.packed, made[len(piece.results) :], strict=True):
                    bundles[(piece.level, piece.stage, name, piece.stage)] = packed
        return results

    @staticmethod
    def _move(moves: Sequence[tuple[Any, NamedSharding]]) -> list[Any]:
        if not moves:
            return []
        found: list[Any] = jax.device_put([value for value, _ in moves], [at for _, at in moves])
        return found

    @property
    def dispatches(self) -> int:
        """Compiled pieces that a call starts."""
        return len(self.pieces)
