"""``smdistributed.dataparallel.torch.torch_smddp``: its import registers the process-group backend ``smddp``.

Groups of that backend are NCCL's where this process has a CUDA device, else Gloo's.
"""

from typing import Any

import torch
import torch.distributed as dist

BACKEND = "smddp"


def _group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    made: Any = dist.ProcessGroupNCCL if torch.cuda.is_available() else dist.ProcessGroupGloo
    return made(store, rank, size, timeout)


if not hasattr(dist.Backend, BACKEND.upper()):
    dist.Backend.register_backend(BACKEND, _group, devices=["cpu", "cuda"])
