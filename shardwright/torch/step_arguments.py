"""The arguments of one call of a step, taken apart."""

import copy
import inspect
from collections import UserDict
from collections.abc import Hashable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import torch

from shardwright.backends.torch.capture.held_tensors import tensors_in
from shardwright.backends.torch.compat import pytree
from shardwright.core.errors import ShardwrightError
from shardwright.core.values.step_line import Argument
from shardwright.torch.batch import Batch
from shardwright.torch.model import DistributedModel
from shardwright.torch.model_run import ModelRun
from shardwright.torch.session import Session
from shardwright.torch.sliced import Sliced, can_be_sliced

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass(slots=True)
class Given:
    """The arguments of one call."""

    run: ModelRun
    """The model that it is for."""
    bound: inspect.BoundArguments
    leaves: list[Any]
    spec: Any
    form: str
    names: list[str]
    """The argument that each leaf belongs to."""
    batch: Batch
    sized: list[Argument]
    """The tensors of the batch, whole."""
    sliced: dict[int, Sliced]
    """By their position among the leaves, objects that say themselves what a microbatch has of them."""


def sized_argument(name: str, tensor: torch.Tensor, axis: int | None) -> Argument:
    is_integer = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    return Argument(name, tuple(tensor.shape), is_integer, axis)


def is_model(item: Any) -> bool:
    return isinstance(item, DistributedModel)


def models_in(args: Any, kwargs: Any, session: Session) -> list[DistributedModel]:
    """The models among the arguments, each once."""
    leaves = pytree.tree_leaves((args, kwargs), is_leaf=is_model)
    return list({id(session.of(leaf)): leaf for leaf in leaves if is_model(leaf)}.values())


def as_key(item: Any) -> Hashable:
    """A leaf that is no tensor as a part of the key of a recording."""
    if is_model(item):
        return "the model"
    if isinstance(item, np.ndarray) and not item.dtype.hasobject:  # which may be written to between steps
        mask = sha256(np.ma.getmaskarray(item).tobytes()).digest() if isinstance(item, np.ma.MaskedArray) else b""
        entries = np.asarray(item.data if mask else item)
        return (type(item), item.dtype.str, item.shape, sha256(entries.tobytes()).digest(), mask)
    if isinstance(item, np.ndarray) and item.dtype.names is None:
        held = item.ravel().tolist()
        return (
            type(item),
            item.shape,
            tuple([(type(one), one) if isinstance(one, _PLAIN) else id(one) for one in held]),
        )
    try:
        hash(item)
    except TypeError:
        return id(item)
    return (type(item), None if type(item) in (int, float) else item)


def plain(value: Any) -> Any:
    """An argument whose tensors can be found: mappings such as tokenizers return become dicts. Raises ShardwrightError
    for another object that holds tensors."""
    if isinstance(value, UserDict):
        return dict(value.data)
    for leaf in pytree.tree_leaves(value):
        kept = isinstance(leaf, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)) or can_be_sliced(leaf)
        if kept or not tensors_in(leaf):
            continue
        raise ShardwrightError(
            f"a {type(leaf).__name__} among the arguments of the step holds tensors: pass tensors, or lists, tuples "
            f"and dicts of them, or give it smp_slice(num_mb, mb, axis), which returns what a microbatch has of it"
        )
    return value


def restored(original: Any, value: Any) -> Any:
    if isinstance(original, UserDict):
        made = copy.copy(original)
        made.data = value
        return made
    return value
