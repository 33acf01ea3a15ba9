"""A line for every so many training steps: loss, norm of the gradients, memory, rates. The same in every framework.

Runtimes say what steps did; this file adds it up, divides it by the time that passed and puts it into words. The fields
are those of torchtitan's lines. Rates are of one device, over all steps since the line before.
"""

import logging
import os
import resource
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from shardwright.core.errors import ShardwrightError

LINES = logging.getLogger("shardwright.steps")
"""The logger of the lines, at level INFO."""


@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor of a batch: its name, its shape, and the dim that is its batch (None: it has none)."""

    name: str
    shape: tuple[int, ...]
    is_integer: bool
    batch_dim: int | None = 0


def tokens_in(batch: Iterable[Argument]) -> Argument | None:
    """The argument whose entries are the tokens of a batch: the first whole numbers with two dims, samples and
    positions, as ``input_ids`` are. None: the batch has samples only."""
    return next((a for a in batch if a.is_integer and len(a.shape) == 2 and a.batch_dim is not None), None)


@dataclass(frozen=True, slots=True)
class Work:
    """What one call of a step did, or several calls.

    Attributes:
        samples, tokens: of the batch that ``devices`` devices trained on; tokens None where it has none.
        flops: FLOPs of matrix products in the forward and the backward pass, by their precision: those of the model,
            whatever is recomputed. None where they are not known.
        devices: the number of devices that shared this work.
    """

    samples: int
    tokens: int | None
    flops: Mapping[str, float] | None
    devices: int

    def __add__(self, other: "Work") -> "Work":
        tokens = None if self.tokens is None or other.tokens is None else self.tokens + other.tokens
        flops = None
        if self.flops is not None and other.flops is not None:
            flops = {p: self.flops.get(p, 0) + other.flops.get(p, 0) for p in {*self.flops, *other.flops}}
        return Work(self.samples + other.samples, tokens, flops, self.devices)


@dataclass(frozen=True, slots=True)
class StepLine:
    """The figures of one line.

    Attributes:
        step: the number of the update, from 1.
        loss: the loss of the whole batch before the update; None where it is not known.
        grad_norm: the norm of all gradients, before they were clipped; None where nobody computed it.
        memory_bytes: the peak so far, and what it is a share of; None where it is not known.
        work, seconds: what was done since the line before, and the time that it took.
        peaks: FLOPs per second of one device at best, by precision.
        skipped: the number of updates since the line before that were not made.
    """

    step: int
    work: Work
    loss: float | None = None
    grad_norm: float | None = None
    memory_bytes: tuple[int, int] | None = None
    seconds: float = 1.0
    peaks: Mapping[str, float] = field(default_factory=dict)
    skipped: int = 0

    @property
    def per_second(self) -> float:
        """Tokens per second of one device; samples where the batch has no tokens."""
        count = self.work.samples if self.work.tokens is None else self.work.tokens
        return count / self.seconds / self.work.devices

    @property
    def flops_per_s(self) -> float | None:
        """FLOPs of the model per second of one device."""
        flops = self.work.flops
        return None if flops is None else sum(flops.values()) / self.seconds / self.work.devices

    @property
    def mfu(self) -> float | None:
        """The share of the time in which devices at their peaks would do the model's FLOPs (model FLOPs utilization,
        arXiv 2204.02311, appendix B). None where a peak is not known."""
        flops = self.work.flops
        if not flops or any(self.peaks.get(p, 0.0) <= 0 for p in flops):
            return None
        return sum(n / self.peaks[p] for p, n in flops.items()) / self.seconds / self.work.devices

    def text(self) -> str:
        """The line. What is not known is left out."""
        said = [f"step: {self.step:>2}"]
        if self.loss is not None:
            said.append(f"loss: {_number(self.loss):>8}")
        if self.grad_norm is not None:
            said.append(f"grad_norm: {_number(self.grad_norm):>7}")
        if self.memory_bytes is not None:
            held, most = self.memory_bytes
            said.append(f"memory: {held / 2**30:5.2f}GiB({100 * held / most:.2f}%)")
        said.append(f"{'sps' if self.work.tokens is None else 'tps'}: {_rate(self.per_second)}")
        if self.flops_per_s is not None:
            said.append(f"tflops: {_rate(self.flops_per_s / 1e12)}")
        if self.mfu is not None:
            said.append(f"mfu: {100 * self.mfu:.2f}%")
        if self.skipped:
            said.append(f"skipped: {self.skipped}")
        return "  ".join(said)


def _number(value: float) -> str:
    return f"{value:.4f}" if value == 0 or abs(value) >= 1e-2 else f"{value:.3e}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def legend(every: int, tokens: str | None, peaks: Mapping[str, float], used: Iterable[str], why: str = "") -> str:
    """A sentence on how the figures are counted, said once before the first line.

    Args:
        tokens: the name of the argument whose entries are the tokens; None: samples are counted.
        used: the precisions of the model's products.
        why: the reason why FLOPs are not known.
    """
    counted = "sps counts samples" if tokens is None else f"tps counts the entries of {tokens}"
    known = [f"{peaks[p] / 1e12:g} in {p}" for p in sorted(used) if peaks.get(p)]
    share = f"; mfu is of TFLOP/s: {', '.join(known)}" if known else ""
    left_out = f"; tflops is left out: {why}" if why else ""
    return (
        f"a line every {every} steps (log_every={every}; 0 for none); {counted}; rates are of one device"
        f"{share}{left_out}"
    )


class Reading(Protocol):
    """The figures of a line that may still be computed."""

    def is_there(self) -> bool:
        """Whether the figures can be had without waiting."""

    def figures(self) -> Mapping[str, Any]:
        """The fields of `StepLine` that were missing. Waits for them."""


class StepLines:
    """The lines of one run: what steps did is added up, and each line is said once its figures are there.

    Args:
        every: a line is due after the first update and after every so many; at least 1.
        peaks: gives FLOPs per second of one device at best, by precision; asked before the first line.
        before: gives what stands before each line, such as the model where a run has several.
    """

    def __init__(self, every: int, peaks: Callable[[], Mapping[str, float]], before: Callable[[], str] = str) -> None:
        self._every, self._ask, self._before = every, peaks, before
        self._peaks: Mapping[str, float] | None = None
        self._work: Work | None = None
        self._skipped = 0
        self._tokens: str | None = None
        self._unknown = ""
        self._pending: deque[tuple[StepLine, Reading]] = deque()
        self._has_legend = False
        _show_lines()

    def is_due(self, step: int) -> bool:
        """Whether update number ``step`` gets a line."""
        return step == 1 or step % self._every == 0

    def worked(self, work: Work, tokens: str | None, unknown: str = "") -> None:
        """Note a call of a step.

        Args:
            tokens: the name of the argument whose entries are the tokens; None: the batch has none.
            unknown: the reason why the FLOPs are not known.
        """
        self._work = work if self._work is None else self._work + work
        self._tokens, self._unknown = tokens, self._unknown or unknown

    def skip(self) -> None:
        """Note an update that was not made."""
        self._skipped += 1

    def note(self, step: int, reading: Reading) -> None:
        """Note that the line of an update is due; what steps do from here on belongs to the line after it."""
        work, self._work = self._work, None
        skipped, self._skipped = self._skipped, 0
        if work is not None:
            self._pending.append((StepLine(step, work, skipped=skipped), reading))

    def look(self, *, wait: bool = False) -> None:
        """Say the lines whose figures are there; with ``wait`` all of them."""
        while self._pending and (wait or self._pending[0][1].is_there()):
            line, reading = self._pending.popleft()
            if self._peaks is None:
                self._peaks = self._ask()
            if not self._has_legend:
                self._has_legend = True
                used = line.work.flops or {}
                LINES.info("%s%s", self._before(), legend(self._every, self._tokens, self._peaks, used, self._unknown))
            text = replace(line, peaks=self._peaks, **reading.figures()).text()
            LINES.info("%s%s", self._before(), text)


def _show_lines() -> None:
    """Let the lines appear: on standard error, where the program has no logging of its own."""
    if LINES.level == logging.NOTSET:
        LINES.setLevel(logging.INFO)
    if not any(isinstance(handler, _ToStandardError) for handler in LINES.handlers):
        LINES.addHandler(_ToStandardError())


class _ToStandardError(logging.Handler):
    """A handler that writes to what is standard error now, unless others handle the lines."""

    def emit(self, record: logging.LogRecord) -> None:
        parents = (LINES, logging.getLogger("shardwright"), logging.getLogger())
        if all(handler is self for logger in parents for handler in logger.handlers):
            print(self.format(record), file=sys.stderr, flush=True)


def require_every(log_every: object) -> None:
    """Raise ShardwrightError for a number of steps that is none."""
    if not isinstance(log_every, int) or isinstance(log_every, bool) or log_every < 0:
        raise ShardwrightError(
            f"log_every={log_every!r}: expected a number of steps after which there is a line, or 0 for no lines"
        )


def process_memory() -> tuple[int, int]:
    """The most bytes of the host's memory that this process has had, and the bytes of all of it."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return used, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
