"""Stages that the schedule gathers, and gradients that it reduces once a step: their traffic, memory and choice."""

from dataclasses import replace
from functools import partial
from typing import Literal

import pytest

import shardwright as sw
from shardwright.core.capabilities import MemoryTraits
from shardwright.core.cluster.cluster import Cluster
from shardwright.core.cluster.hardware import load_profile
from shardwright.core.errors import PlanError
from shardwright.core.layout.mesh import Mesh
from shardwright.core.plan.decision import placement_of
from shardwright.core.schedule import Kind, Schedule
from shardwright.core.schedule.passes import insert_sharding
from shardwright.core.search.exchanges import gathers_in_step
from shardwright.core.search.rank_peaks import by_stage, less_apart
from shardwright.core.search.request import Request
from shardwright.core.search.scoring import Scorer
from shardwright.core.search.search import tables_of
from shardwright.core.search.space import Pipelining, Policy, Shape, splits_backward
from shardwright.core.tables.gathered_stages import gathering_moments, gathers_per_stage, peaks
from shardwright.core.tables.memory import live_microbatches
from tests.core.toy import decoder

TOY = decoder(layers=40, hidden=512, heads=8, vocabulary=1024, sequence=64)
GRAPH = replace(
    TOY,
    capabilities=replace(TOY.capabilities, exchanges_as_planned=True),
    memory_traits=MemoryTraits(gradients_when_made=True, gathers_units=True),
)
SLOW = Cluster("a100-80gb", nodes=4, devices_per_node=1, inter_node="ethernet-10g")
LOOPED = {"pp": 2, "dp": 2, "tp": 1, "microbatch": 1, "schedule": "looped-bfs", "virtual_stages": 4, "shard": 3,
          "recompute": "none", "placement_order": "PDT"}  # fmt: skip


def planned(**pins: object) -> sw.Plan:
    return sw.plan(GRAPH, SLOW, batch=16, **(LOOPED | pins))


def test_a_schedule_says_how_often_stages_are_gathered() -> None:
    """Forward over four stages, and back over the two that are there and the two that are not."""
    plan = planned(gathered_stages=2, reduce_after="last")
    gathers = [sum(a.kind is Kind.UNSHARD for a in order) for order in plan.build_schedule().table]
    assert gathers == [6, 6]
    assert gathers_in_step(plan.decision) == 6 / 4
    assert gathers_in_step(replace(plan.decision, gathered_stages=4)) == 1
    assert gathers_in_step(planned(gathered_stages=0).decision) == 2 * plan.microbatches


@pytest.mark.parametrize(("name", "v"), [("looped-bfs", 4), ("interleaved-1f1b", 3), ("zbv", 2), ("1f1b", 1)])
def test_long_schedules_gather_as_short_ones_say(name: str, v: int) -> None:
    for room in range(1, v + 1):
        long = Schedule.build(name, ranks=2, microbatches=36, virtual_stages=v)
        table = insert_sharding(long, room, weights_read=False).table
        most = max(sum(action.kind is Kind.UNSHARD for action in order) for order in table)
        assert gathers_per_stage(name, 2, 36, v, room, None) == pytest.approx(most / v)


def test_what_is_sent_less_often_is_held_longer() -> None:
    plans = {
        "units": planned(gathered_stages=0, reduce_after="each"),
        "once": planned(gathered_stages=0, reduce_after="last"),
        "one": planned(gathered_stages=1, reduce_after="each"),
        "two": planned(gathered_stages=2, reduce_after="each"),
        "all": planned(gathered_stages=4, reduce_after="last"),
        "whole": planned(shard=1),
    }
    sent = {name: p.data_parallel_s + p.passes_wait_s for name, p in ((n, plan.predicted) for n, plan in plans.items())}
    held = {name: max(plan.predicted.peak_memory_bytes) for name, plan in plans.items()}
    assert sent["units"] > sent["once"]
    assert sent["units"] > sent["one"] >= sent["two"] >= sent["all"]
    assert sent["all"] > sent["whole"] / 8, "the first gather and the last scatter are hidden by nothing"
    assert held["units"] < held["one"] < held["two"] < held["all"]
    shards = plans["all"].predicted.memory[0].parameters_bytes
    assert held["all"] == pytest.approx(held["whole"] + shards, rel=0.02), "the shards, and all of them whole"


def test_a_stage_holds_whole_gradients_only_while_it_runs_backward() -> None:
    """Where one stage runs after the other, as many gradients are whole as two stages make, not all of them. Both have
    one cut: what a searched one holds is another matter."""
    pins = {"gathered_stages": 1, "reduce_after": "last", "stage_starts": (0, 6, 11, 16, 21, 26, 31, 36)}
    looped, together = planned(**pins), planned(**pins, schedule="interleaved-1f1b")
    parameters = 4 * 40 * 12 * 512**2 // 2
    activations = [plan.predicted.memory[0].activations_bytes for plan in (looped, together)]
    beside = [plan.predicted.peak_memory_bytes[0] - a for plan, a in zip((looped, together), activations, strict=True)]
    assert beside[0] < beside[1] - parameters / 4


def test_the_search_keeps_stages_where_that_is_faster_and_fits() -> None:
    free = planned(reduce_after=None)
    decision = free.decision
    assert (decision.gathered_stages, decision.reduce_after) == (2, "last")
    assert free.predicted.step_time_s < planned(gathered_stages=0).predicted.step_time_s
    reason = "at most 2 stages gathered, gradients summed after the last microbatch"
    assert reason in free.summary()
    tight = replace(load_profile("a100-80gb").device, reserved_memory_bytes=0)
    least = max(planned(gathered_stages=0, reduce_after="each").predicted.peak_memory_bytes)
    small = Cluster(replace(tight, memory_bytes=int(1.02 * least)), nodes=4, devices_per_node=1,
                    inter_node="ethernet-10g")  # fmt: skip
    assert sw.plan(GRAPH, small, batch=16, **LOOPED).decision.gathered_stages is None


def test_a_framework_that_gathers_no_stages_is_planned_without() -> None:
    decision = sw.plan(TOY, SLOW, batch=16, **LOOPED).decision
    assert (decision.gathered_stages, decision.reduce_after) == (None, None)


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ({"gathered_stages": 2, "shard": 2}, "take shard=3"),
        ({"gathered_stages": 5}, "gathered_stages=4 or less"),
        ({"gathered_stages": 2, "look_ahead": 2}, "expected less than gathered_stages"),
        ({"look_ahead": 1}, "expected less than gathered_stages"),
        ({"reduce_after": "each", "shard": 1}, "take shard=2 or 3"),
        ({"reduce_after": "never"}, "known: each, last"),
        ({"gathered_stages": -1}, "gathered_stages"),
        (
            {"schedule": "dualpipev", "virtual_stages": 2, "gathered_stages": 1, "microbatch": 1},
            "2 stages of a rank run at once",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(pins: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        planned(**pins)


def test_the_memory_of_long_schedules_that_keep_all_microbatches_is_counted_whole() -> None:
    """Where activations grow with every microbatch, something else is largest in a short step."""
    graph = replace(
        decoder(layers=6, hidden=256, heads=8, vocabulary=1024, sequence=128), memory_traits=GRAPH.memory_traits
    )
    cluster, request = Cluster("cpu", devices_per_node=4), Request(batch=64, precision="fp32")
    scorer = Scorer(tables_of(graph, cluster, request), cluster, request)
    shape = Shape(Mesh(("pp", "dp", "tp"), (2, 2, 1)), "PDT", 1, 32)
    ranked = scorer.bounds.ranked(shape, "full")
    placement = placement_of("looped-bfs", 2, 4)
    decision = scorer.bounds.decision(
        shape, Policy("full", 3, None), Pipelining("looped-bfs", 4), ranked.free_cut(placement)
    )
    asked = scorer.bounds.memory_request(Policy("full", 3, None), 8, 2, 32, decision.whole_below_bytes)
    live = live_microbatches("looped-bfs", 2, 32, 4)
    memory = by_stage(decision, ranked, ranked.memory(decision.stage_starts, placement, live, asked), asked)
    moments = gathering_moments("looped-bfs", 2, 32, 4, None, None)
    whole = peaks(ranked, decision.stage_starts, placement, moments, asked)
    for use, peak in zip(less_apart(decision, ranked, memory, asked), whole, strict=True):
        staying = use.parameters_bytes + use.optimizer_bytes
        assert use.total_bytes >= staying + peak


@pytest.mark.parametrize("reduce_after", [None, "last"])
@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [("interleaved-1f1b", 4), ("interleaved-1f1b", 8), ("looped-bfs", 4), ("interleaved-zb", 3)],
)
def test_bounds_count_how_often_a_schedule_gathers(
    schedule: str, virtual: int, reduce_after: Literal["last"] | None
) -> None:
    request, pipelining = Request(batch=64), Pipelining(schedule, virtual)
    scorer = Scorer(tables_of(GRAPH, SLOW, request), SLOW, request)
    shape, policy = (
        Shape(Mesh(("pp", "dp", "tp"), (2, 2, 1)), "PDT", 1, 32),
        Policy("none", 3, None, 2, None, reduce_after),
    )
    split = splits_backward(schedule, virtual)
    bound = partial(scorer.bounds.bound_s, shape, [policy], virtual, split=split)
    (cut,) = scorer.cuts(shape, [policy], pipelining)
    draft = scorer.draft(scorer.cut_bounds.with_room(cut))
    assert draft is not None
    seconds, counted = scorer.timed(draft).predicted.step_time_s, bound(gathered_by=pipelining)
    assert max(counted, cut.bound_s, draft.bound_s) <= seconds * (1 + 1e-9)
    assert counted > 1.005 * bound()
    assert counted > 0.5 * seconds
