"""The compiled steps of a loss function: one for every form of batch and state, and for the Python values it reads."""

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np
from flax import nnx

from shardwright.backends.jax.program.python_reads import Slot
from shardwright.backends.jax.program.python_values import PythonValues
from shardwright.backends.jax.training.protocol import CompiledStep
from shardwright.core.errors import PlanWarning

COMPILED_OFTEN = 4
Compile = Callable[[list[np.ndarray], CompiledStep | None], tuple[CompiledStep, tuple[Any, ...]]]
"""A function that takes the Python numbers that are inputs of a step, and the step where it is compiled already. It
returns the compiled step and its leaves."""


class CompiledSteps:
    """The compiled steps of a loss function. It finds the step of a batch, or has it compiled."""

    def __init__(self, python: PythonValues) -> None:
        self.python = python
        self._steps: dict[tuple[Hashable, tuple[Any, ...]], CompiledStep] = {}
        self._latest: dict[Hashable, tuple[Any, ...]] = {}
        """The Python values that the last step of each form was compiled for."""
        self._looked_through: dict[int, nnx.GraphDef[Any]] = {}
        """The descriptions of modules, whose classes' code was read."""

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[CompiledStep]:
        return iter(self._steps.values())

    def forget(self, step: CompiledStep) -> None:
        """Compile a step anew when it is asked for again."""
        self._steps = {key: other for key, other in self._steps.items() if other is not step}

    def find(
        self, form: Hashable, graphdef: nnx.GraphDef[Any] | None, compile_step: Compile
    ) -> tuple[CompiledStep, tuple[Any, ...]]:
        """The step for a form of batch and state, and its leaves. A number that has changed since the last step becomes
        an input; where that fails, as Python has to know it, the step is compiled for it."""
        self._read(graphdef)
        now = self.python.prints()
        if (form, now) not in self._steps and form in self._latest:
            changed = self.python.changed(self._latest[form], now)
            lifted = self.python.lift(changed)
            if lifted:
                try:
                    return self._find(form, graphdef, compile_step)
                except Exception:  # whatever JAX or a library says of a number that it has to know
                    self.python.settle(lifted)  # another error comes again
            self._warn_of_values(form, changed)
        return self._find(form, graphdef, compile_step)

    def _find(
        self, form: Hashable, graphdef: nnx.GraphDef[Any] | None, compile_step: Compile
    ) -> tuple[CompiledStep, tuple[Any, ...]]:
        self._read(graphdef)
        key = form, self.python.prints()
        self._steps[key], leaves = compile_step(self.python.inputs(), self._steps.get(key))
        self._latest[form] = key[1]
        return self._steps[key], leaves

    def inputs(self, graphdef: nnx.GraphDef[Any] | None) -> list[np.ndarray]:
        """The Python numbers that are inputs of a step now."""
        self._read(graphdef)
        return self.python.inputs()

    def _read(self, graphdef: nnx.GraphDef[Any] | None) -> None:
        """Notice the Python values that the loss function reads."""
        if graphdef is not None and id(graphdef) not in self._looked_through:
            self._looked_through[id(graphdef)] = graphdef
            kinds = [getattr(node, "type", None) for node in graphdef.nodes]
            self.python.look_through([kind for kind in kinds if isinstance(kind, type)])
        self.python.notice()

    def _warn_of_values(self, form: Hashable, changed: Sequence[Slot]) -> None:
        """Warn of values that Python has to know, and for which a step was compiled again and again."""
        times = sum(other == form for other, _ in self._steps)
        if times == COMPILED_OFTEN:
            names = ", ".join(slot.name for slot in changed)
            warnings.warn(
                f"the step is compiled for the {times + 1}th time, as {names} changed and the loss function needs it "
                "as a Python value (a shape, a branch): give it in the batch as an array, or let it take few values",
                PlanWarning,
                stacklevel=6,
            )
