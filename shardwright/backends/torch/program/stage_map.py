"""The part of a plan that the runtime uses: the schedule, the work of each stage, and what calls keep."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from shardwright.backends.torch import CAPABILITIES
from shardwright.core.errors import MissingCapabilityError, ScheduleError, ShardwrightError
from shardwright.core.plan.decision import LossScope, OffloadStates
from shardwright.core.plan.plan import Plan
from shardwright.core.schedule import Schedule
from shardwright.core.schedule.actions import Action
from shardwright.core.schedule.checks import require_runnable
from shardwright.core.schedule.passes.slices_as_stages import slices_as_stages
from shardwright.core.values.recompute_modes import Mode

Call = tuple[str, int]
"""A module path and the occurrence of its call."""


@dataclass(frozen=True, slots=True)
class StageMap:
    """The part of a plan that the runtime uses: the schedule, and the calls and parameters of each stage."""

    schedule: Schedule
    calls: tuple[tuple[tuple[str, int], ...], ...]
    parameter_stages: Mapping[str, tuple[int, ...]]
    policies: Mapping[Call, Mode] = field(default_factory=dict)
    """The calls that do not keep what their backward reads, and what becomes of it."""
    loss_scope: LossScope = "replica"
    """The samples that batch norm sees together: `backends.torch.data_parallel.batch_norm`."""
    plan: Plan | None = None
    """The plan, from which the tensor axis has its layouts."""
    shard: int = 0
    """The stage of ZeRO: what replicas share between steps."""
    shard_group: int | None = None
    """The number of replicas that share; None: all of them."""
    hierarchical: bool = False
    """Whether these gather between the nodes and then within each, where they lie so."""
    offload_states: OffloadStates = "none"
    """What of the state lies on the host between its uses."""

    def __post_init__(self) -> None:
        require_runnable(self.schedule)
        if self.schedule.slices != (1 if self.plan is None else self.plan.decision.slice_count):
            raise ScheduleError(
                f"{self.schedule.name} runs each microbatch in {self.schedule.slices} slices of its sequence, whose "
                f"lengths a plan says: plan with slices=, or build the schedule with slices=1"
            )
        if len(self.calls) != self.schedule.stages:
            raise ScheduleError(
                f"{self.schedule.name} has {self.schedule.stages} stages, and the model is cut into {len(self.calls)}: "
                f"build the schedule for that number"
            )

    @classmethod
    def of_plan(cls, plan: Plan, schedule: Schedule | None = None) -> "StageMap":
        """The stage map of a plan. Raises PlanError when the plan is not bound to torch, MissingCapabilityError for a
        plan that this runtime cannot run."""
        CAPABILITIES.require_axes({"tp": plan.decision.tp})
        _require_policies(plan)
        schedule = schedule or plan.build_schedule()
        calls = tuple(tuple((c.path, c.occurrence) for c in held) for held in plan.stage_calls("torch"))
        return cls(
            schedule, calls, plan.parameter_stages("torch"), policies_of(plan),
            plan.decision.loss_scope or "replica", plan, plan.decision.shard, plan.decision.shard_group,
            plan.decision.hierarchical_gathers, plan.decision.offload_states,
        )  # fmt: skip

    @classmethod
    def whole(
        cls, schedule: Schedule, *, loss_scope: LossScope = "replica", shard: int = 0,
        shard_group: int | None = None, hierarchical: bool = False,
    ) -> "StageMap":  # fmt: skip
        """The unsplit model under a schedule of one rank: one stage, the call of the model itself.

        Raises ScheduleError for a schedule of several stages.
        """
        return cls(
            schedule, ((("", 0),),), {}, loss_scope=loss_scope, shard=shard, shard_group=shard_group,
            hierarchical=hierarchical,
        )  # fmt: skip

    @property
    def steps_schedule(self) -> Schedule:
        """The schedule by which steps run: with slices, each slice of a stage is a stage of its own."""
        return slices_as_stages(self.schedule)

    @property
    def stage_of_call(self) -> dict[tuple[str, int], int]:
        return {call: stage for stage, calls in enumerate(self.calls) for call in calls}


def _require_policies(plan: Plan) -> None:
    decision = plan.decision
    for asked, name, other in (
        (decision.tp > 1 and decision.sequence_parallel, "sequence_parallel=True", "with sequence_parallel=False"),
        (decision.precision == "fp8", "precision='fp8'", "in another precision"),
    ):
        if decision.slice_count > 1 and asked:
            raise MissingCapabilityError(
                f"the plan has {name} and {decision.slice_count} slices of each sequence, and the torch runtime of "
                f"this version carries out one of them: plan again {other}, or with slices=1"
            )
    CAPABILITIES.require_on_device(decision.offloaded_units)
    CAPABILITIES.require_modes(decision.other_recompute)
    CAPABILITIES.require_states(decision.offload_states)
    CAPABILITIES.require_residency(decision.shard, decision.gathered_stages, decision.reduce_after)
    if decision.recompute == "selective":
        raise MissingCapabilityError(
            "the plan has recompute='selective', and the torch runtime of this version cannot tell the products of "
            "attention from the rest of a unit: plan again with recompute='elementwise', which keeps all products, "
            "'full' or 'none'"
        )


def policies_of(plan: Plan) -> dict[Call, Mode]:
    """The calls of the units that do not keep what their backward reads, and what becomes of it."""
    bound = zip(plan.binding("torch").units, plan.unit_modes, strict=True)
    return {(call.path, call.occurrence): mode for unit, mode in bound if mode != "none" for call in unit.calls}


def recomputed(policies: Mapping[Call, Mode]) -> dict[Call, Mode]:
    """Those of the calls whose forward runs again in the backward pass."""
    return {call: mode for call, mode in policies.items() if mode != "offload"}


def offloaded(policies: Mapping[Call, Mode]) -> frozenset[Call]:
    """Those of the calls whose activations are on the host until the backward pass."""
    return frozenset(call for call, mode in policies.items() if mode == "offload")


def keep_microbatches(schedule: Schedule, count: int) -> Schedule:
    """The schedule with its first ``count`` microbatches alone, in the same order: the remaining actions wait for no
    other.

    Raises ShardwrightError for more microbatches than the schedule has.
    """
    if count == schedule.microbatches:
        return schedule
    if count > schedule.microbatches:
        raise ShardwrightError(f"{count} microbatches were given: the plan has {schedule.microbatches}")

    def kept(action: Action) -> Iterator[Action]:
        parts = tuple(part for part in action.flat if part.microbatch is None or part.microbatch < count)
        if len(parts) == len(action.flat):
            yield action
        else:
            yield from parts

    table = tuple(tuple(part for action in order for part in kept(action)) for order in schedule.table)
    arguments = tuple((name, count if name == "microbatches" else value) for name, value in schedule.arguments)
    return replace(schedule, microbatches=count, table=table, arguments=arguments)
