"""One call of a training step, and the interface that every form of steps has."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from shardwright.backends.torch.loss.shares import LossShares
from shardwright.backends.torch.pipeline.step_results import Returned, Shares
from shardwright.backends.torch.program.program import Tree
from shardwright.backends.torch.program.python_places import Holder
from shardwright.core.errors import LossError

StepBody = Callable[[list[torch.Tensor]], Any]
"""The user's step as a function of stand-ins for the tensors of one microbatch."""


@dataclass(frozen=True, slots=True)
class LossOfBatch:
    """One loss of a step, of the batch of all replicas.

    Attributes:
        values: the loss in every microbatch of every replica.
        shares: the share of each of them.
    """

    values: torch.Tensor
    shares: torch.Tensor

    def total(self) -> torch.Tensor:
        """The loss of the whole batch. A microbatch without a share, such as the mean over nothing, does not count."""
        shares = self.shares.to(self.values)
        return torch.where(shares == 0, torch.zeros_like(self.values), self.values * shares).sum()


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training step did.

    Attributes:
        losses: those that were given to ``model.backward``; None unless the step returns all of them.
        flops: FLOPs of products in this replica's microbatches, by precision; None where they are not known.
        unknown_flops: the reason why not, in words.
        divisor: what gradients are to be divided by as backward passes leave them: the sum of all weights that the step
            gave, and the factor of losses for 16-bit gradients.
    """

    losses: Sequence[LossOfBatch] | None
    flops: Mapping[str, int] | None
    unknown_flops: str = ""
    divisor: float = 1.0


class Result(NamedTuple):
    """The result of the body as a tree, its tensors by their position among the leaves, and what a training step did
    (None for a step without a loss). ``others``: the trees of the microbatches behind the first, where what is no
    tensor may differ between them."""

    tree: Tree
    returned: dict[int, Returned]
    trained: Trained | None
    others: Sequence[Tree] = ()


def losses_of_batch(
    positions: Sequence[int | None], returned: Mapping[int, Returned], shares: LossShares, weights: torch.Tensor | None
) -> Sequence[LossOfBatch] | None:
    """The losses of a step, where it returns all of them.

    Args:
        positions: for each loss, its position among the leaves of the result; None where it is not returned.
        weights: those that the step gave, of every microbatch.
    """
    found = []
    for number, position in enumerate(positions):
        everywhere = None if position is None or position not in returned else returned[position].everywhere
        if everywhere is None:
            return None
        given = shares[number] if number < len(shares) else None
        if given is None and weights is None:
            return None
        share = torch.tensor(given) if given is not None else weights
        assert share is not None
        found.append(LossOfBatch(everywhere, share if given is not None else share / share.sum()))
    return found


@dataclass(frozen=True, slots=True)
class StepCall:
    """One call of a step; every rank makes it at the same time.

    Attributes:
        signature: the key of a recorded program, beside the shapes; the same on all pp peers.
        microbatches: the tensors of each microbatch, on this run's device. There may be fewer than planned.
        shares: the result of `Runtime.begin`: the samples of each microbatch are the weight of its losses, where the
            step gives none.
        axes: of each input, the dim that is its batch; None where every microbatch gets it whole. Default: losses are
            means over samples.
        written: the step adds to it the Python values that it writes to, as they were; they are to be put back where
            the step is a part of another one. None: what it writes stays.
        shapes: the shapes and dtypes of each microbatch.
    """

    signature: Hashable
    body: StepBody
    microbatches: Sequence[Sequence[torch.Tensor]]
    shares: Shares
    axes: Sequence[int | None] | None = None
    written: list[tuple[Holder, Any, Any]] | None = None
    shapes: tuple[Hashable, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shapes", tuple(map(shapes_of, self.microbatches)))


def shapes_of(inputs: Sequence[torch.Tensor]) -> Hashable:
    """The shapes and dtypes of the tensors of one microbatch."""
    return tuple((tuple(t.shape), t.dtype) for t in inputs)


class PreparedStep(Protocol):
    """A step that can be run."""

    @property
    def losses(self) -> LossShares | LossError | None:
        """The share of each microbatch in each loss; None: all of it. An error is raised once the body gives a loss."""

    def run(self) -> Result:
        """Run the step; every rank calls this at the same time."""


class Steps(Protocol):
    """One form of training steps."""

    @property
    def schedule_text(self) -> str:
        """The schedule by which steps run, in words; two schedules that do the same have the same words."""

    def prepare(self, call: StepCall) -> PreparedStep:
        """Prepare everything that the step needs; every rank calls this.

        Raises UnrecordableError, on all ranks, where the step cannot be run in this form.
        """

    def close(self) -> None:
        """Let go of threads, hooks and process groups. No step is run afterwards."""
