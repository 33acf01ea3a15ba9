"""The legality of a table: every action once and in legal order, as every schedule must be when it is made."""

from collections.abc import Sequence

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule.actions import Action, B, F, I, W
from shardwright.core.schedule.family import Order, Table
from shardwright.core.schedule.grid import render

_BIT = {F: 1, I: 2, W: 4, B: 8}
_FORWARD, _SPLIT, _WHOLE = 1, 1 | 2 | 4, 1 | 8


def require_complete(name: str, table: Table, placement: Sequence[int], microbatches: int) -> bool:
    """Check that every (stage, microbatch) runs exactly once, on the rank that holds the stage, and in legal order
    there: F before its backward, I before its W, and no B beside I and W. A forward-only table has no backward at all.

    Returns whether the table trains: whether it has backwards.

    Raises:
        ScheduleError: an action is missing, doubled, unknown, on the wrong rank, or too early; the grid marks the cell.
    """
    held: list[list[int]] = [[] for _ in table]
    for stage, rank in enumerate(placement):
        held[rank].append(stage)
    done = [_done(name, table, rank, placement, microbatches) for rank in range(len(table))]
    trains = any(state != _FORWARD for states in done for state in states.values())
    whole = (_SPLIT, _WHOLE) if trains else (_FORWARD,)
    for rank, states in enumerate(done):
        expected = len(held[rank]) * microbatches
        if len(states) == expected and all(state in whole for state in states.values()):
            continue
        missing = next(
            said
            for stage in held[rank]
            for mb in range(microbatches)
            if (said := _missing(states.get(stage * microbatches + mb, 0), stage, mb, trains)) is not None
        )
        raise ScheduleError(report(name, table, f"rank {rank} never runs {missing}", rank, len(table[rank])))
    return trains


def _done(name: str, table: Table, rank: int, placement: Sequence[int], microbatches: int) -> dict[int, int]:
    """The actions that a rank runs, as bits, for each stage · microbatches + microbatch. Raises ScheduleError for an
    action that may not stand where it does."""
    done: dict[int, int] = {}
    stages = len(placement)
    allowed = {F: (0,), I: (1,), W: (3,), B: (1,)}
    for position, action in enumerate(table[rank]):
        for part in action.parts or (action,):
            stage, mb = part.stage, part.microbatch or 0
            if stage < stages and mb < microbatches and placement[stage] == rank:
                before = allowed.get(part.kind)
                if before is None:
                    continue
                at = stage * microbatches + mb
                state = done.get(at, 0)
                if state in before:
                    done[at] = state | _BIT[part.kind]
                    continue
            problem = _problem(table[rank][:position], rank, part, placement, microbatches)
            raise ScheduleError(report(name, table, problem, rank, position))
    return done


def _problem(before: Order, rank: int, part: Action, placement: Sequence[int], microbatches: int) -> str:
    """The reason why an action may not stand where it does, given what its rank ran before."""
    stage, mb = part.stage, part.microbatch or 0
    if stage >= len(placement):
        return f"{part}: there is no stage {stage}, only 0 to {len(placement) - 1}"
    if placement[stage] != rank:
        return f"{part} is on rank {rank}: stage {stage} is on rank {placement[stage]}"
    if mb >= microbatches:
        return f"{part}: there is no microbatch {mb}, only 0 to {microbatches - 1}"
    seen = {other: step for step, action in enumerate(before) for other in action.flat}
    if part in seen:
        return f"{part} is on rank {rank} a second time; the first is at step {seen[part]}"
    needed = I if part.kind is W else F
    if Action(stage, needed, mb) not in seen:
        uses = "result" if part.kind is W else "activations"
        return f"{part} comes before {stage}{needed.value}{mb}, whose {uses} it uses"
    other = I if part.kind is B else B
    return f"{part} repeats {stage}{other.value}{mb}: a backward is either whole (B) or split (I and W)"


def _missing(state: int, stage: int, mb: int, trains: bool) -> str | None:
    """The actions that a stage and a microbatch lack, given the bits of what there is; None when there are all."""
    if not state & _FORWARD:
        return f"{stage}F{mb}"
    if not trains or state in (_SPLIT, _WHOLE):
        return None
    return f"{stage}W{mb}" if state & _BIT[I] else f"{stage}B{mb}, nor {stage}I{mb} and {stage}W{mb}"


def report(name: str, table: Table, problem: str, rank: int, position: int) -> str:
    """The text of a problem, over the grid with the failing cell in brackets."""
    return f"{name}: {problem}\n{render(table, (rank, position))}"
