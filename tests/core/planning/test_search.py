"""The search against exhaustive enumeration and the defaults, on mixed clusters, and what it says to bad requests."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import shardwright as sw
from shardwright import Cluster
from shardwright.core.cluster.cluster import NodeGroup
from shardwright.core.cluster.hardware import load_link, load_profile
from shardwright.core.errors import ClusterError, PlanError
from shardwright.core.model.graph import Graph
from shardwright.core.plan.file import to_text
from shardwright.core.plan.plan import Plan
from shardwright.core.search import make_plan
from shardwright.core.search.devices_in_use import parts
from shardwright.core.search.kept_products import SEARCHED
from shardwright.core.search.request import Request
from shardwright.core.search.space import ORDERS
from shardwright.core.search.study import study
from tests.core.toy import decoder

WHOLE_BACKWARD = ("gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "looped-bfs", "simple", "interleaved")


def without_split_backward(graph: Graph) -> Graph:
    return replace(graph, capabilities=replace(graph.capabilities, split_backward=False))


SMALL = without_split_backward(decoder(layers=3, hidden=256, heads=8, vocabulary=1024, sequence=128))


def enumerated(graph: Graph, cluster: Cluster, batch: int, **pins: object) -> list[float]:
    """The step time of everything that may be chosen, each pinned and planned by itself."""
    world = cluster.world_size
    times = []
    for pp, tp in product(range(1, world + 1), repeat=2):
        if world % (pp * tp) or pp > 5:
            continue
        dp = world // (pp * tp)
        pipelines = [("1f1b", 1)] if pp == 1 else list(product(WHOLE_BACKWARD, (1, 2, 3, 4)))
        policies = [(shard, None) for shard in ((0, 1, 2, 3) if dp > 1 else (0,))]
        policies += [(shard, 2) for shard in (1, 2, 3) if dp == 4]
        orders = ORDERS if cluster.nodes > 1 else ("PDT",)
        for (schedule, virtual), (shard, group), recompute, order in product(pipelines, policies, SEARCHED, orders):
            for microbatch in range(1, batch // dp + 1):
                if batch % (dp * microbatch):
                    continue
                try:
                    plan = sw.plan(
                        graph, cluster, batch=batch, pp=pp, tp=tp, dp=dp, microbatch=microbatch, schedule=schedule,
                        virtual_stages=virtual, shard=shard, shard_group=group, recompute=recompute,
                        placement_order=order, **pins,
                    )  # fmt: skip
                except PlanError:
                    continue
                times.append(plan.predicted.step_time_s)
    return times


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster("a100-80gb", devices_per_node=2),
        Cluster("v100", nodes=2, devices_per_node=1, inter_node="ethernet-10g"),
    ],
    ids=str,
)
def test_equals_exhaustive_enumeration(cluster: Cluster) -> None:
    best = sw.plan(SMALL, cluster, batch=4, answer="fastest")
    assert best.predicted.step_time_s == pytest.approx(min(enumerated(SMALL, cluster, 4)), rel=1e-5)


@pytest.mark.slow
def test_equals_exhaustive_enumeration_on_two_nodes() -> None:
    cluster = Cluster("a100-80gb", nodes=2, devices_per_node=2, inter_node="ethernet-25g")
    best = sw.plan(SMALL, cluster, batch=4, answer="fastest")
    assert best.predicted.step_time_s == pytest.approx(min(enumerated(SMALL, cluster, 4)), rel=1e-5)


def test_equals_enumeration_where_memory_binds() -> None:
    """A device so small that most choices do not fit, and some only with another cut."""
    device = replace(load_profile("t4").device, memory_bytes=34 * 2**20, reserved_memory_bytes=0)
    cluster = Cluster(device, devices_per_node=2)
    best = sw.plan(SMALL, cluster, batch=8, answer="fastest", headroom=0.0)
    times = enumerated(SMALL, cluster, 8, headroom=0.0)
    roomy = sw.plan(SMALL, Cluster("t4", devices_per_node=2), batch=8, answer="fastest")
    # Pins recompute all blocks or none: some of them is what only the search can choose.
    assert best.predicted.step_time_s <= min(times) * (1 + 1e-5)
    assert best.predicted.step_time_s > roomy.predicted.step_time_s, "memory does not bind: the case tests nothing"


def test_as_few_blocks_are_recomputed_as_memory_asks_for() -> None:
    graph = without_split_backward(decoder(layers=16, hidden=1024, heads=16, vocabulary=8192, sequence=512))
    pins = {"pp": 4, "dp": 1, "tp": 1, "schedule": "1f1b", "shard": 0, "microbatch": 8}
    device = replace(load_profile("a100-80gb").device, reserved_memory_bytes=0)

    def planned(memory_bytes: int, **more: object) -> sw.Plan:
        cluster = Cluster(replace(device, memory_bytes=memory_bytes), devices_per_node=4)
        return sw.plan(graph, cluster, batch=32, **pins, **more)

    roomy, full = planned(8 * 2**30), planned(2**31, recompute="full")
    assert roomy.decision.recompute == "none"
    assert full.decision.kept_units == ()
    before = roomy.predicted.step_time_s
    for memory_bytes in (5 * 2**29, 2**31, 7 * 2**28, 3 * 2**29):
        plan = planned(memory_bytes)
        kept, again = set(plan.decision.kept_units), plan.recomputed_units
        assert plan.decision.recompute == "full"
        assert kept
        assert again
        assert max(plan.predicted.peak_memory_bytes) <= memory_bytes
        assert before <= plan.predicted.step_time_s < full.predicted.step_time_s
        assert sw.simulate(plan).makespan_s == pytest.approx(plan.predicted.pipeline_s, rel=1e-9)
        assert Plan.from_text(to_text(plan)) == plan
        for units in plan.stage_units:  # of a stage the last blocks are kept
            assert [unit in kept for unit in units if unit in kept | set(again)] == sorted(
                unit in kept for unit in units if unit in kept | set(again)
            )
        before = plan.predicted.step_time_s


def test_kept_units_that_mean_nothing_are_refused() -> None:
    plan = sw.plan(SMALL, Cluster("a100-80gb"), batch=4, recompute="none")
    with pytest.raises(PlanError, match=r"kept_units=\[1\] with recompute='none'"):
        replace(plan.decision, kept_units=(1,))
    decision = replace(plan.decision, recompute="full", kept_units=(99,))
    with pytest.raises(PlanError, match="name units that the model's 5 lack"):
        replace(plan, decision=decision)


def random_case(seed: int) -> tuple[Graph, Cluster, int]:
    random = np.random.default_rng(seed)
    layers, heads = int(random.choice([2, 4, 8])), int(random.choice([4, 8]))
    graph = decoder(
        layers=layers,
        hidden=heads * int(random.choice([32, 64, 128])),
        heads=heads,
        vocabulary=int(random.choice([512, 8192, 50304])),
        sequence=int(random.choice([64, 512])),
    )
    nodes, each = int(random.choice([1, 2, 4])), int(random.choice([1, 2, 4]))
    device = str(random.choice(["v100", "a100-80gb", "h100", "t4"]))
    between = str(random.choice(["ethernet-10g", "ib-hdr200"]))
    cluster = Cluster(device, nodes=nodes, devices_per_node=each, inter_node=between)
    batch = cluster.world_size * int(random.choice([1, 2, 3, 8]))
    return without_split_backward(graph), cluster, batch


def check_defaults(seeds: range) -> None:
    compared = 0
    for seed in seeds:
        graph, cluster, batch = random_case(seed)
        plan = sw.plan(graph, cluster, batch=batch, answer="fastest")
        world, node = cluster.world_size, cluster.groups[0].devices_per_node
        megatron = {"tp": node, "pp": 1, "dp": world // node, "schedule": "1f1b", "virtual_stages": 1}
        for pins in (
            {"dp": world, "pp": 1, "tp": 1, "shard": 0},
            {"dp": world, "pp": 1, "tp": 1, "shard": 3},
            megatron,
        ):
            default = sw.plan(graph, cluster, batch=batch, answer="fastest", **pins)
            compared += 1
            assert plan.predicted.step_time_s <= default.predicted.step_time_s * (1 + 1e-6), f"seed {seed}, {pins}"
        said = " ".join(a.reason for a in plan.alternatives)
        assert all(name in said for name in ("data parallel", "fully sharded", "Megatron-style"))
    assert compared == 3 * len(seeds)


def test_never_slower_than_the_defaults() -> None:
    check_defaults(range(6))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_never_slower_than_the_defaults_over_200_cases() -> None:
    check_defaults(range(200))


# Mixed clusters ---------------------------------------------------------------------------------------------------


def mixed(between: str = "ib-hdr200") -> Cluster:
    """A node of fast devices and a node of slow ones, each with its own link inside."""
    fast, slow = load_profile("h100"), load_profile("v100")
    groups = [NodeGroup(fast.device, 1, 4, fast.intra_node), NodeGroup(slow.device, 1, 4, load_link("ethernet-100g"))]
    return Cluster.of_groups(groups, between)


DEEP = without_split_backward(decoder(layers=16, hidden=1024, heads=16, vocabulary=8192, sequence=512))


def test_a_mixed_cluster_gives_the_faster_devices_more() -> None:
    pins = {"pp": 2, "tp": 1, "dp": 4, "microbatch": 8, "schedule": "1f1b", "shard": 0, "recompute": "none"}
    pins |= {"placement_order": "PDT", "precision": "fp16"}
    cluster = mixed()
    aware = sw.plan(DEEP, cluster, batch=512, **pins)
    first, second = (len(units) for units in aware.stage_units)
    assert first > second
    # What one gets who takes all devices to be alike: the cut of a uniform cluster, run on the mixed one.
    alike = sw.plan(DEEP, Cluster("h100", nodes=2, devices_per_node=4), batch=512, **pins)
    naive = sw.plan(DEEP, cluster, batch=512, **pins, stage_starts=alike.decision.stage_starts)
    assert aware.predicted.step_time_s < 0.8 * naive.predicted.step_time_s
    assert sw.simulate(aware).makespan_s == pytest.approx(aware.predicted.pipeline_s, rel=1e-6)
    assert Plan.from_text(to_text(aware)) == aware


def test_memory_is_that_of_each_devices_own() -> None:
    plan = sw.plan(DEEP, mixed(), batch=64, pp=2, tp=1, dp=4, placement_order="PDT", precision="fp16")
    assert plan.provenance.device_memory_bytes == (mixed().memory_bytes(0), mixed().memory_bytes(7))


@pytest.mark.parametrize("between", ["ib-hdr200", "ethernet-10g"])
def test_a_mixed_cluster_is_never_slower_than_its_fast_nodes_alone(between: str) -> None:
    graph = without_split_backward(decoder(layers=4, hidden=512, heads=8, vocabulary=8192, sequence=128))
    wanted = {"batch": 64, "precision": "fp16", "virtual_stages": 1, "schedule": "1f1b", "answer": "fastest"}
    cluster = mixed(between)
    free, whole = sw.plan(graph, cluster, **wanted), sw.plan(graph, cluster, devices="all", **wanted)
    alone = [sw.plan(graph, Cluster.of_groups([group]), **wanted) for group in cluster.groups]
    fastest = min(plan.predicted.step_time_s for plan in (whole, *alone))
    assert free.predicted.step_time_s <= fastest * (1 + 1e-6)
    assert whole.mesh.size == 8
    assert whole.provenance.left_out == ""
    assert free.predicted.step_time_s < whole.predicted.step_time_s, "all are worth using: the case tests nothing"
    assert "v100" in free.provenance.left_out
    assert free.mesh.size == free.provenance.world_size
    said = next(a for a in free.alternatives if a.reason.startswith(f"on {cluster}: "))
    assert said.step_time_s == pytest.approx(whole.predicted.step_time_s)
    assert Plan.from_text(to_text(free)) == free


def test_a_precision_that_nobody_pins_is_one_that_all_devices_have() -> None:
    wanted = {"batch": 64, "virtual_stages": 1, "schedule": "1f1b"}
    assert sw.plan(SMALL, mixed(), devices="all", **wanted).decision.precision == "fp16", "a V100 has no bf16"
    assert sw.plan(SMALL, Cluster("h100", devices_per_node=4), **wanted).decision.precision == "bf16"
    assert sw.plan(SMALL, Cluster("v100", devices_per_node=4), **wanted).decision.precision == "fp16"


def test_as_many_devices_as_make_the_fastest_plan() -> None:
    """A tiny model over a slow link: one node of two is faster than both, and the user may ask for any number."""
    cluster = Cluster("v100", nodes=2, devices_per_node=4, inter_node="ethernet-10g")
    wanted = {"batch": 8, "virtual_stages": 1, "schedule": "1f1b", "answer": "fastest"}
    auto = sw.plan(SMALL, cluster, devices="auto", **wanted)
    times = {n: sw.plan(SMALL, cluster, devices=n, **wanted).predicted.step_time_s for n in (1, 2, 3, 4, 8)}
    assert auto.predicted.step_time_s == pytest.approx(min(times.values()), rel=1e-6)
    assert auto.mesh.size < 8
    assert auto.provenance.left_out.startswith("1 × 4 v100")
    every = sw.plan(SMALL, cluster, **wanted)
    assert every.mesh.size == 8
    assert every.predicted.step_time_s == times[8]
    pinned = sw.plan(SMALL, cluster, devices=3, **wanted)
    assert pinned.mesh.size == 3
    assert "devices=3" in pinned.provenance.pinned


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ({"devices": 7}, "devices=7: no nodes of 2 × 4 v100 have so many together; the nearest is 8"),
        ({"devices": "any"}, "devices='any': .*known: all, auto"),
        ({"devices": 0}, "devices=0: expected a whole number of at least 1"),
        ({"devices": 4, "tp": 3}, "devices=4 and tp 3: the degrees must divide the devices"),
        ({"devices": 8, "pp": 2, "tp": 2, "dp": 1}, "devices=8 and pp 2 · tp 2 · dp 1: .* all three make 4"),
        ({"devices": 32, "tp": 16}, "devices=32: no nodes of 2 × 4 v100 have so many together; the nearest is 8"),
    ],
)
def test_numbers_of_devices_that_cannot_be_used(pins: dict, said: str) -> None:
    cluster = Cluster("v100", nodes=2, devices_per_node=4)
    with pytest.raises(PlanError, match=said):
        sw.plan(SMALL, cluster, batch=8, **pins)


def test_any_number_of_devices_of_many_unlike_nodes_can_be_asked_for() -> None:
    """More combinations of nodes than are looked through where nobody asks for a number."""
    fast, slow = (replace(group, nodes=12) for group in mixed().groups)
    cluster = Cluster.of_groups([fast, slow], "ib-hdr200")
    assert {part.cluster.world_size for part in parts(cluster, Request(batch=8, devices=52))} == {52}
    assert {part.cluster.world_size for part in parts(cluster, Request(batch=8, devices=3))} == {3}
    assert len(parts(cluster, Request(batch=8, devices=8))) == 3  # two fast nodes, two slow ones, or one of each


def test_nodes_that_differ_in_their_region_alone_are_all_used() -> None:
    here, there = (replace(mixed().groups[0], region=name) for name in ("east", "west"))
    cluster = Cluster.of_groups([here, there], "ib-hdr200", "ethernet-10g")
    assert [part.left_out for part in parts(cluster, Request(batch=8))] == [""]
    request = Request(batch=8, schedule="1f1b", virtual_stages=1)
    answers = study(make_plan(SMALL, cluster, request), SMALL, cluster, request)
    assert any("memory" in change.name for change in answers.changes)


def test_a_mixed_cluster_without_a_link_is_refused() -> None:
    groups = mixed().groups
    with pytest.raises(ClusterError, match="needs inter_node"):
        Cluster.of_groups(groups)


# Schedules and orders ---------------------------------------------------------------------------------------------


def test_a_generated_schedule_is_in_the_plan_and_no_longer_than_a_named_one() -> None:
    cluster = Cluster("a100-80gb", devices_per_node=4)
    pins = {"pp": 4, "tp": 1, "dp": 1, "microbatch": 1, "virtual_stages": 1, "shard": 0, "recompute": "none"}
    auto = sw.plan(DEEP, cluster, batch=6, schedule="auto", **pins)
    assert auto.decision.schedule == "auto"
    assert sw.simulate(auto).makespan_s == pytest.approx(auto.predicted.pipeline_s, rel=1e-9)
    again = Plan.from_text(to_text(auto))
    assert again == auto
    assert again.build_schedule().digest == auto.build_schedule().digest
    for name in ("1f1b", "gpipe", "zb-h1"):
        named = sw.plan(DEEP, cluster, batch=6, schedule=name, **pins)
        assert auto.predicted.pipeline_s <= named.predicted.pipeline_s * (1 + 1e-9)


def test_a_framework_that_splits_no_backward_gets_no_such_schedule() -> None:
    cluster = Cluster("a100-80gb", devices_per_node=4)
    able = replace(DEEP, capabilities=replace(DEEP.capabilities, split_backward=True))
    pins = {"pp": 4, "tp": 1, "dp": 1, "microbatch": 1}
    unable, split = (sw.plan(graph, cluster, batch=4, **pins) for graph in (DEEP, able))
    assert not unable.build_schedule().splits_backward
    assert split.predicted.step_time_s <= unable.predicted.step_time_s


def test_a_placement_order_decides_which_ranks_are_neighbours() -> None:
    cluster = Cluster("a100-80gb", nodes=2, devices_per_node=4)
    pins = {"pp": 2, "tp": 2, "dp": 2, "microbatch": 1, "shard": 0}
    times = {}
    for order in ORDERS:
        plan = sw.plan(DEEP, cluster, batch=16, placement_order=order, **pins)
        assert plan.mesh.names == tuple({"P": "pp", "D": "dp", "T": "tp"}[letter] for letter in order)
        times[order] = plan.predicted.step_time_s
    assert times["TPD"] > times["PDT"], "tensor groups over two nodes"
    free = sw.plan(DEEP, cluster, batch=16, **pins)
    assert free.predicted.step_time_s == pytest.approx(min(times.values()), rel=1e-6)


@pytest.mark.parametrize("partitioner", ["tree", "blocks", "pareto", "exact"])
def test_a_pinned_partitioner_cuts_the_plan(partitioner: str) -> None:
    cluster = Cluster("a100-80gb", devices_per_node=4)
    pins = {"pp": 4, "tp": 1, "dp": 1, "schedule": "1f1b", "shard": 0}
    plan = sw.plan(DEEP, cluster, batch=16, partitioner=partitioner, **pins)
    best = sw.plan(DEEP, cluster, batch=16, **pins)
    assert len(plan.decision.stage_starts) == 4
    assert best.predicted.step_time_s <= plan.predicted.step_time_s * 1.02


# Requests that cannot be met --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ({"shard": 0, "shard_group": 2}, "shard=0 and shard_group=2"),
        ({"sequence_parallel": True, "tp": 1}, "sequence_parallel=True and tp=1"),
        ({"pp": 2, "stage_starts": [0, 3, 4]}, r"stage_starts=\[0, 3, 4\].*expected 2 \(pp · virtual_stages = 2 · 1"),
        ({"schedule": "1f1b", "pp": 2, "dp": 2, "microbatch": 1, "virtual_stages": 2}, "'1f1b' at pp=2: .*must be 1"),
        ({"schedule": "forward-only"}, "no backward passes"),
        ({"placement_order": "PDX"}, "an order of the letters D, P and T"),
        ({"partitioner": "trees"}, "did you mean 'tree'"),
        ({"memory_weight": 0.2}, "memory_weight=0.2 and partitioner='exact': only the module tree weighs"),
        ({"partitioner": "tree", "memory_weight": 2}, "memory_weight=2"),
        ({"dp": 4, "batch": 6}, r"batch=6 is not a multiple of dp = 4: use batch=8"),
        ({"batch": 1, "tp": 1, "pp": 1}, r"batch=1 is not a multiple of dp = 4: use batch=4"),
        ({"pp": 1, "virtual_stages": 2}, "pp=1 and virtual_stages=2: "),
        ({"pp": 1, "tp": 4, "virtual_stages": 2, "schedule": "auto"}, "pp=1 and virtual_stages=2: "),
        ({"schedule": "1f1b", "virtual_stages": 2}, "schedule='1f1b' and virtual_stages=2: .*must be 1"),
        ({"schedule": "zbv", "virtual_stages": 3}, "schedule='zbv' and virtual_stages=3: .*must be 2"),
        ({"microbatch": 32}, "microbatch=32 is more than batch=16"),
        ({"shard_group": 3}, "shard_group=3 does not divide dp at pp=1, dp=4 and tp=1 on 4 devices"),
        ({"sequence_parallel": True, "pp": 2, "dp": 2}, "sequence_parallel=True .* at pp=2, dp=2 and tp=1"),
        ({"sequence_parallel": True, "pp": 4}, "sequence_parallel=True .* at pp=4, dp=1 and tp=1"),
        ({"pp": 2, "stage_starts": [0, 9], "partitioner": "tree"}, r"stage_starts=\[0, 9\] and partitioner='tree'"),
    ],
)
def test_pins_that_contradict_each_other_are_both_named(pins: dict, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        sw.plan(DEEP, Cluster("a100-80gb", devices_per_node=4), **{"batch": 16, **pins})


def test_one_device_is_planned_and_none_is_refused() -> None:
    plan = sw.plan(SMALL, Cluster("a100-80gb"), batch=4)
    assert (plan.decision.pp, plan.decision.dp, plan.decision.tp) == (1, 1, 1)
    with pytest.raises(ClusterError, match="at least 1"):
        Cluster("a100-80gb", nodes=0)


def test_pins_that_ask_for_an_axis_get_it() -> None:
    cluster = Cluster("a100-80gb", devices_per_node=4)
    assert sw.plan(DEEP, cluster, batch=16).decision.tp == 1, "nothing is free to go wrong: the case tests nothing"
    divided = sw.plan(DEEP, cluster, batch=16, sequence_parallel=True).decision
    assert divided.tp > 1
    assert divided.sequence_parallel
    shared = sw.plan(DEEP, cluster, batch=16, shard_group=2).decision
    assert shared.shard > 0
    assert (shared.shard_group, shared.dp % 2) == (2, 0)
    assert sw.plan(DEEP, cluster, batch=16, virtual_stages=2).decision.pp > 1


def test_the_smallest_cluster_is_no_larger_than_it_must_be() -> None:
    """One node less than what the message names does not do, and what it names does."""
    graph = without_split_backward(decoder(layers=24, hidden=4096, heads=32, vocabulary=32000, sequence=512))
    with pytest.raises(PlanError, match="the smallest of this kind that could: ") as caught:
        sw.plan(graph, Cluster("t4", devices_per_node=2), batch=24)
    nodes = int(str(caught.value).split("could: ")[1].split(" × ")[0])
    assert nodes & (nodes - 1), "a power of two: doubling alone would have found it"
    free = {"schedule": "1f1b", "virtual_stages": 1}
    assert sw.plan(graph, Cluster("t4", nodes=nodes, devices_per_node=2), batch=24, **free).mesh.size == 2 * nodes
    with pytest.raises(PlanError, match="does not fit"):
        sw.plan(graph, Cluster("t4", nodes=nodes - 1, devices_per_node=2), batch=24, **free)


def test_a_model_that_fits_nowhere_names_what_binds_and_what_would_do() -> None:
    graph = without_split_backward(decoder(layers=24, hidden=4096, heads=32, vocabulary=32000, sequence=512))
    with pytest.raises(PlanError, match=r"most of it, .*, is optimizer states.*the smallest of this kind that could: "):
        sw.plan(graph, Cluster("t4", nodes=1, devices_per_node=2), batch=64)


def test_progress_is_told_how_many_of_the_candidates_are_scored() -> None:
    seen: list[tuple[int, int]] = []
    sw.plan(SMALL, Cluster("cpu", devices_per_node=2), batch=4, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] > 0
