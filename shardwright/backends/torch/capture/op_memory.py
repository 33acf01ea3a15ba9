"""What autograd keeps of an op, and what its passes hold for a while: every kind of call is run once, without values.

Calls are seen with the sizes of both runs of a capture, so that bytes are linear in the batch, and in float32 as in 16
bits. A call that fails, or whose bytes are no line in the batch, is counted from above.
"""

from collections.abc import Iterator, Sequence

from shardwright.backends.torch.capture.call_forms import CallForm, typed_as
from shardwright.backends.torch.capture.call_trials import Seen, seen_of
from shardwright.core.model.op_memory import Line, OpBytes, OpMemory


class OpMemories:
    """The memory of the calls of one capture; equal calls are run once."""

    def __init__(self, sizes: tuple[int, int], *, narrow: bool) -> None:
        """``narrow``: whether the second run of the capture was in 16 bits."""
        self._sizes, self._narrow = sizes, narrow
        self._seen: dict[tuple[int, bool], Seen | None] = {}
        self._found: dict[tuple[int, int], tuple[OpMemory, ...]] = {}
        self._calls: list[CallForm] = []

    def of(self, small: CallForm, large: CallForm | None) -> tuple[OpMemory, ...]:
        """The memory of the pieces of a call, seen at both batch sizes; ``large``: None where it is the same at
        both."""
        large = large or small
        key = id(small), id(large)
        if key not in self._found:
            self._calls += [small, large]  # so that their ids stay theirs
            self._found[key] = self._combined(small, large)
        return self._found[key]

    def _combined(self, small: CallForm, large: CallForm) -> tuple[OpMemory, ...]:
        try:
            wide, narrow = self._runs(small, large)
        except (ValueError, AttributeError, TypeError):  # the calls differ in more than their sizes
            return _unknown(small)
        runs = [seen for seen in (*wide, *narrow) if seen is not None]
        same = (small.func, small.pieces, small.inputs, small.outer) == (
            large.func, large.pieces, large.inputs, large.outer
        )  # fmt: skip
        if len(runs) < len(wide) + len(narrow) or not same or _is_no_line(*wide) or _is_no_line(*narrow):
            return _unknown(small)
        keeps = set(frozenset.union(*(seen.keeps for seen in runs)))
        handed_on = frozenset.intersection(*(seen.handed_on for seen in runs))
        weightless = frozenset.intersection(*(seen.weightless for seen in runs))
        if small.is_product:
            return tuple(self._of_product(small, *wide, *narrow))
        found, head = [], small.head
        backward = small.backward_pieces(len(runs[0].gradients))
        for piece, (slots, inputs) in enumerate(zip(small.pieces, small.inputs, strict=True)):
            kept = [place for place, slot in enumerate(slots) if slot in keeps]
            keeps -= set(slots)
            found.append(
                OpMemory(
                    tuple(kept),
                    tuple(n for n in range(inputs) if slots[n] in handed_on or slots[n] >= small.outer),
                    tuple(n for n in range(inputs) if slots[n] in weightless),
                    tuple(n for n, slot in enumerate(slots) if slot >= small.outer),
                    self._bytes(*wide, slots, is_head=piece == head, has_backward=piece in backward),
                    self._bytes(*narrow, slots, is_head=piece == head, has_backward=piece in backward),
                )
            )
        return tuple(found)

    def _of_product(self, call: CallForm, *runs: Seen | None) -> Iterator[OpMemory]:
        """The memory of the pieces of a product: what it keeps is seen, the rest follows from its kind."""
        small, large, small_narrow, large_narrow = (seen for seen in runs if seen is not None)
        keeps = small.keeps | large.keeps | small_narrow.keeps | large_narrow.keeps
        kept = OpBytes(self._line(small.kept, large.kept)), OpBytes(self._line(small_narrow.kept, large_narrow.kept))
        for piece, (slots, inputs) in enumerate(zip(call.pieces, call.inputs, strict=True)):
            yield OpMemory(
                tuple(place for place, slot in enumerate(slots) if slot in keeps and piece == call.head),
                tuple(n for n in range(inputs) if slots[n] >= call.outer),
                (),
                (),
                *(kept if piece == call.head else (OpBytes(), OpBytes())),
            )

    def _runs(
        self, small: CallForm, large: CallForm
    ) -> tuple[tuple[Seen | None, Seen | None], tuple[Seen | None, Seen | None]]:
        """The runs at both batch sizes, in float32 and in 16 bits. In 16 bits a call has the dtypes of the second run,
        which has in float32 what the model casts to that."""
        in_16_bits = (typed_as(small, large), large) if self._narrow else (small, large)
        wide = self._run(small, narrow=False), self._run(typed_as(large, small), narrow=False)
        small_narrow, large_narrow = (self._run(call, narrow=not self._narrow) for call in in_16_bits)
        narrow = small_narrow, large_narrow
        return (narrow if None in wide else wide), (wide if None in narrow else narrow)

    def _bytes(
        self, small: Seen | None, large: Seen | None, slots: Sequence[int], *, is_head: bool, has_backward: bool
    ) -> OpBytes:
        """The bytes of one piece of a call. What is kept and what the forward holds is counted at the ``is_head`` one,
        what the backward holds at those in `CallForm.backward_pieces`."""
        assert small is not None
        assert large is not None
        inputs = len(small.gradients)
        backward = []
        for seen in (small, large):
            given = {slot for slot in slots if slot < inputs}
            backward.append(seen.backward - sum(seen.gradients[slot] for slot in given))
        return OpBytes(
            self._line(small.kept, large.kept) if is_head else (0, 0),
            self._line(small.forward, large.forward) if is_head else (0, 0),
            self._line(*backward) if has_backward else (0, 0),
        )

    def _line(self, small: int, large: int) -> Line:
        each = (large - small) // (self._sizes[1] - self._sizes[0])
        return small - each * self._sizes[0], each

    def _run(self, call: CallForm, *, narrow: bool) -> Seen | None:
        key = id(call), narrow
        if key not in self._seen:
            self._calls.append(call)
            self._seen[key] = seen_of(call, narrow=narrow)
        return self._seen[key]


def _unknown(call: CallForm) -> tuple[OpMemory, ...]:
    """The pieces of a call whose memory is not known."""
    return tuple(OpMemory(keeps=tuple(range(len(slots))), is_known=False) for slots in call.pieces)


def _is_no_line(small: Seen | None, large: Seen | None) -> bool:
    """Whether bytes of a call beside its tensors grow faster than the batch, as those of all pairs of samples do."""
    if small is None or large is None:
        return False
    held = (large.kept, large.forward, large.backward - sum(large.gradients))
    return small.grows_along_two_dims(large) and any(size > 0 for size in held)
