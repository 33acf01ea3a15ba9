"""The factor of losses in float16, as part of the state of training: what follows from a step is computed with it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardwright.core.model.loss.scaling import LossScale


class Scaling(NamedTuple):
    """The factor of the loss in the next step, and what it follows from: those fields of `LossScale` that change."""

    scale: jax.Array
    """float32, a scalar."""
    steps: jax.Array
    last_overflow: jax.Array
    hysteresis_left: jax.Array

    @classmethod
    def begin(cls, rule: LossScale) -> "Scaling":
        """The state before the first step."""
        counts = (rule.steps, rule.last_overflow, rule.hysteresis_left)
        return cls(jnp.float32(rule.scale), *(jnp.int32(count) for count in counts))

    def after(self, rule: LossScale, overflowed: jax.Array) -> "Scaling":
        """The state after a step, as `LossScale.update` has it. The factor never rises to infinity."""
        if not rule.is_dynamic:
            return self._replace(steps=self.steps + 1)
        falls = overflowed & (self.hysteresis_left == 1)
        rises = ~overflowed & ((self.steps - self.last_overflow) % rule.scale_window == 0)
        lower = jnp.maximum(self.scale / rule.scale_factor, rule.min_scale)
        higher = self.scale * rule.scale_factor
        higher = jnp.where(jnp.isfinite(higher), higher, self.scale)
        starts_anew = ~overflowed if rule.consecutive_hysteresis else rises
        left = jnp.where(overflowed & ~falls, self.hysteresis_left - 1, self.hysteresis_left)
        return Scaling(
            jnp.where(falls, lower, jnp.where(rises, higher, self.scale)),
            self.steps + 1,
            jnp.where(overflowed, self.steps, self.last_overflow),
            jnp.where(starts_anew, rule.delayed_shift, left),
        )
