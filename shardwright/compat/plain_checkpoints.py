"""Checkpoints as other libraries' loops write them in one process: written and read by a split model."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardwright.backends.torch.state.weight_files import opened
from shardwright.core.errors import CheckpointError
from shardwright.torch import groups
from shardwright.torch.model import DistributedModel
from shardwright.torch.optimizer import DistributedOptimizer
from shardwright.torch.session import current


def is_first_of_batch() -> bool:
    """Whether this rank is the first of those that take its batch: it writes what each share of the data has."""
    return groups.pp_rank() == 0 and (groups.tp_rank() == 0 or not current().config.prescaled_batch)


def load_weights(model: DistributedModel, folder: str | Path, left_out: Iterable[str] = ()) -> None:
    """Load the weights in a folder, of which those of tied parameters may be there under one name.

    Raises CheckpointError where they are another model's: one is missing that is not ``left_out``, or one too many.
    """
    weights = opened(folder)
    first = model.runtime.ownership.first_name
    loaded = {first.get(name, name) for name in weights}
    with model.as_held():
        known = list(model.module.state_dict())
    lacks = [name for name in known if first.get(name, name) not in loaded and name not in left_out]
    if lacks or (more := sorted(loaded - {first.get(name, name) for name in known})):
        said = f"lacks {lacks[0]!r}" if lacks else f"has {more[0]!r}, which the model lacks"
        raise CheckpointError(f"{folder} is a checkpoint of another model: it {said}")
    model.load_state_dict(weights, strict=False)


def numbered(state: dict[str, Any]) -> dict[str, Any]:
    """The state dict of a split model's optimizer as torch's own has it, with numbers in place of names."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    number = {name: position for position, name in enumerate(names)}
    options = [group | {"params": [number[name] for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {number[name]: held for name, held in state["state"].items()}, "param_groups": options}


def split_optimizer(optimizer: Any) -> DistributedOptimizer:
    """The optimizer of the split model, which another library may have wrapped."""
    found = optimizer if isinstance(optimizer, DistributedOptimizer) else optimizer.optimizer
    assert isinstance(found, DistributedOptimizer)
    return found
