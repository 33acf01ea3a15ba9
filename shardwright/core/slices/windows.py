"""Ops whose result for a token reads some tokens before it: shifts, and convolutions that are padded in front.

A pad is one by zeros, or zeros put in front; a shift is a pad in front and a cut behind, in either order.

A convolution is causal where its padding in front is as long as what its window reads before a token, in one of two
forms: the sequence is padded by itself in front, or the convolution pads both ends and what lies behind the sequence is
cut off. A slice is handed the last tokens of the slices before it in the place of the padding.
"""

from dataclasses import dataclass

from shardwright.core.model.graph import Graph, Op

AHEAD = "reads later tokens (expected padding of all that its window is longer than one, in front alone)"

ZEROS = frozenset({"zeros", "zeros_like", "new_zeros"})
TURNS = frozenset({"transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "mT", "t", "contiguous"})
"""The ops that leave all entries as they are and take no sizes."""


@dataclass(frozen=True, slots=True)
class _Longer:
    """A tensor longer than its sequence: by entries in front, or behind."""

    front: int = 0
    behind: int = 0


class Windows:
    """The rules of these ops.

    Args:
        dims: tensor → its sequence dim.
        flat: tensor whose dim is batch and sequence in one.

    Attributes:
        tails: op → the tensor of whose earlier entries it is handed the last, and how many of these.
        cuts: the ops that leave as many entries as there are tokens, in slices.
    """

    def __init__(self, graph: Graph, dims: dict[int, int], flat: dict[int, int], tokens: int) -> None:
        self.graph, self.dims, self.flat, self.tokens = graph, dims, flat, tokens
        self.tails: dict[int, tuple[int, int]] = {}
        self.cuts: set[int] = set()
        self._longer: dict[int, _Longer] = {}
        self._users: dict[int, list[Op]] = {}
        for op in graph.ops:
            for tensor in set(op.inputs):
                self._users.setdefault(tensor, []).append(op)

    @property
    def apart(self) -> frozenset[int]:
        """The tensors that are longer than their sequence."""
        return frozenset(self._longer)

    def read(self, number: int, op: Op) -> str | None:
        """Note what an op does with windows: '' where it is known, a reason where it cannot run in slices, and None
        where it is left to the op's labels."""
        given = [tensor for tensor in op.inputs if tensor in self.dims]
        if op.kind == "concat" and len(op.inputs) == 2 and given == [op.inputs[1]] and given[0] not in self.flat:
            found = self._put_in_front(number, op)
            if found is not None:
                return found
        if op.base_name in ("slice", "narrow") and len(given) == 1 and given[0] not in {**self.flat, **self._longer}:
            return self._begin_shift(number, op)
        if not given or given[0] != op.inputs[0]:
            return "needs windows of the sequence" if self._longer.keys() & set(given) else None
        longer = self._longer.get(given[0])
        is_window = len(given) == 1 and given[0] not in self.flat and bool(op.offsets)
        if is_window and op.base_name in ("pad", "constant_pad_nd") and longer is None:
            return self._pad(number, op)
        if is_window and op.base_name in ("conv1d", "convolution", "_convolution"):
            return self._convolve(number, op, longer or _Longer())
        if longer is None:
            return "needs windows of the sequence" if self._longer.keys() & set(given) else None
        if is_window and op.base_name in ("slice", "narrow"):
            return self._cut(number, op, longer)
        if len(given) == 1 and (op.base_name in TURNS or op.kind == "elementwise") and longer.behind >= 0:
            return self._on_each(op, longer)
        return "needs windows of the sequence"

    def _pad(self, number: int, op: Op) -> str | None:
        (given,), (made,) = op.inputs, op.outputs
        dim = self.dims[given]
        before, after = self.graph.tensors[given], self.graph.tensors[made]
        others = [d for d in range(len(before.fixed)) if d != dim]
        front = op.offsets[dim]
        more = after.fixed[dim] - before.fixed[dim]
        if not front and not more:
            return None
        if [before.fixed[d] for d in others] != [after.fixed[d] for d in others]:
            return "pads more than the sequence"
        if front and more in (0, front):
            self.tails[number] = given, front
            self.dims[made] = dim
            if more:
                self._longer[made] = _Longer(front=front)
            return ""
        return "pads the sequence behind its end, or cuts into it"

    def _put_in_front(self, number: int, op: Op) -> str | None:
        """Zeros in front of a sequence, or of all but its last tokens."""
        (zeros, given), (made,) = op.inputs, op.outputs
        dim, tensors = self.dims[given], self.graph.tensors
        front = tensors[made].fixed[dim] - tensors[given].fixed[dim]
        longer = self._longer.get(given, _Longer())
        is_along = front > 0 and not tensors[made].per_sample[dim] and tensors[zeros].fixed[dim] == front
        if not is_along or not self._is_zeros(zeros) or tensors[given].dtype != tensors[made].dtype:
            return None
        if longer.front or longer.behind not in (0, -front):
            return "needs windows of the sequence"
        self.tails[number] = given, front
        self.dims[made] = dim
        if not longer.behind:
            self._longer[made] = _Longer(front=front)
        return ""

    def _begin_shift(self, number: int, op: Op) -> str | None:
        """All but the last tokens, which are put behind zeros next."""
        (given,), made = op.inputs, op.outputs
        dim, tensors = self.dims[given], self.graph.tensors
        less = self.tokens - tensors[made[0]].fixed[dim]
        if len(made) != 1 or op.offsets != (0,) or tensors[given].fixed[dim] != self.tokens or less <= 0:
            return None
        if self._sizes(given, dim) != self._sizes(made[0], dim) or made[0] in self.graph.outputs:
            return None
        for user in self._users.get(made[0], ()):
            if user.kind != "concat" or len(user.inputs) != 2 or user.inputs[1] != made[0]:
                return None
            held = tensors[user.inputs[0]]
            if not self._is_zeros(user.inputs[0]) or len(held.fixed) <= dim or held.fixed[dim] != less:
                return None
            if tensors[user.outputs[0]].fixed[dim] != self.tokens:
                return None
        if not self._users.get(made[0]):
            return None
        self.dims[made[0]] = dim
        self._longer[made[0]] = _Longer(behind=-less)
        self.cuts.add(number)
        return ""

    def _is_zeros(self, tensor: int) -> bool:
        maker = self.graph.producer.get(tensor)
        return maker is not None and self.graph.ops[maker].base_name in ZEROS

    def _convolve(self, number: int, op: Op, longer: _Longer) -> str:
        padding, span, stride = op.offsets
        (made,) = op.outputs
        given = self.graph.tensors[op.inputs[0]]
        dim = len(given.fixed) - 1
        more = self.graph.tensors[made].fixed[dim] - self.tokens
        if self.dims[op.inputs[0]] != dim or len(given.fixed) != 3:
            return "convolves over more than the sequence"
        if stride != 1:
            return "convolves in steps of more than one token"
        left = longer.front + padding - (span - 1)
        if longer.behind or left < 0 or (padding and (longer.front or left)) or more != padding + left:
            return AHEAD
        self.dims[made] = dim
        if left:  # of the padding, for the next convolution
            self._longer[made] = _Longer(front=left)
        if padding:
            self.tails[number] = op.inputs[0], padding
            self._longer[made] = _Longer(behind=padding)
        return ""

    def _cut(self, number: int, op: Op, longer: _Longer) -> str:
        (given,), made = op.inputs, op.outputs
        dim = self.dims[given]
        if len(made) != 1 or op.offsets[0] or self.graph.tensors[made[0]].fixed[dim] != self.tokens:
            return AHEAD
        if self._sizes(given, dim) != self._sizes(made[0], dim):
            return AHEAD
        self.dims[made[0]] = dim
        self.cuts.add(number)
        return ""

    def _on_each(self, op: Op, longer: _Longer) -> str:
        """An op on each entry, such as the bias of a convolution."""
        label = op.input_labels[0][self.dims[op.inputs[0]]]
        if op.role(label) != "map" or any(label in labels for labels in op.input_labels[1:]):
            return "needs windows of the sequence"
        for tensor, labels in zip(op.outputs, op.output_labels, strict=True):
            if labels.count(label) != 1:
                return "needs windows of the sequence"
            self.dims[tensor] = labels.index(label)
            self._longer[tensor] = longer
        return ""

    def _sizes(self, tensor: int, dim: int) -> list[tuple[int, int]]:
        """The sizes of the other dims."""
        held = self.graph.tensors[tensor]
        return [s for d, s in enumerate(zip(held.fixed, held.per_sample, strict=True)) if d != dim]
