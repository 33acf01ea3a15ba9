"""The lengths of slices, against all compositions of the sequence."""

import math
import random
from collections.abc import Iterator
from itertools import pairwise

import pytest

from shardwright import Schedule, StageCosts, simulate, slice_lengths
from shardwright.core.errors import PlanError
from shardwright.core.slices.lengths import best_lengths

Table = dict[tuple[int, int], float]


def compositions(tokens: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut so many tokens into slices."""
    for bits in range(1 << (tokens - 1)):
        cuts = [0, *(place + 1 for place in range(tokens - 1) if bits >> place & 1), tokens]
        yield tuple(b - a for a, b in pairwise(cuts))


def step_s(table: Table, lengths: tuple[int, ...], stages: int) -> float:
    seconds = [table[length, sum(lengths[:at])] for at, length in enumerate(lengths)]
    return math.fsum(seconds) + (stages - 1) * max(seconds)


def random_table(rng: random.Random, tokens: int) -> Table:
    overhead, per_token, per_pair = rng.random(), rng.random(), rng.choice([0.0, rng.random() / tokens])
    is_monotone = rng.random() < 0.5
    return {
        (length, context): overhead + length * (per_token + per_pair * (context + length / 2))
        if is_monotone
        else rng.choice([1.0, 10.0]) * rng.random()
        for length in range(1, tokens + 1)
        for context in range(tokens - length + 1)
    }


def equals_brute_force(seed: int, most_tokens: int) -> None:
    rng = random.Random(seed)
    tokens, stages = rng.randint(1, most_tokens), rng.randint(1, 8)
    table = random_table(rng, tokens)
    slices = rng.choice([None, None, rng.randint(1, tokens)])
    ways = [way for way in compositions(tokens) if slices is None or len(way) == slices]
    found = best_lengths(lambda length, context: table[length, context], tokens, stages, slices)
    assert sum(found.lengths) == tokens
    assert found.lengths in ways
    assert found.step_s == pytest.approx(step_s(table, found.lengths, stages), rel=1e-12)
    assert found.step_s == pytest.approx(min(step_s(table, way, stages) for way in ways), rel=1e-9)


@pytest.mark.parametrize("seed", range(100))
def test_lengths_equal_brute_force(seed: int) -> None:
    equals_brute_force(seed, most_tokens=9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(500))
def test_lengths_equal_brute_force_of_up_to_14_tokens(seed: int) -> None:
    equals_brute_force(1000 + seed, most_tokens=14)


@pytest.mark.parametrize("stages", [2, 3, 8, 48])
@pytest.mark.parametrize("tokens", [7, 64, 100])
def test_without_context_slices_are_equal_to_one_step(stages: int, tokens: int) -> None:
    for step in (1, 4):
        lengths = slice_lengths(lambda length, context: 2.0 + length, tokens, stages, step=step)
        whole = lengths[:-1] if tokens % step else lengths
        assert max(whole) - min(whole) <= step
        assert sum(lengths) == tokens
        assert max(lengths) == lengths[-1] or lengths[-1] >= min(whole) - step


def test_the_simulator_says_the_same() -> None:
    def cost(length: int, context: int) -> float:
        return 0.3 + 0.01 * length + 0.0002 * length * (context + length / 2)

    found = best_lengths(cost, 96, 6, step=8)
    assert len(found.lengths) > 1
    schedule = Schedule.build("gpipe", ranks=6, microbatches=1, slices=len(found.lengths))
    seconds = [cost(length, sum(found.lengths[:at])) for at, length in enumerate(found.lengths)]
    costs = [StageCosts.uniform(6, t / 3, t / 3, t / 3) for t in seconds]
    assert simulate(schedule, costs).makespan_s == pytest.approx(found.step_s)


def test_steps_that_do_not_divide_leave_the_rest_to_the_last_slice() -> None:
    lengths = slice_lengths(lambda length, context: 1.0 + length, 30, 4, step=8)
    assert sum(lengths) == 30
    assert all(length % 8 == 0 for length in lengths[:-1])


def test_of_equal_steps_the_fewest_slices() -> None:
    assert slice_lengths(lambda length, context: float(length), 12, stages=1) == (12,)
    assert slice_lengths(lambda length, context: 0.0, 12, stages=4) == (12,)


def test_slices_that_cannot_be() -> None:
    def at_least_four(length: int, context: int) -> float:
        return math.inf if length < 4 else 1.0 + length

    assert min(slice_lengths(at_least_four, 18, stages=30)) >= 4
    with pytest.raises(PlanError, match="no 6 slices of 18 tokens are possible"):
        slice_lengths(at_least_four, 18, stages=3, slices=6)
    with pytest.raises(PlanError, match="no slices of 3 tokens are possible"):
        slice_lengths(at_least_four, 3, stages=3)


@pytest.mark.parametrize("given", [math.nan, -1.0, None, "1", True])
def test_costs_that_are_no_seconds(given: object) -> None:
    with pytest.raises(PlanError, match=r"cost\(1, 0\) gave .*expected the slice's seconds, 0 or more"):
        slice_lengths(lambda length, context: given, 4, stages=2)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"tokens": 0}, "tokens=0"),
        ({"stages": 0}, "stages=0"),
        ({"step": 0}, "step=0"),
        ({"slices": 0}, "slices=0"),
        ({"tokens": 2.5}, "tokens=2.5"),
        ({"slices": 9}, "slices=9 of 8 tokens in steps of 1: expected at most 8"),
        ({"tokens": 100_000}, "expected at most 4096, as with step=25"),
    ],
)
def test_numbers_that_cannot_be(numbers: dict[str, int], said: str) -> None:
    asked = {"tokens": 8, "stages": 2} | numbers
    with pytest.raises(PlanError, match=said):
        slice_lengths(lambda length, context: 1.0, **asked)  # type: ignore[arg-type]
