"""The products that a plan in fp8 computes in 8 bits: linear layers, by the weight that each multiplies with.

Which they are follows from the graph alone, so that every runtime and every mesh computes the same ones. The rule is
the field's (torchao's ``convert_to_float8_training`` with its usual filter, torchtitan, Transformer Engine): products
of rows with a matrix of the model whose sizes are multiples of 16, but for the head, whose result goes into the loss.
Look-ups, and products of activations with each other (attention), stay in 16 bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.core.errors import MissingCapabilityError
from shardwright.core.model.fold import Folded
from shardwright.core.model.graph import Graph, Op
from shardwright.core.model.structure import Structure, unit_slots

MULTIPLE = 16
"""Tensor cores take matrices of 8-bit numbers whose rows are multiples of 16 bytes (cuBLAS, section on FP8 kernels)."""
BY_MODULES = frozenset({"linear", "addmm"})
"""The ops of linear layers where a runtime computes the products of modules in fp8."""
_CASTS = frozenset({"_to_copy", "convert_element_type"})
_TURNS = frozenset({"t", "transpose"})
"""The ops that give a matrix with its dims in the other order."""


@dataclass(frozen=True, slots=True)
class Fp8Products:
    """The weights whose products are computed in fp8.

    Attributes:
        slots: the ``class/role`` of each, sorted.
        ops: the products of the graph, and of each the position of its weight among its operands.
        others: the ``class/role`` of the matrices whose products stay in 16 bits, and the reason, sorted.
    """

    slots: tuple[str, ...]
    ops: dict[int, int]
    others: tuple[tuple[str, str], ...]


def fp8_products(folded: Folded, structure: Structure) -> Fp8Products:
    """The products of a folded graph that a plan in fp8 computes in 8 bits: the same in all units of one class."""
    graph = folded.graph
    uses = uses_of_parameters(graph)
    last = _last_products(graph, uses)
    slots_of = _slots_of(folded, structure)
    refused: dict[str, str] = {}
    for tensor, slots in slots_of.items():
        used = uses.get(tensor, [])
        why = _refusal(graph, tensor, used)
        if not why and any(op in last for op, _ in used):
            classes = {int(slot.partition("/")[0]) for slot in slots}
            if not any(structure.unit_classes.count(each) > 1 for each in classes):  # one of many alike is no head
                why = "its product is the last one before the loss"
        if why:
            refused.update(dict.fromkeys(slots, why))
    chosen = set(slots_of)
    while True:  # all weights of a slot are computed alike, and all uses of a weight
        wide = refused.keys() | {slot for tensor in slots_of.keys() - chosen for slot in slots_of[tensor]}
        kept = {tensor for tensor in chosen if wide.isdisjoint(slots_of[tensor])}
        if kept == chosen:
            break
        chosen = kept
    return Fp8Products(
        tuple(sorted({slot for tensor in chosen for slot in slots_of[tensor]})),
        {op: position for tensor in chosen for op, position in uses[tensor]},
        tuple(sorted((slot, refused.get(slot, "it is tied to one that stays in 16 bits")) for slot in wide)),
    )


def require_fp8(slots: Sequence[str], folded: Folded, structure: Structure) -> None:
    """Raise MissingCapabilityError for the slot of a weight whose products are not computed in fp8 in this graph."""
    found = fp8_products(folded, structure)
    for slot in slots:
        if slot not in found.slots:
            why = dict(found.others).get(slot, "it is no matrix")
            raise MissingCapabilityError(
                f"the plan computes the products with {slot} in fp8, which {folded.graph.model_name} in "
                f"{folded.graph.framework} does not: {why}; plan from this model, or for 'bf16'"
            )


def _slots_of(folded: Folded, structure: Structure) -> dict[int, tuple[str, ...]]:
    """Every matrix of the model, and every array of several, by tensor, with the ``class/role`` of its place in each
    unit that uses it."""
    found: dict[int, dict[str, None]] = {}
    for unit, of_class in zip(folded.units, structure.unit_classes, strict=True):
        for slot in unit_slots(folded.graph, unit):
            tensor = folded.graph.parameters[slot.parameter].tensor
            dims = [size for size in folded.graph.tensors[tensor].fixed if size != 1]
            if len(slot.shape) > 1 or len(dims) > 2:
                found.setdefault(tensor, {})[f"{of_class}/{slot.role}"] = None
    return {tensor: tuple(slots) for tensor, slots in found.items()}


def uses_of_parameters(graph: Graph) -> dict[int, list[tuple[int, int]]]:
    """The (op, position) of every use of each parameter, by tensor, behind casts too; where any product may be computed
    in fp8, behind transpositions, and of each row of a stack of matrices."""
    root = {parameter.tensor: parameter.tensor for parameter in graph.parameters}
    found: dict[int, list[tuple[int, int]]] = {}
    for index, op in enumerate(graph.ops):
        held = [(position, root[t]) for position, t in enumerate(op.inputs) if t in root]
        if held and len(op.inputs) == 1 and _is_same(graph, op):
            root.update(dict.fromkeys(op.outputs, held[0][1]))
            continue
        for position, tensor in held:
            found.setdefault(tensor, []).append((index, position))
    return found


def _is_same(graph: Graph, op: Op) -> bool:
    """Whether an op on a matrix, or on a stack of them, gives that matrix, a row of the stack, or part of the way
    there."""
    if op.base_name in _CASTS:
        return True
    if graph.capabilities.fp8_by_module:
        return False
    before, after = (graph.tensors[t].fixed for t in (op.inputs[0], op.outputs[0]))
    if op.base_name in _TURNS:
        return len(before) == 2
    is_row = op.base_name == "slice" and len(before) == 3 and after == (1, *before[1:])
    return is_row or (op.base_name == "squeeze" and before == (1, *after))


def _last_products(graph: Graph, uses: dict[int, list[tuple[int, int]]]) -> set[int]:
    """The products of parameters that no other product of a parameter follows on the way to the results."""
    products = {op for held in uses.values() for op, _ in held if graph.ops[op].kind == "contraction"}
    leads: set[int] = set()
    """The values from which a product of a parameter is made."""
    last = set()
    for index in reversed(range(len(graph.ops))):
        op = graph.ops[index]
        follows = any(t in leads for t in op.outputs)
        if index in products and not follows:
            last.add(index)
        if follows or index in products:
            leads.update(op.inputs)
    return last


def _refusal(graph: Graph, tensor: int, uses: list[tuple[int, int]]) -> str:
    """The reason why a matrix is not multiplied in fp8; empty where it may be."""
    shape = graph.tensors[tensor].fixed
    read = {len(graph.tensors[graph.ops[op].inputs[position]].fixed) for op, position in uses}
    if len(shape) == 3 and read == {2}:
        shape = shape[1:]  # rows of a stack
    if len(shape) != 2:
        return f"it has {len(shape)} dims, and a product in fp8 is with one matrix"
    if not uses:
        return "it is in no product"
    names = next(parameter.names for parameter in graph.parameters if parameter.tensor == tensor)
    for index, position in uses:
        op = graph.ops[index]
        if op.kind == "gather":
            return "rows of it are looked up"
        if op.kind != "contraction" or len(op.inputs) != 2:
            return f"it is read by {op.base_name}"
        if not _is_linear(op, position):
            return f"{op.base_name} does not multiply rows with it"
        if any(graph.tensors[t].stays_wide for t in (*op.inputs, *op.outputs)):
            return "the model computes its product in float32"
        path = graph.calls[op.call].path
        if graph.capabilities.fp8_by_module and not (
            op.base_name in BY_MODULES and (f"{path}.weight" if path else "weight") in names
        ):
            return "it is not the weight of a linear layer"
    uneven = [size for size in shape if size % MULTIPLE]
    return f"{uneven[0]} is no multiple of {MULTIPLE}" if uneven else ""


def _is_linear(op: Op, position: int) -> bool:
    """Whether an op multiplies rows with a matrix: the last dim of the rows is summed over, and the matrix's other dim
    is the result's last."""
    weight, given, out = op.labels[position], op.labels[1 - position], op.output_labels[0]
    summed = [label for label in weight if label not in out]
    made = [label for label in weight if label in out and label not in given]
    return len(summed) == len(made) == 1 and given[-1:] == (summed[0],) and out == (*given[:-1], made[0])
