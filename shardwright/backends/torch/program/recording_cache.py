"""The recordings that exist of a step, and the one that holds for a microbatch."""

import warnings
from collections.abc import Callable, Hashable, Sequence

import torch

from shardwright.backends.torch.program.randomness import Moment, kept_generators
from shardwright.backends.torch.program.recording_check import Varying
from shardwright.backends.torch.program.stages import Division
from shardwright.backends.torch.program.value_guards import holds
from shardwright.core.errors import UnrecordableError

VARIANTS = 16
"""The number of recordings of a microbatch for batches of the same shapes that differ in the values that the model
reads."""
DRAWN = 256
"""The number of recordings kept that differ in which modules random numbers leave out: the last used."""
PYTHON_VARIANTS = 16
"""The number of recordings kept that do not hold now and differ in the Python values that they rest on."""
OFTEN = 10
"""The number of recordings for changed Python values after which the user is warned."""


class Recordings:
    """Divided recordings of single microbatches.

    Args:
        model_name: for errors.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._made: dict[Hashable, list[Division]] = {}
        """The recordings by their key, the last used first."""
        self._varying: dict[Hashable, Varying] = {}
        self._python_changed = 0

    def add(self, key: Hashable, division: Division, varying: Varying) -> None:
        self._made.setdefault(key, []).insert(0, division)
        self._varying[key] = varying

    def held(self, key: Hashable, inputs: Sequence[torch.Tensor], moment: Moment) -> Division | None:
        """The recording under ``key`` that holds for these inputs at this moment and for the present Python values;
        None where there is none."""
        every = self._made.setdefault(key, [])
        known = [made for made in every if made.program.python.hold()]
        device = inputs[0].device if inputs else torch.device("cpu")
        with kept_generators(any(made.program.is_one_of_many for made in known), device):
            found = next((made for made in known if holds(made.program, inputs, moment)), None)
        if found is not None:
            every.remove(found)
            every.insert(0, found)
        return found

    def make(self, key: Hashable, record: Callable[[Varying], Division]) -> Division:
        """Add a recording by ``record`` under ``key``, where `held` finds none.

        Raises UnrecordableError when the values that are read from batches have too many outcomes.
        """
        every, varying = self._made[key], self._varying.setdefault(key, Varying())
        known = [made for made in every if made.program.python.hold()]
        if every and not known:
            self._note_change(every, varying)
        if sum(not made.program.is_one_of_many for made in known) >= VARIANTS:
            raise UnrecordableError(
                f"what {self._model_name} reads from the batch had {VARIANTS} outcomes, each recorded, and there are "
                f"more: let the model run by message passing"
            )
        found = record(varying)
        del every[DRAWN - 1 :]
        every.insert(0, found)
        return found

    def _note_change(self, every: list[Division], varying: Varying) -> None:
        """Note that none of these recordings holds, for the Python values that they rest on: the oldest is
        forgotten."""
        del every[PYTHON_VARIANTS:]
        varying.add(every[0].program.python.changed())
        self._python_changed += 1
        if self._python_changed == OFTEN:
            places = ", ".join(every[0].program.python.changed_in_words()[:3])
            warnings.warn(
                f"the step of {self._model_name} was recorded {OFTEN} times anew, as Python values that it reads "
                f"changed (now {places}), which takes time in each of these steps: pass what changes often in the "
                f"batch, as a tensor of one number, or keep it in a buffer of the model",
                stacklevel=2,
            )
