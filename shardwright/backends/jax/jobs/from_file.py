"""What a file of jobs trains in JAX: an optax optimizer by its name."""

from collections.abc import Callable, Mapping
from typing import Any

import optax
from flax import nnx

from shardwright.backends.jax.jobs.planned_training import JobTraining
from shardwright.core.errors import MissingCapabilityError, PlanError
from shardwright.core.model.graph import Graph

_MOMENTUM = 0.9
_MADE: Mapping[str, Callable[[float], optax.GradientTransformation]] = {
    "sgd": optax.sgd,
    "momentum": lambda rate: optax.sgd(rate, momentum=_MOMENTUM),
    "nesterov": lambda rate: optax.sgd(rate, momentum=_MOMENTUM, nesterov=True),
    "adam": optax.adam,
    "adamw": optax.adamw,
    "amsgrad": optax.amsgrad,
    "nadam": optax.nadam,
    "radam": optax.radam,
    "adamax": optax.adamax,
    "adagrad": optax.adagrad,
    "adadelta": optax.adadelta,
    "rmsprop": optax.rmsprop,
    "rprop": optax.rprop,
    "lion": optax.lion,
}
"""By the names that plans have for them."""


def training_of(
    name: str,
    graph: Graph,
    model: Any,
    loss: Callable[..., Any] | None,
    data: Any,
    *,
    optimizer: str,
    learning_rate: float | None,
    reduction: str | None,
    optimizer_of: Callable[[Any], Any] | None = None,
) -> JobTraining:
    """What a job of a file trains.

    Args:
        loss: of the model and a batch.
        optimizer: the name of the optimizer, unless there is a function ``optimizer_of`` the model, which returns it.

    Raises:
        PlanError: a job without data, loss or learning rate, or what ``optimizer_of`` returned is no optimizer.
        MissingCapabilityError: a model that is no NNX module, or an optimizer that optax lacks.
    """
    if not isinstance(model, nnx.Module):
        raise MissingCapabilityError(
            f"job {name!r}: its model is a {type(model).__name__}, and `jobs run` trains NNX modules of JAX's: train "
            f"others from Python"
        )
    if data is None:
        raise PlanError(f"job {name!r} has no data: name a function that returns its batches, data = FILE.py:FUNCTION")
    if loss is None:
        raise PlanError(f"job {name!r} has no loss: let the function of its model return (model, batch, loss)")
    made = _optimizer(name, model, optimizer, learning_rate, optimizer_of)
    return JobTraining(graph=graph, model=model, loss=loss, optimizer=made, data=data, reduction=reduction)


def _optimizer(
    name: str,
    model: Any,
    optimizer: str,
    learning_rate: float | None,
    function: Callable[[Any], Any] | None,
) -> optax.GradientTransformation:
    if function is None:
        if optimizer not in _MADE:
            raise MissingCapabilityError(
                f"job {name!r}: optax has no optimizer {optimizer!r}: name a function that makes it, training = "
                f"FILE.py:FUNCTION"
            )
        if learning_rate is None:
            raise PlanError(f"job {name!r}: optimizers of optax have no learning rate of their own: give learning_rate")
        return _MADE[optimizer](learning_rate)
    try:
        found = function(model)
    except Exception as error:  # whatever a user's function raises
        raise PlanError(f"job {name!r}: its training function failed: {type(error).__name__}: {error}") from error
    if not isinstance(found, optax.GradientTransformation):
        raise PlanError(
            f"job {name!r}: its training function returned a {type(found).__name__}: expected an optax transformation"
        )
    return found
