"""The meaning of one aten op in the core: a template of core ops over the op's own inputs, outputs and in-between
values.

A template depends on shapes and arguments only, so it is computed once per kind of call and used again for every block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.core.model.graph import OpKind
from shardwright.core.rules.op_rules import Labelled

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of the call. ``slot`` counts inputs, then outputs, then the values in between."""

    slot: int
    shape: Shape
    dtype: str


@dataclass(frozen=True, slots=True)
class Piece:
    """One core op of a template; operands are slots."""

    kind: OpKind
    suffix: str
    """The suffix of the op's name that tells the pieces of one op apart: ``/bias``."""
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    labelled: Labelled


@dataclass(frozen=True, slots=True)
class Template:
    """The core ops of one call over ``inputs`` operands; its outputs, and the values in between."""

    pieces: tuple[Piece, ...]
    inputs: int
    outputs: tuple[Ref, ...]
    between: tuple[Ref, ...] = ()


class OpCall:
    """One call as a rule sees it: arguments by the schema's names, with a Ref in place of every tensor. Rules add
    pieces, core ops, to it."""

    def __init__(
        self,
        name: str,
        arguments: dict[str, Any],
        inputs: Sequence[Ref],
        outputs: Sequence[Ref],
        *,
        shares_memory: bool,
    ) -> None:
        self.name = name
        self.arguments = arguments
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.shares_memory = shares_memory
        """Whether the first output is a view of the first input."""
        self.pieces: list[Piece] = []
        self._between: list[Ref] = []

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)

    @property
    def out(self) -> Ref:
        return self.outputs[0]

    def between(self, shape: Sequence[int], dtype: str) -> Ref:
        """A value that exists only between two pieces."""
        ref = Ref(len(self.inputs) + len(self.outputs) + len(self._between), tuple(shape), dtype)
        self._between.append(ref)
        return ref

    def add(
        self, kind: OpKind, inputs: Sequence[Ref], outputs: Sequence[Ref], labelled: Labelled, suffix: str = ""
    ) -> None:
        self.pieces.append(Piece(kind, suffix, tuple(r.slot for r in inputs), tuple(r.slot for r in outputs), labelled))

    def template(self) -> Template:
        return Template(tuple(self.pieces), len(self.inputs), self.outputs, tuple(self._between))


Rule = Callable[[OpCall], None]
RULES: dict[str, tuple[OpKind, Rule]] = {}
"""The kind of an op's main piece, and the op's rule, by the op's name without overload and without the in-place
underscore."""


def rule(kind: OpKind, *names: str) -> Callable[[Rule], Rule]:
    """Register a rule for some ops."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = (kind, function)
        return function

    return register


def shapes(refs: Sequence[Ref]) -> list[Shape]:
    return [r.shape for r in refs]


def dims_of(value: Any, rank: int) -> tuple[int, ...]:
    """A dim argument (None or empty: all; an int; a list) as non-negative dims."""
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return tuple(range(rank))
    given = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(d % rank for d in given) if rank else ()
