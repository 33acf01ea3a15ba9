"""What a step will take: the pipeline, the gradients that are added up after it, the optimizer."""

from bisect import bisect_right
from functools import lru_cache

from shardwright.core.cluster import Cluster
from shardwright.core.cost.work import PRECISION_BYTES
from shardwright.core.hardware import Device
from shardwright.core.memory import OPTIMIZER_STATES, MemoryUse
from shardwright.core.mesh import Mesh
from shardwright.core.plan import Decision, Predicted
from shardwright.core.schedule import Schedule, StageCosts
from shardwright.core.simulate import simulate_schedule
from shardwright.core.stages import UnitTable

HIDDEN_SHARE = 0.9
"""How much of the compute time sharded parameters' traffic can hide behind. Prior: the first gather and the last
scatter of a pass have nothing beside them, about a tenth of a pass of a dozen units or more."""


class StepModel:
    """Steps on one cluster, whose ranks are like ``device``, in one precision."""

    def __init__(self, cluster: Cluster, device: Device, precision: str) -> None:
        self.cluster, self.device, self.precision = cluster, device, precision

    def predicted(
        self,
        decision: Decision,
        table: UnitTable,
        starts: list[int],
        placement: tuple[int, ...],
        memory: tuple[MemoryUse, ...],
        pipeline_s: float | None,
    ) -> Predicted:
        """What a step of the decision takes, with its cut ``starts`` and what the ranks hold.

        ``pipeline_s`` is the makespan of the pipeline; None where there is one stage, whose work is the makespan.
        """
        mesh = Mesh.of(pp=decision.pp, dp=decision.dp, tp=decision.tp)
        work = [0.0] * decision.pp
        collective = [0.0] * decision.pp
        elements, once = [0] * decision.pp, [0.0] * decision.pp
        ends = (*starts[1:], len(table.units))
        for stage, (a, b) in enumerate(zip(starts, ends, strict=True)):
            rank = placement[stage]
            work[rank] += float(table.seconds[a:b].sum()) * decision.microbatches
            collective[rank] += sum(u.collective_s for u in table.units[a:b]) * decision.microbatches
            elements[rank] += int(table.range_elements[a, b])
            once[rank] += sum(u.step_s for u in table.units[a:b])
        pipeline = pipeline_s if pipeline_s is not None else max(work)
        reduce_s, update_s = self._tail(mesh, decision, max(elements), pipeline)
        reduce_s += self._tied_s(mesh, table, starts, placement) + max(once)
        return Predicted(
            step_time_s=pipeline + reduce_s + update_s,
            pipeline_s=pipeline,
            bubble_fraction=max(0.0, 1 - sum(work) / (decision.pp * pipeline)) if pipeline else 0.0,
            tensor_collective_s=max(collective),
            data_parallel_s=reduce_s,
            optimizer_s=update_s,
            memory_by_stage_rank=memory,
            mesh=mesh,
        )

    def _sharded_s(self, mesh: Mesh, decision: Decision, size: int, reduced: int, pipeline_s: float) -> float:
        """Seconds of sharded parameters' traffic that computing does not hide.

        Every microbatch gathers the parameters for its forward and again for its backward, and scatters its gradients,
        inside the shard group and while the units beside it compute; groups of one replica each then add up their
        shards (arXiv 2205.00119, sections 3.2 and 3.4).
        """
        members = mesh.group(0, "dp")
        ways = decision.shard_group or len(members)
        shard = self.cluster.group(members[:ways])
        each = 2 * shard.all_gather_s(size) + shard.reduce_scatter_s(reduced)
        exposed = max(0.0, each * decision.microbatches - pipeline_s * HIDDEN_SHARE)
        if ways < len(members):
            exposed += self.cluster.group(members[::ways]).all_reduce_s(reduced / ways)
        return exposed

    def _tail(self, mesh: Mesh, decision: Decision, elements: int, pipeline_s: float) -> tuple[float, float]:
        """(seconds to reduce gradients over dp, seconds of the optimizer step) on the fullest rank, nothing hidden."""
        dp = mesh.axis_size("dp")
        width = PRECISION_BYTES[self.precision]
        size = elements * width
        reduced = elements * PRECISION_BYTES[decision.gradient_precision or self.precision]
        reduce_s = 0.0
        if dp > 1:
            group = self.cluster.group(mesh.group(0, "dp"))
            if decision.shard == 0:
                reduce_s = group.all_reduce_s(reduced)
            else:
                reduce_s = group.reduce_scatter_s(reduced) + group.all_gather_s(size)
            if decision.shard == 3:
                reduce_s = self._sharded_s(mesh, decision, size, reduced, pipeline_s)
        ways = (decision.shard_group or dp) if decision.shard else 1
        states = OPTIMIZER_STATES[decision.optimizer]
        # Reads parameter, gradient and states, writes parameter and states, in fp32. In mixed precision the 16-bit
        # parameter is written after it, and before it the gradient is read in 16 bits and written in 32. Gradients that
        # add up in 32 bits are kept: cleared, unscaled in place, read for their norm and clipped in place.
        mixed = 0
        if width < 4:
            mixed = width + (4 + 24 if decision.gradient_precision == "fp32" else width + 4)
        touched = elements / ways * (4 * (3 + 2 * states) + mixed)
        bandwidth = self.device.memory_bandwidth_bytes_per_s * self.device.memory_efficiency
        return reduce_s, touched / bandwidth

    def _tied_s(self, mesh: Mesh, table: UnitTable, starts: list[int], placement: tuple[int, ...]) -> float:
        """Seconds to add up the gradients of parameters that several pipeline ranks hold."""
        total = 0.0
        for users, elements in table.ties:
            ranks = sorted({placement[bisect_right(starts, unit) - 1] for unit in users})
            if len(ranks) > 1:
                group = self.cluster.group([mesh.rank({"pp": rank}) for rank in ranks])
                total += group.all_reduce_s(elements * PRECISION_BYTES[self.precision])
        return total


@lru_cache(maxsize=256)
def placement_of(schedule: str, ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """For every stage the pipeline rank that holds it, however many microbatches there are; two rounds of the pipeline
    are as many as any schedule asks for."""
    return Schedule.build(schedule, ranks=ranks, microbatches=2 * ranks, virtual_stages=virtual_stages).placement


def simulated_makespan_s(decision: Decision, costs: StageCosts) -> float:
    """Makespan of the decision's schedule. Long schedules settle into a period, so they are extrapolated from two
    shorter ones of 4 and 5 rounds of the pipeline."""

    def run(microbatches: int) -> float:
        schedule = Schedule.build(
            decision.schedule,
            ranks=decision.pp,
            microbatches=microbatches,
            virtual_stages=decision.virtual_stages,
            costs=costs,
        )
        return simulate_schedule(schedule, costs).makespan_s

    short, longer = 4 * decision.pp, 5 * decision.pp
    if decision.microbatches <= longer:
        return run(decision.microbatches)
    first, second = run(short), run(longer)
    return second + (decision.microbatches - longer) * (second - first) / (longer - short)


def stage_costs(table: UnitTable, starts: list[int]) -> StageCosts:
    """What the stages of a cut cost for one microbatch."""
    ends = (*starts[1:], len(table.units))
    held = [table.units[a:b] for a, b in zip(starts, ends, strict=True)]
    return StageCosts(
        forward_s=tuple(sum(u.forward_s for u in units) for units in held),
        input_grad_s=tuple(
            sum(u.input_grad_s for u in table.units[a:b]) + float(table.again_s[a:b].sum())
            for a, b in zip(starts, ends, strict=True)
        ),
        weight_grad_s=tuple(sum(u.weight_grad_s for u in units) for units in held),
        transfer_s=tuple(table.boundary_s[a] for a in starts[1:]),
        activation_bytes=tuple(int(table.range_kept[a, b]) for a, b in zip(starts, ends, strict=True)),
    )


def seconds_per_rank(per_stage: list[float], placement: tuple[int, ...], ranks: int) -> list[float]:
    """Stage times added up over the stages of every rank."""
    totals = [0.0] * ranks
    for stage, seconds in enumerate(per_stage):
        totals[placement[stage]] += seconds
    return totals
