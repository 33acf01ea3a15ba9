"""Runs of a step body on stand-ins, and the listener to the losses that it gives to ``backward``."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from shardwright.backends.torch.capture.batch_dims import Sample
from shardwright.backends.torch.capture.model_call import sample_of
from shardwright.backends.torch.program.program import Program
from shardwright.backends.torch.program.step_recorder import StepRecorder, record
from shardwright.backends.torch.training.call import StepBody


class LossListener(Protocol):
    """A listener to the losses of a step."""

    def backward(self, loss: Any, weight: Any = None, reduction: str | None = None) -> None: ...


class StepBodies:
    """The runs of step bodies that call ``model``, one at a time.

    Attributes:
        is_running: whether the body of a step runs now, on stand-ins or by message passing.
        listener: the listener to its losses.
        recorded: the number of times that a body was recorded.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.is_running = False
        self.listener: LossListener | None = None
        self.recorded = 0

    @contextmanager
    def heard_by(self, listener: LossListener | None) -> Iterator[None]:
        """A context in which a body runs, and gives its losses to ``listener``; None: to the recorders, which set
        themselves."""
        self.listener, self.is_running = listener, True
        try:
            yield
        finally:
            self.listener, self.is_running = None, False

    def record(
        self, stage_of_call: Mapping[tuple[str, int], int], body: StepBody, inputs: Sequence[torch.Tensor], **how: Any
    ) -> tuple[Program, StepRecorder]:
        """Record a body by `step_recorder.record`, whose keywords ``how`` has."""
        self.recorded += 1
        with self.heard_by(None):
            return record(self.model, stage_of_call, self.device, body, list(inputs), self._listen_to, **how)

    def calls_modules(self, body: StepBody, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether a body, recorded for no plan, calls modules of the model. Raises CaptureError."""
        with self.heard_by(None):
            _, recorder = record(self.model, {}, self.device, body, list(inputs), self._listen_to)
        return bool(recorder.modules.counts)

    def run_forward(self, body: StepBody, inputs: Sequence[torch.Tensor]) -> None:
        """Run a body on tensors, on a model that is not split, without a backward pass."""
        with self.heard_by(Unheard()):
            body(list(inputs))

    def sample_of(self, body: StepBody, inputs: Sequence[torch.Tensor]) -> Sample:
        """The arguments with which a body first calls the model; see `model_call.sample_of`."""
        with self.heard_by(Unheard()):
            return sample_of(self.model, body, inputs, self.device)

    def _listen_to(self, recorder: StepRecorder) -> None:
        self.listener = recorder


class Unheard:
    """A listener that does nothing with losses."""

    def backward(self, loss: Any, weight: Any = None, reduction: str | None = None) -> None:
        pass
