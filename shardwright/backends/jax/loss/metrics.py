"""Metrics beside the loss (``has_aux``): those of the batch, from those of microbatches and replicas.

The kind of a metric, which its shape and the function's program show, decides:

- an array with a dim that counts samples: joined along it, in the order of the batch;
- `weighted`: Σ weight · value / Σ weight;
- what the function's program shows to be a mean, a weighted mean or a sum over samples, or not to depend on them: that
  of the whole batch.

Anything else has a value for each microbatch and none that follows for the batch: it is refused by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.tree_util import PyTreeDef

from shardwright.backends.jax.capture.loss_results import Weighted, require_wide
from shardwright.backends.jax.loss.reductions import SUM, Reader, Reduction
from shardwright.core.errors import PlanError
from shardwright.core.model.loss import Verdict

FIX = (
    "return it for each sample (an array whose first dim counts them), or as sw.weighted(value, weight), which "
    "combines as Σ weight · value / Σ weight"
)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: an array, or a `Weighted`."""

    name: str
    kind: Literal["rows", "weighted", "reduced", "sum"]
    """The way in which calls combine. A metric of the one microbatch that there is is a sum."""
    shape: tuple[int, ...]
    """The metric's shape, with the samples of one call."""
    dtype: Any
    dim: int = 0
    """The dim of "rows" that counts samples."""
    reduction: Reduction | None = None
    """The reduction of "reduced"."""

    @property
    def sums(self) -> int:
        """The number of its arrays that add up over calls."""
        return {"rows": 0, "sum": 1}.get(self.kind, 2)


@dataclass(frozen=True, slots=True)
class Metrics:
    """All metrics of a loss function."""

    structure: PyTreeDef
    metrics: tuple[Metric, ...]
    samples: int
    """The number of samples of one call of the function."""
    calls: int
    """The number of calls that make the batch."""

    def of_call(self, aux: Any, batch: Any) -> tuple[list[jax.Array], list[jax.Array]]:
        """The arrays of one call of the loss function: those that add up over calls, and those that are joined, whose
        first dim counts samples. ``batch`` is what the function is given."""
        sums: list[jax.Array] = []
        rows: list[jax.Array] = []
        for metric, value in zip(self.metrics, jax.tree.leaves(aux, is_leaf=is_weighted), strict=True):
            if metric.kind == "rows":
                rows.append(jnp.moveaxis(jnp.asarray(value), metric.dim, 0))
            elif metric.kind == "weighted":
                own = jnp.asarray(value.weight, jnp.float32)
                sums += [(jnp.asarray(value.value) * own).astype(_summed_in(metric.dtype)), own]
            elif metric.reduction is not None:
                counted = metric.reduction.counted(self.samples, batch)
                share = metric.reduction.divisor(self.samples, counted)
                sums += [(jnp.asarray(value) * share).astype(_summed_in(metric.dtype)), counted]
            else:
                sums.append(jnp.asarray(value).astype(metric.dtype))
        stopped: tuple[list[jax.Array], list[jax.Array]] = jax.lax.stop_gradient((sums, rows))
        return stopped

    def zeros(self) -> list[jax.Array]:
        """The values that the arrays that add up begin with: zeros."""
        found = []
        for metric in self.metrics:
            if metric.sums == 2:
                found += [jnp.zeros(metric.shape, _summed_in(metric.dtype)), jnp.zeros(())]
            elif metric.sums:
                found.append(jnp.zeros(metric.shape, metric.dtype))
        return found

    def uses(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The numbers of the sums and of the rows that each metric is made of."""
        summed, joined = count(), count()
        return [(tuple(islice(summed, m.sums)), tuple(islice(joined, int(m.kind == "rows")))) for m in self.metrics]

    def whole(self, number: int, sums: Sequence[Any], rows: Sequence[Any]) -> jax.Array:
        """The metric ``number`` of a batch: from its own sums, or its rows [microbatch, replica, samples, …]."""
        metric = self.metrics[number]
        if metric.kind == "rows":
            joined = jnp.moveaxis(rows[0], 1, 0)
            joined = joined.reshape(-1, *joined.shape[3:])
            return jnp.moveaxis(joined, 0, metric.dim)
        if metric.kind == "weighted":
            found: jax.Array = (sums[0] / sums[1]).astype(metric.dtype)
        elif metric.reduction is not None:
            mean = sums[0] / metric.reduction.divisor(self.samples * self.calls, sums[1])
            found = (mean if jnp.issubdtype(metric.dtype, jnp.inexact) else jnp.round(mean)).astype(metric.dtype)
        else:
            found = sums[0].astype(metric.dtype)
        return found

    def all(self, sums: Sequence[Any], rows: Sequence[Any]) -> Any:
        """The metrics of a batch in the function's own structure."""
        found = [
            self.whole(number, [sums[i] for i in own], [rows[i] for i in joined])
            for number, (own, joined) in enumerate(self.uses())
        ]
        return self.unflatten(found)

    def unflatten(self, found: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self.structure, found)


def is_weighted(node: Any) -> bool:
    return isinstance(node, Weighted)


def _summed_in(dtype: Any) -> Any:
    """The dtype in which a mean is summed: at least fp32."""
    return jnp.promote_types(dtype, jnp.float32)


def metrics_of(
    reader: Reader, aux: Sequence[Any], twice: Sequence[Any] | None, structure: PyTreeDef, calls: int
) -> Metrics:
    """The metrics of a loss function, with the way in which each combines.

    reader: the reader of a function whose results are the loss and then the arrays of the metrics; aux: (name, metric
    as shapes) of a call; twice: the same with twice the samples. Raises PlanError, naming the metric and the fix, for
    one that cannot be told.
    """
    samples = reader.traced.samples
    found = []
    position = 1
    for number, (name, leaf) in enumerate(aux):
        if is_weighted(leaf):
            found.append(Metric(name, "weighted", leaf.value.shape, leaf.value.dtype))
            position += 2
            continue
        other = leaf if twice is None else twice[number][1]
        dims = [d for d, (a, b) in enumerate(zip(leaf.shape, other.shape, strict=True)) if a != b]
        if dims and (len(dims) > 1 or leaf.shape[dims[0]] != samples or other.shape[dims[0]] != 2 * samples):
            raise PlanError(
                f"metric {name} has shape {leaf.shape} with {samples} samples and {other.shape} with {2 * samples}: it "
                f"cannot be joined over microbatches; {FIX}"
            )
        if dims:
            found.append(Metric(name, "rows", leaf.shape, leaf.dtype, dims[0]))
        elif calls == 1:
            found.append(Metric(name, "sum", leaf.shape, leaf.dtype))
        else:
            found.append(_metric(name, leaf, *reader.reduction(position)))
        position += 1
    return Metrics(structure, tuple(found), samples, calls)


def _metric(name: str, leaf: Any, reduction: Reduction | None, verdict: Verdict) -> Metric:
    floating = jnp.issubdtype(leaf.dtype, jnp.inexact)
    counts = jnp.issubdtype(leaf.dtype, jnp.integer)
    if reduction is None:
        reason = "" if verdict.finding is None else f" ({verdict.finding.reason})"
        raise PlanError(
            f"metric {name} is a number for each microbatch from which that of the batch does not follow for certain"
            f"{reason}: {FIX}"
        )
    if reduction.combination == SUM.combination and (floating or counts):
        wide = leaf.dtype if leaf.dtype.itemsize >= 4 else jnp.promote_types(leaf.dtype, jnp.int32 if counts else "f4")
        return Metric(name, "sum", leaf.shape, wide)
    if not floating and verdict.combinations:
        raise PlanError(
            f"metric {name} is {leaf.dtype} and a {verdict.reduction}, of which there is one for each microbatch: {FIX}"
        )
    return Metric(name, "reduced", leaf.shape, leaf.dtype, reduction=reduction)


def arrays_of(aux: Any) -> tuple[list[tuple[str, Any]], PyTreeDef]:
    """The metrics by name, as arrays, and their structure. Raises PlanError for a metric that is no array."""
    named, structure = jax.tree_util.tree_flatten_with_path(aux, is_leaf=is_weighted)
    found: list[tuple[str, Any]] = []
    for path, leaf in named:
        name = "aux" + jax.tree_util.keystr(path)
        try:
            if is_weighted(leaf):
                require_wide(f"metric {name} has a weight", leaf.weight)
                found.append((name, Weighted(jnp.asarray(leaf.value), jnp.asarray(leaf.weight, jnp.float32))))
            else:
                found.append((name, jnp.asarray(leaf)))
        except (TypeError, ValueError):
            raise PlanError(
                f"metric {name} is a {type(leaf).__name__}: metrics are arrays and numbers; leave out what is none"
            ) from None
    return found, structure
