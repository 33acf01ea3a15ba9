"""The memory of one pipeline rank from action to action, and its peak.

Every figure of what a rank holds in the course of a step comes from here: the peaks that the search compares with the
memory of devices, the moments of `core.plan.memory_over_time`, the check of a schedule against a limit, the live
activations of a timeline. Only `core.schedule.auto` counts activations by itself, by the same rule, for speed.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.core.schedule.actions import Action, B, F, I, W
from shardwright.core.schedule.costs import StageCosts

Sizes = Sequence[int] | Mapping[int, int]
"""The bytes of each stage."""


class SliceBytes(NamedTuple):
    """The bytes of one slice of a microbatch on each stage: saved activations, keys, values and states for later slices
    among them, and the part that an input gradient is the last to read."""

    activations: Sizes
    freed_by_input_grad: Sizes


def bytes_of(costs: StageCosts) -> SliceBytes:
    """What a slice of these costs holds."""
    return SliceBytes(costs.activation_bytes, costs.freed_by_input_grad_bytes or (0,) * costs.stages)


def walk_activations(
    order: Sequence[Action],
    sizes: Sizes | None = None,
    freed_by_input_grad: Sizes | None = None,
    slices: Sequence[SliceBytes] = (),
) -> Iterator[tuple[int, int]]:
    """The saved activations of one rank, in bytes, while each of its actions runs and from the end of the action on.

    The forward of a microbatch takes its activations on the stage, and the backward frees them at its end. In a split
    backward the input gradient frees what it is the last to read, and the weight gradient the rest, which are the
    factors of the gradients of weights. The two halves of an overlapped pair hold theirs together.

    Args:
        order: the actions of the rank, in order.
        sizes: bytes of one microbatch on every stage; by default 1 each, for a count.
        freed_by_input_grad: the part of these bytes that an input gradient is the last to read; by default none.
        slices: where the order runs slices of microbatches, these bytes for each of them, instead.
    """
    held: Sizes = defaultdict(lambda: 1) if sizes is None else sizes
    early: Sizes = defaultdict(int) if freed_by_input_grad is None else freed_by_input_grad
    live = 0
    for action in order:
        freed = 0
        for part in action.parts or (action,):
            kind, stage = part.kind, part.stage
            if slices:
                held, early = slices[part.slice or 0]
            if kind is F:
                live += held[stage]
            elif kind is B:
                freed += held[stage]
            elif kind is I:
                freed += early[stage]
            elif kind is W:
                freed += held[stage] - early[stage]
        yield live, live - freed
        live -= freed


def peak_live(
    order: Sequence[Action],
    sizes: Sizes | None = None,
    freed_by_input_grad: Sizes | None = None,
    slices: Sequence[SliceBytes] = (),
) -> int:
    """The most saved activations that one rank holds at once; the arguments are those of `walk_activations`."""
    if sizes is None and freed_by_input_grad is None and not slices:
        return _peak_count(order)
    return max((live for live, _ in walk_activations(order, sizes, freed_by_input_grad, slices)), default=0)


def _peak_count(order: Sequence[Action]) -> int:
    """The most microbatches of any stage that one rank has live at once. Searches ask for that of every schedule."""
    live = most = 0
    for action in order:
        freed = 0
        for part in action.parts or (action,):
            kind = part.kind
            if kind is F:
                live += 1
            elif kind is B or kind is W:
                freed += 1
        most = max(most, live)
        live -= freed
    return most


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The sizes of one stage, in bytes."""

    activations: int
    """Activations saved for the backward of one microbatch."""
    working: int = 0
    """Temporary values of the passes of one microbatch, beside the saved activations."""
    gradients: int = 0
    """Gradients that no other stage of the rank has made before."""
    first_backward: int = 0
    """The most that the first backward has at once of activations, temporary values and the gradients that it makes."""
    freed_by_input_grad: int = 0
    """The part of the activations that the input gradient of a split backward is the last to read; below 0 where it
    leaves more to the weight gradient than was there."""
    input_grad: int | None = None
    """Temporary values of an input gradient by itself; None: as ``working``."""
    weight_grad: int | None = None
    """Temporary values of a weight gradient by itself; None: as ``working``."""
    first_weight_grad: int | None = None
    """The most that the first weight gradient has at once of what was left to it and of the gradients that it makes.
    None: not known, as if it left them to its end."""
    forward: int | None = None
    """Temporary values of a forward by itself; None: as ``working``."""
    backward_again: int | None = None
    """Those of a backward behind the first; None: as ``working``."""


class RankMemory(NamedTuple):
    """The memory of one rank while an action runs and from its end on, in bytes."""

    activations: int
    """Activations while the action runs, with those that it gives up at its end."""
    most: int
    """The most while the action runs: activations, gradients and temporary values at their fullest."""
    remaining: int
    """Activations from the end of the action on."""
    gradients: int
    """Gradients from the end of the action on."""

    @property
    def peak(self) -> int:
        """The most while the action runs and from its end on."""
        return max(self.most, self.remaining + self.gradients)


class Messages(NamedTuple):
    """The bytes of one rank's messages, action by action."""

    running: Sequence[int] = ()
    """While each action runs."""
    beginning: Sequence[int] = ()
    """When it begins, before it has made anything."""


NO_MESSAGES = Messages()


def walk_memory(
    order: Sequence[Action], stages: Mapping[int, StageMemory], messages: Messages = NO_MESSAGES
) -> Iterator[RankMemory]:
    """The memory of one rank at each of its actions, in order. ``stages`` are the sizes of every stage that it holds.

    Gradients of a stage appear with its first backward, and stay to the end of the step.
    """
    working = _working(stages)
    sizes = {at: stage.activations for at, stage in stages.items()}
    freed = {at: stage.freed_by_input_grad for at, stage in stages.items()}
    gradients = before = 0
    began: set[int] = set()
    sent = (each or (0,) * len(order) for each in messages)
    for action, (live, remaining), under_way, beginning in zip(
        order, walk_activations(order, sizes, freed), *sent, strict=True
    ):
        made = 0
        beside = -1
        for part in action.parts or (action,):
            stage = stages.get(part.stage, _NONE)
            alone = _beside(part, stage, working)
            if part.kind is B or part.kind is W:
                is_first = part.stage not in began
                if is_first:
                    began.add(part.stage)
                    made += stage.gradients
                elif part.kind is B and stage.backward_again is not None:
                    alone = stage.backward_again
            beside = max(beside, alone)
        most = live + gradients + beside
        if action.kind is B and is_first:  # its gradients come unit by unit as its activations go
            most = live - stage.activations + gradients + stage.first_backward
        elif action.kind is W and is_first and stage.first_weight_grad is not None:
            left = stage.activations - stage.freed_by_input_grad
            most = live - left + gradients + stage.first_weight_grad
        most = max(most + under_way, before + gradients + beginning)
        before = remaining
        gradients += made
        yield RankMemory(live, most, remaining, gradients)


def peak_below_sum(
    order: Sequence[Action],
    stages: Mapping[int, StageMemory],
    messages: Messages = NO_MESSAGES,
    most_messages: int = 0,
) -> int:
    """Bytes by which the peak of one rank is below the sum of all gradients, the most activations, the most temporary
    values and ``most_messages`` bytes of messages, which are not there at once. The other arguments are those of
    `walk_memory`.
    """
    memories = tuple(walk_memory(order, stages, messages))
    together = memories[-1].gradients + max(memory.activations for memory in memories) + _working(stages)
    return together + most_messages - max(memory.peak for memory in memories)


_ALONE = {F: "forward", I: "input_grad", W: "weight_grad"}


def peak_below_sum_of_slices(order: Sequence[Action], slices: Sequence[SliceBytes], gradients: int) -> int:
    """Bytes by which the peak of one rank is below the sum of its gradients and of the most activations, where
    sequences run in slices: gradients of a stage appear in the backward of its first slice, and activations of others
    are there beside them. ``gradients``: the bytes of those of all stages of the rank, taken to be divided evenly."""
    stages = {part.stage for action in order for part in action.flat if part.kind in (B, W)}
    began: set[int] = set()
    live = highest = 0
    for action, (most, remaining) in zip(order, walk_activations(order, slices=slices), strict=True):
        highest, held = max(highest, most), gradients * len(began) // max(1, len(stages))
        first = {part.stage for part in action.flat if part.kind in (B, W)} - began
        began |= first
        after = gradients * len(began) // max(1, len(stages))
        # The gradients of the first backward come as its activations go.
        live = max(live, most + held, remaining + after)
    return gradients + highest - live


def _beside(part: Action, stage: StageMemory, working: int) -> int:
    """The temporary values of an action, where no other action of the rank holds more than ``working``."""
    alone: int | None = getattr(stage, _ALONE[part.kind]) if part.kind in _ALONE else None
    return working if alone is None else alone


_NONE = StageMemory(0)


def _working(stages: Mapping[int, StageMemory]) -> int:
    """The most bytes of temporary values of any stage."""
    return max((stage.working for stage in stages.values()), default=0)
