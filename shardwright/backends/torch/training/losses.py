"""The losses of one step: the share of each microbatch in each of them; and what its results are to the samples."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from shardwright.backends.torch.loss.read import Batching, StepReading, read_step
from shardwright.backends.torch.loss.shares import LossSemantics, LossShares, Microbatch
from shardwright.backends.torch.program.program import Loss
from shardwright.backends.torch.program.python_reads import left_as_it_is
from shardwright.backends.torch.program.stages import Division
from shardwright.backends.torch.training.call import StepBody, StepCall
from shardwright.backends.torch.training.split_model import SplitModel
from shardwright.core.errors import LossError
from shardwright.core.plan.decision import LossScope


class StepLosses:
    """The relations of the losses of steps to their batches; ``scope`` is that of `LossSemantics`."""

    def __init__(self, split_model: SplitModel, scope: LossScope | None) -> None:
        self._split_model = split_model
        self._semantics = LossSemantics(split_model.bound, split_model.watchdog, scope)

    def shares(
        self, losses: Sequence[Loss], call: StepCall, divisions: Sequence[Division | None] | None = None
    ) -> LossShares:
        """The share of each microbatch in the losses of a step; every rank calls this.

        Args:
            divisions: the recordings of the microbatches, which may differ in what the model does; None: none are made.

        Raises LossError: see `LossSemantics.shares`.
        """
        if call.axes is None:
            losses = [replace(loss, reduction=loss.reduction or "mean") for loss in losses]
        divisions = divisions or [None] * len(call.microbatches)
        asked = [self._microbatch(call, number, division) for number, division in enumerate(divisions)]
        return self._semantics.shares(losses, asked, call.shares, type(self._split_model.model).__name__)

    def shares_unrecorded(self, call: StepCall) -> LossShares | LossError | None:
        """The shares, as by `shares`, of a step whose losses are not known before it is read; None where there is one
        microbatch, whose loss counts whole. Where the step could not be run for that, an error is returned: the step
        fails when it is run, or the error is raised once it gives its loss."""
        if not torch.is_grad_enabled() or len(call.shares.flat) == 1:
            return None
        losses = self._semantics.losses_of(self._microbatch(call, 0, None))
        if losses is not None:
            return self.shares(losses, call)
        try:
            return self.shares([Loss(0, None)], call)
        except LossError as error:
            return error

    def results(self, call: StepCall) -> StepReading:
        """The reading of a step for what its results are to the samples of a batch. Every rank of a replica has the
        same."""
        return self._semantics.reading(self._microbatch(call, 0, None))

    def _microbatch(self, call: StepCall, number: int, division: Division | None) -> Microbatch:
        inputs, whole = call.microbatches[number], sum(call.shares.flat)
        which = None if division is None else division.program.python.serial
        axes = tuple(call.axes) if call.axes is not None else (None,) * len(inputs)
        read = partial(self._read, call.body, inputs, Batching(axes, call.shares.own[number], whole))
        return Microbatch(inputs, (call.signature, call.shapes[number], which, whole), read)

    def _read(self, body: StepBody, inputs: Sequence[torch.Tensor], batching: Batching) -> StepReading:
        split_model = self._split_model

        def once(given: list[torch.Tensor]) -> Any:
            with left_as_it_is(split_model.model, getattr(body, "python_roots", ())):
                return body(given)

        with split_model.parts.as_whole():
            return read_step(
                split_model.model, once, inputs, batching, split_model.bound.device, split_model.bodies.heard_by,
                norms_are_plain=self._semantics.scope is not None,
            )  # fmt: skip
