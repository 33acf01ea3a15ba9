"""What training loops of other libraries need of a split model: ranks with batches of their own, and batches that run
as one microbatch."""

from typing import Any

import torch

from shardwright.torch import groups
from shardwright.torch.groups import CommGroup
from shardwright.torch.session import current


def group_of_batches() -> CommGroup:
    """The group of the ranks that take different batches: replicas, and ranks of the tensor axis where each has samples
    of its own (``prescaled_batch=False``)."""
    return CommGroup.RDP_GROUP if current().config.prescaled_batch else CommGroup.DP_GROUP


def batches() -> int:
    """The number of ranks that take different batches."""
    return groups.rdp_size() if group_of_batches() is CommGroup.RDP_GROUP else groups.dp_size()


def place_of_batch() -> int:
    """This rank's place among the ranks that take different batches."""
    return groups.rdp_rank() if group_of_batches() is CommGroup.RDP_GROUP else groups.dp_rank()


def whole(leaf: Any) -> Any:
    """A tensor of a batch as one sample, so that a step runs the batch as one microbatch; `samples` takes it back."""
    return leaf[None] if isinstance(leaf, torch.Tensor) else leaf


def samples(leaf: Any) -> Any:
    """The samples of a microbatch that is one batch, or those of all tensor-parallel peers, inside the step."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.flatten(0, 1) if leaf.dim() > 1 else leaf[0]
