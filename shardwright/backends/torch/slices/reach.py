"""The ops that reach beyond their slice: attention, with the keys of the slices before it, and dropout, whose mask is
that of the whole sequence."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardwright.backends.torch.slices import slice_ops
from shardwright.backends.torch.slices.slice_ops import SlicePlace
from shardwright.backends.torch.slices.traces import Piece, Traces
from shardwright.backends.torch.tensor_parallel import local_ops
from shardwright.backends.torch.tensor_parallel.generated_source import Var
from shardwright.backends.torch.tensor_parallel.trace import NotReplayableError, Site, Slot
from shardwright.backends.torch.tensor_parallel.unit_call import Call, Lowering
from shardwright.core.layout.placements import Placement

RESHAPES = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "expand",
                      "_reshape_alias", "broadcast_to"})  # fmt: skip
"""The ops whose sizes are told by their results."""
PADS = frozenset({"pad", "constant_pad_nd", "cat", "concat", "concatenate"})
"""The ops that put zeros in front of a sequence."""
FILLED_WITH = {"where": "other", "masked_fill": "value"}
"""The ops that put a number in the place of hidden scores, and the argument that says which."""


def _lower(call: Call) -> None:
    if not local_ops.lower(call):
        call.lowering.whole_ops.append(call.site.name)
        local_ops.run_whole(call)


def _without_padding(site: Site) -> Site:
    """The call of a convolution without the padding that it has."""
    keywords = tuple((name, [0] if name == "padding" else value) for name, value in site.keywords)
    place = [argument.name for argument in site.function._schema.arguments].index("padding")
    arguments = tuple([0] if position == place else value for position, value in enumerate(site.arguments))
    return replace(site, arguments=arguments, keywords=keywords)


@dataclass(slots=True)
class Reach:
    """The rules of these ops in one slice of a unit.

    Args:
        earlier: what slices before this one hand on.
        uncut: constant → the variable that has all of it.

    Attributes:
        carried: what this slice hands on, with its placement.
    """

    lowering: Lowering
    traces: Traces
    which: int
    earlier: Mapping[Piece, Var]
    uncut: Mapping[int, Var]
    carried: list[tuple[Piece, Var, Placement]] = field(default_factory=list)

    def __call__(self, call: Call) -> bool:
        """Lower a call by a rule of slices; False where it has none, and runs as it would in a whole sequence."""
        op = next(o for o in call.site.ops if o is not None)
        if op in self.traces.ops.tails:
            return self._behind_tail(call, op)
        if op in self.traces.ops.cuts:
            dim = self.traces.ops.dims[call.pieces[0][0].inputs[0]]
            given = call.inputs(0)[0]
            call.give(0, 0, self.lowering.source.call(slice_ops.first_of, given, dim, self._place.length))
            return True
        own = {tensor: self.lowering.at[tensor] for tensor in self.traces.ops.carried.get(op, ())}
        if own and call.site.name == "scaled_dot_product_attention":
            return self._attention(call, op, own)
        if own:
            return self._product(call, op, own)
        self._of_scores(call)
        if call.site.name == "dropout":
            return self._dropout(call, op)
        if self._whole_site(op).draws:
            raise NotReplayableError(
                f"{call.site.name} draws random numbers along the sequence: dropout alone is known"
            )
        return False

    @property
    def _place(self) -> SlicePlace:
        traces, which = self.traces, self.which
        return SlicePlace(traces.start(which), traces.lengths[which], traces.tokens)

    def _whole_site(self, op: int) -> Site:
        whole = self.traces.whole
        return whole.sites[whole.site_of_op[op][0]]

    def _of_whole(self, call: Call, op: int) -> Any:
        """The call with the arguments that it has for the whole sequence."""
        return Call(self.lowering, self._whole_site(op), call.pieces)

    def _shape(self, tensor: int) -> list[int]:
        """The shape of the whole sequence's tensor, over all ranks."""
        return list(self.traces.whole.graph.tensors[tensor].shape(self.traces.batch))

    def _grow(self, op: int, own: Mapping[int, Var]) -> None:
        """Have an op find the keys, or values, of the slices up to this one where it looks for its slice's own."""
        lowering, traces = self.lowering, self.traces
        if len(traces.lengths) == 1:
            return
        for tensor, var in own.items():
            before = self.earlier[Piece(tensor, self.which - 1, carried=op)] if self.which else None
            dim = traces.ops.dims[tensor]
            lowering.at[tensor] = lowering.source.call(slice_ops.so_far, before, var, dim, self._place)
            if self.which < len(traces.lengths) - 1:
                piece = Piece(tensor, self.which, carried=op)
                self.carried.append((piece, lowering.at[tensor], lowering.place[tensor]))

    def _behind_tail(self, call: Call, op: int) -> bool:
        """A shift, a convolution or a cumulative sum, behind the last entries of the slices before."""
        lowering, traces, source = self.lowering, self.traces, self.lowering.source
        tensor, entries = traces.ops.tails[op]
        dim, name, at = traces.ops.dims[tensor], call.site.name, self._place
        before = self.earlier[Piece(tensor, self.which - 1, carried=op)] if self.which else None
        if name in slice_ops.CUMULATIVE:
            _lower(call)
            own = lowering.at[tensor]
            if before is not None:
                own = source.call(slice_ops.behind_sum, before, own, name)
            lowering.at[tensor] = own if call.site.grad else source.call(torch.Tensor.detach, own)
            self._hand_on(op, tensor, lowering.at[tensor], dim, entries)
            return True
        own = lowering.at[tensor]
        lowering.at[tensor] = source.call(slice_ops.behind, before, own, dim, entries)
        self._hand_on(op, tensor, lowering.at[tensor], dim, entries)
        if name in PADS:
            if name in ("pad", "constant_pad_nd") and call.argument("value", None) not in (None, 0):
                raise NotReplayableError("a sequence is padded in front by another number than 0")
            made, given = traces.whole.graph.ops[op].outputs[0], call.inputs(0)[-1]
            is_longer = traces.whole.graph.tensors[made].fixed[dim] > traces.tokens
            size = at.length + (entries if is_longer else 0)
            call.give(0, 0, source.call(slice_ops.first_of, given, dim, size))
        else:
            _lower(Call(lowering, _without_padding(call.site), call.pieces))
        lowering.at[tensor] = own
        return True

    def _hand_on(self, op: int, tensor: int, var: Var, dim: int, entries: int) -> None:
        """Hand the last entries on to the slice that comes next."""
        if self.which < len(self.traces.lengths) - 1:
            last = self.lowering.source.call(slice_ops.last_of, var, dim, entries)
            self.carried.append((Piece(tensor, self.which, carried=op), last, self.lowering.place[tensor]))

    def _product(self, call: Call, op: int, own: Mapping[int, Var]) -> bool:
        """A product of queries with keys, or of what is made of their scores with values."""
        if self.traces.whole.graph.ops[op].kind != "contraction":
            raise NotReplayableError(f"{call.site.name} has no form behind the keys of earlier slices")
        self._grow(op, own)
        _lower(call)
        self.lowering.at.update(own)
        return True

    def _of_scores(self, call: Call) -> None:
        """Look at a call that reads or makes scores. Raises NotReplayableError for one whose arguments are sizes."""
        ops, source = self.traces.ops, self.lowering.source
        scores = [tensor for op, _ in call.pieces for tensor in (*op.inputs, *op.outputs) if tensor in ops.keys]
        if not scores:
            return
        present = [o for o in call.site.ops if o is not None]
        whole, where = self._whole_site(present[0]), call.site.context[0] or self.traces.whole.graph.model_name
        resized = (whole.arguments, whole.keywords) != (call.site.arguments, call.site.keywords)
        if resized and call.site.name not in RESHAPES:
            raise NotReplayableError(f"{call.site.name} of attention's scores takes their sizes")
        if ops.hides.keys() & set(present) and call.site.name in FILLED_WITH:
            low = self._of_whole(call, present[0]).argument(FILLED_WITH[call.site.name])
            low = call.slots()[low.index] if isinstance(low, Slot) else low
            dtype = self.lowering.dtype(call.pieces[0][0].outputs[0])
            source.call(slice_ops.require_low, low, dtype, where, is_kept=True)
        if call.site.name in ("exp", "exp2"):
            raise NotReplayableError("a softmax of attention's scores is written out: expected torch.softmax")
        if call.site.name in ("add", "sub") and self._of_whole(call, present[0]).argument("alpha", 1) != 1:
            raise NotReplayableError(f"{call.site.name} scales what it adds to attention's scores (alpha)")
        if call.site.name in ("mul", "div"):
            factor = self._of_whole(call, present[0]).argument("other")
            others = [tensor for tensor in call.pieces[0][0].inputs if tensor not in ops.keys]
            if isinstance(factor, Slot) and others and not self.lowering.shape(others[0]):
                factor = call.slots()[factor.index]
            if not isinstance(factor, Slot):
                source.call(slice_ops.require_mild, factor, where, is_kept=True)
        if call.pieces[0][0].kind == "softmax" or call.site.name == "logsumexp":
            keys = ops.keys[call.pieces[0][0].inputs[0]]
            source.call(slice_ops.require_seen, call.inputs(0)[0], keys, where, is_kept=True)

    def _attention(self, call: Call, op: int, own: Mapping[int, Var]) -> bool:
        lowering, traces, site = self.lowering, self.traces, self._whole_site(op)
        given, mask = self._of_whole(call, op), traces.ops.masks.get(op)
        if mask is None and not given.argument("is_causal", False):
            raise NotReplayableError("an attention says neither a mask nor is_causal")
        if mask is not None and mask not in self.uncut:
            raise NotReplayableError("the mask of an attention is made of what slices make")
        query = call.slots()[0]  # which may be the tensor that is the key too
        self._grow(op, own)
        slots = call.slots()
        probability, hidden = float(given.argument("dropout_p", 0.0)), None
        if mask is not None:
            hidden = lowering.hop(self.uncut[mask], call.pieces[0][1].inputs[3])
        if probability:
            lowering.seeded(site)
        scores = [*self._shape(traces.whole.graph.ops[op].inputs[0])[:-1], traces.tokens]
        made = lowering.source.call(
            slice_ops.attention, query, slots[1], slots[2], hidden, self._place, probability, given.argument("scale"),
            bool(given.argument("enable_gqa", False)), scores, call.split_of(0, 0), lowering.axis,
            is_kept=bool(probability),
        )  # fmt: skip
        call.give(0, 0, made)
        lowering.at.update(own)
        return True

    def _dropout(self, call: Call, op: int) -> bool:
        lowering, traces, site = self.lowering, self.traces, self._whole_site(op)
        given, tensor = self._of_whole(call, op), traces.whole.graph.ops[op].inputs[0]
        probability = given.argument("p")
        if not given.argument("train", True) or not probability:
            return False
        lowering.seeded(site)
        made = lowering.source.call(
            slice_ops.dropout, call.inputs(0)[0], probability, self._shape(tensor), site.order, traces.ops.dims[tensor],
            traces.ops.keys.get(tensor), self._place, call.split_of(0, 0), lowering.axis,
            traces.rows(tensor, traces.ops.dims[tensor]), is_kept=True,
        )  # fmt: skip
        call.give(0, 0, made)
        return True
