"""Improve words by local search: move letters that lie on the critical path.

Another order can shorten the critical path only where the path runs from a letter to the next one of the same rank, so
that is where letters are moved: the two change places, the later moves further up, or the earlier further down. Longer
makespans are accepted now and then, ever less so (Kirkpatrick et al., Science 220, 1983; van Laarhoven et al.,
Operations Research 40, 1992, for the neighbourhood in job shops).
"""

import random
from collections.abc import Sequence

from shardwright.core.schedule.auto.evaluate import Evaluator, Trace
from shardwright.core.schedule.auto.problem import Word

_TRIES_PER_RUN = 8  # Most moves are refused before they are run, which costs less than running them.
# Actions' mean times by which a step may be longer at first. Of 0.03 to 0.5, 0.25 was best at 8 and 16 ranks; small
# schedules were caught in poor places more often with it than with 0.5 (3% over the optimum once in 60 cases).
_TEMPERATURE, _SMALL_TEMPERATURE = 0.25, 0.5
_SMALL = 250  # Actions.


def improve(
    engine: Evaluator, words: Sequence[Word], runs: int, bound_s: float, seed: int = 0
) -> tuple[float, list[Word]]:
    """The best words within `runs` runs of the engine, and their makespan; stops at the bound."""
    draw = random.Random(seed)
    current = [list(word) for word in words]
    trace = engine.run(current)
    if trace is None:
        return float("inf"), current
    now_s = best_s = trace.makespan_s
    best = [list(word) for word in current]
    places = _places(engine, trace, draw)
    temperature = _TEMPERATURE if len(engine.rank_of) > _SMALL else _SMALL_TEMPERATURE
    heat_s = temperature * sum(engine.seconds) / len(engine.seconds)
    step = tries = 0
    while step < runs and tries < _TRIES_PER_RUN * runs and places and best_s > bound_s * (1 + 1e-9):
        tries += 1
        letter = draw.choice(places)
        rank = engine.rank_of[letter]
        word = current[rank]
        moved = _move(word, letter - engine.first[rank], draw)
        if moved == word or not engine.legal(rank, moved):
            continue
        current[rank] = moved
        step += 1
        trace = engine.run(current)
        slack_s = draw.expovariate(1.0) * heat_s * (1 - step / runs)
        if trace is None or trace.makespan_s > now_s + slack_s:
            current[rank] = word
            continue
        now_s = trace.makespan_s
        places = _places(engine, trace, draw)
        if now_s < best_s:
            best_s, best = now_s, [list(kept) for kept in current]
    return best_s, best


def _places(engine: Evaluator, trace: Trace, draw: random.Random) -> list[int]:
    """The letters on a critical path that waited for the letter before them on their rank."""
    ends = [rank for rank, clock in enumerate(trace.clock_s) if clock == trace.makespan_s]
    letter = engine.first[draw.choice(ends) + 1] - 1
    places = []
    while letter >= 0:
        before = trace.cause[letter]
        if before == letter - 1 and letter > engine.first[engine.rank_of[letter]]:
            places.append(letter)
        letter = before
    return places


def _move(word: Word, position: int, draw: random.Random) -> Word:
    """The word with the letter at a position moved up, or the one before it moved down, by one place or more."""
    how = draw.random()
    source, target = position, position - 1
    if how >= 0.75:
        source, target = position - 1, min(len(word) - 1, position + int(draw.expovariate(0.5)))
    elif how >= 0.5:
        target = max(0, position - 1 - int(draw.expovariate(0.5)))
    moved = word[:source] + word[source + 1 :]
    moved.insert(target, word[source])
    return moved
