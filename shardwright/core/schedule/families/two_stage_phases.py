"""A tape on which the two-stage families write their phases: `F0 F1` for a forward on each of a rank's two stages."""

from collections.abc import Sequence

from shardwright.core.schedule.actions import Action, B, I, Kind, W, cell
from shardwright.core.schedule.family import Order


class Tape:
    """The order of one rank. A word is a kind and the number of one of the rank's stages; each kind takes the
    microbatches of a stage in order. `W` alone is the oldest weight gradient still owed; `F0+B1` runs the two
    overlapped.
    """

    def __init__(self, stages: Sequence[int]) -> None:
        self.stages = stages
        self.order: list[Action] = []
        self._next: dict[tuple[Kind, int], int] = {}
        self._owed: list[tuple[int, int]] = []

    def play(self, times: int, words: str) -> None:
        """Write the words so many times; nothing when `times` is negative."""
        for _ in range(times):
            for word in words.split():
                self._write(word)

    def finish(self, microbatches: int) -> Order:
        """The order, without the actions beyond the last microbatch."""
        return tuple(action for action in self.order if (action.microbatch or 0) < microbatches)

    def _write(self, word: str) -> None:
        if "+" in word:
            forward, backward = word.split("+")
            self.order.append(Action.overlap(self._take(forward), self._take(backward)))
        elif word == "W":
            if self._owed:
                chunk, mb = self._owed.pop(0)
                self.order.append(cell(self.stages[chunk], W, mb))
        else:
            self.order.append(self._take(word))

    def _take(self, word: str) -> Action:
        kind, chunk = Kind(word[0]), int(word[1])
        if kind is W:
            self._owed.remove(next(owed for owed in self._owed if owed[0] == chunk))
        # A whole backward and the input gradient of a split one count the same microbatches.
        counter = (I if kind is B else kind, chunk)
        mb = self._next.get(counter, 0)
        self._next[counter] = mb + 1
        if kind is I:
            self._owed.append((chunk, mb))
        elif kind is B:
            self._next[(W, chunk)] = self._next.get((W, chunk), 0) + 1
        return cell(self.stages[chunk], kind, mb)
