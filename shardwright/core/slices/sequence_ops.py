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
that hides later keys, and what softmax makes of them (`core.slices.scores`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardwright.core.errors import CaptureError
from shardwright.core.model.fold import fold
from shardwright.core.model.graph import Graph, Op
from shardwright.core.slices.scores import BOTH_WAYS, TOGETHER, Scores, Told

Need = Literal["constant", "local", "causal", "all"]
"""What an op needs: nothing that slices make, what its own slice makes, what those before made too, or all of it."""
TOKEN_TYPES = ("int32", "int64", "uint32")
CUMULATIVE = ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")
"""Ops whose result for a token follows from the result for the one before."""


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
        flat: those of them whose dim is batch and sequence in one, a sample's tokens next to each other.
        constants: tensor → the dim along which ops take of it what belongs to their slice, of those that are there
            whole before the first slice (positions, rotary tables, labels).
        needs: of every op.
        carried: causal op → the tensors of which it needs what earlier slices made.
        masks: attention → its mask of [.., queries, keys], which has to hide later keys from each query.
        obstacles: why the model cannot run in slices; empty where it can.
        keys: tensor → its dim of keys, for the scores of attention that is written out, and what follows from them: a
            slice has those of all slices up to it.
        key_constants: constant → the dim along which ops take of it what belongs to these keys.
        hides: op → the mask by which it hides later keys in scores.
    """

    dims: Mapping[int, int]
    flat: frozenset[int]
    constants: Mapping[int, int]
    needs: tuple[Need, ...]
    carried: Mapping[int, tuple[int, ...]]
    masks: Mapping[int, int]
    obstacles: tuple[Obstacle, ...]
    keys: Mapping[int, int] = field(default_factory=dict)
    key_constants: Mapping[int, int] = field(default_factory=dict)
    hides: Mapping[int, int] = field(default_factory=dict)


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
    obstacles = tuple(Obstacle(op, why) for op, why in reading.mixing.items() if op < last)
    return SequenceOps(
        reading.dims,
        frozenset(reading.flat),
        reading.constants,
        tuple(reading.needs),
        reading.carried,
        reading.masks,
        obstacles,
        reading.scores.dims,
        reading.scores.constants,
        reading.scores.hides,
    )


class _Reading:
    """The sequence dims of tensors, as they follow from one op to the next."""

    def __init__(self, graph: Graph, inputs: dict[int, int]) -> None:
        self.graph = graph
        self.dims: dict[int, int] = {}
        self.given = inputs
        """The sequence dims of tensors that follow from the inputs alone."""
        self.flat: set[int] = set()
        self.constants: dict[int, int] = {}
        self.needs: list[Need] = []
        self.carried: dict[int, tuple[int, ...]] = {}
        self.masks: dict[int, int] = {}
        self.scores = Scores(graph, self.dims)
        self.mixing: dict[int, str] = {}
        """Op → why it needs all tokens, for the first ones on each way."""
        self._whole: set[int] = set()
        """Tensors that are there only once all slices have run."""
        self._of_parameters = {parameter.tensor for parameter in graph.parameters}
        """Tensors that follow from parameters, and from no token."""

    def read(self, number: int, op: Op) -> None:
        """Sort one op, whose operands are known."""
        if self._whole.intersection(op.inputs):
            self.needs.append("all")
            self._whole.update(op.outputs)
            return
        if not any(tensor in self.dims for tensor in op.inputs) and not self._begins(op):
            self.needs.append("constant")
            return
        if op.kind in ("view", "copy") and self._regrouped(op):
            self.needs.append("local")
            return
        told = self._told(op)
        found = told.why or self._follow(op, told.label) or self.scores.follow(number, op, told, self.constants)
        if found:
            self.needs.append("all")
            self.mixing[number] = f"{op.name}{self._where(op)} {found}"
            self._whole.update(op.outputs)
        elif told.carried:
            self.needs.append("causal")
            self.carried[number] = told.carried
            if op.kind == "attention" and len(op.inputs) > 3:
                self.masks[number] = op.inputs[3]
        else:
            self.needs.append("local")

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
            return Told(why=TOGETHER) if self.flat.intersection(op.inputs) else self.scores.made(op)
        (label,) = labels
        role = op.role(label)
        if role == "map":
            return Told(label)
        if op.base_name in CUMULATIVE and label >= 0 and not self.flat.intersection(op.inputs):
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
        if op.role(label) == "whole" or self._is_square(op):
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
                if self.graph.tensors[tensor].per_sample[dim] and not self.flat.intersection(op.inputs):
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
        if self.flat.intersection(op.inputs):
            self.flat.update(made)
        return ""

    def _length(self, tensor: int, dim: int) -> tuple[int, int]:
        """The entries of a dim: (fixed, for each sample)."""
        held = self.graph.tensors[tensor]
        return held.fixed[dim], held.per_sample[dim]

    def _regrouped(self, op: Op) -> bool:
        """Whether an op makes one dim of batch and sequence, or two of one; notes what it makes."""
        if len(op.inputs) != 1 or len(op.outputs) != 1 or op.inputs[0] in self.scores.dims:
            return False
        (given,), (made,) = op.inputs, op.outputs
        one, other = self.graph.tensors[given], self.graph.tensors[made]
        whole, parts = (one, other) if given in self.flat else (other, one)
        length = parts.fixed[1] if len(parts.fixed) > 1 else 0
        rest = (
            zip(whole.fixed[1:], whole.per_sample[1:], strict=True),
            zip(parts.fixed[2:], parts.per_sample[2:], strict=True),
        )
        is_regrouped = (
            self.dims[given] == (0 if given in self.flat else 1)
            and len(parts.fixed) == len(whole.fixed) + 1
            and (parts.fixed[0], parts.per_sample[:2]) == (0, (1, 0))
            and (whole.fixed[0], whole.per_sample[0]) == (0, length)
            and [*rest[0]] == [*rest[1]]
        )
        if is_regrouped:
            self.dims[made] = 1 if given in self.flat else 0
            if given not in self.flat:
                self.flat.add(made)
        return is_regrouped
