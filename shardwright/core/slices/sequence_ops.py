"""What each op of a model needs of the other tokens of a sequence: which models can run slice after slice.

A sequence runs in slices where each op needs of other tokens nothing (it is local), or only what came before them (it
is causal, and the slices before hand keys and values on). The labels of ops say which: following the sequence dim from
the first parameters that meet the tokens, an op that maps its label is local, and attention whose queries may not be
split in space is causal, since a shard of the queries would not know where it begins. Attention under a mask is causal
where the mask is, which its values say.

What follows from inputs and parameters apart (positions, masks, shifted labels) is there whole before the first slice,
whatever ops it took, and each slice takes its part. What needs all tokens can still run once, behind the last slice, in
the last unit (a loss, a pooled output); elsewhere the model cannot run in slices (TeraPipe, section 3.1).

Attention that is written out is a product of tokens with tokens, whose results are scores of queries by keys, a mask
that hides later keys, and what softmax makes of them (`core.slices.scores`). Shifts, convolutions that are padded in
front, and cumulative sums are causal and need a few of the entries before a slice (`core.slices.windows`). Mixtures of
experts, which put tokens in another order and back, are local (`core.slices.routed_rows`).

What nothing reads in the end, such as the states that a cache would keep, may need what it will: slices leave it out.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardwright.core.errors import CaptureError
from shardwright.core.model.fold import fold
from shardwright.core.model.graph import Graph, Op
from shardwright.core.slices.routed_rows import RESHAPES, Routed, RoutedRows
from shardwright.core.slices.scores import BOTH_WAYS, TOGETHER, Scores, Told
from shardwright.core.slices.windows import Windows

Need = Literal["constant", "local", "causal", "all", "unused"]
"""What an op needs: nothing that slices make, what its own slice makes, what those before made too, or all of it; or it
needs all of it for what nothing reads, and does not run."""
TOKEN_TYPES = ("int32", "int64", "uint32")
CUMULATIVE = ("cumsum", "cumprod", "logcumsumexp")
"""Ops whose result for a token follows from its own entry and the result for the one before."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """An op that needs all tokens of the sequence, in a unit that others follow."""

    op: int
    reason: str


@dataclass(frozen=True, slots=True)
class SequenceOps:
    """The ops of a graph by what they need of the sequence.

    Attributes:
        dims: tensor → its sequence dim, for those that slices make.
        flat: those of them whose dim is batch and sequence in one, a sample's tokens next to each other → the rows of
            each token.
        constants: tensor → the dim along which ops take of it what belongs to their slice, of those that are there
            whole before the first slice (positions, rotary tables, labels).
        needs: of every op.
        carried: causal op → the tensors of which it needs all that earlier slices made: keys and values.
        masks: attention → its mask of [.., queries, keys], which has to hide later keys from each query.
        obstacles: why the model cannot run in slices; empty where it can.
        keys: tensor → its dim of keys, for the scores of attention that is written out, and what follows from them: a
            slice has those of all slices up to it.
        key_constants: constant → the dim along which ops take of it what belongs to these keys.
        more_keys: tensor of scores → the entries behind those of the keys.
        hides: op → the mask by which it hides later keys in scores.
        tails: causal op that needs no more than the last entries of the slices before → of which tensor, and how many.
        cuts: the ops that cut what a pad or a convolution made longer to as many entries as there are tokens.
        routed: mixtures of experts.
        apart: tensors that cannot be put together from slices.
    """

    dims: Mapping[int, int]
    flat: Mapping[int, int]
    constants: Mapping[int, int]
    needs: tuple[Need, ...]
    carried: Mapping[int, tuple[int, ...]]
    masks: Mapping[int, int]
    obstacles: tuple[Obstacle, ...]
    keys: Mapping[int, int] = field(default_factory=dict)
    key_constants: Mapping[int, int] = field(default_factory=dict)
    more_keys: Mapping[int, int] = field(default_factory=dict)
    hides: Mapping[int, int] = field(default_factory=dict)
    tails: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    cuts: frozenset[int] = frozenset()
    routed: Routed = field(default_factory=Routed)
    apart: frozenset[int] = frozenset()


def sequence_inputs(graph: Graph) -> dict[int, int]:
    """The sequence dim of each input that has one: dim 1 of the tokens, which are the first input of whole numbers with
    two dims or more, and dims of their length in the other inputs; where there are no tokens, dim 1 of the first input
    of three dims.

    Raises CaptureError where no input has such a dim.
    """
    held = [(tensor, graph.tensors[tensor]) for tensor in graph.inputs]
    tokens = [(n, t) for n, t in held if t.dtype in TOKEN_TYPES and len(t.fixed) >= 2 and t.per_sample[0]]
    vectors = [(n, t) for n, t in held if t.is_floating and len(t.fixed) == 3 and t.per_sample[0]]
    if not (tokens or vectors):
        raise CaptureError(
            f"{graph.model_name} has no sequence among its inputs: expected tokens of shape [batch, sequence], or "
            f"vectors of shape [batch, sequence, width]"
        )
    first = (tokens or vectors)[0][1]
    length = first.fixed[1]
    found: dict[int, int] = {}
    for number, tensor in held:
        dims = [d for d, size in enumerate(tensor.fixed) if size == length and not tensor.per_sample[d]]
        if dims and tensor.has_batch:
            found[number] = 1 if 1 in dims else dims[0]
    return found


def sequence_ops(graph: Graph, inputs: Mapping[int, int] | None = None) -> SequenceOps:
    """Sort the ops of a graph by what they need of the sequence.

    Args:
        inputs: input → its sequence dim; default: `sequence_inputs`.

    Raises CaptureError where no input has a sequence.
    """
    reading = _Reading(graph, dict(sequence_inputs(graph) if inputs is None else inputs))
    for number, op in enumerate(graph.ops):
        reading.read(number, op)
    last = fold(graph).units[-1].first_op
    obstacles = tuple(
        Obstacle(op, why) for op, why in reading.mixing.items() if op < last or op in reading.beyond_the_end
    )
    return SequenceOps(
        reading.dims,
        reading.flat,
        reading.constants,
        tuple(reading.needs),
        reading.carried,
        reading.masks,
        obstacles,
        reading.scores.dims,
        reading.scores.constants,
        reading.scores.more,
        reading.scores.hides,
        reading.tails,
        frozenset(reading.windows.cuts),
        reading.rows.found,
        reading.apart,
    )


class _Reading:
    """The sequence dims of tensors, as they follow from one op to the next."""

    def __init__(self, graph: Graph, inputs: dict[int, int]) -> None:
        self.graph = graph
        self.dims: dict[int, int] = {}
        self.given = inputs
        """The sequence dims of tensors that follow from the inputs alone."""
        self.flat: dict[int, int] = {}
        self.constants: dict[int, int] = {}
        self.needs: list[Need] = []
        self.carried: dict[int, tuple[int, ...]] = {}
        self.masks: dict[int, int] = {}
        self.scores = Scores(graph, self.dims)
        self.mixing: dict[int, str] = {}
        """Op → why it needs all tokens, for the first ones on each way."""
        self.beyond_the_end: set[int] = set()
        """Ops that need all of what means something in its slice alone, which no last unit helps."""
        first = next(iter(inputs))
        self.tokens = graph.tensors[first].fixed[inputs[first]]
        self.rows = RoutedRows(graph, self.dims, self.flat, self.tokens)
        self.windows = Windows(graph, self.dims, self.flat, self.tokens)
        self.tails: dict[int, tuple[int, int]] = {}
        self._read_in_the_end = _read_in_the_end(graph)
        self._whole: set[int] = set()
        """Tensors that are there only once all slices have run."""
        self._of_parameters = {parameter.tensor for parameter in graph.parameters}
        """Tensors that follow from parameters, and from no token."""

    def read(self, number: int, op: Op) -> None:
        """Sort one op, whose operands are known."""
        if self._whole.intersection(op.inputs):
            if self._need_all(number, op) and number in self.beyond_the_end:
                self.mixing[number] = f"{op.name}{self._where(op)} needs what means something in one slice alone"
            return
        is_apart = bool(self.apart.intersection(op.inputs))
        if not is_apart and not any(tensor in self.dims for tensor in op.inputs) and not self._begins(op):
            self.needs.append("constant")
            return
        if op.base_name in RESHAPES and self._regrouped(op):
            self.needs.append("local")
            return
        why = None
        if not self.scores.dims.keys() & set(op.inputs):
            why = self.rows.read(number, op)
            if why is None:
                why = self.windows.read(number, op)
        if why is None:
            told = self._told(op)
            why = told.why or self._follow(op, told.label) or self.scores.follow(number, op, told, self.constants)
            self.rows.follow(op)
        else:
            told = Told()
        while self.rows.made_with_slices:
            self.needs[self.rows.made_with_slices.pop()] = "local"
        if why:
            if self._need_all(number, op):
                self.mixing[number] = f"{op.name}{self._where(op)} {why}"
        elif number in self.windows.tails or told.carried == op.outputs:
            self.needs.append("causal")
            self.tails[number] = self.windows.tails.get(number) or (op.outputs[0], 1)
        elif told.carried:
            self.needs.append("causal")
            self.carried[number] = told.carried
            if op.kind == "attention" and len(op.inputs) > 3:
                self.masks[number] = op.inputs[3]
        else:
            self.needs.append("local")

    @property
    def apart(self) -> frozenset[int]:
        """The tensors that mean something in their slice alone."""
        return self.rows.apart | self.windows.apart

    def _need_all(self, number: int, op: Op) -> bool:
        """Note an op that needs all tokens; False where nothing reads what it makes."""
        self._whole.update(op.outputs)
        is_read = bool(self._read_in_the_end.intersection(op.outputs))
        self.needs.append("all" if is_read else "unused")
        if is_read and self.apart.intersection(op.inputs):
            self.beyond_the_end.add(number)
        return is_read

    def _begins(self, op: Op) -> bool:
        """Whether parameters meet tokens here, so that slices begin; else notes what follows of what is there whole."""
        given = [tensor for tensor in op.inputs if tensor in self.given]
        reads_parameters = bool(self._of_parameters.intersection(op.inputs))
        if given and reads_parameters:
            self.dims.update((tensor, self.given[tensor]) for tensor in given)
            return True
        if reads_parameters:
            self._of_parameters.update(op.outputs)
        for tensor, labels in zip(op.inputs, op.input_labels, strict=False):
            if tensor not in self.given:
                continue
            dim = self.given[tensor]
            for made, those in zip(op.outputs, op.output_labels, strict=True):
                if labels[dim] >= 0 and labels[dim] in those:
                    self.given.setdefault(made, those.index(labels[dim]))
                elif self.graph.tensors[made].shape(2) == self.graph.tensors[tensor].shape(2):
                    self.given.setdefault(made, dim)
        return False

    def _where(self, op: Op) -> str:
        path = self.graph.calls[op.call].path
        return f" in {path}" if path else ""

    def _told(self, op: Op) -> Told:
        """What an op does with the labels of the sequence in its operands."""
        if op.kind == "attention":
            return self._attention(op)
        if self.scores.dims.keys() & set(op.inputs):
            return self.scores.told(op)
        labels = {labels[self.dims[t]] for t, labels in zip(op.inputs, op.input_labels, strict=False) if t in self.dims}
        if len(labels) > 1:
            return Told(why=TOGETHER) if self._is_flat(op) else self.scores.made(op)
        (label,) = labels
        role = op.role(label)
        if role == "map":
            return Told(label)
        if op.base_name in CUMULATIVE and label >= 0 and len(op.outputs) == 1 and not self._is_flat(op):
            return Told(label, carried=op.outputs)
        said = {
            "sum": "adds up over the sequence",
            "index": "looks up along the sequence",
            "statistic": "takes statistics over the sequence",
            "whole": "needs the sequence whole",
        }
        return Told(why=said[role])

    def _attention(self, op: Op) -> Told:
        query, key, *_ = op.input_labels
        of_query, of_key, of_value = (self.dims.get(tensor) for tensor in op.inputs[:3])
        if of_query is None or (of_key is None) != (of_value is None):
            return Told(why="attends with queries, keys and values not all of the sequence")
        label = query[of_query]
        if of_key is None:  # to what another sequence says
            return Told(label) if op.role(label) == "map" else Told(why="attends to another sequence causally")
        if any(tensor in self.dims for tensor in op.inputs[3:]):
            return Told(why="attends by a mask that the tokens' vectors make")
        if label < 0 or key[of_key] < 0:
            return Told(why="attends along no dim of the sequence")
        if op.role(label) == "whole" or (label != key[of_key] and self._is_square(op)):
            return Told(label, carried=op.inputs[1:3])
        return Told(why=BOTH_WAYS)

    def _is_square(self, op: Op) -> bool:
        """Whether an attention has a mask of queries by keys."""
        if len(op.inputs) <= 3:
            return False
        query = self.dims[op.inputs[0]]
        length = self._length(op.inputs[0], query)
        mask = op.inputs[3]
        rank = len(self.graph.tensors[mask].fixed)
        return rank >= 2 and [self._length(mask, rank - 2), self._length(mask, rank - 1)] == [length, length]

    def _follow(self, op: Op, label: int) -> str:
        """Note the sequence dims of an op's outputs, and of the constants that it meets; returns why that cannot be, or
        ''."""
        length = None
        for tensor, labels in zip(op.inputs, op.input_labels, strict=False):
            if tensor in self.dims and op.kind != "attention":
                length = self._length(tensor, self.dims[tensor])
            elif (
                tensor not in self.dims and label in labels and not (op.kind == "attention" and tensor in op.inputs[3:])
            ):
                dim = labels.index(label)
                if self._length(tensor, dim) == (1, 0):
                    continue
                if self.graph.tensors[tensor].per_sample[dim] and not self._is_flat(op):
                    return "takes what was made for all tokens of the batch at once"
                if labels.count(label) > 1 or self.constants.setdefault(tensor, dim) != dim:
                    return "takes a constant along two dims of it"
        made: dict[int, int] = {}
        for tensor, labels in zip(op.outputs, op.output_labels, strict=True):
            if labels.count(label) != 1:
                return "gives a tensor without the sequence as a dim of its own"
            made[tensor] = labels.index(label)
            if length is not None and self._length(tensor, made[tensor]) != length:
                return "takes a part of the sequence, or adds to it"
        self.dims.update(made)
        rows = next((self.flat[tensor] for tensor in op.inputs if tensor in self.flat), 0)
        if rows:
            self.flat.update(dict.fromkeys(made, rows))
        return ""

    def _is_flat(self, op: Op) -> bool:
        return bool(self.flat.keys() & set(op.inputs))

    def _length(self, tensor: int, dim: int) -> tuple[int, int]:
        """The entries of a dim: (fixed, for each sample)."""
        held = self.graph.tensors[tensor]
        return held.fixed[dim], held.per_sample[dim]

    def _regrouped(self, op: Op) -> bool:
        """Whether an op makes one dim of batch and sequence, with or without dims behind it, or several of one; notes
        what it makes."""
        if len(op.inputs) != 1 or len(op.outputs) != 1 or op.inputs[0] in self.scores.dims:
            return False
        (given,), (made,) = op.inputs, op.outputs
        if given not in self.dims or given in self.windows.apart | self.rows.numbers:
            return False
        form = self._form(given, self.dims[given], self.flat.get(given, 0))
        if form is None:
            return False
        rank = len(self.graph.tensors[made].fixed)
        places = [dim for dim in range(rank) if self.graph.tensors[made].per_sample[dim]]
        if len(places) != 1:
            return False
        (at,) = places
        rows, rest = divmod(self.graph.tensors[made].per_sample[at], self.tokens)
        if not rest and self._form(made, at, rows) == form:
            if given in self.rows.order and rows != self.flat[given]:
                return False
            self.dims[made], self.flat[made] = at, rows
        elif given in self.flat and given not in self.rows.order and self._form(made, at + 1, 0) == form:
            self.dims[made] = at + 1
        else:
            return False
        self.rows.follow(op)
        return True

    def _form(self, tensor: int, dim: int, rows: int) -> tuple[int, int] | None:
        """The entries before a tensor's batch and for each of its tokens, where the dim is that of tokens behind the
        batch, or, with so many rows for each token, of both in one; None where it is neither."""
        held = self.graph.tensors[tensor]
        sizes = list(zip(held.fixed, held.per_sample, strict=True))
        first = dim if rows else dim - 1
        wanted = [(0, rows * self.tokens)] if rows else [(0, 1), (self.tokens, 0)]
        if first < 0 or sizes[first : dim + 1] != wanted or sum(slope for _, slope in sizes) != wanted[0][1]:
            return None
        return math.prod(held.fixed[:first]), max(1, rows) * math.prod(held.fixed[dim + 1 :])


def _read_in_the_end(graph: Graph) -> set[int]:
    """The tensors of which something follows that the graph returns."""
    found = set(graph.outputs)
    for op in reversed(graph.ops):
        if found.intersection(op.outputs):
            found.update(op.inputs)
    return found
