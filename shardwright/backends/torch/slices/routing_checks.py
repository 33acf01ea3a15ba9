"""What mixtures of experts compute with, which has to be what makes them follow from each token alone.

The core tells which ops put rows of tokens in the order of their experts and back (`core.slices.routed_rows`), and
takes their arguments at their word; here they are looked at, before a step runs.
"""

from typing import Any

from shardwright.backends.torch.capture.op_schemas import by_name
from shardwright.backends.torch.tensor_parallel.trace import NotReplayableError, Site, Traced
from shardwright.core.slices.sequence_ops import SequenceOps

DOWN = ("floor", "trunc")


def require_routing(traced: Traced, ops: SequenceOps) -> None:
    """Raise NotReplayableError where an op of a mixture of experts computes with other arguments than these have."""
    routed = ops.routed
    for op in routed.sorts:
        _require(traced, op, "descending", not _argument(traced, op, "descending"), "an ascending order")
    for op, number in routed.divisors.items():
        site = _site(traced, op)
        rounds = site.name == "floor_divide" or _argument(traced, op, "rounding_mode") in DOWN
        is_right = rounds and _argument(traced, op, "other") == number
        _require(traced, op, "other", is_right, f"whole division by {number}, the rows of each token")
    for op in routed.counts:
        if _site(traced, op).name == "histc":
            low, high, bins = (_argument(traced, op, name) for name in ("min", "max", "bins"))
            is_right = low == 0 < high or (low == 0 == high and bins == 1)  # one expert has all tokens
            _require(traced, op, "min", is_right, "bounds from 0 on")
    for op in routed.puts:
        if _site(traced, op).name not in ("index_add", "index_add_", "index_copy", "index_copy_"):
            indices = _argument(traced, op, "indices")
            is_right = len(indices) == 1 and not _argument(traced, op, "accumulate")
            _require(traced, op, "indices", is_right, "rows that are put by one index, each in its place")
    for op in routed.places:
        start, step = _argument(traced, op, "start", 0), _argument(traced, op, "step", 1)
        _require(traced, op, "start", (start, step) == (0, 1), "numbers from 0 on in steps of 1")
    for op, experts in routed.grouped.items():
        borders = [t for t in _site(traced, op).inputs if t is not None and t in routed.borders]
        is_right = [routed.borders[t] for t in borders] == [experts]
        _require(traced, op, "offs", is_right, "the borders of the experts by which the rows were sorted")


def _site(traced: Traced, op: int) -> Site:
    return traced.sites[traced.site_of_op[op][0]]


def _argument(traced: Traced, op: int, name: str, default: Any = None) -> Any:
    site = _site(traced, op)
    return by_name(site.function._schema, site.arguments, dict(site.keywords)).get(name, default)


def _require(traced: Traced, op: int, name: str, is_right: bool, expected: str) -> None:
    if not is_right:
        where = _site(traced, op).context[0] or traced.graph.model_name
        given = _argument(traced, op, name)
        raise NotReplayableError(
            f"{_site(traced, op).name} in {where} puts tokens in another order with {name}={given}: expected {expected}"
        )
