"""The share of the data that a rank takes."""

from collections.abc import Sized
from typing import Any

from torch.utils.data.distributed import DistributedSampler as TorchSampler

from shardwright.torch import session as sessions


class DistributedSampler(TorchSampler[Any]):
    """Gives each dp coordinate its share of a dataset; pipeline peers get the same samples in the same order.

    Arguments as of torch's sampler, whose `num_replicas` and `rank` are the dp size and coordinate.
    """

    def __init__(self, dataset: Sized, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False) -> None:
        super().__init__(
            dataset,  # type: ignore[arg-type]
            num_replicas=sessions.dp_size(),
            rank=sessions.dp_rank(),
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )


def sampler(dataset: Sized, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False) -> DistributedSampler:
    """The sampler of this rank; call its ``set_epoch`` before every epoch to shuffle anew."""
    return DistributedSampler(dataset, shuffle=shuffle, seed=seed, drop_last=drop_last)
