"""A plan bound to a JAX model: `backends.protocol.Executable`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from shardwright.backends.jax.capture.tree import take_apart
from shardwright.backends.jax.state.train_state import TrainState
from shardwright.backends.jax.train import TrainStep
from shardwright.core.plan.plan import Plan
from shardwright.core.schedule.timeline import Timeline


class JaxExecutable:
    """A bound plan, with the state that `TrainStep` hands from step to step."""

    def __init__(
        self,
        plan: Plan,
        model: Any,
        loss: Callable[..., Any],
        optimizer: optax.GradientTransformation | None = None,
        *,
        devices: Sequence[jax.Device] | None = None,
        batch_dims: Any = None,
        reduction: str | None = None,
        seed: int = 0,
    ) -> None:
        optimizer = optimizer or optax.adamw(1e-3)
        self.train = TrainStep(loss, optimizer, plan, devices=devices, batch_dims=batch_dims, reduction=reduction)
        self.state: TrainState = self.train.init(model, seed=seed)

    def step(self, batch: Any) -> float:
        """The loss of one update on the global batch. The update has ended when this returns."""
        self.state, loss, *_ = self.train(self.state, batch)
        jax.block_until_ready(self.state)
        return float(loss)

    def timelines(self, batch: Any, steps: int) -> tuple[Timeline, ...]:
        """The times of each action in each of some updates. Raises MissingCapabilityError for a plan without stages."""
        found = []
        for _ in range(steps):
            self.state, *_, timeline = self.train.measure(self.state, batch)
            found.append(timeline)
        return tuple(found)

    def whole_parameters(self) -> Mapping[str, np.ndarray]:
        """Every parameter on the host, by name."""
        parts = take_apart(self.train.params(self.state))
        return {name: np.asarray(leaf) for name, leaf in zip(parts.names, jax.tree.leaves(parts.params), strict=True)}
