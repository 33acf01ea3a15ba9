"""What is known of scores and of what is made of them: that those of later keys are low, or 0.

A mask of constants is known by its values, one that the batch makes by the ops that make it; whether such a one shows
each token something up to itself is looked at when a step runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.backends.jax.program.equations import Atom, Equation, FlatProgram, aval_of
from shardwright.backends.jax.slices.axes import Axis
from shardwright.backends.jax.slices.hidden import Constants, Fact, Where, is_low
from shardwright.backends.jax.slices.op_dims import ELEMENTWISE, OpDims

Axes = tuple[Axis | None, ...]
ZERO_OF_ZERO = frozenset({"abs", "expm1", "log1p", "sign", "sin", "sqrt", "square", "tan", "tanh"})
KEEPS = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "copy_p", "name", "reduce_precision", "reshape",
                   "sharding_constraint", "squeeze", "stop_gradient", "transpose"})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Check:
    """What has to hold of a mask's values: along ``key``, some entry of each row is ``shown``.

    ``position``: of the first equation that masks by it.
    """

    mask: int
    shown: Fact
    key: int
    position: int


@dataclass(slots=True, eq=False)
class Masking:
    """The values of a program by what is known of them.

    Attributes:
        axes: value → its dims, as they are found.
        low: value → the dims along which later entries are so low that they are 0 behind others' exponentials.
        zero: value → the dims along which later entries are 0.
        dimmed: the scores that may be low for a token's own entry and all before it: then later ones count as much.
        looked_at: the scores of which that is looked at when a step runs.
        checks: mask → what has to hold of its values then.
        of_parameters: the values that follow from parameters, and from no token.
        of_batch: those that follow from the batch and constants apart.
        position: of the equation that is read.
    """

    flat: FlatProgram
    tokens: int
    axes: Mapping[int, Axes]
    is_inner: bool
    low: dict[int, frozenset[int]] = field(default_factory=dict)
    zero: dict[int, frozenset[int]] = field(default_factory=dict)
    dimmed: set[int] = field(default_factory=set)
    looked_at: set[int] = field(default_factory=set)
    checks: dict[int, Check] = field(default_factory=dict)
    of_parameters: set[int] = field(default_factory=set)
    of_batch: set[int] = field(default_factory=set)
    position: int = 0
    constants: Constants = field(init=False)
    _wanted: list[Check] = field(default_factory=list)
    """The checks without which the equation that is read does not hide later entries."""

    def __post_init__(self) -> None:
        self.constants = Constants(self.flat)

    def keep(self, given: int, made: int) -> None:
        """Note that a value is another one, elsewhere."""
        for known in (self.low, self.zero):
            if given in known:
                known[made] = known[given]
        for held in (self.dimmed, self.looked_at):
            held.update((made,) if given in held else ())

    def note(self, equation: Equation, dims: OpDims, moves: Any) -> None:
        """Note what is known of an equation's result. ``moves``: whether slices make an operand."""
        name, inputs, made = equation.primitive.name, equation.inputs, equation.outputs[0]
        axes = self.axes[made]
        places = [
            d for d, axis in enumerate(axes) if axis is not None and axis.role != "plain" and not axis.is_stretched
        ]

        def of(held: Mapping[int, frozenset[int]], number: int) -> frozenset[int]:
            atom = inputs[number]
            if not isinstance(atom, int) or not moves(atom):
                return frozenset()
            return frozenset(dims.carried[number][d] for d in held.get(atom, ()) if d in dims.carried[number])

        low: frozenset[int] = frozenset()
        zero: frozenset[int] = frozenset()
        self._wanted.clear()
        if name in KEEPS:
            low, zero = of(self.low, 0), of(self.zero, 0)
        elif name in ZERO_OF_ZERO or name == "neg" or (name == "integer_pow" and equation.params["y"] > 0):
            zero = of(self.zero, 0)
        elif name == "mul":
            zero = of(self.zero, 0) | of(self.zero, 1)
            for one, other in ((0, 1), (1, 0)):
                factor = None if moves(inputs[other]) else self.constants.scalar(inputs[other])
                if factor is not None and factor >= 0.01:
                    low |= of(self.low, one)
        elif name == "div":
            zero, divisor = of(self.zero, 0), None if moves(inputs[1]) else self.constants.scalar(inputs[1])
            low = of(self.low, 0) if divisor is not None and 0 < divisor <= 100 else low
        elif name in ("add", "add_any"):
            low, zero = of(self.low, 0) | of(self.low, 1), of(self.zero, 0) & of(self.zero, 1)
            for one, other in ((0, 1), (1, 0)):
                if moves(inputs[one]) and not moves(inputs[other]):
                    low |= self._hides(inputs[other], made, places, "low", "shown")
        elif name == "sub":
            low, zero = of(self.low, 0) - of(self.low, 1), of(self.zero, 0) & of(self.zero, 1)
        elif name in ("exp", "exp2"):
            zero = of(self.low, 0)
        elif name == "reduce_sum":
            zero = of(self.zero, 0)
        elif name == "reduce_max":
            low = of(self.low, 0)
        elif name == "dot_general":
            zero = of(self.zero, 0) | of(self.zero, 1)
        elif name == "select_n" and len(inputs) == 3:
            low, zero = self._selected(equation, places, of, moves)
        elif name in ("slice", "concatenate", "pad") and len(inputs) == 1:
            low, zero = of(self.low, 0), of(self.zero, 0)
        if self._wanted and (self.looked_at | self.dimmed).isdisjoint(equation.values):
            for check in self._wanted:
                self.checks.setdefault(check.mask, check)
            self.looked_at.add(made)
            self.low[made] = low
        elif len(places) == 2 and self._is_dimmed(equation, places, moves):
            self.dimmed.add(made)
        elif low:
            self.low[made] = low
        if not self.looked_at.isdisjoint(equation.values) and (name in KEEPS or name in ELEMENTWISE):
            self.looked_at.add(made)
        if zero:
            self.zero[made] = zero

    def _is_dimmed(self, equation: Equation, places: Sequence[int], moves: Any) -> bool:
        """Whether an op may make low what a token sees of itself: by what it selects, or adds."""
        name, inputs = equation.primitive.name, equation.inputs
        if any(moves(atom) and atom in self.dimmed for atom in inputs):
            return name in KEEPS or name in ELEMENTWISE
        query, key = places
        is_looked_at = not self.looked_at.isdisjoint(equation.values)

        def is_shown(atom: Atom) -> bool:
            if moves(atom) or atom in self.of_parameters:
                return True
            aval = aval_of(self.flat, atom)
            is_whole = len(aval.shape) == len(self.axes[equation.outputs[0]]) and not is_looked_at
            where: Where = "diagonal" if is_whole else "everywhere"
            is_real = jnp.issubdtype(aval.dtype, jnp.floating)
            return not is_real or self.constants.has(atom, "shown", where, query, key)

        if name in ("add", "add_any", "sub", "min", "clamp"):
            return not all(map(is_shown, inputs))
        if name != "select_n" or len(inputs) != 3:
            return False
        chosen, no, yes = inputs
        if is_shown(no) and is_shown(yes):
            return False
        is_whole = not moves(chosen) and len(aval_of(self.flat, chosen).shape) == len(self.axes[equation.outputs[0]])
        is_whole = is_whole and not is_looked_at
        kept: Fact = "nonzero" if is_shown(yes) else "zero"
        return not (is_whole and self.constants.has(chosen, kept, "diagonal", query, key))

    def _selected(
        self, equation: Equation, places: Sequence[int], of: Any, moves: Any
    ) -> tuple[frozenset[int], frozenset[int]]:
        """The dims along which what is selected is low, and 0, for later entries."""
        chosen, *cases = equation.inputs
        made = equation.outputs[0]
        found = []
        for kind, held in (("low", self.low), ("zero", self.zero)):
            parts = []
            for number, case in enumerate(cases, 1):
                if moves(case):
                    parts.append(of(held, number))
                    continue
                value, dtype = self.constants.scalar(case), aval_of(self.flat, case).dtype
                fits = value is not None and (is_low(value, dtype) if kind == "low" else value == 0)
                parts.append(frozenset(places) if fits else frozenset())
            both = parts[0] & parts[1]
            for part, later, own in ((parts[0], "zero", "nonzero"), (parts[1], "nonzero", "zero")):
                if part and not moves(chosen):
                    both |= part & self._hides(chosen, made, places, later, own, may_check=kind == "low")
            found.append(both)
        return found[0], found[1]

    def _hides(
        self, mask: Atom, made: int, places: Sequence[int], later: Any, own: Any, *, may_check: bool = True
    ) -> frozenset[int]:
        """The dims of a result along which a mask hides later entries, and from no entry its own. That a mask of the
        batch hides not all from any is looked at when a step runs."""
        aval, found = aval_of(self.flat, mask), set()
        if len(places) != 2 or len(aval.shape) != len(self.axes[made]):
            return frozenset()
        for query, key in (places, places[::-1]):
            is_square = aval.shape[query] == aval.shape[key] == self.tokens
            if not is_square or not self.constants.has(mask, later, "later", query, key):
                continue
            if not self.constants.has(mask, own, "diagonal", query, key):
                is_of_batch = isinstance(mask, int) and mask in self.of_batch
                if not is_of_batch or not may_check or self.is_inner or jax.process_count() > 1:
                    continue
                self._wanted.append(Check(mask, own, key, self.position))  # type: ignore[arg-type]
            found.add(key)
        return frozenset(found)
