"""The private names of PyTorch that this backend leans on, and the fallbacks where one is gone.

The names are those of torch 2.6 to 2.13. Capture and recording need the imported names, so a torch that lacks one is
refused by name. A function here falls back on something slower where it can.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwright.core.errors import MissingFrameworkError

try:
    from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass
    from torch._C import _AutoDispatchBelowAutograd as below_autograd  # a context manager
    from torch._C import _FunctionBase as CustomFunctionNode
    from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        in_kernel_invocation_manager,
    )
    from torch.distributed import _functional_collectives as functional_collectives
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
    from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE_KEY
    from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes
except ImportError as error:
    raise MissingFrameworkError(
        f"torch {torch.__version__} lacks what Shardwright records steps with ({error}): install torch 2.6 to 2.13"
    ) from error

CHECKPOINTS = ("_checkpoint_without_reentrant_generator", "CheckpointFunction")
"""The names in `torch.utils.checkpoint` by which it does its work: the generator around a call, and the autograd
function of reentrant checkpoints."""
FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"
COMPILER = "torch._dynamo"
"""The module of torch.compile: it is loaded when it is first used."""

CLIPPING = {"_get_total_norm": "get_total_norm", "_clip_grads_with_norm_": "clip_grads_with_norm_"}
"""The functions in `torch.nn.utils.clip_grad` of which `clip_grad_norm_` consists: one computes the norm, the other
divides by it; and their public names in `torch.nn.utils`."""

DCP_RECORDS = frozenset({
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),  # of torch before 2.3
})  # fmt: skip
"""The classes of the records in the metadata of `torch.distributed.checkpoint`, by module and name."""
DCP_ENCODINGS = (
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
)
"""The numbers that stand for the formats of memory there."""
DCP_LAYOUT = ("torch.serialization", "_get_layout")
"""The function that finds a layout by its name there."""

__all__ = [
    "CHECKPOINTS",
    "COMPILER",
    "DCP_ENCODINGS",
    "DCP_LAYOUT",
    "DCP_RECORDS",
    "EXTRA_STATE_KEY",
    "FAKE_TENSOR_LOGGER",
    "BatchNorm",
    "CustomFunctionNode",
    "DataDependentOutputException",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "HashStore",
    "IncompatibleKeys",
    "OpOverload",
    "PrefixStore",
    "StorageWeakRef",
    "Store",
    "TCPStore",
    "TorchDispatchMode",
    "accumulation_hooks",
    "all_gather_single",
    "below_autograd",
    "collects_all_gradients",
    "current_fake_mode",
    "current_node",
    "default_store",
    "device_types",
    "dispatch_depth",
    "functional_collectives",
    "has_memory_of_its_own",
    "hook_before_others",
    "in_kernel_invocation_manager",
    "keeps_current_graph",
    "mkldnn_enabled",
    "norms_of",
    "pytree",
    "reduce_scatter_single",
    "safe_softmax",
    "scaled_product",
    "sequence_number",
    "set_mkldnn_enabled",
    "set_timeout",
    "storage_of",
    "transforms_are_active",
    "without_dispatch_modes",
]


def storage_of(reference: Any) -> torch.UntypedStorage | None:
    """The storage that a weak reference (`StorageWeakRef`) is to; None once it is gone."""
    found: Any = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return found if isinstance(found, torch.UntypedStorage) else None


def device_types(group: Any) -> list[str]:
    """The types of devices whose tensors a process group carries; none where torch does not say."""
    return [device.type for device in getattr(group, "_device_types", [])]


all_gather_single: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""The gather of equal parts into one tensor, under its newest name."""
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""The sum of which each rank keeps an equal part, under its newest name."""


def current_fake_mode() -> Any:
    """The fake tensor mode that is entered, or None."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def dispatch_depth() -> int:
    """The number of dispatch modes that are entered."""
    return torch._C._len_torch_dispatch_stack()


def accumulation_hooks(parameter: torch.Tensor) -> list[Any]:
    """The hooks by ``register_post_accumulate_grad_hook``."""
    return list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


def hook_before_others(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> None:
    """Register a hook of a tensor's gradient that runs before those which are there; behind them where torch keeps them
    elsewhere."""
    handle = tensor.register_hook(hook)
    hooks = getattr(tensor, "_backward_hooks", None)
    if hooks and len(hooks) > 1 and handle.id in hooks:  # which torch runs in the order of their insertion
        others = {number: other for number, other in hooks.items() if number != handle.id}
        hooks.clear()
        hooks.update({handle.id: hook} | others)


def has_memory_of_its_own(tensor: torch.Tensor) -> bool:
    """Whether no other tensor shares the memory of this one, which has all of it."""
    storage = tensor.untyped_storage()
    users: int = torch._C._storage_Use_Count(storage._cdata)  # the tensor and ``storage``
    return users == 2 and storage.nbytes() == tensor.nbytes


def current_node() -> Any:
    """The autograd node whose backward runs now, or None."""
    return torch._C._current_autograd_node()


def sequence_number() -> int:
    """The number that the next autograd node of this thread gets."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def keeps_current_graph() -> bool:
    """Whether the backward pass that runs now keeps its graph (``retain_graph``)."""
    keeps: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return keeps


def collects_all_gradients() -> bool:
    """Whether the backward pass that runs now is of all leaves, and not of some, as in `torch.autograd.grad`."""
    collects: bool = torch.autograd._is_checkpoint_valid()
    return collects


def transforms_are_active() -> bool:
    """Whether a transform of `torch.func` is active."""
    return torch._C._are_functorch_transforms_active()


def mkldnn_enabled() -> bool:
    """Whether oneDNN is enabled."""
    enabled: bool = torch._C._get_mkldnn_enabled()
    return enabled


def set_mkldnn_enabled(enabled: bool) -> None:
    """Enable or disable oneDNN."""
    torch._C._set_mkldnn_enabled(enabled)


def default_store() -> Store:
    """The store of the default process group."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def set_timeout(group: dist.ProcessGroup, longest: timedelta) -> None:
    """Set the timeout of a group's collectives."""
    dist.distributed_c10d._set_pg_timeout(longest, group)


def norms_of(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The norm of each tensor, in one call where torch has it."""
    together = getattr(torch, "_foreach_norm", None)
    return [torch.linalg.vector_norm(each) for each in tensors] if together is None else together(list(tensors))


def scaled_product(
    left: torch.Tensor,
    right: torch.Tensor,
    of_left: torch.Tensor,
    of_right: torch.Tensor,
    dtype: torch.dtype,
    *,
    fast: bool,
) -> torch.Tensor:
    """The product of two 8-bit matrices, times a factor of each; ``fast``: sums may be kept in fewer bits.

    On CPUs, whose own kernel is a loop without vectors, it is a product in float32, which has the same bits where sums
    are exact.
    """
    if left.device.type == "cpu" and not isinstance(left, FakeTensor):
        return (left.float() @ right.float() * (of_left * of_right)).to(dtype)
    return torch._scaled_mm(left, right, of_left, of_right, out_dtype=dtype, use_fast_accum=fast)


def safe_softmax(scores: torch.Tensor, dim: int) -> torch.Tensor:
    """Softmax that is 0 where a row is masked whole, and not NaN."""
    own = getattr(torch, "_safe_softmax", None)
    if own is not None:
        made: torch.Tensor = own(scores, dim)
        return made
    return torch.softmax(scores, dim).masked_fill((scores == -torch.inf).all(dim, keepdim=True), 0.0)
