"""What a user asks of the search."""

from dataclasses import dataclass

from shardwright.core.cost.work import PRECISION_BYTES
from shardwright.core.errors import PlanError, nearest
from shardwright.core.memory import OPTIMIZER_STATES
from shardwright.core.pin import Pin
from shardwright.core.plan import LossScope
from shardwright.core.schedule import schedule_names


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for: None is searched."""

    batch: int
    pp: int | None = None
    tp: int | None = None
    dp: int | None = None
    microbatch: int | None = None
    virtual_stages: int = 1
    schedule: str = "1f1b"
    recompute: str = "auto"
    shard: int | None = None
    shard_group: int | None = None
    precision: str | None = None
    optimizer: str = "adamw"
    loss_scope: LossScope = "replica"
    stage_starts: tuple[int, ...] | None = None
    sequence_parallel: bool | None = None
    gradient_precision: str | None = None
    layouts: tuple[Pin, ...] = ()
    """Parameters whose layouts are pinned (`core.pins.pins_of`)."""

    def __post_init__(self) -> None:
        for name in ("batch", "pp", "tp", "dp", "microbatch", "virtual_stages", "shard_group"):
            value = getattr(self, name)
            if value is None and name not in ("batch", "virtual_stages"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PlanError(f"{name}={value!r}: expected a whole number of at least 1")
        if self.recompute not in ("auto", "none", "selective", "full"):
            options = ("auto", "none", "selective", "full")
            raise PlanError(f"recompute={self.recompute!r}: {nearest(str(self.recompute), options)}")
        if self.shard not in (None, 0, 1, 2, 3):
            raise PlanError(f"shard={self.shard!r}: expected 0, 1, 2 or 3, or None to search")
        if self.precision is not None and self.precision not in PRECISION_BYTES:
            raise PlanError(f"precision={self.precision!r}: {nearest(str(self.precision), PRECISION_BYTES)}")
        if self.gradient_precision is not None and self.gradient_precision not in PRECISION_BYTES:
            given = str(self.gradient_precision)
            raise PlanError(f"gradient_precision={given!r}: {nearest(given, PRECISION_BYTES)}")
        if not isinstance(self.sequence_parallel, bool | None):
            raise PlanError(f"sequence_parallel={self.sequence_parallel!r}: expected True or False, or None to search")
        if self.stage_starts is not None and self.pp is None:
            raise PlanError("stage_starts are given without pp: pin pp as well, there is one entry for each stage")
        if self.optimizer not in OPTIMIZER_STATES:
            raise PlanError(f"optimizer={self.optimizer!r}: {nearest(str(self.optimizer), OPTIMIZER_STATES)}")
        if self.schedule not in schedule_names():
            raise PlanError(f"no schedule is named {self.schedule!r}: {nearest(str(self.schedule), schedule_names())}")
