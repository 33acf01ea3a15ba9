"""The decisions of a plan: degrees, microbatches, stages, layouts, schedule and memory policy."""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from typing import Annotated, Any, Literal

from shardwright.core.errors import PlanError, ScheduleError
from shardwright.core.execution import SYSTEMS
from shardwright.core.layout.mesh import Mesh
from shardwright.core.layout.placements import Layout
from shardwright.core.schedule import AUTO, Schedule, schedule_names
from shardwright.core.schedule.catalogue import FAMILIES
from shardwright.core.schedule.checks import require_trains
from shardwright.core.schedule.family import Family, Sizes
from shardwright.core.schedule.files import from_csv
from shardwright.core.schedule.named_schedule import named_schedule
from shardwright.core.schedule.passes.sharding import ReduceAfter, insert_residency
from shardwright.core.schedule.schedule import require_buildable
from shardwright.core.schedule.simulate import Costs
from shardwright.core.tables.memory import Precision, SumPrecision
from shardwright.core.tables.optimizers import OPTIMIZERS
from shardwright.core.values.fields import Amount, Choices, Count, Words, require_fields
from shardwright.core.values.recompute_modes import Recompute, is_computed_again

LossScope = Literal["replica", "global"]
ShardLevel = Annotated[int, Choices((0, 1, 2, 3))]
"""The values divided over the data axis (ZeRO): 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too."""
OffloadStates = Literal["none", "optimizer", "parameters"]
"""What of the state lies on the host: nothing; the optimizer's states with the parameters that it updates and the sums
of gradients; these, and of the parameters all but those of the units at hand."""
STATES_LEVEL = {"optimizer": 2, "parameters": 3}
"""The stage of ZeRO that goes with states on the host: what is there is divided over the replicas too."""
ScheduleName = Annotated[str, Words(lambda: (*schedule_names(), AUTO))]
OptimizerName = Annotated[str, Words(lambda: OPTIMIZERS)]
"""The optimizer whose states are counted."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Everything that was decided. ``batch`` is global, ``microbatch`` is in samples per replica."""

    pp: Count
    dp: Count
    tp: Count
    batch: Count
    microbatch: Count
    schedule: ScheduleName
    stage_starts: tuple[Amount, ...]
    """The first unit of every stage."""
    layouts: tuple[tuple[str, Layout], ...] = ()
    """The layouts, in slot dims (`core.model.structure`), of every parameter slot ``class/role`` that is not
    replicated, and of ``@unit/role`` for a unit that differs from its class."""
    virtual_stages: Count = 1
    recompute: Recompute = "none"
    shard: ShardLevel = 0
    shard_group: Count | None = None
    gathered_stages: Count | None = None
    """The most stages that a rank keeps gathered at once under ``shard=3``, each from before its first action to behind
    its last, as the schedule says; None: every pass gathers and frees unit by unit."""
    look_ahead: Amount | None = None
    """The number of these that may be gathered ahead of their use; None: as many as there is room for."""
    reduce_after: ReduceAfter | None = None
    """Whether a stage's gradients are summed over replicas after each microbatch or after the last; None: after each
    where gradients are divided, else after the last."""
    precision: Precision = "fp32"
    optimizer: OptimizerName = "adamw"
    loss_scope: LossScope | None = None
    """The samples that batch norm and other losses that couple samples see together; None where nobody has said so,
    which means each replica's own."""
    sequence_parallel: bool = False
    """Whether values that tensor ranks hold whole are divided along the sequence (arXiv 2205.05198, section 4.2.2)."""
    gradient_precision: SumPrecision | None = None
    """The precision of the sums of gradients over microbatches; None: that of the parameters."""
    placement_order: str = "PDT"
    """The order of the axes over the ranks; neighbours on the last letter's axis are neighbouring ranks."""
    kept_units: tuple[Amount, ...] = ()
    """The units that keep their activations where others are computed again, because memory has room for them."""
    offloaded_units: tuple[Amount, ...] = ()
    """The units whose activations go to the host's memory and come back, instead of being recomputed."""
    other_recompute: Recompute | None = None
    """What is computed again of the units in ``other_units``; None: there are none such."""
    other_units: tuple[Amount, ...] = ()
    """The units that are computed again in another mode than ``recompute``."""
    activation_loading_horizon: Count = 1
    """The number of offloaded units whose activations are brought back ahead of the one whose backward runs, where
    copies run beside computing."""
    offload_states: OffloadStates = "none"
    """What of the parameters, gradients and optimizer states lies on the host between its uses."""
    bucket_bytes: Amount | None = None
    """Where whole gradients are summed over replicas, the bytes of a bucket in which small ones travel together: so
    many that little of its time is latency. None: as the runtime has it."""
    hierarchical_gathers: bool = False
    """Whether shard groups that have several ranks on each of several nodes gather between the nodes and then within
    each, and sum gradients the other way round (`core.cluster.groups`)."""
    whole_below_bytes: Amount = 0
    """Under shard 3, the size of a unit's parameters on a rank below which they stay whole all through a step: gathers
    of so few bytes cost their latency alone."""
    like: Annotated[str, Words(lambda: SYSTEMS)] | None = None
    """The system whose overlap and kernels the figures are counted for (`core.execution`); None: the captured
    framework's own runtime."""
    fp8_weights: tuple[str, ...] = ()
    """The slots ``class/role`` of the weights whose products are computed in fp8, under that precision."""
    slice_lengths: tuple[Count, ...] = ()
    """The lengths, in tokens and in order, of the slices in which sequences go through the pipeline; none: whole."""
    generated: tuple[str, ...] = ()
    """The actions of every pipeline rank, comma-separated, for a schedule that follows no pattern ("auto")."""

    def __post_init__(self) -> None:
        require_fields(self, PlanError)
        if self.batch % (self.dp * self.microbatch):
            raise PlanError(
                f"batch={self.batch} is not a multiple of dp · microbatch = {self.dp} · {self.microbatch}: "
                f"use batch={near_multiple(self.batch, self.dp * self.microbatch)}, or another microbatch"
            )
        if len(self.stage_starts) != self.stages:
            raise PlanError(f"{len(self.stage_starts)} stage_starts for {self.stages} stages (pp · virtual_stages)")
        if self.stage_starts[0] != 0 or any(
            b <= a for a, b in zip(self.stage_starts[:-1], self.stage_starts[1:], strict=True)
        ):
            raise PlanError(f"stage_starts rise from 0: given {self.stage_starts}")
        if not isinstance(self.placement_order, str) or sorted(self.placement_order) != ["D", "P", "T"]:
            raise PlanError(f"placement_order={self.placement_order!r}: expected an order of the letters D, P and T")
        for name in ("kept_units", "offloaded_units", "other_units"):
            units = getattr(self, name)
            if len(set(units)) != len(units):
                raise PlanError(f"{name}={list(units)}: expected each unit once")
        require_two_modes(self.recompute, self.other_recompute, self.other_units)
        if both := set(self.other_units) & {*self.kept_units, *self.offloaded_units}:
            raise PlanError(f"other_units={list(self.other_units)}: {min(both)} is kept or offloaded as well")
        if self.kept_units and not is_computed_again(self.recompute):
            raise PlanError(
                f"kept_units={list(self.kept_units)} with recompute={self.recompute!r}: they are units that keep their "
                f"activations where others are computed again, in full or but for products"
            )
        if self.offloaded_units and (self.recompute != "full" or set(self.offloaded_units) & set(self.kept_units)):
            raise PlanError(
                f"offloaded_units={list(self.offloaded_units)} with recompute={self.recompute!r} and kept_units="
                f'{list(self.kept_units)}: they are units that are neither kept nor recomputed, under recompute="full"'
            )
        if self.fp8_weights and self.precision != "fp8":
            raise PlanError(
                f"precision={self.precision!r} and {len(self.fp8_weights)} fp8_weights: products in fp8 go with "
                f"precision='fp8'; leave out one of them"
            )
        require_slices(self.slice_lengths, self.schedule, self.gathered_stages, self.reduce_after)
        require_shard_group(self.shard_group, self.shard, self.dp)
        require_states_level(self.offload_states, self.shard)
        require_residency(
            self.shard, self.gathered_stages, self.look_ahead, self.reduce_after, self.virtual_stages, self.schedule
        )
        self._require_runnable_schedule()

    @classmethod
    def unchecked(cls, **values: Any) -> "Decision":
        """A decision of the search's, whose parts go together: it makes thousands, and checks those that it answers
        with. What is not given is as usual."""
        found = object.__new__(cls)
        for name, value in (_usual() | values).items():
            object.__setattr__(found, name, value)
        return found

    def _require_runnable_schedule(self) -> None:
        """Raise PlanError for a schedule that does not train, or does not admit these sizes."""
        try:
            require_buildable(self.stages, self.microbatches)
        except ScheduleError as error:
            raise PlanError(
                f"batch={self.batch}, dp={self.dp} and microbatch={self.microbatch} make {self.microbatches} "
                f"microbatches: {error}"
            ) from error
        if (family := training_family(self.schedule)) is not None:
            reason = family.refusal(Sizes(self.pp, self.microbatches, self.virtual_stages))
            if reason is not None:
                raise PlanError(f"schedule {self.schedule!r} does not admit these sizes: {reason}")
        if bool(self.generated) != (self.schedule == AUTO):
            raise PlanError(
                f"schedule {self.schedule!r} with {len(self.generated)} rows of generated actions: {AUTO!r} has them, "
                f"and no other schedule"
            )
        if self.generated:
            try:
                schedule = generated_schedule(self.generated)
                require_trains(schedule)
            except ScheduleError as error:
                raise PlanError(f"the generated schedule cannot be run: {error}") from error
            sizes = (schedule.ranks, schedule.stages, schedule.microbatches, schedule.slices)
            expected = (self.pp, self.stages, self.microbatches, self.slice_count)
            if sizes != expected:
                raise PlanError(
                    f"the generated schedule has {sizes} ranks, stages, microbatches and slices: expected {expected}"
                )

    @property
    def mesh(self) -> Mesh:
        """The axes over the ranks."""
        return Mesh.placed(self.placement_order, pp=self.pp, dp=self.dp, tp=self.tp)

    def build_schedule(self, costs: Costs | None) -> Schedule:
        """The table of actions, with those that gather stages and reduce gradients where the decision is about stages.
        Raises ScheduleError when the schedule does not admit the sizes."""
        schedule = self.compute_schedule(costs)
        if self.gathered_stages is None and self.reduce_after is None:
            return schedule
        return self.with_residency(schedule)

    def with_residency(self, schedule: Schedule) -> Schedule:
        """A schedule of the plan's stages with the actions that gather them and reduce their gradients. Raises
        ScheduleError where more stages run at once than may be gathered."""
        return insert_residency(schedule, self.gathered_stages, self.look_ahead, reduces_each=self.reduces_each)

    @property
    def reduces_each(self) -> bool:
        """Whether gradients are summed over replicas after each microbatch."""
        return (self.shard >= 2) if self.reduce_after is None else self.reduce_after == "each"

    def compute_schedule(self, costs: Costs | None) -> Schedule:
        """The table of compute actions alone. Raises as `build_schedule`."""
        if self.generated:
            return generated_schedule(self.generated)
        if not FAMILIES[self.schedule].follows_costs:
            return named_schedule(self.schedule, self.pp, self.microbatches, self.virtual_stages, self.slice_count)
        return Schedule.build(
            self.schedule,
            ranks=self.pp,
            microbatches=self.microbatches,
            virtual_stages=self.virtual_stages,
            slices=self.slice_count,
            costs=costs,
        )

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        if self.generated:
            return generated_schedule(self.generated).placement
        return placement_of(self.schedule, self.pp, self.virtual_stages)

    @property
    def stages(self) -> int:
        return self.pp * self.virtual_stages

    @property
    def slice_count(self) -> int:
        """The number of slices of each sequence; 1: whole."""
        return max(1, len(self.slice_lengths))

    @property
    def microbatches(self) -> int:
        return self.batch // (self.dp * self.microbatch)


def require_slices(slices: Sequence[int], schedule: str | None, gathered: int | None, reduce_after: str | None) -> None:
    """Raise PlanError for slices under a schedule that has none, or beside what concerns whole stages. None: not
    known."""
    if len(slices) < 2:
        return
    family, said = FAMILIES.get(schedule or ""), f" of {list(slices)} tokens" if any(slices) else ""
    if schedule is not None and (family is None or not family.takes_slices):
        takers = ", ".join(each.name for each in FAMILIES.values() if each.takes_slices and each.trains)
        raise PlanError(
            f"schedule={schedule!r} and slices{said}: it runs microbatches whole; take one of "
            f"{takers}, or leave out slices"
        )
    for name, value in (("gathered_stages", gathered), ("reduce_after", reduce_after)):
        if value:
            raise PlanError(
                f"{name}={value!r} and slices{said}: stages are gathered and their gradients reduced "
                f"whole; leave out one of them"
            )


def require_shard_group(group: int | None, shard: int | None, dp: int | None) -> None:
    """Raise PlanError for a shard group that the data axis does not have, or that shares nothing. None: not known."""
    if group is None:
        return
    if dp is not None and dp % group:
        raise PlanError(f"shard_group={group} does not divide dp={dp}: use a divisor of {dp}")
    if group > 1 and shard == 0:
        raise PlanError(
            f"shard=0 and shard_group={group}: nothing is sharded that a group could share; leave out shard_group, or "
            f"take shard=1, 2 or 3"
        )


def require_states_level(offload_states: str | None, shard: int | None) -> None:
    """Raise PlanError for states on the host that replicas do not divide as they lie there. None: not known."""
    level = STATES_LEVEL.get(offload_states or "none")
    if level is not None and shard not in (None, level):
        raise PlanError(
            f"offload_states={offload_states!r} and shard={shard}: replicas divide what lies on the host, which is "
            f"shard={level}; leave out shard, or take {level}"
        )


@lru_cache(maxsize=64)
def stages_at_once(schedule: str, virtual_stages: int) -> int:
    """The most stages that a rank runs at once under a schedule: 2 where forwards and backwards overlap."""
    try:
        sample = named_schedule(schedule, 2, 4, virtual_stages)
    except ScheduleError:
        return 1
    return max(len({part.stage for part in action.flat}) for order in sample.table for action in order)


def require_residency(
    shard: int | None, gathered: int | None, ahead: int | None, reduce_after: str | None, virtual_stages: int | None,
    schedule: str | None = None,
) -> None:  # fmt: skip
    """Raise PlanError for stages that are gathered where nothing is freed, for more of them than there are, or fewer
    than run at once, and for gradients that are reduced after each microbatch and yet stay whole. None: not known."""
    if gathered is not None and shard not in (3, None):
        raise PlanError(
            f"gathered_stages={gathered} and shard={shard}: stages are gathered and freed where parameters are "
            f"divided; leave out gathered_stages, or take shard=3"
        )
    if gathered is not None and virtual_stages is not None and gathered > virtual_stages:
        raise PlanError(
            f"gathered_stages={gathered} and virtual_stages={virtual_stages}: a rank has no more stages than that; "
            f"take gathered_stages={virtual_stages} or less"
        )
    if gathered is not None and virtual_stages is not None and schedule in FAMILIES:
        least = stages_at_once(schedule, virtual_stages)
        if gathered < least:
            raise PlanError(
                f"gathered_stages={gathered} and schedule={schedule!r}, under which {least} stages of a rank run at "
                f"once: take gathered_stages={least}"
            )
    if ahead is not None and (gathered is None or ahead >= gathered):
        raise PlanError(
            f"look_ahead={ahead} and gathered_stages={gathered}: expected less than gathered_stages, as the stage that "
            f"runs is one of those gathered"
        )
    if reduce_after == "each" and shard in (0, 1):
        raise PlanError(
            f'reduce_after="each" and shard={shard}: every rank keeps whole gradients, which add up and are summed '
            f"once; leave out reduce_after, or take shard=2 or 3"
        )


def training_family(schedule: str | None) -> Family | None:
    """The family of a schedule; None where it has none. Raises PlanError for one that does not train."""
    family = FAMILIES.get(schedule or "")
    if family is not None and not family.trains:
        raise PlanError(f"schedule {schedule!r} has no backward passes, and a plan trains: take another")
    return family


@lru_cache(maxsize=256)
def placement_of(schedule: str, ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """The pipeline rank of each stage, which does not depend on the number of microbatches; two rounds of the pipeline
    are as many as any schedule needs. Raises ScheduleError for sizes that the schedule does not admit."""
    family = FAMILIES[schedule]
    if (reason := family.refusal(Sizes(ranks, 2 * ranks, virtual_stages))) is not None:
        raise ScheduleError(f"{schedule} does not admit these sizes: {reason}")
    return family.placement(ranks, virtual_stages)


def require_two_modes(recompute: str, other: str | None, units: Sequence[int]) -> None:
    """Raise PlanError for a second mode of recompute without units, for units without it, or for modes in which a unit
    is not computed again."""
    said = f"recompute={recompute!r}, other_recompute={other!r} and other_units={list(units)}"
    if bool(units) != (other is not None):
        raise PlanError(f"{said}: the second mode and its units go together; give both or neither")
    if other is None:
        return
    if other == recompute:
        raise PlanError(f"{said}: the modes are the same; leave the second one out")
    for mode in (recompute, other):
        if not is_computed_again(mode):
            raise PlanError(
                f"{said}: units of both modes are computed again, in full or but for products: take 'full', "
                f"'elementwise', 'alternate' or 'products:…' for {mode!r}"
            )


@lru_cache(maxsize=1)
def _usual() -> dict[str, Any]:
    """The fields of a decision that have usual values."""
    return {field.name: field.default for field in fields(Decision) if field.default is not MISSING}


@lru_cache(maxsize=16)
def generated_schedule(rows: tuple[str, ...]) -> Schedule:
    """The schedule that a plan stores row by row, read and checked once, because equal decisions are made in many
    places. Raises ScheduleError for a schedule that is incomplete or does not end."""
    return from_csv("\n".join(rows), AUTO)


def summarize(decision: Decision) -> str:
    """The decision in one line: ``pp 4 × dp 2 × tp 8, microbatch 1 × 16, 1f1b, recompute none``."""
    parts = [
        f"pp {decision.pp} × dp {decision.dp} × tp {decision.tp}",
        f"microbatch {decision.microbatch} × {decision.microbatches}",
    ]
    if decision.pp > 1:
        parts.append(decision.schedule)
    if decision.slice_count > 1:
        alike = len(set(decision.slice_lengths)) == 1
        said = (
            f"{decision.slice_lengths[0]} tokens" if alike else " + ".join(map(str, decision.slice_lengths)) + " tokens"
        )
        parts.append(f"{decision.slice_count} slices of {said}")
    if decision.virtual_stages > 1:
        parts.append(f"{decision.virtual_stages} virtual stages")
    kept = f" but for {len(decision.kept_units)} units" if decision.kept_units else ""
    parts.append(f"recompute {decision.recompute}{kept}")
    if decision.other_units:
        parts.append(f"{decision.other_recompute} of {len(decision.other_units)} units")
    if decision.offloaded_units:
        parts.append(f"{len(decision.offloaded_units)} units offloaded")
    if decision.offload_states != "none":
        parts.append(f"{decision.offload_states} on the host")
    if decision.sequence_parallel:
        parts.append("sequence parallel")
    parts += sharing_words(decision)
    if decision.placement_order != "PDT":
        parts.append(f"placed {decision.placement_order}")
    if decision.like:
        parts.append(f"as {decision.like} runs it")
    return ", ".join(parts)


def sharing_words(decision: Decision) -> list[str]:
    """What replicas share, in words: ``shard 3 in groups of 4``, ``2 stages gathered``, …; none where they share
    nothing."""
    words = []
    if decision.shard:
        words.append(
            f"shard {decision.shard}" + (f" in groups of {decision.shard_group}" if decision.shard_group else "")
        )
    if decision.hierarchical_gathers:
        words.append("gathered between nodes, then within")
    if decision.gathered_stages:
        ahead = "" if decision.look_ahead is None else f", {decision.look_ahead} ahead"
        words.append(f"at most {decision.gathered_stages} stages gathered{ahead}")
    if decision.shard >= 2 and not decision.reduces_each:
        words.append("gradients summed after the last microbatch")
    return words


def near_multiple(value: int, of: int) -> int:
    """The multiple of ``of`` nearest to ``value``, at least ``of`` itself."""
    return max(1, round(value / of)) * of


def indivisible(batch: int, dp: int, microbatch: int | None) -> str | None:
    """The reason why replicas cannot share a batch, in microbatches of so many samples where these are given, with the
    nearest batch that they can; None where they can."""
    multiple = dp * (microbatch or 1)
    if batch % multiple == 0:
        return None
    by = f"dp · microbatch = {dp} · {microbatch}" if microbatch else f"dp = {dp}"
    return f"batch={batch} is not a multiple of {by}: use batch={near_multiple(batch, multiple)}, or other degrees"
