"""The walk through a rank's memory: closed forms of known schedules, and a count of every byte by its name."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule import Schedule, schedule_names
from shardwright.core.schedule.actions import Action, B, F, I, W
from shardwright.core.schedule.auto.construct import construct, habits
from shardwright.core.schedule.auto.evaluate import Evaluator
from shardwright.core.schedule.auto.problem import Problem
from shardwright.core.schedule.checks import check_memory
from shardwright.core.schedule.costs import StageCosts
from shardwright.core.schedule.passes import split_backward
from shardwright.core.schedule.peak_memory import Messages, StageMemory, peak_below_sum, peak_live, walk_memory
from shardwright.core.schedule.simulate import simulate

SIZES = st.integers(0, 50)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_live_activations_of_known_schedules(p: int) -> None:
    """1F1B: Narayanan et al., arXiv 2006.09503; GPipe: arXiv 1811.06965; ZB-H1 and ZB-H2: arXiv 2401.10241."""
    for m in (1, p, 2 * p, 4 * p + 1):
        peaks = {
            name: [peak_live(order) for order in Schedule.build(name, ranks=p, microbatches=m).table]
            for name in ("1f1b", "gpipe", "zb-h1", "zb-h2")
        }
        assert peaks["1f1b"] == [min(m, p - rank) for rank in range(p)]
        assert peaks["gpipe"] == [m] * p
        assert peaks["zb-h1"] == [min(m, p)] * p
        assert peaks["zb-h2"] == [min(m, 2 * p - 1)] * p


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_what_input_gradients_free_is_not_there_for_the_next_forward(p: int) -> None:
    """ZB-H1 puts weight gradients off: on rank r, of p live microbatches r have only what these read."""
    kept, freed = 10, 4
    for rank, order in enumerate(Schedule.build("zb-h1", ranks=p, microbatches=4 * p).table):
        assert peak_live(order, [kept] * p) == kept * p
        assert peak_live(order, [kept] * p, [freed] * p) == kept * p - freed * rank


@st.composite
def orders(draw: st.DrawFn) -> tuple[Action, ...]:
    """What one rank of a few stages may run, in any order in which a forward comes before its backward: whole, split or
    overlapped with a forward."""
    stages, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    passes = {
        (stage, mb): [F, *draw(st.sampled_from(((B,), (I, W))))]
        for stage in range(stages)
        for mb in range(microbatches)
    }
    order: list[Action] = []
    while passes:
        at = draw(st.sampled_from(sorted(passes)))
        order.append(Action(at[0], passes[at].pop(0), at[1]))
        if not passes[at]:
            del passes[at]
    paired: list[Action] = []
    for action in order:
        before = paired[-1] if paired else None
        cell = (action.stage, action.microbatch)
        can_pair = before is not None and before.kind is F and (before.stage, before.microbatch) != cell
        if can_pair and action.kind in (B, I) and draw(st.booleans()):
            paired[-1] = Action.overlap(before, action)
        else:
            paired.append(action)
    return tuple(paired)


@st.composite
def stage_sizes(draw: st.DrawFn) -> StageMemory:
    freed, rest = draw(SIZES), draw(SIZES)
    return StageMemory(freed + rest, draw(SIZES), draw(SIZES), freed_by_input_grad=freed)


def _named(order: tuple[Action, ...], until: int, sizes: dict[int, StageMemory], *, running: bool) -> Counter[str]:
    """Bytes of every activation and gradient by its name, found anew from all actions before one: while it runs,
    or, where it is the last that ended, from then on."""
    ended = [part for action in order[:until] for part in action.flat]
    running_now = list(order[until].flat) if running else []
    done = {(part.stage, part.kind, part.microbatch) for part in ended}
    found: Counter[str] = Counter()
    for part in (*ended, *running_now):
        if part.kind is F and not {(part.stage, kind, part.microbatch) for kind in (B, W)} & done:
            size = sizes[part.stage]
            is_partial = (part.stage, I, part.microbatch) in done
            found["activations"] += size.activations - (size.freed_by_input_grad if is_partial else 0)
    found["gradients"] = sum(sizes[stage].gradients for stage in {p.stage for p in ended if p.kind in (B, W)})
    return found


@given(orders(), st.lists(stage_sizes(), min_size=3, max_size=3))
@settings(max_examples=200, deadline=None)
def test_every_moment_is_the_count_of_what_is_there(order: tuple[Action, ...], drawn: list[StageMemory]) -> None:
    sizes = {part.stage: drawn[part.stage] for action in order for part in action.flat}
    memories = list(walk_memory(order, sizes))
    assert len(memories) == len(order)
    for number, memory in enumerate(memories):
        before, after = (_named(order, n, sizes, running=False) for n in (number, number + 1))
        now = _named(order, number, sizes, running=True)
        assert memory.activations == now["activations"]
        assert memory.remaining == after["activations"]
        assert memory.gradients == after["gradients"]
        if order[number].kind is not B:
            working = max(size.working for size in sizes.values())
            assert memory.most == now["activations"] + before["gradients"] + working
    kept, early = ([getattr(size, name) for size in drawn] for name in ("activations", "freed_by_input_grad"))
    assert peak_live(order, kept, early) == max(_named(order, n, sizes, running=True)["activations"]
                                                for n in range(len(order)))  # fmt: skip


def test_a_backward_makes_its_gradients_as_it_gives_activations_up() -> None:
    sizes = {0: StageMemory(10, 1, 30, first_backward=32)}
    order = [Action.parse(text) for text in ("0F0", "0F1", "0B0", "0F2", "0B1", "0B2")]
    assert [memory.most for memory in walk_memory(order, sizes)] == [11, 21, 10 + 32, 51, 51, 41]


def test_a_forward_and_later_backwards_may_hold_less_and_messages_are_beside_them() -> None:
    sizes = {0: StageMemory(10, 8, 30, first_backward=32, forward=3, backward_again=5)}
    order = [Action.parse(text) for text in ("0F0", "0F1", "0B0", "0F2", "0B1", "0B2")]
    messages = Messages([0, 1, 1, 4, 2, 0])
    found = [memory.most for memory in walk_memory(order, sizes, messages)]
    assert found == [13, 23 + 1, 10 + 32 + 1, 50 + 3 + 4, 50 + 5 + 2, 40 + 5]
    together = 30 + 20 + 8
    assert peak_below_sum(order, sizes, messages, 6) == together + 6 - 57
    assert peak_below_sum(order, sizes) == together - 55


def test_messages_are_more_when_an_action_begins() -> None:
    """What it was given is there, what was sent is not known to be taken, and it has made nothing yet."""
    sizes = {0: StageMemory(10, 8, 30, first_backward=32, forward=3, backward_again=5)}
    order = [Action.parse(text) for text in ("0F0", "0F1", "0B0", "0B1")]
    found = [memory.most for memory in walk_memory(order, sizes, Messages((), [20, 1, 30, 14]))]
    assert found == [20, 23, 20 + 30, 10 + 30 + 14]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """What `auto` solves, on one rank or several, with limits from the least that any schedule keeps."""
    p, v, m = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 4))
    stages = p * v
    times = [tuple(draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))) for n in (*[stages] * 3, stages - 1)]
    sizes = [(draw(st.integers(0, 9)), draw(st.integers(0, 9))) for _ in range(stages)]
    kept, freed = tuple(map(sum, sizes)), tuple(early for early, _ in sizes)
    costs = StageCosts(*times, kept, freed_by_input_grad_bytes=freed)
    placement = tuple(stage % p for stage in range(stages))
    least = Problem.of(placement, m, costs, None).least_bytes()
    return Problem.of(placement, m, costs, [size + draw(st.integers(0, 30)) for size in least])


@given(problems(), st.data())
@settings(max_examples=200, deadline=None)
def test_the_search_of_auto_keeps_to_the_same_rule(problem: Problem, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, problem.ranks - 1))
    word: list[int] = []
    left = Counter({3 * stage: problem.microbatches for stage in problem.stages_of(rank)})
    while choices := sorted(left.elements()):
        code = data.draw(st.sampled_from(choices))
        word.append(code)
        left[code] -= 1
        if code % 3 < 2:
            left[code + 1] += 1
    sizes = problem.activation_bytes, problem.freed_by_input_grad_bytes
    (order,) = problem.table([word])
    assert Evaluator(problem).legal(rank, word) == (peak_live(order, *sizes) <= problem.limit_bytes[rank])


@given(problems())
@settings(max_examples=100, deadline=None)
def test_what_auto_constructs_ends_and_keeps_its_limit_by_the_walk(problem: Problem) -> None:
    engine, sizes = Evaluator(problem), (problem.activation_bytes, problem.freed_by_input_grad_bytes)
    for habit, mirrored in habits(problem, 14):
        words = construct(problem, habit, mirrored)
        assert engine.makespan_s(words) >= problem.lower_bound_s() * (1 - 1e-12)
        assert engine.makespan_s(words) < float("inf")
        for order, limit in zip(problem.table(words), problem.limit_bytes, strict=True):
            assert len(order) % (3 * problem.microbatches) == 0
            assert peak_live(order, *sizes) <= limit


def test_memory_that_input_gradients_free_makes_room_for_forwards() -> None:
    """One stage, its weight gradients at the end: one microbatch is held whole, and of the others what these read."""
    costs = StageCosts((1.0,), (1.0,), (1.0,), (), (10,), freed_by_input_grad_bytes=(8,))
    texts = ("0F0", "0I0", "0F1", "0I1", "0F2", "0I2", "0W0", "0W1", "0W2")
    late = Schedule("late", (), 1, 1, 3, (0,), (tuple(map(Action.parse, texts)),))
    check_memory(late, 10 + 2 * 2, costs)
    with pytest.raises(ScheduleError, match="rank 0 holds 14 bytes of activations during 0F2: its limit is 13"):
        check_memory(late, 13, costs)
    timeline = simulate(late, costs)
    assert timeline.peak_activation_bytes == (14,)
    assert timeline.memory(0)[1].tolist() == [10, 2, 12, 4, 14, 6, 4, 2, 0]
    with pytest.raises(ScheduleError, match=r"freed_by_input_grad_bytes\[0\]=11 of stage 0: expected at most"):
        StageCosts((1.0,), (1.0,), (1.0,), (), (10,), freed_by_input_grad_bytes=(11,))


@pytest.mark.parametrize("name", schedule_names())
def test_timelines_and_checks_have_the_peaks_of_the_walk(name: str) -> None:
    for p, m in ((2, 4), (4, 8)):
        v = next((v for v in (1, 2) if _builds(name, p, m, v)), None)
        assert v is not None
        schedule = Schedule.build(name, ranks=p, microbatches=m, virtual_stages=v)
        for table in (schedule, split_backward(schedule)):
            stages = table.stages
            costs = StageCosts(*((1.0,) * stages,) * 3, (0.0,) * (stages - 1), tuple(range(3, 3 + stages)))
            peaks = [peak_live(order, costs.activation_bytes) for order in table.table]
            timeline = simulate(table, costs)
            assert list(timeline.peak_activation_bytes) == peaks
            assert [int(timeline.memory(rank)[1].max()) for rank in range(p)] == peaks
            assert list(timeline.peak_live_activations) == [peak_live(order) for order in table.table]
            check_memory(table, peaks, costs)
            for rank in range(p):
                limits = [peak - (at == rank) for at, peak in enumerate(peaks)]
                with pytest.raises(ScheduleError, match=f"rank {rank} holds .* bytes of activations during"):
                    check_memory(table, limits, costs)


def _builds(name: str, p: int, m: int, v: int) -> bool:
    try:
        Schedule.build(name, ranks=p, microbatches=m, virtual_stages=v)
    except ScheduleError:
        return False
    return True
