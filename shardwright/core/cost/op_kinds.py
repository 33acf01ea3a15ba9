"""Kinds of ops by what they cost, and the bytes of their values."""

from shardwright.core.model.graph import Op

PRECISION_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""Bytes of a value between ops in steps of a precision: those of fp8 keep their values in bf16."""

FREE_KINDS = frozenset({"view", "create"})
PRODUCT_KINDS = frozenset({"contraction", "attention"})
ALONE_KINDS = PRODUCT_KINDS | {"opaque"}
"""The kinds of op that are kernels of their own, into which no elementwise op is fused."""


def is_part_of_a_kernel(op: Op) -> bool:
    """Whether an op was told from the rest of a framework's op, whose one kernel does both: the bias of a linear layer,
    scale and shift of a norm. Their names say of what they are a part: ``aten.addmm/bias``."""
    return "/" in op.name
