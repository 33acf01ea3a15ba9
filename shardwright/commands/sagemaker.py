"""A configuration of SageMaker's model-parallel library as pins of a plan."""

import json
from pathlib import Path
from typing import Any

from shardwright.core.errors import MissingFrameworkError, PlanError

WITHIN = ("parameters", "mp_parameters", "modelparallel", "smdistributed")
"""Keys under which a configuration lies in the settings of SageMaker's launcher, the innermost first."""


def pins_of(path: Path, batch: int, devices: int) -> dict[str, Any]:
    """The options of `plan` that a configuration pins, for a number of devices.

    Args:
        path: a JSON file of keys, or of the launcher's ``distribution`` with the keys under ``parameters``.
        batch: samples per step, over all replicas.

    Raises:
        PlanError: the file cannot be read, is no JSON object, or its degrees or microbatches do not divide.
        ShardwrightError: an unknown key, or a value that is not possible.
    """
    try:
        from shardwright.compat.keys import BY_KEY
        from shardwright.torch.config import read_config
    except ImportError as missing:
        raise MissingFrameworkError("--from-smp reads keys of a PyTorch library: pip install torch") from missing
    given = {key.name: key.default for key in BY_KEY.values() if key.name in ("pipeline", "placement_strategy")}
    config = read_config(given | _keys_of(path))
    pp, tp = config.pipeline_parallel_degree, config.tensor_parallel_degree
    if devices % (pp * tp):
        raise PlanError(f"{path}: pp {pp} × tp {tp} do not divide the cluster's {devices} devices")
    dp = devices // (pp * tp)
    if batch % (dp * config.microbatches):
        raise PlanError(
            f"{path}: {config.microbatches} microbatches on each of {dp} replicas do not divide a batch of {batch}: "
            f"take a multiple of {dp * config.microbatches}"
        )
    pins: dict[str, Any] = {
        "pp": pp, "tp": tp, "dp": dp, "microbatch": batch // (dp * config.microbatches), "shard": config.shard_level,
        "virtual_stages": config.virtual_stages, "placement_order": config.placement_order,
    }  # fmt: skip
    if pp > 1:
        pins["schedule"] = config.pipeline
    if config.shard_level and config.sharing_replicas is not None:
        pins["shard_group"] = config.sharing_replicas
    if config.precision is not None:
        pins["precision"] = config.precision
    if tp > 1 and config.optimize is not None:
        pins["sequence_parallel"] = config.optimize == "memory"
    if config.offload_activations:
        pins |= {"offload": True, "activation_loading_horizon": config.activation_loading_horizon}
    return pins


def _keys_of(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as failed:
        raise PlanError(f"{path}: no JSON file that can be read: {failed}") from failed
    while isinstance(found, dict) and (key := next((key for key in WITHIN if key in found), None)) is not None:
        found = json.loads(found[key]) if isinstance(found[key], str) else found[key]
    if not isinstance(found, dict):
        raise PlanError(f'{path}: expected a JSON object of keys, as {{"pipeline_parallel_degree": 2}}')
    return found
