"""The microbatches of a batch."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shardwright.backends.torch.pipeline.step_results import even_split
from shardwright.core.errors import ShardwrightError


@dataclass(frozen=True, slots=True)
class Batch:
    """The cut of a batch into microbatches.

    Attributes:
        samples: of each microbatch; all 1 where arguments of different sizes are cut into equal parts.
        whole_axis: whether these are samples of one batch axis that all arguments share.
        is_free: whether nothing is cut, so that there is any number of samples.
    """

    samples: tuple[int, ...]
    whole_axis: bool
    is_free: bool = False

    @classmethod
    def of(cls, given: Mapping[str, tuple[torch.Tensor, int | None]], microbatches: int) -> "Batch":
        """Cut a batch into so many microbatches, or into as many as there are samples.

        Args:
            given: tensors by their names in errors, and the axis along which each is cut; None: not cut.

        Raises:
            ShardwrightError: there are no samples, or sizes that differ do not divide.
        """
        sizes = {name: tensor.shape[axis] for name, (tensor, axis) in given.items() if axis is not None}
        if not sizes:
            return cls((1,) * microbatches, False, is_free=True)
        first = next(iter(sizes.values()))
        if min(sizes.values()) == 0:
            empty = next(name for name, size in sizes.items() if size == 0)
            raise ShardwrightError(f"argument {empty} has no samples: leave such batches out")
        if len(set(sizes.values())) > 1:
            for name, size in sizes.items():
                if size % microbatches:
                    raise ShardwrightError(
                        f"argument {name} has {size} samples, which {microbatches} microbatches do not divide, and the "
                        f"arguments have different sizes ({', '.join(f'{n}: {s}' for n, s in sizes.items())}): give a "
                        f"batch of {max(1, round(size / microbatches)) * microbatches}; what is no batch goes into "
                        f"non_split_inputs"
                    )
            return cls((1,) * microbatches, False)
        count = min(microbatches, first)
        return cls(even_split(first, count), True)

    def with_samples(self, samples: tuple[int, ...] | None, name: str) -> "Batch":
        """The batch beside an argument that is divided into microbatches of these samples; None: it is not divided.

        Raises ShardwrightError where the other arguments are divided otherwise.
        """
        if samples is None or samples == self.samples:
            return self
        if self.is_free:
            return Batch(samples, True)
        raise ShardwrightError(
            f"{name} is cut into microbatches of {list(samples)} samples, and the other arguments into "
            f"{list(self.samples)}: let its smp_slice cut evenly, the first ones with one more where it does not divide"
        )

    def slices(self, tensor: torch.Tensor, axis: int | None) -> list[torch.Tensor]:
        """One argument's part of each microbatch."""
        if axis is None:
            return [tensor] * len(self.samples)
        if self.whole_axis:
            return list(tensor.split(list(self.samples), dim=axis))
        return list(tensor.chunk(len(self.samples), dim=axis))
