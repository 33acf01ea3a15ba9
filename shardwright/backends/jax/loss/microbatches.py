"""The loss of one step: microbatches one after the other, replicas beside each other, combined by weight."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.tree_util import PyTreeDef

from shardwright.backends.jax.capture.checkpoint_policies import computed_again
from shardwright.backends.jax.capture.loss_results import Returned, read_returned
from shardwright.backends.jax.capture.module_inputs import ModuleCalls, user_line, wide_products
from shardwright.backends.jax.capture.precision import COMPUTE, computed_in, step_dtype
from shardwright.backends.jax.capture.samples import FlatBatch
from shardwright.backends.jax.capture.trace import Recorder, boxed_functions, linen_calls, nnx_calls, recomputed
from shardwright.backends.jax.capture.tree import Parts, abstract, put_together, take_apart
from shardwright.backends.jax.loss.metrics import Metrics, arrays_of, is_weighted, metrics_of
from shardwright.backends.jax.loss.reductions import (
    MEAN,
    SUM,
    Reader,
    Reduction,
    Traced,
    asked,
    asked_scope,
    norm_of_samples,
)
from shardwright.backends.jax.machine.mesh import DataAxes, data_axes, mesh_of
from shardwright.backends.jax.program.python_values import PythonValues, WithValues
from shardwright.backends.jax.state.shardings import copies_at
from shardwright.backends.jax.state.train_state import fold_random
from shardwright.backends.jax.state.trainable import ALL, Trained
from shardwright.core.errors import PlanError, PlanWarning, ShardwrightError
from shardwright.core.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class LossFunction:
    """A user's loss function made uniform: (model taken apart, batch) → `Returned`."""

    function: Callable[..., Any]
    keywords: frozenset[str]
    """The keywords among ``rngs`` and ``state`` that the function takes."""
    compute: Any
    """The dtype in which it computes; None: that of the parameters."""
    modes: tuple[tuple[str, str], ...]
    """The modules whose calls are computed again in the backward pass, those of the plan's units, and the mode of
    each."""
    reduction: str | None = None
    """The user's word on how the losses of microbatches combine: "mean", "sum", or None."""
    has_aux: bool = False
    """Whether the function returns metrics beside the loss."""
    trained: Trained = ALL
    """The parameters that gradients are taken of."""
    python: PythonValues | None = None
    """The Python values that the function reads."""
    recorder: Recorder | None = None
    """The recorder that marks module calls, for a program that is cut."""
    laid_out: Callable[..., Returned] | None = None
    """A function that takes this one and its arguments, and runs it with its values laid out as the plan says."""
    casts_batch: bool = False
    """Whether the whole batch is cast to the dtype that it computes in: the function calls no modules, whose inputs
    would be."""

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        plan: Plan,
        *,
        reduction: str | None = None,
        has_aux: bool = False,
        trained: Trained = ALL,
        python: PythonValues | None = None,
    ) -> "LossFunction":
        """The uniform form of ``function`` under a plan that is bound to JAX."""
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            parameters = {}.values()
        open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        names = {p.name for p in parameters}
        keywords = frozenset({"rngs", "state"} if open_ended else names & {"rngs", "state"})
        units = plan.binding("jax").units
        compute = COMPUTE[plan.decision.precision]
        # A pipeline recomputes by stage and unit, whatever the model is made of.
        in_stages = plan.decision.pp > 1 or plan.decision.offloaded_units or plan.decision.slice_count > 1
        again = () if in_stages else computed_again(plan)
        of_unit = plan.unit_modes
        modes = {call.path: of_unit[unit] for unit in again for call in units[unit].calls}
        return cls(function, keywords, compute, tuple(modes.items()), reduction, has_aux, trained, python)

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __call__(self, parts: Parts, batch: Any) -> Returned:
        return self.plain(parts, batch) if self.laid_out is None else self.laid_out(self, parts, batch)

    def plain(self, parts: Parts, batch: Any) -> Returned:
        """The function as the user wrote it. A batch may come with the Python numbers that are inputs of the step."""
        return self._run(parts, batch, ModuleCalls(self.compute))

    def _run(self, parts: Parts, batch: Any, calls: ModuleCalls) -> Returned:
        """The results, with the inputs of modules as ``calls`` gives them where it computes in 16 bits."""
        values: Sequence[Any] = ()
        if isinstance(batch, WithValues):
            batch, values = batch.batch, batch.values
        if self.compute is not None:
            cast = partial(computed_in, self.compute)
            parts = replace(parts, params=jax.tree.map(cast, parts.params))
            batch = jax.tree.map(cast, batch) if self.casts_batch else batch
        with nullcontext() if self.python is None else self.python.given(values):
            return self._called(parts, batch, calls)

    def _called(self, parts: Parts, batch: Any, calls: ModuleCalls) -> Returned:
        narrow = self.compute is not None
        if parts.graphdef is not None:
            model = put_together(parts)
            marking = nnx_calls(model, self.recorder) if self.recorder else nullcontext()
            attributes = nullcontext() if self.python is None else self.python.on(model)
            inputs = calls.around(model) if narrow else nullcontext()
            with attributes, marking, recomputed(model, dict(self.modes)), inputs:
                found = self._read(self.function(model, batch), None, takes_state=False)
            return found._replace(state=jax.tree.map(_as_before, take_apart(model).other, parts.other))
        given = {"rngs": parts.random, "state": parts.other}
        extra = {name: value for name, value in given.items() if name in self.keywords}
        marking = linen_calls(self.recorder) if self.recorder else nullcontext()
        with marking, calls.around(None) if narrow else nullcontext():
            found = self.function(parts.params, batch, **extra)
            return self._read(found, parts.other, takes_state="state" in self.keywords)

    def told_of_inputs(self, parts: Parts, batch: Any) -> "LossFunction":
        """The same function, which knows whether it has to cast its batch. The arguments are shapes."""
        if self.compute is None:
            return self
        calls = ModuleCalls(self.compute)
        with boxed_functions():  # JAX remembers what inner functions were traced to
            try:
                jax.eval_shape(lambda parts, batch: self._run(parts, batch, calls).loss, parts, batch)
                found = replace(self, casts_batch=calls.count == 0)
                closed = jax.make_jaxpr(lambda parts, batch: found.plain(parts, batch).loss)(parts, batch)
            except ShardwrightError:
                raise
            except Exception as error:
                jax.eval_shape(replace(self, compute=None).plain, parts, batch)  # is it the user's own?
                raise PlanError(
                    f"{self.name} does not run in {self.compute}, with parameters and inputs of modules cast to it: "
                    f"{error}; let it take them, or plan with precision='fp32'"
                ) from error
        wide = wide_products(closed.jaxpr)
        if wide:
            warnings.warn(
                f"{len(wide)} matrix products of {self.name} are computed in float32, and the plan counts on "
                f"{self.compute}: the first at {user_line(wide[0])}. A float32 array (a mask, a constant, other state) "
                "makes what it meets float32: cast it to the dtype of what it meets, if that is not meant",
                PlanWarning,
                stacklevel=2,
            )
        return found

    def _read(self, returned: Any, state: Any, *, takes_state: bool) -> Returned:
        return read_returned(returned, state, takes_state=takes_state, has_aux=self.has_aux)


@dataclass(frozen=True, slots=True)
class Microbatches:
    """A global batch as microbatches, and the loss of the m-th of them.

    Replica r of dp holds the r-th of dp equal shards of the batch, and microbatch m is the m-th part of that: global
    microbatch r · microbatches + m. ``per_replica`` runs the loss function on every replica's microbatch by itself;
    otherwise (loss scope "global") on the m-th microbatches of all replicas together.
    """

    loss: LossFunction
    graphdef: nnx.GraphDef[Any] | None
    structure: PyTreeDef
    """The structure of the batch as a pytree; its leaves are handed over one by one."""
    dims: tuple[int | None, ...]
    """The batch dim of every leaf."""
    replicas: int
    microbatches: int
    per_replica: bool
    metrics: Metrics | None = None
    """The metrics beside the loss, with the way in which each combines; None without any."""

    reduction: Reduction | None = None
    """The reduction by which the losses of microbatches combine; None: by the weights that come with them."""
    samples: int = 1
    """The number of samples of a microbatch; with the loss scope "global" over all replicas."""
    axes: DataAxes = "dp"
    """The mesh axes of the replicas."""
    copies: tuple[int | None, ...] = ()
    """The dim along which each parameter is given to `total` once for every replica; None: it is given once. The
    gradient of a copy is that of one replica's samples, so that gradients of 16 bits can be summed in float32."""

    @classmethod
    def of(
        cls,
        loss: LossFunction,
        plan: Plan,
        parts: Parts,
        given: FlatBatch,
    ) -> "Microbatches":
        """The microbatches under a plan, for a model taken apart and batches of the form of ``given``.

        Raises PlanError where it cannot be told how a loss or a metric of microbatches combines.
        """
        decision = plan.decision
        alone = decision.loss_scope != "global" and decision.dp > 1
        batch = cls(loss, parts.graphdef, given.structure, given.dims, decision.dp, plan.microbatches, alone)
        size = next(leaf.shape[dim] for leaf, dim in zip(given.leaves, given.dims, strict=True) if dim is not None)
        batch = replace(batch, samples=size // batch.calls, axes=data_axes(mesh_of(plan).names))
        if loss.compute is not None:
            loss = loss.told_of_inputs(jax.tree.map(abstract, parts), given.resized(batch.samples))
            batch = replace(batch, loss=loss, copies=_copied(loss, parts.params) if alone else ())
        lifted = loss.python is not None and loss.python.lifted
        if batch.calls == 1 and loss.reduction is None and not loss.has_aux and not lifted:
            return batch
        # How losses combine is the same in every precision: it is read as the function is without casts.
        results = _Results(replace(loss, compute=None), jax.tree.map(abstract, parts))
        recorder = Recorder(whole_batch_norms=True)
        aux = results.metrics(given.resized(batch.samples), recorder)
        weighs, form = results.weighs, results.form
        if loss.reduction is not None and weighs:
            raise PlanError(f"reduction={loss.reduction!r} was given, and the loss function returns a weight: give one")
        mask = (*loss.trained.mask(parts.params), *([False] * len(jax.tree.leaves((parts.random, parts.other)))))
        name, whole = loss.name, batch.samples * batch.calls
        traced = Traced(name, results.run, results.parts, mask, given.resized, batch.samples, whole, given.dims)
        as_global = replace(plan, decision=replace(decision, loss_scope="global"))
        is_asked = batch.calls > 1 and decision.loss_scope is None and loss.reduction is None
        if is_asked and (norm := norm_of_samples(recorder, traced)):
            if alone and plan.microbatches == 1:
                return cls.of(loss, as_global, parts, given)
            raise asked_scope(name, norm, batch.calls)
        metrics = loss.has_aux and batch.calls > 1 and any(m.dtype for _, m in aux if not is_weighted(m))
        asks = batch.calls > 1 and loss.reduction is None and not weighs
        reader = Reader.of(traced) if asks or metrics else Reader(traced, None, None)
        if loss.reduction == "sum":
            batch = replace(batch, reduction=SUM)
        elif asks:
            reduction, verdict = reader.reduction(0)
            is_coupled = verdict.finding is not None and verdict.finding.kind == "coupled"
            if is_coupled and decision.loss_scope == "replica":  # every microbatch is meant to be taken by itself
                reduction = MEAN
            if reduction is None and alone and plan.microbatches == 1 and decision.loss_scope is None:
                return cls.of(loss, as_global, parts, given)
            if reduction is None:
                raise asked(name, verdict, batch.calls)
            batch = replace(batch, reduction=None if reduction == MEAN else reduction)
        if not loss.has_aux:
            return batch
        twice = (
            results.metrics(given.resized(2 * batch.samples))
            if any(not is_weighted(m) and m.ndim for _, m in aux)
            else None
        )
        return replace(batch, metrics=metrics_of(reader, aux, twice, form, batch.calls))

    @property
    def calls(self) -> int:
        """The number of times that the loss function is called for a batch."""
        return self.microbatches * (self.replicas if self.per_replica else 1)

    def divisor(self, counted: jax.Array) -> jax.Array:
        """The divisor of a step's sums, from the number that `total` counted over all its microbatches."""
        return counted if self.reduction is None else self.reduction.divisor(self.samples * self.calls, counted)

    def weights(self, params: Any, at: Any) -> Any:
        """The parameters as a step computes with them, with the shardings ``at`` where that is another dtype."""
        if self.loss.compute is None:
            return params
        return jax.lax.with_sharding_constraint(jax.tree.map(partial(computed_in, self.loss.compute), params), at)

    def copied(self, leaf: jax.Array, dim: int | None, at: NamedSharding) -> jax.Array:
        """A parameter as `total` takes it: a copy for every replica along ``dim``, if any, each on its own devices,
        with the sharding ``at``."""
        if dim is None:
            return leaf
        wide = jnp.broadcast_to(jnp.expand_dims(leaf, dim), self.copied_shape(leaf.shape, dim))
        placed: jax.Array = jax.lax.with_sharding_constraint(wide, copies_at(at, dim, self.axes))
        return placed

    def copied_shape(self, shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
        """The shape of what `copied` makes."""
        return (*shape[:dim], self.replicas, *shape[dim:])

    def summed(self, gradient: jax.Array, dim: int | None, dtype: Any) -> jax.Array:
        """The gradient of a parameter in ``dtype``, from that of what `copied` made."""
        wide = gradient.astype(dtype)
        return wide if dim is None else wide.sum(dim)

    def split(self, leaf: Any, dim: int | None) -> Any:
        """The array [microbatch, replica, samples, …] of a leaf […, batch, …]; a leaf without a batch dim as it is."""
        return leaf if dim is None else _numbers(leaf).moveaxis(self.by_replica(leaf, dim), 1, 0)

    def by_replica(self, leaf: Any, dim: int) -> Any:
        """The array [replica, microbatch, samples, …] of a leaf […, batch, …]: in the order in which it lies in memory,
        where the batch is its first dim."""
        front = _numbers(leaf).moveaxis(_numbers(leaf).asarray(leaf), dim, 0)
        return front.reshape(self.replicas, self.microbatches, -1, *front.shape[1:])

    def take(self, split: Sequence[jax.Array], m: jax.Array | int) -> list[jax.Array]:
        """The m-th microbatches, stacked over replicas."""
        return [leaf if dim is None else leaf[m] for leaf, dim in zip(split, self.dims, strict=True)]

    def total(
        self, params: Any, random: Any, step: jax.Array, other: Any, m: jax.Array | int, part: Sequence[jax.Array]
    ) -> tuple[jax.Array, tuple[jax.Array, Any, list[jax.Array], list[jax.Array]]]:
        """The sum of weight · loss over replicas, that of the weights (or what else makes the `divisor`), the other
        state after it, and the metrics' arrays: those that add up over microbatches and those that are joined,
        [replica, samples, …]."""

        def one(replica: Any, pieces: list[jax.Array], leaves: list[jax.Array]) -> Any:
            restored = [_restore(piece, dim) for piece, dim in zip(pieces, self.dims, strict=True)]
            folded = fold_random(random, step, replica * self.microbatches + m)
            batch = jax.tree.unflatten(self.structure, restored)
            arrays = Parts(jax.tree.unflatten(structure, leaves), folded, other, self.graphdef)
            loss, weight, after, aux, _ = self.loss(arrays, batch)
            counted = weight
            if self.reduction is not None:
                counted = self.reduction.counted(self.samples, batch)
                weight = self.reduction.divisor(self.samples, counted)
            pairs = zip(jax.tree.leaves(after), given, strict=False)
            kept.append({number for number, (new, old) in enumerate(pairs) if new is old})
            made = ([], []) if self.metrics is None else self.metrics.of_call(aux, batch)
            return loss, weight, counted, after, *made

        weights, structure = jax.tree.flatten(params)
        given = jax.tree.leaves(other)
        kept: list[set[int]] = []
        """The numbers of the other values that come out as they went in."""
        if self.per_replica and self.replicas > 1:
            over = [None if dim is None else 0 for dim in self.dims]
            copies = list(self.copies or [None] * len(weights))
            run = jax.vmap(one, in_axes=(0, over, copies), spmd_axis_name=self.axes)
            losses, weights, counted, after, sums, rows = run(jnp.arange(self.replicas), list(part), weights)
            sums = [each.sum(0) for each in sums]
            leaves, form = jax.tree.flatten(after)
            merged = [given[i] if i in kept[-1] else _over_replicas(leaf) for i, leaf in enumerate(leaves)]
            after = jax.tree.unflatten(form, merged)
        else:
            joined = [p if dim is None else p.reshape(-1, *p.shape[2:]) for p, dim in zip(part, self.dims, strict=True)]
            losses, weights, counted, after, sums, rows = one(0, joined, weights)
            rows = [each.reshape(self.replicas, -1, *each.shape[1:]) for each in rows]
        weights, counted = jax.lax.stop_gradient((weights, counted))
        return jnp.sum(losses * weights), (jnp.sum(counted), after, sums, rows)


def _as_before(new: Any, old: Any) -> Any:
    """An array that a model changed, in the dtype that it had before: steps in 16 bits make no other state narrower."""
    return new if new.dtype == old.dtype else new.astype(old.dtype)


def _copied(loss: LossFunction, params: Any) -> tuple[int | None, ...]:
    """The `Microbatches.copies` of parameters: those that are trained and computed with in 16 bits."""
    flags = zip(jax.tree.leaves(params), loss.trained.mask(params), strict=True)
    return tuple(0 if flag and step_dtype(leaf.dtype, loss.compute) == loss.compute else None for leaf, flag in flags)


@dataclass(slots=True)
class _Results:
    """The results of a loss function: the loss, and the arrays of the metrics."""

    loss: LossFunction
    parts: Parts
    """The model taken apart, as shapes."""
    weighs: bool = False
    """Whether the function returned a weight when it was traced last."""
    form: PyTreeDef | None = None
    """The structure of the metrics in the last trace."""
    named: list[tuple[str, Any]] = field(default_factory=list)
    """The metrics of the last trace, by name."""

    def run(self, parts: Parts, batch: Any, recorder: Recorder | None) -> list[jax.Array]:
        made = replace(self.loss, recorder=recorder).plain(parts, batch)
        self.weighs = made.weighs
        self.named, self.form = arrays_of(made.aux)
        found: list[jax.Array] = jax.tree.leaves([made.loss, [leaf for _, leaf in self.named]])
        return found

    def metrics(self, batch: Any, recorder: Recorder | None = None) -> list[tuple[str, Any]]:
        """The metrics by name, as shapes, for a batch of shapes."""
        with boxed_functions():  # as the reader traces it: JAX remembers what inner functions were traced to
            jax.eval_shape(lambda parts, batch: self.run(parts, batch, recorder), self.parts, batch)
        return [(name, jax.tree.map(abstract, leaf)) for name, leaf in self.named]


def _numbers(leaf: Any) -> Any:
    """The module whose functions take an array: those of the host stay there."""
    return jnp if isinstance(leaf, jax.Array) else np


def _restore(piece: jax.Array, dim: int | None) -> jax.Array:
    return piece if dim is None else jnp.moveaxis(piece, 0, dim)


def _over_replicas(leaf: jax.Array) -> jax.Array:
    """One value of the values that every replica changed by itself: the mean of numbers, the first of anything else."""
    return leaf.mean(0) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf[0]
