"""The share of the data that a rank takes."""

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from shardwright.core.errors import ShardwrightError
from shardwright.torch import groups
from shardwright.torch import session as sessions
from shardwright.torch.model import DistributedModel


class DistributedSampler(Sampler[int]):
    """A sampler that gives each dp coordinate its share of a dataset; pipeline peers get the same samples in the same
    order.

    Its place in the data is kept by `state_dict` in samples of all replicas, those that training steps took: what a
    loader has fetched ahead does not count, and `load_state_dict` goes on there under any number of replicas and any
    ``batch_size``. Of several models those that train take the same samples, or ``model`` says which counts.

    With ``batch_size``, that of one replica's loader, the replicas' k-th batches laid end to end are the k-th batch of
    the unsplit run, in its order, so that losses compare step by step. Without it samples are dealt out in turn.

    Args:
        shuffle: in an order that depends on the seed and on the epoch alone; see `set_epoch`.
        drop_last: leave out the samples that do not fill a round of all replicas, instead of repeating samples from the
            start.
        model: the model whose training steps count; default: each that trains, which all take the same samples.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        model: DistributedModel | None = None,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise ShardwrightError(f"batch_size={batch_size}: expected a whole number of at least 1")
        if len(dataset) == 0:
            raise ShardwrightError("the dataset is empty: there is nothing to share out")
        alike = sessions.current().config.prescaled_batch  # on the tensor axis all have the same samples
        self.replicas = groups.rdp_size() if alike else groups.dp_size()
        self.replica = groups.rdp_rank() if alike else groups.dp_rank()
        self.samples = len(dataset)
        self.block = batch_size or 1
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self._run = None if model is None else sessions.current().of(model)
        self._begin(0, 0)

    @property
    def _rounds(self) -> int:
        per_round, left = self.block * self.replicas, self.samples - self._first
        return left // per_round if self.drop_last else -(-left // per_round)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle differently from now on, and begin with the first sample; call it before every epoch, on all ranks.
        The epoch that `load_state_dict` goes on with is not begun anew."""
        if epoch != self.epoch or not self._first:
            self._begin(epoch, 0)

    def _begin(self, epoch: int, first: int) -> None:
        self.epoch, self._first, self._counted_from = epoch, first, first
        self._trained_before = {run.number: run.samples_trained for run in sessions.current().models}

    def _trained(self) -> int:
        """The samples that training steps have taken since the count began. Raises ShardwrightError where models took
        different numbers of them."""
        models = sessions.current().models if self._run is None else [self._run]
        taken = {run: run.samples_trained - self._trained_before.get(run.number, 0) for run in models}
        counts = sorted({count for count in taken.values() if count})
        if len(counts) > 1:
            said = ", ".join(f"{run.label}: {count}" for run, count in taken.items())
            raise ShardwrightError(
                f"models of this run have trained on different numbers of samples since the epoch was set ({said}), "
                f"and the sampler's place in the data is of one: say which counts, sw.sampler(dataset, model=...)"
            )
        return counts[0] if counts else 0

    def state_dict(self) -> dict[str, Any]:
        """The place in the data: the epoch, and the samples of it that training steps of all replicas have taken, for
        the ``user_content`` of a checkpoint. It counts all training steps since the epoch was set."""
        taken = self._counted_from + self._trained()
        order = {"samples_in_dataset": self.samples, "shuffle": self.shuffle, "seed": self.seed}
        return {"epoch": self.epoch, "samples": min(taken, self.samples)} | order

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the order and at the place of a `state_dict`: the next iteration begins there, and the epoch after
        it with the first sample. Raises ShardwrightError for the state of another dataset or order."""
        own = self.state_dict()
        if not isinstance(state, Mapping) or state.keys() != own.keys():
            raise ShardwrightError(f"expected the state of a sampler, with {', '.join(own)}; given {state!r:.200}")
        for key in ("samples_in_dataset", "shuffle", "seed"):
            if state[key] != own[key]:
                raise ShardwrightError(
                    f"the state is of a sampler with {key}={state[key]!r}, and this one has {own[key]!r}: its place in "
                    f"the data means nothing here"
                )
        self._begin(int(state["epoch"]), int(state["samples"]))

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.samples))
        if self.shuffle:
            order = torch.randperm(
                self.samples, generator=torch.Generator().manual_seed(self.seed + self.epoch)
            ).tolist()
        per_round = self.block * self.replicas
        for number in range(self._rounds):
            first = self._first + number * per_round + self.replica * self.block
            for position in range(first, first + self.block):
                yield order[position % self.samples]
        self._first = 0

    def __len__(self) -> int:
        return self._rounds * self.block


def sampler(dataset: Sized, **options: Any) -> DistributedSampler:
    """The sampler of this rank; options as of `DistributedSampler`."""
    return DistributedSampler(dataset, **options)
