"""The share of the data that a rank takes."""

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from shardwright.core.errors import ShardwrightError
from shardwright.torch import session as sessions


class DistributedSampler(Sampler[int]):
    """A sampler that gives each dp coordinate its share of a dataset; pipeline peers get the same samples in the same
    order.

    With ``batch_size``, that of one replica's loader, the replicas' k-th batches laid end to end are the k-th batch of
    the unsplit run, in its order, so that losses compare step by step. Without it samples are dealt out in turn.

    Args:
        shuffle: in an order that depends on the seed and on the epoch alone; see `set_epoch`.
        drop_last: leave out the samples that do not fill a round of all replicas, instead of repeating samples from the
            start.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise ShardwrightError(f"batch_size={batch_size}: expected a whole number of at least 1")
        if len(dataset) == 0:
            raise ShardwrightError("the dataset is empty: there is nothing to share out")
        alike = sessions.current().config.prescaled_batch  # on the tensor axis all have the same samples
        self.replicas = sessions.rdp_size() if alike else sessions.dp_size()
        self.replica = sessions.rdp_rank() if alike else sessions.dp_rank()
        self.samples = len(dataset)
        self.block = batch_size or 1
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0

    @property
    def _rounds(self) -> int:
        per_round = self.block * self.replicas
        return self.samples // per_round if self.drop_last else -(-self.samples // per_round)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle differently from now on; call it before every epoch, on all ranks."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.samples))
        if self.shuffle:
            order = torch.randperm(
                self.samples, generator=torch.Generator().manual_seed(self.seed + self.epoch)
            ).tolist()
        per_round = self.block * self.replicas
        for number in range(self._rounds):
            first = number * per_round + self.replica * self.block
            for position in range(first, first + self.block):
                yield order[position % self.samples]

    def __len__(self) -> int:
        return self._rounds * self.block


def sampler(dataset: Sized, **options: Any) -> DistributedSampler:
    """The sampler of this rank; options as of `DistributedSampler`."""
    return DistributedSampler(dataset, **options)
