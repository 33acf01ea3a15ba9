"""What the units of a model take on this machine, each run as a stage of its own."""

import copy
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from shardwright.api import capture, plan
from shardwright.backends import protocol
from shardwright.core.cluster import Cluster
from shardwright.core.fold import fold
from shardwright.core.graph import Graph
from shardwright.core.hardware.device import MeasuredUnit
from shardwright.core.measured import measured_costs
from shardwright.core.plan import Plan
from shardwright.core.structure import measured_name
from shardwright.core.tensor_layouts import digest

MICROBATCHES = (2, 6)
"""Run in one step of the whole model: the difference is what one takes. Of units the median over the larger number."""

Found = TypeVar("Found")


def measure_units(
    model: Any,
    sample: Any,
    loss: Callable[..., Any] | None = None,
    *,
    microbatches: Sequence[int] = (1, 4),
    cluster: Cluster | None = None,
    tensor_degrees: Sequence[int] = (1,),
    steps: int = 5,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> tuple[MeasuredUnit, ...]:
    """Train copies of the model for a few steps in fp32: with every unit as a pipeline stage, all on one device, for
    the shares of the units; and as one stage, for what a microbatch takes of all of them, run as they are in a plan.

    Args:
        model, sample, loss: as `shardwright.capture` takes them; the sample has real values.
        microbatches: the sizes to run.
        cluster: the devices that measure together, as they measured themselves; default: one.
        tensor_degrees: among how many of them the units are shared.
        steps: for each size, after one to warm up.
        progress: called with (what is measured, how much is done, how much there is).
        options: for the backend's `compile`.

    Raises what `capture` and `compile` raise.
    """
    graph = capture(model, sample, loss)
    setup = _Setup(model, sample, loss, cluster or Cluster("cpu"), graph, steps, options)
    found: list[MeasuredUnit] = []
    runs = [(degree, size) for degree in tensor_degrees for size in microbatches]
    for done, (degree, size) in enumerate(runs):
        if progress is not None:
            over = f" on {degree} ranks" if degree > 1 else ""
            progress(f"{graph.model_name}, microbatches of {size}{over}", done, len(runs))
        found += setup.units(size, degree)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Setup:
    """What `measure_units` was given."""

    model: Any
    sample: Any
    loss: Callable[..., Any] | None
    cluster: Cluster
    graph: Graph
    steps: int
    options: Mapping[str, Any]

    def units(self, microbatch: int, degree: int) -> list[MeasuredUnit]:
        """Every class of units at one size, shared by ``degree`` devices."""
        each_a_stage = self._plan(microbatch, degree, MICROBATCHES[1], len(fold(self.graph).units))
        seconds = self._actions_s(each_a_stage)
        whole, said = self._microbatch_s(microbatch, degree), sum(map(sum, seconds))
        factor = whole / said if whole > 0 and said > 0 else 1.0
        return _classes(self.graph, each_a_stage, [(factor * a, factor * b) for a, b in seconds])

    def _actions_s(self, each_a_stage: Plan) -> list[tuple[float, float]]:
        """(forward, backward) seconds of every unit."""
        running, batch = self._compiled(each_a_stage)
        found = _at_once(running, lambda one: one.timelines(batch, self.steps))
        costs = measured_costs(itertools.chain.from_iterable(found))
        backward = (a + b for a, b in zip(costs.input_grad_s, costs.weight_grad_s, strict=True))
        return list(zip(costs.forward_s, backward, strict=True))

    def _microbatch_s(self, microbatch: int, degree: int) -> float:
        """Seconds that one microbatch more adds to a step of the whole model as one stage."""
        taken = []
        for count in MICROBATCHES:
            running, batch = self._compiled(self._plan(microbatch, degree, count, 1))

            def step_s(one: protocol.Executable, batch: Any = batch) -> float:
                seconds = []
                for _ in range(self.steps):
                    began = time.perf_counter()
                    one.step(batch)
                    seconds.append(time.perf_counter() - began)
                return statistics.median(seconds)

            taken.append(statistics.mean(_at_once(running, step_s)))
        return (taken[1] - taken[0]) / (MICROBATCHES[1] - MICROBATCHES[0])

    def _compiled(self, planned: Plan) -> tuple[list[protocol.Executable], Any]:
        """The plan on all devices, after a step to warm up, and a batch for it: on each of their groups one of its own
        where one process drives them all."""
        options, used = dict(self.options), planned.mesh.size
        batch = _resized(self.sample, self.graph.sample_batch, planned.microbatches * planned.decision.microbatch)
        running = []
        for first in range(0, self.cluster.world_size, used):
            if self.graph.capabilities.single_controller:
                options["devices"] = range(first, first + used)
            backend = protocol.load(self.graph.framework)
            running.append(backend.compile(planned, copy.deepcopy(self.model), loss=self.loss, **options))
        for one in running:
            one.step(batch)
        return running, batch

    def _plan(self, microbatch: int, degree: int, microbatches: int, stages: int) -> Plan:
        """All stages on each group of ``degree`` devices: of all groups where each process is one device; of one group
        where one process drives them all, as what replicas add up would be part of every action."""
        cluster, replicas = self.cluster, self.cluster.world_size // degree
        if self.graph.capabilities.single_controller and replicas > 1:
            group = cluster.groups[0]
            cluster, replicas = Cluster.of_groups([replace(group, nodes=1, devices_per_node=degree)]), 1
        return plan(
            self.graph, cluster, batch=microbatches * microbatch * replicas, pp=1, tp=degree, dp=replicas,
            microbatch=microbatch, virtual_stages=stages, stage_starts=range(stages), recompute="none", shard=0,
            schedule="interleaved-1f1b" if stages > 1 else "1f1b", precision="fp32",
        )  # fmt: skip


def _at_once(running: Sequence[protocol.Executable], run: Callable[[protocol.Executable], Found]) -> list[Found]:
    """What ``run`` gives for each, all at the same time: devices may share cores and memory."""
    if len(running) == 1:
        return [run(running[0])]
    with ThreadPoolExecutor(len(running)) as threads:
        return list(threads.map(run, running))


def _classes(graph: Graph, each_a_stage: Plan, seconds: Sequence[tuple[float, float]]) -> list[MeasuredUnit]:
    """The median of the units of every class."""
    decision = each_a_stage.decision
    layouts = digest(decision.layouts, decision.sequence_parallel) if decision.tp > 1 else ""
    name = measured_name(graph.framework, each_a_stage.model.digest)
    taken: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for unit_class, both in zip(each_a_stage.costs.unit_classes, seconds, strict=True):
        taken[unit_class].append(both)
    found = []
    for unit_class, runs in sorted(taken.items()):
        forward, backward = (statistics.median(part) for part in zip(*runs, strict=True))
        found.append(
            MeasuredUnit(name, unit_class, "fp32", decision.microbatch, forward, backward, decision.tp, layouts)
        )
    return found


def _resized(sample: Any, given: int, wanted: int) -> Any:
    """The sample with its rows repeated or left out, so that there are ``wanted``."""
    if isinstance(sample, Mapping):
        return type(sample)({key: _resized(value, given, wanted) for key, value in sample.items()})  # type: ignore[call-arg]
    if isinstance(sample, (tuple, list)):
        return type(sample)(_resized(value, given, wanted) for value in sample)
    shape = getattr(sample, "shape", ())
    return sample[np.arange(wanted) % given] if shape and shape[0] == given else sample
