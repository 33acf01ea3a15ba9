"""Chains of unequal units with few microbatches, and the best cut and schedule of each by exhaustive search."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import combinations

import numpy as np
import pytest

import shardwright as sw
from shardwright import Cluster
from shardwright.core.cluster.hardware import load_profile
from shardwright.core.model.graph import Graph
from shardwright.core.plan.decision import placement_of
from shardwright.core.rules import op_rules as L
from shardwright.core.schedule import Schedule, schedule_names
from shardwright.core.schedule.catalogue import FAMILIES
from shardwright.core.schedule.family import Sizes
from shardwright.core.schedule.named_schedule import named_schedule
from shardwright.core.schedule.simulate import simulate
from shardwright.core.search.best_first import Search
from shardwright.core.search.predict import Pipeline
from shardwright.core.search.request import Request
from shardwright.core.search.search import tables_of
from tests.core.toy import Builder

LINKS = ("nvlink3", "pcie3", "ethernet-100g", "ethernet-25g")


@dataclass(frozen=True)
class Case:
    """A chain on ranks of one pipeline."""

    graph: Graph
    cluster: Cluster
    ranks: int
    virtual_stages: int
    microbatches: int
    microbatch: int
    recompute: str = "none"

    @property
    def request(self) -> Request:
        return Request(
            batch=self.microbatches * self.microbatch, pp=self.ranks, dp=1, tp=1, microbatch=self.microbatch,
            virtual_stages=self.virtual_stages, recompute=self.recompute, shard=0, precision="fp32", optimizer="sgd",
        )  # fmt: skip


def chain(widths: list[int], hidden: list[int], sequence: int = 64) -> Graph:
    """Blocks of two linear layers: block i goes from ``widths[i]`` over ``hidden[i]`` to ``widths[i + 1]``."""
    b = Builder()
    x = b.input("x", -1, sequence, widths[0], dtype="float32")
    for layer, (entering, inner, leaving) in enumerate(zip(widths, hidden, widths[1:], strict=False)):
        back = b.enter(f"layers.{layer}")
        x = b.linear(x, b.parameter(f"layers.{layer}.up", entering, inner), None, inner)
        x = b.elementwise("gelu", x)
        x = b.linear(x, b.parameter(f"layers.{layer}.down", inner, leaving), None, leaving)
        b.leave(back)
    loss = b.op("reduction", "mean", [x], (), L.reduction(b.shape(x), [0, 1, 2]))
    return b.build(loss, name="Chain")


def random_case(seed: int, units: tuple[int, int] = (6, 14)) -> Case:
    """Two to four ranks with one or two stages each, two to eight microbatches, unequal units and values between them;
    every third case has so little memory that cuts are bound by it."""
    draw = np.random.default_rng(seed)
    ranks, virtual = int(draw.integers(2, 5)), int(draw.integers(1, 3))
    layers = int(draw.integers(max(units[0], ranks * virtual), units[1] + 1))
    widths = [int(64 * w) for w in draw.integers(1, 17, layers + 1)]
    hidden = [int(128 * w) for w in draw.integers(1, 25, layers)]
    link = str(draw.choice(LINKS))
    cluster = Cluster("v100", devices_per_node=ranks, intra_node=link)
    case = Case(chain(widths, hidden), cluster, ranks, virtual, int(draw.integers(2, 9)), int(draw.choice([1, 4, 16])))
    if seed % 3 == 0:
        case = short_of_memory(case, float(draw.uniform(0.0, 1.0)))
    return case


def short_of_memory(case: Case, share: float) -> Case:
    """The case on devices with less memory than its plan takes, but with more than any plan: ``share`` of the way."""
    roomy = sw.plan(case.graph, case.cluster, **pins(case))
    most = max(roomy.predicted.peak_memory_bytes)
    device = load_profile("v100").device

    def on(memory_bytes: int) -> Case:
        small = replace(device, memory_bytes=memory_bytes, reserved_memory_bytes=0)
        link = case.cluster.groups[0].intra_node
        return replace(case, cluster=Cluster(small, devices_per_node=case.ranks, intra_node=link))

    few, many = most // 3, most
    while many - few > most // 200:
        middle = (few + many) // 2
        few, many = (few, middle) if searched(on(middle)) is not None else (middle, many)
    return on(many + int(share * (most - many)))


def pins(case: Case) -> dict[str, object]:
    """The options of a case's request."""
    return {name: value for name, value in case.request.given.items() if name != "precision"} | {"precision": "fp32"}


def searched(case: Case, **more: object) -> float | None:
    """The step time of the best plan, or None where nothing fits."""
    request = replace(case.request, **more)
    found = Search(tables_of(case.graph, case.cluster, request), case.cluster, request).run(runners_up=0)
    return None if found.best is None else found.best.predicted.step_time_s


def admitted(case: Case) -> Iterator[str]:
    """The schedules of the catalogue that train and admit the sizes of a case."""
    sizes = Sizes(case.ranks, case.microbatches, case.virtual_stages)
    for name in schedule_names():
        if FAMILIES[name].trains and FAMILIES[name].refusal(sizes) is None:
            yield name


def exhaustive(case: Case) -> tuple[float, str, tuple[int, ...]] | None:
    """The least step time over every cut and schedule, by the simulator, with the schedule and the first unit of each
    stage. Each is a plan with everything pinned that fits; None where none does. What cannot be the least, because one
    rank alone has more work than that, is not simulated."""
    request = case.request
    search = Search(tables_of(case.graph, case.cluster, request), case.cluster, request)
    (shape,) = search.space.shapes()
    bounds = search.scorer.bounds
    ranked = bounds.ranked(shape, case.recompute)
    decision = bounds.undivided(shape, next(search.space.policies(1)))
    stages, m = case.ranks * case.virtual_stages, case.microbatches
    queue: list[tuple[float, bool, str, tuple[int, ...], float]] = []
    for name in admitted(case):
        placement = placement_of(name, case.ranks, case.virtual_stages)
        for borders in combinations(range(1, ranked.units), stages - 1):
            starts = (0, *borders)
            work = ranked.work(starts, placement)
            pinned = replace(decision, stage_starts=starts, schedule=name, virtual_stages=case.virtual_stages)
            nothing = Pipeline(0.0, (0.0,) * ranked.ranks)
            tail_s = bounds.step.predicted(pinned, ranked, (), placement, nothing).step_time_s
            busy_s = m * max(rank.seconds for rank in work)
            queue.append((busy_s * (1 - 1e-9) + tail_s, False, name, starts, tail_s))
    heapify(queue)
    while queue:
        seconds, is_simulated, name, starts, tail_s = heappop(queue)
        if is_simulated:
            found = searched(case, stage_starts=starts, schedule=name, virtual_stages=None)
            if found is not None:
                assert found == pytest.approx(seconds, rel=1e-5), f"{starts} under {name}"
                return found, name, starts
            continue
        costs = ranked.stage_costs(starts, placement_of(name, case.ranks, case.virtual_stages))
        if name == "interleaved":  # SageMaker's, whose order alone depends on the costs
            schedule = Schedule.build(name, ranks=case.ranks, microbatches=m, costs=costs)
        else:
            schedule = named_schedule(name, case.ranks, m, case.virtual_stages)
        heappush(queue, (simulate(schedule, costs).makespan_s + tail_s, True, name, starts, tail_s))
    return None
