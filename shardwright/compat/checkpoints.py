"""Saving and resuming as SageMaker's scripts call it: objects that would be pickled there are saved as what they say of
themselves, or refused."""

import warnings
from collections.abc import Callable
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import torch

import shardwright.torch as _torch
from shardwright.core.errors import MissingCapabilityError, PlanWarning, ShardwrightError
from shardwright.torch.checkpoints import resumed
from shardwright.torch.pending_checkpoint import PendingCheckpoint


def save_checkpoint(
    path: str | Path,
    tag: str,
    partial: bool = True,
    model: Any = None,
    optimizer: Any = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
) -> PendingCheckpoint:
    """As `shardwright.torch.save_checkpoint`. Weights have the names of the original model, so that there is nothing to
    translate. An object in ``user_content`` that has ``to_dict()``, such as a model's configuration, is saved as that
    dict, which a warning says."""
    return _torch.save_checkpoint(
        path, tag, partial, model, optimizer, as_values(user_content, "user_content"),
        num_kept_partial_checkpoints=num_kept_partial_checkpoints,
    )  # fmt: skip


def resume_from_checkpoint(
    path: str | Path,
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[..., Any] | None = None,
) -> Any:
    """As `shardwright.torch.resume_from_checkpoint`. A function that translates weights has no effect, which a warning
    says: checkpoints have the names of the model that was saved.

    Args:
        load_sharded_optimizer_state: False loads weights (in float32, where steps compute in 16 bits) and the scale of
            losses, and no states of the optimizer, which begin anew.

    Raises:
        MissingCapabilityError: a function that translates weights beside ``strict=False``, which would leave out
            weights of other names.
    """
    if translate_function is not None and not strict:
        raise MissingCapabilityError(
            "translate_function and strict=False: checkpoints have the names of the model that was saved, nothing is "
            "translated, and weights of other names would be left out; leave out one of them"
        )
    if translate_function is not None:
        warnings.warn(
            "translate_function has no effect: checkpoints have the names of the model that was saved, and are loaded "
            "into a model of these names",
            PlanWarning,
            stacklevel=2,
        )
    loads_states = load_optimizer and load_sharded_optimizer_state
    return resumed(path, tag, strict=strict, load_optimizer=loads_states, load_scale=load_optimizer)


def save(
    obj: Any,
    f: str | Path,
    partial: bool = True,
    pickle_module: Any = None,
    pickle_protocol: int = 2,
    *,
    v3: bool = False,
) -> None:
    """As `shardwright.torch.save`. Objects that have ``to_dict()`` are saved as that dict, which a warning says. What
    is said of pickling has no effect, as only tensors are pickled; nor has ``v3``, of files of sharded optimizers."""
    _torch.save(as_values(obj, "the object"), f, partial)


def load(f: str | Path, map_location: Any = "cpu", pickle_module: Any = None, partial: bool = True, **more: Any) -> Any:
    """As `shardwright.torch.load`: what is said of pickling has no effect, as nothing that is read is run.

    Raises ShardwrightError for other arguments.
    """
    if unknown := set(more) - {"pickle_load_args", "encoding", "fix_imports"}:
        raise ShardwrightError(f"load takes no {min(unknown)!r}: f, map_location and partial")
    return _torch.load(f, "cpu" if map_location is None else map_location, partial)


def as_values(value: Any, path: str) -> Any:
    """A value with the dicts of objects that have ``to_dict()`` in their places, the values of
    enumerations, and the texts of devices and paths."""
    if isinstance(value, dict) and type(value) is dict:
        return {key: as_values(held, f"{path}/{key}") for key, held in value.items()}
    if type(value) in (list, tuple):
        return type(value)(as_values(held, f"{path}/{number}") for number, held in enumerate(value))
    if isinstance(value, Enum | torch.device | PurePath):
        told = value.value if isinstance(value, Enum) else str(value)
        said = f"{path} is a {type(value).__name__}, and comes back as {told!r}"
        warnings.warn(said, PlanWarning, stacklevel=4)
        return told
    if isinstance(value, dict | type) or not callable(getattr(value, "to_dict", None)):
        return value
    warnings.warn(
        f"{path} is a {type(value).__name__}, which only a pickle would hold: what its to_dict() gives is saved, and "
        f"comes back as a dict",
        PlanWarning,
        stacklevel=4,
    )
    return value.to_dict()
