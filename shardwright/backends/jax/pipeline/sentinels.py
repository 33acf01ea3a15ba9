"""The report of NaN and infinity in losses and gradients: the step, the stage and the microbatch where they came up.

The numbers are computed with the step, on its devices: the losses of microbatches, sums of squares of gradients that
their norm needs anyway, and between stages one look at each message. The host reads them in a later call, when they are
there, so that no step waits for them. Messages alone are no reason to complain, as masks hold infinities: they say
where a bad loss or gradient came from.
"""

import logging
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from shardwright.backends.jax.loss.scaling import Scaling
from shardwright.backends.jax.machine.process_transfers import across
from shardwright.backends.jax.pipeline.stage_functions import BACKWARD, FORWARD, LOSS, TOTAL
from shardwright.backends.jax.program.cut import Cut
from shardwright.core.errors import NonFiniteError, ShardwrightError
from shardwright.core.model.loss.scaling import LossScale
from shardwright.core.schedule.actions import Action, Kind
from shardwright.core.schedule.passes.slices_as_stages import StageNames

log = logging.getLogger("shardwright")
Answer = Literal["warn", "error", "ignore"]
MOST_WARNINGS = 3
"""The most steps of a run that are warned of."""
BEHIND = 2
"""The number of calls after its own in which a step is looked at, at the latest."""


class Evidence(NamedTuple):
    """The arrays of a step that are to be looked at."""

    step: jax.Array
    """The number of updates made before the step."""
    loss: jax.Array
    norm: jax.Array
    """The norm of all gradients."""
    details: Any
    """The arrays that are read where the loss or the norm is not finite."""
    scales: jax.Array | None = None
    """The factors of the loss in this step and in the next, [2], where steps are skipped whose gradients overflow."""


class Teller(Protocol):
    """A protocol for putting the details of one form of step into words."""

    def text(self, evidence: Evidence) -> str:
        """A text on what is not finite, and on where it came from. The arrays are on the host."""


@dataclass(frozen=True, slots=True)
class OneProgram:
    """The teller of steps whose details are each microbatch's Σ weight · loss and each gradient's sum of squares."""

    names: Sequence[str]
    """The names of the parameters that are trained."""

    def text(self, evidence: Evidence) -> str:
        losses, squares = evidence.details
        said = _of_loss(evidence.loss, *_first(~np.isfinite(losses)), len(losses))
        bad = [(name, number) for name, number in zip(self.names, squares, strict=True) if not np.isfinite(number)]
        if bad:
            more = f" ({len(bad) - 1} more)" if len(bad) > 1 else ""
            said.append(f"the gradient of {bad[0][0]} {_of_gradient(bad[0][1])}{more}")
        elif not np.isfinite(evidence.norm):
            said.append(f"the whole gradient {_of_gradient(evidence.norm)}")
        return " and ".join(said)


@dataclass(frozen=True, slots=True)
class Staged:
    """The teller of pipelines. The details are the number of the last stage whose gradients are not finite, plus 1 (0:
    none is known), and the notes on messages and losses of each stage (`StageFunctions`)."""

    cut: Cut
    names: StageNames
    microbatches: int
    labels: Sequence[tuple[int, int]]
    """The (stage, kind of what was looked at) of every note."""

    def text(self, evidence: Evidence) -> str:
        gradients, rows = evidence.details
        noted = dict(zip(self.labels, rows, strict=True))
        home = self.cut.maker(TOTAL)
        bad = {way: {s: row for (s, w), row in noted.items() if w == way and row.any()} for way in (FORWARD, BACKWARD)}
        if not np.isfinite(evidence.loss):
            row = noted.get((home, LOSS), np.zeros((1, 2), np.int32))
            first = _microbatch(row, 0 if row[:, 0].any() else 1)[0]
            said = _of_loss(evidence.loss, bool(row.any()), first, self.microbatches)[0]
            return f"{said}: {self._origin(FORWARD, bad[FORWARD], home, first)}" if row.any() else said
        said = f"the gradient {_of_gradient(evidence.norm)}"
        return f"{said}: {self._origin(BACKWARD, bad[BACKWARD], int(gradients) - 1, -1)}"

    def _origin(self, way: int, bad: Mapping[int, np.ndarray], end: int, microbatch: int) -> str:
        """A text on the stage that made it. bad: the stages that a non-finite value came to; end: where it was seen."""
        ran = Kind.FORWARD if way == FORWARD else Kind.BACKWARD
        kind = 0 if any(row[:, 0].any() for row in bad.values()) else 1
        came = [stage for stage, row in bad.items() if row[:, kind].any()]
        if not came and end < 0:
            return "all that stages sent to each other was finite"
        if not came:
            action = f" (action {self._action(end, ran, microbatch)})" if microbatch >= 0 else ""
            passed, where = "backward" if way == BACKWARD else "forward", self.names.text(end)
            return f"it was made in the {passed} of {where}{action}; all that came in from other stages was finite"
        first = min(came) if way == FORWARD else max(came)
        m, replica = _microbatch(bad[first], kind)
        if way == FORWARD:
            senders = {arrival.source for arrival in self.cut.parts[first].arrivals}
        else:
            senders = set(self.cut.readers(first))
        made = sorted(senders - set(came)) or sorted(senders)
        actions = " or ".join(f"{self.names.text(s)} (action {self._action(s, ran, m)}{replica})" for s in made)
        what = "a NaN" if kind == 0 else "an infinity, unless a mask has it,"
        return f"{what} came to {self.names.text(first)} from {actions}, which made it of what was finite"

    def _action(self, stage: int, kind: Kind, microbatch: int) -> Action:
        return self.names.action(Action(stage, kind, microbatch))


class Sentinel:
    """The keeper of the evidence of steps, until it is looked at.

    Args:
        answer: what to do when a loss or a gradient is not finite.
        alone: whether one process has all devices. Several look at the same steps in the same calls, so that all of
            them raise the same error.
    """

    def __init__(self, answer: Answer, alone: bool, debugged: bool) -> None:
        self.answer, self.alone, self.debugged = answer, alone, debugged
        self._pending: deque[tuple[Evidence, Teller]] = deque()
        self._warned = 0
        self._told: set[int] = set()

    def note(self, evidence: Evidence | None, teller: Teller) -> None:
        """Note that a step was started."""
        if evidence is not None:
            self._pending.append((evidence, teller))

    def look(self, left: int = BEHIND - 1) -> None:
        """Look at all steps but the last ``left``, and at steps that are over where no other process has to do the
        same. Raises NonFiniteError if that is the answer; then nothing is left to be looked at."""
        while self._pending:
            evidence, teller = self._pending[0]
            gone = evidence.loss.is_deleted() or evidence.norm.is_deleted()  # given to a function that donates them
            if len(self._pending) <= left and not gone and not (self.alone and _is_there(evidence.norm)):
                return
            self._pending.popleft()
            if gone:
                continue
            if np.isfinite(_host(evidence.loss)) and np.isfinite(_host(evidence.norm)):
                continue
            found: Evidence = jax.tree.map(_host, _with_all_details(evidence))
            has_loss = bool(np.isfinite(found.loss))
            if found.scales is not None and (has_loss or self.answer != "error"):
                log.warning(
                    "step %d is skipped: gradients overflowed at a loss scale of %g; the next is %g",
                    int(found.step), *map(float, found.scales),
                )  # fmt: skip
            if self.answer == "ignore" or (found.scales is not None and has_loss):
                continue
            if int(found.step) in self._told:
                continue
            more = "; no op of a microbatch made it when it ran by itself on one device" if self.debugged else ""
            self.say(f"step {int(found.step)}: {teller.text(found)}{more}")

    def tell_beforehand(self, step: int, text: str) -> None:
        """Complain of a step that is not run yet, and do not complain again when it is."""
        self._told = {step}
        self.say(f"step {step}: {text}")

    def say(self, text: str) -> None:
        """Complain of one step."""
        hint = "" if self.debugged else "; train_step(..., debug='numerics') names the op that made it"
        if self.answer == "error":
            self._pending.clear()
            raise NonFiniteError(
                f"{text}{hint}. Parameters and the optimizer's state are as they were before that step, in the state "
                "that was given to this call too, which was not used up"
            )
        self._warned += 1
        if self._warned <= MOST_WARNINGS:
            last = " Later steps are not warned of." if self._warned == MOST_WARNINGS else ""
            warnings.warn(f"{text}{hint}. nonfinite='error' stops there, 'ignore' says nothing.{last}", stacklevel=4)


def require_settings(answer: Any, debug: Any) -> None:
    """Raise ShardwrightError for settings that are none."""
    if answer not in ("warn", "error", "ignore"):
        raise ShardwrightError(f"nonfinite={answer!r}: expected 'warn', 'error' or 'ignore'")
    if debug not in (None, "numerics"):
        raise ShardwrightError(f"debug={debug!r}: expected 'numerics', or None")
    if debug and answer == "ignore":
        raise ShardwrightError("debug='numerics' and nonfinite='ignore' are given: leave one of them out")


# --- computed with the step


def is_sound(loss: jax.Array, norm: jax.Array) -> jax.Array:
    """Whether a step's loss and gradients are finite."""
    return jnp.isfinite(loss) & jnp.isfinite(norm)


def chosen(sound: jax.Array, after: Any, before: Any) -> Any:
    """A tree after a step where that is sound, and as it was before it elsewhere. Raises ShardwrightError where the
    step changes shapes or dtypes."""

    def one(new: Any, old: Any) -> jax.Array:
        if (jnp.shape(new), jnp.result_type(new)) != (jnp.shape(old), jnp.result_type(old)):
            raise ShardwrightError(
                f"a step makes {jnp.result_type(new)}{list(jnp.shape(new))} of a value of the state that is "
                f"{jnp.result_type(old)}{list(jnp.shape(old))}, so that it cannot be left as it was where the loss is "
                "not finite: keep its dtype and shape, or take nonfinite='warn'"
            )
        found: jax.Array = jax.lax.select(sound, jnp.asarray(new), jnp.asarray(old))
        return found

    return jax.tree.map(one, after, before)


class Updated(NamedTuple):
    """What a step changes: its number, the factor of the loss, and all else."""

    step: Any
    scaling: Scaling | None
    rest: Any


def judged(
    answer: Answer, rule: LossScale | None, evidence: Evidence, after: Updated, before: Updated
) -> tuple[Updated, Evidence | None]:
    """What a step is followed by, and the evidence that is kept of it: under "error" what was before it where it is not
    sound, under "ignore" no evidence. With a ``rule``, of the factor of the loss, gradients that overflow are no fault:
    the step is skipped, which changes its number and the factor alone."""
    sound = jnp.isfinite(evidence.loss)
    if rule is None:
        sound = is_sound(evidence.loss, evidence.norm)
    else:
        assert before.scaling is not None
        whole = jnp.isfinite(evidence.norm)
        scaling = before.scaling.after(rule, ~whole)
        evidence = evidence._replace(scales=jnp.stack([before.scaling.scale, scaling.scale]))
        after = Updated(after.step, scaling, chosen(whole, after.rest, before.rest))
    if answer == "error":
        after = chosen(sound, after, before)
    return after, None if answer == "ignore" and rule is None else evidence


def _with_all_details(evidence: Evidence) -> Evidence:
    """The evidence with details that other processes have. All processes look at the same steps."""
    at = evidence.loss.sharding
    if at.is_fully_addressable or not isinstance(at, NamedSharding):
        return evidence
    leaves, structure = jax.tree.flatten(evidence.details)
    return evidence._replace(details=jax.tree.unflatten(structure, across(leaves, [at] * len(leaves))))


def _is_there(array: Any) -> bool:
    return bool(array.is_ready())


def _host(array: jax.Array) -> np.ndarray:
    return np.asarray(array if array.is_fully_addressable else array.addressable_data(0))


def _microbatch(row: np.ndarray, kind: int) -> tuple[int, str]:
    """The first microbatch that was noted, and the text of its replica if not of all."""
    numbers = np.where(row[:, kind] > 0, row[:, kind], np.iinfo(np.int32).max)
    replica = "" if (numbers == numbers[0]).all() else f", replica {int(numbers.argmin())}"
    return int(numbers.min()) - 1, replica


def _first(bad: np.ndarray) -> tuple[bool, int]:
    return bool(bad.any()), int(np.argmax(bad))


def _of_loss(loss: Any, known: bool, microbatch: int, microbatches: int) -> list[str]:
    if np.isfinite(loss):
        return []
    if not known:
        why = "what it is divided by, the sum of weights, is 0, or the sum of losses overflows"
        return [f"the loss is {float(loss)}, and that of every microbatch is finite: {why}"]
    return [f"the loss{f' of microbatch {microbatch}' if microbatches > 1 else ''} is {float(loss)}"]


def _of_gradient(squares: Any) -> str:
    return "has a NaN" if np.isnan(squares) else "has an infinite norm"
