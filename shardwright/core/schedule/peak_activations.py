"""How much is live: activations between a forward and the backward that uses them."""

from collections.abc import Iterable, Sequence

from shardwright.core.schedule.actions import Action, B, F, I, W


def peak_live(
    actions: Iterable[Action], sizes: Sequence[int] | None = None, given_up: Sequence[int] | None = None
) -> int:
    """The most that one rank holds at once, in the order in which it runs its actions.

    An activation is held from the start of its forward to the end of its backward, of its weight gradient where the
    backward is split; both halves of an overlapped pair hold theirs together. `sizes` are bytes per stage; default 1.
    `given_up` are those of them that the input gradient of a split backward is the last to read; default none.
    """
    live = peak = 0
    early: dict[int, int] = dict(enumerate(given_up)) if given_up is not None else {}
    for action in actions:
        freed = 0
        for part in action.parts or (action,):
            if part.kind is F:
                live += 1 if sizes is None else sizes[part.stage]
            elif part.kind is I:
                freed += early.get(part.stage, 0)
            elif part.kind is B or part.kind is W:
                freed += 1 if sizes is None else sizes[part.stage]
                freed -= early.get(part.stage, 0) if part.kind is W else 0
        peak = max(peak, live)
        live -= freed
    return peak
