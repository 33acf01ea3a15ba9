"""What a stage keeps of a microbatch from its forward to its backward, and what a rank gives of a step."""

from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge

from shardwright.backends.torch.memory.residency import Call
from shardwright.backends.torch.memory.weight_gradients import Deferred


@dataclass(slots=True)
class Kept:
    """The state that one stage keeps of one microbatch between its forward and its backward."""

    received: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """The leaf that stands for a tensor that another stage sent, by (edge, value)."""
    sent: dict[tuple[int, int], GradientEdge] = field(default_factory=dict)
    """The edge where the gradient of a tensor that another stage got goes on, by (edge, value); the value itself is not
    kept."""
    roots: list[tuple[int, torch.Tensor, torch.Tensor | float | None]] = field(default_factory=list)
    """Losses with their places among those of the step, and their weights."""
    last_call: Call | None = None
    """The last call of the forward pass that used sharded parameters, where these are freed behind it."""
    deferred: Deferred | None = None
    """The weight gradients that an I left to its W."""


@dataclass(slots=True)
class StepValues:
    """The result of one rank's run of a step: leaves of the result that its stages compute, and the weights of losses,
    one for each microbatch."""

    results: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    loss_weights: dict[int, dict[int, torch.Tensor | float | None]] = field(default_factory=dict)
    losses: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """The losses that were given to ``backward`` on this rank, each with its microbatch and stage in words."""
