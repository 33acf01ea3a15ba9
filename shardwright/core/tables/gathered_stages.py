"""The memory and traffic of stages that a schedule gathers and frees as a whole, and of gradients that it reduces once
a step: what each rank has of them from action to action.

Parameters of a stage are whole from UNSHARD to RESHARD, its sums of gradients from the first backward to REDUCE_GRAD.
(Gathers and reductions as actions of a pipeline are those of torch.distributed.pipelining; which schedules they go with
is the subject of Lamy-Poirier, arXiv 2211.05953.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardwright.core.cost.unit_work import PRECISION_BYTES
from shardwright.core.schedule import Schedule
from shardwright.core.schedule.actions import Action, B, F, I, Kind, W
from shardwright.core.schedule.named_schedule import named_schedule
from shardwright.core.schedule.passes.sharding import insert_residency
from shardwright.core.schedule.peak_memory import walk_activations
from shardwright.core.tables.gathered_units import stage_passes
from shardwright.core.tables.memory_request import MemoryRequest
from shardwright.core.tables.rank_tables import RankTables
from shardwright.core.tables.stage_memory import sharing_before, stage_memories


@lru_cache(maxsize=64)
def gathering_schedule(
    name: str, ranks: int, microbatches: int, virtual_stages: int,
    gathered_stages: int | None, look_ahead: int | None, reduces_each: bool = True,
) -> Schedule:  # fmt: skip
    """The schedule of a name with its gathers and reductions, made once for the schedules used last."""
    schedule = named_schedule(name, ranks, microbatches, virtual_stages)
    return insert_residency(schedule, gathered_stages, look_ahead, reduces_each=reduces_each)


def most_gathers(table: Sequence[Sequence[Action]]) -> int:
    """The number of gathers on the rank that has most."""
    return max(sum(action.kind is Kind.UNSHARD for action in order) for order in table)


@lru_cache(maxsize=1024)
def gathers_per_stage(
    name: str, ranks: int, microbatches: int, virtual_stages: int, gathered_stages: int, look_ahead: int | None
) -> float:
    """The number of times that a stage is gathered in a step, the mean over the stages of the rank that gathers most.
    Long schedules repeat themselves: beyond a few rounds of the pipeline the number grows evenly."""

    def count(microbatches: int) -> float:
        schedule = gathering_schedule(name, ranks, microbatches, virtual_stages, gathered_stages, look_ahead)
        return most_gathers(schedule.table) / virtual_stages

    first, second = 4 * ranks, 5 * ranks
    if microbatches <= second:
        return count(microbatches)
    early, late = count(first), count(second)
    return late + (late - early) * (microbatches - second) / (second - first)


@dataclass(frozen=True, slots=True)
class _Stage:
    """The bytes of one stage."""

    activations: int
    freed_by_input_grad: int
    whole: int
    """All its parameters, where the schedule gathers them."""
    sums: int
    """All its gradients, where they add up whole."""
    shard: int
    """This rank's shard of the sums over replicas."""
    under_way: int
    """One bucket of gradients whose sum is under way, with what comes in."""
    passing: int
    """What a forward holds beside its activations."""
    input_grad: int
    """What an input gradient does."""
    weighing: int
    """What a weight gradient by itself holds beside."""
    tail: int
    """What a backward holds beside until its first bucket has left, where it reduces them."""
    first_backward: int
    """What a backward holds beside, or the rest of it where it reduces gradients, with the gradients that it is the
    first to make."""
    backward: int
    """What a later one does."""


def peaks(
    ranked: RankTables,
    starts: Sequence[int],
    placement: Sequence[int],
    table: Sequence[Sequence[Action]],
    request: MemoryRequest,
) -> list[int]:
    """The most bytes that every rank holds at once of activations, of what passes hold for a while, of gradients, and
    of what ``table`` gathers: everything but its shards of parameters and optimizer states, the batch and buffers."""
    ends = ranked.ends(starts)
    found = []
    for rank, order in enumerate(table):
        held = {stage: ends[stage] for stage, on in enumerate(placement) if on == rank}
        first = list(dict.fromkeys(p.stage for a in order for p in a.flat if p.kind in (B, W)))
        found.append(_peak(order, _stages(ranked, rank, held, first, request)))
    return found


def _stages(
    ranked: RankTables, rank: int, held: Mapping[int, tuple[int, int]], first: Sequence[int], request: MemoryRequest
) -> dict[int, _Stage]:
    table, width = ranked.tables[rank], PRECISION_BYTES[request.precision]
    memories = stage_memories(table, held, first, request.gradient_width)
    share = 1 - 1 / request.ways
    found = {}
    for stage, (a, b) in held.items():
        passes, memory = stage_passes(table, (a, b), request), memories[stage]
        shard = -(-memory.gradients // request.ways)
        first_backward = passes.first - shard  # which is added to all of it
        if not request.reduces_each:
            others = sharing_before(table, held, first, stage)
            made = table.trained_from(a, b, others) * request.gradient_width
            first_backward = int((passes.by_unit + made).max())
        largest = max(float(table.range_trained[u, u + 1]) for u in range(a, b)) * request.gradient_width
        found[stage] = _Stage(
            activations=memory.activations,
            freed_by_input_grad=memory.freed_by_input_grad,
            whole=int(table.range_elements[a, b]) * width if request.gathered_stages else 0,
            sums=0 if request.reduces_each else memory.gradients,
            shard=shard,
            under_way=passes.under_way if request.reduces_each else int(largest * share),
            passing=passes.forward - memory.activations,
            input_grad=int((passes.by_unit + table.left_behind(a, b)).max()) - memory.activations,
            weighing=passes.weighing,
            tail=passes.tail - memory.activations,
            first_backward=first_backward - memory.activations,
            backward=max(passes.backward, int(passes.by_unit.max()) * (not request.reduces_each)) - memory.activations,
        )
    return found


def _peak(order: Sequence[Action], stages: Mapping[int, _Stage]) -> int:
    sizes = {at: stage.activations for at, stage in stages.items()}
    freed = {at: stage.freed_by_input_grad for at, stage in stages.items()}
    most = whole = 0
    sums: dict[int, int] = {}
    shards: dict[int, int] = {}
    under_way = 0
    for action, (live, _) in zip(order, walk_activations(order, sizes, freed), strict=True):
        stage = stages[action.flat[0].stage]
        if action.kind is Kind.UNSHARD:
            whole += stage.whole
        elif action.kind is Kind.RESHARD:
            whole -= stage.whole
        elif action.kind is Kind.REDUCE_GRAD:
            sums.pop(action.stage, None)
            under_way, shards[action.stage] = stage.under_way, stage.shard
        beside = 0
        for part in action.flat:
            one = stages[part.stage]
            if part.kind in (F, I):
                beside += one.passing if part.kind is F else one.input_grad
            elif part.kind is W:
                sums.setdefault(part.stage, one.sums)
                beside += one.weighing
            elif part.kind is B and one.sums:
                beside += one.first_backward if part.stage not in sums else one.backward
            elif part.kind is B:
                # Its first bucket leaves when the one under way has arrived. Each is added to its shard.
                is_first = part.stage not in shards
                beside += one.first_backward if is_first else max(one.tail, one.backward - under_way)
                shards[part.stage] = one.shard
        most = max(most, live + beside + whole + sum(sums.values()) + sum(shards.values()) + under_way)
        for part in action.flat:
            if part.kind is F and not stages[part.stage].sums:
                under_way = 0  # what a forward ran beside has arrived
            if part.kind is B:
                one = stages[part.stage]
                sums.setdefault(part.stage, one.sums)
                # The last bucket is on its way when all activations are gone.
                added = sum(sums.values()) + sum(shards.values())
                most = max(most, live - one.activations + whole + added + one.under_way)
    return most
