"""The messages of a step: the messages that every action of a schedule takes from other ranks, and those that it
sends."""

from collections.abc import Sequence

from shardwright.backends.torch.machine.pipeline_messages import Key, Message, Shape
from shardwright.backends.torch.program.stages import Division, Edge
from shardwright.core.schedule import Schedule
from shardwright.core.schedule.actions import Action, Kind
from shardwright.core.schedule.passes.slices_as_stages import StageNames

COMPUTED = {
    False: (Kind.FORWARD,),
    True: (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD),
}
"""The kinds of action that a step runs: without a loss there are forward passes alone."""


def microbatch_of(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch


class Traffic:
    """Activations and gradients between the stages of a division.

    Args:
        divisions: for each microbatch the program, divided into as many stages as the schedule has.
        rank: this rank's coordinate on pp.
        names: of the stages, for messages to people.

    Attributes:
        actions: the actions of this rank, in order.
        incoming: the messages of the others to this rank, each in the order of its sender's schedule.
        taken: for some of these, the messages that this rank had sent to their source and the source had taken
            before it made them.
        pairs: the (source, target) coordinates between which anything is sent, on any rank.
    """

    def __init__(self, divisions: Sequence[Division], schedule: Schedule, rank: int, names: StageNames) -> None:
        self.divisions, self.schedule, self.rank, self.names = divisions, schedule, rank, names
        self.trains = bool(divisions[0].program.losses)
        self._messages = self._all_messages()
        self.actions = self._run_by(rank)
        incoming: list[Message] = []
        self.taken: dict[Key, tuple[Key, ...]] = {}
        for source in range(schedule.ranks):
            taken: list[Key] = []
            for action in self._run_by(source) if source != rank else ():
                taken += [message.key for message in self.needs(action) if message.source == rank]
                for message in self.departures(action):
                    if message.target == rank:
                        incoming.append(message)
                        self.taken[message.key] = tuple(taken)
                        taken.clear()
        self.incoming = tuple(incoming)
        self.pairs = sorted({(m.source, m.target) for m in self._messages.values()})

    def _run_by(self, rank: int) -> tuple[Action, ...]:
        kinds = COMPUTED[self.trains]
        return tuple(part for action in self.schedule.table[rank] for part in action.flat if part.kind in kinds)

    def _all_messages(self) -> dict[Key, Message]:
        found: dict[Key, Message] = {}
        tag = 0
        for mb, division in enumerate(self.divisions):
            values = division.program.values
            for edge in division.edges:
                source, target = (self.schedule.stage_to_rank(s) for s in (edge.source, edge.target))
                if source == target:
                    continue
                activations = f"activations of microbatch {mb} from {self.names.text(edge.source)}"
                gradients = f"gradients of microbatch {mb} from {self.names.text(edge.target)}"
                for ends, gradient, held, text in (
                    ((source, target), False, edge.values, activations),
                    ((target, source), True, edge.gradients, gradients),
                ):
                    if held:
                        shapes = tuple(Shape(values[v].shape, values[v].dtype) for v in held)
                        key = (edge.index, mb, gradient)
                        found[key] = Message(key, *ends, shapes, tag, text)
                        tag += len(held)
        return found

    def message(self, edge: Edge, mb: int, gradient: bool) -> Message | None:
        """The message that carries an edge's values, or their gradients; None where both stages are on one rank."""
        return self._messages.get((edge.index, mb, gradient))

    def departures(self, action: Action) -> list[Message]:
        """The messages that an action sends to other ranks."""
        return self._of(action, sent=True)

    def needs(self, action: Action) -> list[Message]:
        """The messages that an action takes from other ranks."""
        return self._of(action, sent=False)

    def _of(self, action: Action, *, sent: bool) -> list[Message]:
        mb, gradient = microbatch_of(action), action.kind is not Kind.FORWARD
        if action.kind is Kind.WEIGHT_GRAD:
            return []
        part = self.divisions[mb].parts[action.stage]
        found = (self.message(edge, mb, gradient) for edge in (part.receives if sent is gradient else part.sends))
        return [message for message in found if message is not None]
