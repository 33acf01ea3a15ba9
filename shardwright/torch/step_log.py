"""The lines of training steps: rank 0 says each once its values are there, without waiting for the device."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from shardwright.backends.torch.training.call import LossOfBatch, Trained
from shardwright.core.values.step_line import Argument, StepLines, Work, process_memory, tokens_in


class _Moment:
    """A moment of the device, which the host learns of when it has come."""

    def __init__(self, device: torch.device) -> None:
        self._host_s = perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def has_come(self) -> bool:
        return self._event is None or bool(self._event.query())

    def seconds_since(self, before: "_Moment") -> float:
        """The seconds between two moments, once this one has come, which is waited for."""
        if self._event is None or before._event is None:
            return self._host_s - before._host_s
        self._event.synchronize()
        return float(before._event.elapsed_time(self._event)) / 1e3


@dataclass(frozen=True, slots=True)
class _Reading:
    """The figures of one line. Loss and norm are on the host once the device has come to ``ended``."""

    values: Mapping[str, torch.Tensor]
    begun: _Moment
    ended: _Moment
    device: torch.device

    def is_there(self) -> bool:
        return self.ended.has_come()

    def figures(self) -> dict[str, Any]:
        seconds = self.ended.seconds_since(self.begun)
        values = {name: float(value) for name, value in self.values.items()}
        return {**values, "seconds": seconds, "memory_bytes": _memory(self.device)}


class StepLog:
    """The lines of rank 0 about one model.

    Args:
        every: a line is said after the first update and after every so many.
        device: the device of this rank.
        sharing: the number of devices that work on the batch of one replica.
        peaks, before: see `StepLines`.
    """

    def __init__(
        self, every: int, device: torch.device, sharing: int, peaks: Callable[[], Mapping[str, float]],
        before: Callable[[], str] = str,
    ) -> None:  # fmt: skip
        self._lines = StepLines(every, peaks, before)
        self._device, self._sharing = device, sharing
        self._begun: _Moment | None = None
        self._losses: list[Sequence[LossOfBatch] | None] = []
        """The losses of the calls whose gradients add up; None for those that are not known."""
        self._is_updated = False
        """Whether an optimizer has used these gradients."""
        self._counted: weakref.ref[Any] | None = None
        """The first optimizer that made an update: its updates are counted."""
        self._updates = 0

    def begin(self) -> None:
        """Note that a step begins."""
        if self._begun is None:
            self._begun = _Moment(self._device)

    def worked(self, trained: Trained, samples: int, batch: Iterable[Argument]) -> None:
        """Note a training step of this replica, with its samples and the tensors of its whole batch."""
        if self._is_updated:
            self._losses, self._is_updated = [], False
        self._losses.append(trained.losses)
        found = tokens_in(batch)
        count = None if found is None else found.shape[0] * found.shape[1]
        work = Work(samples, count, trained.flops, self._sharing)
        self._lines.worked(work, None if found is None else found.name, trained.unknown_flops)

    def restart(self) -> None:
        """Note that gradients were reset. Where no optimizer used them, an update was left out, as by a gradient
        scaler."""
        if self._losses and not self._is_updated:
            self._lines.skip()
        self._losses = []

    def updated(self, optimizer: Any, norm: torch.Tensor | None, *, skipped: bool) -> None:
        """Note an update, or one that was skipped because gradients overflowed. A line is due with the first optimizer
        that makes updates; others of the same model make theirs beside it.

        Args:
            norm: that of the gradients, where somebody computed it.
        """
        self._is_updated = True
        if self._counted is None or self._counted() is None:
            self._counted = weakref.ref(optimizer)
        if self._counted() is not optimizer:
            return
        self._updates += 1
        if skipped:
            self._lines.skip()
        if self._begun is not None and self._lines.is_due(self._updates):
            values = {"grad_norm": norm, "loss": _added(self._losses)}
            on_host = {name: _to_host(value) for name, value in values.items() if value is not None}
            ended = _Moment(self._device)
            self._lines.note(self._updates, _Reading(on_host, self._begun, ended, self._device))
            self._begun = ended
        self._lines.look()

    def settle(self) -> None:
        """Say the lines that are left, and wait for their values."""
        self._lines.look(wait=True)


def _added(calls: Sequence[Sequence[LossOfBatch] | None]) -> torch.Tensor | None:
    """The sum of the losses of calls; None where one is not known, or there are none."""
    totals = [loss.total().detach() for losses in calls for loss in losses or ()]
    if not totals or any(losses is None for losses in calls):
        return None
    return torch.stack([total.float() for total in totals]).sum()


def _to_host(value: torch.Tensor) -> torch.Tensor:
    """A copy on the host; that of a CUDA tensor is under way."""
    if value.device.type != "cuda":
        return value.detach().clone()
    return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value.detach(), non_blocking=True)


def _memory(device: torch.device) -> tuple[int, int]:
    """The peak so far, and what there is: on a CUDA device of what its allocator reserved, else of this process on the
    host."""
    if device.type != "cuda":
        return process_memory()
    return torch.cuda.max_memory_reserved(device), torch.cuda.get_device_properties(device).total_memory
