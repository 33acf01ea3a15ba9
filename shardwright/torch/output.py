"""The outputs of a step: one value for each microbatch, and their reductions."""

import torch

from shardwright.core.errors import ShardwrightError


class StepOutput:
    """A tensor that the step returned, once for every microbatch of this rank's replica.

    Reductions are over the microbatches of this replica, as SageMaker's are. Those whose name begins with
    ``all_reduce`` are over all replicas, and the same on every rank. A mean weighs a loss by the shares of its
    microbatches in the whole batch (weights that were given, the count of a masked mean). It weighs anything else by
    samples, where microbatches have different numbers of them.

    Attributes:
        outputs: the values of this replica's microbatches, in order. They are detached.
    """

    def __init__(
        self,
        outputs: list[torch.Tensor],
        everywhere: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        first: int = 0,
    ) -> None:
        """``everywhere`` and ``weights`` are of the microbatches of all replicas; this replica's begin at ``first``."""
        self.outputs = outputs
        self._everywhere = everywhere
        self._weights = weights
        self._first = first

    def reduce_mean(self) -> torch.Tensor:
        """The mean over this replica's microbatches."""
        if self._everywhere is None or self._weights is None:
            return self.stack().mean(dim=0)
        own = slice(self._first, self._first + len(self.outputs))
        return _mean(self._everywhere[own], self._weights[own]).reshape(self.outputs[0].shape)

    def reduce_sum(self) -> torch.Tensor:
        """The sum over this replica's microbatches."""
        return self.stack().sum(dim=0)

    def all_reduce_mean(self) -> torch.Tensor:
        """The mean over the microbatches of all replicas. For a loss that is a mean it is the loss of the whole batch.

        Raises ShardwrightError for a value that is no floating scalar: only those travel between replicas.
        """
        everywhere = self._of_all()
        return everywhere.mean() if self._weights is None else _mean(everywhere, self._weights)

    def all_reduce_sum(self) -> torch.Tensor:
        """The sum over the microbatches of all replicas. For a loss that is a sum it is the loss of the whole batch.

        Raises ShardwrightError for a value that is no floating scalar.
        """
        return self._of_all().sum()

    def _of_all(self) -> torch.Tensor:
        if self._everywhere is None:
            raise ShardwrightError(
                f"values of shape {tuple(self.outputs[0].shape)} and dtype {self.outputs[0].dtype} stay on the replica "
                f"that computed them: return a floating scalar from the step for a reduction over all replicas"
            )
        return self._everywhere

    def item(self) -> float:
        """Refuse: there is one value for each microbatch. Raises ShardwrightError naming what to call instead."""
        raise ShardwrightError(
            f"a StepOutput holds {len(self.outputs)} values, one for each microbatch: call .reduce_mean().item(), or "
            f".all_reduce_mean().item() for those of all replicas"
        )

    def concat(self) -> torch.Tensor:
        """This replica's values joined along the first dim, in order of the samples. Raises ShardwrightError when their
        shapes differ in other dims."""
        if self.outputs[0].dim() == 0:
            return torch.stack(self.outputs)
        if len({tuple(tensor.shape[1:]) for tensor in self.outputs}) > 1:
            shapes = sorted({tuple(tensor.shape) for tensor in self.outputs})
            raise ShardwrightError(
                f"the microbatches gave values of shapes {shapes}, which do not join along their first dim: join "
                f".outputs along the dim of the samples"
            )
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


def _mean(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The mean by weight. A value of weight 0, such as the mean over nothing, does not count."""
    weights = weights.to(values)
    return torch.where(weights == 0, torch.zeros_like(values), values * weights).sum() / weights.sum()
