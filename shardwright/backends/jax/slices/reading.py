"""The values of a flat program by what they are of a sequence: there whole before the first slice, made slice by slice,
or there once all slices have run.

Slices begin where parameters meet tokens. What follows from the batch, from parameters and from constants apart
(positions, masks, labels) is there whole, and slices take their part. From then on the dims of values are followed op
by op. A product of tokens with tokens is attention: the dim over which it is summed later is that of the keys, of
which a slice needs all up to its end. That is exact where later keys are hidden: their scores are so low that their
exponential is 0, or what is summed is 0 there. Whatever else brings tokens together runs once, behind the last slice.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from shardwright.backends.jax.capture.inner_programs import bound, inner_program
from shardwright.backends.jax.program.equations import Atom, Equation, FlatProgram, aval_of
from shardwright.backends.jax.program.flattening import flatten
from shardwright.backends.jax.program.gradient_layouts import Layouts, layouts_of
from shardwright.backends.jax.slices.axes import Axis, MixingError
from shardwright.backends.jax.slices.masking import Axes, Masking
from shardwright.backends.jax.slices.op_dims import OpDims, op_dims

Place = Literal["whole", "slices", "behind"]
BOTH_WAYS = "attends in both directions, or by a mask of which it cannot be told that it hides later tokens"


@dataclass(frozen=True, slots=True)
class SlicedOp:
    """An equation that runs slice by slice.

    Attributes:
        wanted: the dims of each operand, of which a slice has its part.
        primal, derivative: the programs inside a function with its own derivative rule, and of that rule.
    """

    wanted: tuple[Axes, ...]
    primal: "Reading | None" = None
    derivative: "Reading | None" = None
    tangents: tuple[int, ...] = ()
    """The operands that have tangents, of such a function."""
    layouts: Layouts | None = None
    """Of an equation that lays out a value and its gradient."""


@dataclass(slots=True, eq=False)
class Reading:
    """A flat program, read.

    Attributes:
        place: value → where it is made.
        axes: value → its dims, of those that slices make, and of those that follow from the batch.
        sliced: the equations that run slice by slice, by position.
        mixing: the first equations that need all tokens, by position, and why.
    """

    flat: FlatProgram
    tokens: int
    place: dict[int, Place] = field(default_factory=dict)
    axes: dict[int, Axes] = field(default_factory=dict)
    sliced: dict[int, SlicedOp] = field(default_factory=dict)
    mixing: dict[int, str] = field(default_factory=dict)
    is_inner: bool = False
    """Whether the program is inside an equation of another, whose own derivative rule is used."""
    masking: Masking = field(init=False)

    def __post_init__(self) -> None:
        self.masking = Masking(self.flat, self.tokens, self.axes, self.is_inner)

    @property
    def of_parameters(self) -> set[int]:
        """The values that follow from parameters, and from no token."""
        return self.masking.of_parameters

    # -- the program ----------------------------------------------------------------------------------------------

    def read(self, batch: Mapping[int, int], parameters: Collection[int], everything: Collection[int] = ()) -> None:
        """Read a whole program. ``batch``: the arguments with tokens, and their dims of them; ``parameters``: those
        that are parameters; ``everything``: all that are of the batch."""
        of_parameters = self.of_parameters
        of_parameters.update(parameters)
        self.masking.of_batch.update((*self.flat.constants, *everything))
        for value, dim in batch.items():
            own = [None] * len(self.flat.avals[value].shape)
            self.axes[value] = tuple(Axis("tokens") if d == dim else None for d, _ in enumerate(own))
        for position, equation in enumerate(self.flat.equations):
            self.masking.position = position
            places = [self.place.get(value, "whole") for value in equation.values]
            if not equation.effects and all(value in self.masking.of_batch for value in equation.values):
                self.masking.of_batch.update(equation.outputs)
            if "behind" in places:
                self._put(equation, "behind")
                continue
            given = [v for v in equation.values if v in self.axes and self.place.get(v, "whole") == "whole"]
            begins = bool(given) and not of_parameters.isdisjoint(equation.values) and "slices" not in places
            if "slices" in places or begins:
                self._slice(position, equation, given if begins else ())
                continue
            if not of_parameters.isdisjoint(equation.values):
                of_parameters.update(equation.outputs)
            elif given:
                self._follow(equation)

    def read_inner(self, given: Sequence[tuple[Place, Axes, frozenset[int], frozenset[int]]]) -> None:
        """Read a program inside another. ``given``: what is known of its arguments. Raises MixingError where it needs
        more than its own slice."""
        for value, (place, axes, low, zero) in zip(self.flat.arguments, given, strict=True):
            if place == "slices":
                self.place[value], self.axes[value], self.masking.low[value], self.masking.zero[value] = (
                    place,
                    axes,
                    low,
                    zero,
                )
        for position, equation in enumerate(self.flat.equations):
            if any(self.place.get(value) == "slices" for value in equation.values):
                self._slice(position, equation, ())
                for value in equation.outputs:
                    if self.place[value] == "behind":
                        raise MixingError(self.mixing[position])

    def settle(self) -> None:
        """Call what broadcasts made, and met nothing of the sequence, plain."""
        for axes in self.axes.values():
            for axis in axes:
                if axis is not None and axis.is_stretched:
                    axis.become("plain")
        for op in self.sliced.values():
            for inner in (op.primal, op.derivative):
                if inner is not None:
                    inner.settle()

    def roles(self, axes: Axes) -> tuple[str | None, ...]:
        """The role of each dim: "tokens", "keys", or None."""
        return tuple(axis.role if axis is not None and axis.role in ("tokens", "keys") else None for axis in axes)

    # -- one equation ---------------------------------------------------------------------------------------------

    def _put(self, equation: Equation, place: Place) -> None:
        for value in equation.outputs:
            self.place[value] = place

    def _follow(self, equation: Equation) -> None:
        """Note the dims of what follows from the batch alone, where they can be told."""
        try:
            dims = op_dims(self.flat, equation)
            found = self._carry(equation, dims, lambda atom: isinstance(atom, int) and atom in self.axes, new=False)
        except MixingError:
            return
        for value, axes in found.items():
            if any(axis is not None for axis in axes):
                self.axes[value] = axes

    def _slice(self, position: int, equation: Equation, begins: Collection[int]) -> None:
        try:
            if equation.effects:
                raise MixingError("has side effects")
            if equation.primitive.name == "custom_jvp_call":
                self._own_derivative(position, equation, begins)
            elif equation.primitive.name == "custom_vjp_call":
                self._lay_out(position, equation)
            else:
                self._apply(position, equation, begins)
            self._put(equation, "slices")
        except MixingError as why:
            self.mixing[position] = str(why)
            self._put(equation, "behind")

    def _lay_out(self, position: int, equation: Equation) -> None:
        """Read an equation that only says where a value and its gradient lie. Raises MixingError for another."""
        avals = [aval_of(self.flat, atom) for atom in equation.inputs]
        found = layouts_of(equation.primitive, equation.params, avals)
        if found is None:
            raise MixingError("has a gradient of its own (jax.custom_vjp), which is not known slice by slice")
        (given,), (made,) = equation.inputs, equation.outputs
        assert isinstance(given, int)
        self.masking.keep(given, made)
        self.axes[made] = self.axes[given]
        self.sliced[position] = SlicedOp((self.axes[given],), layouts=found)

    def _is_sliced(self, atom: Atom, begins: Collection[int] = ()) -> bool:
        return isinstance(atom, int) and (self.place.get(atom) == "slices" or atom in begins)

    def _apply(self, position: int, equation: Equation, begins: Collection[int]) -> None:
        dims = op_dims(self.flat, equation)

        def moves(atom: Atom) -> bool:
            return self._is_sliced(atom, begins)

        keys = self._used(equation, dims, moves)
        made = self._carry(equation, dims, moves, new=True)
        for value, axes in made.items():
            self.axes[value] = axes
        self.masking.note(equation, dims, moves)
        out = made[equation.outputs[0]]
        wanted = []
        for number, atom in enumerate(equation.inputs):
            rank = len(aval_of(self.flat, atom).shape)
            own: list[Axis | None] = [None] * rank
            for dim, to in dims.carried[number].items():
                own[dim] = out[to]
            for dim, axis in keys.get(number, {}).items():
                own[dim] = axis
            wanted.append(tuple(own))
        self.sliced[position] = SlicedOp(tuple(wanted))

    def _used(self, equation: Equation, dims: OpDims, moves: Any) -> dict[int, dict[int, Axis]]:
        """Look at the dims along which an op works, and return those that are keys. Raises MixingError for tokens."""
        name = equation.primitive.name
        found: dict[int, dict[int, Axis]] = {}
        for number, atom in enumerate(equation.inputs):
            if not moves(atom):
                continue
            for dim, why in dims.used[number].items():
                axis = self.axes[atom][dim]  # type: ignore[index]
                if axis is None or axis.role == "plain":
                    continue
                if name == "dot_general":
                    continue
                if axis.is_stretched or axis.role == "tokens":
                    raise MixingError(why)
                masking = self.masking
                hidden = masking.zero if name in ("reduce_sum", "reduce_or") else masking.low
                if name not in ("reduce_sum", "reduce_or", "reduce_max", "argmax"):
                    raise MixingError(why.replace("the sequence", "the keys"))
                if dim not in hidden.get(atom, frozenset()):  # type: ignore[arg-type]
                    raise MixingError(BOTH_WAYS)
                axis.become("keys")
                found.setdefault(number, {})[dim] = axis
        if name == "dot_general":
            self._contracted(equation, moves, found)
        return found

    def _contracted(self, equation: Equation, moves: Any, found: dict[int, dict[int, Axis]]) -> None:
        (left, right), _ = equation.params["dimension_numbers"]
        for pair in zip(map(int, left), map(int, right), strict=True):
            axes: list[Axis | None] = [
                self.axes[atom][dim] if moves(atom) else None  # type: ignore[index]
                for atom, dim in zip(equation.inputs, pair, strict=True)
            ]
            if all(axis is None or axis.role == "plain" for axis in axes):
                continue
            scores = [n for n, axis in enumerate(axes) if axis is not None and (axis.is_of_pair or axis.role == "keys")]
            if len(scores) != 1:
                raise MixingError("adds up over the sequence")
            number = scores[0]
            other = axes[1 - number]
            if moves(equation.inputs[1 - number]) and (other is None or other.role != "tokens"):
                raise MixingError("brings tokens together with tokens")
            atom, axis = equation.inputs[number], axes[number]
            assert isinstance(atom, int)
            assert axis is not None
            if pair[number] not in self.masking.zero.get(atom, frozenset()):
                raise MixingError(BOTH_WAYS)
            axis.become("keys")
            found.setdefault(number, {})[pair[number]] = axis
            found.setdefault(1 - number, {})[pair[1 - number]] = axis

    def _carry(self, equation: Equation, dims: OpDims, moves: Any, *, new: bool) -> dict[int, Axes]:
        """The dims of an op's results. ``new``: whether to make those of a product of tokens with tokens."""
        name = equation.primitive.name
        first = self.flat.avals[equation.outputs[0]].shape
        rank = len(first)
        out: list[Axis | None] = [None] * rank
        covered: set[int] = set()
        token_dims: list[list[int]] = []
        for number, atom in enumerate(equation.inputs):
            if not moves(atom):
                continue
            axes, own = self.axes[atom], []  # type: ignore[index]
            for dim, to in dims.carried[number].items():
                axis = axes[dim]
                if axis is not None and axis.role == "tokens":
                    own.append(to)
                if to in covered:
                    one, other = out[to], axis
                    if (one is None) != (other is None):
                        single = one if one is not None else other
                        assert single is not None
                        if single.role != "plain":
                            if not single.is_stretched:
                                raise MixingError("brings tokens together with tokens")
                            single.become("plain")
                    elif one is not None and other is not None:
                        one.join(other)
                else:
                    out[to] = axis
                    covered.add(to)
            token_dims.append(own)
        if name == "dot_general":
            both = {to for own in token_dims for to in own}
            shared = set(token_dims[0]).intersection(*token_dims[1:]) if token_dims else set()
            apart = sorted(both - shared)
            if len(apart) > 1 and len(token_dims) == 2:
                if len(apart) > 2 or not new or shared:
                    raise MixingError("brings tokens together with tokens")
                out[apart[0]], out[apart[1]] = Axis.pair()
        if name == "broadcast_in_dim" and moves(equation.inputs[0]):
            source = set(dims.carried[0].values())
            for to, size in enumerate(first):
                if to not in source and size == self.tokens:
                    out[to] = Axis()
        if new and not any(axis is not None and axis.role != "plain" for axis in out):
            raise MixingError("gives a value without the sequence as a dim of its own")
        if new and sum(axis is not None and axis.role == "tokens" for axis in out) > 1:
            raise MixingError("brings tokens together with tokens")
        if any(axis is not None and first[d] != self.tokens for d, axis in enumerate(out)):
            raise MixingError("takes a part of the sequence, or adds to it")
        return {value: tuple(out) for value in equation.outputs}

    # -- functions with their own derivative rule -------------------------------------------------------------------

    def _own_derivative(self, position: int, equation: Equation, begins: Collection[int]) -> None:
        closed = inner_program(equation.params)
        assert closed is not None
        avals = [aval_of(self.flat, atom) for atom in equation.inputs]
        primal = self._inner(closed)
        tangents = (
            () if self.is_inner else tuple(n for n, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.inexact))
        )

        def derived(given: Sequence[Any], moved: Sequence[Any]) -> Any:
            def run(*some: Any) -> list[Any]:
                every = list(given)
                for number, value in zip(tangents, some, strict=True):
                    every[number] = value
                return bound(equation.primitive, equation.params, every)

            return jax.jvp(run, [given[n] for n in tangents], list(moved))

        none: frozenset[int] = frozenset()

        def state(number: int, *, is_tangent: bool) -> tuple[Place, Axes, frozenset[int], frozenset[int]]:
            atom = equation.inputs[number]
            if not self._is_sliced(atom, begins):
                return "whole", (), none, none
            assert isinstance(atom, int)
            if is_tangent:
                return "slices", self.axes[atom], none, none
            return "slices", self.axes[atom], self.masking.low.get(atom, none), self.masking.zero.get(atom, none)

        states = [state(n, is_tangent=False) for n in range(len(avals))]
        primal.read_inner(states)
        for value, atom in zip(equation.outputs, primal.flat.outputs, strict=True):
            if not isinstance(atom, int) or primal.place.get(atom) != "slices":
                raise MixingError("gives a value without the sequence as a dim of its own")
            self.axes[value] = primal.axes[atom]
            self.masking.low[value] = primal.masking.low.get(atom, none)
            self.masking.zero[value] = primal.masking.zero.get(atom, none)
            if not self.masking.looked_at.isdisjoint(equation.values):
                self.masking.looked_at.add(value)
        wanted = tuple(
            self.axes[atom] if self._is_sliced(atom, begins) else (None,) * len(aval.shape)  # type: ignore[index]
            for atom, aval in zip(equation.inputs, avals, strict=True)
        )
        if self.is_inner:
            self.sliced[position] = SlicedOp(wanted, primal)
            return
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        derivative = self._inner(jax.make_jaxpr(derived)(shapes, [shapes[n] for n in tangents]))
        derivative.read_inner([*states, *(state(n, is_tangent=True) for n in tangents)])
        count = len(equation.outputs)
        for atoms in (derivative.flat.outputs[:count], derivative.flat.outputs[count:]):
            for value, atom in zip(equation.outputs, atoms, strict=True):
                if not isinstance(atom, int) or derivative.place.get(atom) != "slices":
                    raise MixingError("has a derivative without the sequence as a dim of its own")
                for one, other in zip(self.axes[value], derivative.axes[atom], strict=True):
                    if one is not None and other is not None:
                        one.join(other)
        self.sliced[position] = SlicedOp(wanted, primal, derivative, tangents)

    def _inner(self, closed: ClosedJaxpr) -> "Reading":
        return Reading(flatten(closed), self.tokens, is_inner=True)
