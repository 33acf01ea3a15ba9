"""The look at masks that the batch makes, before a step in slices runs: a token that sees none up to itself would get
from slices something else than from whole sequences."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.backends.jax.program.equations import FlatProgram, evaluate, needed
from shardwright.backends.jax.slices.hidden import anywhere
from shardwright.backends.jax.slices.masking import Check
from shardwright.core.errors import CaptureError


@dataclass(frozen=True, slots=True, eq=False)
class MaskChecks:
    """What is looked at in every step.

    Attributes:
        run: a compiled function of the leaves of a batch, split into microbatches: whether each mask is sound.
        where: the module call of each mask.
    """

    run: Callable[[Sequence[Any]], jax.Array]
    where: tuple[str, ...]

    @classmethod
    def of(
        cls,
        flat: FlatProgram,
        batch: Mapping[int, bool],
        microbatches: int,
        checks: Sequence[Check],
        where: Sequence[str],
    ) -> "MaskChecks":
        """The checks of a whole program. ``batch``: its arguments that are of the batch → whether each microbatch has
        a part of them."""
        wanted = needed([anywhere(flat, e) for e in flat.equations if not e.effects], [check.mask for check in checks])

        def of_one(parts: Sequence[Any]) -> jax.Array:
            known: dict[int, Any] = dict(flat.constants) | dict(zip(batch, parts, strict=True))
            evaluate(wanted, known)
            return jnp.stack([_shown(known[check.mask], check.shown).any(check.key).all() for check in checks])

        def run(leaves: Sequence[Any]) -> jax.Array:
            def at(m: Any) -> jax.Array:
                return of_one(
                    [leaf[m] if is_split else leaf for leaf, is_split in zip(leaves, batch.values(), strict=True)]
                )

            made: jax.Array = jax.lax.map(at, jnp.arange(microbatches))
            return made.all(0)

        return cls(jax.jit(run), tuple(where))

    def require(self, leaves: Sequence[Any]) -> None:
        """Raise CaptureError for a batch whose masks hide from some token all up to itself."""
        for is_fine, where in zip(self.run(leaves).tolist(), self.where, strict=True):
            if not is_fine:
                raise CaptureError(
                    f"{where} attends by a mask that hides all tokens up to its own from some: what it makes of them "
                    f"would depend on later ones; pad sequences on the right, or leave out slices"
                )


def _shown(mask: jax.Array, shown: str) -> jax.Array:
    return mask > -1e4 if shown == "shown" else (mask != 0) if shown == "nonzero" else mask == 0
