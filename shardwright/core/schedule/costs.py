"""The costs of the stages of a pipeline: seconds of compute and of transfer, bytes of activations."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import TypeGuard

from shardwright.core.errors import ScheduleError

MOST_SECONDS = 1e12
"""The most seconds of one action or transfer: 30,000 years, and small enough that the sum of any schedule is finite."""
MOST_BYTES = 1 << 50
"""The most bytes of one microbatch on one stage: a pebibyte, and small enough for sums of 64 bits."""
MOST_STAGES = 1 << 18


@dataclass(frozen=True, slots=True)
class StageCosts:
    """The costs of one microbatch.

    Args:
        forward_s, input_grad_s, weight_grad_s: seconds, one per stage. A full backward takes the last two together,
            unless ``whole_backward_s`` says otherwise.
        transfer_s: seconds to move an activation, or its gradient, over each boundary; boundary i lies between stages i
            and i + 1, so there is one fewer than stages. A boundary inside one rank costs nothing.
        activation_bytes: bytes held on the stage from the start of a microbatch's forward until the end of its backward
            (of its weight gradient, when the backward is split); one per stage.
        overlap: the share of the shorter half of an overlapped pair that hides behind the longer, from 0 (the pair
            takes as long as one after the other) to 1 (as long as the longer).
        whole_backward_s: seconds of a full backward, one per stage, where that is not the sum of its halves: splitting
            costs something on most devices. Default: the sum.
        freed_by_input_grad_bytes: the part of ``activation_bytes`` that the input gradient of a split backward is the
            last to read, and frees at its end; one per stage. Default: none, all are held until the weight gradient
            ends.
        idle_lent: the share of what idle ranks leave unused that those at work get, from 0 (each has a device of its
            own) to 1 (they share one machine, and each is as fast as its part of it is large).

        sender_waits: whether a rank waits until what it sends is across; else it goes on.

    Raises:
        ScheduleError: lengths differ, a cost is negative or not finite, a share is none, or an input gradient frees
            more than there is.
    """

    forward_s: tuple[float, ...]
    input_grad_s: tuple[float, ...]
    weight_grad_s: tuple[float, ...]
    transfer_s: tuple[float, ...]
    activation_bytes: tuple[int, ...]
    overlap: float = 0.0
    whole_backward_s: tuple[float, ...] | None = None
    idle_lent: float = 0.0
    sender_waits: bool = False
    freed_by_input_grad_bytes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            values = getattr(self, field.name)
            if field.name == "sender_waits":
                if not isinstance(values, bool):
                    raise ScheduleError(f"sender_waits={values!r}: expected True or False")
            elif field.name in ("overlap", "idle_lent"):
                if not _is_number(values) or not 0 <= values <= 1:
                    raise ScheduleError(f"{field.name}={values!r}: expected a share between 0 and 1")
            elif values is not None or field.name not in ("whole_backward_s", "freed_by_input_grad_bytes"):
                object.__setattr__(self, field.name, self._checked(field.name, values))
        for stage, freed in enumerate(self.freed_by_input_grad_bytes or ()):
            if freed > self.activation_bytes[stage]:
                raise ScheduleError(
                    f"freed_by_input_grad_bytes[{stage}]={freed} of stage {stage}: expected at most its "
                    f"activation_bytes, {self.activation_bytes[stage]}"
                )

    def _checked(self, name: str, values: object) -> tuple[float, ...]:
        """The entries of one field. Raises ScheduleError for one that cannot be."""
        what = "boundary" if name == "transfer_s" else "stage"
        if isinstance(values, str | bytes) or not isinstance(values, Iterable):
            raise ScheduleError(f"{name}={values!r}: expected a tuple with a number for each {what}")
        entries = tuple(values)
        stages = len(self.forward_s)
        if stages == 0:
            raise ScheduleError("costs of 0 stages were given: expected one entry per stage, for at least one stage")
        expected = stages - 1 if name == "transfer_s" else stages
        if len(entries) != expected:
            raise ScheduleError(
                f"{name} has {len(entries)} entries: expected {expected}, one per {what} of {stages} stages"
            )
        whole = name in ("activation_bytes", "freed_by_input_grad_bytes")
        most = MOST_BYTES if whole else MOST_SECONDS
        is_plain = set(map(type, entries)) == {int if whole else float}
        # A sum with NaN in it is at most nothing, where the least and the largest entry may not show it.
        if is_plain and min(entries) >= 0 and max(entries) <= most and sum(entries) <= most * len(entries):
            return entries
        for index, value in enumerate(entries):
            if not _is_number(value) or not 0 <= value <= most or (whole and value != int(value)):
                kind = "a whole number" if whole else "a number"
                given = f"{name}[{index}]={value!r} of {what} {index}"
                raise ScheduleError(f"{given}: expected {kind}, finite, 0 or more and at most {most:g}")
        return tuple(int(value) if whole else float(value) for value in entries)

    @classmethod
    def uniform(
        cls,
        stages: int,
        forward_s: float = 1.0,
        input_grad_s: float = 1.0,
        weight_grad_s: float = 1.0,
        transfer_s: float = 0.0,
        activation_bytes: int = 1,
    ) -> "StageCosts":
        """The same costs on every stage and every boundary; seconds and bytes of one microbatch.

        Raises:
            ScheduleError: ``stages`` is no whole number of at least 1, or a cost cannot be.
        """
        if type(stages) is not int or not 1 <= stages <= MOST_STAGES:
            raise ScheduleError(f"stages={stages!r}: expected a whole number of at least 1 and at most {MOST_STAGES}")
        return cls(
            (forward_s,) * stages,
            (input_grad_s,) * stages,
            (weight_grad_s,) * stages,
            (transfer_s,) * (stages - 1),
            (activation_bytes,) * stages,
        )

    @property
    def stages(self) -> int:
        return len(self.forward_s)

    @property
    def backward_s(self) -> tuple[float, ...]:
        """Seconds of a full backward, one per stage."""
        if self.whole_backward_s is not None:
            return self.whole_backward_s
        return tuple(i + w for i, w in zip(self.input_grad_s, self.weight_grad_s, strict=True))

    def require_stages(self, stages: int) -> None:
        """Raise ScheduleError unless these are the costs of so many stages."""
        if self.stages != stages:
            raise ScheduleError(
                f"costs of {self.stages} stages given for a schedule of {stages}: expected one per stage"
            )


def _is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a real number, and neither a truth value nor NaN."""
    return isinstance(value, Real) and not isinstance(value, bool) and value == value


def per_rank_limit(limit_bytes: int | Sequence[int] | None, ranks: int) -> tuple[int, ...] | None:
    """The memory limit of each rank, in bytes, from one for all or one for each; None for no limit.

    Raises:
        ScheduleError: a limit is negative or not finite, or their number is not that of the ranks.
    """
    if limit_bytes is None:
        return None
    if isinstance(limit_bytes, str | bytes) or not isinstance(limit_bytes, Real | Iterable):
        raise ScheduleError(f"memory_limit_bytes={limit_bytes!r}: expected a number of bytes, or one for each rank")
    limits = tuple(limit_bytes) if isinstance(limit_bytes, Iterable) else (limit_bytes,) * ranks
    if len(limits) != ranks:
        raise ScheduleError(f"memory_limit_bytes has {len(limits)} entries: expected one, or one per rank, {ranks}")
    for rank, limit in enumerate(limits):
        if not _is_number(limit) or not 0 <= limit < math.inf:
            raise ScheduleError(f"memory_limit_bytes={limit!r} on rank {rank}: expected finite and 0 or more")
    return tuple(int(limit) for limit in limits)
