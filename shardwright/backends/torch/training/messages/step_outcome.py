"""The outcome of a step by messages: the results of all microbatches, the same on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from shardwright.backends.torch.capture.held_tensors import tensors_in
from shardwright.backends.torch.compat import pytree
from shardwright.backends.torch.loss.shares import LossShares
from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.backends.torch.pipeline.step_results import Returned, Shares, as_tensors
from shardwright.backends.torch.program.program import Literal, Tree
from shardwright.backends.torch.training.call import Result, Trained, losses_of_batch
from shardwright.backends.torch.training.messages.serialization import pack, unpack
from shardwright.core.errors import ShardwrightError

Weight = torch.Tensor | float | None


@dataclass(frozen=True, slots=True)
class MicrobatchResult:
    """The result of the body for one microbatch, detached.

    Attributes:
        losses: by position, the leaves that were given to ``backward``, as its first, second … loss.
        losses_given: the number of losses that were given.
        weight: that of the microbatch; None when none was given.
    """

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    losses: dict[int, int]
    losses_given: int
    weight: float | None

    @classmethod
    def of(cls, result: Any, losses: Sequence[tuple[torch.Tensor, Weight]]) -> "MicrobatchResult":
        """The result with its losses found. Raises ShardwrightError for losses with different weights, and for objects
        with tensors inside."""
        leaves, spec = pytree.tree_flatten(result)
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) and tensors_in(leaf):
                raise ShardwrightError(
                    f"the step returns a {type(leaf).__name__}, which holds tensors: return tensors, or lists, tuples "
                    f"and dicts of them"
                )
        weights = [None if weight is None else float(weight) for _, weight in losses]
        if any(weight != weights[0] for weight in weights):
            raise ShardwrightError(
                "model.backward is called several times in one step with different weights: give all of them the same "
                "weight, or none"
            )
        given = {id(loss): number for number, (loss, _) in enumerate(losses)}
        positions = {i: given[id(leaf)] for i, leaf in enumerate(leaves) if id(leaf) in given}
        return cls(
            tuple(leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves),
            spec, positions, len(losses), weights[0] if weights else None,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a step, as every rank gets it.

    Attributes:
        tree: the result with the leaves that are no tensors; None in the place of the others.
        outputs: for each position of a tensor, its value in every microbatch of this replica.
        numbers: the positions of these that the body returned as numbers of Python.
        everywhere: for floating scalars, the values of all replicas.
        total_weight: the sum of the weights of all microbatches of all replicas, if any were given.
        weights: the weight of each microbatch.
    """

    tree: Any
    outputs: dict[int, list[torch.Tensor]]
    numbers: frozenset[int]
    losses: dict[int, int]
    losses_given: int
    training: bool
    weights: torch.Tensor | None = None
    everywhere: dict[int, torch.Tensor] = field(default_factory=dict)
    by_samples: torch.Tensor | None = None
    """The number of samples of each microbatch, where they differ."""

    @classmethod
    def of(cls, microbatches: Sequence[MicrobatchResult]) -> "Outcome":
        """The outcome of one replica. Raises ShardwrightError when the microbatches returned results of different
        structures."""
        first = microbatches[0]
        for number, other in enumerate(microbatches):
            if other.spec != first.spec:
                raise ShardwrightError(
                    f"the step returned {other.spec} for microbatch {number} and {first.spec} for microbatch 0: return "
                    f"the same structure for all of them"
                )
        leaves: list[Any] = []
        outputs: dict[int, list[torch.Tensor]] = {}
        numbers: set[int] = set()
        for position, values in enumerate(zip(*(m.leaves for m in microbatches), strict=True)):
            found = _together(position, values)
            if isinstance(found, _Each):
                outputs[position] = found.values
                numbers |= {position} if found.are_numbers else set()
            leaves.append(None if isinstance(found, _Each) else found)
        given = max(m.losses_given for m in microbatches)
        weights = _weights([m for m in microbatches if m.losses_given], microbatches)
        tree = pytree.tree_unflatten(leaves, first.spec)
        return cls(tree, outputs, frozenset(numbers), first.losses, given, given > 0, weights)

    @property
    def total_weight(self) -> float | None:
        return None if self.weights is None else float(self.weights.sum())

    def over_dp(self, shares: Shares, bound: BoundMesh, watchdog: Watchdog) -> "Outcome":
        """The outcome with the values of the other replicas; the drivers of all replicas call this together.

        Raises ShardwrightError when the replicas differ in what they return, or the weights add up to zero.
        """
        scalars = {
            position: torch.stack([value.reshape(()) for value in values])
            for position, values in self.outputs.items()
            if all(value.numel() == 1 and value.is_floating_point() for value in values)
        }
        mine = (str(pytree.tree_structure(self.tree)), self.training, _host(self.weights), _host(scalars))
        every: list[Any] = [mine]
        if bound.size("dp") > 1:
            every = [None] * bound.size("dp")
            with watchdog.waiting(f"the results of dp peers, ranks {list(bound.groups['dp'])}"):
                dist.all_gather_object(every, mine, group=bound.handles["dp"])
        if any(other[0] != mine[0] or (other[2] is None) != (mine[2] is None) for other in every):
            raise ShardwrightError(
                "the data-parallel replicas returned results of different structures, or gave weights on some of them "
                "only: the step must return the same structure everywhere"
            )
        weights = None if self.weights is None else torch.cat([other[2] for other in every])
        if weights is not None and float(weights.sum()) == 0.0:
            raise ShardwrightError(
                f"the weights given to model.backward add up to 0 over all {weights.numel()} microbatches: there is "
                f"nothing to take the mean of"
            )
        shared = [p for p in sorted(scalars) if all(p in other[3] for other in every)]
        everywhere = {p: torch.cat([other[3][p] for other in every]).to(bound.device) for p in shared}
        training = any(other[1] for other in every)
        by_samples = None if shares.equal else torch.tensor(shares.flat, dtype=torch.float32)
        return replace(self, weights=weights, everywhere=everywhere, training=training, by_samples=by_samples)

    def packed(self) -> tuple[bytes, list[torch.Tensor]]:
        """The outcome as a message."""
        found = pack(self, lambda _: None, "the results of the step")
        return found.data, found.tensors

    @classmethod
    def unpacked(cls, data: bytes, tensors: Sequence[torch.Tensor], device: torch.device) -> "Outcome":
        """The outcome in a message."""
        found: Outcome = unpack(data, [tensor.to(device) for tensor in tensors], lambda _: None)
        return found

    def _weights_of(self, position: int, loss_shares: LossShares) -> torch.Tensor | None:
        number = self.losses.get(position)
        if number is None or (self.weights is None and number >= len(loss_shares)):
            return self.by_samples
        given = None if self.weights is not None else loss_shares[number]
        return self.weights if given is None else torch.tensor(given, dtype=torch.float32)

    def result(self, loss_shares: LossShares, shares: Shares) -> Result:
        """The result in the form of recorded steps."""
        leaves, spec = pytree.tree_flatten(self.tree)
        found = {
            position: Returned(
                values,
                self.everywhere.get(position),
                self._weights_of(position, loss_shares),
                shares.first,
                position in self.numbers,
            )
            for position, values in self.outputs.items()
        }
        tree = Tree(tuple(Literal(leaf) for leaf in leaves), spec)
        if not self.training:
            return Result(tree, found, None)
        at = {number: position for position, number in self.losses.items()}
        whole = loss_shares or (None if self.weights is not None else (1.0,),) * self.losses_given
        losses = losses_of_batch([at.get(n) for n in range(self.losses_given)], found, whole, self.weights)
        divisor = 1.0 if self.total_weight is None else self.total_weight
        return Result(tree, found, Trained(losses, None, "steps by messages are not recorded", divisor))


@dataclass(frozen=True, slots=True)
class _Each:
    """A leaf with one tensor for each microbatch."""

    values: list[torch.Tensor]
    are_numbers: bool = False
    """Whether the body returned numbers of Python."""


def _together(position: int, values: Sequence[Any]) -> Any:
    """One leaf of all microbatches. Numbers become tensors, whether they differ or not: what a step returns has a form
    that does not depend on values. Raises ShardwrightError for other leaves that differ."""
    if all(isinstance(value, torch.Tensor) for value in values):
        return _Each(list(values))
    if all(isinstance(value, (bool, int, float)) for value in values):
        return _Each(as_tensors(values), are_numbers=True)
    first = values[0]
    if all(type(value) is type(first) and value == first for value in values):
        return first
    kinds = sorted({type(value).__name__ for value in values})
    raise ShardwrightError(
        f"leaf {position} of what the step returned differs between the microbatches ({', '.join(kinds)}): return "
        f"tensors or numbers, or the same value for all of them"
    )


def _weights(given: Sequence[MicrobatchResult], every: Sequence[MicrobatchResult]) -> torch.Tensor | None:
    """The weight of each microbatch, 0 for one without a loss; None when no weight was given."""
    if all(m.weight is None for m in given):
        return None
    if any(m.weight is None for m in given):
        raise ShardwrightError("model.backward was given a weight in some microbatches and none in others")
    return torch.tensor([m.weight or 0.0 for m in every], dtype=torch.float32)


def _host(item: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, item)
