"""Equations run in turn: from product to product, each stretch reads its operands when the product before is done.

XLA's CPU compiler puts first whatever needs no other result. In a stage's backward these are copies of saved
activations and weights in another order of dims, and arithmetic on them, of all units of the stage: they would wait in
memory until the gradient comes to them. So the operands of a stretch pass through one optimization barrier together
with the result of the product before. Everything is computed as it would be; only the order is given. What cheap
arithmetic makes of operands is made again by each stretch that reads it: made once, it would be there from the first of
them to the last, as the inputs of all residual blocks from the backward of the last block on.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.backends.jax.capture.inner_programs import CHECKPOINTS
from shardwright.backends.jax.program.equations import Equation, evaluate

Finish = Callable[[jax.Array], jax.Array]
PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "scan", "while"})
"""The primitives that read their operands from memory."""
MOST_AGAIN = 256
"""The most equations that a stretch runs again; what more of them make stays from the first stretch that reads it."""
COMMUNICATES = frozenset({"sharding_constraint"})
"""The primitives that are never run again, however cheap they are called."""
SHAPES = frozenset({"transpose", "reshape", "squeeze", "expand_dims", "convert_element_type"})
"""The primitives that compilers make part of the product whose result they read."""
SUMS = frozenset({"add_any"})
"""The primitives that add gradients up: run behind the product that makes the last of them, so that none waits."""


def evaluate_in_turn(
    equations: Sequence[Equation],
    known: dict[int, Any],
    cheap: Collection[str],
    results: Sequence[tuple[int, Finish]] = (),
    after: jax.Array | None = None,
    free: Collection[int] = (),
    masks: Collection[int] = (),
) -> list[jax.Array]:
    """Run equations as `evaluate` does, in their turn. ``cheap``: the primitives that, read from operands alone, run
    when another equation first reads their result. ``after``: a value that is known before anything runs. ``free``:
    operands that may be read at any time. ``masks``: values made of random bits (`random_draws.masks_of`), each of
    which is there before anything reads it, so that the bits do not wait for the last reader.

    ``results``: values, each with a function of it, whose results are returned. Each is there before the next stretch
    begins, so that nothing waits in memory for it.
    """
    operands = {value: array for value, array in known.items() if value not in free}
    before: int | None = None
    if after is not None:
        before = -1
        known[before] = after
    wanted: dict[int, list[int]] = {}
    for number, (value, _) in enumerate(results):
        wanted.setdefault(value, []).append(number)
    found: dict[int, jax.Array] = {}
    fresh: list[int] = []
    ordered = _results_soon(when_read(equations, known, cheap), known)
    again = _Again(ordered, known, set(cheap) - COMMUNICATES, masks, free)
    for own, last in again.stretches:
        stretch = [*again.before(own), *own]
        of_stretch = dict.fromkeys(v for e in stretch for v in e.values)
        reads = [v for v in of_stretch if is_array(operands.get(v)) or is_key(operands.get(v))]
        if not reads and fresh:  # a result that nothing waits for could be left for the end, with all that it reads
            reads = [v for v in of_stretch if v not in free and is_array(known.get(v))]
        if before is not None and (reads or fresh):
            tied = known[before], [operands.get(v, known[v]) for v in reads], [found[number] for number in fresh]
            known[before], given, added = barrier(tied)
            known.update(zip(reads, given, strict=True))
            found.update(zip(fresh, added, strict=True))
        _evaluate_masks_at_once(stretch, known, masks, before)
        made = [number for e in own for value in e.outputs for number in wanted.get(value, ())]
        found.update((number, results[number][1](known[results[number][0]])) for number in made)
        fresh = [number for number in made if is_array(found[number])]
        before = last
    return [found[n] if n in found else finish(known[value]) for n, (value, finish) in enumerate(results)]


class _Again:
    """The stretches of a program, and what each of them makes again of operands by cheap arithmetic: values that
    stretches before it made, unless their operands would have to stay for that, and take no less than they do."""

    def __init__(
        self,
        equations: Sequence[Equation],
        known: dict[int, Any],
        cheap: Collection[str],
        masks: Collection[int],
        free: Collection[int],
    ) -> None:
        self.stretches, self.known = list(_stretches(equations, known)), known
        self.makers: dict[int, Equation] = {}
        """The values that cheap equations make of operands alone; masks are left out."""
        self.sources = {value: frozenset() if value in free else frozenset({value}) for value in known}
        """The operands that have to be there for each value that can be made again."""
        self.ran: set[int] = set()
        self.at = -1
        for equation in equations:
            is_cheap = equation.primitive.name in cheap and not equation.effects and equation.region is None
            is_whole = is_cheap and all(value in self.sources for value in equation.values)
            if is_whole and not any(value in masks for value in equation.outputs):
                found = frozenset().union(*(self.sources[value] for value in equation.values))
                self.sources.update(dict.fromkeys(equation.outputs, found))
                self.makers.update(dict.fromkeys(equation.outputs, equation))
        own = {id(equation) for equation in self.makers.values()}
        read = {
            value: number
            for number, (stretch, _) in enumerate(self.stretches)
            for equation in stretch
            if id(equation) not in own
            for value in equation.values
            if value in self.sources
        }
        self.needed: dict[int, list[tuple[int, int]]] = {}
        """The last stretches for which an operand has to be there, the last one first, each with the value that is read
        there and made of it: of the two values that are read last."""
        for value, number in sorted(read.items(), key=lambda pair: -pair[1]):
            for source in self.sources[value]:
                if len(latest := self.needed.setdefault(source, [])) < 2:
                    latest.append((number, value))

    def before(self, stretch: Sequence[Equation]) -> list[Equation]:
        """The equations, in order, that the next stretch runs again."""
        self.at += 1
        found: list[Equation] = []
        seen: set[int] = set()
        read = (value for equation in stretch for value in equation.values)
        waiting = [(value, False) for value in read if value in self.ran and self._is_made_again(value)]
        while waiting:
            value, is_due = waiting.pop()
            equation = self.makers.get(value)
            if equation is None or (id(equation) in seen and not is_due):
                continue
            if is_due:
                found.append(equation)
                continue
            seen.add(id(equation))
            waiting.append((value, True))
            waiting += [(source, False) for source in equation.values]
        self.ran.update(value for equation in stretch for value in equation.outputs)
        return found if len(found) <= MOST_AGAIN else []

    def _is_made_again(self, value: int) -> bool:
        if value not in self.makers:
            return False
        staying = (source for source in self.sources[value] if not self._is_needed_beside(source, value))
        return sum(map(self._size, staying)) < self._size(value)

    def _is_needed_beside(self, source: int, value: int) -> bool:
        """Whether an operand has to be there now, or later, for another value than one that is made of it."""
        return any(number >= self.at and other != value for number, other in self.needed.get(source, ()))

    def _size(self, value: int) -> int:
        array = self.known[value]
        return int(array.size) * int(getattr(array.dtype, "itemsize", 8))


def _evaluate_masks_at_once(
    equations: Sequence[Equation], known: dict[int, Any], masks: Collection[int], product: int | None
) -> None:
    """Run equations. Masks pass through a barrier together with the product before them."""
    waiting: list[Equation] = []
    for equation in equations:
        waiting.append(equation)
        made = [value for value in equation.outputs if value in masks]
        if made and product is not None:
            evaluate(waiting, known)
            waiting = []
            tie(product, made, known)
    evaluate(waiting, known)


def _results_soon(equations: Sequence[Equation], known: Collection[int]) -> list[Equation]:
    """The equations in an order in which those that nothing but results wait for follow what they read at once."""
    readers: dict[int, list[Equation]] = {}
    for equation in equations:
        for value in equation.values:
            readers.setdefault(value, []).append(equation)
    last: set[int] = set()
    for equation in reversed(equations):
        follows = all(id(reader) in last for value in equation.outputs for reader in readers.get(value, ()))
        if follows and not equation.effects and equation.primitive.name not in PRODUCTS | CHECKPOINTS:
            last.add(id(equation))
    missing = {id(e): {value for value in e.values if value not in known} for e in equations}
    ordered: list[Equation] = []
    ran: set[int] = set()

    def run(equation: Equation) -> None:
        ordered.append(equation)
        ran.add(id(equation))
        for value in equation.outputs:
            for reader in dict.fromkeys(readers.get(value, ())):
                missing[id(reader)].discard(value)
                if id(reader) in last and not missing[id(reader)] and id(reader) not in ran:
                    run(reader)

    for equation in equations:
        if id(equation) not in ran:
            run(equation)
    return ordered


def is_array(value: Any) -> bool:
    """Whether an operand is an array of numbers: no random key, no token."""
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.number)


def is_key(value: Any) -> bool:
    """Whether an operand is a random key."""
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def barrier(values: Any) -> Any:
    """The same values, none of which is read before all are there. Random keys pass as the numbers that they are."""
    leaves, structure = jax.tree.flatten(values)
    plain = jax.lax.optimization_barrier([jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in leaves])
    again = [
        jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if is_key(leaf) else array
        for leaf, array in zip(leaves, plain, strict=True)
    ]
    return jax.tree.unflatten(structure, again)


def tie(product: int, others: Sequence[int], known: dict[int, Any]) -> None:
    """Pass a product and other values through one barrier. Whatever reads any of them later waits for all. (XLA drops
    from a barrier what nothing reads behind it.)"""
    if others and is_array(known[product]):
        known[product], found = barrier((known[product], [known[value] for value in others]))
        known.update(zip(others, found, strict=True))


def when_read(equations: Sequence[Equation], known: Collection[int], cheap: Collection[str]) -> list[Equation]:
    """The equations, cheap ones of operands directly before the first that reads them. Those of a region stay."""
    waiting: dict[int, Equation] = {}
    ordered: list[Equation] = []

    def run_makers(equation: Equation) -> None:
        for value in equation.values:
            if (maker := waiting.get(value)) is not None:
                for made in maker.outputs:
                    del waiting[made]
                run_makers(maker)
                ordered.append(maker)

    for equation in equations:
        is_cheap = equation.primitive.name in cheap and not equation.effects and equation.region is None
        if is_cheap and all(value in known or value in waiting for value in equation.values):
            waiting.update(dict.fromkeys(equation.outputs, equation))
            continue
        run_makers(equation)
        ordered.append(equation)
    return [*ordered, *dict.fromkeys(waiting.values())]


def _stretches(equations: Sequence[Equation], known: Collection[int]) -> Iterator[tuple[list[Equation], int]]:
    """The equations from one product to the next, with the last value that the product makes, or that changes of its
    shape and sums with gradients that are there make of it."""
    readers: dict[int, list[Equation]] = {}
    for equation in equations:
        for value in equation.values:
            readers.setdefault(value, []).append(equation)
    stretch: list[Equation] = []
    ran: set[int] = set()
    there = set(known)
    last = -1
    for equation in equations:
        if id(equation) in ran:
            continue
        stretch.append(equation)
        there.update(equation.outputs)
        if equation.primitive.name not in PRODUCTS | CHECKPOINTS:
            continue
        last = equation.outputs[0]
        while len(after := readers.get(last, [])) == 1 and after[0].primitive.name in SHAPES | SUMS:
            if not there.issuperset(after[0].values):
                break
            stretch.append(after[0])
            ran.add(id(after[0]))
            there.update(after[0].outputs)
            last = after[0].outputs[0]
        yield stretch, last
        stretch = []
    if stretch:
        yield stretch, last
