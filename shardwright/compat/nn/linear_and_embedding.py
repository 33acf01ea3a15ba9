"""SageMaker's ``DistributedLinear`` and ``DistributedEmbedding``: torch's modules, whose whole weights the planner
divides."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwright.compat.nn.distributed_module import DistributedModule, bound, require_size
from shardwright.core.errors import MissingCapabilityError


@dataclass(frozen=True, slots=True)
class LinearArguments:
    """The arguments of `DistributedLinear`: the sizes of the whole layer. ``bias`` is torch's."""

    in_features: int
    out_features: int
    bias: bool = True

    def __post_init__(self) -> None:
        require_size("in_features", self.in_features)
        require_size("out_features", self.out_features)


class DistributedLinear(DistributedModule, nn.Linear):
    """As ``torch.nn.Linear``."""

    Arguments = LinearArguments

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = bound(type(self).__name__, LinearArguments, args, kwargs)
        nn.Linear.__init__(self, given.in_features, given.out_features, given.bias)
        self.arguments = given


@dataclass(frozen=True, slots=True)
class EmbeddingArguments:
    """The arguments of `DistributedEmbedding`: those of ``torch.nn.Embedding``, and how its weight begins.

    Attributes:
        initializer_range: the standard deviation of the normal distribution that the weight is drawn from.
    """

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    sparse: bool = False
    _weight: torch.Tensor | None = None
    initializer_range: float = 0.02
    _skip_allgather: bool = False
    _skip_scatter_and_merge: bool = False

    def __post_init__(self) -> None:
        require_size("num_embeddings", self.num_embeddings)
        require_size("embedding_dim", self.embedding_dim)
        for name in ("_skip_allgather", "_skip_scatter_and_merge"):
            if getattr(self, name):
                raise MissingCapabilityError(
                    f"{name}=True is about messages between ranks, which the plan decides: leave it False"
                )


class DistributedEmbedding(DistributedModule, nn.Embedding):
    """As ``torch.nn.Embedding``, with a weight that begins within ``initializer_range``."""

    Arguments = EmbeddingArguments

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = bound(type(self).__name__, EmbeddingArguments, args, kwargs)
        self._initializer_range = given.initializer_range
        nn.Embedding.__init__(
            self, given.num_embeddings, given.embedding_dim, given.padding_idx, given.max_norm, given.norm_type,
            given.scale_grad_by_freq, given.sparse, given._weight,
        )  # fmt: skip

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self._initializer_range)
        self._fill_padding_idx_with_zero()
