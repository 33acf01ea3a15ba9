"""What kernels that are written by hand for a transformer's layer do not take, so that it runs op by op.

Systems with such kernels (Megatron-LM, apex, Transformer Engine) have them for the chains of a layer: bias and GELU,
bias with dropout and residual sum, scale with mask and softmax. The loss has none, and the softmax takes some shapes
alone.
"""

import math
from collections.abc import Mapping

from shardwright.core.model.graph import Graph, Op

SOFTMAX_BATCHES = 4
"""What batch × heads of a rank must divide by for the softmax kernel. Paper: Megatron-LM,
megatron/model/fused_softmax.py, `is_kernel_available`; apex and Transformer Engine have the same."""

SOFTMAX_OPS = 4
"""The kernels that stand in for it, beside the softmax itself: cast to float32, scale, mask, cast back. Paper:
Megatron-LM, megatron/model/fused_softmax.py, `forward_torch_softmax`."""

_WIDE_BYTES = 4


def loss_ops(graph: Graph, ops: range, kernels_alone: frozenset[str]) -> frozenset[int]:
    """Those of the ops of a unit that make the loss from the results of its last products: from what the graph gives
    back to ops of the kinds ``kernels_alone``. None of a unit without a loss."""
    found = set[int]()
    waiting = list(graph.outputs)
    while waiting:
        index = graph.producer.get(waiting.pop())
        if index is None or index not in ops or index in found or graph.ops[index].kind in kernels_alone:
            continue
        found.add(index)
        waiting += graph.ops[index].inputs
    return frozenset(found)


def softmax_op_by_op(graph: Graph, op: Op, batch: int, ways: Mapping[int, int]) -> tuple[int, int]:
    """The bytes and the kernels that the softmax of attention takes on one rank beside those of its kernel, where that
    does not take its shape; none where it does. ``ways``: into how many shards each label is cut."""
    shape = graph.tensors[op.outputs[0]].shape(batch)
    cut = [size // ways.get(label, 1) for size, label in zip(shape, op.output_labels[0], strict=True)]
    if len(cut) < 3 or math.prod(cut[:-2]) % SOFTMAX_BATCHES == 0:
        return 0, 0
    return SOFTMAX_OPS * 2 * _WIDE_BYTES * math.prod(cut), SOFTMAX_OPS
