"""Attention that is written out: the scores of queries by keys, and what is known of those of later keys.

A slice has the scores of its own queries, of all keys up to its end. That is exact where a mask hides later keys: what
is added to their scores, or put in place of them, is so low that softmax makes zeros of it, and zeros times values add
nothing. A mask is taken at its word here; a runtime looks at its values.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.core.model.graph import Graph, Op

TOGETHER = "brings tokens together with tokens (an attention that is written out is not told as one)"
BOTH_WAYS = "attends in both directions: expected is_causal=True, or a mask that hides later tokens"
SELECTS = frozenset({"where", "_where", "masked_fill", "select_n"})
"""The ops that put a number in the place of scores, by a mask."""
SAME = frozenset({"to", "_to_copy", "clone", "contiguous", "convert_element_type", "copy", "stop_gradient", "detach"})
HIGHEST = frozenset({"amax", "max", "reduce_max", "argmax", "logsumexp"})
"""What low scores do not change."""
SOFTMAX = frozenset({"softmax", "_softmax", "_safe_softmax"})
SUMS = frozenset({"sum", "reduce_sum"})


@dataclass(frozen=True, slots=True)
class Told:
    """What an op does with the labels of the sequence.

    Attributes:
        label: of the sequence in the outputs.
        key: of the keys in them, of scores.
        carried: the operands of which the op needs what earlier slices made.
        why: why it cannot be told slice by slice, or ''.
    """

    label: int = -1
    key: int = -1
    carried: tuple[int, ...] = ()
    why: str = ""


class Scores:
    """The tensors with a dim of queries and one of keys.

    Args:
        queries: tensor → its sequence dim.

    Attributes:
        dims: tensor → its dim of keys.
        constants, hides: as in `SequenceOps`.
        more: tensor → the entries behind those of the keys, such as a score of every head that no key belongs to
            (attention sinks).
    """

    def __init__(self, graph: Graph, queries: Mapping[int, int]) -> None:
        self.graph, self.queries = graph, queries
        self.dims: dict[int, int] = {}
        self.constants: dict[int, int] = {}
        self.hides: dict[int, int] = {}
        self.more: dict[int, int] = {}
        self._low: set[int] = set()
        """Scores that are low for later keys."""
        self._zero: set[int] = set()
        """What is 0 for later keys."""

    def made(self, op: Op) -> Told:
        """A product of tokens with tokens, whose labels differ."""
        if op.kind != "contraction" or len(op.inputs) != 2 or op.inputs[0] == op.inputs[1]:
            return Told(why=TOGETHER)
        found = [labels[self.queries[t]] for t, labels in zip(op.inputs, op.input_labels, strict=True)]
        (made,) = op.output_labels
        if any(label < 0 or made.count(label) != 1 for label in found):
            return Told(why=TOGETHER)
        key = max((0, 1), key=lambda which: made.index(found[which]))  # queries come first
        return Told(found[1 - key], found[key], (op.inputs[key],))

    def told(self, op: Op) -> Told:
        """What an op does with scores."""
        given = list(zip(op.inputs, op.input_labels, strict=True))
        pairs = {(labels[self.queries[t]], labels[self.dims[t]]) for t, labels in given if t in self.dims}
        if len(pairs) > 1 or -1 in next(iter(pairs)):
            return Told(why=TOGETHER)
        ((query, key),) = pairs
        others = {t: labels[self.queries[t]] for t, labels in given if t in self.queries and t not in self.dims}
        if op.kind == "contraction" and set(others.values()) == {key} and op.role(key) == "sum":
            is_one = len(op.inputs) == 2 and op.role(query) == "map"
            if not is_one or not self._zero.intersection(op.inputs):
                return Told(why=BOTH_WAYS if is_one else TOGETHER)
            return Told(query, carried=tuple(others))
        if set(others.values()) - {query} or op.role(query) != "map":
            return Told(why=TOGETHER)
        if op.kind in ("concat", "slice") and op.role(key) == "map":
            return self._with_more(op, query, key)
        if op.role(key) == "map":
            return Told(query, key)
        if op.base_name in SOFTMAX:
            return Told(query, key) if self._low.intersection(op.inputs) else Told(why=BOTH_WAYS)
        known = self._low if op.base_name in HIGHEST else self._zero if op.base_name in SUMS else frozenset()
        return Told(query) if known.intersection(op.inputs) else Told(why=BOTH_WAYS)

    def follow(self, number: int, op: Op, told: Told, constants: Mapping[int, int]) -> str:
        """Note the dims of keys of an op's outputs, and of the constants that it meets; returns why that cannot be, or
        ''. ``constants``: those that slices take their part of, and along which dim."""
        if told.key < 0 or told.why:
            return ""
        length = next((self._length(t, self.dims[t]) for t in op.inputs if t in self.dims), None)
        more = next((self.more.get(t, 0) for t in op.inputs if t in self.dims), 0)
        made_more = {t: n for t, n in self.more.items() if t in op.outputs}
        masks = []
        for tensor, labels in zip(op.inputs, op.input_labels, strict=True):
            if tensor in self.queries or told.key not in labels:
                continue
            dim = labels.index(told.key)
            if self._length(tensor, dim) == (1, 0):
                continue
            if op.kind == "concat":
                continue  # told apart in `_with_more`
            if more or labels.count(told.key) > 1 or self.constants.setdefault(tensor, dim) != dim:
                return "takes a constant along two dims of it"
            if told.label in labels:
                masks.append(tensor)
        both = [t for t, dim in self.constants.items() if constants.get(t) == dim]
        if both:
            return "takes a constant along the tokens of a slice, and along all keys"
        for tensor, labels in zip(op.outputs, op.output_labels, strict=True):
            if labels.count(told.key) != 1:
                return TOGETHER
            self.dims[tensor] = labels.index(told.key)
            held = self._length(tensor, self.dims[tensor])
            if op.kind not in ("concat", "slice") and more:
                self.more[tensor] = more
            added = 0 if length is None else made_more.get(tensor, self.more.get(tensor, 0)) - more
            if length is not None and held != (length[0] + added, length[1]):
                return "takes a part of the sequence, or adds to it"
        if op.kind == "softmax" and op.role(told.key) == "map":
            return TOGETHER  # by another dim than that of keys
        self._note_hidden(number, op, masks)
        return ""

    def _with_more(self, op: Op, query: int, key: int) -> Told:
        """Entries that are put behind those of the keys, or taken away again; or a part of another dim."""
        at = next(place for place, tensor in enumerate(op.inputs) if tensor in self.dims)
        scores, labels = op.inputs[at], op.input_labels[at]
        dim, before = labels.index(key), self.more.get(op.inputs[at], 0)
        length = self._length(scores, dim)
        lengths = [self._length(t, made.index(key)) for t, made in zip(op.outputs, op.output_labels, strict=True)]
        if all(held == length for held in lengths):
            return Told(query, key)
        others = [t for place, t in enumerate(op.inputs) if place != at]
        more = lengths[0][0] - length[0]
        is_behind = len(lengths) == 1 and length[1] == lengths[0][1] == 0 and op.offsets[at if len(others) else 0] == 0
        is_one = not before and more == len(others) and not any(t in self.queries for t in others)
        if not is_behind or at or not (is_one if op.kind == "concat" else before and more == -before):
            return Told(why="takes a part of the sequence, or adds to it")
        if op.kind == "concat":
            self.more[op.outputs[0]] = more
        return Told(query, key)

    def _note_hidden(self, number: int, op: Op, masks: list[int]) -> None:
        """Note whether what an op makes of later keys is low, or 0."""
        name, made = op.base_name, op.outputs
        low, zero = ([t in held for t in op.inputs] for held in (self._low, self._zero))
        if name in SOFTMAX or name in ("exp", "exp2"):
            self._zero.update(made if any(low) else ())
        elif op.kind == "concat":  # beside other scores, or what is no score
            both = [(here, none) for here, none, t in zip(low, zero, op.inputs, strict=True) if t in self.dims]
            is_all = len(both) == len(op.inputs) or made[0] in self.more
            self._low.update(made if is_all and all(here for here, _ in both) else ())
            self._zero.update(made if is_all and all(none for _, none in both) else ())
        elif op.kind in ("view", "copy", "slice") or name in SAME:
            self._low.update(made if any(low) else ())
            self._zero.update(made if any(zero) else ())
        elif op.kind == "dropout":  # which makes zeros of low scores
            self._zero.update(made if any(zero) else ())
        elif name in ("mul", "div") or op.kind == "contraction":
            self._zero.update(made if zero[0] or (any(zero) and name != "div") else ())
            if name in ("mul", "div") and low[0] and all(not self.graph.tensors[t].fixed for t in op.inputs[1:]):
                self._low.update(made)  # by a number, at which a runtime looks
        elif name == "sub":
            self._low.update(made if low[0] and not any(low[1:]) else ())
        elif name in ("add", "add_any") or name in SELECTS:
            if masks:
                self.hides[number] = masks[0]
            # A number that is put in the place of scores by another mask need not be low.
            self._low.update(made if masks or (any(low) and name not in SELECTS) else ())

    def _length(self, tensor: int, dim: int) -> tuple[int, int]:
        held = self.graph.tensors[tensor]
        return held.fixed[dim], held.per_sample[dim]
