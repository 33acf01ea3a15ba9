"""The lines of training steps: the first process says each once its values are there, without waiting for them."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import jax
import numpy as np

from shardwright.backends.jax.capture.samples import FlatBatch
from shardwright.backends.jax.capture.tree import Parts
from shardwright.backends.jax.loss.microbatches import LossFunction
from shardwright.backends.jax.loss.step_flops import step_flops
from shardwright.backends.jax.state.train_state import StepResult
from shardwright.backends.jax.training.protocol import CompiledStep
from shardwright.core.plan.plan import Plan
from shardwright.core.values.step_line import Argument, StepLines, Work, process_memory, tokens_in


class _Clock:
    """The host's clock, as it stood when the values of the last line were found to be there."""

    def __init__(self) -> None:
        self.at_s = perf_counter()

    def passed_s(self) -> float:
        """The seconds since the last call."""
        before, self.at_s = self.at_s, perf_counter()
        return self.at_s - before


@dataclass(frozen=True, slots=True)
class _Reading:
    """The figures of one line."""

    values: Mapping[str, jax.Array]
    clock: _Clock
    device: jax.Device

    def is_there(self) -> bool:
        return all(_is_there(value) for value in self.values.values())

    def figures(self) -> dict[str, Any]:
        found = {name: float(_on_host(value)) for name, value in self.values.items() if not value.is_deleted()}
        return {**found, "seconds": self.clock.passed_s(), "memory_bytes": _memory(self.device)}


class StepLog:
    """The lines of a training step.

    Args:
        every: a line is said after the first update and after every so many.
    """

    def __init__(self, every: int, plan: Plan, loss: LossFunction, devices: Sequence[jax.Device]) -> None:
        self._lines = StepLines(every, lambda: dict(plan.provenance.peak_flops_per_s))
        self._loss, self._devices, self._fp8 = loss, devices, plan.fp8_parameters("jax")
        own = [device for device in devices if device.process_index == jax.process_index()]
        self._device = own[0] if own else jax.local_devices()[0]
        self.model: Parts | None = None
        """The shapes of the model, once `train.init` was given one."""
        self._clock: _Clock | None = None
        self._updates = 0
        self._work: dict[int, tuple[CompiledStep, Work, str | None, str]] = {}
        """What a compiled step does, with the name of its tokens, and why FLOPs are not known; by the step's id."""
        weakref.finalize(self, self._lines.look, wait=True)  # at the end of the program, say

    def begin(self) -> None:
        """Say the lines whose values are there, as a step begins."""
        if self._clock is None:
            self._clock = _Clock()
        self._lines.look()

    def updated(self, step: CompiledStep, given: FlatBatch, made: StepResult) -> None:
        """Note an update that was started, with its batch."""
        if id(step) not in self._work:
            self._work[id(step)] = (step, *self._of_step(given))
        _, work, tokens, unknown = self._work[id(step)]
        self._lines.worked(work, tokens, unknown)
        self._updates += 1
        if self._lines.is_due(self._updates):
            assert self._clock is not None
            values = {"loss": made.loss, "grad_norm": made.grad_norm}
            self._lines.note(self._updates, _Reading(values, self._clock, self._device))

    def settle(self) -> None:
        """Say the lines that are left, and wait for their values."""
        self._lines.look(wait=True)

    def _of_step(self, given: FlatBatch) -> tuple[Work, str | None, str]:
        paths = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(given.structure, list(given.leaves)))[0]
        named = [(f"batch{jax.tree_util.keystr(path)}", leaf) for path, leaf in paths]
        arguments = [
            Argument(name, np.shape(leaf), np.issubdtype(leaf.dtype, np.integer), dim)
            for (name, leaf), dim in zip(named, given.dims, strict=True)
        ]
        found = tokens_in(arguments)
        samples = next(a.shape[a.batch_dim] for a in arguments if a.batch_dim is not None)
        flops, unknown = self._flops(given)
        tokens = None if found is None else found.shape[0] * found.shape[1]
        return Work(samples, tokens, flops, len(self._devices)), None if found is None else found.name, unknown

    def _flops(self, given: FlatBatch) -> tuple[Mapping[str, int] | None, str]:
        """The FLOPs of a step by precision; or None, and the reason why they are not known."""
        if self.model is None:
            return None, "the state was not made by this train.init"
        try:
            counted = step_flops(self._loss, self.model, given, self._fp8)
        except Exception as error:  # whatever tracing once more comes upon: the step itself has run
            return None, f"it cannot be counted: {error}"
        if counted.unknown:
            return None, f"the FLOPs of {', '.join(counted.unknown[:3])} are not known"
        return counted.by_precision, ""


def _is_there(array: Any) -> bool:
    return bool(array.is_deleted() or array.is_ready())


def _on_host(array: jax.Array) -> np.ndarray:
    return np.asarray(array if array.is_fully_addressable else array.addressable_data(0))


def _memory(device: jax.Device) -> tuple[int, int]:
    """The peak so far, and what there is: of the device where its runtime says so, else of this process on the host."""
    said = (device.memory_stats() or {}) if device.platform != "cpu" else {}
    if "peak_bytes_in_use" in said and said.get("bytes_limit"):
        return said["peak_bytes_in_use"], said["bytes_limit"]
    return process_memory()
