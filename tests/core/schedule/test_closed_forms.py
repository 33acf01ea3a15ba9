"""The literature's closed forms, as tests of generators and simulator together.

f, b and w are the times of a rank and microbatch over all its v stages; the bubble is the longest any rank takes from
its first start to its last end, less its work; peaks are in A, the activations of one microbatch on all stages of a
rank.
"""

from fractions import Fraction

import pytest

from shardwright.core.schedule import Schedule, StageCosts
from shardwright.core.schedule.simulate import simulate
from shardwright.core.schedule.timeline import Timeline

RANKS = range(2, 17)
F, B, W = 3.0, 4.0, 5.0  # Unequal, and small enough integers to add without rounding.


def run(name: str, p: int, m: int, v: int = 1, f: float = F, b: float = B, w: float = W) -> Timeline:
    return simulate(Schedule.build(name, ranks=p, microbatches=m, virtual_stages=v), StageCosts.uniform(p * v, f, b, w))


def peaks(timeline: Timeline, v: int) -> list[Fraction]:
    return [Fraction(peak, v) for peak in timeline.peak_live_activations]


def batches(p: int, least: int) -> list[int]:
    return sorted({least, least + 1, 2 * p, 3 * p + 1, 4 * p})


@pytest.mark.parametrize("p", RANKS)
def test_gpipe(p: int) -> None:
    for m in batches(p, p):
        timeline = run("gpipe", p, m)
        assert max(timeline.bubble_s) == (p - 1) * (F + B + W)
        assert timeline.makespan_s == (m + p - 1) * (F + B + W)
        assert peaks(timeline, 1) == [m] * p


@pytest.mark.parametrize("p", RANKS)
def test_1f1b(p: int) -> None:
    for m in batches(p, p):
        timeline = run("1f1b", p, m)
        assert max(timeline.bubble_s) == (p - 1) * (F + B + W)
        assert peaks(timeline, 1) == [min(m, p - i) for i in range(p)]


@pytest.mark.parametrize("p", RANKS)
def test_eager_1f1b_has_the_same_bubble_in_more_memory(p: int) -> None:
    for m in batches(p, 2 * p - 1):
        timeline = run("eager-1f1b", p, m)
        assert max(timeline.bubble_s) == (p - 1) * (F + B + W)
        assert peaks(timeline, 1) == [2 * (p - i) - 1 for i in range(p)]


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("v", [1, 2, 4])
def test_interleaved_1f1b(p: int, v: int) -> None:
    for m in (p, 2 * p, 4 * p):
        # Times of a stage; those of the rank are v times as long.
        assert max(run("interleaved-1f1b", p, m, v).bubble_s) == (p - 1) * (F + B + W)
        assert (p - 1) * (F + B + W) == (p - 1) * (v * F + v * B + v * W) / v


def test_interleaved_1f1b_with_fewer_microbatches_than_ranks_has_no_closed_form() -> None:
    # p=4, m=3, v=2, f+b+w=3 per stage and so 6 per rank: the form would give (4-1)*6/2 = 9.
    timeline = run("interleaved-1f1b", 4, 3, 2, 1.0, 1.0, 1.0)
    assert max(timeline.bubble_s) == 12


@pytest.mark.parametrize("p", RANKS)
def test_zb_h1(p: int) -> None:
    for m in batches(p, p):
        timeline = run("zb-h1", p, m, 1, 2.0, 2.0, 2.0)
        assert max(timeline.bubble_s) == (p - 1) * (2.0 + 2.0 - 2.0)
        assert peaks(timeline, 1) == [p] * p


@pytest.mark.parametrize("p", RANKS)
def test_zb_h2(p: int) -> None:
    for m in batches(p, 2 * p - 1):
        timeline = run("zb-h2", p, m, 1, 2.0, 2.0, 2.0)
        assert max(timeline.bubble_s) == 0
        assert peaks(timeline, 1) == [2 * p - 1] * p


@pytest.mark.parametrize("p", RANKS)
def test_zbv(p: int) -> None:
    for m in batches(p, 2 * p - 1):
        timeline = run("zbv", p, m, 2, 1.0, 1.0, 1.0)
        assert max(timeline.bubble_s) == 0
        assert max(peaks(timeline, 2)) == p


def test_zb_h2_and_zbv_with_too_few_microbatches_have_a_bubble() -> None:
    assert max(run("zb-h2", 4, 6, 1, 1.0, 1.0, 1.0).bubble_s) == 1
    assert max(run("zbv", 4, 6, 2, 1.0, 1.0, 1.0).bubble_s) == 2


@pytest.mark.parametrize("p", RANKS)
def test_v_half_and_v_min(p: int) -> None:
    for m in (p, 2 * p):
        assert max(peaks(run("v-half", p, m, 2, 1.0, 1.0, 1.0), 2)) == (p + 2) // 2
        assert max(peaks(run("v-min", p, m, 2, 1.0, 1.0, 1.0), 2)) == (p + 4) // 3


@pytest.mark.parametrize("p", RANKS)
def test_one_rank_or_one_microbatch(p: int) -> None:
    assert run("1f1b", 1, p).makespan_s == p * (F + B + W)
    assert run("1f1b", p, 1).makespan_s == p * (F + B + W)
