"""The memory and traffic of stages that a schedule gathers and frees as a whole, and of gradients that it reduces once
a step: what each rank has of them from action to action.

Parameters of a stage are whole from UNSHARD to RESHARD, its sums of gradients from the first backward to REDUCE_GRAD.
(Gathers and reductions as actions of a pipeline are those of torch.distributed.pipelining; which schedules they go with
is the subject of Lamy-Poirier, arXiv 2211.05953.)
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from shardwright.core.cost.op_kinds import PRECISION_BYTES
from shardwright.core.schedule.actions import Action, Kind
from shardwright.core.schedule.named_schedule import named_schedule
from shardwright.core.schedule.passes.sharding import with_gathers, with_residency
from shardwright.core.tables.backward_halves import halves_of
from shardwright.core.tables.gathered_units import stage_passes
from shardwright.core.tables.memory_request import MemoryRequest
from shardwright.core.tables.rank_tables import RankTables
from shardwright.core.tables.stage_memory import sharing_before, stage_memories
from shardwright.core.tables.stage_moments import StageMoments, StageSizes


@lru_cache(maxsize=64)
def gathering_moments(
    name: str, ranks: int, microbatches: int, virtual_stages: int,
    gathered_stages: int | None, look_ahead: int | None, reduces_each: bool = True,
) -> StageMoments:  # fmt: skip
    """What the ranks hold under a schedule of a name with its gathers and reductions, found once for those used
    last."""
    schedule = named_schedule(name, ranks, microbatches, virtual_stages)
    return StageMoments(
        schedule.table, lambda order: with_residency(order, gathered_stages, look_ahead, reduces_each=reduces_each)
    )


def most_gathers(table: Sequence[Sequence[Action]]) -> int:
    """The number of gathers on the rank that has most."""
    return max(sum(action.kind is Kind.UNSHARD for action in order) for order in table)


@lru_cache(maxsize=1024)
def gathers_per_stage(
    name: str, ranks: int, microbatches: int, virtual_stages: int, gathered_stages: int, look_ahead: int | None
) -> float:
    """The number of times that a stage is gathered in a step, the mean over the stages of the rank that gathers most.
    Long schedules repeat themselves: beyond a few rounds of the pipeline the number grows evenly."""
    if virtual_stages <= gathered_stages:
        return 1.0  # all of them stay

    def count(microbatches: int) -> float:
        table = named_schedule(name, ranks, microbatches, virtual_stages).table
        return most_gathers([with_gathers(order, gathered_stages, look_ahead) for order in table]) / virtual_stages

    first, second = 4 * ranks, 5 * ranks
    if microbatches <= second:
        return count(microbatches)
    early, late = count(first), count(second)
    return late + (late - early) * (microbatches - second) / (second - first)


def peaks(
    ranked: RankTables,
    starts: Sequence[int],
    placement: Sequence[int],
    moments: StageMoments,
    request: MemoryRequest,
) -> list[int]:
    """The most bytes that every rank holds at once of activations, of what passes hold for a while, of gradients, and
    of what is gathered: everything but its shards of parameters and optimizer states, the batch and buffers. The
    ``moments`` are those of a schedule with its gathers and reductions."""
    return [peak_of(rank, ranked, starts, placement, moments, request) for rank in range(ranked.ranks)]


def peak_of(
    rank: int,
    ranked: RankTables,
    starts: Sequence[int],
    placement: Sequence[int],
    moments: StageMoments,
    request: MemoryRequest,
) -> int:
    """The same of one rank."""
    ends = ranked.ends(starts)
    held = {stage: ends[stage] for stage, on in enumerate(placement) if on == rank}
    return moments.peak(rank, _stages(ranked, rank, held, moments.first_backwards[rank], request))


def _stages(
    ranked: RankTables, rank: int, held: Mapping[int, tuple[int, int]], first: Sequence[int], request: MemoryRequest
) -> dict[int, StageSizes]:
    table, width = ranked.tables[rank], PRECISION_BYTES[request.precision]
    memories = stage_memories(table, held, first, request.gradient_width)
    share = 1 - 1 / request.ways
    found = {}
    for stage, (a, b) in held.items():
        passes, memory = stage_passes(table, (a, b), request), memories[stage]
        shard = 0 if request.on_host else -(-memory.gradients // request.ways)
        first_backward = passes.first - shard  # which is added to all of it
        if not request.reduces_each:
            others = sharing_before(table, held, first, stage)
            made = table.trained_from(a, b, others) * request.gradient_width
            first_backward = int((passes.by_unit + made).max())
        largest = max(float(table.range_trained[u, u + 1]) for u in range(a, b)) * request.gradient_width
        found[stage] = StageSizes(
            activations=memory.activations,
            freed_by_input_grad=memory.freed_by_input_grad,
            whole=int(table.range_elements[a, b]) * width if request.gathered_stages else 0,
            sums=0 if request.reduces_each else memory.gradients,
            shard=shard,
            under_way=passes.under_way if request.reduces_each else int(largest * share),
            passing=passes.forward - memory.activations,
            input_grad=int((passes.by_unit + halves_of(table).left_behind(a, b)).max()) - memory.activations,
            weighing=passes.weighing,
            tail=passes.tail - memory.activations,
            first_backward=first_backward - memory.activations,
            backward=max(passes.backward, int(passes.by_unit.max()) * (not request.reduces_each)) - memory.activations,
        )
    return found
