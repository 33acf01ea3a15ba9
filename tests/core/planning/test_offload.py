"""Activations on the host: KARMA's blocks by brute force and by its formula, and what a search makes of them."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import shardwright as sw
from shardwright.core.cluster.hardware import load_profile
from shardwright.core.cost.unit_seconds import UnitCost
from shardwright.core.errors import MissingCapabilityError, PlanError, PlanWarning
from shardwright.core.plan.decision import Decision
from shardwright.core.plan.file import to_text
from shardwright.core.plan.plan import Plan
from shardwright.core.search.labelled_units import labelled
from shardwright.core.search.unit_labels import offloaded_units
from shardwright.core.tables.memory import MemoryUse
from shardwright.core.tables.rank_tables import RankTables
from shardwright.core.tables.stage_working import working_of
from shardwright.core.tables.unit_table import UnitTable
from tests.core.toy import decoder


def one_stage(forward_s: float, backward_s: float, swap_s: float, blocks: int) -> RankTables:
    """Blocks that are alike on one rank, whose activations take ``swap_s`` to the host."""
    block = UnitCost(
        forward_s, backward_s / 2, backward_s / 2, 0.0, 0.0, saved_bytes=1000, saved_selective_bytes=1000,
        entering_bytes=1, passing_bytes=0, parameter_elements=1,
    )  # fmt: skip
    table = UnitTable(
        (block,) * blocks, (0,) * blocks, (0.0,) * blocks, (), 1, "full", (True,) * blocks,
        host_bytes_per_s=1000 / swap_s,
    )  # fmt: skip
    return RankTables((table,), (1 << 40,))


def stage_s(tables: RankTables, offloaded: tuple[int, ...]) -> float:
    return tables.keeping((), offloaded).work((0,), (0,))[0].seconds


def test_many_equal_blocks_take_what_karmas_formula_says() -> None:
    """F, B, S = 1, 2, 4: recompute alone 4 for each block, swapping alone 8, a quarter swapped 3.75."""
    tables, blocks = one_stage(1.0, 2.0, 4.0, 64), 64
    assert stage_s(tables, ()) / blocks == pytest.approx(4.0)
    assert stage_s(tables, tuple(range(blocks))) / blocks == pytest.approx(8.0)
    chosen = offloaded_units(tables, (0,), (0,))
    assert chosen == tuple(range(16)), "1 - r = F / S of them, the first: the last are needed at once"
    assert stage_s(tables, chosen) / blocks == pytest.approx(3.75)


def test_as_many_are_offloaded_as_brute_force_says() -> None:
    offloaded = 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        forward_s, backward_s, swap_s = random.uniform(0.2, 4.0, 3)
        blocks = int(random.integers(1, 12))
        tables = one_stage(forward_s, backward_s, swap_s, blocks)
        chosen = offloaded_units(tables, (0,), (0,))
        best = min(stage_s(tables, tuple(range(count))) for count in range(blocks + 1))
        assert stage_s(tables, chosen) == pytest.approx(best), f"seed {seed}"
        offloaded += bool(chosen)
    assert 20 < offloaded < 200, "always or never offloaded: the instances test nothing"


GRAPH = decoder(layers=16, hidden=1024, heads=16, vocabulary=8192, sequence=512)
GRAPH = replace(GRAPH, capabilities=replace(GRAPH.capabilities, split_backward=False))
PINS = {"batch": 32, "pp": 2, "dp": 1, "tp": 1, "schedule": "1f1b", "shard": 0, "microbatch": 8}


def cluster(memory_bytes: int, host_bytes_per_s: float = 63e9) -> sw.Cluster:
    device = replace(
        load_profile("a100-80gb").device, memory_bytes=memory_bytes, reserved_memory_bytes=0,
        host_link_bandwidth_bytes_per_s=host_bytes_per_s,
    )  # fmt: skip
    return sw.Cluster(device, devices_per_node=2)


def test_what_memory_has_no_room_for_is_offloaded_where_that_is_faster() -> None:
    tight = cluster(3 * 2**30)
    again, plan = sw.plan(GRAPH, tight, **PINS), sw.plan(GRAPH, tight, offload=True, **PINS)
    assert again.decision.recompute == plan.decision.recompute == "full"
    assert again.decision.offloaded_units == ()
    away, kept = set(plan.decision.offloaded_units), set(plan.decision.kept_units)
    assert away
    assert not away & (kept | set(plan.recomputed_units))
    assert plan.predicted.step_time_s < again.predicted.step_time_s
    assert max(plan.predicted.peak_memory_bytes) <= 3 * 2**30
    assert max(use.host_bytes for use in plan.predicted.memory) > 0
    assert sw.simulate(plan).makespan_s == pytest.approx(plan.predicted.pipeline_s, rel=1e-9)
    assert Plan.from_text(to_text(plan)) == plan
    assert f"{len(away)} units offloaded" in plan.summary()
    slow = sw.plan(GRAPH, cluster(3 * 2**30, host_bytes_per_s=1e8), offload=True, **PINS)
    assert slow.decision.offloaded_units == (), "a link so slow that nothing is worth sending"
    assert slow.predicted.step_time_s == pytest.approx(again.predicted.step_time_s)


def labels_of(tables: RankTables, labels: tuple[str, ...]) -> RankTables:
    kept = [unit for unit, label in enumerate(labels) if label == "none"]
    return tables.keeping(kept, [unit for unit, label in enumerate(labels) if label == "offload"])


def test_labels_of_few_unlike_units_are_near_the_best_of_all() -> None:
    """Against all labellings, by the tables' own seconds and bytes, on a GPU and on a CPU."""
    behind, missed = [], 0
    for seed in range(30):
        random = np.random.default_rng(seed)
        count = int(random.integers(3, 7))
        units = tuple(
            UnitCost(
                *(float(s) for s in random.uniform(0.2, 2.0, 3)), 0.0, 0.0, saved_bytes=int(random.integers(500, 2000)),
                saved_selective_bytes=0, entering_bytes=int(random.integers(0, 200)), passing_bytes=0,
                fetched_bytes=300, parameter_elements=1,
            )
            for _ in range(count)
        )  # fmt: skip
        again = (*(bool(each) for each in random.integers(0, 2, count - 1)), False)
        table = UnitTable(
            units, (0,) * count, (0.0,) * count, (), 1, "full", again,
            host_bytes_per_s=float(random.uniform(300, 3000)), swaps_beside=bool(seed % 2),
        )  # fmt: skip
        whole = RankTables((table,), (1 << 40,))
        decision = Decision(
            pp=1, dp=1, tp=1, batch=1, microbatch=1, schedule="1f1b", stage_starts=(0,), recompute="full"
        )

        def memory_of(decision: Decision, tables: RankTables, live: object) -> tuple[MemoryUse, ...]:
            own = tables.tables[0]
            return (MemoryUse(0, 0, 0, int(own.range_kept[0, -1]), int(working_of(own).range_working[0, -1])),)

        free = memory_of(decision, whole.keeping(range(count)), (1,))[0].total_bytes
        limit = int(free * random.uniform(0.5, 0.95))
        tables = whole.with_limit(limit)
        best = float("inf")
        may = [("none", "offload", "full")[: 2 + own] for own in again[:-1]]
        for labels in product(*may, ("none",)):
            tried = labels_of(tables, labels)
            if not tried.over_bytes(memory_of(decision, tried, (1,))):
                best = min(best, tried.work((0,), (0,))[0].seconds)
        found = labelled(decision, tables, (1,), memory_of, None)
        if best == float("inf"):
            assert found is None
            continue
        if found is None:
            missed += 1
            continue
        assert not found[0].over_bytes(found[2])
        seconds = found[0].work((0,), (0,))[0].seconds
        behind.append(seconds / best)
    assert max(behind) < 1.2, behind
    assert sum(1 for one in behind if one > 1 + 1e-9) < 15, behind
    assert missed <= 2, missed


def test_a_longer_horizon_takes_memory_for_each_unit_on_its_way() -> None:
    pins = PINS | {"recompute": "full", "offloaded_units": range(1, 10)}
    one, three = (sw.plan(GRAPH, cluster(2**36), activation_loading_horizon=h, **pins) for h in (None, 3))
    assert (one.decision.activation_loading_horizon, three.decision.activation_loading_horizon) == (1, 3)
    more = three.predicted.memory[0].buffers_bytes - one.predicted.memory[0].buffers_bytes
    away = one.unit_modes[: one.decision.stage_starts[1]].count("offload")
    of_unit = one.predicted.memory[0].host_bytes // (2 * away)  # two microbatches
    assert one.unit_modes[one.decision.stage_starts[1] - 1] == "offload"  # a unit behind would wait for the last
    assert more == pytest.approx(2 * of_unit, rel=0.01)
    assert sw.rescore(one, activation_loading_horizon=3).predicted == three.predicted
    with pytest.raises(PlanError, match="activation_loading_horizon=2 and nothing is offloaded"):
        sw.plan(GRAPH, cluster(2**36), activation_loading_horizon=2, **PINS)


def test_units_without_others_like_them_are_offloaded_where_nothing_else_fits() -> None:
    graph = decoder(layers=24, hidden=256, heads=4, vocabulary=8192, sequence=256)
    pins = {"batch": 16, "pp": 1, "dp": 1, "tp": 1, "shard": 0, "microbatch": 16, "headroom": 0.0}
    again = sw.plan(graph, cluster(2**36), recompute="full", devices=1, **pins)
    away = sw.plan(graph, cluster(2**36), recompute="full", devices=1, offloaded_units=range(25), **pins)
    limit = (again.predicted.peak_memory_bytes[0] + away.predicted.peak_memory_bytes[0]) // 2
    assert limit < again.predicted.peak_memory_bytes[0]
    with pytest.raises(PlanError, match="does not fit"):
        sw.plan(graph, cluster(limit), devices=1, **pins)
    plan = sw.plan(graph, cluster(limit), offload=True, devices=1, **pins)
    assert plan.decision.offloaded_units
    assert plan.predicted.peak_memory_bytes[0] <= limit


def test_where_memory_has_room_nothing_is_offloaded() -> None:
    plan = sw.plan(GRAPH, cluster(2**36), offload=True, **PINS)
    assert plan.decision.recompute == "none"
    assert plan.decision.offloaded_units == ()


def test_runtimes_that_can_do_it_do_it_where_it_is_asked_for() -> None:
    able = replace(GRAPH, capabilities=replace(GRAPH.capabilities, offload=True))
    plan = sw.plan(able, cluster(3 * 2**30), offload=True, **PINS)
    assert plan.decision.offloaded_units
    able.capabilities.require_on_device(plan.decision.offloaded_units)
    with pytest.raises(MissingCapabilityError, match=r"offloads .* units to the host's memory.*without offload=True"):
        GRAPH.capabilities.require_on_device(plan.decision.offloaded_units)
    for asked in ({"offload": False}, {}):
        assert sw.plan(able, cluster(3 * 2**30), **asked, **PINS).decision.offloaded_units == ()


def test_offloading_that_means_nothing_is_refused() -> None:
    with pytest.raises(PlanError, match="offload=True and recompute='full'"):
        sw.plan(GRAPH, cluster(2**36), offload=True, recompute="full", **PINS)
    with pytest.raises(PlanError, match="offload='yes': expected True or False"):
        sw.plan(GRAPH, cluster(2**36), offload="yes", **PINS)
    plan = sw.plan(GRAPH, cluster(3 * 2**30), offload=True, **PINS)
    with pytest.raises(PlanError, match="neither kept nor recomputed"):
        replace(plan.decision, kept_units=plan.decision.offloaded_units)


ALONE = {"batch": 32, "pp": 1, "tp": 1, "precision": "fp32"}


def devices(count: int, memory_bytes: int) -> sw.Cluster:
    return sw.Cluster(cluster(memory_bytes).device(0), devices_per_node=count)


@pytest.mark.parametrize(("place", "level"), [("optimizer", 2), ("parameters", 3)])
@pytest.mark.parametrize("dp", [1, 4])
def test_states_on_the_host_take_no_memory_of_the_device(place: str, level: int, dp: int) -> None:
    pins = ALONE | {"dp": dp, "recompute": "none", "microbatch": 8}
    there = sw.plan(GRAPH, devices(dp, 2**36), **pins, offload_states=place)
    here = sw.plan(GRAPH, devices(dp, 2**36), **pins, shard=level if dp > 1 else 0)
    assert there.decision.shard == level
    (use, *_), (plain, *_) = there.predicted.memory, here.predicted.memory
    assert (use.gradients_bytes, use.optimizer_bytes) == (0, 0)
    assert use.parameters_bytes == (plain.parameters_bytes if place == "optimizer" else 0)
    state = plain.parameters_bytes * (dp if level == 3 and dp > 1 else 1)
    assert use.host_bytes == pytest.approx(4 * state / dp, rel=0.01), "parameters, gradients and two moments"
    assert there.predicted.step_time_s > here.predicted.step_time_s
    assert sw.simulate(there).makespan_s == pytest.approx(there.predicted.pipeline_s, rel=1e-9)


def test_a_search_takes_the_host_where_states_have_no_room() -> None:
    whole = sw.plan(GRAPH, devices(1, 2**36), **ALONE).predicted.memory[0]
    state = whole.parameters_bytes + whole.gradients_bytes + whole.optimizer_bytes
    with pytest.raises(PlanError, match=r"most of it, .* is optimizer states"):
        sw.plan(GRAPH, devices(1, state // 2), **ALONE)
    with pytest.warns(PlanWarning, match="toy.s runtime does not carry out offload"):
        found = sw.plan(GRAPH, devices(1, state // 2), **ALONE, offload=True)
    assert found.decision.offload_states != "none"
    assert max(found.predicted.peak_memory_bytes) <= state // 2
    with pytest.raises(PlanError, match="does not fit"):
        sw.plan(GRAPH, devices(1, state // 2), **ALONE, offload=True, offload_states="none")


def test_a_host_without_memory_is_named() -> None:
    device = replace(load_profile("a100-80gb").device, host_memory_bytes=2**20)
    with pytest.raises(PlanError, match=r"on the host, .* more than the 0\.00 GiB of its memory .*host_memory_bytes"):
        sw.plan(GRAPH, sw.Cluster(device), batch=8, offload_states="optimizer", precision="fp32")


def test_states_on_the_host_go_with_their_level() -> None:
    for place, wrong in (("optimizer", 3), ("parameters", 2), ("parameters", 0)):
        with pytest.raises(PlanError, match=f"offload_states='{place}' and shard={wrong}: .*take"):
            sw.plan(GRAPH, devices(1, 2**36), **ALONE, shard=wrong, offload_states=place)
    with pytest.raises(PlanError, match=r"'disk'.*parameters"):
        sw.plan(GRAPH, devices(1, 2**36), **ALONE, offload_states="disk")
