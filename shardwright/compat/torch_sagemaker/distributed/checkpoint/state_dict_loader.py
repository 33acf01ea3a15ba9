"""``torch.sagemaker.distributed.checkpoint.state_dict_loader``, by torch's own loader, of what runs nothing."""

import io
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from shardwright.backends.torch.state.dcp_metadata import METADATA, read_metadata
from shardwright.compat.torch_sagemaker.distributed.checkpoint.settings import require_no_effect
from shardwright.core.errors import CheckpointError, ShardwrightError

_ITS_OWN = {"check_keys_matched": True, "coordinator_rank": 0}


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: Any = None,
    planner: Any = None,
    process_group: dist.ProcessGroup | None = None,
    **its_own: Any,
) -> None:
    """Fill a state dict from a folder, as `torch.distributed.checkpoint.load`: tensors in place, other values as
    ``torch.load(weights_only=True)`` reads them. Every rank calls this.

    Raises:
        CheckpointError: there is no such folder, it is damaged, or what it holds would be run.
        MissingCapabilityError: what belongs to S3.
    """
    require_no_effect("state_dict_loader.load", its_own, _ITS_OWN)
    if storage_reader is None:
        if checkpoint_id is None:
            raise ShardwrightError("state_dict_loader.load: give checkpoint_id, the folder of a checkpoint")
        if not (Path(checkpoint_id) / METADATA).is_file():
            raise CheckpointError(f"{checkpoint_id} has no {METADATA}, and so is no folder of a checkpoint")
        read_metadata(Path(checkpoint_id) / METADATA)  # which refuses what names other things than tensors
    state_dict_loader.load(
        state_dict, checkpoint_id=checkpoint_id, storage_reader=storage_reader,
        planner=_OfWeightsOnly() if planner is None else planner, process_group=process_group,
        no_dist=not dist.is_initialized(),
    )  # fmt: skip


class _OfWeightsOnly(DefaultLoadPlanner):
    """Torch's planner, for values that a restricted unpickler reads."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        torch.load(value, map_location="cpu", weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)
