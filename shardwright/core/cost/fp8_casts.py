"""What a product in fp8 takes beside itself: scales and casts, as memory traffic, kernels and memory.

An operand in bf16 is read for its largest entry, multiplied by a power of two, and cast to 8 bits. The forward pass
does so with both operands. The backward pass does so with the gradient of the result, and casts the two operands once
more by the scales that it has. There they lie in the order of the other dim, as tensor cores read 8-bit operands along
the dim that is summed over (cuBLAS, FP8 kernels), and the gradient lies in both orders.
"""

from dataclasses import dataclass

LARGEST_BYTES = 2
"""Bytes moved for the largest entry, for each entry of an operand: it is read once."""
CAST_BYTES = (2 + 2) + (2 + 1)
"""Bytes moved to scale in bf16, and to cast."""
TURNED_BYTES = 1 + 1
"""Bytes moved to copy 8-bit numbers in the other order."""
WORKING_BYTES = 2 + 1
"""Bytes of memory for an entry while it is cast."""
FORWARD_KERNELS, INPUT_GRAD_KERNELS, WEIGHT_GRAD_KERNELS = 16, 11, 5
"""The kernels for the scales and casts of a product: for an operand the largest entry, four small ones that make its
scale, the scaling and the cast; two where the scale is known; a reciprocal for each operand, and a copy."""
ISSUED = 1 / 12
"""The host's time to issue such a kernel, as a share of that for a chain of elementwise ops. Prior: the fitted time of
a chain, 75 µs, is that of about a dozen calls of 6 µs, through modules and autograd."""


@dataclass(frozen=True, slots=True)
class Casts:
    """Bytes moved beside a product in fp8 in the forward pass, for the gradient of the activation and for that of the
    weight; and the bytes of memory that the forward and the backward pass take for a while."""

    forward_bytes: int
    input_grad_bytes: int
    weight_grad_bytes: int
    forward_working_bytes: int
    backward_working_bytes: int


def casts(activation: int, weight: int, result: int) -> Casts:
    """The casts of a product with so many entries of each on one rank."""
    anew = LARGEST_BYTES + CAST_BYTES
    return Casts(
        anew * (activation + weight),
        anew * result + CAST_BYTES * weight,
        TURNED_BYTES * result + CAST_BYTES * activation,
        max(WORKING_BYTES * activation, activation + WORKING_BYTES * weight),
        max(WORKING_BYTES * result, result + WORKING_BYTES * max(activation, weight)),
    )
