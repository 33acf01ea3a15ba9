"""What a step returns: one value for each microbatch, and their reductions."""

import torch

from shardwright.core.errors import ShardwrightError


class StepOutput:
    """A tensor that the step returned, once for every microbatch of this rank's replica.

    Scalars (losses, metrics) are reduced over every microbatch of every data-parallel replica, so that all ranks see
    the same number; other tensors over the microbatches of this replica. A loss that was given weights by
    ``model.backward(loss, weight)`` is averaged by them.

    Attributes:
        outputs: the values of this replica's microbatches, in order. They are detached.
    """

    def __init__(
        self, outputs: list[torch.Tensor], everywhere: torch.Tensor | None = None, weights: torch.Tensor | None = None
    ) -> None:
        self.outputs = outputs
        self._everywhere = everywhere
        self._weights = weights

    def reduce_mean(self) -> torch.Tensor:
        """The mean over microbatches: by weight for a loss that was given weights, and by samples where microbatches
        have different numbers of them."""
        if self._everywhere is None:
            return self.stack().mean(dim=0)
        if self._weights is None:
            return self._everywhere.mean()
        weights = self._weights.to(self._everywhere.dtype)
        return (self._everywhere * weights).sum() / weights.sum()

    def item(self) -> float:
        """Refused: there is one value for each microbatch. Raises ShardwrightError naming what to call instead."""
        raise ShardwrightError(
            f"a StepOutput holds {len(self.outputs)} values, one for each microbatch: call .reduce_mean().item()"
        )

    def reduce_sum(self) -> torch.Tensor:
        """The sum over microbatches."""
        return self.stack().sum(dim=0) if self._everywhere is None else self._everywhere.sum()

    def concat(self) -> torch.Tensor:
        """This replica's values joined along the first dim, in order of the samples."""
        if self.outputs[0].dim() == 0:
            return torch.stack(self.outputs)
        return torch.cat(self.outputs)

    def stack(self) -> torch.Tensor:
        """This replica's values along a new first dim of size microbatches. Raises ShardwrightError when their shapes
        differ, as those of microbatches of different sizes do."""
        shapes = {tuple(t.shape) for t in self.outputs}
        if len(shapes) > 1:
            raise ShardwrightError(
                f"the microbatches gave values of shapes {sorted(shapes)}, which do not stack: call .concat(), or "
                f"return something that does not depend on the number of samples"
            )
        return torch.stack(self.outputs)

    def __len__(self) -> int:
        return len(self.outputs)

    def __repr__(self) -> str:
        return f"StepOutput({len(self.outputs)} × {tuple(self.outputs[0].shape)})"
