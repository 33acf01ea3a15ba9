"""Build words by playing the pipeline through: whenever a rank is free it takes the best of what is ready.

The same rules play it forwards, and backwards from the end: in the mirror, input gradients come first, from the first
stage to the last, and forwards follow on the way back. Forwards builds good beginnings, backwards good ends. A
microbatch takes memory at its first action on a stage and gives it back at its last. It may take memory only where all
microbatches under way can still get through, so that memory never locks the pipeline.
"""

import heapq
from dataclasses import dataclass
from itertools import chain, product

from shardwright.core.schedule.auto.problem import Problem, Word

ANY = 1 << 30
_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Habits:
    """The rules by which ranks choose.

    Args:
        ahead: per stage, the lead in microbatches below which what lets microbatches in (F; I in the mirror) comes
            before what lets them out; 0 is "backward first".
        patience: per rank, the share of its time that a gap must have for a weight gradient to fill it.
        owed: per rank, the number of weight gradients put off above which one goes before the next forward (in the
            mirror: the number that may go ahead of their input gradients).
    """

    ahead: tuple[int, ...]
    patience: tuple[float, ...]
    owed: tuple[int, ...]


# (slope and base of `ahead` over the stages still to come, patience, owed, mirrored). Of 288 combinations, these hold
# the best for each of 33 problems (8 to 32 ranks, one or two stages each, three kinds of limits), most useful first.
_BEST_FIRST = (
    ((2.0, 0), 0.0, ANY, True),
    ((1.0, 2), 0.0, ANY, False),
    ((1.5, 1), 0.5, ANY, False),
    ((1.5, 1), 0.0, 2, True),
    ((2.0, 1), 0.5, ANY, True),
    ((1.0, 1), 1.0, ANY, True),
    ((1.0, 1), 0.5, 2, True),
    ((1.0, 1), 0.0, ANY, False),
    ((1.5, 1), 0.0, ANY, True),
    ((1.0, 1), 0.0, 1, False),
    ((0.5, 1), 0.0, ANY, True),
    ((2.0, 1), 0.5, 2, True),
    ((1.0, 1), 1.0, ANY, False),
    ((1.0, 2), 0.0, ANY, True),
)
_LINES = ((0, 0), (1, 1), (0, ANY), (2, 1), (0, 1), (1, 0), (0.5, 1), (2, 0), (0, 2), (1.5, 1), (0.5, 0), (1, 2))


def habits(problem: Problem, count: int) -> list[tuple[Habits, bool]]:
    """Up to `count` habits, each with whether to play it in the mirror: first those that have proved useful, then a
    spread of warm-ups from flat ones to twice 1F1B's, gaps filled always or only when wide, weight gradients put off or
    not.
    """
    ranks, last = problem.ranks, problem.stages - 1
    chosen: dict[tuple[Habits, bool], None] = {}
    for (slope, base), patience, owed, mirrored in chain(
        _BEST_FIRST, product(_LINES, (0.5, 0.0, 1.0), (ANY, 1, 0, 2), (False, True))
    ):
        ahead = tuple(int(base + slope * (last - stage)) for stage in range(last + 1))
        chosen[Habits(ahead, (patience,) * ranks, (owed,) * ranks), mirrored] = None
        if len(chosen) == count:
            break
    return list(chosen)


def construct(problem: Problem, habit: Habits, mirrored: bool = False) -> list[Word]:
    """The words that a habit leads to; in the mirror they are played from the end."""
    m, last, placement, move = problem.microbatches, problem.stages - 1, problem.placement, problem.transfer_s
    sizes, limits, weigh = problem.activation_bytes, problem.limit_bytes, problem.weight_grad_s
    # In the mirror a weight gradient takes all the memory of its microbatch at once, which is too much, but leaves its
    # input gradient room.
    freed = (0,) * len(sizes) if mirrored else problem.freed_by_input_grad_bytes
    enter, leave = problem.forward_s, problem.input_grad_s
    enter_code, leave_code = 0, 1
    if mirrored:
        enter, leave, enter_code, leave_code = leave, enter, leave_code, enter_code
    held = [problem.stages_of(rank) for rank in range(problem.ranks)]
    entered, left, weighed = [0] * (last + 1), [0] * (last + 1), [0] * (last + 1)
    coming_in: list[list[float]] = [[] for _ in range(last + 1)]
    coming_out: list[list[float]] = [[] for _ in range(last + 1)]
    coming_in[0] = [0.0] * m
    link: dict[tuple[int, int], float] = {}
    live = [0] * problem.ranks
    whole = problem.least_bytes()
    words: list[Word] = [[] for _ in range(problem.ranks)]
    asleep = [False] * problem.ranks
    free_s = [0.0] * problem.ranks
    events = [(0.0, rank) for rank in range(problem.ranks)]
    # The counts of what takes a microbatch's memory on a stage, and of what gives it back.
    takes, gives = (weighed, left) if mirrored else (entered, weighed)

    def room(rank: int, stage: int) -> bool:
        """Whether a stage may take memory for its next microbatch, so that all that are under way on its rank can still
        get through, the oldest first (Dijkstra's banker, EWD 623).
        """
        stages, spare = held[rank], limits[rank] - live[rank] - sizes[stage]
        if len(stages) == 1 or spare < 0 or spare >= whole[rank]:
            return spare >= 0
        taken = takes[stage]
        for mb in range(min(gives[s] for s in stages), max(taken + 1, *(takes[s] for s in stages))):
            needed = returned = 0
            for s in stages:
                if gives[s] <= mb:
                    if takes[s] > mb or (s == stage and taken == mb):
                        returned += sizes[s] - (freed[s] if left[s] > mb else 0)
                    else:
                        needed += sizes[s]
            if needed > spare:
                return False
            spare += returned
        return True

    while events:
        now, rank = heapq.heappop(events)
        if now < free_s[rank]:
            continue
        best: tuple[int, int, int] | None = None
        chosen, kind = -1, -1
        soonest = _NEVER
        weight, weight_order, blocked, owed = -1, (ANY, 0), False, 0
        for s in held[rank]:
            out = left[s]
            if out < len(coming_out[s]):
                arrival = coming_out[s][out]
                if arrival <= now:
                    order = (0 if entered[s] - out >= habit.ahead[s] else 2, out, -s)
                    if best is None or order < best:
                        best, chosen, kind = order, s, leave_code
                elif arrival < soonest:
                    soonest = arrival
            into = entered[s]
            if into < len(coming_in[s]):
                # The mirror needs the weight gradient first; forwards need memory.
                if (mirrored and weighed[s] > into) or room(rank, s):
                    arrival = coming_in[s][into]
                    if arrival <= now:
                        order = (1, into, -s)
                        if best is None or order < best:
                            best, chosen, kind = order, s, enter_code
                    elif arrival < soonest:
                        soonest = arrival
                elif coming_in[s][into] <= now:
                    blocked = True
            if mirrored:
                fits = weighed[s] < m and weighed[s] - into <= habit.owed[rank] and room(rank, s)
            else:
                fits = weighed[s] < out
                owed += out - weighed[s]
            if fits and (weighed[s], s) < weight_order:
                weight, weight_order = s, (weighed[s], s)
        if chosen < 0:
            gap = soonest - now
            if weight >= 0 and ((blocked and not mirrored) or gap >= habit.patience[rank] * weigh[weight]):
                chosen, kind = weight, 2
            elif soonest < _NEVER:
                heapq.heappush(events, (soonest, rank))
                continue
            else:
                asleep[rank] = True
                continue
        elif kind == enter_code:
            if mirrored:
                kind = kind if weighed[chosen] > entered[chosen] else 2
            elif owed > habit.owed[rank]:
                chosen, kind = weight, 2
        words[rank].append(3 * chosen + kind)
        s = chosen
        to = -1
        if kind == 2:
            end = now + weigh[s]
            weighed[s] += 1
            live[rank] += sizes[s] if mirrored else freed[s] - sizes[s]
        elif kind == enter_code:
            end = now + enter[s]
            entered[s] += 1
            if not mirrored:
                live[rank] += sizes[s]
            if s == last:
                coming_out[s].append(end)
            else:
                to = s + 1
        else:
            end = now + leave[s]
            left[s] += 1
            live[rank] -= sizes[s] if mirrored else freed[s]
            to = s - 1
        if to >= 0:
            queue = coming_in[to] if kind == enter_code else coming_out[to]
            peer = placement[to]
            if peer == rank:
                queue.append(end)
            else:
                link[(rank, peer)] = arrival = max(link.get((rank, peer), 0.0), end) + move[min(s, to)]
                queue.append(arrival)
                if asleep[peer]:
                    asleep[peer] = False
                    heapq.heappush(events, (max(free_s[peer], now), peer))
        free_s[rank] = end
        heapq.heappush(events, (end, rank))
    return [word[::-1] for word in words] if mirrored else words
