"""The dtypes of parameters: float32 between steps, where the optimizer sees them, and 16 bits in steps that compute so.

(Mixed precision with master weights: Micikevicius et al., arXiv 1710.03740, section 3.1.)
"""

from collections.abc import Mapping

import torch

COMPUTE: Mapping[str, torch.dtype | None] = {
    "fp32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}
"""The dtype in which the steps of a plan of each precision compute; None: that of the parameters.
The products in 8 bits of a plan in fp8 have operands and results in bf16 (`fp8_products`)."""
_SINGLE_AND_HALF = (torch.float32, torch.float16, torch.bfloat16)


def step_dtype(own: torch.dtype, compute: torch.dtype | None) -> torch.dtype:
    """The dtype that a step takes a tensor of dtype ``own`` in, where it computes in ``compute``; None: its own. Double
    precision, complex numbers and integers stay as they are."""
    return compute if compute is not None and own in _SINGLE_AND_HALF else own
