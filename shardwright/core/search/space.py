"""The space of a search: degrees and their order over the ranks, microbatches, memory policies, pipelines.

Pinned options are not varied. A request that leaves nothing to choose from is refused with the pins that conflict.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise, product

from shardwright.core.capabilities import Capabilities
from shardwright.core.cluster.cluster import Cluster
from shardwright.core.errors import PlanError, ScheduleError
from shardwright.core.layout.mesh import Mesh
from shardwright.core.plan.decision import STATES_LEVEL, OffloadStates, indivisible, stages_at_once
from shardwright.core.schedule import AUTO, Schedule, schedule_names
from shardwright.core.schedule.catalogue import FAMILIES
from shardwright.core.schedule.family import Sizes
from shardwright.core.schedule.passes.sharding import ReduceAfter
from shardwright.core.schedule.schedule import MOST_CELLS
from shardwright.core.search.options import VIRTUAL_STAGES
from shardwright.core.search.request import Request
from shardwright.core.values.recompute_modes import Recompute

MAX_MICROBATCH = 64
"""The size up to which every microbatch that divides is tried; beyond it only powers of two and the largest."""
MAX_TENSOR_DEGREE = 8
"""The largest tensor degree that is tried where it does not fit into a node. Beyond it, messages of every layer leave
the node too often to pay (a pin may ask for more)."""
MAX_TENSOR_DEGREE_IN_NODE = 256
"""The largest tensor degree that is tried within a node: each has its layouts solved, and models have fewer heads."""
MANY_STAGES = 32
"""The number of stages beyond which only `DEEP_SCHEDULES` are tried: tables grow with the square of the stages, and
plans as deep as that are few."""
DEEP_SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1")
SHARD_GROUPS = (2, 4, 8, 16, 32, 64)
"""The numbers of ranks that share a shard, beside the whole data axis. A pinned ``shard`` means the whole axis, unless
its group is pinned too."""
GATHERED_STAGES = 2
"""The number of stages that a search keeps gathered where it does not go unit by unit: one that runs, and one ahead."""
ON_HOST: tuple[OffloadStates, ...] = ("none", "optimizer", "parameters")
REDUCED: tuple[ReduceAfter | None, ...] = (None, "last")
ORDERS = ("PDT", "DPT", "PTD", "TPD", "DTP", "TDP")
"""Placement orders, the usual one first: pipeline stages far apart, tensor groups close together."""
GENERATED_ACTIONS = 20_000
"""The number of forwards and backwards up to which a schedule is generated."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Degrees, the order of the axes on the ranks, and the division of the batch."""

    mesh: Mesh
    order: str
    microbatch: int
    microbatches: int
    _hash: int = field(init=False, repr=False, compare=False)
    """Counted once: bounds and tables are looked up by shapes, many times each."""
    degrees: tuple[int, int, int] = field(init=False, repr=False, compare=False)
    """The degrees, as (pp, dp, tp)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "degrees", tuple(self.mesh.axis_size(axis) for axis in ("pp", "dp", "tp")))
        object.__setattr__(self, "_hash", hash((self.mesh, self.order, self.microbatch, self.microbatches)))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, slots=True)
class Pipelining:
    """The schedule of the stages."""

    schedule: str
    virtual_stages: int


@dataclass(frozen=True, slots=True)
class Policy:
    """The choice of what is kept in memory."""

    recompute: Recompute
    shard: int
    shard_group: int | None
    gathered_stages: int | None = None
    look_ahead: int | None = None
    reduce_after: ReduceAfter | None = None
    offload_states: OffloadStates = "none"
    _hash: int = field(init=False, repr=False, compare=False)
    """As in `Shape`."""

    def __post_init__(self) -> None:
        sharded = self.recompute, self.shard, self.shard_group, self.offload_states
        residency = self.gathered_stages, self.look_ahead, self.reduce_after
        object.__setattr__(self, "_hash", hash((sharded, residency)))

    def __hash__(self) -> int:
        return self._hash

    def has_stages(self, pipelining: Pipelining) -> bool:
        """Whether a rank has as many stages as it is to keep gathered, and runs no more at once."""
        if self.gathered_stages is None:
            return True
        held = pipelining.virtual_stages
        return stages_at_once(pipelining.schedule, held) <= self.gathered_stages <= held


class Space:
    """The choices of one request on one cluster, for a model of so many units."""

    def __init__(
        self,
        request: Request,
        cluster: Cluster,
        units: int,
        runtimes: Sequence[Capabilities],
        modes: Sequence[Recompute],
        *,
        limited: bool = True,
    ) -> None:
        """A space for ``runtimes`` that must be able to carry out what is chosen, of ``modes`` of recompute.
        ``limited``: whether this holds for degrees and memory policies too. Pinned options are never limited."""
        self.modes = tuple(modes)
        self.request, self.cluster, self.units = request, cluster, units
        self.runtimes = tuple(runtimes) if limited else ()
        self.names = _names(request, all(runtime.split_backward for runtime in runtimes))

    def shapes(self) -> list[Shape]:
        """All shapes. Raises PlanError when there is none, with what would divide."""
        reasons: dict[str, None] = {}
        found = [
            Shape(mesh, order, microbatch, self.request.batch // (mesh.axis_size("dp") * microbatch))
            for mesh, order in self._meshes(reasons)
            for microbatch in self._microbatches(mesh.axis_size("dp"), reasons)
        ]
        held = self.request.stages_per_rank or 1
        if all(shape.mesh.axis_size("pp") * held * shape.microbatches > MOST_CELLS for shape in found):
            for shape in found[:1]:
                reasons[
                    f"batch={self.request.batch} makes {shape.microbatches} microbatches of {shape.microbatch}, and a "
                    f"schedule has at most {MOST_CELLS} of stages · microbatches: use a smaller batch, or a larger "
                    f"microbatch"
                ] = None
        found = [s for s in found if s.mesh.axis_size("pp") * held * s.microbatches <= MOST_CELLS]
        if not found:
            raise PlanError(
                "; ".join(list(reasons)[:3])
                or f"the model has {self.units} units, fewer than the stages asked for: use at most pp={self.units}"
            )
        return found

    def _meshes(self, reasons: dict[str, None]) -> Iterator[tuple[Mesh, str]]:
        request, world = self.request, self.cluster.world_size
        given = {name: getattr(request, name) for name in ("pp", "dp", "tp")}
        made = math.prod(v for v in given.values() if v)
        if world % made or (None not in given.values() and made != world):
            said = " · ".join(f"{name} {value}" for name, value in given.items() if value)
            several = f" = {made}" if len([v for v in given.values() if v]) > 1 else ""
            raise PlanError(
                f"{said}{several}, and the cluster has {world} devices: the degrees must "
                f"{'multiply to' if None not in given.values() else 'divide'} {world}; {_nearest_degrees(given, world)}"
            )
        held = request.stages_per_rank or 1
        if given["pp"] and given["pp"] * held > self.units:
            beside = f" × virtual_stages={held}" if held > 1 else ""
            raise PlanError(
                f"pp={given['pp']}{beside} needs more stages than the model's {self.units} units: use at most "
                f"pp={max(1, self.units // held)}"
            )
        node = min(group.devices_per_node for group in self.cluster.groups)
        for pp in _options(given["pp"], world):
            if pp * held > self.units:
                continue
            for tp in _options(given["tp"], world // pp):
                if given["dp"] and pp * tp * given["dp"] != world:
                    continue
                if not given["tp"] and (tp > MAX_TENSOR_DEGREE_IN_NODE or (node % tp and tp > MAX_TENSOR_DEGREE)):
                    continue
                if (reason := self._pointless(pp, world // (pp * tp), tp)) is not None:
                    reasons[reason] = None
                    continue
                seen: set[tuple[str, ...]] = set()
                for order in self._orders():
                    mesh = Mesh.placed(order, pp=pp, dp=world // (pp * tp), tp=tp)
                    lies = tuple(name for name in mesh.names if mesh.axis_size(name) > 1)
                    if lies not in seen:
                        seen.add(lies)
                        yield mesh, order

    def _pointless(self, pp: int, dp: int, tp: int) -> str | None:
        """The reason why degrees leave a pin without effect or exceed a runtime, or None."""
        request, world = self.request, self.cluster.world_size
        degrees = f"pp={pp}, dp={dp} and tp={tp} on {world} devices"
        for axis, degree in (("pp", pp), ("dp", dp), ("tp", tp)):
            lacking = [runtime.framework for runtime in self.runtimes if axis not in runtime.axes]
            if degree > 1 and lacking and getattr(request, axis) is None:
                return f"the {lacking[0]} runtime carries out no {axis}={degree}: use fewer devices (devices=1 …)"
        if request.sequence_parallel and tp == 1:
            return f"sequence_parallel=True has no tensor axis to divide over at {degrees}: take tp above 1"
        if request.shard_group is not None and dp % request.shard_group:
            return f"shard_group={request.shard_group} does not divide dp at {degrees}: use a divisor of {dp}"
        held = request.stages_per_rank or 1
        if pp == 1 and held > 1 and request.schedule in (None, AUTO):
            return f"virtual_stages={held} needs several pipeline ranks, which {degrees} has not: take pp above 1"
        return None

    def _orders(self) -> tuple[str, ...]:
        if self.request.placement_order is not None:
            return (self.request.placement_order,)
        return ORDERS[:1] if self.cluster.nodes == 1 and self.cluster.is_uniform else ORDERS

    def _microbatches(self, dp: int, reasons: dict[str, None]) -> Iterator[int]:
        batch, given = self.request.batch, self.request.microbatch
        if (reason := indivisible(batch, dp, given)) is not None:
            reasons[reason] = None
            return
        if given:
            yield given
            return
        each = batch // dp
        yield from (size for size in range(1, min(MAX_MICROBATCH, each) + 1) if each % size == 0)
        # Small samples, of a recommender say, take large ones: the powers of two beyond, and all of them at once.
        size = 2 * MAX_MICROBATCH
        while size < each:
            if each % size == 0:
                yield size
            size *= 2
        if each > MAX_MICROBATCH:
            yield each

    def policies(self, dp: int) -> Iterator[Policy]:
        """The memory policies for a data degree, the one that saves least first."""
        request = self.request
        levels: tuple[int, ...] = (0, 1, 2, 3) if dp > 1 else (0,)
        if request.shard is not None:
            levels = (request.shard,)
        group = request.shard_group
        if group is not None and group > 1:
            levels = tuple(level for level in levels if level)  # with nothing sharded there is nothing to share
        places = ON_HOST if request.offload else ON_HOST[:1]
        if request.offload_states is not None:
            places = (request.offload_states,)
        for recompute, place in product(self.modes, places):
            divided = (STATES_LEVEL[place],) if place != "none" and request.shard is None else levels
            for level in divided:
                if level != STATES_LEVEL.get(place, level):
                    continue
                policies = [Policy(recompute, level, group, offload_states=place)]
                if level and group is None and request.shard is None:
                    groups = (size for size in SHARD_GROUPS if size < dp and dp % size == 0)
                    policies += [Policy(recompute, level, size, offload_states=place) for size in groups]
                kept = (policy for one in policies for policy in self._residencies(one, dp))
                yield from (policy for policy in kept if self._is_carried_out(policy, dp))

    def _residencies(self, policy: Policy, dp: int) -> Iterator[Policy]:
        """A policy with the choices of what is whole when: what is pinned, else, where parameters are divided, unit by
        unit or stage by stage, and where gradients are, sums after each microbatch or after the last."""
        request = self.request
        if policy.shard < 2:
            if not request.gathered_stages and request.reduce_after != "each":
                yield policy
            return
        gathered: tuple[int | None, ...] = (request.gathered_stages or None,)
        if request.gathered_stages is None and policy.shard == 3 and dp > 1 and request.pp != 1:
            gathered = (None, GATHERED_STAGES)
        elif request.gathered_stages and policy.shard < 3:
            return
        is_searched = request.reduce_after is None and policy.shard == 3 and not request.sums_as_level
        is_searched = is_searched and policy.offload_states == "none"  # whole sums are what the host is to spare
        for stages in gathered:
            for after in REDUCED if is_searched else (request.reduce_after,):
                yield replace(policy, gathered_stages=stages, look_ahead=request.look_ahead, reduce_after=after)

    def _is_carried_out(self, policy: Policy, dp: int) -> bool:
        """Whether all runtimes carry out the parts of a policy that nobody pinned."""
        request = self.request
        recompute = policy.recompute if request.searches_recompute else "none"
        shard = policy.shard if request.shard is None else 0
        group = policy.shard_group if request.shard_group is None else None
        gathered = policy.gathered_stages if request.gathered_stages is None else None
        after = policy.reduce_after if request.reduce_after is None else None
        place = policy.offload_states if request.offload_states is None else "none"
        if place != "none" and not all(place in runtime.states_on_host for runtime in self.runtimes):
            return False
        return all(
            runtime.lack(recompute=recompute, shard=shard, shard_group=group, dp=dp) is None
            and runtime.lack_of_residency(policy.shard, gathered, after) is None
            for runtime in self.runtimes
        )

    def pipelinings(self, pp: int, microbatches: int) -> Iterator[Pipelining]:
        """The schedules that admit the sizes, with their stages per rank."""
        request = self.request
        if pp == 1 and request.schedule in (None, AUTO):
            yield Pipelining("1f1b", request.stages_per_rank or 1)
            return
        held = VIRTUAL_STAGES if request.stages_per_rank is None else (request.stages_per_rank,)
        for virtual_stages in held:
            if pp * virtual_stages > self.units or pp * virtual_stages * microbatches > MOST_CELLS:
                continue
            for name in self.names:
                many = pp * virtual_stages > MANY_STAGES and request.schedule is None
                if many and name not in DEEP_SCHEDULES:
                    continue
                if self.refusal(name, pp, microbatches, virtual_stages) is None:
                    yield Pipelining(name, virtual_stages)

    def go_together(self, recompute: Recompute, pipelining: Pipelining) -> bool:
        """Whether all runtimes carry out a recompute mode under a schedule. Units are computed again for the input
        gradient of a split backward, and what the weight gradient needs of them stays. What is pinned is not
        limited."""
        pinned = not self.request.searches_recompute and self.request.schedule is not None
        split = splits_backward(pipelining.schedule, pipelining.virtual_stages)
        return pinned or all(runtime.goes_with(recompute, split=split) for runtime in self.runtimes)

    def refusal(self, name: str, pp: int, microbatches: int, virtual_stages: int) -> str | None:
        """The reason why a schedule does not admit the sizes, or None."""
        return FAMILIES[name].refusal(Sizes(pp, microbatches, virtual_stages))


@lru_cache(maxsize=64)
def splits_backward(name: str, virtual_stages: int) -> bool:
    """Whether a schedule runs input and weight gradients apart."""
    try:
        sample = Schedule.build(name, ranks=2, microbatches=4, virtual_stages=virtual_stages)
    except ScheduleError:
        return True
    return sample.splits_backward


def _names(request: Request, may_split: bool) -> tuple[str, ...]:
    """The schedules to try: the pinned one, or those that train and that the frameworks can run. With "auto", those
    with split backwards are tried as well, and a schedule is then generated for the best choices."""
    if request.schedule not in (None, AUTO):
        return (str(request.schedule),)
    may_split = may_split or request.schedule == AUTO
    names = []
    for name in sorted(schedule_names(), key=lambda name: (name != "1f1b", name)):
        held = 2 if FAMILIES[name].refusal(Sizes(2, 4, 1)) else 1
        if FAMILIES[name].trains and (may_split or not splits_backward(name, held)):
            names.append(name)
    return tuple(names)


def _options(given: int | None, world: int) -> list[int]:
    if given:
        return [given] if world % given == 0 else []
    return [d for d in range(1, world + 1) if world % d == 0]


def _nearest_degrees(given: dict[str, int | None], world: int) -> str:
    """The divisor of the world nearest to each degree that does not divide it, for an error."""
    said = []
    for name, value in given.items():
        if value and world % value:
            near = min(_options(None, world), key=lambda d: (abs(math.log(d / value)), d))
            said.append(f"nearest for {name}: {near}")
    return ", ".join(said) or f"leave one of them out, and it becomes what is left of {world}"


def require_starts(starts: Sequence[int], stages: int, units: int) -> None:
    """Raise PlanError unless ``starts`` cuts the model's units into that many stages."""
    rising = starts[0] == 0 and all(a < b for a, b in pairwise(starts)) and starts[-1] < units
    if len(starts) != stages or not rising:
        raise PlanError(
            f"stage_starts={list(starts)}: expected {stages} (pp · virtual_stages) unit numbers that rise from 0 "
            f"and stay below the model's {units} units"
        )
