"""What a user asks of the search."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

from shardwright.core.capabilities import Capabilities
from shardwright.core.cost.unit_work import PRECISION_BYTES
from shardwright.core.errors import PlanError, nearest
from shardwright.core.layout.pinned_layout import Pin
from shardwright.core.partition.partitioners import DEFAULT, require_partitioner
from shardwright.core.plan.decision import LossScope, require_schedule
from shardwright.core.schedule import AUTO
from shardwright.core.schedule.catalogue import FAMILIES
from shardwright.core.schedule.family import Family, Sizes
from shardwright.core.tables.memory import OPTIMIZER_STATES, Recompute

MOST = 1 << 40
"""Of any size that is asked for: more samples or ranks than there are, and small enough for sums of 64 bits."""
VIRTUAL_STAGES = (1, 2, 3, 4, 6, 8)
"""Stages per pipeline rank that a search tries."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for: None is searched."""

    batch: int
    pp: int | None = None
    tp: int | None = None
    dp: int | None = None
    microbatch: int | None = None
    virtual_stages: int | None = None
    schedule: str | None = None
    recompute: str = "auto"
    shard: int | None = None
    shard_group: int | None = None
    precision: str | None = None
    optimizer: str = "adamw"
    loss_scope: LossScope | None = None
    stage_starts: tuple[int, ...] | None = None
    sequence_parallel: bool | None = None
    gradient_precision: str | None = None
    layouts: tuple[Pin, ...] = ()
    """Parameters whose layouts are pinned (`core.rules.pins.pins_of`)."""
    placement_order: str | None = None
    partitioner: str = DEFAULT
    offload: bool | None = None
    """Whether units may be offloaded: None, where all runtimes carry it out."""
    devices: int | str | None = None
    """How many to use, "all", or "auto" to search; None: all where nodes are alike, searched where they are not."""
    runtimes: tuple[Capabilities, ...] = ()
    """All of them must be able to carry the plan out; empty: that of the captured graph. What is pinned is planned all
    the same."""

    def unpinned(self, **pins: Any) -> "Request":
        """The same batch, optimizer, layouts and kinds of numbers, for the same runtimes, and nothing pinned beside
        them but ``pins``."""
        return Request(
            batch=self.batch,
            precision=self.precision,
            optimizer=self.optimizer,
            loss_scope=self.loss_scope,
            gradient_precision=self.gradient_precision,
            layouts=self.layouts,
            runtimes=self.runtimes,
            **pins,
        )

    def __post_init__(self) -> None:
        for name in ("batch", "pp", "tp", "dp", "microbatch", "virtual_stages", "shard_group"):
            value = getattr(self, name)
            if value is None and name != "batch":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PlanError(f"{name}={value!r}: expected a whole number of at least 1")
            if value > MOST:
                raise PlanError(f"{name}={value}: expected at most {MOST}")
        self._require_devices()
        self._require_words()
        if not isinstance(self.offload, bool | None):
            raise PlanError(f"offload={self.offload!r}: expected True or False, or None for what the runtimes can do")
        if self.offload and self.recompute != "auto":
            raise PlanError(
                f"offload=True and recompute={self.recompute!r}: which units are kept, recomputed or offloaded is "
                f"searched together; leave out one of them"
            )
        if self.shard is not None and (type(self.shard) is not int or self.shard not in (0, 1, 2, 3)):
            raise PlanError(f"shard={self.shard!r}: expected 0, 1, 2 or 3, or None to search")
        if not isinstance(self.sequence_parallel, bool | None):
            raise PlanError(f"sequence_parallel={self.sequence_parallel!r}: expected True or False, or None to search")
        if self.stage_starts is not None and self.pp is None:
            raise PlanError("stage_starts are given without pp: pin pp as well, there is one entry for each stage")
        if self.schedule is not None:
            require_schedule(self.schedule)
        if self.placement_order is not None and sorted(str(self.placement_order)) != ["D", "P", "T"]:
            raise PlanError(
                f"placement_order={self.placement_order!r}: expected an order of the letters D, P and T, such as PDT; "
                f"the last one's neighbours are neighbouring ranks"
            )
        require_partitioner(self.partitioner)
        self._require_pins_that_go_together()

    def _require_words(self) -> None:
        """Raise PlanError for a word that is none of those that its field may have."""
        options: dict[str, Iterable[str]] = {
            "recompute": ("auto", *get_args(Recompute)),
            "precision": PRECISION_BYTES,
            "gradient_precision": PRECISION_BYTES,
            "optimizer": OPTIMIZER_STATES,
            "loss_scope": get_args(LossScope),
        }
        for name, known in options.items():
            value = getattr(self, name)
            if value is None and (name.endswith("precision") or name == "loss_scope"):
                continue
            if not isinstance(value, str) or value not in known:
                raise PlanError(f"{name}={value!r}: {nearest(str(value), known)}")

    @property
    def stages_per_rank(self) -> int | None:
        """The virtual stages that are pinned, by themselves or by the number of ``stage_starts``; None: searched."""
        if self.stage_starts is not None and self.pp is not None:
            return len(self.stage_starts) // self.pp
        return self.virtual_stages

    def _require_devices(self) -> None:
        given = self.devices
        if isinstance(given, str) and given not in ("all", "auto"):
            raise PlanError(f"devices={given!r}: {nearest(given, ('all', 'auto'))}, or a number")
        if given is not None and not isinstance(given, str) and (type(given) is not int or given < 1):
            raise PlanError(f"devices={given!r}: expected a whole number of at least 1, 'all' or 'auto'")
        degrees = [degree for degree in (self.pp, self.tp, self.dp) if degree is not None]
        made = math.prod(degrees)
        if isinstance(given, int) and (given != made if len(degrees) == 3 else given % made):
            said = " · ".join(f"{name} {v}" for name in ("pp", "tp", "dp") if (v := getattr(self, name)) is not None)
            raise PlanError(
                f"devices={given} and {said}: the degrees must divide the devices, all three make {made}; change "
                f"one of them"
            )

    def _require_pins_that_go_together(self) -> None:
        """Raise PlanError for two pins of which each rules the other out; names both."""
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
        if self.shard == 0 and self.shard_group is not None and self.shard_group > 1:
            raise PlanError(
                f"shard=0 and shard_group={self.shard_group}: nothing is sharded that a group could share; leave out "
                f"shard_group, or take shard=1, 2 or 3"
            )
        if self.shard_group is not None and self.dp is not None and self.dp % self.shard_group:
            raise PlanError(f"shard_group={self.shard_group} does not divide dp={self.dp}: use a divisor of {self.dp}")
        if self.microbatch is not None and self.microbatch > self.batch:
            raise PlanError(
                f"microbatch={self.microbatch} is more than batch={self.batch}: use microbatch={self.batch} or less"
            )
        if self.sequence_parallel and self.tp == 1:
            raise PlanError(
                "sequence_parallel=True and tp=1: the sequence is divided over the tensor axis; leave out one of them, "
                "or take tp above 1"
            )
        if self.dp is not None and self.batch % (self.dp * (self.microbatch or 1)):
            each = self.dp * (self.microbatch or 1)
            by = f"dp · microbatch = {self.dp} · {self.microbatch}" if self.microbatch else f"dp = {self.dp}"
            raise PlanError(
                f"batch={self.batch} is not a multiple of {by}: use batch={max(1, round(self.batch / each)) * each}, "
                f"or other degrees"
            )
        if self.pp == 1 and (self.stages_per_rank or 1) > 1 and self.schedule in (None, AUTO):
            raise PlanError(
                f"pp=1 and virtual_stages={self.stages_per_rank}: one rank alone has nobody to take turns with; leave "
                f"out one of them"
            )
        family = FAMILIES.get(self.schedule or "")
        if family is not None and not family.trains:
            raise PlanError(f"schedule {self.schedule!r} has no backward passes, and a plan trains: take another")
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


def stage_starts_of(given: object) -> tuple[int, ...]:
    """The first unit of every stage, as a tuple. Raises PlanError for what is no list of whole numbers."""
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise PlanError(f"stage_starts={given!r}: expected a list with the first unit of every stage, as [0, 5, 9]")
    starts = tuple(given)
    for start in starts:
        if type(start) is not int or not 0 <= start <= MOST:
            raise PlanError(f"stage_starts={list(starts)}: expected whole numbers of at least 0; given {start!r}")
    if not starts:
        raise PlanError("stage_starts=[]: expected the first unit of every stage, as [0, 5, 9]")
    return starts
