"""The named leaves of models, parameters and states, and the way back. Names are keys joined by '.'."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from flax import nnx

from shardwright.core.errors import CaptureError, PlanError


def dotted(path: Iterable[Any]) -> str:
    """The dotted name of a path: ``("h", 0, "attn")`` → ``"h.0.attn"``."""
    return ".".join(map(str, path))


def require_order(tree: Any, what: str) -> None:
    """Raise CaptureError, with ``what`` as the name of the tree, for a pytree with dicts whose keys JAX cannot sort."""
    try:
        jax.tree.leaves(tree)
    except ValueError as error:
        raise CaptureError(
            f"{what} has a dict whose keys cannot be sorted, so that its arrays have no order "
            f"({error.__cause__ or error}): use keys of one type, as strings"
        ) from error


def flat_names(tree: Any) -> tuple[str, ...]:
    """The dotted path of every leaf, in the order of `jax.tree.leaves`."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return tuple(jax.tree_util.keystr(path, simple=True, separator=".") for path in paths)


def path_names(tree: Any) -> list[tuple[str, Any]]:
    """Every leaf and its path as written in Python: ``"['h'][0].kernel"``."""
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


class Followed(NamedTuple):
    """A parameter that a leaf of an optimizer's state belongs to."""

    prefix: tuple[Any, ...]
    """The leaf's path before the parameter's own: which of the optimizer's values it is."""
    number: int
    """The parameter's number among the leaves of the parameters."""


def followed(state: Any, params: Any) -> list[Followed | None]:
    """The parameter whose path the path of each leaf of an optimizer's state ends in; None for counters and the
    like."""
    known = {path: number for number, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(params))}
    found: list[Followed | None] = []
    for path, _ in jax.tree_util.tree_leaves_with_path(state):
        ends = (Followed(path[:n], known[path[n:]]) for n in range(len(path)) if path[n:] in known)
        found.append(next(ends, None))
    return found


def shape_key(tree: Any) -> Hashable:
    """The structure of a tree, and the shapes and dtypes of its leaves."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def parameter_names(params: Any) -> tuple[str, ...]:
    """The name of every parameter of a pytree. Linen's one collection, ``{"params": …}``, gives no prefix, so that a
    module's variables and its parameters alone have the same names."""
    names = flat_names(params)
    if isinstance(params, dict) and set(params) == {"params"}:
        return tuple(name.removeprefix("params.") for name in names)
    return names


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array, a number or a shape. Raises CaptureError for anything else."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    try:
        return jax.ShapeDtypeStruct(jax.numpy.shape(leaf), jax.dtypes.canonicalize_dtype(jax.numpy.result_type(leaf)))
    except (TypeError, ValueError):
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):  # typed random keys
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        raise CaptureError(f"a {type(leaf).__name__} is neither an array nor a shape: {leaf!r:.80}") from None


def abstract_parameters(params: Any) -> Any:
    """The shapes of a pytree of parameters. Raises CaptureError, naming the leaf, where one is neither an array nor a
    number, as the functions among the fields of an Equinox module are."""

    def named(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        try:
            return abstract(leaf)
        except CaptureError as error:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise CaptureError(
                f"{name or 'what'} is among the parameters, and {error}. Leave out of them what is no array, and put "
                "it back inside of the loss function: in Equinox params, rest = equinox.partition(model, "
                "equinox.is_inexact_array), and equinox.combine(params, rest)"
            ) from None

    return jax.tree_util.tree_map_with_path(named, params)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Parts:
    """A model taken apart, as a pytree of arrays or of shapes."""

    params: Any
    random: Any
    other: Any
    graphdef: nnx.GraphDef[Any] | None = field(metadata={"static": True})
    """NNX's description of the module; None for a plain pytree of parameters."""

    @property
    def names(self) -> tuple[str, ...]:
        """The dotted name of every parameter, in the order of ``jax.tree.leaves(params)``."""
        return self._names(self.params)

    @property
    def other_names(self) -> tuple[str, ...]:
        """The dotted name of every value in ``other``."""
        return self._names(self.other)

    def _names(self, tree: Any) -> tuple[str, ...]:
        if self.graphdef is not None:
            return tuple(dotted(path) for path, _ in nnx.to_flat_state(tree))
        return parameter_names(tree)

    @property
    def is_abstract(self) -> bool:
        """Whether the parameters are shapes without values."""
        return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(self.params))


def take_apart(model: Any, seed: int = 0, other: Any = None) -> Parts:
    """The parts of a model. An NNX module comes apart into parameters, random state and the rest. A pytree is all
    parameters, and gets the random key of a seed and the state beside it. Raises PlanError for a state beside a
    module's own."""
    require_order((model, other), "the model or its state")
    if isinstance(model, nnx.Module):
        if other is not None:
            raise PlanError("state= is for plain functions: an NNX module holds its own state")
        split: Any = nnx.split(model, nnx.Param, nnx.RngState, ...)
        graphdef, params, random, rest = split
        return Parts(params, random, rest, graphdef)
    return Parts(model, jax.random.key(seed), other, None)


def put_together(parts: Parts) -> Any:
    """The model that was taken apart: an NNX module, or the pytree."""
    if parts.graphdef is None:
        return parts.params
    # NNX refuses to change variables that were made outside a transformation: make them anew here.
    here = jax.tree.map(lambda leaf: leaf, parts)
    return nnx.merge(parts.graphdef, here.params, here.random, here.other)


def is_function(value: Any) -> bool:
    """Whether a value is a function. A pytree that can be called, as an Equinox module is, is none."""
    if not callable(value) or isinstance(value, nnx.Module):
        return False
    return jax.tree_util.all_leaves([value]) or isinstance(value, jax.tree_util.Partial)


def aliases_of(model: nnx.Module) -> dict[str, tuple[str, ...]]:
    """The first name → the further names of every variable that a model holds in more than one place."""
    first: dict[int, str] = {}
    found: dict[str, tuple[str, ...]] = {}
    active: set[int] = set()

    def visit(node: Any, path: tuple[Any, ...]) -> None:
        if isinstance(node, nnx.Variable):
            name = first.setdefault(id(node), dotted(path))
            if name != dotted(path):
                found[name] = (*found.get(name, ()), dotted(path))
            return
        children = _children(node)
        if not children or id(node) in active:
            return
        active.add(id(node))
        for key, child in children:
            visit(child, (*path, key))
        active.discard(id(node))

    visit(model, ())
    return found


def _children(node: Any) -> list[tuple[Any, Any]]:
    """The keys and values that a module or container holds, in the order in which NNX names them."""
    if isinstance(node, nnx.List | list | tuple):
        return list(enumerate(node))
    if isinstance(node, nnx.Module):
        return sorted((key, value) for key, value in vars(node).items() if not key.startswith("_pytree__"))
    if isinstance(node, dict):
        return sorted(node.items(), key=lambda item: str(item[0]))
    return []
