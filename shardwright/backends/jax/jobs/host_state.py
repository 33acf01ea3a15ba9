"""The state of one job on the host: parameters, the optimizer's states, gradients that wait, random keys, others."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax

from shardwright.backends.jax.capture.tree import Parts, abstract
from shardwright.backends.jax.jobs.device_memory import Host, on_host
from shardwright.backends.jax.pipeline.stage_functions import Key
from shardwright.backends.jax.state.train_state import TrainState


@dataclass(slots=True, eq=False)
class HostState:
    """The arrays of a job, leaf by leaf, and the trees that they are of."""

    parts: Parts
    """The model's parts, as trees of shapes."""
    optimizer: Any
    """The optimizer's state, as a tree of shapes."""
    params: list[Host]
    states: list[Host]
    random: list[Host]
    other: list[Host]
    step: int = 0
    gradients: dict[int, Host] = field(default_factory=dict)
    """Sums of gradients, by the parameter's number."""

    @classmethod
    def of(cls, parts: Parts, optimizer: optax.GradientTransformation) -> "HostState":
        """The state of a model taken apart, before its first step: in memory of its own."""
        params, random, other = (
            [on_host(leaf) for leaf in jax.tree.leaves(tree)] for tree in (parts.params, parts.random, parts.other)
        )
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            structure = jax.tree.structure(parts.params)
            begun = optimizer.init(jax.tree.unflatten(structure, params))
        states = [on_host(leaf) for leaf in jax.tree.leaves(begun)]
        shapes, state = jax.tree.map(abstract, (parts, begun))
        return cls(shapes, state, params, states, random, other)

    def add_gradient(self, leaf: int, found: Host) -> None:
        """Add to the sum of a parameter's gradients."""
        held = self.gradients.get(leaf)
        self.gradients[leaf] = found if held is None else np.add(held, found)

    def take(self, made: Mapping[Key, Host]) -> None:
        """Take what an update has made of parameters and states."""
        for (kind, number, _), array in made.items():
            (self.params if kind == "weight" else self.states)[number] = array

    def as_train_state(self) -> TrainState:
        """The state as `train_step` has it, its arrays in the host's memory."""

        def like(tree: Any, leaves: list[Host]) -> Any:
            return jax.tree.unflatten(jax.tree.structure(tree), leaves)

        parts = self.parts
        return TrainState(
            np.int32(self.step),  # type: ignore[arg-type]
            like(parts.params, self.params),
            like(self.optimizer, self.states),
            like(parts.random, self.random),
            like(parts.other, self.other),
            parts.graphdef,
        )
