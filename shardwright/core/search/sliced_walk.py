"""The memory of one pipeline rank whose sequences go through it in slices, from action to action.

The forward of a slice takes what it keeps, what it hands on to the next slice, and what waits until the last slice's is
there too. Its backward gives them up. The gradients of what a slice was handed go to the slice before it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.core.schedule.actions import Action, B, F, I, W


@dataclass(frozen=True, slots=True)
class SliceMemory:
    """One slice of a stage, in bytes of one microbatch."""

    kept: int
    """Saved for its backward."""
    handed_on: int
    """Memory that it takes and does not keep itself, as of keys and values: until the backward of the next slice."""
    waiting: int
    """What waits until the last slice's is there too, and is put together with it for the ops behind all."""
    joined: int
    """What is put together, from the last slice's forward to its backward."""
    gradients: int
    """Gradients of what it was handed, from its backward on to that of the slice before it."""
    forward: int
    """Held by its forward beside activations."""
    backward: int
    """The same of its backward, beside the gradients that it is handed too."""
    first_backward: int
    """The same with the gradients of parameters that it makes, where it is the stage's first backward."""
    made: int
    """The gradients of parameters that the first backward makes."""
    mask: int = 0
    """The mask of later keys that its attentions keep, which microbatches share."""
    left: int = 0
    """What the input gradient of a split backward leaves to its weight gradient: factors of gradients of weights."""
    input_grad: int = 0
    """Held by such an input gradient beside activations and what it was handed."""
    weight_grad: int = 0
    """Held by its weight gradient beside what was left to it."""
    first_weight_grad: int = 0
    """The same with the gradients of parameters that it makes, where it is the stage's first."""
    leaving: int = 0
    """Held beside activations by the stage's last backward, in which sums of gradients leave for other replicas."""
    tail: int | None = None
    """Held beside activations by a backward until its first bucket of gradients has left, where each sends its own.
    None: they add up."""
    under_way: int = 0
    """One such bucket whose sum is under way, from its backward on until the next one has left or a forward has run."""


class Moment(NamedTuple):
    """The memory of one rank at one action, in bytes."""

    begins: int
    """When it begins."""
    activations: int
    """Activations while it runs."""
    beside: int
    """What it holds beside these, without gradients of parameters."""
    most: int
    """The most while it runs, gradients of parameters among it."""
    early: int
    """The same if all gradients of parameters were there from the start."""
    ends: int
    """When it is over, without messages."""


def walk(
    order: Sequence[Action],
    of: Mapping[int, Sequence[SliceMemory]],
    messages: Sequence[int],
    beginning: Sequence[int],
) -> Iterator[Moment]:
    """The memory of one rank at each of its actions.

    Args:
        of: the slices of every stage of the rank.
        messages: the bytes of messages while each action runs.
        beginning: the same when it begins.
    """
    held = _Held(of, order)
    every = sum(slices[0].made for slices in of.values())
    for action, sent, there in zip(order, messages, beginning, strict=True):
        apart = held.live + held.given + held.under_way + there
        begins = most = apart + held.gradients
        early = apart + every
        activations = beside_most = 0
        for part in action.flat:
            if part.stage not in of:
                continue
            beside, later = held.begin(part)
            activations = max(activations, held.live)
            beside_most = max(beside_most, held.given + later + sent)
            most = max(most, held.live + held.given + held.gradients + beside + sent)
            early = max(early, held.live + held.given + every + later + sent)
            held.end(part)
        yield Moment(
            begins, activations, beside_most, most, early,
            held.live + held.given + held.gradients + held.under_way,
        )  # fmt: skip


def peaks(moments: Iterable[Moment]) -> tuple[int, int, int, int]:
    """The most activations, the most beside activations and gradients of parameters, the most of all at once, and that
    if all gradients were there from the start."""
    activations = beside = most = early = 0
    for one in moments:
        activations, beside = max(activations, one.activations), max(beside, one.beside)
        most, early = max(most, one.most), max(early, one.early)
    return activations, beside, most, early


class _Held:
    """What the rank holds now."""

    def __init__(self, of: Mapping[int, Sequence[SliceMemory]], order: Sequence[Action]) -> None:
        self.of = of
        self.live = 0
        self.given = 0
        """Gradients of what slices were handed."""
        self.gradients = 0
        """Gradients of parameters."""
        self.under_way = 0
        """The bucket of gradients whose sum is under way."""
        self._began: set[int] = set()
        self._last = {part.stage: part for action in order for part in action.flat if part.kind in (B, W)}
        """The last backward of every stage."""
        self._masked: dict[int, int] = {}
        """Slice → the passes that hold its mask."""

    def begin(self, part: Action) -> tuple[int, int]:
        """Begin an action; returns what it holds beside what there is, and the same where all gradients of parameters
        are there already."""
        number = part.slice or 0
        one = self.of[part.stage][number]
        if part.kind is F:
            self.live += one.kept + one.handed_on + one.waiting + (0 if self._masked.get(number) else one.mask)
            self._masked[number] = self._masked.get(number, 0) + bool(one.mask)
            return one.forward + self.under_way, one.forward + self.under_way
        is_first = part.kind in (B, W) and part.stage not in self._began
        if part.kind is not W:
            self.live -= one.joined
        if part.kind is B:
            beside, later = one.first_backward if is_first else one.backward, one.backward
            if one.tail is not None and not is_first:  # its first bucket leaves when the one under way has arrived
                return (both := max(one.tail + self.under_way, later)), both
        elif part.kind is I:
            beside = later = one.input_grad
        else:
            beside, later = one.first_weight_grad if is_first else one.weight_grad, one.weight_grad
        if part is self._last.get(part.stage):
            beside, later = max(beside, one.leaving), max(later, one.leaving)
        return beside + self.under_way, later + self.under_way

    def end(self, part: Action) -> None:
        """End an action."""
        number, slices = part.slice or 0, self.of[part.stage]
        one = slices[number]
        if part.kind is F:
            if number == len(slices) - 1:
                self.live += one.joined - sum(each.waiting for each in slices)
            self.under_way = 0  # what a forward ran beside has arrived
            return
        if part.kind is W:
            self.live -= one.left
        else:
            self.live -= one.kept + (slices[number - 1].handed_on if number else 0)
            self.live += one.left if part.kind is I else 0
            self._masked[number] = self._masked.get(number, 0) - bool(one.mask)
            self.live -= 0 if self._masked[number] else one.mask
            self.given += one.gradients - (slices[number + 1].gradients if number + 1 < len(slices) else 0)
        if part.kind in (B, W):
            self.gradients += one.made if part.stage not in self._began else 0
            self._began.add(part.stage)
            self.under_way = one.under_way
