"""What a file of jobs trains: the model's own call as the body of a step, and an optimizer by its name."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from shardwright.backends.torch.jobs.job_run import JobRun
from shardwright.backends.torch.jobs.training import JobTraining
from shardwright.core.errors import MissingCapabilityError, PlanError
from shardwright.core.model.graph import Graph

_MOMENTUM = 0.9
_MADE: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": lambda p, **options: torch.optim.SGD(p, momentum=_MOMENTUM, **options),
    "nesterov": lambda p, **options: torch.optim.SGD(p, momentum=_MOMENTUM, nesterov=True, **options),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda p, **options: torch.optim.Adam(p, amsgrad=True, **options),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "rmsprop": torch.optim.RMSprop,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
}
"""By the names that plans have for them."""


def training_of(
    name: str,
    graph: Graph,
    model: Any,
    sample: Any,
    loss: Callable[..., Any] | None,
    data: Any,
    *,
    optimizer: str,
    learning_rate: float | None,
    loss_is_mean: bool,
    optimizer_of: Callable[[nn.Module], Any] | None = None,
) -> JobTraining:
    """What a job of a file trains.

    Args:
        sample: how the model is called; batches have the same form.
        loss: of the model's output; None: the output's ``.loss``, or the output itself.
        optimizer: the name of the optimizer, unless there is a function ``optimizer_of`` the model, which returns it,
            or it and its learning-rate schedules.
        loss_is_mean: whether the loss is a mean over samples.

    Raises:
        PlanError: a job without data, or what ``optimizer_of`` returned is no optimizer.
        MissingCapabilityError: a model of another framework, or an optimizer that PyTorch lacks.
    """
    if not isinstance(model, nn.Module):
        raise MissingCapabilityError(
            f"job {name!r}: its model is a {type(model).__name__}, and `jobs run` trains models of PyTorch: train "
            f"others from Python"
        )
    if data is None:
        raise PlanError(f"job {name!r} has no data: name a function that returns its batches, data = FILE.py:FUNCTION")
    made, schedulers = _optimizer(name, model, optimizer, learning_rate, optimizer_of)
    keys = list(sample) if isinstance(sample, Mapping) else None

    def step(run: JobRun, inputs: list[torch.Tensor]) -> None:
        output = run.model(*inputs) if keys is None else run.model(**dict(zip(keys, inputs, strict=True)))
        found = getattr(output, "loss", output) if loss is None else loss(output)
        run.backward(found, reduction="mean" if loss_is_mean else None)

    return JobTraining(
        graph=graph, model=model, optimizer=made, step=step, data=_Batches(data, keys), schedulers=schedulers
    )


class _Batches:
    """Batches as sequences of tensors. ``keys``: of batches that are mappings, in the order of the sample's."""

    def __init__(self, data: Any, keys: list[Any] | None) -> None:
        self.source, self._keys = data, keys

    def __iter__(self) -> Iterator[Any]:
        for batch in self.source:
            if self._keys is None:
                yield list(batch) if isinstance(batch, (tuple, list)) else batch
                continue
            if not isinstance(batch, Mapping) or set(batch) != set(self._keys):
                found = sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
                raise PlanError(
                    f"a batch is {found}: expected a mapping of {sorted(map(str, self._keys))}, as the sample"
                )
            yield [batch[key] for key in self._keys]


def _optimizer(
    name: str,
    model: nn.Module,
    optimizer: str,
    learning_rate: float | None,
    function: Callable[[nn.Module], Any] | None,
) -> tuple[torch.optim.Optimizer, tuple[LRScheduler, ...]]:
    if function is None:
        if optimizer not in _MADE:
            raise MissingCapabilityError(
                f"job {name!r}: PyTorch has no optimizer {optimizer!r}: name a function that makes it, training = "
                f"FILE.py:FUNCTION"
            )
        options = {} if learning_rate is None else {"lr": learning_rate}
        return _MADE[optimizer](model.parameters(), **options), ()
    try:
        found = function(model)
    except Exception as error:  # whatever a user's function raises
        raise PlanError(f"job {name!r}: its training function failed: {type(error).__name__}: {error}") from error
    made, *schedulers = found if isinstance(found, tuple) else (found,)
    if not isinstance(made, torch.optim.Optimizer):
        raise PlanError(
            f"job {name!r}: its training function returned a {type(made).__name__}: expected an optimizer, or a tuple "
            f"of it and its learning-rate schedules"
        )
    return made, tuple(schedulers)
