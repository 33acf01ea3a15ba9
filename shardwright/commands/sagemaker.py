"""A configuration of SageMaker's model-parallel library as pins of a plan."""

import json
import warnings
from pathlib import Path
from typing import Any

from shardwright.core.errors import MissingCapabilityError, MissingFrameworkError, PlanError, PlanWarning

WITHIN = ("parameters", "mp_parameters", "modelparallel", "smdistributed")
"""Keys under which a configuration lies in the settings of SageMaker's launcher, the innermost first."""


def pins_of(path: Path, batch: int, devices: int) -> dict[str, Any]:
    """The options of `plan` that a configuration pins, for a number of devices.

    Args:
        path: a JSON file of keys, or of the launcher's ``distribution`` with the keys under ``parameters``.
        batch: samples per step, over all replicas.

    Raises:
        PlanError: the file cannot be read, is no JSON object, or its microbatches do not divide.
        MissingCapabilityError: ``auto_partition=False``.
        ShardwrightError: an unknown key, a value that is not possible, or degrees that do not divide the devices.
    """
    try:
        from shardwright.compat.keys import with_defaults
        from shardwright.core.cost.op_kinds import PRECISION_BYTES
        from shardwright.torch.config import read_config
    except ImportError as missing:
        raise MissingFrameworkError("--from-smp reads keys of a PyTorch library: pip install torch") from missing
    keys = _keys_of(path)
    config = read_config(with_defaults(keys))
    pp, tp, dp = config.pipeline_parallel_degree, config.tensor_parallel_degree, config.mesh(devices).axis_size("dp")
    if batch % (dp * config.microbatches):
        raise PlanError(
            f"{path}: {config.microbatches} microbatches on each of {dp} replicas do not divide a batch of {batch}: "
            f"take a multiple of {dp * config.microbatches}"
        )
    if not config.auto_partition:
        raise MissingCapabilityError(
            f"{path}: auto_partition=False leaves the cut to the marks of a script's modules, and no script is run "
            f"here: leave it out, or give a plan file with its stage_starts to init(plan=…)"
        )
    level = config.shard_level if dp > 1 else 0
    pins: dict[str, Any] = {
        "pp": pp, "tp": tp, "dp": dp, "microbatch": batch // (dp * config.microbatches), "shard": level,
        "virtual_stages": config.virtual_stages, "placement_order": config.placement_order,
    }  # fmt: skip
    if pp > 1:
        pins |= {"schedule": config.pipeline, **config.cut}
    if level and config.sharing_replicas is not None:
        pins["shard_group"] = config.sharing_replicas
    if level and config.hierarchical_gathers is not None:
        pins["hierarchical_gathers"] = config.hierarchical_gathers
    if level == 3 and config.sdp_param_persistence_threshold is not None:
        entry = PRECISION_BYTES[config.precision or "fp32"]
        pins["whole_below_bytes"] = config.sdp_param_persistence_threshold * entry
    if config.precision is not None:
        pins["precision"] = config.precision
    if tp > 1 and config.optimize is not None:
        pins["sequence_parallel"] = config.optimize == "memory"
    if config.offload_activations:
        pins |= {"offload": True, "activation_loading_horizon": config.activation_loading_horizon}
    if left := sorted(set(keys) & set(_LEFT)):
        warnings.warn(
            f"{path}: plans have nothing for {', '.join(left)}, which act in a run", PlanWarning, stacklevel=2
        )
    return pins


_LEFT = (
    "active_microbatches", "sdp_reduce_bucket_size", "sdp_max_live_parameters", "sdp_gradient_clipping", "recompute",
    "gathered_stages", "look_ahead", "reduce_after", "offload_states", "layouts", "loss_scope", "compile",
)  # fmt: skip
"""The keys that act in a run and are no pins here."""


def _keys_of(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        while isinstance(found, dict) and (key := next((key for key in WITHIN if key in found), None)) is not None:
            found = json.loads(found[key]) if isinstance(found[key], str) else found[key]
    except (OSError, UnicodeDecodeError, ValueError) as failed:
        raise PlanError(f"{path}: no JSON file that can be read: {failed}") from failed
    if not isinstance(found, dict):
        raise PlanError(f'{path}: expected a JSON object of keys, as {{"pipeline_parallel_degree": 2}}')
    return found
