"""The FLOPs of a model's matrix products in one training step: forward and backward, without what is recomputed."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from shardwright.core.cost.op_kinds import PRODUCT_KINDS
from shardwright.core.cost.opaque_flops import most_flops
from shardwright.core.cost.unit_work import WorkCounter, contraction_flops
from shardwright.core.model.fp8_products import uses_of_parameters
from shardwright.core.model.graph import Graph, Op

PRECISION_OF = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""The precision of products, by the name of their operands' dtype."""
NEGLIGIBLE = 0.01
"""The share of all FLOPs up to which ops that may have some do not matter."""


@dataclass(frozen=True, slots=True)
class TrainingFlops:
    """FLOPs by precision, and the ops whose FLOPs are not known and may be a part of them that matters."""

    by_precision: dict[str, int]
    unknown: tuple[str, ...]


def training_flops(graph: Graph, batch: int, precision: str | None = None, fp8: Collection[str] = ()) -> TrainingFlops:
    """The FLOPs of a batch of ``batch`` samples. A product runs once more for every operand that needs a gradient; an
    attention that trains runs twice more, without the scores that its kernel computes again. Attention counts whole,
    where a mask hides half of it too.

    Args:
        precision: the precision of the steps of a plan; None: products run in the dtypes of the graph.
        fp8: the names of the weights whose products are in fp8.
    """
    counter = WorkCounter(graph)
    uses = uses_of_parameters(graph) if fp8 else {}
    narrow = {op for p in graph.parameters if p.name in fp8 for op, _ in uses.get(p.tensor, ())}
    found: dict[str, int] = {}
    opaque: dict[str, int] = {}
    for number, op in enumerate(graph.ops):
        if op.kind == "opaque":
            opaque[op.name] = opaque.get(op.name, 0) + most_flops(graph, op, batch)
        if op.kind not in PRODUCT_KINDS:
            continue
        product = counter.product(op, batch, {}, 0)
        again = min(2.0, product.backward_input + product.backward_weight)
        kind = "fp8" if number in narrow else _precision_of(graph, op, precision)
        found[kind] = found.get(kind, 0) + int(contraction_flops(graph, op, batch) * (1 + again))
    matters = sum(opaque.values()) > NEGLIGIBLE * max(1, sum(found.values()))
    return TrainingFlops(found, tuple(sorted(opaque)) if matters else ())


def forward_flops(graph: Graph, ops: Iterable[int], batch: int) -> int:
    """The FLOPs of the products among some ops, once forward, for a batch of ``batch`` samples."""
    products = (graph.ops[op] for op in ops if graph.ops[op].kind in PRODUCT_KINDS)
    return sum(int(contraction_flops(graph, op, batch)) for op in products)


def _precision_of(graph: Graph, op: Op, precision: str | None) -> str:
    first = graph.tensors[op.inputs[0]]
    own = PRECISION_OF.get(first.dtype, first.dtype)
    if precision is None or own not in ("fp32", "bf16", "fp16"):
        return own
    if any(graph.tensors[t].stays_wide for t in (*op.inputs, *op.outputs)):
        return "fp32"
    return "bf16" if precision == "fp8" else precision
