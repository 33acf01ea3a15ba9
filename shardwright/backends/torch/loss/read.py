"""The reading of a step body's losses: the relation of its microbatches' losses to that of the batch, and the counts
that it needs; and what the results of the step are to the samples of its batch."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from shardwright.backends.torch.capture.batch_dims import resized
from shardwright.backends.torch.capture.fake_state import fake_state, real_state
from shardwright.backends.torch.capture.known_values import known_values
from shardwright.backends.torch.capture.model import noted_calls, plain_torch
from shardwright.backends.torch.capture.stand_in import no_remembered_results
from shardwright.backends.torch.capture.value_reads import require_room_for_values
from shardwright.backends.torch.compat import FakeTensorMode, below_autograd
from shardwright.backends.torch.loss.counts import Counting, NotOfBatchError
from shardwright.backends.torch.loss.results import ReturnedLeaf, results_by_shape, results_of, returned_leaves
from shardwright.backends.torch.loss.trace import LossTrace
from shardwright.backends.torch.loss.trace_pairs import DifferentRunsError, require_alike_alone
from shardwright.backends.torch.loss.translation import Translation
from shardwright.backends.torch.program.refusals import require_one_element
from shardwright.core.errors import CaptureError, ShardwrightError
from shardwright.core.model.loss import Finding, ResultOfBatch, Verdict, read_loss

StepBody = Callable[[list[torch.Tensor]], Any]
Kind = Literal["meta", "fake", "real"]
META = torch.device("meta")
Given = list[tuple[int, bool, str | None]]
Listening = Callable[["Losses"], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Batching:
    """The batch dim of every input of a step, and the numbers of samples.

    Attributes:
        axes: None where every microbatch gets the input whole.
        samples: of a microbatch.
        whole: of all microbatches of all replicas.
    """

    axes: tuple[int | None, ...]
    samples: int
    whole: int

    @property
    def sizes(self) -> tuple[int, int]:
        """The batch sizes at which a step is run: those of a microbatch and of the whole, because the relation between
        these two is asked for. The smaller is at least 2: one sample alone may run other ops."""
        small = max(2, self.samples)
        return small, max(small + 1, self.whole)

    def sized(self, shape: Sequence[int], position: int, samples: int) -> tuple[int, ...]:
        """The shape of an input with another number of samples."""
        return resized(shape, self.axes[position], self.samples, samples)


@dataclass(frozen=True, slots=True)
class LossReading:
    """The reading of one loss of a step.

    Attributes:
        verdict: its counts are numbered from 0.
        counting: computes the counts, in this order, from a microbatch.
        has_weight: whether the step gives the loss's weight.
        reduction: the reduction that the step states.
        was_run: whether the step could be run to read it.
    """

    verdict: Verdict
    counting: Counting | None = None
    has_weight: bool = False
    reduction: str | None = None
    was_run: bool = True

    def counted(self, inputs: Sequence[torch.Tensor]) -> list[float]:
        """The counts of a microbatch."""
        return [] if self.counting is None else self.counting(inputs)


@dataclass(frozen=True, slots=True)
class StepReading:
    """The reading of a step.

    Attributes:
        losses: those that are given to ``backward``.
        results: what each leaf of the result is to the samples of its batch. None where the step could not be run at
            two batch sizes; ``hindered`` says why.
    """

    losses: Sequence[LossReading]
    results: Sequence[ResultOfBatch] | None
    hindered: str = ""


class Losses:
    """The losses that one run gives to ``backward``."""

    def __init__(self, trace: LossTrace) -> None:
        self.trace = trace
        self.given: Given = []
        """The value of each loss, whether it has a weight, and the reduction that the step states."""

    def backward(self, loss: Any, weight: Any = None, reduction: Any = None) -> None:
        """Note a loss that the body gives to ``model.backward``."""
        if not isinstance(loss, torch.Tensor):
            raise CaptureError(f"model.backward takes the loss, a tensor: given a {type(loss).__name__}")
        require_one_element(loss)
        self.trace.read_before_losses.append(self.trace.numbers_read)
        self.trace.reading_before_losses = set(self.trace.reading)
        self.given.append((self.trace.read(loss), weight is not None, reduction))


def read_step(
    model: nn.Module,
    body: StepBody,
    inputs: Sequence[torch.Tensor],
    batching: Batching,
    device: torch.device,
    listening: Listening,
    *,
    norms_are_plain: bool = False,
) -> StepReading:
    """The relation to its batch of each loss that a step body gives to ``backward``, and of what it returns.

    Args:
        inputs: those of a microbatch.
        listening: a context in which the body's losses are given to the `Losses` that it is called with.
        norms_are_plain: take batch norm as if it worked on samples one by one.
    """
    reader = _Reading(model, body, inputs, batching, device, listening, norms_are_plain)
    try:
        return reader.read()
    except DifferentRunsError as error:
        verdict = Verdict(finding=Finding("unknown", str(error)))
        losses = [LossReading(verdict, None, weighted, said) for _, weighted, said in reader.given]
        losses = losses or [LossReading(verdict, was_run=False)]
        return StepReading(losses, reader.results_by_shape(verdict), str(error))


class _Reading:
    def __init__(
        self, model: nn.Module, body: StepBody, inputs: Sequence[torch.Tensor], batching: Batching,
        device: torch.device, listening: Listening, norms_are_plain: bool,
    ) -> None:  # fmt: skip
        self.model, self.body, self.inputs, self.batching = model, body, inputs, batching
        self.device, self.listening, self.norms_are_plain = device, listening, norms_are_plain
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.kind: Kind = "meta"
        self.given: Given = []
        self.returned: dict[int, list[ReturnedLeaf]] = {}
        """What the step returned, by batch size."""

    def read(self) -> StepReading:
        sizes = self.batching.sizes
        (small, losses), (large, others) = self._runs(sizes)
        self.given = losses
        translation = Translation(small, large, sizes, self.norms_are_plain)
        if losses != others:
            raise DifferentRunsError("another loss is given to model.backward at another batch size")
        if self.batching.samples == 1 and (alone := self._run(1)) is not None:
            require_alike_alone(alone[0], small, large, sizes)
        verdicts = [read_loss(translation.program, loss) for loss, _, _ in losses]
        # What became a Python number before a loss was given may be in that loss, and is not seen there.
        read = small.read_before_losses
        verdicts = [v if place is None else _unless_read(v, place) for v, place in zip(verdicts, read, strict=True)]
        readings = [
            replace(self._with_counts(verdict, small, translation), has_weight=weighted, reduction=said)
            for verdict, (_, weighted, said) in zip(verdicts, losses, strict=True)
        ]
        return StepReading(readings, results_of(self.returned[sizes[0]], self.returned[sizes[1]], translation.program))

    def results_by_shape(self, verdict: Verdict) -> list[ResultOfBatch] | None:
        """What the results are to the samples, where nothing but their shapes is known of them, and ``verdict`` says
        why; None where the step was not run at two batch sizes."""
        small, large = (self.returned.get(size) for size in self.batching.sizes)
        if small is None or large is None or len(small) != len(large):
            return None
        return results_by_shape(small, large, self.batching.sizes, verdict)

    def _with_counts(self, verdict: Verdict, trace: LossTrace, translation: Translation) -> LossReading:
        wanted = tuple(dict.fromkeys(c.count.value for c in verdict.combinations if c.count is not None))
        if not wanted:
            return LossReading(verdict)
        numbered = tuple(
            c if c.count is None else replace(c, count=replace(c.count, value=wanted.index(c.count.value)))
            for c in verdict.combinations
        )
        try:
            powers = {c.count.value: c.count.power for c in verdict.combinations if c.count is not None}
            alone = self.batching.axes if self.batching.samples == 1 else None
            counting = Counting(trace, powers, translation.counted, alone)
            return LossReading(replace(verdict, combinations=numbered), counting)
        except NotOfBatchError as error:
            reason = f"the loss is divided by a count that cannot be had from the batch beforehand: {error}"
            return LossReading(Verdict(finding=Finding("unknown", reason)))

    def _runs(self, sizes: tuple[int, int]) -> tuple[tuple[LossTrace, Given], tuple[LossTrace, Given]]:
        """The runs at two batch sizes, of one kind."""
        while True:
            small = self._run(sizes[0])
            large = None if small is None else self._run(sizes[1])
            if small is not None and large is not None:
                return small, large

    def _run(self, samples: int) -> tuple[LossTrace, Given] | None:
        """Run the step on tensors without values if possible: on the meta device, where it is quickest; on fake ones,
        which can be on any device and know the numbers that the step makes tensors of; or on real ones. None where the
        next kind is needed."""
        if self.kind == "meta":
            with suppress(Exception):
                trace, given = self._run_on(samples, nullcontext(), fake_state, self._empty_input, META)
                if trace.knows_its_numbers:
                    return trace, given
            self.kind = "fake"
            return None
        if self.kind == "fake":
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            try:
                return self._run_on(samples, mode, fake_state, self._empty_input, self.device)
            except CaptureError:
                raise
            except Exception as failed:  # a value is needed, or an op has no fake counterpart
                self._require_values(failed)
                self.kind = "real"
                return None
        try:
            return self._run_on(samples, nullcontext(), real_state, self._real_input, self.device)
        except ShardwrightError:
            raise
        except Exception as failed:
            raise DifferentRunsError(
                f"the step fails with {samples} samples in a microbatch in place of {self.batching.samples}: {failed}"
            ) from failed

    def _require_values(self, failed: Exception) -> None:
        try:
            require_room_for_values(self.model, failed)
        except CaptureError as error:
            raise DifferentRunsError(str(error)) from error

    def _run_on(
        self, samples: int, mode: AbstractContextManager[Any], state: Any,
        make: Callable[[int, int, torch.device], torch.Tensor], device: torch.device,
    ) -> tuple[LossTrace, Given]:  # fmt: skip
        trace = LossTrace()
        losses = Losses(trace)
        with mode, state(self.model, device) as (parameters, buffers), no_remembered_results(self.model):
            given = [make(position, samples, device) for position in range(len(self.inputs))]
            trace.name_all(given, parameters, buffers)
            with (
                plain_torch(),
                self.listening(losses),
                noted_calls(trace, self.paths),
                trace,
                nullcontext() if self.kind == "real" else known_values(),
                below_autograd(),
            ):
                returned = self.body(given)
                self.returned[samples] = returned_leaves(returned, trace)
        return trace, losses.given

    def _empty_input(self, position: int, samples: int, device: torch.device) -> torch.Tensor:
        tensor = self.inputs[position]
        shape = self.batching.sized(tensor.shape, position, samples)
        return torch.empty(shape, dtype=tensor.dtype, device=device).requires_grad_(tensor.requires_grad)

    def _real_input(self, position: int, samples: int, device: torch.device) -> torch.Tensor:
        tensor = self.inputs[position].detach().to(device, copy=True)
        axis = self.batching.axes[position]
        if axis is not None:
            rows = self.batching.sized(tensor.shape, position, samples)[axis]
            tensor = tensor.index_select(axis, torch.arange(rows, device=device) % tensor.shape[axis])
        return tensor.requires_grad_(self.inputs[position].requires_grad)


def _unless_read(verdict: Verdict, path: str) -> Verdict:
    if verdict.finding is not None:
        return verdict
    return Verdict(finding=Finding("unknown", f"{path!r} makes Python numbers of tensors, which may be in the loss"))
