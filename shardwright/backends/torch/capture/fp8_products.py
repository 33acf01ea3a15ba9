"""Matrix products of bf16 tensors in fp8: each operand in 8 bits beside one scale, the result in bf16.

Operands of the forward pass are float8_e4m3fn, which has the finer steps, and gradients float8_e5m2, which has the
wider range (Micikevicius et al., arXiv 2209.05433). The scale of a tensor follows from its largest entry as it is now
(dynamic scaling), and is a power of two, so that scaling rounds nothing: what torchao's float8 training computes with
tensorwise scales that are rounded to powers of two.

An infinity or NaN in an operand makes every entry of the product NaN: nothing saturates in silence.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional

from shardwright.backends.torch.compat import scaled_product

FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
"""The dtypes of the operands of the forward pass, and of gradients."""
MULTIPLE = 16
"""The sizes of 8-bit matrices are multiples of it; others are padded with zeros, which change no sum."""
SMALLEST = 1e-12
"""The largest entry that a tensor is taken to have at least, for a scale that float32 can hold (torchao's)."""
_EXPONENT = 0x7F800000
"""The exponent of a float32 number among its bits: alone it is the power of two below the number."""
Reduce = Callable[[torch.Tensor], torch.Tensor]
"""A function that takes the largest entries of shards and gives those of the whole tensors."""

_plain = False


@contextmanager
def plain_products() -> Iterator[None]:
    """A context in which linear layers compute as they are: models are read in it, as a plan counts fp8 by itself."""
    global _plain
    before, _plain = _plain, True
    try:
        yield
    finally:
        _plain = before


def are_plain() -> bool:
    """Whether `plain_products` is in force."""
    return _plain


def largest_entry(tensor: torch.Tensor) -> torch.Tensor:
    """The largest magnitude in a tensor, of shape () in float32: NaN where an entry is. 0 of a tensor without any."""
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=tensor.device)
    found: torch.Tensor = torch.linalg.vector_norm(tensor, torch.inf, dtype=torch.float32)
    return found


def scale_for(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The power of two by which a tensor with this largest entry fills the range of an 8-bit dtype."""
    largest = largest.clamp(min=SMALLEST)
    scale = torch.full_like(largest, torch.finfo(dtype).max) / largest  # of two tensors: division by a number rounds
    return (scale.view(torch.int32) & _EXPONENT).view(torch.float32)


def cast(tensor: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, turned: bool = False) -> torch.Tensor:
    """A matrix in 8 bits, times its scale, with sizes padded to multiples of 16; ``turned``: transposed."""
    scaled = tensor * scale  # in bf16: a power of two changes the exponents alone
    if turned:
        scaled = scaled.t()
    below, beside = (-size % MULTIPLE for size in scaled.shape)
    if below or beside:
        scaled = functional.pad(scaled, (0, beside, 0, below))
    return scaled.to(dtype, memory_format=torch.contiguous_format)


def turned(matrix: torch.Tensor) -> torch.Tensor:
    """The transposed 8-bit matrix, in memory of its own."""
    return matrix.t().contiguous()


def product(
    left: torch.Tensor, right: torch.Tensor, left_scale: torch.Tensor, right_scale: torch.Tensor,
    shape: tuple[int, int], *, fast: bool,
) -> torch.Tensor:  # fmt: skip
    """The product of an 8-bit matrix [m, k] and the transposed of another [n, k], each divided by its scale, in bf16.

    Args:
        shape: the rows and columns of the result without what was padded.
        fast: whether sums may be kept in fewer bits (cuBLAS's fast accumulation), as forward passes do.
    """
    if 0 in shape:
        return left.new_zeros(shape, dtype=torch.bfloat16)
    made = scaled_product(left, right.t(), left_scale.reciprocal(), right_scale.reciprocal(), torch.bfloat16, fast=fast)
    rows, columns = shape
    return made if made.shape == shape else made[:rows, :columns].contiguous()
