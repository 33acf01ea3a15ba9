"""The table from aten ops to the core's kinds of op and labels.

Most of the table says what an op *is*; which of its dims belong together follows from shapes, by the helpers of
`core.rules.op_rules`, which the JAX side uses too.
"""

from shardwright.backends.torch.capture.ops import indexing as indexing
from shardwright.backends.torch.capture.ops import pointwise as pointwise
from shardwright.backends.torch.capture.ops import products as products
from shardwright.backends.torch.capture.ops import reductions as reductions
from shardwright.backends.torch.capture.ops import views as views
from shardwright.backends.torch.capture.ops.template import RULES as RULES
from shardwright.backends.torch.capture.ops.template import OpCall as OpCall
from shardwright.backends.torch.capture.ops.template import Ref as Ref
from shardwright.backends.torch.capture.ops.template import Template as Template
from shardwright.core.model.graph import Graph, OpKind


def coverage(graph: Graph | None = None) -> dict[str, OpKind]:
    """The kind of each op, by the op's name: of the whole table, or of the ops of one graph, where ``opaque`` marks an
    op that the table lacks."""
    if graph is None:
        return {f"aten.{name}": kind for name, (kind, _) in sorted(RULES.items())}
    return {op.name: op.kind for op in sorted(graph.ops, key=lambda op: (op.kind != "opaque", op.kind, op.name))}
