"""Measured units stand in for the sum of their ops."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import shardwright as sw
from shardwright.core.cluster.hardware import load_device
from shardwright.core.cluster.hardware.device import MeasuredUnit
from shardwright.core.cost.unit_seconds import UnitCost
from shardwright.core.errors import ClusterError
from shardwright.core.model.fold import fold
from shardwright.core.model.structure import measured_name, unit_form
from shardwright.core.plan.breakdown import break_down
from shardwright.core.solver.op_layouts import digest
from shardwright.core.tables.measured_units import calibrated
from tests.core.toy import decoder


def cost(size: int, collective_s: float = 0.0) -> UnitCost:
    return UnitCost(
        2.0 * size + collective_s / 2, 3.0 * size + collective_s / 2, 1.0 * size, 0.5, collective_s, 1, 1, 1, 1, 1
    )


def run(microbatch: int, forward_s: float, backward_s: float) -> MeasuredUnit:
    return MeasuredUnit("digest", 0, "fp32", microbatch, forward_s, backward_s)


def test_at_a_measured_size_the_time_is_the_measured_one() -> None:
    found = calibrated(cost(4), [run(1, 4.0, 4.0), run(4, 12.0, 20.0)], 4, cost)
    assert found.forward_s == pytest.approx(12.0)
    assert found.input_grad_s + found.weight_grad_s == pytest.approx(20.0)
    assert found.input_grad_s / found.weight_grad_s == pytest.approx(3.0)


def test_between_sizes_seconds_lie_on_a_line_that_goes_on_unless_it_ends_below_nothing() -> None:
    runs = [run(1, 2.0, 4.0), run(4, 16.0, 16.0)]
    assert calibrated(cost(2), runs, 2, cost).forward_s == pytest.approx(2.0 + 14 / 3)
    assert calibrated(cost(8), runs, 8, cost).forward_s == pytest.approx(2.0 * 16.0)


def test_a_loop_over_time_takes_hardly_less_for_fewer_samples() -> None:
    """Measured with 8 and with 16 samples: 10 seconds and a quarter of one for each sample; 2 for each are counted."""
    runs = [run(8, 12.0, 24.0), run(16, 14.0, 28.0)]
    for size in (4, 8, 12, 16, 32):
        found = calibrated(cost(size), runs, size, cost)
        assert found.forward_s == pytest.approx(10.0 + size / 4)
        assert found.input_grad_s + found.weight_grad_s == pytest.approx(2 * (10.0 + size / 4))
    falling = [run(8, 14.0, 28.0), run(16, 12.0, 24.0)]  # more samples took less: no line goes on from there
    assert calibrated(cost(32), falling, 32, cost).forward_s == pytest.approx(12.0 / 32 * 64)
    assert calibrated(cost(4), falling, 4, cost).forward_s == pytest.approx(14.0 / 16 * 8)


def test_collectives_keep_their_time() -> None:
    found = calibrated(cost(4, collective_s=1.0), [run(4, 16.0, 16.0)], 4, cost)
    assert found.forward_s == pytest.approx(0.5 + 16.0)
    assert found.collective_s == 1.0


def test_plans_take_measured_units() -> None:
    graph = decoder(2, 32, 4, 64, 16)
    pins = {"batch": 4, "microbatch": 1, "precision": "fp32", "recompute": "none", "shard": 0}
    device = load_device("cpu")
    plain = sw.plan(graph, sw.Cluster(device), **pins)
    units = tuple(
        MeasuredUnit(measured_name(graph.framework, plain.model.digest), unit_class, "fp32", 1, 0.5, 1.0)
        for unit_class in set(plain.costs.unit_classes)
    )
    plan = sw.plan(graph, sw.Cluster(replace(device, measured_units=units)), **pins)
    assert plan.predicted.pipeline_s == pytest.approx(4 * 1.5 * len(plain.model.unit_classes))


def test_units_of_the_same_form_take_the_same_multiple_of_what_is_counted() -> None:
    """Those of the nearest size, of the same framework; the products of another form do not."""
    device, pins = (
        load_device("cpu"),
        {"batch": 4, "microbatch": 1, "precision": "fp32", "recompute": "none", "shard": 0},
    )

    def measured(width: int, multiple: float, framework: str = "toy") -> tuple[MeasuredUnit, ...]:
        graph = decoder(2, width, 4, 64, 16)
        plan = sw.plan(graph, sw.Cluster(device), **pins)
        units = fold(graph).units
        return tuple(
            MeasuredUnit(
                measured_name(framework, plan.model.digest), number, "fp32", 1,
                multiple * each.forward_s, multiple * (each.input_grad_s + each.weight_grad_s),
                form=unit_form(graph, units[plan.costs.unit_classes.index(number)]),
                counted_forward_s=each.forward_s, counted_backward_s=each.input_grad_s + each.weight_grad_s,
                parameter_elements=each.parameter_elements,
            )
            for number, each in enumerate(plan.costs.classes)
        )  # fmt: skip

    wide = decoder(2, 96, 4, 64, 16)
    framework = wide.framework
    plain = sw.plan(wide, sw.Cluster(device), **pins).predicted.pipeline_s

    def predicted(units: tuple[MeasuredUnit, ...]) -> float:
        return sw.plan(wide, sw.Cluster(replace(device, measured_units=units)), **pins).predicted.pipeline_s

    assert predicted(measured(64, 3.0, framework)) == pytest.approx(3 * plain)
    assert predicted(measured(16, 5.0, framework) + measured(64, 3.0, framework)) == pytest.approx(3 * plain)
    assert predicted(measured(64, 3.0, "another")) == pytest.approx(plain)
    others = tuple(replace(unit, form="other") for unit in measured(64, 3.0, framework))
    assert predicted(others) == pytest.approx(plain)
    beside = tuple(replace(unit, step_s=9.0, update_share=0.1) for unit in measured(64, 3.0, framework))
    cluster = sw.Cluster(replace(device, measured_units=beside))
    assert sw.plan(wide, cluster, **pins).predicted.step_time_s == pytest.approx(
        sw.plan(wide, sw.Cluster(device), **pins).predicted.step_time_s + 2 * plain
    ), "what a step takes beside its passes is of the other model alone"
    far = decoder(2, 512, 4, 64, 16)
    counted = sw.plan(far, sw.Cluster(device), **pins).predicted.pipeline_s
    cluster = sw.Cluster(replace(device, measured_units=measured(16, 5.0, framework)))
    assert sw.plan(far, cluster, **pins).predicted.pipeline_s < 1.01 * counted, "too far away to say anything"
    own = measured(96, 2.0, framework)  # of the model itself: what was measured
    assert predicted(measured(64, 3.0, framework) + own) == pytest.approx(2 * plain)


def test_what_a_step_takes_once_goes_by_the_entries_that_a_rank_holds() -> None:
    runs = [replace(run(4, 12.0, 20.0), step_s=6.0)]
    third = calibrated(
        replace(cost(4), parameter_elements=1, step_s=0.5), runs, 4, lambda _: replace(cost(4), parameter_elements=3)
    )
    assert third.step_s == pytest.approx(0.5 + 2.0)


def test_pipelines_take_what_ran_in_stages_and_other_plans_what_ran_whole() -> None:
    graph = decoder(2, 32, 4, 64, 16)
    pins = {"batch": 8, "microbatch": 1, "precision": "fp32", "recompute": "none", "shard": 0, "tp": 1}
    device = load_device("cpu")
    plain = sw.plan(graph, sw.Cluster(device), **pins)
    name, classes = measured_name(graph.framework, plain.model.digest), sorted(set(plain.costs.unit_classes))
    whole = tuple(MeasuredUnit(name, c, "fp32", 1, 0.5, 1.0) for c in classes)
    in_stages = tuple(replace(unit, forward_s=0.25, step_s=2.0, in_stages=True) for unit in whole)

    def planned(units: tuple[MeasuredUnit, ...], **degrees: int) -> sw.Plan:
        cluster = sw.Cluster(replace(device, measured_units=units), devices_per_node=2)
        return sw.plan(graph, cluster, **pins, **degrees)

    units = len(plain.costs.unit_classes)
    for given, forward_s in ((whole, 0.5), (whole + in_stages, 0.25), (in_stages, 0.25)):
        plan = planned(given, pp=2, dp=1)
        assert sum(plan.stage_costs().forward_s) == pytest.approx(units * forward_s)
    at_once = planned(tuple(replace(unit, step_s=0.0) for unit in in_stages), pp=2, dp=1)
    once_s = plan.predicted.step_time_s - at_once.predicted.step_time_s
    held = Counter(rank for rank, own in zip(plan.decision.stage_ranks, plan.stage_units, strict=True) for _ in own)
    assert once_s == pytest.approx(2.0 * max(held.values())), "that of the fullest rank"
    assert planned(whole + in_stages, pp=1, dp=2).predicted.pipeline_s == pytest.approx(4 * 1.5 * units)


def test_idle_time_is_lent_among_ranks_of_one_node(tmp_path: Path) -> None:
    graph = decoder(2, 32, 4, 64, 16)
    pins = {"microbatch": 1, "precision": "fp32", "recompute": "none", "shard": 0, "tp": 1, "schedule": "1f1b"}
    device = load_device("cpu")
    plain = sw.plan(graph, sw.Cluster(device), batch=8, **pins)
    name, classes = measured_name(graph.framework, plain.model.digest), sorted(set(plain.costs.unit_classes))
    units = tuple(MeasuredUnit(name, c, "fp32", 1, 0.5 + c, 1.0, in_stages=True, idle_lent=0.6) for c in classes)
    kinds = replace(device, measured_units=units), replace(device, measured_units=units, name="another")

    def planned(cluster: sw.Cluster, pp: int, batch: int = 6) -> sw.Plan:
        return sw.plan(graph, cluster, batch=batch * (cluster.world_size // pp), pp=pp, **pins)

    one_node, two_nodes = sw.Cluster(kinds[0], devices_per_node=2), sw.Cluster(kinds[0], nodes=2)
    groups = [replace(one_node.groups[0], device=kind, devices_per_node=1) for kind in kinds]
    unlike = sw.Cluster.of_groups(groups, "shared-memory")
    both = sw.Cluster(kinds[0], nodes=2, devices_per_node=2)
    for cluster, pp in ((two_nodes, 2), (unlike, 2), (one_node, 1), (both, 4)):
        assert planned(cluster, pp).costs.idle_lent == 0.0
    assert planned(both, 2).costs.idle_lent == 0.6, "each pipeline is on a node of its own"
    for batch in (1, 6, 40):
        plan = planned(one_node, 2, batch)
        costs = plan.stage_costs()
        assert costs.idle_lent == plan.costs.idle_lent == 0.6
        alone_s = sw.simulate(plan, replace(costs, idle_lent=0.0)).makespan_s
        work_s = batch * sum(costs.forward_s + costs.backward_s) / 2
        lent_s = sw.simulate(plan).makespan_s
        assert work_s < lent_s < alone_s
        assert lent_s == pytest.approx(0.4 * alone_s + 0.6 * work_s, rel=1e-4), "but for messages"
        assert plan.predicted.pipeline_s == pytest.approx(lent_s, rel=1e-6)
        assert plan.predicted.bubble_fraction == pytest.approx(1 - work_s / lent_s, rel=1e-6)
        for part in break_down(plan):
            assert part.total_s == pytest.approx(plan.predicted.step_time_s, rel=1e-6)
        plan.save(tmp_path / "plan.json")
        assert sw.Plan.load(tmp_path / "plan.json").stage_costs() == costs


def test_the_search_finds_the_pipeline_that_ran_faster_in_stages() -> None:
    graph = decoder(2, 32, 4, 64, 16)
    pins = {"batch": 16, "microbatch": 1, "precision": "fp32", "recompute": "none", "shard": 0, "tp": 1}
    pins |= {"virtual_stages": 1}
    device = load_device("cpu")
    plain = sw.plan(graph, sw.Cluster(device), **pins)
    name, classes = measured_name(graph.framework, plain.model.digest), sorted(set(plain.costs.unit_classes))
    whole = tuple(MeasuredUnit(name, c, "fp32", 1, 0.5, 1.0) for c in classes)
    in_stages = tuple(replace(unit, forward_s=0.2, backward_s=0.4, in_stages=True) for unit in whole)
    cluster = sw.Cluster(replace(device, measured_units=whole + in_stages), devices_per_node=2)
    each = [sw.plan(graph, cluster, pp=pp, **pins).predicted.step_time_s for pp in (1, 2)]
    assert each[1] < each[0]
    assert sw.plan(graph, cluster, **pins).predicted.step_time_s == pytest.approx(min(each))


def test_a_run_that_cannot_be_is_refused() -> None:
    with pytest.raises(ClusterError, match="microbatch"):
        run(0, 1.0, 1.0)
    with pytest.raises(ClusterError, match="forward_s"):
        run(1, -1.0, 1.0)
    with pytest.raises(ClusterError, match="idle_lent must be a finite number at least 0 and at most 1"):
        MeasuredUnit("digest", 0, "fp32", 1, 1.0, 1.0, in_stages=True, idle_lent=1.5)
    with pytest.raises(ClusterError, match="one stage, which has no idle time"):
        MeasuredUnit("digest", 0, "fp32", 1, 1.0, 1.0, idle_lent=0.5)


def test_runs_that_shared_a_unit_stand_for_it_where_it_is_shared_alike_and_nowhere_else() -> None:
    graph = decoder(2, 32, 4, 64, 16)
    pins = {"batch": 4, "microbatch": 1, "precision": "fp32", "recompute": "none", "shard": 0, "pp": 1, "dp": 1}
    device = load_device("cpu")

    def planned(degree: int, units: tuple[MeasuredUnit, ...] = ()) -> sw.Plan:
        cluster = sw.Cluster(replace(device, measured_units=units), devices_per_node=degree)
        return sw.plan(graph, cluster, tp=degree, **pins)

    plain = planned(2)
    name = measured_name(graph.framework, plain.model.digest)
    layouts = digest(plain.decision.layouts, plain.decision.sequence_parallel)

    def runs(layouts: str) -> tuple[MeasuredUnit, ...]:
        classes = sorted(set(plain.costs.unit_classes))
        return tuple(MeasuredUnit(name, c, "fp32", 1, 0.5, 1.0, 2, layouts) for c in classes)

    assert planned(2, runs(layouts)).predicted.pipeline_s == pytest.approx(4 * 1.5 * len(plain.costs.unit_classes))
    assert planned(2, runs("others")).predicted.pipeline_s == pytest.approx(plain.predicted.pipeline_s)
    assert planned(1, runs(layouts)).predicted.pipeline_s == pytest.approx(planned(1).predicted.pipeline_s)
