"""What surrounds a plan: what binds, changes, the front; and the table of partitioners."""

from dataclasses import replace

import pytest

import shardwright as sw
from shardwright import Cluster
from shardwright.core.cluster.cluster import NodeGroup
from shardwright.core.cluster.hardware import load_profile
from shardwright.core.errors import PlanError
from shardwright.core.model.graph import Graph
from shardwright.core.partition.partitioners import PARTITIONERS
from shardwright.core.search import make_plan
from shardwright.core.search.partitioner_comparison import contest
from shardwright.core.search.request import Request
from shardwright.core.search.study import Study, study, what_binds
from tests.core.toy import decoder

GRAPH = decoder(layers=4, hidden=512, heads=8, vocabulary=8192, sequence=128)
NODES = Cluster("v100", nodes=2, devices_per_node=2, inter_node="ib-hdr200")
"""A link at which both nodes together are faster than one."""
PINS = {"schedule": "1f1b", "virtual_stages": 1, "placement_order": "PDT"}


def studied(graph: Graph, cluster: Cluster, request: Request) -> Study:
    return study(make_plan(graph, cluster, request), graph, cluster, request)


@pytest.fixture(scope="module")
def found() -> Study:
    return studied(GRAPH, NODES, Request(batch=32, answer="fastest", **PINS))


def test_changes_bring_what_a_plan_of_the_changed_cluster_says(found: Study) -> None:
    by_name = {change.name: change for change in found.changes}
    device = load_profile("v100").device
    larger = Cluster(
        replace(device, memory_bytes=2 * device.memory_bytes), nodes=2, devices_per_node=2, intra_node="nvlink2",
        inter_node="ib-hdr200",
    )  # fmt: skip
    again = sw.plan(GRAPH, larger, batch=32, answer="fastest", **PINS)
    memory = by_name["2 times the memory"]
    assert memory.step_time_s == pytest.approx(again.predicted.step_time_s)
    assert memory.gain == pytest.approx(1 - again.predicted.step_time_s / found.plan.predicted.step_time_s)
    for name in ("2 times the bandwidth within nodes", "2 times the bandwidth between nodes"):
        assert by_name[name].gain >= -1e-9
    assert all(change.gain <= 1e-9 for change in found.changes if change.name.startswith("microbatch"))


def test_nothing_on_the_front_is_beaten(found: Study) -> None:
    of_all = [one.step_time_s for one in found.front if one.devices == 4]
    assert min(of_all) == pytest.approx(found.plan.predicted.step_time_s, rel=1e-6)
    for one in found.front:
        for other in found.front:
            worse = (
                one.step_time_s > other.step_time_s * (1 + 1e-9)
                and one.peak_memory_bytes > other.peak_memory_bytes
                and (one.usd_per_step or 0) > (other.usd_per_step or 0) * (1 + 1e-9)
            )
            assert not worse
    assert max(point.efficiency for point in found.front) == pytest.approx(1)


def test_what_binds_is_the_fullest_rank_and_the_largest_term(found: Study) -> None:
    uses = found.plan.predicted.memory_by_stage_rank
    assert found.binds.memory_rank == max(range(len(uses)), key=lambda pp: uses[pp].total_bytes)
    limit = Cluster("v100").memory_bytes(0)
    assert found.binds.memory_share == pytest.approx(max(use.total_bytes for use in uses) / limit)
    assert found.binds.term_s <= found.plan.predicted.step_time_s


def test_of_unlike_devices_the_rank_that_has_least_left_binds() -> None:
    """Not the one that holds most, nor the one with the largest device."""
    large, small = load_profile("a100-80gb"), load_profile("v100")
    for order, fullest in (((large, small), 1), ((small, large), 0)):
        groups = [NodeGroup(of.device, 1, 1, of.intra_node) for of in order]
        cluster = Cluster.of_groups(groups, "ib-hdr200")
        pins = {**PINS, "pp": 2, "dp": 1, "tp": 1, "microbatch": 1, "stage_starts": (0, 3), "precision": "fp32"}
        plan = sw.plan(GRAPH, cluster, batch=2, recompute="none", **pins)
        binds = what_binds(plan, cluster)
        use = plan.predicted.memory_by_stage_rank[fullest].total_bytes
        assert binds.memory_rank == fullest
        assert binds.memory_share == pytest.approx(use / cluster.memory_bytes(fullest))


def test_changes_of_a_simpler_plan_are_held_against_the_fastest() -> None:
    graph, request = decoder(layers=3, hidden=256, heads=8, vocabulary=1024, sequence=128), Request(batch=16)
    cluster = Cluster("a100-80gb", devices_per_node=4)
    found = studied(graph, cluster, request)
    fastest = sw.plan(graph, cluster, batch=16, answer="fastest").predicted.step_time_s
    assert found.plan.predicted.step_time_s > fastest
    memory = next(change for change in found.changes if change.name == "2 times the memory")
    assert memory.step_time_s == pytest.approx(fastest)
    assert memory.gain == pytest.approx(0)


def test_partitioners_side_by_side() -> None:
    table = contest(GRAPH, Cluster("a100-80gb", devices_per_node=4), 4)
    assert [name for name, _ in table.judged] == list(PARTITIONERS)
    best = dict(table.judged)["pareto"]
    assert best is not None
    for _, judged in table.judged:
        assert judged is not None
        assert judged.objective_s >= best.objective_s * (1 - 1e-9)
    with pytest.raises(PlanError, match="do not divide"):
        contest(GRAPH, Cluster("a100-80gb", devices_per_node=4), 3)


def test_what_contradicts_the_pins_is_said_beside_the_plan() -> None:
    """A schedule that admits the plan's microbatches, and neither half nor twice as many samples in each."""
    pins = {"pp": 2, "dp": 1, "tp": 1, "schedule": "dualpipev", "virtual_stages": None}
    answers = studied(GRAPH, Cluster("v100", devices_per_node=2), Request(batch=4, **pins))
    refused = [change for change in answers.changes if change.step_time_s is None]
    assert refused
    assert all("at least 2 * ranks = 4 would do" in change.note for change in refused)
