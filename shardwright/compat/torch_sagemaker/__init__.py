"""``torch.sagemaker``, SageMaker's second version, as scripts import it.

    import torch.sagemaker as tsm
    tsm.init()
    model = tsm.transform(model)

Its models train in FSDP as the script wraps them. Here that stays so where no key asks for more; under
``hybrid_shard_degree`` or ``tensor_parallel_degree`` what `transform` returns is a `DistributedModel`, which is sharded
already, and trains in a step.
"""

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

import shardwright.torch as _torch
from shardwright.backends.torch.machine.process import this_launch
from shardwright.compat.torch_sagemaker import keys, names
from shardwright.compat.torch_sagemaker.state import state
from shardwright.compat.torch_sagemaker.transformed import transform
from shardwright.torch import is_initialized

__all__ = ["init", "is_initialized", "state", "transform"]


def init(config: str | Mapping[str, Any] | None = None) -> None:
    """Begin a run with the keys of the second version (`keys.KEYS`): a dict, the path of a JSON file, or None for those
    of SM_HP_MP_PARAMETERS. Every rank calls this.

    Raises:
        ShardwrightError: an unknown key (the nearest is named), or a value that is not possible.
        MissingCapabilityError: ``context_parallel_degree`` or ``expert_parallel_degree`` above 1.
    """
    given = keys.read(config)
    world_size = dist.get_world_size() if dist.is_initialized() else this_launch().world_size
    _torch.init(keys.translated(given, world_size))
    state.begin(given)


def __getattr__(name: str) -> Any:
    """A package of this one by its attribute, without an import of its own: ``tsm.distributed.checkpoint``."""
    inside = {one.name.rpartition(".")[0] for one in names.NAMES if one.name.startswith(f"{name}.")}
    if not inside:
        raise names.refused(name)
    for module in sorted(inside):
        importlib.import_module(f"{__name__}.{module}")
    return sys.modules[f"{__name__}.{name}"]
