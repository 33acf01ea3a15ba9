"""The check for NaN and infinity in losses and gradients. It reports the stage and the microbatch where they came up.

The check is cheap: a sum over each message that comes in, a norm of each gradient, and one look at all of these when
the step is over; on an accelerator the look is taken when the numbers are there anyway, at the latest in the next step.
Messages alone are no reason to complain, as masks hold infinities: they say where a bad loss or gradient came from.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from shardwright.backends.torch.compat import norms_of
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.backends.torch.pipeline.first_bad_op import OpChecks
from shardwright.backends.torch.state.gradient_hook import entries_of
from shardwright.core.errors import NonFiniteError

Answer = Literal["warn", "error", "ignore"]
MOST_WARNINGS = 3
"""The number of steps that are warned of in a run."""


@dataclass
class Noted:
    """The numbers of one step of a rank to look at: texts, and for each a number that is finite if the tensor was."""

    step: int
    losses: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    messages: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    gradients: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    culprit: str = ""
    """The first op that made a NaN or an infinity, where ops are checked."""

    @property
    def all(self) -> list[tuple[str, torch.Tensor]]:
        return [*self.losses, *self.messages, *self.gradients]


class Sentinel:
    """The check of one rank.

    Args:
        answer: the reaction when a loss or a gradient is not finite.
        ops: whether each op is looked at, to name the first that made one.
    """

    def __init__(self, answer: Answer, ops: bool, watchdog: Watchdog, device: torch.device) -> None:
        self.answer, self.watchdog, self.device = answer, watchdog, device
        self.ops = OpChecks(watchdog) if ops else None
        self._noted = Noted(0)
        self._pending: tuple[Noted, torch.Tensor, torch.cuda.Event] | None = None
        self._warnings = 0
        self.overflow_is_normal = False
        """Whether losses are scaled up until gradients overflow."""

    def begin(self, step: int) -> None:
        """Begin a step. Raises NonFiniteError for the step before, where its numbers were not known by then."""
        if self._pending is not None:
            noted, numbers, event = self._pending
            event.synchronize()  # of the step before: it is over, or soon
            self._pending = None
            self._look(noted, numbers.tolist())
        self._noted = Noted(step)
        if self.ops is not None:
            self.ops.begin()

    def arrived(self, text: str, tensors: Sequence[torch.Tensor]) -> None:
        """Note a message that came in."""
        if self.answer != "ignore":
            self._noted.messages += [(text, _sum(t)) for t in tensors if t.is_floating_point() and t.numel()]

    def loss(self, text: str, value: torch.Tensor) -> None:
        """Note a loss: ``loss of microbatch 2 (stage 1)``."""
        if self.answer != "ignore":
            self._noted.losses.append((text, _sum(value.detach())))

    def finish(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """End a step, whose gradients are whole now. Raises NonFiniteError if that is the answer."""
        if self.answer == "ignore":
            return
        noted = self._noted
        noted.culprit = self.ops.first() if self.ops is not None else ""
        held = [(name, entries_of(p.grad)) for name, p in parameters.items() if p.grad is not None]
        if self._overflow_is_normal([g for _, g in held]):
            noted.losses.clear()
        elif held:
            gradients = [
                torch.view_as_real(g.detach().resolve_conj()) if g.is_complex() else g.detach() for _, g in held
            ]
            norms = norms_of(gradients)
            noted.gradients = [(name, norm) for (name, _), norm in zip(held, norms, strict=True)]
        if not noted.losses and not noted.gradients:
            return
        # Gradients that add up on the host have their norms there.
        numbers = torch.stack([number.float().to(self.device, non_blocking=True) for _, number in noted.all])
        if self.device.type == "cpu":
            if not bool(torch.isfinite(numbers).all()):
                self._look(noted, numbers.tolist(), dict(held))
            return
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending = (noted, host, event)

    def _overflow_is_normal(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Whether the gradients may overflow: in float16 losses are scaled up until they do, and the scaler skips such
        steps."""
        kind = self.device.type
        in_half = self.overflow_is_normal or (
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16
        )
        return in_half or any(g.dtype is torch.float16 for g in gradients)

    def _look(self, noted: Noted, numbers: Sequence[float], held: Mapping[str, torch.Tensor] | None = None) -> None:
        """Warn of numbers that are not finite, or raise NonFiniteError."""
        found = [(text, number) for (text, _), number in zip(noted.all, numbers, strict=True) if not _finite(number)]
        names = {text for text, _ in noted.gradients}
        losses = [(text, n) for text, n in found if text in {loss for loss, _ in noted.losses}]
        bad = [
            (text, n) for text, n in found
            if text in names and (held is None or not bool(torch.isfinite(held[text]).all()))
        ]  # fmt: skip
        if not losses and not bad:
            return
        said = [f"the {text} is {number}" for text, number in losses[:1]]
        said += [f"the gradient of {text} has a {_named(number)}" for text, number in bad[:1]]
        more = max(0, len(losses) - 1) + max(0, len(bad) - 1)
        came = next((text for text, _ in noted.messages if text in {t for t, _ in found}), None)
        origin = f"it came in with {came}" if came is not None else "all that came in from other stages was finite"
        if noted.culprit:
            origin = f"{origin}; {noted.culprit}"
        elif self.ops is None:
            origin += "; sw.init(..., debug='numerics') names the op that made it"
        text = (
            f"{self.watchdog.who}, step {noted.step}: {' and '.join(said)}{f' ({more} more)' if more else ''}: {origin}"
        )
        if self.answer == "error":
            raise NonFiniteError(text)
        self._warnings += 1
        if self._warnings <= MOST_WARNINGS:
            last = " Later steps are not warned of." if self._warnings == MOST_WARNINGS else ""
            warnings.warn(f"{text}. nonfinite='error' stops there, 'ignore' says nothing.{last}", stacklevel=5)


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.sum(dtype=torch.float32)


def _finite(number: float) -> bool:
    return number - number == 0.0


def _named(number: float) -> str:
    return "NaN" if number != number else "NaN or infinity"
