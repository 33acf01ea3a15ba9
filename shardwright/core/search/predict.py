"""The predicted time of a step: the pipeline, the reduction of gradients after it, and the optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwright.core.cost.unit_work import PRECISION_BYTES
from shardwright.core.layout.mesh import Mesh
from shardwright.core.plan.decision import Decision
from shardwright.core.plan.record import Predicted
from shardwright.core.schedule import AUTO, StageCosts
from shardwright.core.schedule.simulate import simulate_schedule
from shardwright.core.tables.gathered_stages import gathers_per_stage, most_gathers
from shardwright.core.tables.memory import MemoryUse
from shardwright.core.tables.mesh_links import Links
from shardwright.core.tables.optimizers import OPTIMIZERS
from shardwright.core.tables.rank_tables import RankTables, RankWork

HIDDEN_SHARE = 0.9
"""The share of the compute time that the traffic of sharded parameters can hide behind. Prior: the first gather and the
last scatter of a pass overlap with nothing, about a tenth of a pass of a dozen units or more."""


@dataclass(frozen=True, slots=True)
class _Entries:
    """The parameter elements of a rank: the trained ones, which alone are reduced; all that it holds; and the trained
    ones times the measured share of the optimizer's step."""

    trained: float
    held: float
    updated: float


class StepModel:
    """A model of the step times on one cluster in one precision."""

    def __init__(self, links: Links, precision: str) -> None:
        self.links, self.cluster, self.precision = links, links.cluster, precision
        units = [unit for group in self.cluster.groups for unit in group.device.measured_units]
        self._least_share = min((unit.update_share for unit in units), default=1.0)
        """The least share that any measured optimizer step took of the time that is counted for it."""

    def predicted(
        self,
        decision: Decision,
        tables: RankTables,
        memory: tuple[MemoryUse, ...],
        pipeline_s: float | None,
        placement: Sequence[int],
    ) -> Predicted:
        """The predicted time of a decision's step, and the memory of its ranks.

        ``pipeline_s`` is the makespan of the pipeline; None where there is one stage, whose work is the makespan.
        ``placement`` gives the pipeline rank of each stage.
        """
        mesh, starts = decision.mesh, decision.stage_starts
        ranks = tables.work(starts, placement)
        work = [rank.seconds * decision.microbatches for rank in ranks]
        pipeline = pipeline_s if pipeline_s is not None else max(work)
        reduce_s, update_s = self.tail(mesh, decision, ranks, pipeline)
        reduce_s += self._tied_s(decision, tables.tied(starts, placement))
        return Predicted(
            step_time_s=pipeline + reduce_s + update_s,
            pipeline_s=pipeline,
            bubble_fraction=max(0.0, 1 - sum(work) / (decision.pp * pipeline)) if pipeline else 0.0,
            tensor_collective_s=max(rank.collective_s for rank in ranks) * decision.microbatches,
            data_parallel_s=reduce_s,
            optimizer_s=update_s,
            memory_by_stage_rank=memory,
            mesh=mesh,
        )

    def steps_s(
        self,
        decisions: Sequence[Decision],
        ranks: Sequence[RankWork],
        tied: Sequence[tuple[tuple[int, ...], int]],
        pipeline_s: float | None,
    ) -> list[float]:
        """The step times alone, as in `predicted`, for decisions that differ in what they shard; ``ranks`` and ``tied``
        are those of their cut."""
        first = decisions[0]
        pipeline = max(rank.seconds for rank in ranks) * first.microbatches if pipeline_s is None else pipeline_s
        mesh = first.mesh
        shared = pipeline + self._tied_s(first, tied)
        return [shared + sum(self.tail(mesh, decision, ranks, pipeline)) for decision in decisions]

    def tail(self, mesh: Mesh, decision: Decision, ranks: Sequence[RankWork], pipeline_s: float) -> tuple[float, float]:
        """The pair (seconds to reduce gradients over dp, seconds of the optimizer step) of the slowest pipeline rank,
        with no overlap; measured time that comes once per step is added to the first."""
        found = []
        for alike in self.links.alike(mesh):
            own = [ranks[pp] for pp in alike]
            fullest = _Entries(
                max(rank.elements for rank in own),
                max(rank.held_elements for rank in own),
                max(rank.updated_elements for rank in own),
            )
            reduce_s, update_s = self._tail(mesh, decision, fullest, pipeline_s, alike[0])
            found.append((reduce_s + max(rank.once_s for rank in own), update_s))
        return max(found, key=sum)

    def least_tail_s(self, mesh: Mesh, decision: Decision, entries: tuple[float, float], pipeline_s: float) -> float:
        """Seconds below which the tail does not get when some rank, no matter which, trains and holds at least
        ``entries``."""
        trained, held = entries
        kinds = self.links.alike(mesh)

        def least_s(trained: float, held: float) -> float:
            least = _Entries(trained, held, trained * self._least_share)
            tails = (self._tail(mesh, decision, least, pipeline_s, alike[0], ends=False) for alike in kinds)
            return min(map(sum, tails))

        if decision.shard == 3 and len(kinds) > 1:
            # Where ranks differ, one may train most and another hold most.
            return max(least_s(trained, 0.0), least_s(0.0, held))
        return least_s(trained, held)

    def _tail(
        self, mesh: Mesh, decision: Decision, entries: "_Entries", pipeline_s: float, pp: int, *, ends: bool = True
    ) -> tuple[float, float]:
        """As `tail`, for one rank. ``ends``: whether the first gather and the last scatter of whole stages, which
        nothing hides, are among it."""
        dp = mesh.axis_size("dp")
        elements, held = entries.trained, entries.held
        width = PRECISION_BYTES[self.precision]
        size = elements * width
        reduced = elements * PRECISION_BYTES[decision.gradient_precision or self.precision]
        reduce_s = 0.0
        if dp > 1 and (elements or decision.shard == 3):  # else there is nothing to send
            group = self.links.axis(mesh, pp, "dp")
            if decision.shard == 0:
                reduce_s = group.all_reduce_s(reduced)
            elif decision.shard < 3:
                reduce_s = self._sharded_reduction_s(mesh, decision, size, reduced, pp)
            else:
                reduce_s = self._sharded_s(mesh, decision, held * width, reduced, pipeline_s, pp)
                if ends:
                    reduce_s += self._ends_s(mesh, decision, held * width, reduced, pp)
        ways = (decision.shard_group or dp) if decision.shard else 1
        states = OPTIMIZERS[decision.optimizer].states
        # The optimizer reads parameter, gradient and states, and writes parameter and states, in fp32. In mixed
        # precision the 16-bit parameter is written after that, and the gradient is first read in 16 bits and written in
        # 32. Gradients that add up in 32 bits are kept: cleared, unscaled in place, read for their norm and clipped in
        # place.
        mixed = 0
        if width < 4:
            mixed = width + (4 + 24 if decision.gradient_precision == "fp32" else width + 4)
        touched = entries.updated / ways * (4 * (3 + 2 * states) + mixed)
        return reduce_s, max(
            touched / device.optimizer_bandwidth_bytes_per_s for device in self.links.devices(mesh, pp)
        )

    def _sharded_reduction_s(self, mesh: Mesh, decision: Decision, size: float, reduced: float, pp: int) -> float:
        """Seconds to scatter the gradients, update the shards and gather the parameters again. At stage 2 every
        microbatch scatters its gradients, so that no rank keeps more than its shard of the sums.

        With shard groups, each rank adds up its shard with the other groups before the update (arXiv 2205.00119,
        section 3.4).
        """
        inside, across, ways = self.links.shard_groups(mesh, pp, decision.shard_group)
        between = across.all_reduce_s(reduced / ways) if across is not None else 0.0
        times = decision.microbatches if decision.reduces_each else 1
        staged = decision.hierarchical_gathers
        gather_s = inside.all_gather_s(size, in_stages=staged)
        return times * inside.reduce_scatter_s(reduced, in_stages=staged) + between + gather_s

    def _sharded_s(
        self, mesh: Mesh, decision: Decision, size: float, reduced: float, pipeline_s: float, pp: int
    ) -> float:
        """Seconds of sharded parameters' traffic that computing does not hide.

        Every microbatch gathers the parameters for its forward and again for its backward, and scatters its gradients;
        or stages are gathered as often as the schedule says, and gradients scattered once a step. This happens inside
        the shard group and overlaps with the computation of other units. Groups of one replica each then add up their
        shards (arXiv 2205.00119, sections 3.2 and 3.4).
        """
        inside, across, ways = self.links.shard_groups(mesh, pp, decision.shard_group)
        gathers = gathers_in_step(decision)
        scatters = decision.microbatches if decision.reduces_each else 1
        staged = decision.hierarchical_gathers
        moving_s = gathers * inside.all_gather_s(size, in_stages=staged)
        moving_s += scatters * inside.reduce_scatter_s(reduced, in_stages=staged) if reduced else 0.0
        exposed = max(0.0, moving_s - pipeline_s * HIDDEN_SHARE)
        return exposed + (across.all_reduce_s(reduced / ways) if across is not None and reduced else 0.0)

    def _ends_s(self, mesh: Mesh, decision: Decision, size: float, reduced: float, pp: int) -> float:
        """Seconds of the first gather of a stage, and of the last scatter where gradients leave by stages."""
        inside, _, _ = self.links.shard_groups(mesh, pp, decision.shard_group)
        stages, found = decision.virtual_stages, 0.0
        if decision.gathered_stages is not None:
            found += inside.all_gather_s(size / stages, in_stages=decision.hierarchical_gathers)
        if not decision.reduces_each and reduced:
            found += inside.reduce_scatter_s(reduced / stages, in_stages=decision.hierarchical_gathers)
        return found

    def _tied_s(self, decision: Decision, tied: Sequence[tuple[tuple[int, ...], int]]) -> float:
        """Seconds to add up the gradients of parameters that several pipeline ranks hold."""
        width, total = PRECISION_BYTES[decision.gradient_precision or self.precision], 0.0
        for ranks, elements in tied:
            group = self.cluster.group([decision.mesh.rank({"pp": rank}) for rank in ranks])
            total += group.all_reduce_s(elements * width)
        return total


def gathers_in_step(decision: Decision) -> float:
    """The number of times that a step gathers each sharded parameter."""
    if decision.gathered_stages is None:
        return 2.0 * decision.microbatches
    if decision.generated:
        return most_gathers(decision.build_schedule(None).table) / decision.virtual_stages
    sizes = decision.pp, decision.microbatches, decision.virtual_stages
    return gathers_per_stage(decision.schedule, *sizes, decision.gathered_stages, decision.look_ahead)


def simulated_makespan_s(decision: Decision, costs: StageCosts) -> float:
    """The makespan of the decision's schedule. Long schedules settle into a period, so they are extrapolated from two
    shorter ones of 4 and 5 rounds of the pipeline. Generated schedules follow no period and are simulated whole."""

    def run(microbatches: int) -> float:
        batch = microbatches * decision.dp * decision.microbatch
        schedule = replace(decision, batch=batch).compute_schedule(costs)
        return simulate_schedule(schedule, costs).makespan_s

    short, longer = 4 * decision.pp, 5 * decision.pp
    if decision.microbatches <= longer or decision.schedule == AUTO:
        return run(decision.microbatches)
    first, second = run(short), run(longer)
    return second + (decision.microbatches - longer) * (second - first) / (longer - short)


def least_makespan_s(costs: StageCosts, placement: Sequence[int], microbatches: int, *, splits_backward: bool) -> float:
    """Seconds below which no schedule of these stages gets, whatever its order.

    A microbatch passes all stages forward and back, of split backwards by their input gradients. And a rank starts when
    the first microbatch has passed the stages before the rank's first one, and it works on all microbatches. Where
    backwards are whole, its last action is a backward of its first stage, which then goes on to stage 0. Split weight
    gradients may come after that. Lent idle time reduces the bound by at most its share.
    """
    ranks = max(placement) + 1
    backward = costs.backward_s
    work = [0.0] * ranks
    first = [len(placement)] * ranks
    for stage, rank in enumerate(placement):
        work[rank] += costs.forward_s[stage] + backward[stage]
        first[rank] = min(first[rank], stage)
    head, tail, heads, tails = 0.0, 0.0, [], []
    for stage, rank in enumerate(placement):
        heads.append(head)
        tails.append(tail)
        sent = costs.transfer_s[stage] if stage + 1 < len(placement) and placement[stage + 1] != rank else 0.0
        head += costs.forward_s[stage] + sent
        tail += backward[stage] + sent
    least = (
        heads[first[rank]] + work[rank] * microbatches + (0.0 if splits_backward else tails[first[rank]])
        for rank in range(ranks)
    )
    passed = head + tail - (sum(costs.weight_grad_s) if splits_backward else 0.0)
    lent = costs.idle_lent
    return ((1 - lent) * max(passed, *least) + lent * sum(work) * microbatches / ranks) * (1 - 1e-9)
