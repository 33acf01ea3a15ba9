"""What ranks run between the first forwards, and between the last backwards, of their stages."""

import pytest

from shardwright.core.schedule import Schedule, schedule_names
from shardwright.core.schedule.actions import Action, B, F, I, W
from shardwright.core.schedule.catalogue import FAMILIES
from shardwright.core.schedule.family import Sizes
from shardwright.core.schedule.passes_between import Between, passes_between


def order(text: str) -> tuple[Action, ...]:
    return tuple(Action.parse(word) for word in text.split())


def test_one_stage_has_nothing_between() -> None:
    assert passes_between(order("0F0 0F1 0B0 0B1")) == ()


def test_of_interleaved_stages_a_round_less_one() -> None:
    """The last rank of two, with two microbatches in a round."""
    found = passes_between(order("1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"))
    assert found == (Between(((1, F, 1),), ((1, B, 1),)),)


def test_halves_of_the_last_backward_are_its_own() -> None:
    found = passes_between(order("0F0 2F0 2I0 2W0 0F1 0I0 0I1 0W0 0W1"))
    assert found == (Between((), ((0, F, 1), (0, I, 1), (0, W, 1))),)


def test_stages_that_end_in_another_order_have_nothing_between() -> None:
    assert passes_between(order("0F0 2F0 0B0 2B0")) == ()
    assert passes_between(order("2F0 0F0 2B0 0B0")) == ()


@pytest.mark.parametrize("name", schedule_names())
def test_what_is_between_is_run_there(name: str) -> None:
    """Counted again by hand, for every schedule, over sizes that it admits."""
    seen = 0
    for ranks, microbatches, virtual in [(2, 4, 2), (4, 8, 2), (2, 6, 3), (4, 16, 1), (4, 4, 2)]:
        if FAMILIES[name].refusal(Sizes(ranks, microbatches, virtual)):
            continue
        schedule = Schedule.build(name, ranks=ranks, microbatches=microbatches, virtual_stages=virtual)
        for rank, row in enumerate(schedule.table):
            parts = [part for action in row for part in action.flat]
            stages = [stage for stage, at in enumerate(schedule.placement) if at == rank]
            for number, between in enumerate(passes_between(row)):
                seen += 1
                early, late = stages[number : number + 2]
                first = {s: next(n for n, p in enumerate(parts) if p.stage == s and p.kind is F) for s in stages}
                last = {s: max(n for n, p in enumerate(parts) if p.stage == s and p.kind in (B, W)) for s in stages}
                assert sum(n for *_, n in between.forwards) == first[late] - first[early] - 1
                own = parts[last[late] + 1 : last[early]]
                least = len(own) - any((p.stage, p.kind) == (early, I) for p in own)
                assert least <= sum(n for *_, n in between.backwards) <= len(own)
    assert seen or name not in ("interleaved-1f1b", "looped-bfs", "interleaved-zb")
