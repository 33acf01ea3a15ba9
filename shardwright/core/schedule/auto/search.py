"""The search of `auto`: named schedules and constructed ones as starts, the best of them improved.

The number of tries depends on the size alone, never on a clock: the same request gives the same schedule everywhere.
"""

from dataclasses import replace

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule.action_table import ActionTable
from shardwright.core.schedule.auto.construct import construct, habits
from shardwright.core.schedule.auto.evaluate import Evaluator
from shardwright.core.schedule.auto.improve import improve
from shardwright.core.schedule.auto.problem import Problem, Word
from shardwright.core.schedule.catalogue import FAMILIES
from shardwright.core.schedule.costs import StageCosts
from shardwright.core.schedule.family import Sizes, Table
from shardwright.core.schedule.passes.backward import merge_backward
from shardwright.core.schedule.peak_memory import peak_live
from shardwright.core.schedule.placement import looped, vee
from shardwright.core.schedule.simulate import simulate_schedule

Placed = tuple[tuple[int, ...], Table]

# Work of the search, in actions played through, which take about a microsecond each.
_CONSTRUCT_ACTIONS = 120_000
_LEAST_STARTS = 10
_IMPROVE_ACTIONS = 800_000
_MOST_IMPROVE_ACTIONS = 2_500_000
_SMALL = 800  # Actions of a schedule up to which it gets the first of these; larger ones get more, in proportion.
_MOST_RUNS = 4_000  # Beyond these, small schedules gain nothing.
_MERGED_BY_STAGE = 5_000  # Actions of a schedule up to which backwards are merged for each stage by itself.
_SHARES = (0.6, 0.2, 0.2)  # Shares of the improvement, for the best start, the second best, ...


def shortest(sizes: Sizes) -> Placed:
    """The placement and table of the shortest schedule found, for `sizes.costs` within `sizes.memory_limit_bytes`.

    With two stages on each rank both placements are tried, round the ranks and down and back up.

    Raises:
        ScheduleError: a rank's limit does not hold one microbatch; says the least that does.
    """
    # For the same work, the schedule that is shorter alone is also shorter where idle time is lent.
    costs = replace(sizes.costs or StageCosts.uniform(sizes.stages), idle_lent=0.0)
    placements = [looped(sizes.ranks, sizes.virtual_stages)]
    if sizes.virtual_stages == 2 and sizes.ranks > 1:
        placements.append(vee(sizes.ranks, 2))
    best: tuple[float, Placed] | None = None
    refused: ScheduleError | None = None
    for placement in placements:
        try:
            problem = Problem.of(placement, sizes.microbatches, costs, sizes.memory_limit_bytes)
        except ScheduleError as error:
            refused = refused or error
            continue
        # Several placements share the work, and choosing among several stages of a rank takes longer.
        share = len(placements) + (sizes.virtual_stages > 1)
        found_s, table = _search(problem, sizes, costs, share)
        if best is None or found_s < best[0]:
            best = found_s, (placement, table)
    if best is None:
        raise refused or ScheduleError("no placement was tried")
    return best[1]


def _search(problem: Problem, sizes: Sizes, costs: StageCosts, share: int) -> tuple[float, Table]:
    engine, bound_s = Evaluator(problem), problem.lower_bound_s()
    named = _named(problem, sizes, costs)
    starts: list[tuple[float, list[Word]]] = []
    for _, table in named:
        words = problem.words(table)
        if all(engine.legal(rank, word) for rank, word in enumerate(words)):
            starts.append((engine.makespan_s(words), words))
    actions = 3 * problem.stages * problem.microbatches
    tries = max(_LEAST_STARTS, _CONSTRUCT_ACTIONS // share // actions)
    for habit, mirrored in habits(problem, tries):
        words = construct(problem, habit, mirrored)
        starts.append((engine.makespan_s(words), words))
    starts.sort(key=lambda start: start[0])
    work = min(_MOST_IMPROVE_ACTIONS, _IMPROVE_ACTIONS * max(actions, _SMALL) // _SMALL) // share
    best_s, best = starts[0]
    for seed, ((_, words), part) in enumerate(zip(_different(starts), _SHARES, strict=False)):
        if best_s <= bound_s * (1 + 1e-9):
            break
        found_s, found = improve(engine, words, int(min(work // actions, _MOST_RUNS) * part), bound_s, seed)
        if found_s < best_s:
            best_s, best = found_s, found
    known = min(named, key=lambda pair: pair[0], default=None)
    if known is not None and known[0] <= best_s:
        return known
    return best_s, _merged(problem, best, costs, best_s)


def _different(starts: list[tuple[float, list[Word]]]) -> list[tuple[float, list[Word]]]:
    """The starts, one for each makespan: equal ones are mostly the same words."""
    kept: list[tuple[float, list[Word]]] = []
    for start in starts:
        if not kept or start[0] > kept[-1][0] * (1 + 1e-12):
            kept.append(start)
    return kept


def _merged(problem: Problem, words: list[Word], costs: StageCosts, makespan_s: float) -> Table:
    """The table of words, with whole backwards where these take nothing longer: in all stages, or else in some.

    A whole backward hands its input gradient on later, and does with one action what else takes two.
    """
    table, stages = problem.table(words), problem.stages
    kept = ActionTable("auto", (), problem.ranks, stages, problem.microbatches, problem.placement, table)
    few = sum(len(order) for order in table) <= _MERGED_BY_STAGE
    for merging in (None, *(range(stages) if few else (0,))):
        tried = merge_backward(kept, None if merging is None else (merging,))
        if simulate_schedule(tried, costs).makespan_s <= makespan_s:
            kept = tried
            if merging is None:
                break
    return kept.table


def _named(problem: Problem, sizes: Sizes, costs: StageCosts) -> list[tuple[float, Table]]:
    """Makespan and table of every named schedule with this placement that trains and keeps the memory."""
    tables = []
    for family in FAMILIES.values():
        if family.refusal(sizes) or not family.trains:
            continue
        if family.placement(sizes.ranks, sizes.virtual_stages) != problem.placement:
            continue
        table = family.generate(sizes)
        held = (peak_live(order, problem.activation_bytes, problem.freed_by_input_grad_bytes) for order in table)
        if all(peak <= limit for peak, limit in zip(held, problem.limit_bytes, strict=True)):
            stages = problem.stages
            schedule = ActionTable(family.name, (), sizes.ranks, stages, sizes.microbatches, problem.placement, table)
            tables.append((simulate_schedule(schedule, costs).makespan_s, table))
    return tables
