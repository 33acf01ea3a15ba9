"""A traced program as one flat list of equations, which can be cut into parts that run by themselves.

Unlike `capture.steps`, which reads a model for planning, this keeps everything that running needs: every equation can
be bound again. `flattening` makes it of a traced function.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend import core as jex_core

from shardwright.backends.jax.capture.checkpoint_policies import POLICIES
from shardwright.backends.jax.capture.inner_programs import CHECKPOINTS, aval, bound, scanned
from shardwright.backends.jax.capture.own_checkpoints import plain_call, with_plain

AWAY = "shardwright:away:"
"""In the names of equations, before the number 1: what they make for the backward pass goes to the host until then."""
NO_OTHERS: Mapping[int, str] = MappingProxyType({})
Atom = int | jex_core.Literal
"""A value of the program by its number, or a literal."""


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """An opened `jax.checkpoint`, whose policy holds for each part of it, whichever stage runs that."""

    policy: Any
    prevent_cse: bool


@dataclass(frozen=True, slots=True, eq=False)
class Equation:
    """One application of a primitive. ``stage`` is that of the module call around it; None outside of all."""

    primitive: jex_core.Primitive
    params: Mapping[str, Any]
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    context: Any
    stage: int | None = None
    unit: int | None = None
    region: Region | None = None
    effects: frozenset[Any] = frozenset()
    is_layers: bool = False
    """Whether the equation is a loop over stacked weights: every iteration is a unit, or several, that may be
    recomputed by itself."""
    call: int = 0
    """The number of the module call that the equation was traced in."""
    source: Any = None
    """The line of the user's code that made the equation, as JAX keeps it."""

    @property
    def values(self) -> Iterator[int]:
        """The numbers of the equation's inputs, literals left out."""
        return (atom for atom in self.inputs if isinstance(atom, int))

    @property
    def is_ordered(self) -> bool:
        """Whether the equation has a side effect that JAX keeps in the order of the program."""
        return bool(self.params.get("ordered")) or any("Ordered" in type(effect).__name__ for effect in self.effects)


@dataclass(slots=True)
class FlatProgram:
    """A flat program. Values are numbered in the order in which they are made: arguments, constants, then results."""

    avals: list[ShapedArray] = field(default_factory=list)
    equations: list[Equation] = field(default_factory=list)
    arguments: tuple[int, ...] = ()
    constants: dict[int, Any] = field(default_factory=dict)
    outputs: tuple[Atom, ...] = ()
    looped_units: set[int] = field(default_factory=set)
    """The units that are iterations of loops over stacked weights."""

    def new(self, aval: ShapedArray) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def hold(self, closed: jex_core.ClosedJaxpr) -> list[int]:
        """The values of a program's constants, which are added."""
        made = [self.new(aval(variable)) for variable in closed.jaxpr.constvars]
        self.constants.update(zip(made, closed.consts, strict=True))
        return made

    def size_bytes(self, value: int) -> int:
        aval = self.avals[value]
        return int(aval.size) * int(getattr(aval.dtype, "itemsize", 8))

    def is_small(self, value: int, limit: int) -> bool:
        """Whether a value consists of numbers (random keys do not) and takes up to ``limit`` bytes."""
        return self.size_bytes(value) <= limit and not jnp.issubdtype(self.avals[value].dtype, jax.dtypes.extended)


def aval_of(flat: FlatProgram, atom: Atom) -> ShapedArray:
    """The shape and dtype of a value or a literal."""
    return flat.avals[atom] if isinstance(atom, int) else aval(atom)


def value_of(flat: FlatProgram, atom: Atom, known: Mapping[int, jax.Array]) -> jax.Array:
    """A value that is known, or a literal."""
    return known[atom] if isinstance(atom, int) else jnp.asarray(atom.val, aval_of(flat, atom).dtype)


def needed(equations: Sequence[Equation], wanted: Iterable[int]) -> list[Equation]:
    """The equations that make the ``wanted`` values, and those with side effects."""
    missing = set(wanted)
    kept = []
    for equation in reversed(equations):
        if equation.effects or not missing.isdisjoint(equation.outputs):
            kept.append(equation)
            missing.update(equation.values)
    return kept[::-1]


def evaluate(
    equations: Sequence[Equation],
    known: dict[int, Any],
    recompute: str = "none",
    away: Collection[int] = (),
    others: Mapping[int, str] = NO_OTHERS,
) -> None:
    """Run equations. ``known`` holds the values that they read, and receives those that they make.

    ``recompute``: the policy (`POLICIES`) for what is kept of every equation's ``unit``, and what is computed again
    in the backward pass; "none" keeps all. ``away``: the units that keep all, whose equations are traced with `AWAY` in
    their names. ``others``: the units that have another policy.
    """

    def region_of(equation: Equation) -> tuple[int, int]:
        is_named = equation.unit is not None and (recompute != "none" or equation.unit in away)
        return (id(equation.region) if equation.region else 0), (equation.unit if is_named else -1)  # type: ignore[return-value]

    for (_, unit), members in groupby(equations, key=region_of):
        group = list(members)
        region = group[0].region
        if region is None and unit in away:
            with jax.named_scope(f"{AWAY}1"):
                _bind_all(group, known)
            continue
        if region is None and unit < 0:
            _bind_all(group, known, recompute)
            continue
        made = [value for equation in group for value in equation.outputs]
        inside = set(made)
        read = list(dict.fromkeys(v for equation in group for v in equation.values if v not in inside))

        bind_all = partial(_bind_all, group, opens_checkpoints=region is None)

        def run(*given: Any, bind_all: Any = bind_all, read: list[int] = read, made: list[int] = made) -> Any:
            local = dict(zip(read, given, strict=True))
            bind_all(local)
            return [local[value] for value in made]

        mode = others.get(unit, recompute)
        policy, prevent_cse = (region.policy, region.prevent_cse) if region else (POLICIES[mode], True)
        kept: Any = jax.checkpoint(run, policy=policy, prevent_cse=prevent_cse)
        known.update(zip(made, kept(*(known[value] for value in read)), strict=True))


def _bind_all(
    equations: Iterable[Equation], known: dict[int, Any], recompute: str = "none", *, opens_checkpoints: bool = False
) -> None:
    """Run equations. ``opens_checkpoints``: whether checkpoints of the model's own are plain calls."""
    for context, members in groupby(equations, key=lambda equation: equation.context):
        with context.manager:
            for equation in members:
                given = [known[atom] if isinstance(atom, int) else atom.val for atom in equation.inputs]
                if opens_checkpoints and equation.primitive.name in CHECKPOINTS:
                    made = plain_call(equation.params)(*given)
                elif recompute != "none" and equation.is_layers:
                    made = _checkpointed_loop(equation.params, given, recompute)
                else:
                    made = bound(equation.primitive, equation.params, given)
                known.update(zip(equation.outputs, made, strict=True))


def _checkpointed_loop(params: Mapping[str, Any], given: Sequence[Any], recompute: str) -> list[Any]:
    """The results of a scan whose iterations are units."""
    run = jex_core.jaxpr_as_fun(with_plain(params["jaxpr"]))
    return scanned(params, given, jax.checkpoint(run, policy=POLICIES[recompute], prevent_cse=False))
