"""The hooks by which a step hears of every gradient, and the buffers in which gradients add up."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from shardwright.backends.torch.compat import accumulation_hooks, has_memory_of_its_own

Place = tuple[torch.Size, tuple[int, ...], int]
"""The (shape, strides, first entry) of a tensor in a flat buffer."""
HALF = (torch.bfloat16, torch.float16)
"""The dtypes whose gradients add up in float32."""


class GradientSums:
    """Gradients of some parameters that add up over microbatches in a flat tensor.

    The first gradient of a parameter that has the whole buffer to itself becomes the buffer, without a copy.

    Args:
        places: the places of the gradients in the buffer.
        entries: the number of entries of the buffer.
        dtype: the dtype of the sums.

    Attributes:
        dtype: the dtype of the sums.
        gathers_late: whether first gradients stay as autograd made them until the buffer is taken, or another is added
            to them: the buffer of the sums before, which is on its way until then, is gone by that time.
    """

    def __init__(self, places: Sequence[Place], entries: int, dtype: torch.dtype, device: torch.device) -> None:
        self._places, self._entries, self.dtype, self._device = places, entries, dtype, device
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._filled: set[int] = set()
        self._apart: dict[int, torch.Tensor] = {}
        """Gradients that are not in the buffer yet."""
        self.gathers_late = False

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Add a gradient to its sum."""
        if self._flat is None:
            if self._can_become_the_buffer(gradient):
                self._flat, self._views = gradient.detach().as_strided((self._entries,), (1,)), [gradient.detach()]
                self._filled.add(index)
                return
            if self.gathers_late and index not in self._apart:
                self._apart[index] = gradient.detach()
                return
            self._gather()
        self._add(index, gradient)

    def _gather(self) -> None:
        """Make the buffer, with the gradients that there are in it."""
        self._flat = torch.empty(self._entries, dtype=self.dtype, device=self._device)
        self._views = [self._flat.as_strided(*place) for place in self._places]
        for index in list(self._apart):
            self._add(index, self._apart.pop(index))

    def _add(self, index: int, gradient: torch.Tensor) -> None:
        if index in self._filled:
            self._views[index].add_(gradient)
        else:
            self._filled.add(index)
            if gradient.is_sparse:
                self._views[index].zero_().add_(gradient)
            else:
                self._views[index].copy_(gradient)

    def _can_become_the_buffer(self, gradient: torch.Tensor) -> bool:
        return (
            len(self._places) == 1
            and gradient.numel() == self._entries
            and gradient.layout is torch.strided
            and not (gradient.is_conj() or gradient.is_neg())
            and gradient.dtype is self.dtype
            and gradient.stride() == self._places[0][1]
            and has_memory_of_its_own(gradient)
        )

    def sum_of(self, index: int) -> torch.Tensor | None:
        """The sum of a gradient so far, None before anything was added."""
        return self._views[index] if index in self._filled else None

    def take(self) -> tuple[torch.Tensor | None, set[int]]:
        """The buffer, None where nothing was added, and the gradients that are in it. What is added next goes into
        another."""
        if self._apart:
            self._gather()
        taken = self._flat, self._filled
        self._flat, self._views, self._filled = None, [], set()
        return taken

    def clear(self) -> None:
        """Forget what was added."""
        self._apart.clear()
        self.take()


class RowSums:
    """Gradients of one table that add up over microbatches: rows, or whole where one of them is.

    Attributes:
        dtype: the dtype of the sums.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._sum: torch.Tensor | None = None

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Add a gradient to the sum."""
        more = gradient.detach().to(self.dtype)
        self._sum = more if self._sum is None else added(self._sum, more)

    def sum_of(self, index: int) -> torch.Tensor | None:
        """None: nobody adds to the sum but `add`."""
        return None

    def take(self) -> torch.Tensor | None:
        """The sum, None where nothing was added. What is added next begins another."""
        taken, self._sum = self._sum, None
        return taken


def added(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The sum of two gradients, of rows or whole: each row once; whole where one of them is."""
    if not one.is_sparse:
        return one + other
    if not other.is_sparse:
        return other + one
    width = torch.float32 if one.dtype in HALF else one.dtype  # torch adds no rows of 16 bits on CPUs
    return (one.to(width) + other.to(width)).coalesce().to(one.dtype)


def entries_of(gradient: torch.Tensor) -> torch.Tensor:
    """The entries of a gradient that are not zeros for want of a row."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


class GradientHook:
    """A hook on a parameter that tells of each gradient in a step, and adds it to its sum.

    Attributes:
        is_active: says whether a step runs: outside of steps gradients stay where autograd leaves them.
        keeps_data: whether the parameter has its whole data all through the step.
    """

    __slots__ = ("index", "is_active", "keeps_data", "name", "sums", "tell")
    is_of_the_runtime = True

    def __init__(
        self, name: str, index: int, sums: GradientSums | RowSums, tell: Callable[[str], None],
        is_active: Callable[[], bool], keeps_data: bool,
    ) -> None:  # fmt: skip
        self.name, self.index, self.sums, self.tell = name, index, sums, tell
        self.is_active, self.keeps_data = is_active, keeps_data

    def __call__(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or not self.is_active():  # None where the weight gradient is put off
            return
        parameter.grad = None
        self.sums.add(self.index, gradient)
        self.tell(self.name)

    def add(self, gradient: torch.Tensor) -> None:
        """Add a gradient that autograd did not make."""
        self.sums.add(self.index, gradient)


def hook_of(parameter: torch.Tensor) -> GradientHook | None:
    """The hook of a step that runs on a parameter, where there is one."""
    hooks = accumulation_hooks(parameter)
    return next((hook for hook in hooks if isinstance(hook, GradientHook) and hook.is_active()), None)


def is_hooked(parameter: torch.Tensor) -> bool:
    """Whether a hook of the user's waits for the gradient of a parameter."""
    hooks = accumulation_hooks(parameter)
    return bool(parameter._backward_hooks) or any(not isinstance(hook, GradientHook) for hook in hooks)


def dense_strides(parameter: nn.Parameter) -> tuple[int, ...]:
    """The strides of a parameter where its entries lie side by side, in whatever order; else those of the usual
    order."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size != 1 and stride != expected:
            return torch.empty(parameter.shape, device="meta").stride()
        expected *= size
    return tuple(parameter.stride())
