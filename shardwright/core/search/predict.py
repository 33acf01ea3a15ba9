"""The predicted time of a step: the pipeline, what of the traffic over the data axis is exposed, and the optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwright.core.cluster.groups import Group
from shardwright.core.cost.op_kinds import PRECISION_BYTES
from shardwright.core.execution import Execution
from shardwright.core.layout.mesh import Mesh
from shardwright.core.plan.decision import Decision
from shardwright.core.plan.record import Predicted
from shardwright.core.schedule import AUTO, StageCosts
from shardwright.core.schedule.simulate import Costs, simulate_schedule
from shardwright.core.search.exchanges import Exchanges, Held
from shardwright.core.tables.memory import MemoryUse
from shardwright.core.tables.mesh_links import Links
from shardwright.core.tables.rank_tables import RankTables, RankWork
from shardwright.core.tables.unit_table import UnitTable
from shardwright.core.tables.update_seconds import touched_bytes, update_rate
from shardwright.core.values.found_once import found_once


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The simulated pipeline of a step."""

    makespan_s: float
    drained_s: tuple[float, ...]
    """The time before the end at which each rank has done all of its own work."""


def of_units(table: UnitTable) -> tuple[int, float, float]:
    """What `Held` says of the model's units: their number, the entries of the largest on one rank, and those that stay
    whole."""
    staying = sum(unit.parameter_elements for unit in table.units if not unit.parameter_tensors)
    return len(table.units), float(table.range_elements.diagonal(1).max()), float(staying)


def _most(held: Sequence[Held]) -> list[Held]:
    """What ranks hold and do, without those that another one is no less than in anything."""
    falling = sorted(set(held), key=lambda one: (one.busy_s, one.trained, one.held), reverse=True)
    found: list[Held] = []
    for one in falling:
        if not any(most.trained >= one.trained and most.held >= one.held for most in found):
            found.append(one)
    return found


class StepModel:
    """A model of the step times on one cluster in one precision, as one system runs it."""

    def __init__(self, links: Links, precision: str, execution: Execution) -> None:
        self.links, self.cluster, self.precision = links, links.cluster, precision
        self.exchanges = Exchanges(links, precision, execution)
        units = [unit for group in self.cluster.groups for unit in group.device.measured_units]
        self._least_share = min((unit.update_share for unit in units), default=1.0)
        """The least share that any measured optimizer step took of the time that is counted for it."""

    def predicted(
        self,
        decision: Decision,
        tables: RankTables,
        memory: tuple[MemoryUse, ...],
        placement: Sequence[int],
        pipeline: Pipeline | None = None,
    ) -> Predicted:
        """The predicted time of a decision's step, and the memory of its ranks.

        ``placement`` gives the pipeline rank of each stage; ``pipeline`` the simulated pipeline where it is known.
        """
        mesh, starts, m = decision.mesh, decision.stage_starts, decision.microbatches
        exchanged = self.exchanges.of(decision, tables, placement)
        ranks = tables.work(starts, placement)
        waits = [sum(each.forward_s + each.backward_s for each in rank.stages) * m for rank in exchanged]
        work = [rank.seconds * m + waited for rank, waited in zip(ranks, waits, strict=True)]
        if pipeline is None:
            pipeline = self.pipeline(decision, self.stage_costs(decision, tables, placement))
        makespan = pipeline.makespan_s
        tails = zip(exchanged, pipeline.drained_s, strict=True)
        reduce_s = max(max(0.0, rank.tail_s - drained) for rank, drained in tails) + max(rank.once_s for rank in ranks)
        reduce_s += self._tied_s(decision, tables.tied(starts, placement))
        update_s = self._slowest_update_s(mesh, decision, ranks)
        return Predicted(
            step_time_s=makespan + reduce_s + update_s,
            pipeline_s=makespan,
            bubble_fraction=max(0.0, 1 - sum(work) / (decision.pp * makespan)) if makespan else 0.0,
            tensor_collective_s=max(rank.collective_s for rank in ranks) * m,
            data_parallel_s=reduce_s,
            optimizer_s=update_s,
            memory_by_stage_rank=memory,
            mesh=mesh,
            passes_wait_s=max(waits),
            data_parallel_hidden_s=max(
                rank.hidden_s + min(rank.tail_s, drained)
                for rank, drained in zip(exchanged, pipeline.drained_s, strict=True)
            ),
            tensor_hidden_s=max(rank.collective_hidden_s for rank in ranks) * m,
        )

    def stage_costs(self, decision: Decision, tables: RankTables, placement: Sequence[int]) -> StageCosts:
        """The costs of the stages of a decision, with what its passes wait for."""
        costs = self.plain_costs(tables, decision.stage_starts, placement)
        waits = self.waits(decision, tables, placement)
        if not waits:
            return costs
        forward = tuple(own + ahead for own, (ahead, _) in zip(costs.forward_s, waits, strict=True))
        back = tuple(own + behind for own, (_, behind) in zip(costs.input_grad_s, waits, strict=True))
        return replace(costs, forward_s=forward, input_grad_s=back)

    def plain_costs(self, tables: RankTables, starts: Sequence[int], placement: Sequence[int]) -> StageCosts:
        """The costs of the stages of a cut whose passes wait for nothing over the data axis."""
        return replace(tables.stage_costs(starts, placement), sender_waits=not self.exchanges.execution.sends)

    def waits(
        self, decision: Decision, tables: RankTables, placement: Sequence[int]
    ) -> tuple[tuple[float, float], ...]:
        """The seconds that a forward and a backward of each stage wait for traffic over the data axis; empty where none
        do."""
        left = [iter(rank.stages) for rank in self.exchanges.of(decision, tables, placement)]
        found = tuple((own.forward_s, own.backward_s) for own in (next(left[rank]) for rank in placement))
        return found if any(map(any, found)) else ()

    @staticmethod
    def pipeline(decision: Decision, costs: StageCosts) -> Pipeline:
        """The simulated pipeline of a decision."""
        if decision.pp == 1:
            return Pipeline((sum(costs.forward_s) + sum(costs.backward_s)) * decision.microbatches, (0.0,))
        return simulated_pipeline(decision, costs)

    def least_steps_s(
        self,
        decisions: Sequence[Decision],
        tables: RankTables,
        starts: Sequence[int],
        placement: Sequence[int],
        pipeline_s: float | None,
    ) -> list[float]:
        """Seconds below which the steps of one cut do not get, for decisions that differ in what they shard."""
        ranks, tied, first = tables.work(starts, placement), tables.tied(starts, placement), decisions[0]
        busy = [rank.seconds * first.microbatches for rank in ranks]
        pipeline = max(busy) if pipeline_s is None else pipeline_s
        units = of_units(tables.tables[0])
        held = [
            Held(rank.elements, rank.held_elements, 0.0 if tables.idle_lent else own, *units)
            for rank, own in zip(ranks, busy, strict=True)
        ]
        shared = self._tied_s(first, tied) + max(rank.once_s for rank in ranks)
        mesh = first.mesh
        most_of: dict[int | None, list[tuple[int, Held]]] = {}

        def least_s(decision: Decision) -> float:
            group = decision.shard_group
            if group not in most_of:
                kinds = self.links.alike_in_groups(mesh, group) if group else self.links.alike(mesh)
                most_of[group] = [(alike[0], most) for alike in kinds for most in _most([held[r] for r in alike])]
            ends = (self.exchanges.least_end_s(own, mesh, decision, rank) for rank, own in most_of[group])
            return max(pipeline, *ends) + shared + self._slowest_update_s(mesh, decision, ranks)

        return [least_s(decision) for decision in decisions]

    def least_ends(self, mesh: Mesh, decision: Decision, mean: Held) -> "LeastEnds":
        """The bounds of where a step ends, beside that of its pipeline, where ``mean`` is the mean of what ranks hold
        and do."""
        kinds = self.links.alike(mesh)

        def update_s(alike: tuple[int, ...]) -> float:
            return self._update_s(mesh, decision, mean.trained * self._least_share, alike[0])

        if len(kinds) == 1:
            end_s = self.exchanges.least_mean_end_s(mean, mesh, decision, kinds[0][0])
            return LeastEnds((((end_s, update_s(kinds[0])),),))
        idle = replace(mean, busy_s=0.0)
        # Where ranks differ, one may train most and another hold most.
        parts = [replace(idle, held=0.0), replace(idle, trained=0.0)] if decision.shard == 3 else [idle]
        return LeastEnds(
            tuple(
                tuple(
                    (self.exchanges.least_end_s(part, mesh, decision, alike[0]), update_s(alike) if part.trained else 0)
                    for alike in kinds
                )
                for part in parts
            )
        )

    def _slowest_update_s(self, mesh: Mesh, decision: Decision, ranks: Sequence[RankWork]) -> float:
        return max(
            self._update_s(mesh, decision, max(ranks[pp].updated_elements for pp in alike), alike[0])
            for alike in self.links.alike(mesh)
        )

    def _update_s(self, mesh: Mesh, decision: Decision, updated: float, pp: int) -> float:
        """Seconds of the optimizer's step on so many entries of one rank."""
        ways = (decision.shard_group or decision.dp) if decision.shard else 1
        touched = updated / ways * touched_bytes(decision.optimizer, self.precision, decision.gradient_precision)
        on_host = decision.offload_states != "none"
        return max(touched / update_rate(device, on_host=on_host) for device in self.links.devices(mesh, pp))

    def _tied_s(self, decision: Decision, tied: Sequence[tuple[tuple[int, ...], int]]) -> float:
        """Seconds to add up the gradients of parameters that several pipeline ranks hold."""
        width, total = PRECISION_BYTES[decision.gradient_precision or self.precision], 0.0
        for ranks, elements in tied:
            total += self._group_of(decision.mesh, ranks).all_reduce_s(elements * width)
        return total

    @found_once
    def _group_of(self, mesh: Mesh, ranks: tuple[int, ...]) -> Group:
        """The group of the first device of each of some pipeline ranks."""
        return self.cluster.group([mesh.rank({"pp": rank}) for rank in ranks])


LONGEST_SIMULATED = 5
"""The microbatches per pipeline rank up to which a schedule is simulated whole."""


@dataclass(frozen=True, slots=True)
class LeastEnds:
    """Bounds of where a step ends, one beside the other, each the least over kinds of ranks: the (seconds before which
    the rank's traffic and computing are not done, seconds of the optimizer's step after them)."""

    of_kinds: tuple[tuple[tuple[float, float], ...], ...]

    def step_s(self, pipeline_s: float) -> float:
        """Seconds below which a step does not get whose pipeline takes at least ``pipeline_s``."""
        return max(min(max(pipeline_s, end) + update for end, update in kinds) for kinds in self.of_kinds)


def simulated_pipeline(decision: Decision, costs: Costs) -> Pipeline:
    """The decision's schedule, simulated. Long schedules settle into a period, so they are extrapolated from two
    shorter ones of 4 and 5 rounds of the pipeline; of slices, which fill it sooner, from shorter ones still. Generated
    schedules follow no period and are simulated whole."""

    def run(microbatches: int) -> Pipeline:
        batch = microbatches * decision.dp * decision.microbatch
        schedule = replace(decision, batch=batch).compute_schedule(costs)
        found = simulate_schedule(schedule, costs)
        end = found.makespan_s
        return Pipeline(end, tuple(end - float(times[-1]) if len(times) else end for times in found.end_s))

    rounds = 2 + -(-(LONGEST_SIMULATED - 2) // decision.slice_count)
    short, longer = (rounds - 1) * decision.pp, rounds * decision.pp
    if decision.microbatches <= longer or decision.schedule == AUTO:
        return run(decision.microbatches)
    first, second = run(short), run(longer)
    growth = (second.makespan_s - first.makespan_s) / (longer - short)
    return replace(second, makespan_s=second.makespan_s + (decision.microbatches - longer) * growth)


def least_makespan_s(costs: StageCosts, placement: Sequence[int], microbatches: int, *, splits_backward: bool) -> float:
    """Seconds below which no schedule of these stages gets, whatever its order.

    A rank starts when the first microbatch has passed the stages before the rank's first one, and it works on all
    microbatches. Where backwards are whole, its last action is a backward of its first stage, which then goes on to
    stage 0. Split weight gradients may come after that. And every microbatch passes all stages there and back; the last
    one to pass a stage, there or back, has waited for all others to pass it so. Lent idle time reduces the bound by at
    most its share.
    """
    ranks = max(placement) + 1
    backward = costs.backward_s
    returning = costs.input_grad_s if splits_backward else backward
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
        tail += returning[stage] + sent
    least = [
        heads[first[rank]] + work[rank] * microbatches + (0.0 if splits_backward else tails[first[rank]])
        for rank in range(ranks)
    ]
    least.append(head + tail + (microbatches - 1) * max(*costs.forward_s, *returning))
    lent = costs.idle_lent
    return ((1 - lent) * max(least) + lent * sum(work) * microbatches / ranks) * (1 - 1e-9)
