"""The answer of a search: the simplest choice within the margin, against all choices scored one by one."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwright as sw
from shardwright import Cluster
from shardwright.core.cluster.cluster import NodeGroup
from shardwright.core.cluster.hardware import load_profile
from shardwright.core.model.graph import Graph
from shardwright.core.plan.prediction_error import LEAD
from shardwright.core.schedule import schedule_names
from shardwright.core.schedule.catalogue import FAMILIES
from shardwright.core.search import search
from shardwright.core.search.best_first import Search
from shardwright.core.search.request import Request
from shardwright.core.search.scoring import Scored
from shardwright.core.search.search import tables_of
from shardwright.core.search.simplicity import SCHEDULES, least_simplicity, simplicity, why_less_simple
from shardwright.core.search.space import Policy
from tests.core.toy import decoder

SMALL = decoder(layers=3, hidden=256, heads=8, vocabulary=1024, sequence=128)


def every_choice(graph: Graph, cluster: Cluster, request: Request) -> list[Scored]:
    """All that may be chosen, scored without a queue; and no bound of simplicity is above what it bounds."""
    search = Search(tables_of(graph, cluster, request), cluster, request)
    scorer, space, found = search.scorer, search.space, []
    for shape in space.shapes():
        pp, dp, _ = shape.degrees
        alike: dict[object, list[Policy]] = {}
        for policy in space.policies(dp):
            alike.setdefault(policy if policy.recompute == "full" else policy.recompute, []).append(policy)
        for policies in alike.values():
            ways = [w for w in space.pipelinings(pp, shape.microbatches) if space.go_together(policies[0].recompute, w)]
            for pipelining in ways:
                for cut in scorer.cuts(shape, policies, pipelining):
                    draft = scorer.draft(cut)
                    for timed in [] if draft is None else map(scorer.timed, scorer.by_policy(draft)):
                        scored = scorer.finished(timed)
                        own = simplicity(scored.decision)
                        bounds = (
                            least_simplicity(shape),
                            least_simplicity(shape, policies),
                            least_simplicity(shape, policies, ways),
                            least_simplicity(shape, cut.policies, (pipelining,)),
                        )
                        assert all(bound <= own for bound in bounds)
                        found.append(scored)
    return found


def check(graph: Graph, cluster: Cluster, request: Request, margins: list[float]) -> int:
    """Compare answers with the simplest of all that is within each margin; the number that are not the fastest."""
    choices, simpler = every_choice(graph, cluster, request), 0
    least_s = min(each.predicted.step_time_s for each in choices)
    for margin in margins:
        found = Search(tables_of(graph, cluster, request), cluster, request).run(margin=margin)
        assert found.best is not None
        assert found.fastest is not None
        assert found.fastest.predicted.step_time_s == pytest.approx(least_s, rel=2e-6)
        time_s, limit_s = found.best.predicted.step_time_s, least_s * (1 + margin)
        assert time_s <= limit_s * (1 + 2e-6)
        # Rounding decides what lies on the limit itself, so the simplest must be no simpler than the clear ones.
        inside = [c for c in choices if c.predicted.step_time_s <= limit_s * (1 - 2e-6)] or [found.best]
        outside = [c for c in choices if c.predicted.step_time_s <= limit_s * (1 + 2e-6)]
        if margin:
            own = simplicity(found.best.decision)
            assert min(simplicity(c.decision) for c in outside) <= own <= min(simplicity(c.decision) for c in inside)
            equals = [c.predicted.step_time_s for c in inside if simplicity(c.decision) == own]
            assert time_s <= min(equals, default=time_s) * (1 + 2e-6), "of equally simple ones, the fastest"
        simpler += simplicity(found.best.decision) < simplicity(found.fastest.decision)
    return simpler


def test_the_answer_is_the_simplest_of_all_within_the_margin() -> None:
    tight = replace(load_profile("t4").device, memory_bytes=34 * 2**20, reserved_memory_bytes=0)
    mixed = [NodeGroup(load_profile(name).device, 1, 1, load_profile(name).intra_node) for name in ("h100", "v100")]
    simpler = 0
    for cluster, batch in (
        (Cluster("a100-80gb", devices_per_node=2), 4),
        (Cluster(tight, devices_per_node=2), 4),
        (Cluster.of_groups(mixed, "ib-hdr200"), 2),
    ):
        simpler += check(SMALL, cluster, Request(batch=batch, precision="fp16"), [0.0, LEAD, 0.1, 0.5])
    assert simpler > 2, "the fastest is the simplest: the cases test nothing"


@pytest.mark.slow
def test_the_answer_is_the_simplest_of_all_on_two_nodes() -> None:
    cluster = Cluster("v100", nodes=2, devices_per_node=2, inter_node="ethernet-10g")
    check(SMALL, cluster, Request(batch=4), [0.0, LEAD, 0.1, 0.5])


@settings(max_examples=4)
@given(
    layers=st.integers(1, 3),
    hidden=st.sampled_from([64, 256, 1024]),
    device=st.sampled_from(["a100-80gb", "h100", "t4", "cpu"]),
    devices=st.sampled_from([2, 3]),
    samples=st.integers(1, 2),
    margin=st.floats(0.001, 0.4),
)
def test_the_answer_is_never_outside_the_margin(
    layers: int, hidden: int, device: str, devices: int, samples: int, margin: float
) -> None:
    graph = decoder(layers=layers, hidden=hidden, heads=4, vocabulary=512, sequence=32)
    check(graph, Cluster(device, devices_per_node=devices), Request(batch=devices * samples), [margin])


def test_a_limit_of_time_holds_for_the_answer_too() -> None:
    cluster, request = Cluster("a100-80gb", devices_per_node=2), Request(batch=4)

    def run(within_s: float = float("inf")) -> list[float] | None:
        found = Search(tables_of(SMALL, cluster, request), cluster, request).run(margin=0.5, within_s=within_s)
        both = found.fastest, found.best
        return None if None in both else [one.predicted.step_time_s for one in both if one is not None]

    free = run()
    assert free is not None
    least_s, simplest_s = free
    assert simplest_s > least_s
    for limit_s in (least_s * (1 + 1e-5), (least_s + simplest_s) / 2):
        held = run(limit_s)
        assert held is not None
        assert held[0] == pytest.approx(least_s)
        assert held[1] <= limit_s < simplest_s
    assert run(least_s * 0.999) is None


def test_the_fastest_stands_beside_a_simpler_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "lead", lambda _: 0.5)  # a simpler plan is within it, whatever is predicted
    cluster = Cluster("a100-80gb", devices_per_node=2)
    plan, fastest = (sw.plan(SMALL, cluster, batch=4, answer=answer) for answer in ("simplest", "fastest"))
    assert fastest.predicted.step_time_s < plan.predicted.step_time_s
    assert plan.predicted.step_time_s <= fastest.predicted.step_time_s * 1.5
    assert simplicity(plan.decision) < simplicity(fastest.decision)
    beside = plan.alternatives[0]
    assert beside.summary == fastest.summary()
    assert beside.step_time_s == pytest.approx(fastest.predicted.step_time_s, rel=1e-6)
    assert beside.reason.startswith("the fastest by prediction: ")
    assert why_less_simple(plan.decision, fastest.decision) in beside.reason
    assert not any("the fastest by prediction" in each.reason for each in fastest.alternatives)
    assert fastest.is_pinned("answer")
    assert not plan.is_pinned("answer")
    with pytest.raises(sw.core.errors.PlanError, match="did you mean 'simplest'"):
        sw.plan(SMALL, cluster, batch=4, answer="simple")


def test_the_order_names_every_schedule_that_is_searched() -> None:
    assert set(SCHEDULES) == {name for name in schedule_names() if FAMILIES[name].trains}


def test_one_mechanism_less_is_simpler() -> None:
    plan = sw.plan(SMALL, Cluster("a100-80gb", devices_per_node=4), batch=16, pp=2, tp=1, dp=2, schedule="1f1b",
                   virtual_stages=1, shard=0, recompute="none", microbatch=4)  # fmt: skip
    plain = plan.decision
    more = [
        replace(plain, schedule="gpipe"),
        replace(plain, schedule="zb-h1"),
        replace(plain, shard=1),
        replace(plain, shard=3),
        replace(plain, recompute="selective"),
        replace(plain, recompute="full"),
        replace(plain, placement_order="DPT"),
    ]
    places = [simplicity(each) for each in more]
    assert all(simplicity(plain) < place for place in places)
    assert places[0] < places[1]
    assert places[2] < places[3]
    assert places[4] < places[5]
    assert all(why_less_simple(plain, each) for each in more)
    assert why_less_simple(plain, replace(plain, microbatch=2)) == ""


@pytest.mark.parametrize(("devices", "batch"), [(2, 4), (8, 16)])
def test_small_layers_that_wait_for_their_host_get_no_pipeline(devices: int, batch: int) -> None:
    """A pipeline of one microbatch divides their launches among hosts, and is predicted faster; nobody would run it."""
    graph = decoder(layers=4, hidden=64, heads=4, vocabulary=256, sequence=32)
    plan = sw.plan(graph, Cluster("a100-80gb", devices_per_node=devices), batch=batch, like="torch")
    assert (plan.decision.pp, plan.decision.tp) == (1, 1)
    assert plan.predicted.error.step_time > 0.2
