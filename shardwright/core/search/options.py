"""The options of a plan, and which of them rule each other out."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from shardwright.core.errors import PlanError
from shardwright.core.execution import SYSTEMS
from shardwright.core.partition.partitioners import DEFAULT, PARTITIONERS
from shardwright.core.partition.tree import MEMORY_WEIGHT
from shardwright.core.plan.decision import (
    LossScope,
    OffloadStates,
    OptimizerName,
    ScheduleName,
    ShardLevel,
    indivisible,
    require_residency,
    require_shard_group,
    require_slices,
    require_states_level,
    require_two_modes,
    training_family,
)
from shardwright.core.plan.training_run import Dollars, TrainingRun, duration_s
from shardwright.core.rules.pins import Asked
from shardwright.core.schedule import AUTO
from shardwright.core.schedule.family import Family, Sizes
from shardwright.core.schedule.passes.sharding import ReduceAfter
from shardwright.core.tables.memory import Precision, SumPrecision
from shardwright.core.values.fields import Amount, Count, Option, Share, Words, fields_of, require_fields
from shardwright.core.values.recompute_modes import NAMED, Recompute, is_computed_again

VIRTUAL_STAGES = (1, 2, 3, 4, 6, 8)
"""Stages per pipeline rank that a search tries."""
SEARCHED = "searched"

Progress = Callable[[int, int], None]
"""A callback that takes (candidates scored, candidates in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a plan. Options that are given are pinned, the rest is searched.

    This is the only list of them: the arguments of `plan()`, the options of ``shardwright plan``, the pins that a plan
    reports and the documentation of all three follow from it.
    """

    batch: Annotated[Count, Option("samples per step, over all replicas")]
    pp: Annotated[Count | None, Option("pipeline degree", SEARCHED)] = None
    tp: Annotated[Count | None, Option("tensor degree", SEARCHED)] = None
    dp: Annotated[Count | None, Option("data degree", SEARCHED)] = None
    microbatch: Annotated[Count | None, Option("samples that one replica runs at a time", SEARCHED)] = None
    virtual_stages: Annotated[Count | None, Option("stages per pipeline rank", SEARCHED)] = None
    schedule: Annotated[
        ScheduleName | None,
        Option(
            'the name of a schedule (`Schedule.build`), or "auto" for one that is generated for the stages\' costs and '
            "the memory left",
            "searched among those that the frameworks' runtimes can run",
        ),
    ] = None
    slices: Annotated[
        Count | Literal["auto"] | None,
        Option(
            "number of slices in which a causal model's sequences go through the pipeline one after the other, of "
            'lengths that make the step shortest; "auto": as many as make it shortest, or 1 where slices do not pay',
            "1, whole sequences",
        ),
    ] = None
    slice_lengths: Annotated[
        Sequence[Annotated[int, Ge(1)]] | None,
        Option(
            "the lengths of these slices in tokens, first tokens first",
            "found for ``slices``; an empty list: whole sequences",
        ),
    ] = None
    recompute: Annotated[
        Recompute | Literal["auto", "products"],
        Option(
            'which activations are computed again in the backward pass; "auto" searches, but for units that the model '
            'itself checkpoints or that are marked, which are computed again; "products" searches for the modules '
            'whose products are kept while all else is computed again. In Python also a policy, "none", "full" or '
            '"offload", for each pattern of module paths, as {"transformer.h.*": "full"}'
        ),
    ] = "auto"
    kept_units: Annotated[
        Sequence[Annotated[int, Ge(0)]] | None,
        Option(
            'units that keep their activations where recompute, "full" or by op, has others computed again',
            'under "auto" and "products" searched, else none',
        ),
    ] = None
    offloaded_units: Annotated[
        Sequence[Annotated[int, Ge(0)]] | None,
        Option(
            'units whose activations go to the host\'s memory and come back under recompute="full"',
            'under "auto" searched where ``offload`` says so, under "full" none',
        ),
    ] = None
    other_recompute: Annotated[
        Recompute | None,
        Option(
            "the mode of recompute of the units in ``other_units``, beside that of the others",
            'searched under recompute="products" where all runtimes mix modes, else none',
        ),
    ] = None
    other_units: Annotated[
        Sequence[Annotated[int, Ge(0)]] | None,
        Option("units that are computed again in the mode ``other_recompute``", "as ``other_recompute``"),
    ] = None
    activation_loading_horizon: Annotated[
        Count | None,
        Option(
            "number of offloaded units whose activations are brought back ahead of the one whose backward runs, on "
            "devices that copy beside computing; all of them take memory at once",
            "1",
        ),
    ] = None
    offload_states: Annotated[
        OffloadStates | None,
        Option(
            'what of the state lies on the host between its uses: "optimizer" the optimizer\'s states, the parameters '
            'that it updates there and the sums of gradients; "parameters" all parameters too, of which the device has '
            "those of the units at hand. Replicas divide what is there: shard 2 and 3",
            "searched where ``offload`` says so, else none",
        ),
    ] = None
    shard: Annotated[
        ShardLevel | None,
        Option(
            "what is divided over the data axis (ZeRO): 1 optimizer states, 2 gradients too, 3 parameters too", SEARCHED
        ),
    ] = None
    shard_group: Annotated[
        Count | None,
        Option("ranks that share a shard", "the whole data axis where shard is given, else searched"),
    ] = None
    gathered_stages: Annotated[
        Amount | None,
        Option(
            "under shard=3 the most stages that a rank keeps whole at once, gathered and freed as stages; 0: unit by "
            "unit in every pass",
            "searched",
        ),
    ] = None
    look_ahead: Annotated[
        Amount | None,
        Option("the most stages that are gathered ahead of their use", "as many as gathered_stages leaves room for"),
    ] = None
    reduce_after: Annotated[
        ReduceAfter | None,
        Option(
            'whether gradients are summed over replicas after "each" microbatch or after the "last"',
            "the last where they stay whole (shard 0 and 1), searched where they are divided",
        ),
    ] = None
    whole_below_bytes: Annotated[
        Amount | None,
        Option(
            "under shard=3, the size in bytes of a unit's parameters on a rank below which they stay whole all through "
            "a step",
            "where the latency of a gather is longer than its bytes take, of units small beside the largest",
        ),
    ] = None
    hierarchical_gathers: Annotated[
        bool | None,
        Option(
            "whether shard groups over several nodes gather between the nodes and then within each, and sum gradients "
            "the other way round",
            "where that is faster",
        ),
    ] = None
    precision: Annotated[
        Precision | None,
        Option(
            "that of parameters and activations; in fp8 they are bf16, and linear products compute in 8 bits",
            "a 16-bit one in which the device is faster than in fp32, else fp32",
        ),
    ] = None
    optimizer: Annotated[OptimizerName, Option("the optimizer whose states are counted")] = "adamw"
    loss_scope: Annotated[
        LossScope | None,
        Option(
            "whether what depends on the batch as a whole is taken over the replica's batch or the global one",
            "the replica's, and a runtime may ask where the loss couples samples",
        ),
    ] = None
    stage_starts: Annotated[
        Sequence[Annotated[int, Ge(0)]] | None, Option("the first unit of every stage, beside pp", SEARCHED)
    ] = None
    sequence_parallel: Annotated[
        bool | None,
        Option(
            "whether what the tensor axis leaves whole is divided along the sequence",
            "searched, within what the frameworks' runtimes can do",
        ),
    ] = None
    gradient_precision: Annotated[
        SumPrecision | None,
        Option("the one in which gradients add up over microbatches", "that of the parameters"),
    ] = None
    layouts: Annotated[
        Asked | None,
        Option(
            "parameters whose layouts on the tensor axis are pinned: a Hugging Face plan (module pattern → style), or "
            "a list of (regular expression, Layout), of which the first that matches counts, and of rules (logical "
            "axis, mesh axis or None) for the axes that Flax parameters name. What the model itself says (marks of "
            "``set_tensor_parallelism``, parameters partitioned by name) is pinned too"
        ),
    ] = None
    placement_order: Annotated[
        str | None,
        Option(
            "how the axes lie on the ranks, an order of D, P and T; the last one's neighbours are neighbouring ranks",
            SEARCHED,
        ),
    ] = None
    partitioner: Annotated[
        Annotated[str, Words(lambda: PARTITIONERS)],
        Option('what cuts the model into stages: "exact", "pareto", "tree" (SageMaker\'s) or "blocks" (RaNNC\'s)'),
    ] = DEFAULT
    memory_weight: Annotated[
        Share | None,
        Option(
            'under partitioner="tree", what memory weighs against time in a module\'s cost: 1 balances memory alone',
            f"{MEMORY_WEIGHT}",
        ),
    ] = None
    frameworks: Annotated[
        Sequence[str] | None,
        Option(
            'whose runtimes must be able to carry the plan out, "torch", "jax" or both. Of what is pinned, a mode of '
            "recompute that one of them lacks is refused, and the rest planned all the same; where nothing that they "
            "carry out fits, the best of all is taken, with a warning",
            "that of the captured model; both are named where a model and its twin are to get one plan",
        ),
    ] = None
    like: Annotated[
        Annotated[str, Words(lambda: SYSTEMS)] | None,
        Option(
            "the system that is to run the plan: the figures are counted for its kernels, and for what it overlaps of "
            "traffic and computing",
            "the captured framework's own runtime",
        ),
    ] = None
    devices: Annotated[
        Count | Literal["all", "auto"] | None,
        Option(
            'how many of the cluster\'s to use, "all", or "auto" for as many as make the fastest plan (whole nodes, in '
            "powers of two, of every kind that there is; parts of the last node). The plan's provenance says which are "
            "left out",
            'all, but of a mixed cluster "auto", as slow nodes may hold up the fast ones',
        ),
    ] = None
    offload: Annotated[
        bool | None,
        Option(
            "whether activations of units that memory has no room for may go to the host's memory and come back, where "
            "that is faster than computing them again",
            "no: a search that may offload takes several times as long",
        ),
    ] = None
    answer: Annotated[
        Literal["simplest", "fastest"],
        Option(
            'the plan that is taken of those that predictions do not tell apart: the "simplest" of those predicted '
            'within a few percent of the fastest, which then stands beside it, or the "fastest"'
        ),
    ] = "simplest"
    headroom: Annotated[
        Share | None,
        Option(
            "share of each device's memory that is left free",
            "by how much predictions of memory were ever measured to be too low, where a plan fits so; otherwise none, "
            "with a warning",
        ),
    ] = None
    tokens: Annotated[
        float | None,
        Ge(0),
        Le(1e30),
        Option("tokens to train on, for the days and the price of the training", "not told"),
    ] = None
    samples: Annotated[Count | None, Option("samples to train on, in the place of tokens", "not told")] = None
    deadline: Annotated[
        float | str | None,
        Option('the time within which all of them are trained on, in days, or as "36h", "10d", "2w"', "no limit"),
    ] = None
    price: Annotated[
        Annotated[float, Ge(0), Le(1e6)] | None,
        Option("US dollars for an hour of one device", "the price in the device's profile"),
    ] = None
    budget: Annotated[Dollars | None, Option("US dollars that the training costs at most", "no limit")] = None
    progress: Progress | None = field(default=None, compare=False, repr=False)
    """A callback that takes (candidates scored, candidates in all)."""

    def __post_init__(self) -> None:
        require_fields(self, PlanError)
        for name in ("stage_starts", "kept_units", "offloaded_units", "other_units", "slice_lengths"):
            if (units := getattr(self, name)) is not None:
                object.__setattr__(self, name, tuple(units))
        if self.stage_starts == ():
            raise PlanError("stage_starts=[]: expected the first unit of every stage, as [0, 5, 9]")
        if self.other_units and self.searches_recompute:
            raise PlanError(
                f"other_units={list(self.other_units)} with recompute={self.recompute!r}: the modes are searched "
                f"together; pin recompute as well"
            )
        for name in ("kept_units", "offloaded_units", "other_units"):
            if getattr(self, name) == () and self.searches_recompute:
                raise PlanError(
                    f"{name}=[] with recompute={self.recompute!r}: these units are searched together with the modes; "
                    f"pin recompute as well, or leave {name} out"
                )
        require_two_modes(self.recompute, self.other_recompute, self.other_units or ())
        is_again = is_computed_again(self.recompute) and self.recompute != NAMED
        for name, may in (("kept_units", is_again), ("offloaded_units", self.recompute == "full")):
            if getattr(self, name) and not may:
                raise PlanError(
                    f"{name}={list(getattr(self, name))} with recompute={self.recompute!r}: they are named among those "
                    f"that are recomputed; pin recompute='full' as well"
                )
        self._require_devices()
        self._require_slices()
        if self.offload and self.recompute != "auto":
            raise PlanError(
                f"offload=True and recompute={self.recompute!r}: which units are kept, recomputed or offloaded is "
                f"searched together; leave out one of them"
            )
        if (self.activation_loading_horizon or 1) > 1 and not (self.offload or self.offloaded_units):
            raise PlanError(
                f"activation_loading_horizon={self.activation_loading_horizon} and nothing is offloaded: leave it out, "
                f"or take offload=True or offloaded_units"
            )
        if self.stage_starts is not None and self.pp is None:
            raise PlanError("stage_starts are given without pp: pin pp as well, there is one entry for each stage")
        if self.placement_order is not None and sorted(str(self.placement_order)) != ["D", "P", "T"]:
            raise PlanError(
                f"placement_order={self.placement_order!r}: expected an order of the letters D, P and T, such as PDT; "
                f"the last one's neighbours are neighbouring ranks"
            )
        self._require_pins_that_go_together()
        self._require_a_training()

    @property
    def asks_for_slices(self) -> bool:
        """Whether sequences are to go through the pipeline in slices, or may."""
        return self.slices not in (None, 1) or bool(self.slice_lengths)

    @property
    def training_run(self) -> TrainingRun:
        """What was said about the training."""
        return TrainingRun(
            self.tokens or 0.0,
            self.samples or 0,
            None if self.deadline is None else duration_s(self.deadline, "deadline"),
            self.budget,
        )

    @property
    def names_units(self) -> bool:
        """Whether some units are kept, offloaded or computed again in a mode of their own, by number."""
        return bool(self.kept_units or self.offloaded_units or self.other_units)

    @property
    def searches_recompute(self) -> bool:
        """Whether the mode of recompute is searched for."""
        return self.recompute in ("auto", NAMED)

    def recomputes_what_memory_asks_for(self, recompute: Recompute) -> bool:
        """Whether under a policy's mode no more units are recomputed than have no room; else all, or none."""
        return recompute == "full" and self.recompute == "auto"

    @property
    def given(self) -> dict[str, Any]:
        """The options that were asked for, by name: all that differ from their defaults."""
        defaults = {each.name: each.default for each in fields(Options)}
        asked = [each.name for each in fields_of(Options) if each.option is not None]
        return {name: value for name in asked if (value := getattr(self, name)) != defaults[name]}

    @property
    def stages_per_rank(self) -> int | None:
        """The pinned virtual stages, given directly or by the number of ``stage_starts``; None: searched."""
        if self.stage_starts is not None and self.pp is not None:
            return len(self.stage_starts) // self.pp
        return self.virtual_stages

    def _require_slices(self) -> None:
        """Raise PlanError for slices under a schedule that runs sequences whole."""
        lengths = self.slice_lengths
        if lengths and self.slices not in (None, len(lengths)):
            raise PlanError(
                f"slices={self.slices!r} and slice_lengths={list(lengths)}, which are {len(lengths)}: leave out slices"
            )
        if self.asks_for_slices and self.slices != "auto":
            require_slices(lengths or (0, 0), self.schedule, self.gathered_stages or None, self.reduce_after)
            if self.sequence_parallel:
                raise PlanError(
                    "sequence_parallel=True and slices: a sequence is divided over the tensor axis, or goes through "
                    "the pipeline in slices; leave out one of them"
                )

    def _require_a_training(self) -> None:
        """Raise PlanError for a headroom that leaves nothing, and for a deadline or a budget of nothing."""
        if self.headroom is not None and self.headroom >= 1:
            raise PlanError(f"headroom={self.headroom:g} leaves nothing: expected a share below 1, as 0.05 for 5%")
        if self.tokens is not None and not self.tokens > 0:
            raise PlanError(f"tokens={self.tokens!r}: expected a number above 0")
        if self.tokens is not None and self.samples is not None:
            raise PlanError(f"tokens={self.tokens:g} and samples={self.samples}: leave out one of them")
        run = self.training_run
        for name in ("deadline", "budget"):
            if getattr(self, name) is not None and not run.is_sized:
                raise PlanError(
                    f"{name}={getattr(self, name)!r} of what training? Say how much there is to train on as well: "
                    f"tokens=1e12, or samples="
                )

    def _require_devices(self) -> None:
        given = self.devices
        degrees = [degree for degree in (self.pp, self.tp, self.dp) if degree is not None]
        made = math.prod(degrees)
        if isinstance(given, int) and (given != made if len(degrees) == 3 else given % made):
            said = " · ".join(f"{name} {v}" for name in ("pp", "tp", "dp") if (v := getattr(self, name)) is not None)
            raise PlanError(
                f"devices={given} and {said}: the degrees must divide the devices, all three make {made}; change "
                f"one of them"
            )

    def _require_pins_that_go_together(self) -> None:
        """Raise PlanError for two pins that rule each other out, naming both."""
        if self.stage_starts is not None and self.pp is not None:
            held = self.virtual_stages or max(1, len(self.stage_starts) // self.pp)
            if len(self.stage_starts) != self.pp * held:
                raise PlanError(
                    f"stage_starts={list(self.stage_starts)} has {len(self.stage_starts)} entries: expected "
                    f"{self.pp * held} (pp · virtual_stages = {self.pp} · {held})"
                )
        if self.stage_starts is not None and self.partitioner != DEFAULT:
            raise PlanError(
                f"stage_starts={list(self.stage_starts)} and partitioner={self.partitioner!r}: the cut is given, and "
                f"there is none to find; leave out one of them"
            )
        if self.memory_weight is not None and self.partitioner != "tree":
            raise PlanError(
                f"memory_weight={self.memory_weight} and partitioner={self.partitioner!r}: only the module tree weighs "
                f'memory against time; add partitioner="tree", or leave it out'
            )
        require_shard_group(self.shard_group, self.shard, self.dp)
        require_states_level(self.offload_states, self.shard)
        require_residency(
            self.shard,
            self.gathered_stages or None,
            self.look_ahead,
            self.reduce_after,
            self.stages_per_rank,
            self.schedule,
        )
        if self.microbatch is not None and self.microbatch > self.batch:
            raise PlanError(
                f"microbatch={self.microbatch} is more than batch={self.batch}: use microbatch={self.batch} or less"
            )
        if self.sequence_parallel and self.tp == 1:
            raise PlanError(
                "sequence_parallel=True and tp=1: the sequence is divided over the tensor axis; leave out one of them, "
                "or take tp above 1"
            )
        if self.dp is not None and (said := indivisible(self.batch, self.dp, self.microbatch)) is not None:
            raise PlanError(said)
        if self.pp == 1 and (self.stages_per_rank or 1) > 1 and self.schedule in (None, AUTO):
            raise PlanError(
                f"pp=1 and virtual_stages={self.stages_per_rank}: one rank alone has nobody to take turns with; leave "
                f"out one of them"
            )
        family = training_family(self.schedule)
        if family is not None and self.virtual_stages is not None and self.pp is None:
            samples = [Sizes(pp, pp * self.virtual_stages, self.virtual_stages) for pp in (2, 4)]
            if all(family.refusal(sizes) for sizes in samples):
                raise PlanError(
                    f"schedule={self.schedule!r} and virtual_stages={self.virtual_stages}: {family.refusal(samples[0])}"
                )
        if family is not None and None not in (self.pp, self.dp, self.microbatch) and self.pp and self.pp > 1:
            microbatches = self.batch // ((self.dp or 1) * (self.microbatch or 1))
            self._require_admitted(family, self.pp, microbatches)

    def _require_admitted(self, family: Family, pp: int, microbatches: int) -> None:
        held = [self.virtual_stages] if self.virtual_stages is not None else list(VIRTUAL_STAGES)
        reasons = [family.refusal(Sizes(pp, microbatches, virtual)) for virtual in held]
        if all(reasons):
            said = [reason for reason in reasons if reason and "virtual_stages=" not in reason]
            raise PlanError(f"schedule {self.schedule!r} at pp={pp}: {(said or reasons)[0]}")
