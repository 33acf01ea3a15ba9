"""The legality of a table: every action once and in legal order, as every schedule must be when it is made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule.actions import SHARDING, Action, B, F, I, W, cell
from shardwright.core.schedule.family import Order, Table
from shardwright.core.schedule.grid import render

_BIT = {F: 1, I: 2, W: 4, B: 8}
_FORWARD, _SPLIT, _WHOLE = 1, 1 | 2 | 4, 1 | 8


def require_complete(name: str, table: Table, placement: Sequence[int], microbatches: int, slices: int = 1) -> bool:
    """Check that every (stage, microbatch, slice) runs exactly once, on the rank that holds the stage, and in legal
    order there: F before its backward, I before its W, and no B beside I and W; slices of a microbatch forward in their
    order, and backward in reverse. A forward-only table has no backward at all.

    Returns whether the table trains: whether it has backwards.

    Raises:
        ScheduleError: an action is missing, doubled, unknown, on the wrong rank, or too early; the grid marks the cell.
    """
    held: list[list[int]] = [[] for _ in table]
    for stage, rank in enumerate(placement):
        held[rank].append(stage)
    passes = microbatches * slices
    made = _Passes(name, table, placement, microbatches, slices)
    done = [made.of_rank(rank) for rank in range(len(table))]
    trains = any(state != _FORWARD for states in done for state in states.values())
    whole = (_SPLIT, _WHOLE) if trains else (_FORWARD,)
    for rank, states in enumerate(done):
        expected = len(held[rank]) * passes
        if len(states) == expected and all(state in whole for state in states.values()):
            continue
        missing = next(
            said
            for stage in held[rank]
            for number in range(passes)
            if (said := _missing(states.get(stage * passes + number, 0), made.cell(stage, number), trains))
        )
        raise ScheduleError(report(name, table, f"rank {rank} never runs {missing}", rank, len(table[rank])))
    return trains


@dataclass(frozen=True, slots=True)
class _Passes:
    """The passes of a table, by stage · passes of a stage + microbatch · slices + slice."""

    name: str
    table: Table
    placement: Sequence[int]
    microbatches: int
    slices: int

    def cell(self, stage: int, number: int) -> Action:
        """The forward of one of a stage's passes."""
        microbatch, part = divmod(number, self.slices)
        return cell(stage, F, microbatch, part if self.slices > 1 else None)

    def of_rank(self, rank: int) -> dict[int, int]:
        """The actions that a rank runs, as bits. Raises ScheduleError for one that may not stand where it does."""
        done: dict[int, int] = {}
        placement, slices, microbatches = self.placement, self.slices, self.microbatches
        stages, is_plain = len(placement), slices == 1
        allowed = {F: (0,), I: (1,), W: (3,), B: (1,)}
        for position, action in enumerate(self.table[rank]):
            for part in action.parts or (action,):
                stage, mb, piece = part.stage, part.microbatch or 0, part.slice
                is_there = stage < stages and mb < microbatches and placement[stage] == rank
                if is_there and (piece is None if is_plain else self._names_its_slice(part)):
                    before = allowed.get(part.kind)
                    if before is None:
                        continue
                    at = stage * microbatches + mb if is_plain else (stage * microbatches + mb) * slices + (piece or 0)
                    state = done.get(at, 0)
                    if state in before and (is_plain or self._in_turn(part, at, done)):
                        done[at] = state | _BIT[part.kind]
                        continue
                problem = self._problem(self.table[rank][:position], rank, part)
                raise ScheduleError(report(self.name, self.table, problem, rank, position))
        return done

    def _names_its_slice(self, part: Action) -> bool:
        return part.kind in SHARDING or (part.slice is not None and part.slice < self.slices)

    def _in_turn(self, part: Action, at: int, done: Mapping[int, int]) -> bool:
        """Whether the slice before the one of a forward, or behind the one of a backward, has run."""
        number = part.slice or 0
        if part.kind is F:
            return number == 0 or bool(done.get(at - 1, 0))
        if part.kind is W or number == self.slices - 1:
            return True
        return bool(done.get(at + 1, 0) & (_BIT[B] | _BIT[I]))

    def _problem(self, before: Order, rank: int, part: Action) -> str:
        """The reason why an action may not stand where it does, given what its rank ran before."""
        stage, mb, placement = part.stage, part.microbatch or 0, self.placement
        if stage >= len(placement):
            return f"{part}: there is no stage {stage}, only 0 to {len(placement) - 1}"
        if placement[stage] != rank:
            return f"{part} is on rank {rank}: stage {stage} is on rank {placement[stage]}"
        if mb >= self.microbatches:
            return f"{part}: there is no microbatch {mb}, only 0 to {self.microbatches - 1}"
        if self.slices == 1 and part.slice is not None:
            return f"{part} is of a slice, and the schedule has no slices: slices=1"
        if self.slices > 1 and (part.slice is None or part.slice >= self.slices):
            return f"{part}: each microbatch has slices 0 to {self.slices - 1}, as in {stage}{part.kind.value}{mb}s0"
        seen = {other: step for step, action in enumerate(before) for other in action.flat}
        if part in seen:
            return f"{part} is on rank {rank} a second time; the first is at step {seen[part]}"
        needed = part.as_kind(I if part.kind is W else F)
        if part.kind is not F and needed not in seen:
            uses = "result" if part.kind is W else "activations"
            return f"{part} comes before {needed}, whose {uses} it uses"
        other = part.as_kind(I if part.kind is B else B)
        if other in seen:
            return f"{part} repeats {other}: a backward is either whole (B) or split (I and W)"
        if part.kind is F:
            return f"{part} comes before slice {(part.slice or 0) - 1}, whose keys, values and states it uses"
        return f"{part} comes before the backward of slice {(part.slice or 0) + 1}, which gives it gradients"


def _missing(state: int, forward: Action, trains: bool) -> str | None:
    """The actions that a pass lacks, given the bits of what there is; None when there are all."""
    if not state & _FORWARD:
        return forward.text
    if not trains or state in (_SPLIT, _WHOLE):
        return None
    halves = f"{forward.as_kind(I)} and {forward.as_kind(W)}"
    return forward.as_kind(W).text if state & _BIT[I] else f"{forward.as_kind(B)}, nor {halves}"


def report(name: str, table: Table, problem: str, rank: int, position: int) -> str:
    """The text of a problem, over the grid with the failing cell in brackets."""
    return f"{name}: {problem}\n{render(table, (rank, position))}"
