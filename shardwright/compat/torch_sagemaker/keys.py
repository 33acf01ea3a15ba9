"""Every key of the configuration of SageMaker's second version (``torch.sagemaker``), and what becomes of it here."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.compat.keys import Key
from shardwright.core.errors import MissingCapabilityError, PlanWarning, ShardwrightError, nearest
from shardwright.torch.config import Config, configuration_of_environment

KEYS: tuple[Key, ...] = (
    Key(
        "hybrid_shard_degree", 0, "acts", 2,
        "shard=3 in groups of that many replicas; 1 shards nothing; 0 is all replicas beside a tensor axis, and "
        "without one leaves the model to the script's own FSDP, as there",
    ),
    Key(
        "sm_activation_offloading", True, "acts", True,
        "offload_activations, where it is written as true: there it acts where the script wraps modules by "
        "offload_wrapper",
    ),
    Key("activation_loading_horizon", 2, "acts", 3, "under sm_activation_offloading"),
    Key("tensor_parallel_degree", 1, "acts", 2, "ranks of the tensor axis are given the same batch, as there"),
    Key("random_seed", 12345, "acts", 7, "seed: the masks of dropout are those of the unsplit model"),
    Key("context_parallel_degree", 1, "fixed", 2, "the sequence is divided over the tensor axis by optimize='memory'"),
    Key("expert_parallel_degree", 1, "fixed", 2, "experts are divided along the tensor axis: tensor_parallel_degree"),
    Key("fsdp_cache_flush_warnings", True, "none", False, "torch's memory manager is not watched"),
    Key("allow_empty_shards", False, "none", True, "a rank's part of a parameter may be empty"),
)  # fmt: skip
BY_KEY = {key.name: key for key in KEYS}
_SWITCHES = tuple(key.name for key in KEYS if isinstance(key.default, bool))
_OF_SCRIPT = ("sm_activation_offloading", "activation_loading_horizon")


def read(config: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """A configuration as `init` takes it: keys, the path of a JSON file of them, or None for those of
    SM_HP_MP_PARAMETERS. Raises ShardwrightError for a file that holds no JSON object."""
    if config is None:
        return configuration_of_environment()
    if not isinstance(config, str):
        return dict(config)
    try:
        found = json.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ShardwrightError(f"init({config!r}): expected the path of a JSON file of keys: {error}") from None
    if not isinstance(found, dict):
        raise ShardwrightError(f"init({config!r}): the file holds a {type(found).__name__}, and no JSON object of keys")
    return found


def translated(given: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """The configuration of `shardwright.torch.init` for one of the second version's, in which keys of
    `shardwright.torch` may stand beside its own.

    Raises:
        ShardwrightError: an unknown key (the nearest is named), or a value that is not possible.
        MissingCapabilityError: a degree of an axis that is not carried out.
    """
    known = {*BY_KEY, *Config.__dataclass_fields__, "partitions"}
    for name, value in given.items():
        if name not in known:
            raise ShardwrightError(f"torch.sagemaker.init knows no key {name!r}: {nearest(str(name), known)}")
        if name in BY_KEY:
            _require_possible(BY_KEY[name], value, world_size)
    own = {name: value for name, value in given.items() if name not in BY_KEY}
    degree = given.get("tensor_parallel_degree", 1)
    found: dict[str, Any] = {"ddp": True, "tensor_parallel_degree": degree} | own
    if "random_seed" in given:
        found["seed"] = given["random_seed"]
    if is_native(given):
        for name in _OF_SCRIPT:
            if name in given:
                _warn(f"{name} has no effect under hybrid_shard_degree=0, where the script's own wrappers decide")
        return found
    shares = given.get("hybrid_shard_degree", 0) or world_size // (degree * _stages(given)) or 1
    if shares > 1:
        found["sharded_data_parallel_degree"] = shares
    if given.get("sm_activation_offloading"):
        found["offload_activations"] = True
        found["activation_loading_horizon"] = given.get("activation_loading_horizon", 2)
    elif "activation_loading_horizon" in given:
        _warn("activation_loading_horizon has no effect without sm_activation_offloading")
    return found


def is_native(given: Mapping[str, Any]) -> bool:
    """Whether a model stays what it is, for the script's own FSDP."""
    return not given.get("hybrid_shard_degree", 0) and given.get("tensor_parallel_degree", 1) == _stages(given) == 1


def _stages(given: Mapping[str, Any]) -> int:
    return int(given.get("pipeline_parallel_degree", given.get("partitions", 1)))


def _require_possible(key: Key, value: Any, world_size: int) -> None:
    if key.name in _SWITCHES:
        if not isinstance(value, bool):
            raise ShardwrightError(f"{key.name}={value!r}: expected True or False")
    elif not isinstance(value, int) or isinstance(value, bool):
        raise ShardwrightError(f"{key.name}={value!r}: expected a whole number")
    least = 0 if key.name in ("hybrid_shard_degree", "random_seed") else 1
    if key.name not in _SWITCHES and value < least:
        raise ShardwrightError(f"{key.name}={value}: expected at least {least}")
    if key.name.endswith("_degree") and value > world_size:
        raise ShardwrightError(f"{key.name}={value}: expected at most {world_size}, the number of ranks")
    if key.state == "fixed" and value != key.default:
        raise MissingCapabilityError(
            f"{key.name}={value} is not carried out: leave it at {key.default}. In its place {key.says}"
        )
    if key.state == "none" and value != key.default:
        _warn(f"{key.name} has no effect here: {key.says}")


def _warn(said: str) -> None:
    warnings.warn(said, PlanWarning, stacklevel=4)
