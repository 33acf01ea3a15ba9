"""The results of a loss function: the loss, its weight, metrics beside it, and the state that it changed."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardwright.core.errors import PlanError

FORMS = "the loss, or sw.weighted(loss, weight)"


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Weighted:
    """A mean and its weight: several combine as Σ weight · value / Σ weight. Made by `weighted`."""

    value: Any
    weight: Any


def weighted(value: Any, weight: Any) -> Weighted:
    """A mean and the number of things that it is a mean of, such as the tokens that count.

    A loss function returns it instead of the loss, and a metric in ``aux`` may be one too: microbatches and replicas
    are then combined as Σ weight · value / Σ weight. No gradient flows through the weight.

    value: one number, or of a metric an array; weight: one number. Raises PlanError for a weight of another shape.
    """
    if not _is_number(weight):
        raise PlanError(f"weighted was given a weight that is {_described(weight)}: expected one number, as mask.sum()")
    if not hasattr(value, "dtype") and not jnp.isscalar(value):
        raise PlanError(f"weighted was given a value that is {_described(value)}: expected a number or an array")
    return Weighted(value, weight)


class Returned(NamedTuple):
    """The results of one call of a loss function."""

    loss: jax.Array
    weight: jax.Array
    state: Any
    """The state after the call; the given one where the function changes none."""
    aux: Any
    weighs: bool
    """Whether the function gave a weight."""


def read_returned(returned: Any, given_state: Any, *, takes_state: bool, has_aux: bool) -> Returned:
    """The results that a loss function returned, told apart by its declared ``state=`` and ``has_aux``.

    Raises PlanError for a value of another form.
    """
    loss, aux, state = returned, None, given_state
    if has_aux and takes_state and isinstance(returned, tuple) and len(returned) == 3:
        loss, aux, state = returned
    elif has_aux:
        if not isinstance(returned, tuple) or len(returned) != 2:
            more = " (or (loss, aux, state))" if takes_state else ""
            raise PlanError(
                f"the loss function returned {_described(returned)}, and train_step was given has_aux=True: expected "
                f"(loss, aux){more}, where loss is {FORMS}"
            )
        loss, aux = returned
    elif takes_state and isinstance(returned, tuple) and len(returned) == 2:
        loss, state = returned
    elif isinstance(returned, tuple | list):
        raise PlanError(
            f"the loss function returned {_described(returned)}, and what stands beside the loss could be its weight "
            "or a metric: for a weight return sw.weighted(loss, weight); for metrics give train_step has_aux=True and "
            "return (loss, aux); a function that takes state= returns (loss, state)"
        )
    if state is not given_state:
        _require_same_state(given_state, state)
    value, weight = (loss.value, loss.weight) if isinstance(loss, Weighted) else (loss, 1.0)
    for name, number in (("loss", value), ("weight", weight)):
        if not _is_number(number):
            raise PlanError(
                f"the loss function returned a {name} that is {_described(number)}: expected one number; it returns "
                f"{FORMS}, and with has_aux=True a pair of that and metrics"
            )
    if not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        raise PlanError(f"the loss function returned a loss of {jnp.result_type(value)}: expected a floating number")
    if not jnp.issubdtype(jnp.result_type(weight), jnp.number) or jnp.iscomplexobj(weight):
        raise PlanError(f"the loss function returned a weight of {jnp.result_type(weight)}: expected a real number")
    require_wide("the loss function returned a weight", weight)
    return Returned(
        jnp.asarray(value, jnp.float32), jnp.asarray(weight, jnp.float32), state, aux, isinstance(loss, Weighted)
    )


def require_wide(what: str, weight: Any) -> None:
    """Raise PlanError for a weight in 16 bits, which are too few to count in."""
    dtype = jnp.result_type(weight)
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
        most = 256 if dtype == jnp.bfloat16 else 2048
        raise PlanError(
            f"{what} in {dtype}, which counts no further than {most}: sum it in float32, as mask.astype(float).sum(); "
            "steps that compute in 16 bits hand the floating arrays of the batch to a plain function in them"
        )


def _is_number(value: Any) -> bool:
    return (jnp.isscalar(value) or hasattr(value, "dtype")) and jnp.shape(value) == ()


def _described(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} values"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"an array of shape {tuple(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _require_same_state(before: Any, after: Any) -> None:
    if before is None:
        raise PlanError(
            "the loss function takes state= and returned (loss, state), and train.init was given no state: give it "
            "as train.init(params, state=…), or return the loss alone"
        )
    try:
        one, other = (
            [(leaf.shape, leaf.dtype) for leaf in map(jnp.asarray, jax.tree.leaves(tree))] for tree in (before, after)
        )
    except (TypeError, ValueError):
        raise PlanError(
            "the loss function returned state that holds something else than arrays: keep the form that train.init got"
        ) from None
    forms: list[Any] = [jax.tree.structure(tree) for tree in (before, after)]
    if one != other or forms[0] != forms[1]:
        raise PlanError(
            f"the loss function returns state of another form than it was given: {forms[1]} with {other} for "
            f"{forms[0]} with {one}; keep shapes and dtypes (a function that takes state= returns (loss, state), and "
            "metrics only with has_aux=True)"
        )
