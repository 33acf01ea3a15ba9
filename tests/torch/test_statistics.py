"""Softmax and norms over a split dim, on two threads that stand for two ranks, beside torch's own."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch

from shardwright.backends.torch.data_parallel.batch_norm import _Normed
from shardwright.backends.torch.tensor_parallel.random_ops import piece_of_whole
from shardwright.backends.torch.tensor_parallel.statistics import normalize, softmax
from shardwright.core.errors import MissingCapabilityError
from shardwright.core.layout.placements import Split
from tests.comparison import Comparison

RANKS = 2
REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda all_of_them: all_of_them.sum(0),
    "max": lambda all_of_them: all_of_them.amax(0),
}


class Together:
    """What all ranks of an axis have in hand."""

    def __init__(self) -> None:
        self.barrier = Barrier(RANKS, timeout=30)
        self.held: list[torch.Tensor] = [torch.empty(0)] * RANKS


class ThreadAxis:
    """An axis whose ranks are threads."""

    size = RANKS

    def __init__(self, together: Together, coordinate: int) -> None:
        self.together, self.coordinate = together, coordinate

    def all_reduce(self, tensor: torch.Tensor, op: str, key: Any) -> torch.Tensor:
        self.together.held[self.coordinate] = tensor.detach().clone()
        self.together.barrier.wait()
        reduced = REDUCTIONS[op](torch.stack(self.together.held))
        self.together.barrier.wait()
        return reduced


def on_two(
    function: Callable[[torch.Tensor, Any], torch.Tensor], whole: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The function's value and the gradient of its weighted sum, put together from both ranks' pieces."""
    together = Together()

    def rank(coordinate: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = whole.chunk(RANKS, -1)[coordinate].clone().requires_grad_()
        made = function(piece, ThreadAxis(together, coordinate))
        made.backward(weights.chunk(RANKS, -1)[coordinate])
        assert piece.grad is not None
        return made.detach(), piece.grad

    with ThreadPoolExecutor(RANKS) as pool:
        made, gradients = zip(*pool.map(rank, range(RANKS)), strict=True)
    return torch.cat(made, -1), torch.cat(gradients, -1)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_softmax_over_a_split_dim_is_as_exact_as_torchs(dtype: torch.dtype, log: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(3, 2000, generator=generator).mul(3).to(dtype)
    weights = torch.randn(3, 2000, generator=generator).to(dtype)
    own = whole.clone().requires_grad_()
    expected = own.log_softmax(-1) if log else own.softmax(-1)
    expected.backward(weights)
    made, gradient = on_two(lambda piece, axis: softmax(piece, 1, log, axis, "u"), whole, weights)
    assert made.dtype == dtype
    for found, torchs, exact in (
        (made, expected.detach(), (whole.double().log_softmax(-1) if log else whole.double().softmax(-1))),
        (gradient, own.grad, _exact_gradient(whole, weights, log)),
    ):
        assert torchs is not None
        off, theirs = (float((each.double() - exact).norm()) for each in (found, torchs))
        assert off <= 1.2 * theirs + 1e-12 * float(exact.norm())


def _exact_gradient(whole: torch.Tensor, weights: torch.Tensor, log: bool) -> torch.Tensor:
    wide = whole.double().requires_grad_()
    (wide.log_softmax(-1) if log else wide.softmax(-1)).backward(weights.double())
    assert wide.grad is not None
    return wide.grad


def test_many_equal_logits_do_not_overflow_in_fp16() -> None:
    whole = torch.ones(1, 70_000, dtype=torch.float16)
    made, _ = on_two(lambda piece, axis: softmax(piece, 1, False, axis, "u"), whole, torch.ones_like(whole))
    assert torch.equal(made, whole.softmax(-1))


@pytest.mark.parametrize(
    "function",
    [
        lambda piece, axis: softmax(piece, 1, True, axis, "u"),
        lambda piece, axis: softmax(piece, 1, False, axis, "u"),
        lambda piece, axis: normalize(piece, [1], 1e-5, True, axis, "u"),
    ],
)
def test_second_derivatives_are_refused_by_name(function: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
    together = Together()

    def rank(coordinate: int) -> None:
        piece = torch.randn(2, 4).requires_grad_()
        torch.autograd.grad(function(piece, ThreadAxis(together, coordinate)).sum(), piece, create_graph=True)

    with ThreadPoolExecutor(RANKS) as pool:
        for outcome in [pool.submit(rank, each) for each in range(RANKS)]:
            with pytest.raises(MissingCapabilityError, match="create_graph=True"):
                outcome.result(timeout=60)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_piece_of_what_is_drawn_does_not_hold_the_whole(dim: int) -> None:
    axis: Any = ThreadAxis(Together(), 1)
    piece = piece_of_whole(torch.rand, Split(dim), axis, 8, 4)
    assert piece.untyped_storage().nbytes() == piece.nbytes == 8 * 4 * 4 // RANKS


def test_batch_norm_over_replicas_sums_16_bits_in_float32() -> None:
    """In 16 bits a sum of ones ends at 256 in bf16. What is summed over replicas, forward and backward, is float32."""
    given = torch.randn(600, 3, dtype=torch.bfloat16).add_(1).requires_grad_()
    summed: list[torch.Tensor] = []

    def alone(tensor: torch.Tensor) -> torch.Tensor:
        summed.append(tensor)
        return tensor

    normed, mean, variance, count = _Normed.apply(given, 1e-5, alone)
    (normed.float() ** 3).sum().backward()
    assert len(summed) == 3
    assert {tensor.dtype for tensor in summed} == {torch.float32}
    assert float(count) == 600
    exact = given.detach().double().requires_grad_()
    wanted = torch.nn.functional.batch_norm(exact, None, None, training=True, eps=1e-5)
    (wanted**3).sum().backward()
    same = Comparison("batch norm in bf16")
    same.values([mean, variance], [exact.detach().mean(0), exact.detach().var(0, correction=0)], relative=1e-4,
                absolute=1e-4, same_dtype=False)  # fmt: skip
    same.gradients({"given": given.grad}, {"given": exact.grad}, relative=2e-2, same_dtype=False)
    same.require()
