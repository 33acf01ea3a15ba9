"""The FLOPs of matrix products that run while a model is recorded, and those that their gradients will take.

They are the model's own: what is recomputed in the backward pass counts once.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from shardwright.backends.torch.compat import pytree

aten = torch.ops.aten

Operands = Sequence[torch.Tensor]


def _two(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Operands:
    return args[:2]


def _after_bias(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Operands:
    return args[1:3]


_OPERANDS: dict[Any, Callable[[Sequence[Any], Mapping[str, Any]], Operands]] = {
    aten.mm: _two, aten.bmm: _two, aten._scaled_mm: _two, aten._grouped_mm: _two,
    aten.addmm: _after_bias, aten.baddbmm: _after_bias,
    aten.convolution: _two, aten._convolution: _two, aten.cudnn_convolution: _two,
    aten.convolution_overrideable: _two, aten._slow_conv2d_forward: _two,
}  # fmt: skip
"""The two operands of each product, by its op."""
_ATTENTION = {
    aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_fused_attention_overrideable,
}  # fmt: skip
_UNCOUNTED = {
    aten.mkldnn_rnn_layer, aten._cudnn_rnn, aten.miopen_rnn, aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu,
    aten._flash_attention_forward, aten._efficient_attention_forward, aten._sparse_addmm, aten._sparse_mm,
    aten._native_multi_head_attention, aten._transformer_encoder_layer_fwd,
}  # fmt: skip
"""Ops of torch's own with products inside that are not counted."""
_KNOWN_NAMESPACES = frozenset({"aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "c10d_functional"})
PRECISIONS = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8",
}  # fmt: skip


class ProductFlops:
    """The FLOPs of the products of one recording.

    Attributes:
        by_precision: FLOPs forward and backward, by the precision of the operands.
        unknown: the first op whose FLOPs are not known, "" where there is none.
    """

    def __init__(self) -> None:
        self.by_precision: dict[str, int] = {}
        self.unknown = ""

    def note(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note that an op ran. ``op`` is an overload; its operands say whether they need a gradient."""
        packet = getattr(op, "overloadpacket", op)
        if packet in _OPERANDS:
            operands = _OPERANDS[packet](args, kwargs)
            trained = sum(bool(t.requires_grad) for t in operands)
            try:
                flops = _forward(packet, operands, args, kwargs, result)
            except Exception:  # torch's formula does not take these operands
                self.unknown = self.unknown or str(op)
                return
            self._add(operands[0].dtype, flops, 1 + trained)
        elif packet in _ATTENTION:
            query, key, value = args[:3]
            flops = 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])
            of_scores = query.requires_grad or key.requires_grad
            trained = sum(map(bool, (query.requires_grad, key.requires_grad, value.requires_grad, of_scores)))
            self._add(query.dtype, flops, 1 + trained / 2)
        elif not self.unknown and (packet in _UNCOUNTED or _is_foreign(op, result)):
            self.unknown = str(op)

    def _add(self, dtype: torch.dtype, flops: float, times: float) -> None:
        precision = PRECISIONS.get(dtype, str(dtype).removeprefix("torch."))
        self.by_precision[precision] = self.by_precision.get(precision, 0) + int(flops * times)


def _forward(packet: Any, operands: Operands, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    if packet is aten._grouped_mm:  # rows, or depths, are dealt to the groups
        one, other = operands
        groups = one.shape[0] if one.dim() == other.dim() == 3 else 1
        return 2 * groups * one.shape[-2] * one.shape[-1] * other.shape[-1]
    found: int = flop_registry[packet](*args, **kwargs, out_val=result)
    return found


def _is_foreign(op: Any, result: Any) -> bool:
    """Whether an op that is not torch's own made a floating tensor: it may have products inside."""
    if getattr(op, "namespace", "aten") in _KNOWN_NAMESPACES:
        return False
    return any(isinstance(t, torch.Tensor) and t.is_floating_point() for t in pytree.tree_leaves(result))
