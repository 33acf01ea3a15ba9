"""The times of a model's units on this machine: run as a stage each, all in one stage, and in a pipeline."""

import copy
import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardwright.api import capture, plan
from shardwright.backends import protocol, registry
from shardwright.core.cluster.cluster import Cluster
from shardwright.core.cluster.hardware.device import MeasuredUnit
from shardwright.core.model.fold import fold
from shardwright.core.model.graph import Graph
from shardwright.core.model.structure import measured_name, unit_form
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.step_fit import StepFit, fit_steps
from shardwright.core.schedule.measured_costs import measured_costs
from shardwright.core.solver.op_layouts import digest

MICROBATCHES = (2, 6)
"""The numbers of microbatches in a step of the whole model: the difference of two steps gives the time of one. Steps
with every unit a stage run the smaller number."""

SECONDS, LEAST_STEPS, MOST_STEPS = 4.0, 3, 30
"""The time for which steps of the whole model are timed, and the least and the most number of them."""

PARTS = ("every unit a stage", "in one stage", "in several stages")
"""The ways in which a model is run, at each size and degree."""

_Compiled = tuple[list[protocol.Executable], Any]
"""A plan on all devices, and a batch for it."""

Given = TypeVar("Given")
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
    """The times of a model's units, measured by training copies of it for a few steps in fp32. Every unit as a pipeline
    stage, all on one device, gives the shares of the units. The model as one stage gives the time of a microbatch in
    all of them, run as they are in a plan, and the time of a step beside its microbatches. The shortest pipeline that
    all devices divide into is run too, if there are units enough for its stages.

    Args:
        model, sample, loss: as `shardwright.capture` takes them; the sample has real values.
        microbatches: the sizes to run.
        cluster: the devices that measure together, as they measured themselves; default: one.
        tensor_degrees: the numbers of devices that the units are shared among.
        steps: the steps of each size with every unit as a stage, after one to warm up.
        progress: a function called with (what is measured, how much is done, how much there is).
        options: the options of the backend's `compile`.

    Raises what `capture` and `compile` raise.
    """
    graph = capture(model, sample, loss)
    # What the model checkpoints itself runs so while it is measured, and the plans of that recompute nothing.
    graph = replace(graph, ops=tuple(replace(op, in_checkpoint=False) for op in graph.ops))
    setup = _Setup(model, sample, loss, _unmeasured(cluster or Cluster("cpu")), graph, steps, options)
    found: list[MeasuredUnit] = []
    runs = [(degree, size) for degree in tensor_degrees for size in microbatches]
    for number, (degree, size) in enumerate(runs):
        over = f" on {degree} ranks" if degree > 1 else ""

        def show(part: int, what: str = f"{graph.model_name}, microbatches of {size}{over}", run: int = number) -> None:
            if progress is not None:
                progress(f"{what}: {PARTS[part]}", run * len(PARTS) + part, len(runs) * len(PARTS))

        found += setup.units(size, degree, show)
    return tuple(found)


def _unmeasured(cluster: Cluster) -> Cluster:
    """The cluster without what units took on it before: what is counted is to be counted without it."""
    groups = [replace(group, device=replace(group.device, measured_units=())) for group in cluster.groups]
    return Cluster.of_groups(groups, cluster.inter_node, cluster.inter_region)


@dataclass(frozen=True, slots=True)
class _Setup:
    """The arguments of `measure_units`, and the model's graph."""

    model: Any
    sample: Any
    loss: Callable[..., Any] | None
    cluster: Cluster
    graph: Graph
    steps: int
    options: Mapping[str, Any]

    def units(self, microbatch: int, degree: int, show: Callable[[int], None]) -> list[MeasuredUnit]:
        """The times of every class of units at one size, shared by ``degree`` devices: as units run in one stage, and
        where there are devices enough, as they run in several stages, which wait for each other and leave the machine
        to each other.

        ``show`` is called with the number of each of `PARTS` before it runs.
        """
        starts = range(len(fold(self.graph).units))
        show(0)
        each_a_stage = self._plan(microbatch, degree, MICROBATCHES[0], starts=starts)
        seconds = self._actions_s(*self._compiled(each_a_stage))
        show(1)
        one_stage = [self._plan(microbatch, degree, count, starts=(0,), apart=False) for count in MICROBATCHES]
        middle = _middle(each_a_stage, seconds)
        steps = self._steps(one_stage, middle, self._compiled(one_stage[1]))
        found = self._classes(each_a_stage, middle, one_stage[0], steps)
        sharing = self.cluster.world_size // degree
        pp = next((stages for stages in range(2, sharing + 1) if sharing % stages == 0), 1)
        if 1 < pp <= len(starts):
            show(2)
            many = self._plan(microbatch, degree, MICROBATCHES[1], pp=pp)
            cut = many.decision.stage_starts
            whole = [self._plan(microbatch, degree, count, pp=pp, starts=cut, apart=False) for count in MICROBATCHES]
            running, batch = self._compiled(many)
            middle = _middle(each_a_stage, _as_stages(seconds, many, self._actions_s(running, batch)))
            # Where no replicas are left out, the plan that ran is the one that is timed whole.
            ran = (running, batch) if many.decision == whole[1].decision else self._compiled(whole[1])
            in_stages = self._steps(whole, middle, ran, steps.update_share)
            found += self._classes(each_a_stage, middle, whole[0], in_stages)
        return found

    def _actions_s(self, running: Sequence[protocol.Executable], batch: Any) -> list[tuple[float, float]]:
        """The (forward, backward) seconds of every stage."""
        found = _at_once(running, lambda one: one.timelines(batch, self.steps))
        costs = measured_costs(itertools.chain.from_iterable(found))
        return list(zip(costs.forward_s, costs.backward_s, strict=True))

    def _classes(
        self, each_a_stage: Plan, seconds: Sequence[tuple[float, float]], ran: Plan, steps: StepFit
    ) -> list[MeasuredUnit]:
        """The units of every class, scaled to the times that ``steps`` of ``ran`` took."""
        decision, costs = each_a_stage.decision, each_a_stage.costs
        entries = [costs.classes[own].parameter_elements for own in costs.unit_classes]
        # A step takes what its fullest rank does: that one's units make up all of it.
        fullest = max(sum(entries[unit] for unit in units) for units in ran.stage_units)
        layouts = digest(decision.layouts, decision.sequence_parallel) if decision.tp > 1 else ""
        name = measured_name(self.graph.framework, each_a_stage.model.digest)
        units = dict(zip(costs.unit_classes, fold(self.graph).units, strict=True))
        return [
            MeasuredUnit(
                name,
                unit_class,
                "fp32",
                decision.microbatch,
                steps.factor * forward,
                steps.factor * backward,
                decision.tp,
                layouts,
                steps.beside_s * costs.classes[unit_class].parameter_elements / max(1, fullest),
                steps.update_share,
                in_stages=ran.decision.pp > 1,
                idle_lent=steps.idle_lent,
                form=unit_form(self.graph, units[unit_class]),
                counted_forward_s=costs.classes[unit_class].forward_s,
                counted_backward_s=costs.classes[unit_class].input_grad_s + costs.classes[unit_class].weight_grad_s,
                parameter_elements=costs.classes[unit_class].parameter_elements,
            )
            for unit_class, (forward, backward) in sorted(dict(zip(costs.unit_classes, seconds, strict=True)).items())
        ]

    def _steps(
        self,
        plans: Sequence[Plan],
        seconds: Sequence[tuple[float, float]],
        many: _Compiled,
        update_share: float = 1.0,
    ) -> StepFit:
        """The fit of steps of ``plans``, for units of ``seconds``: the same pipeline with few and with ``many``
        microbatches, which is compiled.

        Steps of either take turns, so that other work of the machine slows both alike.
        """
        compiled = [self._compiled(plans[0]), many]
        groups = list(zip(*([(one, batch) for one in running] for running, batch in compiled), strict=True))
        backend = registry.load(self.graph.framework)
        # All processes and groups run as many as the slowest of them has the time for.
        first = _at_once(groups, partial(_rounds_s, 1))
        slowest_s = backend.longest_s(max(float(times.sum()) for times in first))
        rounds = min(max(math.ceil(SECONDS / max(1e-9, slowest_s)), LEAST_STEPS), MOST_STEPS)
        found = _at_once(groups, partial(_rounds_s, rounds))
        # The difference of steps within a round, as the machine does not stay as fast from round to round.
        more_s = statistics.mean(float(np.median(times[:, 1] - times[:, 0])) for times in found)
        few_s = statistics.mean(float(np.median(times[:, 0])) for times in found)
        return fit_steps(plans, seconds, few_s, more_s, update_share)

    def _compiled(self, planned: Plan) -> _Compiled:
        """The plan compiled on all devices, after a step to warm up, and a batch for it. Where one process drives all
        devices, every group of them has a compiled plan of its own."""
        used, decision = planned.mesh.size, planned.decision
        options = {"reduction": "mean", **self.options}  # time alone is asked for, whatever the loss is to its batch
        drives_all = self.graph.capabilities.single_controller
        rows = decision.batch if drives_all else decision.batch // decision.dp
        batch = _resized(self.sample, self.graph.sample_batch, rows)
        running = []
        for first in range(0, self.cluster.world_size, used):
            if drives_all:
                options["devices"] = range(first, first + used)
            backend = registry.load(self.graph.framework)
            running.append(backend.compile(planned, copy.deepcopy(self.model), loss=self.loss, **options))
        for one in running:
            one.step(batch)
        return running, batch

    def _plan(
        self,
        microbatch: int,
        degree: int,
        microbatches: int,
        *,
        pp: int = 1,
        starts: Sequence[int] | None = None,
        apart: bool = True,
    ) -> Plan:
        """A plan with all stages on each group of ``pp`` times ``degree`` devices, replicas of each other. ``apart``:
        where one process drives all devices, the plan is for one group alone, as the sums of replicas would be part of
        every action."""
        used = pp * degree
        cluster, replicas = self.cluster, self.cluster.world_size // used
        if apart and self.graph.capabilities.single_controller and replicas > 1:
            group = cluster.groups[0]
            cluster, replicas = Cluster.of_groups([replace(group, nodes=1, devices_per_node=used)]), 1
        virtual = len(starts) if starts and pp == 1 else 1
        return plan(
            self.graph, cluster, batch=microbatches * microbatch * replicas, pp=pp, tp=degree, dp=replicas,
            microbatch=microbatch, virtual_stages=virtual, stage_starts=starts, recompute="none", shard=0,
            schedule="interleaved-1f1b" if virtual > 1 else "1f1b", precision="fp32",
        )  # fmt: skip


def _rounds_s(rounds: int, ways: Sequence[tuple[protocol.Executable, Any]]) -> NDArray[np.float64]:
    """The seconds of a step of each way, [round, way]. The ways take turns."""
    taken = np.empty((rounds, len(ways)))
    for number in range(rounds):
        for way, (one, batch) in enumerate(ways):
            began = time.perf_counter()
            one.step(batch)
            taken[number, way] = time.perf_counter() - began
    return taken


def _at_once(running: Sequence[Given], run: Callable[[Given], Found]) -> list[Found]:
    """The results of ``run`` for each, all run at the same time: devices may share cores and memory."""
    if len(running) == 1:
        return [run(running[0])]
    with ThreadPoolExecutor(len(running)) as threads:
        return list(threads.map(run, running))


def _middle(each_a_stage: Plan, seconds: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The seconds of every unit, as the median of its class."""
    taken: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for unit_class, both in zip(each_a_stage.costs.unit_classes, seconds, strict=True):
        taken[unit_class].append(both)
    middle: dict[int, tuple[float, float]] = {}
    for unit_class, runs in taken.items():
        forward, backward = zip(*runs, strict=True)
        middle[unit_class] = statistics.median(forward), statistics.median(backward)
    return [middle[own] for own in each_a_stage.costs.unit_classes]


def _as_stages(
    seconds: Sequence[tuple[float, float]], planned: Plan, stages: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """The seconds of units, scaled so that those of every stage add up to the time of the stage."""
    found: list[tuple[float, float]] = []
    for units, (forward, backward) in zip(planned.stage_units, stages, strict=True):
        own = [seconds[unit] for unit in units]
        ahead, back = (sum(part) or 1.0 for part in zip(*own, strict=True))
        found += [(f * forward / ahead, b * backward / back) for f, b in own]
    return found


def _resized(sample: Any, given: int, wanted: int) -> Any:
    """The sample with its rows repeated or left out, so that there are ``wanted``."""
    if isinstance(sample, Mapping):
        return type(sample)({key: _resized(value, given, wanted) for key, value in sample.items()})  # type: ignore[call-arg]
    if isinstance(sample, (tuple, list)):
        return type(sample)(_resized(value, given, wanted) for value in sample)
    shape = getattr(sample, "shape", ())
    return sample[np.arange(wanted) % given] if shape and shape[0] == given else sample
