"""The proven optimum of small problems, by OR-tools' CP-SAT: the oracle that `auto` is measured against.

Times are scaled to whole numbers, so that the optimum is exact up to one part in the resolution for each action on the
longest chain.
"""

from dataclasses import dataclass
from typing import Any

from ortools.sat.python import cp_model

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule.auto.evaluate import Evaluator
from shardwright.core.schedule.auto.problem import Problem, Word

_RESOLUTION = 20_000  # Whole-number units of the horizon: rounding moves the optimum by far less than a thousandth.


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best words found, their makespan in the engine, and the proven lower bound on every makespan, in seconds."""

    words: tuple[tuple[int, ...], ...]
    makespan_s: float
    bound_s: float
    proven: bool


def solve(problem: Problem, start: list[Word], time_limit_s: float = 60.0, workers: int = 1) -> Optimum:
    """The optimum, from a start that keeps the memory and gives the horizon.

    Raises:
        ScheduleError: the start deadlocks or goes over its memory.
    """
    engine = Evaluator(problem)
    trace = engine.run(start)
    if trace is None or not all(engine.legal(rank, word) for rank, word in enumerate(start)):
        raise ScheduleError("the start of the exact solver must run to its end and keep the memory")
    horizon_s = trace.makespan_s
    unit = horizon_s / _RESOLUTION
    horizon = int(_RESOLUTION * 1.01)
    model: Any = cp_model.CpModel()
    m, last = problem.microbatches, problem.stages - 1
    times = (problem.forward_s, problem.input_grad_s, problem.weight_grad_s)
    begin: dict[tuple[int, int], Any] = {}
    end: dict[tuple[int, int], Any] = {}
    on_rank: list[list[Any]] = [[] for _ in range(problem.ranks)]
    on_link: dict[tuple[int, int], list[Any]] = {}
    for stage, rank in enumerate(problem.placement):
        for kind in range(3):
            length = round(times[kind][stage] / unit)
            for k in range(m):
                key = (3 * stage + kind, k)
                begin[key] = model.new_int_var(0, horizon, "")
                end[key] = begin[key] + length
                on_rank[rank].append(model.new_fixed_size_interval_var(begin[key], length, ""))
                if k:
                    model.add(begin[key] >= end[(key[0], k - 1)])
    for stage in range(last + 1):
        for k in range(m):
            model.add(begin[(3 * stage + 2, k)] >= end[(3 * stage + 1, k)])
            if stage == last:
                model.add(begin[(3 * stage + 1, k)] >= end[(3 * stage, k)])
                continue
            for source, target, code in ((stage, stage + 1, 0), (stage + 1, stage, 1)):
                made, needed = end[(3 * source + code, k)], begin[(3 * target + code, k)]
                way = (problem.placement[source], problem.placement[target])
                length = round(problem.transfer_s[stage] / unit)
                if way[0] == way[1] or length == 0:
                    model.add(needed >= made)
                    continue
                moves = model.new_int_var(0, horizon, "")
                model.add(moves >= made)
                model.add(needed >= moves + length)
                on_link.setdefault(way, []).append(model.new_fixed_size_interval_var(moves, length, ""))
    for intervals in [*on_rank, *on_link.values()]:
        model.add_no_overlap(intervals)
    for rank in range(problem.ranks):
        if problem.limit_bytes[rank] == float("inf"):
            continue
        changes, sizes = [], []
        for stage in problem.stages_of(rank):
            held, freed = problem.activation_bytes[stage], problem.freed_by_input_grad_bytes[stage]
            for k in range(m):
                changes += [begin[(3 * stage, k)], end[(3 * stage + 1, k)], end[(3 * stage + 2, k)]]
                sizes += [held, -freed, freed - held]
        model.add_reservoir_constraint(changes, sizes, 0, int(problem.limit_bytes[rank]))
    makespan = model.new_int_var(0, horizon, "")
    for variable in end.values():
        model.add(makespan >= variable)
    model.minimize(makespan)
    count: dict[int, int] = {}
    for rank, word in enumerate(start):
        for letter, code in enumerate(word, start=engine.first[rank]):
            k = count.get(code, 0)
            count[code] = k + 1
            model.add_hint(begin[(code, k)], max(0, round((trace.ends_s[letter] - engine.seconds[code]) / unit)))
    solver: Any = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = workers
    status = solver.solve(model)
    words = [list(word) for word in start]
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        for rank in range(problem.ranks):
            codes = [(3 * stage + kind) for stage in problem.stages_of(rank) for kind in range(3)]
            placed = sorted((solver.value(begin[(code, k)]), code % 3 == 0, code) for code in codes for k in range(m))
            words[rank] = [code for _, _, code in placed]
    found = min(horizon_s, engine.makespan_s(words))
    if found == horizon_s:
        words = [list(word) for word in start]
    bound = min(found, solver.best_objective_bound * unit)
    return Optimum(tuple(tuple(word) for word in words), found, bound, status == cp_model.OPTIMAL)
