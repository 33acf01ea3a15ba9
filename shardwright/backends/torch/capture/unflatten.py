"""Matrix products over flattened leading dims, put back into the dims that the model has.

Hugging Face's Conv1D views [batch, length, k] as [batch · length, k], multiplies, and views the result back. Between
the views nothing can be split along the length, and the batch only because it is the outer of the two; the product
itself minds neither. So view, product (and bias), view become a product (and bias) of all dims, like a linear layer or
a product in JAX.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardwright.core.model.graph import Op, Tensor

FLAT_PRODUCT = ((0, 2), (2, 1), (0, 1))


def unflatten_products(
    ops: Sequence[Op], tensors: Sequence[Tensor], outputs: Iterable[int]
) -> tuple[list[Op], list[Tensor]]:
    """The ops without those views, and the tensors with the shapes that the ops now have."""
    made = {t: i for i, op in enumerate(ops) for t in op.outputs}
    users: dict[int, list[int]] = {}
    for i, op in enumerate(ops):
        for t in op.inputs:
            users.setdefault(t, []).append(i)
    for t in outputs:
        users.setdefault(t, []).append(-1)
    changed: dict[int, Op | None] = {}
    shapes = list(tensors)
    for i, product in enumerate(ops):
        if product.kind != "contraction" or product.labels != FLAT_PRODUCT:
            continue
        before = made.get(product.inputs[0])
        last = i
        if _only_user(users, product.outputs[0], ops, "elementwise") is not None:
            last = users[product.outputs[0]][0]
            if not _is_bias(ops[last], product.outputs[0]):
                continue
        after = _only_user(users, ops[last].outputs[0], ops, "view")
        if before is None or after is None or ops[before].kind != "view":
            continue
        source, result = ops[before].inputs[0], ops[after].outputs[0]
        if not _same_leading(tensors[source], tensors[result]) or not _keeps_last(tensors, ops[before], ops[after]):
            continue
        rank = len(tensors[source].fixed)
        lead, summed, column = tuple(range(rank - 1)), rank - 1, rank
        labels = ((*lead, summed), (summed, column), (*lead, column))
        weight = product.inputs[1]
        if last == i:
            changed[i] = replace(product, inputs=(source, weight), outputs=(result,), labels=labels)
        else:
            between = product.outputs[0]
            shapes[between] = replace(tensors[result], role="activation", name="")
            changed[i] = replace(product, inputs=(source, weight), labels=labels)
            changed[last] = replace(ops[last], outputs=(result,), labels=((*lead, column), (column,), (*lead, column)))
        changed[after] = None
        users[product.inputs[0]].remove(i)
        if not users[product.inputs[0]]:
            changed[before] = None
    kept = (changed.get(i, op) for i, op in enumerate(ops))
    return [op for op in kept if op is not None], shapes


def without_unused(
    ops: Sequence[Op], tensors: Sequence[Tensor], outputs: Sequence[int]
) -> tuple[list[Op], list[Tensor], tuple[int, ...]]:
    """The ops, tensors and outputs, renumbered so that every activation and constant is one that an op uses or
    makes."""
    used = {t for op in ops for t in (*op.inputs, *op.outputs)} | set(outputs)
    kept = [t for t, x in enumerate(tensors) if t in used or x.role not in ("activation", "constant")]
    if len(kept) == len(tensors):
        return list(ops), list(tensors), tuple(outputs)
    number = {old: new for new, old in enumerate(kept)}
    renumbered = [
        replace(op, inputs=tuple(number[t] for t in op.inputs), outputs=tuple(number[t] for t in op.outputs))
        for op in ops
    ]
    return renumbered, [tensors[t] for t in kept], tuple(number[t] for t in outputs)


def _only_user(users: dict[int, list[int]], tensor: int, ops: Sequence[Op], kind: str) -> int | None:
    found = users.get(tensor, [])
    return found[0] if len(found) == 1 and found[0] >= 0 and ops[found[0]].kind == kind else None


def _is_bias(op: Op, product: int) -> bool:
    return op.labels == ((0, 1), (1,), (0, 1)) and op.inputs[0] == product


def _same_leading(a: Tensor, b: Tensor) -> bool:
    return len(a.fixed) == len(b.fixed) and a.fixed[:-1] == b.fixed[:-1] and a.per_sample[:-1] == b.per_sample[:-1]


def _keeps_last(tensors: Sequence[Tensor], before: Op, after: Op) -> bool:
    """Whether both views leave the last dim alone."""
    pairs = [(tensors[op.inputs[0]], tensors[op.outputs[0]]) for op in (before, after)]
    return all(x.fixed[-1] == y.fixed[-1] and x.per_sample[-1] == y.per_sample[-1] for x, y in pairs)
