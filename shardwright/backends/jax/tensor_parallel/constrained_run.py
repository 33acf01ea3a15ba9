"""A traced program run with the plan's layouts as sharding constraints, and dims of blocks in held order.

Every equation runs as it was traced, on whole (logical) arrays: constraints tell the compiler where shards lie, and the
values are those of the program whatever it makes of them. Dims of blocks (`backends.jax.tensor_parallel.blocks`) are
followed through the equations that need not know the order; anything else is given the original one.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec

from shardwright.backends.jax.capture.inner_programs import (
    CHECKPOINTS,
    JITS,
    OWN_DERIVATIVES,
    aval,
    inner_program,
    interpreted,
    scanned,
)
from shardwright.backends.jax.capture.ops import ELEMENTWISE
from shardwright.backends.jax.capture.steps import Path
from shardwright.backends.jax.machine.mesh import DataAxes
from shardwright.backends.jax.program.fp8_products import Numbers, product
from shardwright.backends.jax.program.gradient_layouts import lay_out
from shardwright.backends.jax.program.split_lookups import can_look_up, look_up
from shardwright.backends.jax.tensor_parallel.block_rules import (
    RULES,
    Value,
    as_tagged,
    bind,
    dot_general,
    free_dims,
    rank_of,
)
from shardwright.backends.jax.tensor_parallel.blocks import Tags, divided, hold, restore
from shardwright.backends.jax.tensor_parallel.constraints import Guide, Guides
from shardwright.core.layout.placements import Placement, Split

Multiply = Callable[[Any, Any, Numbers], Any]
"""A function that makes the product of two arrays, as `jax.lax.dot_general` does."""
ENTRYWISE = ELEMENTWISE | {"stop_gradient", "copy", "copy_p", "optimization_barrier"}


@dataclass(frozen=True, slots=True)
class Setting:
    """The axes that placements are lowered to: a mesh, its tensor axis, and the axis of the batch."""

    mesh: jax.sharding.AbstractMesh
    """The mesh. It is abstract, so that a program fits any devices."""
    axis: str
    ways: int
    batch_axis: DataAxes | None
    """The mesh axes of the batch, for programs over the samples of all replicas; None for those of one replica."""

    def sharding(self, placement: Placement, rank: int, batch_dims: Sequence[int]) -> NamedSharding:
        entries: list[DataAxes | None] = [self.batch_axis if dim in batch_dims else None for dim in range(rank)]
        if isinstance(placement, Split):
            entries[placement.dim] = self.axis
        return NamedSharding(self.mesh, PartitionSpec(*entries))

    def of_copies(self, rank: int, batch_dims: Sequence[int]) -> NamedSharding:
        """The sharding of an array with a first dim of one copy for each rank."""
        entries = [self.batch_axis if dim in batch_dims else None for dim in range(rank)]
        return NamedSharding(self.mesh, PartitionSpec(self.axis, *entries))


def run_guided(closed: ClosedJaxpr, guides: Guides, setting: Setting, arguments: Sequence[Value]) -> list[Any]:
    """The results of a closed jaxpr, as arrays in their original order."""
    runner = _Runner(guides, setting)
    constants = [Value(constant) for constant in closed.consts]
    return [runner.original(value) for value in runner.run(closed.jaxpr, constants, arguments, ())]


class _Runner:
    def __init__(self, guides: Guides, setting: Setting) -> None:
        self.guides, self.setting, self.ways = guides, setting, setting.ways
        self.shared: dict[Any, tuple[Value, Value]] = {}
        """The (value, keys of guides) → the value (kept, so that its id stays its own) and the guided value."""

    def run(self, jaxpr: Jaxpr, constants: Sequence[Value], arguments: Sequence[Value], path: Path) -> list[Value]:
        def apply(index: int, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
            here = (*path, index)
            with ExitStack() as scopes:
                for entry in getattr(equation.source_info.name_stack, "stack", ()):
                    if type(entry).__name__ == "Scope":
                        scopes.enter_context(jax.named_scope(entry.name))
                given = [self._guided(value, (here, i)) for i, value in enumerate(operands)]
                made = self._equation(equation, given, here)
                return [self._as_made(value, (here, position)) for position, value in enumerate(made)]

        return interpreted(jaxpr, constants, arguments, apply, lambda literal: Value(literal.val))

    # --- guides

    def _guided(self, value: Value, place: tuple[Path, int]) -> Value:
        chain = self.guides.reads.get(place, ())
        if value.is_terms and (chain or place[0] not in self.guides.terms):
            value = self._summed(value)
        for length in range(1, len(chain) + 1):
            key, guide = _key(value, chain[:length]), chain[length - 1]
            if key not in self.shared:
                made = self._apply(self._last(value, chain[: length - 1]), guide)
                self.shared[key] = (value, self._copied(made, guide) if guide.copies else made)
        return self._last(value, chain)

    def _last(self, value: Value, chain: Sequence[Guide]) -> Value:
        return self.shared[_key(value, chain)][1] if chain else value

    def _as_made(self, value: Value, place: tuple[Path, int]) -> Value:
        guide = self.guides.made.get(place)
        return value if guide is None else self._apply(value, guide)

    def _apply(self, value: Value, guide: Guide) -> Value:
        """The value as the guide wants it."""
        array = value.array
        if jnp.issubdtype(array.dtype, jax.dtypes.extended):
            return value
        if guide.gradient is not None and guide.gradient != guide.value:
            array = lay_out(array, None, self._sharding(array, guide.gradient, guide))
        if guide.value is None:
            return Value(array, value.tags)
        at = self._sharding(array, guide.value, guide)
        wanted = _tags_of(guide.value)
        if wanted != value.tags:
            array = hold(restore(array, value.tags, self.ways), wanted, self.ways)
        if guide.is_constraint:
            array = lay_out(array, at, at if guide.gradient == guide.value else None)
        return Value(array, wanted)

    def _copied(self, value: Value, guide: Guide) -> Value:
        """A value as a copy for each rank: its gradient is the sum of theirs."""
        copies = jnp.broadcast_to(value.array, (self.ways, *value.array.shape))
        at = self.setting.of_copies(value.array.ndim, guide.batch_dims)
        return Value(jax.lax.with_sharding_constraint(copies, at), value.tags, is_copies=True)

    def _summed(self, value: Value) -> Value:
        """The sum of a value's terms."""
        key = id(value), "sum"
        if key not in self.shared:
            self.shared[key] = (value, Value(value.array.sum(0)))
        return self.shared[key][1]

    def _terms(self, equation: JaxprEqn, given: Sequence[Value]) -> Value:
        """The terms of a look-up in the shard of each rank, or of an equation that such look-ups go through."""
        if can_look_up(equation):
            table, ids = (self.original(value) for value in given)
            made = look_up(table, ids, self.ways)
        else:

            def one(*arrays: Any) -> Any:
                return bind(equation, arrays)[0].array

            made = jax.vmap(one)(*(value.array for value in given))
        at = self.setting.of_copies(made.ndim - 1, ())
        free = PartitionSpec(at.spec[0], *([PartitionSpec.UNCONSTRAINED] * (made.ndim - 1)))
        made = jax.lax.with_sharding_constraint(made, NamedSharding(self.setting.mesh, free))
        return Value(made, is_terms=True)

    def _sharding(self, array: Any, placement: Placement, guide: Guide) -> NamedSharding:
        return self.setting.sharding(placement, array.ndim, guide.batch_dims)

    def original(self, value: Value) -> Any:
        if value.is_terms:
            value = self._summed(value)
        return restore(value.array, value.tags, self.ways) if value.tags else value.array

    def _wanted(self, path: Path, position: int) -> Tags:
        guide = self.guides.made.get((path, position))
        return _tags_of(guide.value) if guide is not None else {}

    # --- equations

    def _equation(self, equation: JaxprEqn, given: Sequence[Value], path: Path) -> list[Value]:
        name, params = equation.primitive.name, equation.params
        multiply = self._multiply(params, path) if name == "dot_general" else None
        if any(value.is_copies for value in given):
            assert multiply is not None
            return [self._product_of_copies(equation, given, self.guides.pieces[path], multiply)]
        if path in self.guides.terms and (all(value.is_terms for value in given) or can_look_up(equation)):
            return [self._terms(equation, given)]
        given = [self._summed(value) if value.is_terms else value for value in given]
        tagged = any(value.tags for value in given)
        if (self.guides.inside(path) or tagged) and not self._is_entrywise(equation):
            if name in JITS and (body := inner_program(params)) is not None:
                return self.run(body.jaxpr, [Value(constant) for constant in body.consts], given, path)
            if name in CHECKPOINTS:
                return self._checkpoint(params, given, path)
            if name == "scan":
                return self._scan(params, given, path)
        if multiply is not None and path in self.guides.fp8:
            numbers = params["dimension_numbers"]
            return dot_general(self.ways, equation, given, lambda left, right: multiply(left, right, numbers))
        rule = RULES.get(name)
        if rule is not None and (tagged or any(self._wanted(path, i) for i in range(len(equation.outvars)))):
            made = rule(self.ways, equation, given, [self._wanted(path, i) for i in range(len(equation.outvars))])
            if made is not None:
                return made
        if tagged and self._is_entrywise(equation):
            return self._entrywise(equation, given)
        return bind(equation, [self.original(value) for value in given])

    def _multiply(self, params: Mapping[str, Any], path: Path) -> Multiply:
        """The function that multiplies for the product at ``path``."""
        if path in self.guides.fp8:
            return product
        how = {name: params[name] for name in ("precision", "preferred_element_type")}
        return partial(jax.lax.dot_general, **how)

    def _product_of_copies(
        self, equation: JaxprEqn, given: Sequence[Value], piece: tuple[int, int], multiply: Multiply
    ) -> Value:
        """A product for each rank of its copy and its shard of the other operand."""
        params, (other, dim), ways = equation.params, piece, self.ways
        plain = given[other]
        apart = divided(plain.array, dim, ways)
        operands = [jnp.moveaxis(apart, dim, 0) if i == other else value.array for i, value in enumerate(given)]
        (left_sum, right_sum), (left_batch, right_batch) = params["dimension_numbers"]
        left, right = operands
        numbers = (
            (tuple(d + 1 for d in left_sum), tuple(d + 1 for d in right_sum)),
            ((0, *(d + 1 for d in left_batch)), (0, *(d + 1 for d in right_batch))),
        )
        made = multiply(left, right, numbers)
        order = free_dims(params["dimension_numbers"], [rank_of(v.array) - v.is_copies for v in given])
        at = order.index((other, dim))
        result = jnp.moveaxis(made, 0, at).reshape(aval(equation.outvars[0]).shape)
        return Value(result, {at: plain.tags[dim]} if dim in plain.tags else {})

    def _checkpoint(self, params: Mapping[str, Any], given: Sequence[Value], path: Path) -> list[Value]:
        tags: list[Tags] = []

        def body(*arrays: Any) -> list[Any]:
            inner = [Value(array, value.tags) for array, value in zip(arrays, given, strict=True)]
            runner = _Runner(self.guides, self.setting)
            results = runner.run(params["jaxpr"], (), inner, path)
            made = [runner._summed(value) if value.is_terms else value for value in results]
            tags[:] = [value.tags for value in made]
            return [value.array for value in made]

        kept: Any = jax.checkpoint(body, policy=params.get("policy"), prevent_cse=params.get("prevent_cse", True))
        made = kept(*(value.array for value in given))
        return [Value(array, tag) for array, tag in zip(made, tags, strict=True)]

    def _scan(self, params: Mapping[str, Any], given: Sequence[Value], path: Path) -> list[Value]:
        fixed, first, body = params["num_consts"], params["num_consts"] + params["num_carry"], params["jaxpr"]
        row_tags = [{} if 0 in v.tags else {dim - 1: blocks for dim, blocks in v.tags.items()} for v in given[first:]]
        as_they_are = [i < fixed or (i >= first and 0 not in value.tags) for i, value in enumerate(given)]
        operands = [v.array if as_it_is else self.original(v) for v, as_it_is in zip(given, as_they_are, strict=True)]

        def run(*arrays: Any) -> list[Any]:
            carry, rows = arrays[fixed:first], zip(arrays[first:], row_tags, strict=True)
            inner = [*given[:fixed], *map(Value, carry), *(Value(array, tags) for array, tags in rows)]
            runner = _Runner(self.guides, self.setting)
            made = runner.run(body.jaxpr, [Value(c) for c in body.consts], inner, path)
            return [runner.original(value) for value in made]

        return [Value(array) for array in scanned(params, operands, run)]

    def _is_entrywise(self, equation: JaxprEqn) -> bool:
        """Whether every entry of the results depends on the same entry of the operands alone (dims of 1 stretch)."""
        results = {aval(variable).shape for variable in equation.outvars}
        return len(results) == 1 and _only_entrywise(equation)

    def _entrywise(self, equation: JaxprEqn, given: Sequence[Value]) -> list[Value]:
        tags: Tags = {}
        for value in given:
            tags = {**value.tags, **tags}
        arrays = []
        for value in given:
            shape = getattr(value.array, "shape", ())
            stretched = {dim for dim, size in enumerate(shape) if size == 1}
            mine = {dim: blocks for dim, blocks in tags.items() if shape and dim not in stretched}
            arrays.append(as_tagged(value, mine, self.ways))
        return [Value(value.array, tags) for value in bind(equation, arrays)]


def _only_entrywise(equation: JaxprEqn) -> bool:
    name = equation.primitive.name
    if name in ENTRYWISE:
        return True
    if name not in JITS | OWN_DERIVATIVES:
        return False
    body = inner_program(equation.params)
    inner = body.jaxpr.eqns if body is not None else []
    rank = len(aval(equation.outvars[0]).shape)
    return all(
        _only_entrywise(e) and all(len(aval(v).shape) in (0, rank) for v in (*e.invars, *e.outvars)) for e in inner
    )


def _key(value: Value, chain: Sequence[Guide]) -> tuple[int, tuple[tuple[int, ...], ...]]:
    return id(value), tuple((*guide.key, guide.copies) for guide in chain)


def _tags_of(placement: Placement | None) -> Tags:
    return {placement.dim: placement.blocks} if isinstance(placement, Split) and placement.blocks else {}
