"""One call of a training step, and the interface that every form of steps has."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from shardwright.backends.torch.loss.shares import LossShares
from shardwright.backends.torch.pipeline.step_results import Returned, Shares
from shardwright.backends.torch.program.program import Tree
from shardwright.core.errors import LossError

StepBody = Callable[[list[torch.Tensor]], Any]
"""The user's step as a function of stand-ins for the tensors of one microbatch."""

Result = tuple[Tree, dict[int, Returned]]
"""The result of the body as a tree, and its tensors by their position among the leaves."""


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
        shapes: the shapes and dtypes of each microbatch.
    """

    signature: Hashable
    body: StepBody
    microbatches: Sequence[Sequence[torch.Tensor]]
    shares: Shares
    axes: Sequence[int | None] | None = None
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
