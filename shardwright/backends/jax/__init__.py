"""The JAX backend."""

from collections.abc import Callable
from typing import Any

from shardwright.backends.jax.capabilities import CAPABILITIES
from shardwright.backends.jax.capture import capture
from shardwright.core.graph import Graph

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
        """See `backends.jax.capture.capture`."""
        return capture(model, sample, loss, batch_dims=batch_dims, require_loss=require_loss)


BACKEND = JaxBackend()
