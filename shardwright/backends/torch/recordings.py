"""The recordings of a step that there are, and the one that holds for a microbatch."""

from collections.abc import Callable, Hashable, Sequence

import torch

from shardwright.backends.torch.guards import holds
from shardwright.backends.torch.randomness import Moment, kept_generators
from shardwright.backends.torch.stages import Division
from shardwright.core.errors import UnrecordableError

VARIANTS = 16
"""How often a microbatch is recorded for batches of the same shapes that differ in what the model reads from them."""
DRAWN = 256
"""Of recordings that differ in which modules random numbers leave out, so many are kept: the last used."""


class Recordings:
    """Divided recordings of single microbatches.

    Args:
        model_name: for errors.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._made: dict[Hashable, list[Division]] = {}
        """By what a recording stands for, the last used first."""

    def add(self, key: Hashable, division: Division) -> None:
        self._made.setdefault(key, []).insert(0, division)

    def held(self, key: Hashable, inputs: Sequence[torch.Tensor], moment: Moment) -> Division | None:
        """The recording under ``key`` that holds for these inputs at this moment; None where there is none."""
        known = self._made.setdefault(key, [])
        device = inputs[0].device if inputs else torch.device("cpu")
        with kept_generators(any(made.program.is_one_of_many for made in known), device):
            found = next((made for made in known if holds(made.program, inputs, moment)), None)
        if found is not None:
            known.remove(found)
            known.insert(0, found)
        return found

    def find(
        self, key: Hashable, inputs: Sequence[torch.Tensor], moment: Moment, make: Callable[[], Division]
    ) -> Division:
        """The recording under ``key`` that holds for these inputs at this moment; by ``make`` if there is none.

        Raises UnrecordableError when what is read from batches has too many outcomes.
        """
        found = self.held(key, inputs, moment)
        if found is not None:
            return found
        known = self._made[key]
        if sum(not made.program.is_one_of_many for made in known) >= VARIANTS:
            raise UnrecordableError(
                f"what {self._model_name} reads from the batch had {VARIANTS} outcomes, each recorded, and there are "
                f"more: let the model run by message passing"
            )
        found = make()
        del known[DRAWN - 1 :]
        known.insert(0, found)
        return found
