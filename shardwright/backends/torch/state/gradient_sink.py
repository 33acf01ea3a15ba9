"""Where the gradient of a parameter goes as soon as a backward pass has added to it: into a flat buffer."""

from collections.abc import Callable

import torch
from torch import nn

from shardwright.backends.torch.compat import storage_uses

_ALONE = torch.empty(1)
"""A tensor whose memory nothing else refers to."""


class GradientBuffer:
    """The gradients of some parameters in one flat tensor, where they add up over microbatches.

    Args:
        shapes: the (shape, strides, offset in the buffer) of every gradient.
        entries: the number of entries of the buffer.
        dtype: the dtype of the sums, float32 for 16-bit gradients.
        stays: whether the memory is used again in the next step, where nothing else refers to it by then.
    """

    def __init__(
        self,
        shapes: list[tuple[torch.Size, tuple[int, ...], int]],
        entries: int,
        dtype: torch.dtype,
        device: torch.device,
        stays: bool,
    ) -> None:
        self._shapes, self._entries, self._dtype, self.device = shapes, entries, dtype, device
        self._stays = stays
        self._spare: torch.Tensor | None = None
        self.active = False
        """Whether gradients go here now: outside of steps they stay where autograd leaves them."""
        self._flat: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []
        self.filled: set[int] = set()
        """The gradients that were added to since the buffer was last taken."""

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Add a gradient to its sum."""
        self._allocate()
        view = self.views[index]
        if index in self.filled:
            view.add_(gradient)
            return
        self.filled.add(index)
        if gradient.is_sparse:
            view.zero_().add_(gradient)
        else:
            view.copy_(gradient)

    def sum_of(self, index: int) -> torch.Tensor | None:
        """The sum of a gradient so far, None before anything was added."""
        return self.views[index] if index in self.filled else None

    def take(self) -> torch.Tensor:
        """The whole buffer, in which gradients that nothing was added to are zero. What is added next goes into
        another."""
        self._allocate()
        taken = self._flat
        assert taken is not None
        for index, view in enumerate(self.views):
            if index not in self.filled:
                view.zero_()
        self.release()
        return taken

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The gradients in a buffer that was taken."""
        return [flat.as_strided(*place) for place in self._shapes]

    def release(self) -> None:
        """Forget the memory; the next gradient gets another."""
        self._flat, self.views = None, []
        self.filled.clear()

    def _allocate(self) -> None:
        if self._flat is not None:
            return
        if self._spare is not None and storage_uses(self._spare) == storage_uses(_ALONE):
            self._flat, self._spare = self._spare, None
        else:
            self._flat = torch.empty(self._entries, dtype=self._dtype, device=self.device)
        self.views = self.views_of(self._flat)
        if self._stays:
            self._spare = self._flat


class GradientSink:
    """A hook on a parameter that moves each gradient into a buffer, and tells that it came."""

    __slots__ = ("buffer", "index", "keeps_data", "name", "tell")

    def __init__(
        self, name: str, buffer: GradientBuffer, index: int, tell: Callable[[str], None], keeps_data: bool
    ) -> None:
        """A sink whose parameter has its whole data all through the step, or not (``keeps_data``)."""
        self.name, self.buffer, self.index, self.tell = name, buffer, index, tell
        self.keeps_data = keeps_data

    def add(self, gradient: torch.Tensor) -> None:
        """Add a gradient to its sum."""
        self.buffer.add(self.index, gradient)

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add a matrix product to the sum, in one pass where dtypes and strides allow it."""
        so_far = self.buffer.sum_of(self.index)
        if so_far is None or so_far.dtype is not left.dtype or not so_far.is_contiguous():
            self.add(left @ right)
        else:
            so_far.addmm_(left, right)

    def __call__(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if not self.buffer.active or gradient is None:  # none where the weight gradient is put off
            return
        parameter.grad = None
        self.add(gradient)
        self.tell(self.name)


def sink_of(parameter: torch.Tensor) -> GradientSink | None:
    """The sink of a parameter, where it has one."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return next((hook for hook in hooks.values() if isinstance(hook, GradientSink) and hook.buffer.active), None)


def is_hooked(parameter: torch.Tensor) -> bool:
    """Whether a user's hook waits for the gradient of a parameter: sinks do not count."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return bool(parameter._backward_hooks) or any(not isinstance(hook, GradientSink) for hook in hooks.values())


def dense_strides(parameter: nn.Parameter) -> tuple[int, ...]:
    """The strides of a parameter where its entries lie side by side, in whatever order; else those of the usual
    order."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size != 1 and stride != expected:
            return torch.empty(parameter.shape, device="meta").stride()
        expected *= size
    return tuple(parameter.stride())
