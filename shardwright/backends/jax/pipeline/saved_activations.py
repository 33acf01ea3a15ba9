"""What a stage keeps from forward to backward: as few bytes as cheap arithmetic allows.

A derivative lists every value that it reads. Many of them follow from others by arithmetic that costs less than memory
traffic does (``1 - y`` beside ``y`` of a tanh, a broadcast of a mean, a mask, a weight in another dtype). A compiler
that sees forward and backward together makes those again; here they are programs of their own, so it is done before.
"""

import heapq
from collections.abc import Collection
from dataclasses import dataclass

from shardwright.backends.jax.program.equations import Equation, FlatProgram

CHEAP = frozenset(
    {"abs", "add", "add_any", "and", "broadcast_in_dim", "clamp", "convert_element_type", "copy", "div", "eq"}
    | {"expand_dims", "ge", "gt", "integer_pow", "iota", "le", "lt", "max", "min", "mul", "ne", "neg", "not", "or"}
    | {"reshape", "select_n", "sign", "slice", "square", "squeeze", "stop_gradient", "sub", "transpose", "xor"}
)
"""Arithmetic that fuses with what reads it. Transcendental functions, products and reductions are kept."""
PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "scan", "while"})
"""What these read is in memory anyway, and nothing fuses with them: their operands are kept, unless they follow from
the program's inputs alone (a weight in another dtype)."""
CHAIN = 8
"""Equations up to which one value is made again."""


@dataclass(frozen=True, slots=True)
class Residuals:
    """``kept``: the values that are handed from forward to backward. ``remade``: the equations that make all others of
    them and of the program's inputs, in order."""

    kept: tuple[int, ...]
    remade: tuple[Equation, ...]


def residuals(program: FlatProgram, wanted: Collection[int], passing: Collection[int] = ()) -> Residuals:
    """wanted: values of the program that its derivative reads. Its arguments and constants are at hand anyway, but for
    the ``passing`` arguments, which will have changed by then (the model's state)."""
    return _Chooser(program, passing).run(wanted)


class _Chooser:
    def __init__(self, program: FlatProgram, passing: Collection[int]) -> None:
        self.program = program
        self.maker = dict.fromkeys(passing, -1)
        """Values → the positions of the equations that make them; arguments come first."""
        self.maker |= {value: index for index, e in enumerate(program.equations) for value in e.outputs}
        self.at_hand = set(program.arguments) - set(passing) | set(program.constants)
        self.in_products = {v for e in program.equations if e.primitive.name in PRODUCTS for v in e.values}

    def run(self, wanted: Collection[int]) -> Residuals:
        """From the last value back: one is let go when cheap equations make it of what is kept or smaller."""
        kept = {value for value in wanted if value not in self.at_hand}
        latest = [(-self.maker[value], value) for value in kept]
        heapq.heapify(latest)
        again: set[int] = set()
        while latest:
            _, value = heapq.heappop(latest)
            chain, leaves = self._chain(value, kept - {value})
            new = leaves - kept
            if chain is None or sum(map(self.program.size_bytes, new)) >= self.program.size_bytes(value):
                continue
            if value in self.in_products and leaves:
                continue
            kept.discard(value)
            kept |= new
            again |= chain
            for leaf in new:
                heapq.heappush(latest, (-self.maker[leaf], leaf))
        ordered = tuple(dict.fromkeys(v for v in [*wanted, *sorted(kept)] if v in kept))
        return Residuals(ordered, self._needed(again, wanted, kept))

    def _chain(self, value: int, kept: Collection[int]) -> tuple[set[int] | None, set[int]]:
        """The equations that make a value, and the values that they read: as little as its own operands, or what
        makes those where that is kept. None when it is not cheap to make."""
        chain: set[int] = set()
        leaves: set[int] = set()
        missing = [value]
        while missing:
            current = missing.pop()
            if current != value and (current in self.at_hand or current in kept):
                if current in kept:
                    leaves.add(current)
                continue
            index = self.maker[current]
            if index < 0 or not self._is_cheap(self.program.equations[index]) or len(chain) == CHAIN:
                if current == value:
                    return None, set()
                leaves.add(current)
                continue
            if index not in chain:
                chain.add(index)
                missing += self.program.equations[index].values
        return chain, leaves

    @staticmethod
    def _is_cheap(equation: Equation) -> bool:
        return equation.primitive.name in CHEAP and not equation.effects

    def _needed(self, again: set[int], wanted: Collection[int], kept: Collection[int]) -> tuple[Equation, ...]:
        """Of the chosen equations those that the wanted values follow from."""
        missing = {value for value in wanted if value not in kept and value not in self.at_hand}
        chosen = []
        for index in sorted(again, reverse=True):
            equation = self.program.equations[index]
            if not missing.isdisjoint(equation.outputs):
                chosen.append(equation)
                missing.update(v for v in equation.values if v not in kept)
        return tuple(reversed(chosen))
