"""Values of tensors that a model reads: the functions that read them, and whether a model may run on real tensors."""

from typing import Any

import torch
from torch import nn

from shardwright.core.errors import UnrecordableError

REAL_LIMIT_BYTES = 4 << 30
"""The largest size of a model that is run for real, while it is captured or recorded, because its ops depend on
values."""
READING = frozenset({
    "item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__complex__", "__index__",
    "__contains__", "equal", "allclose", "is_nonzero",
})  # fmt: skip
"""Functions of tensors whose result is the value of a tensor, whether or not they run an op for it."""


def masks_of(op: Any, args: Any) -> list[torch.Tensor] | None:
    """The masks whose number of entries decides the shape of an aten op's result; None where something else decides
    it."""
    if op is torch.ops.aten.masked_select.default:
        return [args[1]]
    if op in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default):
        return [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
    return None


def require_room_for_values(model: nn.Module, needs: Exception) -> None:
    """Raise UnrecordableError for a model that is too large to be recorded with values."""
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    if size_bytes > REAL_LIMIT_BYTES:
        raise UnrecordableError(
            f"{needs}. To record it with values takes {size_bytes / 2**30:.1f} GiB on every rank, more than the "
            f"{REAL_LIMIT_BYTES / 2**30:.0f} GiB that are taken for that"
        ) from needs
