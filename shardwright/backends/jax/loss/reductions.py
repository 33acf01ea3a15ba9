"""The reductions of the losses and metrics of microbatches to those of the batch, read from the function's program.

`core.model.loss` decides. This module traces the function at two batch sizes, asks, and computes the counts of weighted
means from each microbatch, by the part of the function's own program that makes them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal, Var

from shardwright.backends.jax.capture.inner_programs import bound, inner_program
from shardwright.backends.jax.capture.model import Source, trace
from shardwright.backends.jax.capture.steps import Program, same_structure
from shardwright.backends.jax.capture.trace import Recorder
from shardwright.backends.jax.capture.tree import abstract, flat_names
from shardwright.backends.jax.loss.program import loss_program, require_alike_alone
from shardwright.core.errors import CaptureError, PlanError, ShardwrightError
from shardwright.core.model.loss import Combination, Finding, LossProgram, Verdict, read_loss

REDUCTIONS = (None, "mean", "sum")


@dataclass(frozen=True, slots=True)
class Traced:
    """A loss function as it can be traced: ``run(arrays, batch, recorder)`` gives its results, the loss first."""

    name: str
    run: Callable[[Any, Any, Any], list[Any]]
    arrays: Any
    """The parameters, random keys and other state, as shapes."""
    trained: tuple[bool, ...]
    """The flag of each leaf of ``arrays``: whether it is trained."""
    at: Callable[[int], Any]
    """A microbatch of so many samples, as shapes."""
    samples: int
    """The number of samples of a microbatch."""
    whole: int
    """The number of samples of all microbatches whose results are to be combined."""
    dims: tuple[int | None, ...]
    """The batch dim of every leaf of the batch."""

    @property
    def sizes(self) -> tuple[int, int]:
        """The batch sizes that the results are read at: those of a microbatch and of the whole, as the question is what
        holds between them. The first is at least 2, as one sample alone may run other ops."""
        small = max(2, self.samples)
        return small, max(small + 1, self.whole)


@dataclass(frozen=True, slots=True)
class Reduction:
    """A rule for results of microbatches: each times the `divisor` of its own samples, they add up to the result of the
    batch times the `divisor` of all."""

    combination: Combination
    count: "CountOf | None" = None

    def counted(self, samples: int, batch: Any) -> jax.Array:
        """The count C of a microbatch; without a count its number of samples."""
        told = self.combination.count
        if self.count is None or told is None:
            return jnp.asarray(float(samples), jnp.float32)
        twice = samples == 1  # programs of one sample may have other ops: it is counted twice then
        found: jax.Array = self.count(batch, twice=twice).astype(jnp.float32).reshape(())
        found = found * (2.0**told.power / 2.0 if twice else float(samples**told.power))
        return found

    def divisor(self, samples: int, count: jax.Array) -> jax.Array:
        """The divisor of the sum over ``samples`` samples; ``count`` is C of them all."""
        found: jax.Array = jnp.float32(float(samples) ** self.combination.power)
        told = self.combination.count
        if told is not None:
            below = count / float(samples**told.power)
            for guard in told.guards:
                if guard.how == "add":
                    below = below + guard.number
                else:
                    below = jnp.maximum(below, guard.number) if guard.how == "at_least" else below * guard.number
            found = found * below
        return found


MEAN = Reduction(Combination(1))
SUM = Reduction(Combination(0))


@dataclass(frozen=True, slots=True)
class CountOf:
    """A number that the function computes from its batch: the result of one equation of its program."""

    traced: Traced
    first: Program
    """The function at the first of `Traced.sizes`."""
    path: tuple[int, ...]
    position: int

    def __call__(self, batch: Any, *, twice: bool) -> jax.Array:
        """The number for a microbatch, or for twice the same samples. Raises PlanError where the function does not run
        the ops that it was read by."""
        if twice:
            leaves, structure = jax.tree.flatten(batch)
            dims = zip(leaves, self.traced.dims, strict=True)
            leaves = [leaf if dim is None else jnp.concatenate([leaf, leaf], dim) for leaf, dim in dims]
            batch = jax.tree.unflatten(structure, leaves)
        inputs = jax.tree.map(abstract, batch)
        closed, program = trace(source_of(self.traced, self.traced.arrays), inputs, list, whole_batch_norms=True)
        same_structure(self.first, program, self._differs)
        known: dict[Var, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        leaves = jax.tree.leaves(batch)
        known.update(zip(closed.jaxpr.invars[len(closed.jaxpr.invars) - len(leaves) :], leaves, strict=True))
        found: jax.Array = jnp.asarray(_result_at(closed.jaxpr, known.__getitem__, self.path, self.position))
        return found

    def _differs(self, what: str) -> CaptureError:
        return CaptureError(
            f"the count that the loss of {self.traced.name} is divided by is read at other batch sizes than the "
            f"microbatch's, where the function runs other ops ({what}): return sw.weighted(loss, weight)"
        )


def source_of(traced: Traced, arrays: Any) -> Source:
    names = flat_names(arrays)
    trainable = tuple(flag or None for flag in traced.trained)
    return Source(traced.name, arrays, names, trainable, {}, traced.run)


@dataclass(frozen=True, slots=True)
class Reader:
    """The reader of a function's results: it tells how each of them combines."""

    traced: Traced
    program: LossProgram | None
    flat: Program | None
    why: str = ""
    """The reason why there is no program."""
    at_whole: tuple[float | None, ...] = ()
    """The value of each result that is a literal, at the second of `Traced.sizes`."""

    @classmethod
    def of(cls, traced: Traced) -> "Reader":
        """The reader of a traced function: it is traced at two batch sizes, with batch norms as one op, which couples
        no samples."""
        source, sizes = source_of(traced, traced.arrays), traced.sizes

        def differs(what: str) -> CaptureError:
            return CaptureError(f"it does not run the same ops at every batch size: {what}")

        try:
            first, second = (trace(source, traced.at(size), list, whole_batch_norms=True)[1] for size in sizes)
            same_structure(first, second, differs, sizes)
            if traced.samples == 1:
                alone = trace(source, traced.at(1), list, whole_batch_norms=True)[1]
                require_alike_alone(alone, first, second, sizes)
        except CaptureError as error:
            return cls(traced, None, None, str(error))
        except ShardwrightError:
            raise
        except Exception as error:  # the user's function, of another number of samples
            said = str(error).partition("\n")[0]
            return cls(traced, None, None, f"it cannot be traced at batch {sizes[0]} and {sizes[1]} ({said:.200})")
        inputs = len(jax.tree.leaves(traced.at(2)))
        return cls(traced, loss_program(first, second, sizes, traced.trained, inputs), first, "", second.results)

    def reduction(self, number: int) -> tuple[Reduction | None, Verdict]:
        """The reduction of result ``number``; without one, the verdict's finding says why. A result that does not
        depend on the samples combines as a mean."""
        if self.program is None or self.flat is None:
            return None, Verdict(finding=Finding("unknown", self.why))
        value = self.flat.outputs[number]
        if value is None and self.flat.results[number] != self.at_whole[number]:
            return None, Verdict(finding=Finding("unknown", "it is a number that differs with the batch size"))
        if value is None:
            return Reduction(Combination(1)), Verdict(constant=True)
        verdict = read_loss(self.program, value)
        if verdict.finding is not None:
            return None, verdict
        found = verdict.combinations or (Combination(1),)
        if len(found) > 1:
            kinds = " and a ".join(dict.fromkeys(c.reduction for c in found))
            return None, Verdict(finding=Finding("mixed", f"it adds a {kinds}, whose weights may differ"))
        (combination,) = found
        if combination.count is None:
            return Reduction(combination), verdict
        if verdict.constant and combination.count.guards:
            return None, Verdict(finding=Finding(
                "mixed", "it adds a weighted mean whose count is kept from zero and a term that does not depend on the "
                "samples, which have different weights where a microbatch has nothing to count",
            ))  # fmt: skip
        count = self._count(combination.count.value)
        if isinstance(count, str):
            return None, Verdict(finding=Finding("unknown", count))
        return Reduction(combination, count), verdict

    def _count(self, value: int) -> CountOf | str:
        """The computation of a count, or the reason why there is none."""
        assert self.program is not None
        assert self.flat is not None
        makers = {made: step for step in self.flat.steps for made in step.outputs}
        step = makers.get(value)
        if step is None or step.path is None or sum(other.path == step.path for other in self.flat.steps) > 1:
            return "the number that it is divided by is made inside a loop"
        weights = set(self.flat.arguments[: len(self.traced.trained)])
        seen, missing = set(), [value]
        while missing:
            at = missing.pop()
            if at in weights or (at in makers and makers[at].name.startswith("random")):
                return "the number that it is divided by depends on parameters, state or random numbers"
            if at in makers and at not in seen:
                seen.add(at)
                missing += [v for v in makers[at].inputs if v is not None]
        return CountOf(self.traced, self.flat, step.path, step.outputs.index(value))


def asked(name: str, verdict: Verdict, microbatches: int) -> PlanError:
    """The error for a loss that does not show how it combines, so that the user has to say it."""
    finding = verdict.finding
    reason = "" if finding is None else finding.reason
    kind = {"coupled": "depends on several samples together", "mixed": "has terms that add up in different ways"}.get(
        "unknown" if finding is None else finding.kind, "cannot be told to be a mean over samples"
    )
    by_itself = "plan with loss_scope='replica' if every microbatch is meant to be taken by itself; "
    return PlanError(
        f"the loss of {name} {kind}: {reason}. This plan computes it for {microbatches} microbatches one by one, and "
        "the loss of the whole batch does not follow from theirs for certain. Plan with microbatch = batch / dp, so "
        f"that all samples are seen together; or say what is meant: {by_itself if kind.startswith('depends') else ''}"
        "return sw.weighted(loss, weight), or give "
        "train_step reduction='mean' for the mean of the microbatches' losses, reduction='sum' for their sum"
    )


def norm_of_samples(recorder: Recorder, traced: Traced) -> str:
    """The path of the first batch norm in a trace that takes its statistics over the samples; "" where all use saved
    statistics. Where the function does not run with another number of samples, any batch norm counts."""
    norms = [call.path for call in recorder.calls if call.whole_kind == "batch_norm"]
    if not norms:
        return ""
    source = source_of(traced, traced.arrays)
    try:
        first, second = (trace(source, traced.at(size), list)[1] for size in traced.sizes)
    except ShardwrightError:
        raise
    except Exception:  # the user's function, of another number of samples: nothing is known of its norms
        return norms[0]
    for one, other in zip(first.steps, second.steps, strict=False):
        path = first.calls[one.call].path
        grown = [first.shapes[v] != second.shapes[v] for v in one.inputs if v is not None]
        if path in norms and (one.name != other.name or one.inputs != other.inputs):
            return path
        if path in norms and any(grown) and all(first.shapes[v] == second.shapes[v] for v in one.outputs):
            return path
    return ""


def asked_scope(name: str, norm: str, microbatches: int) -> PlanError:
    """The error for batch norms of which it must be said which samples they see together."""
    return PlanError(
        f"the model of {name} norms its batch at {norm}, and this plan computes {microbatches} microbatches one by "
        "one: the statistics of the whole batch do not follow from theirs. Plan with microbatch = batch / dp, so that "
        "all samples are seen together, as by the unsplit model; or plan with loss_scope='replica', if every "
        "microbatch is meant to be normed by itself (so says train_step's reduction='mean' too), or "
        "loss_scope='global', for the microbatches of all replicas together"
    )


def _result_at(jaxpr: Jaxpr, given: Callable[[Var], Any], path: tuple[int, ...], position: int) -> Any:
    """The result of the equation at a path, with only those equations run that it needs. ``given`` gives the values of
    the program's constants and arguments, and is asked for those that are needed."""
    makers = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
    known: dict[Var, Any] = {}

    def value(atom: Var | Literal) -> Any:
        if isinstance(atom, Literal):
            return atom.val
        missing = [atom]
        while missing:
            variable = missing[-1]
            if variable not in known and variable not in makers:
                known[variable] = given(variable)
            if variable in known:
                missing.pop()
                continue
            equation = makers[variable]
            reads = [a for a in equation.invars if not isinstance(a, Literal) and a not in known]
            if reads:
                missing += reads
                continue
            operands = [a.val if isinstance(a, Literal) else known[a] for a in equation.invars]
            known.update(zip(equation.outvars, bound(equation.primitive, equation.params, operands), strict=True))
        return known[atom]

    equation = jaxpr.eqns[path[0]]
    if len(path) == 1:
        return value(equation.outvars[position])
    inner = inner_program(equation.params)
    assert inner is not None
    body = inner.jaxpr
    constants = dict(zip(body.constvars, inner.consts, strict=True))
    operands = dict(zip(body.invars, equation.invars[len(equation.invars) - len(body.invars) :], strict=True))

    def inside(variable: Var) -> Any:
        return constants[variable] if variable in constants else value(operands[variable])

    return _result_at(body, inside, path[1:], position)
