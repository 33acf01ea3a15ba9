"""Units measured on a machine whose times are known."""

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

import shardwright as sw
from shardwright import measure
from shardwright.core.cluster.hardware import Device, load_device
from shardwright.core.plan import step_fit
from shardwright.core.plan.record import Predicted
from shardwright.core.schedule.simulate import simulate_schedule
from shardwright.core.schedule.timeline import Timeline
from tests.core.toy import decoder

IN_STAGES, IN_STEPS = 0.6, 1.3
"""What units take in a pipeline of what they take in one stage; in a step of what their timed actions say."""


@dataclass
class Machine:
    """Runs plans in simulated time. A unit of the first class takes ``unit_s`` forward, a few messages long; a step
    ``beside_s`` more than its pipeline and what is counted."""

    unit_s: float = 2e-4
    beside_s: float = 0.01
    updated: float = 1.0
    """What the optimizer's step takes of what is counted for it."""
    lent: float = 0.0
    """Of idle time, what ranks at work get."""
    ran: list[sw.Plan] = field(default_factory=list)
    devices: set[int] = field(default_factory=set)
    clock: threading.local = field(default_factory=threading.local)

    def compile(
        self, plan: sw.Plan, model: object, *, loss: object, reduction: str, devices: Sequence[int] = ()
    ) -> "Running":
        self.ran.append(plan)
        self.devices |= set(devices)
        return Running(self, plan)

    def longest_s(self, seconds: float) -> float:
        return seconds

    def perf_counter(self) -> float:
        return getattr(self.clock, "now_s", 0.0)

    def pipeline(self, plan: sw.Plan, longer: float) -> Timeline:
        whole_s = self.unit_s * longer * (IN_STAGES if plan.decision.pp > 1 else 1.0)
        # Units of one class alike, the others not; of several ranks each does its part.
        each = [whole_s * (1 + own) / plan.decision.tp for own in plan.costs.unit_classes]
        forward = tuple(sum(each[unit] for unit in units) for units in plan.stage_units)
        costs = replace(
            plan.stage_costs(), forward_s=forward, input_grad_s=forward, weight_grad_s=forward, idle_lent=self.lent
        )
        return simulate_schedule(plan.build_schedule(), costs)

    def step_s(self, plan: sw.Plan) -> float:
        counted_s = plan.predicted.data_parallel_s + self.updated * plan.predicted.optimizer_s
        return self.pipeline(plan, IN_STEPS).makespan_s + counted_s + self.beside_s


@dataclass
class Running:
    machine: Machine
    plan: sw.Plan

    def timelines(self, batch: object, steps: int) -> list[Timeline]:
        return [self.machine.pipeline(self.plan, 1.0)]

    def step(self, batch: object) -> None:
        self.machine.clock.now_s = self.machine.perf_counter() + self.machine.step_s(self.plan)


def measured(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, world: int, degrees: Sequence[int], *, single: bool
) -> tuple[sw.Graph, tuple[Any, ...]]:
    graph = decoder(2, 32, 4, 64, 16)
    graph = replace(graph, capabilities=replace(graph.capabilities, single_controller=single))
    monkeypatch.setattr(measure, "capture", lambda *_: graph)
    monkeypatch.setattr(measure.registry, "load", lambda _: machine)
    monkeypatch.setattr(measure.time, "perf_counter", machine.perf_counter)
    cluster = sw.Cluster("cpu", devices_per_node=world)
    sample = np.zeros((graph.sample_batch, 1))
    return graph, measure.measure_units(
        object(), sample, microbatches=(2,), cluster=cluster, tensor_degrees=degrees, steps=1
    )


@pytest.mark.parametrize(
    "machine",
    [Machine(), Machine(beside_s=0.0, updated=0.4), Machine(beside_s=0.0, lent=0.7)],
    ids=["more", "less", "shared"],
)
@pytest.mark.parametrize("single", [True, False], ids=["one process", "a process for each"])
@pytest.mark.parametrize(
    ("world", "degrees"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (6, (1, 2)),
        *(pytest.param(*w, marks=pytest.mark.slow) for w in ((3, (1,)), (4, (1, 2)))),
    ],
)
def test_plans_that_were_measured_get_their_own_steps_back(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, world: int, degrees: Sequence[int], *, single: bool
) -> None:
    machine = replace(machine, ran=[], devices=set(), clock=threading.local())
    graph, units = measured(monkeypatch, machine, world, degrees, single=single)
    assert machine.devices == (set(range(world)) if single else set())
    assert any(unit.in_stages for unit in units) == (world > 1)
    device = replace(load_device("cpu"), measured_units=units)
    for ran in machine.ran:
        made = ran.decision
        if made.virtual_stages > 1:
            continue  # for the shares of the units alone
        planned = sw.plan(
            graph, sw.Cluster(device, devices_per_node=made.pp * made.dp * made.tp), batch=made.batch, pp=made.pp,
            dp=made.dp, tp=made.tp, microbatch=made.microbatch, stage_starts=made.stage_starts, virtual_stages=1,
            schedule=made.schedule, recompute="none", shard=0, precision="fp32",
        )  # fmt: skip
        assert planned.predicted.step_time_s == pytest.approx(machine.step_s(ran), rel=1e-5), made


def test_units_are_as_they_were_timed_where_their_part_of_a_step_cannot_be_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine()
    monkeypatch.setattr(machine, "step_s", lambda _: 1.0)  # however many microbatches
    _, units = measured(monkeypatch, machine, 2, (1,), single=True)
    for unit in units:
        forward_s = machine.unit_s * (1 + unit.unit_class) * (IN_STAGES if unit.in_stages else 1.0)
        assert (unit.forward_s, unit.backward_s) == pytest.approx((forward_s, 2 * forward_s))


def test_an_optimizer_that_took_less_takes_that_share_of_whatever_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, units = measured(monkeypatch, Machine(beside_s=0.0, updated=0.4), 2, (1,), single=False)
    device = load_device("cpu")
    known = replace(device, measured_units=units)
    counted = replace(device, measured_units=tuple(replace(unit, update_share=1.0) for unit in units))
    for given in ({}, {"shard": 1}, {"optimizer": "sgd"}, {"optimizer": "sgd", "shard": 1}, {"pp": 2, "dp": 1}):
        asked = {"pp": 1, "dp": 2, "tp": 1, "recompute": "none", "shard": 0, "precision": "fp32"} | given

        def optimizer_s(of: Device, pins: dict[str, Any] = asked) -> float:
            plan = sw.plan(graph, sw.Cluster(of, devices_per_node=2), batch=8, microbatch=2, **pins)
            return plan.predicted.optimizer_s

        assert optimizer_s(known) == pytest.approx(0.4 * optimizer_s(counted)) != 0, given


@pytest.mark.parametrize("lent", [0.3, 1.0])
def test_pipelines_of_ranks_that_share_a_machine_take_what_they_would(
    monkeypatch: pytest.MonkeyPatch, lent: float
) -> None:
    """Between the two numbers of microbatches that ran and beyond, and under a schedule that did not run."""
    machine = Machine(beside_s=0.0, lent=lent)
    graph, units = measured(monkeypatch, machine, 2, (1,), single=True)
    assert {unit.idle_lent for unit in units if not unit.in_stages} == {0.0}
    assert [unit.idle_lent for unit in units if unit.in_stages] == pytest.approx([lent] * (len(units) // 2), rel=0.1)
    ran = next(plan.decision for plan in machine.ran if plan.decision.pp == 2)
    cluster = sw.Cluster(replace(load_device("cpu"), measured_units=units), devices_per_node=2)
    pins = {"microbatch": 2, "recompute": "none", "shard": 0, "precision": "fp32", "pp": 2, "dp": 1, "tp": 1}
    for microbatches, schedule in ((1, "1f1b"), (4, "1f1b"), (16, "1f1b"), (5, "gpipe")):
        asked = pins | {"batch": 2 * microbatches, "schedule": schedule, "stage_starts": ran.stage_starts}
        plain = sw.plan(graph, sw.Cluster("cpu", devices_per_node=2), **asked)
        found = sw.plan(graph, cluster, **asked)
        assert found.predicted.step_time_s == pytest.approx(machine.step_s(plain), rel=1e-3)


def test_what_neither_optimizer_nor_idle_time_can_save_the_units_did(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(beside_s=-0.003)
    graph, units = measured(monkeypatch, machine, 2, (1,), single=False)
    assert {(unit.step_s, unit.update_share) for unit in units} == {(0.0, step_fit.LEAST_UPDATE)}
    assert {unit.idle_lent for unit in units} == {0.0, 1.0}
    device = replace(load_device("cpu"), measured_units=units)
    wrong = defaultdict(list)
    for ran in machine.ran:
        made = ran.decision
        if made.virtual_stages > 1:
            continue
        planned = sw.plan(
            graph, sw.Cluster(device, devices_per_node=2), batch=made.batch, pp=made.pp, dp=made.dp, tp=made.tp,
            microbatch=made.microbatch, stage_starts=made.stage_starts, virtual_stages=1, schedule=made.schedule,
            recompute="none", shard=0, precision="fp32",
        )  # fmt: skip
        wrong[made.pp].append((made.batch, planned.predicted.step_time_s / machine.step_s(ran) - 1))
    for of_one in wrong.values():
        (_, few), (_, many) = min(of_one), max(of_one)
        assert few > 0 > many, "between the steps that ran the two errors cancel"


def test_a_step_ends_with_the_rank_that_takes_longest_of_devices_that_measured_unlike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, units = measured(monkeypatch, Machine(beside_s=0.0), 2, (1,), single=False)

    def step(*changes: dict[str, float]) -> Predicted:
        devices = [
            replace(load_device("cpu"), measured_units=tuple(replace(unit, **change) for unit in units))
            for change in changes
        ]
        groups = [replace(sw.Cluster(device).groups[0], nodes=1, devices_per_node=1) for device in devices]
        return sw.plan(
            graph, sw.Cluster.of_groups(groups, "shared-memory"), batch=8, microbatch=2, pp=2, dp=1, tp=1,
            schedule="1f1b", stage_starts=(0, 2), recompute="none", shard=0, precision="fp32",
        ).predicted  # fmt: skip

    alike, less, more = {"step_s": 0.0}, {"update_share": 0.5}, {"step_s": 1e-3}
    slower = step(alike, more).step_time_s
    assert slower > step(alike, alike).step_time_s
    assert step(less, more).step_time_s == pytest.approx(slower), "what one rank saves the other does not"
