"""The JAX backend."""

from collections.abc import Callable
from typing import Any

import jax

from shardwright.backends.capabilities import JAX as CAPABILITIES
from shardwright.backends.jax.capture.model import capture
from shardwright.backends.jax.executable import JaxExecutable
from shardwright.backends.jax.machine.profile import profile
from shardwright.backends.jax.memory.footprint import with_footprints
from shardwright.core.cluster.hardware.measurements import Measurements, MeasureProgress
from shardwright.core.model.graph import Graph
from shardwright.core.plan.plan import Plan

__all__ = ["BACKEND", "JaxBackend"]


class JaxBackend:
    """`backends.protocol.Backend` for JAX and Flax."""

    name = "jax"
    capabilities = CAPABILITIES

    def capture(
        self,
        model: Any,
        sample: Any,
        loss: Callable[..., Any] | None = None,
        *,
        batch_dims: Any = None,
        require_loss: bool = True,
    ) -> Graph:
        """See `backends.jax.capture.model.capture`. A graph with a loss has what its units keep in this runtime too."""
        captured = capture(model, sample, loss, batch_dims=batch_dims, require_loss=require_loss)
        return with_footprints(captured) if require_loss else captured.graph

    def compile(self, plan: Plan, model: Any, **options: Any) -> JaxExecutable:
        """Bind a plan to a model: parameters, an NNX module or an init function, as `TrainStep.init` takes them.

        Options: ``loss`` (needed), ``optimizer`` (default: AdamW at 1e-3), ``devices`` (default: all; a range: those of
        `jax.devices()`), ``batch_dims``, ``seed``.
        """
        if isinstance(places := options.get("devices"), range):
            options["devices"] = [jax.devices()[place] for place in places]
        return JaxExecutable(plan, model, **options)

    def profile(self, *, name: str, budget_s: float, progress: MeasureProgress | None = None) -> Measurements:
        """See `backends.jax.machine.profile.profile`."""
        return profile(name=name, budget_s=budget_s, progress=progress)

    def longest_s(self, seconds: float) -> float:
        """The given ``seconds``: one process drives all devices that a profile measures."""
        return seconds


BACKEND = JaxBackend()
