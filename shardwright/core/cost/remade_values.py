"""The values that a compiled stage keeps from forward to backward: as few bytes as cheap arithmetic allows.

A derivative lists every value that it reads. Many of them follow from others by arithmetic that costs less than memory
traffic does (``1 - y`` beside ``y`` of a tanh, a broadcast of a mean, a mask, a weight in another dtype). A compiler
that sees forward and backward together makes those again. For forwards and backwards that are programs of their own,
this module decides it.
"""

import heapq
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

CHAIN = 8
"""The largest number of ops by which one value is made again."""


@dataclass(frozen=True, slots=True)
class ForwardOp:
    """One op of a stage's forward pass."""

    reads: Sequence[int]
    makes: Sequence[int]
    is_cheap: bool
    """Whether the op is arithmetic without effects that fuses with what reads it."""
    is_product: bool
    """Whether the op is a product. Its operands are in memory anyway and nothing fuses with it, so they are kept unless
    they follow from the program's inputs alone (a weight in another dtype)."""


@dataclass(frozen=True, slots=True)
class KeptValues:
    """The values that a stage keeps, and the ops that make the others again. ``kept``: the values that are handed from
    forward to backward. ``remade``: the positions of the ops that make all others from them and from the program's
    inputs, in order."""

    kept: tuple[int, ...]
    remade: tuple[int, ...]


def kept_values(
    ops: Sequence[ForwardOp],
    at_hand: Collection[int],
    wanted: Collection[int],
    size_bytes: Callable[[int], int],
    passing: Collection[int] = (),
) -> KeptValues:
    """The kept values and the ops that run again, so that the ``wanted`` values, which a derivative reads, can be had.

    at_hand: the program's inputs and constants, there in the backward pass anyway, but for the ``passing`` ones, which
    will have changed by then (the model's state). ``size_bytes``: the bytes of a value.
    """
    return _Chooser(ops, set(at_hand) - set(passing), size_bytes, passing).run(wanted)


class _Chooser:
    def __init__(
        self,
        ops: Sequence[ForwardOp],
        at_hand: set[int],
        size_bytes: Callable[[int], int],
        passing: Collection[int],
    ) -> None:
        self.ops, self.at_hand, self.size_bytes = ops, at_hand, size_bytes
        self.maker = dict.fromkeys(passing, -1)
        """Value → the position of the op that makes it; -1 for the ``passing`` inputs."""
        self.maker |= {value: index for index, op in enumerate(ops) for value in op.makes}
        self.in_products = {v for op in ops if op.is_product for v in op.reads}

    def run(self, wanted: Collection[int]) -> KeptValues:
        """Choose from the last value back: a value is dropped when cheap ops make it from kept or smaller ones."""
        kept = {value for value in wanted if value not in self.at_hand}
        latest = [(-self.maker[value], value) for value in kept]
        heapq.heapify(latest)
        again: set[int] = set()
        while latest:
            _, value = heapq.heappop(latest)
            chain, leaves = self._chain(value, kept - {value})
            new = leaves - kept
            if chain is None or sum(map(self.size_bytes, new)) >= self.size_bytes(value):
                continue
            if value in self.in_products and leaves:
                continue
            kept.discard(value)
            kept |= new
            again |= chain
            for leaf in new:
                heapq.heappush(latest, (-self.maker[leaf], leaf))
        ordered = tuple(dict.fromkeys(v for v in [*wanted, *sorted(kept)] if v in kept))
        return KeptValues(ordered, self._needed(again, wanted, kept))

    def _chain(self, value: int, kept: Collection[int]) -> tuple[set[int] | None, set[int]]:
        """The cheap ops that make a value, and the values from which they start: kept ones, and those that are not
        cheap to make. None in place of the ops when the value itself is not cheap to make."""
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
            if index < 0 or not self.ops[index].is_cheap or len(chain) == CHAIN:
                if current == value:
                    return None, set()
                leaves.add(current)
                continue
            if index not in chain:
                chain.add(index)
                missing += self.ops[index].reads
        return chain, leaves

    def _needed(self, again: set[int], wanted: Collection[int], kept: Collection[int]) -> tuple[int, ...]:
        """The chosen ops that the wanted values follow from."""
        missing = {value for value in wanted if value not in kept and value not in self.at_hand}
        chosen = []
        for index in sorted(again, reverse=True):
            op = self.ops[index]
            if not missing.isdisjoint(op.makes):
                chosen.append(index)
                missing.update(v for v in op.reads if v not in kept)
        return tuple(reversed(chosen))
