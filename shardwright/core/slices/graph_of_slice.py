"""The graph of one slice of a model's sequence: the same ops on the tokens of the slice, behind those before it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardwright.core.cost.saved_activations import WITH_DROPOUT
from shardwright.core.model.graph import Graph, Op, Tensor
from shardwright.core.model.op_memory import OpBytes, OpMemory
from shardwright.core.slices.sequence_ops import SequenceOps


def graph_of_slice(graph: Graph, ops: SequenceOps, length: int, context: int) -> Graph:
    """The graph of ``length`` tokens behind ``context`` others, for counting what the slice costs.

    What needs all tokens is left as it is: it does not run with a slice. Keys and values of attention are tensors of
    their own, of all tokens up to the slice's end, beside those that the slice makes. The footprints of the whole
    graph's units are not those of its slices, so bytes are counted by kinds of op. Slices leave nothing in objects.
    """
    tensors = list(graph.tensors)
    first = next(iter(ops.dims.items()))
    tokens = graph.tensors[first[0]].fixed[first[1]]
    for tensor, dim in (*ops.constants.items(), *ops.dims.items()):
        tensors[tensor] = _resized(tensors[tensor], dim, length, tokens)
    for tensor, dim in (*ops.key_constants.items(), *ops.keys.items()):
        tensors[tensor] = _resized(tensors[tensor], dim, context + length + ops.more_keys.get(tensor, 0), tokens)
    found: list[Op] = []
    made: dict[tuple[int, tuple[int, ...]], int] = {}

    def grown(tensor: int, dims: Sequence[int], sizes: Sequence[int]) -> int:
        """A tensor like this one with other sizes along some dims."""
        key = (tensor, tuple(sizes))
        if key not in made:
            new = graph.tensors[tensor]
            for dim, size in zip(dims, sizes, strict=True):
                new = _resized(new, dim, size, tokens)
            tensors.append(replace(new, role="activation", name=""))
            made[key] = len(tensors) - 1
        return made[key]

    for number, op in enumerate(graph.ops):
        inputs = list(op.inputs)
        if number in ops.carried and op.kind in ("attention", "contraction"):
            behind = 1 if op.kind == "attention" else 0  # its query, which may be its key too
            if context:
                inputs = [
                    grown(t, [ops.dims[t]], [context + length]) if at >= behind and t in ops.carried[number] else t
                    for at, t in enumerate(inputs)
                ]
            if number in ops.masks:
                rank = len(graph.tensors[inputs[3]].fixed)
                inputs[3] = grown(inputs[3], [rank - 2, rank - 1], [length, context + length])
        memory = op.memory
        if ops.needs[number] in ("local", "causal"):
            draws = graph.memory_traits.slices_draw_whole
            drawn = _drawn_whole(graph, op, tokens, length, context + length) if draws else None
            of_keys = (context + length) / tokens if ops.keys.keys() & set(op.outputs) else 1.0
            memory = drawn or (None if memory is None else memory.of_share(length / tokens * of_keys))
        found.append(replace(op, inputs=tuple(inputs), memory=memory))
    tensors = [replace(tensor, is_left=False) if tensor.is_left else tensor for tensor in tensors]
    entering = (*graph.inputs, *made.values())
    return replace(graph, tensors=tuple(tensors), ops=tuple(found), inputs=entering, unit_memory=None, in_16_bits=None)


def carried_bytes(graph: Graph, ops: SequenceOps, units: Mapping[int, range], batch: int, width: int) -> dict[int, int]:
    """The bytes of the keys and values of a whole sequence in each unit: what their gradients take, which add up until
    the first slice's backward; and those of the last entries that convolutions and sums hand on."""
    found: dict[int, int] = {}
    for unit, inside in units.items():
        carried = {t for op in inside for t in ops.carried.get(op, ())}
        tails = [ops.tails[op] for op in inside if op in ops.tails]
        sizes = [graph.tensors[t].elements(batch) for t in carried]
        sizes += [_resized(graph.tensors[t], ops.dims[t], entries, 1).elements(batch) for t, entries in tails]
        found[unit] = sum(sizes) * width
    return found


def _drawn_whole(graph: Graph, op: Op, tokens: int, length: int, end: int) -> OpMemory | None:
    """The memory of a dropout, or of an attention with dropout, of ``length`` tokens up to ``end``, whose mask is drawn
    for all ``tokens``: the ones that are dropped of, the numbers drawn and their product, of which the slice keeps its
    part. Such an attention is computed op by op, and keeps copies of queries and keys, the values, the softmax, the
    mask and the product of the two. None for other ops."""

    def entries(tensor: int) -> int:
        """The entries of a sample."""
        return graph.tensors[tensor].elements(2) - graph.tensors[tensor].elements(1)

    if op.kind == "dropout":
        whole = entries(op.outputs[0])
        return _memory_of((), whole * length // tokens, 3 * whole)
    if op.kind != "attention" or not op.name.endswith(WITH_DROPOUT):
        return None
    query, width = entries(op.inputs[0]), graph.tensors[op.inputs[0]].shape(1)[-1]
    whole = query // max(1, width) * tokens
    scores = query // max(1, width * tokens) * length * end
    copies = query * (length + end) // tokens
    return _memory_of((2,), copies + 3 * scores, max(0, 3 * whole - 3 * scores))


def _memory_of(keeps: tuple[int, ...], kept: int, forward: int) -> OpMemory:
    """The memory of an op that keeps, and takes for a while in its forward, so many values for each sample."""
    wide, narrow = (OpBytes((0, kept * width), (0, forward * width)) for width in (4, 2))
    return OpMemory(keeps, wide=wide, narrow=narrow)


def _resized(tensor: Tensor, dim: int, size: int, tokens: int) -> Tensor:
    """A tensor of another length than ``tokens``: the entries of a dim that is the sequence, or of samples with the
    rows of their tokens."""
    fixed, per_sample = list(tensor.fixed), list(tensor.per_sample)
    if per_sample[dim]:
        per_sample[dim] = per_sample[dim] * size // tokens
    elif fixed[dim] != 1:
        fixed[dim] = size
    return replace(tensor, fixed=tuple(fixed), per_sample=tuple(per_sample))
