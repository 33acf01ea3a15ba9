"""What is known of the values of masks: that they hide later tokens from each, and no token from itself.

A mask that follows from constants alone is computed and looked at. One that the batch makes is known by the ops that
make it: a mask that hides later tokens still does so together with another, and whatever is equal along two dims of one
array is equal on the diagonal (the segments of packed documents).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.backends.jax.program.equations import Atom, Equation, FlatProgram, aval_of, evaluate, needed

Fact = Literal["zero", "nonzero", "low", "shown"]
"""What entries are: 0 or False, another number or True, so low that its exponential is 0 behind others, or not low."""
Where = Literal["later", "diagonal", "everywhere"]
MOST_ENTRIES = 1 << 27
"""The most entries of a mask that is computed to be looked at."""
SHAPES = frozenset({"broadcast_in_dim", "reshape", "transpose", "squeeze", "convert_element_type", "copy", "copy_p",
                    "sharding_constraint", "stop_gradient"})  # fmt: skip


def is_low(value: Any, dtype: Any) -> bool:
    """Whether the exponential of a number is 0 behind those of any others."""
    is_half = jnp.dtype(dtype) == jnp.float16
    return bool(value <= (-16_000.0 if is_half else -1e9))


class Constants:
    """The values of a program that follow from no argument, and what is known of others."""

    def __init__(self, flat: FlatProgram) -> None:
        self.flat = flat
        self.maker: dict[int, Equation] = {value: e for e in flat.equations for value in e.outputs}
        self.closed = set(flat.constants)
        for equation in flat.equations:
            if not equation.effects and all(value in self.closed for value in equation.values):
                self.closed.update(equation.outputs)
        self._arrays: dict[int, np.ndarray] = {}

    def scalar(self, atom: Atom) -> float | None:
        """The one number that all entries of a value are; None where that is not known."""
        while isinstance(atom, int):
            maker = self.maker.get(atom)
            if maker is None or maker.primitive.name not in SHAPES:
                return self._uniform(atom)
            atom = maker.inputs[0]
        return float(np.asarray(atom.val)) if np.ndim(atom.val) == 0 else None

    def _uniform(self, value: int) -> float | None:
        is_number = not jnp.issubdtype(self.flat.avals[value].dtype, jax.dtypes.extended)
        if value in self.closed and is_number and self.flat.avals[value].size == 1:
            return float(self._array(value).reshape(()))
        return None

    def has(self, atom: Atom, fact: Fact, where: Where, query: int = 0, key: int = 0) -> bool:
        """Whether all entries of a value are such: everywhere, or where the index along ``key`` is above that along
        ``query`` ("later"), or is the same."""
        aval = aval_of(self.flat, atom)
        if where != "everywhere" and aval.shape[query] != aval.shape[key]:
            where = "everywhere"
        number = self.scalar(atom)
        if number is not None:
            return _holds(np.asarray(number), fact, aval.dtype)
        assert isinstance(atom, int)
        if atom in self.closed and aval.size <= MOST_ENTRIES:
            array = self._array(atom)
            if where == "everywhere":
                return _holds(array, fact, aval.dtype)
            array = np.moveaxis(array, (query, key), (-2, -1))
            inside = (
                np.triu(np.ones(array.shape[-2:], bool), 1) if where == "later" else np.eye(array.shape[-1], dtype=bool)
            )
            return _holds(array[..., inside], fact, aval.dtype)
        maker = self.maker.get(atom)
        return maker is not None and self._follows(maker, fact, where, query, key)

    def _follows(self, maker: Equation, fact: Fact, where: Where, query: int, key: int) -> bool:
        """Whether a fact follows from an op and what is known of its operands."""
        name, inputs = maker.primitive.name, maker.inputs

        def each(fact: Fact) -> list[bool]:
            return [self.has(atom, fact, where, query, key) for atom in inputs]

        if name in SHAPES:
            dims = source_dims(self.flat, maker)
            if where == "everywhere":
                return self.has(inputs[0], fact, where)
            if query not in dims or key not in dims:
                return self.has(inputs[0], fact, "everywhere")
            return self.has(inputs[0], fact, where, dims[query], dims[key])
        if name in ("and", "mul") and fact in ("zero", "nonzero"):
            return any(each("zero")) if fact == "zero" else all(each("nonzero"))
        if name in ("or", "max") and fact in ("zero", "nonzero"):
            is_boolean = aval_of(self.flat, maker.outputs[0]).dtype == bool
            return is_boolean and (any(each("nonzero")) if fact == "nonzero" else all(each("zero")))
        if name == "not":
            other: dict[Fact, Fact] = {"zero": "nonzero", "nonzero": "zero"}
            return fact in other and self.has(inputs[0], other[fact], where, query, key)
        if name in ("ne", "gt") and self.scalar(inputs[1]) == 0 and fact == "zero":
            return self.has(inputs[0], "zero", where, query, key)
        if name == "ne" and self.scalar(inputs[1]) == 0 and fact == "nonzero":
            return self.has(inputs[0], "nonzero", where, query, key)
        if name in ("eq", "ge", "le") and fact == "nonzero" and where == "diagonal":
            return self._is_mirrored(inputs[0], inputs[1], query, key)
        if name == "select_n" and len(inputs) == 3:
            chosen, no, yes = inputs
            first, second = (self.has(case, fact, where, query, key) for case in (no, yes))
            if first and second:
                return True
            at: Where = where if aval_of(self.flat, chosen).shape else "everywhere"
            return (first and self.has(chosen, "zero", at, query, key)) or (
                second and self.has(chosen, "nonzero", at, query, key)
            )
        return False

    def _is_mirrored(self, one: Atom, other: Atom, query: int, key: int) -> bool:
        """Whether two operands are one array, along ``query`` in one of them and along ``key`` in the other."""
        (first, dims), (second, those) = self._origin(one), self._origin(other)
        if first != second or not isinstance(first, int):
            return False
        swapped = {query: key, key: query}
        return any(
            {swapped.get(out, out): source for out, source in a.items()} == b or a == b
            for a, b in ((dims, those), (those, dims))
        )

    def _origin(self, atom: Atom) -> tuple[Atom, dict[int, int]]:
        """The value of which one is a broadcast, and of the dims that are not of size 1, which of it each is."""
        shape = aval_of(self.flat, atom).shape
        dims = {dim: dim for dim, size in enumerate(shape) if size != 1}
        while isinstance(atom, int) and (maker := self.maker.get(atom)) is not None and maker.primitive.name in SHAPES:
            own = source_dims(self.flat, maker)
            if maker.primitive.name == "reshape" and len(own) < sum(size != 1 for size in self.flat.avals[atom].shape):
                break
            dims = {out: own[dim] for out, dim in dims.items() if dim in own}
            atom = maker.inputs[0]
        return atom, dims

    def _array(self, value: int) -> np.ndarray:
        if value not in self._arrays:
            known: dict[int, Any] = dict(self.flat.constants)
            evaluate(needed([anywhere(self.flat, e) for e in self.flat.equations if not e.effects], [value]), known)
            self._arrays[value] = np.asarray(known[value])
        return self._arrays[value]


def anywhere(flat: FlatProgram, equation: Equation) -> Equation:
    """An equation without the layout that it gives to a value on a mesh, which eager arrays cannot have."""
    if equation.primitive.name != "sharding_constraint":
        return equation
    same = {"new_sizes": flat.avals[equation.outputs[0]].shape, "dimensions": None, "sharding": None}
    return replace(equation, primitive=jax.lax.reshape_p, params=same)


def source_dims(flat: FlatProgram, equation: Equation) -> Mapping[int, int]:
    """The dims of the result of an op on shapes alone → the dims of its operand, where they are whole ones of more than
    one entry."""
    name, params = equation.primitive.name, equation.params
    given, made = aval_of(flat, equation.inputs[0]).shape, flat.avals[equation.outputs[0]].shape
    if name == "broadcast_in_dim":
        found = {int(out): dim for dim, out in enumerate(params["broadcast_dimensions"])}
    elif name == "transpose":
        found = {out: int(dim) for out, dim in enumerate(params["permutation"])}
    elif name == "squeeze":
        gone = {int(d) % len(given) for d in params["dimensions"]}
        found = dict(enumerate(dim for dim in range(len(given)) if dim not in gone))
    elif name == "reshape":
        found = _reshaped(given, made)
    else:
        found = {dim: dim for dim in range(len(given))}
    return {out: dim for out, dim in found.items() if given[dim] == made[out] != 1}


def _reshaped(given: tuple[int, ...], made: tuple[int, ...]) -> dict[int, int]:
    """The dims of a reshaped array → those of the array given, where they are the same."""
    before = {}
    size = 1
    for dim, entries in enumerate(given):
        if entries != 1:
            before[size, entries] = dim
        size *= entries
    found, size = {}, 1
    for out, entries in enumerate(made):
        if entries != 1 and (size, entries) in before:
            found[out] = before[size, entries]
        size *= entries
    return found


def _holds(array: np.ndarray, fact: Fact, dtype: Any) -> bool:
    if fact == "zero":
        return not array.any()
    if fact == "nonzero":
        return bool(np.all(array != 0))
    if not jnp.issubdtype(dtype, jnp.floating):
        return False
    if fact == "low":
        return bool(array.size == 0 or is_low(array.max(), dtype))
    return bool(array.size == 0 or array.min() > -1e4)
