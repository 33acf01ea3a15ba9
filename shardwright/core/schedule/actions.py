"""Actions: the cells of a schedule, in the text form of torch's pipeline schedule files (`2F0`)."""

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from shardwright.core.errors import ScheduleError


class Kind(StrEnum):
    """The kind of an action. The values are the words of torch's schedule files."""

    FORWARD = "F"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    BACKWARD = "B"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    OVERLAP = "OVERLAP_F_B"

    __hash__ = str.__hash__

    @property
    def is_compute(self) -> bool:
        return self in COMPUTE

    @property
    def is_transfer(self) -> bool:
        return self in TRANSFER


F, I, W, B = Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.BACKWARD  # noqa: E741 - the field's own letters
COMPUTE = frozenset({F, I, W, B, Kind.OVERLAP})
TRANSFER = frozenset({Kind.SEND_FORWARD, Kind.RECV_FORWARD, Kind.SEND_BACKWARD, Kind.RECV_BACKWARD})
SHARDING = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD})
"""The actions on the parameters of a whole stage."""
_PER_STAGE_OR_PAIR = SHARDING | {Kind.OVERLAP}
_KINDS = "SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD|[FIWB]"
_TEXT = re.compile(rf"([0-9]{{1,9}})({_KINDS})([0-9]{{0,9}})(?:s([0-9]{{1,9}}))?")
_COMPOSITE = re.compile(r"\(([^()]*)\)(OVERLAP_F_B)?")
_SHOWN = 80
"""The number of letters of a wrong action that an error shows."""
_EXAMPLES = "expected a stage, a kind and a microbatch, as in 2F0, with its slice as in 2F0s1, or a pair: (0F3;3B1)"


@dataclass(frozen=True, slots=True)
class Action:
    """One cell of a schedule: the work of a rank on one microbatch of one stage.

    `F` is a forward pass, `B` a full backward pass, `I` the gradient of the input alone, `W` that of the weights.
    A send names the stage that holds the tensor, a receive the stage that wants it. UNSHARD, RESHARD and REDUCE_GRAD
    concern a stage's parameters, and carry no microbatch. A composite holds a forward and a backward action that run
    overlapped; its own stage is -1. Where microbatches go through the pipeline in slices of their sequence, an action
    is of one slice: `2F0s1`.

    Raises:
        ScheduleError: an index is negative, missing or no whole number, or a composite is not one forward and one
            backward.
    """

    stage: int
    kind: Kind
    microbatch: int | None = None
    parts: "tuple[Action, ...]" = ()
    slice: int | None = None

    def __post_init__(self) -> None:
        mb, stage = self.microbatch, self.stage
        whole = type(mb) is int and type(stage) is int and mb >= 0 and stage >= 0
        whole = whole and (self.slice is None or (type(self.slice) is int and self.slice >= 0))
        if whole and type(self.kind) is Kind and self.parts == () and self.kind not in _PER_STAGE_OR_PAIR:
            return  # nearly all: schedules are made of many
        self._require_types()
        if self.kind is Kind.OVERLAP:
            kinds = [part.kind for part in self.parts]
            if len(kinds) != 2 or kinds[0] is not F or kinds[1] not in (B, I):
                given = ";".join(part.text for part in self.parts)
                raise ScheduleError(f"({given}) is not a pair that can overlap: expected one F and then one B or I")
            if self.stage != -1 or self.microbatch is not None or self.slice is not None:
                raise ScheduleError("a composite has no stage or microbatch of its own: use Action.overlap(F, B)")
            return
        if self.parts:
            raise ScheduleError(f"an action of kind {self.kind.value} has no parts; only a composite has")
        if self.stage < 0:
            raise ScheduleError(f"stage {self.stage} of an action is negative: stages count from 0")
        if self.kind in SHARDING:
            if self.microbatch is not None or self.slice is not None:
                given = f"slice {self.slice}" if self.microbatch is None else f"microbatch {self.microbatch}"
                raise ScheduleError(f"{self.kind.value} concerns a whole stage: leave out {given}")
        elif self.microbatch is None or self.microbatch < 0:
            raise ScheduleError(f"{self.stage}{self.kind.value} needs a microbatch of 0 or more, not {self.microbatch}")
        elif self.slice is not None and self.slice < 0:
            raise ScheduleError(f"slice {self.slice} of an action is negative: slices count from 0")

    def _require_types(self) -> None:
        if not isinstance(self.kind, Kind):
            kinds = ", ".join(kind.name for kind in Kind)
            raise ScheduleError(f"{self.kind!r} is not a kind of action: expected one of Kind's {kinds}")
        for name in ("stage", "microbatch", "slice"):
            value = getattr(self, name)
            if type(value) is not int and not (name != "stage" and value is None):
                raise ScheduleError(f"{name} {value!r} of an action: expected a whole number")
        if not isinstance(self.parts, tuple) or any(type(part) is not Action for part in self.parts):
            raise ScheduleError(f"parts {self.parts!r} of an action: expected a tuple of Actions")

    @classmethod
    def overlap(cls, forward: "Action", backward: "Action") -> "Action":
        """A composite of a forward and a backward action that run overlapped."""
        return cls(-1, Kind.OVERLAP, None, (forward, backward))

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Read one action; the reverse of `text`. A composite may leave out its `OVERLAP_F_B` suffix.

        Raises:
            ScheduleError: the text is not an action.
        """
        if not isinstance(text, str):
            raise ScheduleError(f"{text!r} is not the text of an action: {_EXAMPLES}")
        text = text.strip()
        if match := _TEXT.fullmatch(text):
            stage, kind, microbatch, part = match.groups()
            return cls(int(stage), Kind(kind), int(microbatch) if microbatch else None, (), int(part) if part else None)
        if match := _COMPOSITE.fullmatch(text):
            return cls(-1, Kind.OVERLAP, None, tuple(cls.parse(part) for part in match.group(1).split(";")))
        said = repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r} …"
        raise ScheduleError(f"{said} is not an action: {_EXAMPLES}")

    @property
    def text(self) -> str:
        """The action as torch writes it: `2F0`, `3SEND_F1`, `1UNSHARD`, `(0F3;3B1)OVERLAP_F_B`; of a slice: `2F0s1`."""
        if self.parts:
            return f"({';'.join(part.text for part in self.parts)}){self.kind.value}"
        mb, piece = self.microbatch, self.slice
        return f"{self.stage}{self.kind.value}{'' if mb is None else mb}{'' if piece is None else f's{piece}'}"

    @property
    def letter(self) -> str:
        """One letter, for the terminal: that of the kind, X for an overlapped pair."""
        return "X" if self.parts else self.kind.value[0]

    @property
    def series(self) -> str:
        return self.kind.value

    @property
    def numbers(self) -> dict[str, int | None]:
        """Stage and microbatch, and the slice of one."""
        found = {"stage": self.stage, "microbatch": self.microbatch}
        return found if self.slice is None else {**found, "slice": self.slice}

    @property
    def is_transfer(self) -> bool:
        return self.kind in TRANSFER

    def as_kind(self, kind: Kind, stage: int | None = None) -> "Action":
        """Another action on the same microbatch and slice, on this stage or another."""
        return cell(self.stage if stage is None else stage, kind, self.microbatch, self.slice)

    @property
    def flat(self) -> "tuple[Action, ...]":
        """The parts of a composite, or the action itself."""
        return self.parts or (self,)

    def __str__(self) -> str:
        return self.text


@lru_cache(maxsize=1 << 18)
def cell(stage: int, kind: Kind, microbatch: int | None, slice_: int | None = None) -> Action:
    """An action of one stage, made once however many schedules have it: a search builds hundreds of them."""
    return Action(stage, kind, microbatch, (), slice_)
