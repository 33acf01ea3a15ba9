"""Pipelines of equal stages as one SPMD program, which runs over the devices of any number of processes.

Equations before the blocks and after them run on every rank. The blocks run in a `shard_map` over pp: every rank holds
its stages' weights, and hands its results to the next with `ppermute`. One stage per rank is GPipe (arXiv 1811.06965);
several are the circular, breadth-first order (arXiv 2211.05953). The backward is the transpose of the loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from shardwright.backends.jax.capture.checkpoint_policies import POLICIES
from shardwright.backends.jax.pipeline.microbatch import CutMicrobatch
from shardwright.backends.jax.pipeline.stage_functions import TOTAL, WEIGHT
from shardwright.backends.jax.program.equations import evaluate, value_of
from shardwright.backends.jax.program.like_stages import Alike, alike
from shardwright.core.errors import MissingCapabilityError, PlanError
from shardwright.core.plan.plan import Plan

ORDERS = ("gpipe", "looped-bfs")


def block_plan(plan: Plan) -> Plan:
    """The plan with a stage for what comes before the blocks, one for every ``pp · virtual_stages`` part of them, and
    one for what comes after.

    Raises PlanError when the blocks do not divide, MissingCapabilityError for a schedule, a sharding or a model that
    this form does not run.
    """
    decision = plan.decision
    if decision.schedule not in ORDERS:
        raise MissingCapabilityError(
            f"the plan has schedule={decision.schedule!r}, and one program for all stages runs {' and '.join(ORDERS)}: "
            "plan with one of them"
        )
    if decision.other_units:
        raise MissingCapabilityError(
            f"the plan has other_recompute={decision.other_recompute!r}, and one program for all stages computes their "
            f"units again in one mode: run the stages as programs of their own, or plan again without it"
        )
    if decision.shard:
        raise MissingCapabilityError(
            f"the plan has shard={decision.shard}, which one program for all stages does not lay out: plan with shard=0"
        )
    classes = plan.model.unit_classes
    first, end = _longest_run(classes)
    stages = plan.stages
    if end - first < stages or (end - first) % stages:
        raise PlanError(
            f"the model repeats {end - first} blocks, which {stages} stages (pp {decision.pp} × virtual_stages "
            f"{decision.virtual_stages}) do not divide: use a number of stages that divides {end - first}"
        )
    if first == 0 or end == len(classes):
        raise MissingCapabilityError(
            "one program for all stages needs something before the first block and after the last (an embedding, a "
            "loss): run the stages as programs of their own in one process"
        )
    size = (end - first) // stages
    starts = (0, *range(first, end, size), end)
    ranks = (stages + 2) * decision.dp * decision.tp  # as many as it would take, were each stage a program of its own
    return replace(
        plan,
        decision=replace(decision, pp=stages + 2, virtual_stages=1, stage_starts=starts),
        provenance=replace(plan.provenance, world_size=ranks),
    )


def _refuse_results_of_blocks(micro: CutMicrobatch, stages: int) -> None:
    """Raise MissingCapabilityError for metrics that a block makes, and for values that skip stages on their way out."""
    for stage in range(1, stages + 1):
        if micro.cut.parts[stage].results:
            raise MissingCapabilityError(
                f"a metric of the loss function is made inside stage {stage - 1}, and one program for all stages gives "
                "out what is made before the first block and after the last: leave it out, or run the stages as "
                "programs of their own in one process"
            )
    for arrival in micro.cut.parts[stages + 1].arrivals:
        if 0 < arrival.source < stages:
            raise MissingCapabilityError(
                f"what follows the blocks reads a value of shape {micro.cut.flat.avals[arrival.value].shape} that "
                f"stage {arrival.source - 1} makes: one program for all stages hands values on to the next alone; "
                "run the stages as programs of their own in one process"
            )


def _longest_run(classes: Sequence[int]) -> tuple[int, int]:
    """The longest run of units of one class: the first unit, and the one after the last."""
    runs = [list(members) for _, members in groupby(range(len(classes)), key=classes.__getitem__)]
    longest = max(runs, key=len)
    return longest[0], longest[-1] + 1


@dataclass(frozen=True, slots=True)
class SpmdLoss:
    """The loss of all microbatches as one program: Σ weight · loss and Σ weight."""

    micro: CutMicrobatch
    blocks: Alike
    mesh: Mesh
    ranks: int
    rounds: int
    microbatches: int
    recompute: str

    @classmethod
    def of(cls, micro: CutMicrobatch, plan: Plan, mesh: Mesh) -> "SpmdLoss":
        """The loss of a cut microbatch under a plan. Raises MissingCapabilityError when stages are not alike, or the
        model keeps state between microbatches."""
        if micro.operands.state:
            raise MissingCapabilityError(
                "the model keeps state from microbatch to microbatch (batch statistics), which one program for all "
                "stages does not carry: run the stages as programs of their own in one process"
            )
        d = plan.decision
        if d.virtual_stages > 1 and plan.microbatches < d.pp:
            raise PlanError(
                f"{plan.microbatches} microbatches are fewer than pp={d.pp}: a circular pipeline needs at least as many"
            )
        _refuse_results_of_blocks(micro, plan.stages)
        found = alike(micro.cut, 1, plan.stages)
        return cls(micro, found, mesh, d.pp, d.virtual_stages, plan.microbatches, d.recompute)

    def __call__(
        self, stacked: Sequence[Any], weights: dict[int, Any], sources: dict[int, Any], batch: dict[int, Any]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array, list[jax.Array], list[jax.Array]]]:
        """The sum of weight · loss; that of every microbatch, Σ weight, and the metrics' arrays that add up and those
        that are joined.

        stacked: for every weight of the blocks [rounds, ranks, …], the ranks along pp; weights: all others."""
        parts, flat = self.micro.cut.parts, self.micro.cut.flat
        operands = self.micro.operands
        before, after = parts[0], parts[-1]
        common = {**flat.constants, **weights, **sources}

        def at(m: Any) -> dict[int, Any]:
            dims = self.micro.operands.batch
            taken = {v: jax.lax.dynamic_index_in_dim(a, m, keepdims=False) if dims[v] else a for v, a in batch.items()}
            return {**common, **taken, self.micro.operands.m: m}

        def prologue(m: Any) -> dict[int, Any]:
            known = at(m)
            evaluate(before.equations, known, self.recompute)
            return {value: known[value] for value in (*before.departures, *first)}

        first = [a for p in before.results if isinstance(a := flat.outputs[p], int)]
        early = jax.lax.map(prologue, jnp.arange(self.microbatches))
        late = self._pipeline(stacked, common, batch, early)

        def epilogue(m: Any) -> list[jax.Array]:
            known = at(m)
            known.update((value, early[value][m]) for value in (*before.departures, *first))
            known.update((value, late[number][m]) for number, (value, _) in enumerate(self.blocks.final))
            evaluate(after.equations, known, self.recompute)
            atoms = (flat.outputs[which] for which in (TOTAL, WEIGHT, *operands.sums, *operands.rows))
            return [value_of(flat, atom, known) for atom in atoms]

        totals, counted, *beside = jax.lax.map(epilogue, jnp.arange(self.microbatches))
        sums = [each.sum(0) for each in beside[: len(operands.sums)]]
        return totals.sum(), (totals, counted.sum(), sums, beside[len(sums) :])

    def _block(self, weights: list[Any], carried: list[Any], known: dict[int, Any]) -> tuple[list[Any], list[Any]]:
        """The values that one stage hands on for one microbatch, and those that the last stage is asked for."""
        blocks, values = self.blocks, {**self.micro.cut.flat.constants, **known}
        values.update((ids[0], w) for ids, w in zip(blocks.stacked, weights, strict=True))
        values.update(zip(blocks.entering, carried, strict=True))
        evaluate(blocks.equations, values)
        return [values[v] for v in blocks.leaving], [values[v] for _, v in blocks.final]

    def _pipeline(
        self, stacked: Sequence[Any], common: dict[int, Any], batch: dict[int, Any], early: dict[int, Any]
    ) -> list[Any]:
        """The values that the last stage made of every microbatch: for each of `Alike.final`, [microbatches, …]."""
        blocks, ranks, count = self.blocks, self.ranks, self.microbatches
        dims, number = self.micro.operands.batch, self.micro.operands.m
        shared = {v: common[v] for v in blocks.shared if v in common}
        sides = {v: early[v] for v in blocks.shared if v in early}
        pieces = {v: batch[v] for v in blocks.shared if v in batch}
        shift = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
        entering = [early[v] for v in blocks.entering]
        circular = self.rounds > 1

        run: Any = self._block
        if self.recompute != "none":
            run = jax.checkpoint(self._block, policy=POLICIES[self.recompute])

        def rank_program(stacked: list[Any], entering: list[Any], shared: Any, sides: Any, pieces: Any) -> list[Any]:
            rank = jax.lax.axis_index("pp")
            entering, shared, sides, pieces = jax.tree.map(_like, (entering, shared, sides, pieces), given)

            def tick(carry: tuple[list[Any], list[Any]], given: Any) -> tuple[tuple[list[Any], list[Any]], list[Any]]:
                (arrived, stored), (t, first) = carry, given
                here = jnp.clip(t - rank, 0, self.rounds * count - 1)
                turn, m = here // count, here % count

                def take(a: Any) -> Any:
                    return jax.lax.dynamic_index_in_dim(a, m, keepdims=False)

                if circular:
                    # Rank 0 keeps what the last rank sent until its next round comes to that microbatch.
                    back = t - ranks
                    stored = [
                        jnp.where(
                            (back >= 0) & (rank == 0),
                            jax.lax.dynamic_update_index_in_dim(s, a, jnp.maximum(back, 0) % count, 0),
                            s,
                        )
                        for s, a in zip(stored, arrived, strict=True)
                    ]
                    first = [take(s) for s in stored]
                    weights = [jax.lax.dynamic_index_in_dim(w[:, 0], turn, keepdims=False) for w in stacked]
                else:
                    weights = [w[0, 0] for w in stacked]
                carried = [jnp.where(rank > 0, a, e) for a, e in zip(arrived, first, strict=True)]
                known = {**shared, **{v: take(a) for v, a in sides.items()}, number: m}
                known.update((v, take(a) if dims[v] else a) for v, a in pieces.items())
                made, final = run(*_learning_if(here == t - rank, (weights, carried, known)))
                return ([jax.lax.ppermute(y, "pp", shift) for y in made], stored), final

            # While a rank has nothing to do it runs on the first or the last microbatch, from which nothing is learnt.
            nothing, last = [e[0] for e in entering], [jnp.repeat(e[-1:], ranks - 1, 0) for e in entering]
            ticks = self.rounds * count + ranks - 1
            # An input that enters tick by tick has its gradient made tick by tick; a loop that picks from the whole
            # input would add to its whole gradient every time. With several rounds it waits where later ones will.
            stored = entering if circular else []
            first = [] if circular else [jnp.concatenate(both) for both in zip(entering, last, strict=True)]
            _, finals = jax.lax.scan(tick, (nothing, stored), (jnp.arange(ticks), first))
            return [f[None, ticks - count :] for f in finals]

        whole, split = PartitionSpec(), PartitionSpec("pp")
        mapped: Any = jax.shard_map(
            rank_program,
            mesh=self.mesh,
            in_specs=(PartitionSpec(None, "pp"), whole, whole, whole, whole),
            out_specs=split,
            axis_names={"pp"},
            check_vma=False,  # equations are bound as they were traced, without the casts that the check asks for
        )
        given = (entering, shared, sides, pieces)
        return [made[-1] for made in mapped(list(stacked), *jax.tree.map(_summable, given))]


def _summable(array: jax.Array) -> jax.Array:
    """An array that every rank reads, with at least 32 bits, so that the gradients of all ranks are summed in them."""
    narrow = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize < 4
    return array.astype(jnp.float32) if narrow else array


def _like(array: jax.Array, before: jax.Array) -> jax.Array:
    """The counterpart of `_summable`."""
    return array if array.dtype == before.dtype else array.astype(before.dtype)


def _learning_if(busy: jax.Array, values: Any) -> Any:
    """Values as they are, with gradients where ``busy``, and gradients of zero elsewhere. A gradient of zero that went
    through the stage would not stay zero: where a derivative of the stage is infinite, zero times it is NaN."""

    def passed(a: Any) -> Any:
        inexact = jnp.issubdtype(a.dtype, jnp.inexact)
        return jax.lax.select(busy, a, jax.lax.stop_gradient(a)) if inexact else a

    return jax.tree.map(passed, values)
