"""Messages that take memory: closed forms of known schedules, and a sender that is asked what it can know."""

import pytest

from shardwright.core.schedule import Schedule, schedule_names
from shardwright.core.schedule.actions import Action, B, F, I, W
from shardwright.core.schedule.catalogue import FAMILIES
from shardwright.core.schedule.family import Sizes
from shardwright.core.schedule.messages_by_action import messages_by_action
from shardwright.core.schedule.messages_under_way import messages_under_way, usual_messages_under_way
from shardwright.core.schedule.peak_memory import walk_activations


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_1f1b_hears_of_its_first_message_when_its_forwards_ahead_are_done(p: int) -> None:
    """While the last of them runs, those before it are under way, and a gradient is awaited."""
    for m in (p, 3 * p):
        found = messages_under_way(Schedule.build("1f1b", ranks=p, microbatches=m))
        assert [behind for _, behind in found] == [*(max(2, p - rank) for rank in range(p - 1)), 0]
        assert all(before <= 2 for before, _ in found)


@pytest.mark.parametrize("m", [3, 8, 20])
def test_gpipe_sends_all_before_it_hears_anything(m: int) -> None:
    """While the last forward runs, those before it are on their way, or may be."""
    first, last = messages_under_way(Schedule.build("gpipe", ranks=2, microbatches=m))
    assert first == (0, m)  # with the gradient that is awaited while the last forward runs
    assert last == (0, 0)  # its gradients pile up when activations have begun to go


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "eager-1f1b", "zb-h1"])
def test_action_by_action_messages_are_as_many_on_either_side(name: str) -> None:
    """Each between its two stages; where as many activations are live as ever, no more than are said for the rank."""
    schedule = Schedule.build(name, ranks=4, microbatches=6)
    every = zip(schedule.table, messages_by_action(schedule), messages_under_way(schedule), strict=True)
    for rank, (order, found, most) in enumerate(every):
        assert len(found.firsts) == len(order)
        live = [now for now, _ in walk_activations(order)]
        sides = [[0] * 4, [0] * 4]
        sides[0][rank] = 1
        if rank + 1 < 4:
            sides[1][rank + 1] = 1
        fullest = [
            max((size for size, now in zip(found.sizes(side), live, strict=True) if now == max(live)), default=0)
            for side in sides
        ]
        assert tuple(fullest) == most
        assert found.sizes([1] * 4) == [sum(pair) for pair in zip(*map(found.sizes, sides), strict=True)]


def test_when_a_backward_begins_its_gradient_is_there_and_what_it_says_was_taken() -> None:
    """Rank 0 of two runs 0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3: when 0B2 begins, its own gradient has come and that of 0B3
    is posted, and of 0F2 and 0F3 it is not known yet that they were taken. The gradient of 0B2 tells of 0F2."""
    first, _ = messages_by_action(Schedule.build("1f1b", ranks=2, microbatches=4))
    assert first.sizes([0, 1]) == [0, 2, 1, 2, 1, 2, 2, 0]
    assert first.beginning_sizes([0, 1]) == [0, 2, 3, 2, 3, 2, 4, 2]


def run_of(schedule: Schedule, rank: int) -> list[Action]:
    return [part for action in schedule.table[rank] for part in action.flat if part.kind in (F, B, I, W)]


def known_to_be_taken(schedule: Schedule, rank: int, until: int) -> set[tuple[bool, int, int | None]]:
    """The messages of a rank that were taken, as it can conclude before its action ``until`` from what it has taken:
    every message was made behind all actions that its maker's order has before it."""
    runs = [run_of(schedule, other) for other in range(schedule.ranks)]
    where = {
        (action.kind is F, action.stage, action.microbatch): (on, place)
        for on, run in enumerate(runs)
        for place, action in enumerate(run)
        if action.kind is not W
    }

    def source(action: Action) -> tuple[int, int]:
        wanted = action.kind is F, action.stage + (-1 if action.kind is F else 1), action.microbatch
        return (-1, -1) if action.kind is W else where.get(wanted, (-1, -1))

    reached = [-1] * schedule.ranks
    for action in runs[rank][: until + 1]:
        on, place = source(action)
        if on not in (rank, -1):
            reached[on] = max(reached[on], place)
    return {
        (action.kind is not F, action.stage + (-1 if action.kind is F else 1), action.microbatch)
        for other, end in enumerate(reached)
        for action in runs[other][: end + 1]
        if source(action)[0] == rank
    }


@pytest.mark.parametrize("name", schedule_names())
def test_what_is_under_way_is_what_nobody_is_known_to_have_taken(name: str) -> None:
    for p, m, v in ((2, 4, 1), (3, 6, 1), (4, 8, 1), (2, 4, 2), (4, 8, 2), (2, 6, 3)):
        if FAMILIES[name].refusal(Sizes(p, m, v, None, None, None)):
            continue
        schedule = Schedule.build(name, ranks=p, microbatches=m, virtual_stages=v)
        for rank, found in enumerate(messages_under_way(schedule)):
            run, unknown, live, kept = run_of(schedule, rank), [], [], 0
            for place, now in enumerate(run):
                sent = set()
                for action in run[:place]:
                    target = action.stage + (1 if action.kind is F else -1)
                    is_between = action.kind is not W and 0 <= target < schedule.stages
                    if is_between and schedule.stage_to_rank(target) != rank:
                        sent.add((action.kind is not F, action.stage, action.microbatch))
                unknown.append(sent - known_to_be_taken(schedule, rank, place))
                kept += now.kind is F
                live.append(kept)
                kept -= now.kind in (B, W)
            at_most = [messages for messages, count in zip(unknown, live, strict=True) if count == max(live)]
            for is_gradient, count in zip((True, False), found, strict=True):
                most = max(sum(of == is_gradient for of, _, _ in messages) for messages in at_most)
                assert most <= count <= most + 1  # and what is awaited


@pytest.mark.parametrize("name", schedule_names())
def test_long_schedules_are_as_extrapolated(name: str) -> None:
    for p, m, v in ((2, 24, 1), (4, 48, 1), (2, 24, 2), (4, 48, 2)):
        if not FAMILIES[name].refusal(Sizes(p, m, v, None, None, None)):
            built = messages_under_way(Schedule.build(name, ranks=p, microbatches=m, virtual_stages=v))
            assert usual_messages_under_way(name, p, m, v) == built
