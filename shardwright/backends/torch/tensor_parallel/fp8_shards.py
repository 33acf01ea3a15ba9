"""Products in fp8 of operands that lie on several ranks of the tensor axis.

The scale of an operand is that of the whole: ranks tell each other the largest entries of their shards. So every entry
becomes the same 8-bit number as in the unsplit model, and results differ from its results by the order of sums alone.
(Scales for each shard would spare two small messages for a product, and round otherwise on every mesh.)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from shardwright.backends.torch.machine.tensor_axis import Axis
from shardwright.backends.torch.memory import fp8_linear


def product(
    x: torch.Tensor, weight: torch.Tensor, is_turned: bool, shares_operands: bool, shares_result: bool, axis: Axis,
    unit: str,
) -> torch.Tensor:  # fmt: skip
    """The product of a rank's part of ``x`` […, in] with its part of a weight, [out, in], or [in, out] where it is
    ``turned``; where neither is bf16, in their own precision.

    Args:
        shares_operands: whether ``x`` or the weight is split over the axis; ``shares_result``: whether the result is.
    """
    if not fp8_linear.applies(x, weight):
        return x @ weight if is_turned else F.linear(x, weight)

    def of_whole(direction: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda largest: axis.all_reduce(largest, "max", (unit, direction))

    asked: dict[str, Any] = {}
    if shares_operands:
        asked["of_operands"] = of_whole("forward")
    if shares_result:
        asked["of_gradient"] = of_whole("backward")
    return fp8_linear.linear(x, weight, is_turned=is_turned, **asked)
