"""A communication hook of the user's in the place of the sums over replicas, as DistributedDataParallel takes one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwright.core.errors import ShardwrightError


class GradientBucket:
    """Gradients on their way to the other replicas: to a hook what `torch.distributed.GradBucket` is.

    Args:
        flat: all gradients in one tensor, of one dim.
        places: the (shape, strides, first entry) of each gradient in it.
    """

    def __init__(
        self, number: int, is_last: bool, flat: torch.Tensor, parameters: Sequence[nn.Parameter], places: Sequence[Any]
    ) -> None:
        self._number, self._is_last, self._flat = number, is_last, flat
        self._parameters, self._places = list(parameters), places

    def index(self) -> int:
        """The number of the bucket, the same on all replicas; 0 leaves first."""
        return self._number

    def is_last(self) -> bool:
        """Whether this bucket is the last one of a step."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """All gradients in one tensor, of one dim."""
        return self._flat

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Put another tensor in the place of `buffer`."""
        self._flat = buffer

    def gradients(self) -> list[torch.Tensor]:
        """The gradient of each parameter, a view of the buffer."""
        return [self._flat.as_strided(*place) for place in self._places]

    def parameters(self) -> list[nn.Parameter]:
        """The parameters."""
        return self._parameters


@dataclass(frozen=True, slots=True)
class CommHook:
    """A hook that is called with every bucket: ``hook(state, bucket)`` gives a future of the mean over replicas.

    Attributes:
        replicas: their number.
    """

    state: Any
    hook: Callable[[Any, Any], Any]
    replicas: int

    def begin(self, bucket: GradientBucket) -> Callable[[], torch.Tensor]:
        """Begin what the hook does; the result waits, and gives the sum over replicas.

        Raises ShardwrightError for a hook that does not give a future of one tensor like the bucket's.
        """
        given = bucket.buffer().mul_(self.replicas)  # the hook makes a mean, and the scale is in the losses already
        future = self.hook(self.state, bucket)
        if not callable(getattr(future, "wait", None)):  # torch's own are of a private class
            raise ShardwrightError(
                f"the communication hook {self.named()} returned {type(future).__name__}: expected a "
                f"torch.futures.Future of the tensor with the means, such as "
                f"dist.all_reduce(…, async_op=True).get_future().then(lambda f: f.value()[0])"
            )

        def wait() -> torch.Tensor:
            found = future.wait()
            if isinstance(found, list | tuple) and len(found) == 1:
                (found,) = found
            if given.is_complex() and isinstance(found, torch.Tensor) and found.shape == (*given.shape, 2):
                found = torch.view_as_complex(found)  # torch's collectives take pairs of real numbers
            if not isinstance(found, torch.Tensor) or found.shape != given.shape or found.dtype is not given.dtype:
                told = (
                    f"{found.dtype} of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found)
                )
                raise ShardwrightError(
                    f"the communication hook {self.named()} gave {told} for bucket {bucket.index()}: expected "
                    f"{given.dtype} of shape {tuple(given.shape)}, as bucket.buffer() is"
                )
            return found

        return wait

    def named(self) -> str:
        """The name of the hook."""
        return getattr(self.hook, "__qualname__", type(self.hook).__name__)
