"""``smdistributed.modelparallel.torch``, as scripts import it: `shardwright.torch` with SageMaker's own defaults."""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch

import shardwright.torch as _torch
from shardwright.compat import nn as nn  # a name of SageMaker's
from shardwright.compat import optimizers as optimizers
from shardwright.compat.checkpoints import load as load
from shardwright.compat.checkpoints import resume_from_checkpoint as resume_from_checkpoint
from shardwright.compat.checkpoints import save as save
from shardwright.compat.checkpoints import save_checkpoint as save_checkpoint
from shardwright.compat.first_stage import of_first_stage
from shardwright.compat.keys import with_defaults
from shardwright.compat.model import DistributedModel as DistributedModel
from shardwright.compat.names import BY_NAME, refused
from shardwright.core.errors import MissingCapabilityError, PlanWarning
from shardwright.torch.config import configuration_of_environment
from shardwright.torch.creation import require_no_other_numbers
from shardwright.torch.session import current, is_initialized
from shardwright.torch.step import Step

__version__ = "1.15.0"
"""The version of SageMaker's interface whose names these are: scripts ask for it."""


def init(config: Mapping[str, Any] | None = None, *, plan: Any = None, **more: Any) -> None:
    """As `shardwright.torch.init`, with SageMaker's defaults (`keys.KEYS`): replicas are placed as D, P, T, and ranks
    of the tensor axis have samples of their own. A ``plan`` decides the rest.

    A second call, before a model was wrapped, begins anew with its own configuration: `transformers` calls this when it
    is imported, and scripts do once more."""
    if config is None and plan is None and not more:
        config = configuration_of_environment()
    given = {**(config or {}), **more}
    if is_initialized() and not current().models:
        _torch.shutdown()
    _torch.init(with_defaults(given, is_planned=plan is not None), plan=plan)


def step(
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Iterable[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Any:
    """As `shardwright.torch.step`, with SageMaker's rule that only the batch of pipeline rank 0 counts: the other ranks
    of its pipeline get that, whatever they pass of the same form. What it returns beside tensors, such as numbers by
    ``.item()``, comes as a list with one entry for each microbatch.

    Under ``detach_outputs=False`` too what a step returns is detached, which a warning says: its backward pass has run
    within the step, and one from what it returns is an error of torch's.
    """
    if not detach_outputs:
        warnings.warn(
            "detach_outputs=False has no effect: the backward pass of a step has run when it returns, and what it "
            "returns is detached",
            PlanWarning,
            stacklevel=2,
        )

    def wrapped(given: Callable[..., Any]) -> Callable[..., Any]:
        if given.__module__ == _OF_TRAINER:
            return _refused_step(given)
        return _FirstStageStep(
            given, Step(given, frozenset(non_split_inputs or ()), dict(input_split_axes or {}), lists_plain=True)
        )

    return wrapped if function is None else wrapped(function)


class _FirstStageStep:
    """A step with the batch of pipeline rank 0. As SageMaker's it is an object, no function: in the body of a class it
    is a method where its first argument is ``self``, and else stays what it is (``self.train_step(model, …)``)."""

    def __init__(self, function: Callable[..., Any], inner: Step) -> None:
        functools.update_wrapper(self, function)
        self._inner = inner
        self._is_method = next(iter(inspect.signature(function).parameters), "") == "self"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        of_first = of_first_stage(args, kwargs)
        return self._inner(*of_first[0], **of_first[1])

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return MethodType(self, instance) if self._is_method and instance is not None else self


def is_tracing() -> bool:
    """Whether the body of a step runs on stand-ins now, to be recorded."""
    return is_initialized() and any(
        run.runtime.in_step_body and run.runtime.messages is None for run in current().models
    )


@contextmanager
def tensor_parallelism(enabled: bool = True, **tp_config: Any) -> Iterator[None]:
    """As `shardwright.torch.tensor_parallelism`. Settings of SageMaker's own modules that change no number (fused
    kernels) have no effect, which a warning says.

    Raises:
        ShardwrightError: an unknown setting.
        MissingCapabilityError: a setting that would change numbers.
    """
    require_no_other_numbers(tp_config if enabled else {}, "tensor_parallelism")
    with _torch.tensor_parallelism(enabled):
        yield


def set_tensor_parallelism(module: torch.nn.Module, enabled: bool = True, **tp_config: Any) -> None:
    """As `shardwright.torch.set_tensor_parallelism`, with the settings of `tensor_parallelism`."""
    require_no_other_numbers(tp_config if enabled else {}, "set_tensor_parallelism")
    _torch.set_tensor_parallelism(module, enabled)


@contextmanager
def partition(index: int) -> Iterator[None]:
    """As `shardwright.torch.partition`; without effect under ``auto_partition=True``, which a warning says."""
    if current().config.auto_partition:
        _warn_of_places(f"partition({index})")
        yield
        return
    with _torch.partition(index):
        yield


def set_partition(module: torch.nn.Module, index: int) -> None:
    """As `shardwright.torch.set_partition`; without effect under ``auto_partition=True``, which a warning says."""
    if current().config.auto_partition:
        _warn_of_places(f"set_partition(…, {index})")
    else:
        _torch.set_partition(module, index)


def _warn_of_places(said: str) -> None:
    warnings.warn(
        f"{said} has no effect under auto_partition=True, where the planner places every module: set "
        f"auto_partition=False",
        PlanWarning,
        stacklevel=3,
    )


_OF_TRAINER = "transformers.trainer_pt_utils"
_TRAINER = (
    "transformers.Trainer gives every process other samples, of which those of pipeline rank 0 alone count, and "
    "releases 5 make no optimizer here: from shardwright.compat.trainer import Trainer, TrainingArguments"
)


def _refused_step(function: Callable[..., Any]) -> Callable[..., Any]:
    """In place of a step of Hugging Face's `Trainer` itself, which on this path gives each process other samples."""

    @functools.wraps(function)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise MissingCapabilityError(_TRAINER)

    return refuse


class _Module:
    """A module of SageMaker's within this one."""

    def __init__(self, name: str, **held: Callable[[], Any]) -> None:
        self._name, self._held = name, held

    def __getattr__(self, name: str) -> Any:
        found = self.__dict__.get("_held", {}).get(name)
        if found is None:
            raise refused(f"{self._name}.{name}")
        return found()

    def __dir__(self) -> list[str]:
        return sorted(self._held)


class _ModuleManager:
    """What Hugging Face's ``save_pretrained`` asks of SageMaker's table of modules."""

    translate_functions: tuple[Any, ...] = ()
    """Functions from names of SageMaker's own modules to the original ones: models have the original ones here."""


amp = _Module("amp", GradScaler=lambda: torch.amp.GradScaler)
model = _Module("model", DistributedModel=lambda: DistributedModel)
state = _Module("state", cfg=lambda: current().config, module_manager=lambda: _ModuleManager())


def __getattr__(name: str) -> Any:
    """A name of SageMaker's. Raises AttributeError for one that is refused, or that it does not have."""
    known = BY_NAME.get(name)
    if known is None or known.state == "refused":
        raise refused(name)
    return getattr(_torch, name)


def __dir__() -> list[str]:
    return sorted({one.name.partition(".")[0] for one in BY_NAME.values() if one.state != "refused"})
