"""The order in which several processes run the actions of a schedule and take part in the transfers between stages.

A runtime whose processes pair transfers by their number has to have every process take part in every transfer, in one
order. Here that order is made from the schedule: all actions in one sequence, and behind each the transfers of what it
makes, to every stage that reads it, however far. `check_processes` proves of what each process does that it ends.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule.actions import Action, B, F, I, W


@dataclass(frozen=True, slots=True)
class Transfer:
    """The transfer of what an action makes to another stage."""

    action: Action
    target: int
    """The stage that reads it."""

    @property
    def text(self) -> str:
        return f"{self.action.text}>{self.target}"


Step = Action | Transfer
Edge = tuple[int, int]
"""The stage that makes a value in its forward, and a later one that reads it. The gradient goes back, if there is one.
"""


def ordered_steps(order: Sequence[Action], edges: Collection[Edge], gradients: Collection[Edge]) -> tuple[Step, ...]:
    """All actions, and behind each its transfers.

    order: the compute actions of all ranks, in an order that agrees with each rank's own.
    edges: between stages; gradients: those along which a gradient goes back.
    """
    steps: list[Step] = []
    for action in order:
        for part in action.flat:
            steps.append(part)
            if part.kind is F:
                steps += [Transfer(part, target) for source, target in sorted(edges) if source == part.stage]
            elif part.kind in (B, I):
                steps += [Transfer(part, source) for source, target in sorted(gradients) if target == part.stage]
    return tuple(steps)


def processes_steps(steps: Sequence[Step], owners: Sequence[Collection[int]]) -> dict[int, tuple[Step, ...]]:
    """The steps of each process: the actions of its stages, and every transfer.

    owners: for each stage the processes that have devices of it.
    """
    every = sorted({process for owning in owners for process in owning})
    return {
        process: tuple(s for s in steps if isinstance(s, Transfer) or process in owners[s.stage]) for process in every
    }


def check_processes(
    own_steps: Mapping[int, Sequence[Step]],
    owners: Sequence[Collection[int]],
    edges: Collection[Edge],
    gradients: Collection[Edge],
) -> None:
    """Check that the processes come to the end of their steps, whatever time each takes, even if a transfer holds all
    of them until they have come to it, and a stage of several processes until all of these have.

    The process's steps are taken one by one: a transfer ends once it is the next step of every process, and an action
    once it is the next of every process that has devices of its stage. An action has to have been given what it reads.

    Raises:
        ScheduleError: processes make transfers in different orders, wait for one another, or run an action whose
            operands have not been sent. It says which step each process is at.
    """
    at = dict.fromkeys(own_steps, 0)
    ended: set[Step] = set()
    while any(at[process] < len(steps) for process, steps in own_steps.items()):
        heads = {p: steps[at[p]] for p, steps in own_steps.items() if at[p] < len(steps)}
        ready = [step for step in dict.fromkeys(heads.values()) if _meets(step, heads, own_steps, owners)]
        if not ready:
            said = "; ".join(f"process {process} is at {_text(step)}" for process, step in sorted(heads.items()))
            done = [process for process in own_steps if process not in heads]
            over = f"; process {', '.join(map(str, done))} has ended" if done else ""
            raise ScheduleError(f"the processes wait for one another and none goes on: {said}{over}")
        for step in ready:
            if isinstance(step, Transfer) and step.action not in ended:
                raise ScheduleError(f"{step.text} is sent before {step.action.text} is run")
            if isinstance(step, Action):
                _require_operands(step, ended, edges, gradients)
            ended.add(step)
            for process in [p for p, head in heads.items() if head == step]:
                at[process] += 1


def _meets(
    step: Step, heads: Mapping[int, Step], own: Mapping[int, Sequence[Step]], owners: Sequence[Collection[int]]
) -> bool:
    """Whether all processes that take part in a step have come to it."""
    parties = own if isinstance(step, Transfer) else owners[step.stage]
    return all(heads.get(process) == step for process in parties)


def _require_operands(
    action: Action, ended: Collection[Step], edges: Collection[Edge], gradients: Collection[Edge]
) -> None:
    """Raise ScheduleError for an action that is run before it was sent what it reads."""
    stage = action.stage
    wanted: list[Transfer] = []
    if action.kind is F:
        wanted = [Transfer(action.as_kind(F, source), stage) for source, target in edges if target == stage]
    elif action.kind is not W:
        for source, target in gradients:
            if source == stage and not any(Transfer(action.as_kind(kind, target), stage) in ended for kind in (B, I)):
                wanted.append(Transfer(action.as_kind(B, target), stage))
    missing = [transfer for transfer in wanted if transfer not in ended]
    if missing:
        raise ScheduleError(f"{action.text} is run before {missing[0].text} is sent, which it reads")


def _text(step: Step) -> str:
    return step.text
