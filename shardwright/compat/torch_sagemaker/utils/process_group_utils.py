"""``torch.sagemaker.utils.process_group_utils``, which AWS's scripts take."""

import torch.distributed as dist
from torch.distributed import ProcessGroup


def get_global_ranks(group: ProcessGroup | None = None) -> list[int]:
    """The ranks of a group among all; without one, all of them."""
    return dist.get_process_group_ranks(group)
