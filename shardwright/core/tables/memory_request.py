"""What is asked of a rank's memory: the choices that decide the bytes of a parameter, and what is whole when."""

from dataclasses import dataclass, fields, replace
from functools import cached_property

from shardwright.core.cost.op_kinds import PRECISION_BYTES
from shardwright.core.schedule.messages_under_way import UnderWay
from shardwright.core.tables.memory import state_bytes

MANY = 1 << 20
"""The number of entries over which the bytes of one are averaged, because sharded bytes are rounded up."""


@dataclass(frozen=True)
class MemoryRequest:
    """The choices that decide the bytes of a parameter, and the limit of the bytes."""

    limit_bytes: int
    precision: str
    optimizer: str
    shard: int
    ways: int
    """The number of ranks that share the sharded part."""
    gradient_precision: str | None = None
    bucket_bytes: int = 0
    """The bytes of a bucket in which gradients are summed over the data axis (`Decision.bucket_bytes`)."""
    microbatches: int = 1
    """The number of microbatches whose part of the batch stays on a rank all through a step."""
    is_replicated: bool = False
    """Whether there are several replicas."""
    gradients_when_made: bool = False
    """The trait of the same name in `MemoryTraits`."""
    gathers_units: bool = False
    """The trait of the same name in `MemoryTraits`."""
    stages_are_programs: bool = False
    """The trait of the same name in `MemoryTraits`."""
    is_one_program: bool = False
    """Whether the whole step is one compiled program: sums of gradients are divided as the optimizer's states are, and
    a step of one microbatch makes no sums."""
    on_cpus: bool = True
    """Whether devices are CPUs: there the optimizer updates one parameter after the other, and elsewhere all at
    once."""
    gathered_stages: int | None = None
    """The most stages that a rank keeps gathered at once; None: units are gathered one by one."""
    look_ahead: int | None = None
    """The number of these that may be gathered ahead; None: all but one."""
    reduces_each: bool = True
    """Whether divided gradients are summed after each microbatch, so that none adds up whole."""
    whole_below_bytes: int = 0
    """The choice of the same name in `Decision`."""
    frozen_in_fp32: bool = False
    """Whether parameters that are not trained are in fp32 between steps."""
    on_host: bool = False
    """Whether what is sharded lies on the host, with sums of gradients and the optimizer's states."""
    under_way: tuple[UnderWay, ...] = ()
    """The messages of every rank; () takes two on either side of it."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Counted once: memory is looked up by what is asked of it many times."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @property
    def divides_gradients(self) -> bool:
        """Whether gradients are divided while the step runs, and parameters may be."""
        return self.gathers_units and self.shard >= 2

    @cached_property
    def of_passes(self) -> tuple[object, ...]:
        """What the bytes of a stage's passes depend on (`core.tables.gathered_units.stage_passes`)."""
        numbers = self.gradient_width, self.shard, self.ways, self.whole_below_bytes, self.on_cpus
        return self.precision, self.gathered_stages is None, self.reduces_each, self.on_host, *numbers

    @cached_property
    def of_passing(self) -> "MemoryRequest":
        """The request without what the bytes that ranks hold for a while do not depend on."""
        several = min(self.microbatches, 2)
        return replace(self, optimizer="", bucket_bytes=0, microbatches=several, look_ahead=None, under_way=())

    @cached_property
    def without_messages(self) -> "MemoryRequest":
        """The request with two messages on either side of each rank, which does not depend on the schedule."""
        return replace(self, under_way=()) if self.under_way else self

    @cached_property
    def without_buckets(self) -> "MemoryRequest":
        """The request with no bucket of whole gradients."""
        return replace(self, bucket_bytes=0) if self.bucket_bytes else self

    @cached_property
    def of_staying(self) -> "MemoryRequest":
        """The request without what the bytes that stay all through a step do not depend on."""
        several = min(self.microbatches, 2)
        return replace(self, bucket_bytes=0, microbatches=several, look_ahead=None, under_way=())

    @cached_property
    def piles_up(self) -> bool:
        """Whether some rank has more than two messages on one side of it."""
        return any(max(messages) > 2 for messages in self.under_way)

    @property
    def shares_sums(self) -> bool:
        """Whether gradients are summed in shards, call by call, so that none are in buckets of small ones."""
        return self.gathers_units and self.shard > 0 and (self.ways > 1 or self.on_host)

    @property
    def own_share(self) -> float:
        """The part of a sum of gradients that stays on the rank."""
        return 0.0 if self.on_host else 1 / self.ways

    @property
    def coming_share(self) -> float:
        """The share of a bucket that is received beside it while its sum is under way: the shards of all other ranks
        where these are messages, and this rank's shard of the sum where a device scatters it."""
        return 1 - 1 / self.ways if self.on_cpus else 1 / self.ways

    @property
    def masters_alone(self) -> bool:
        """Whether nothing is kept of divided parameters beside their master copies."""
        return self.gathers_units and self.shard == 3 and PRECISION_BYTES[self.precision] < PRECISION_BYTES["fp32"]

    @property
    def sums_from(self) -> int:
        """The stage of ZeRO from which sums of gradients are divided."""
        return 1 if self.is_one_program else 2

    @property
    def gradient_width(self) -> int:
        """The bytes of one entry of a gradient."""
        return PRECISION_BYTES[self.gradient_precision or self.precision]

    @cached_property
    def held_bytes(self) -> float:
        """The bytes of one parameter entry by itself, on one rank."""
        return sum(self._many(trained=0)) / MANY

    @cached_property
    def trained_bytes(self) -> float:
        """The bytes that a trained entry takes beside that: its gradient and optimizer states. Less than none where it
        is held in fewer bytes by so much."""
        return (sum(self._many(trained=MANY)) - sum(self._many(trained=0))) / MANY

    def _many(self, trained: int) -> tuple[int, int, int]:
        return self.state_bytes(MANY, trained, trained)

    def state_bytes(self, elements: int, trained: int, updated: int) -> tuple[int, int, int]:
        """The (parameters, gradients, optimizer) bytes on one rank: see `state_bytes`."""
        found = self._state_bytes(elements, trained, updated)
        if not self.on_host:
            return found
        return (0 if self.shard == 3 else found[0], 0, 0)

    def host_state_bytes(self, elements: int, trained: int, updated: int) -> int:
        """The bytes of state on the host of one rank."""
        if not self.on_host:
            return 0
        parameters, gradients, states = self._state_bytes(elements, trained, updated)
        if self.shard == 3:
            return parameters + gradients + states
        # What steps compute with is on the device; the parameters that are updated are among the states in 16 bits.
        is_whole = PRECISION_BYTES[self.precision] >= PRECISION_BYTES["fp32"]
        return gradients + states + is_whole * -(-trained * PRECISION_BYTES[self.precision] // self.ways)

    def _state_bytes(self, elements: int, trained: int, updated: int) -> tuple[int, int, int]:
        return state_bytes(
            elements,
            self.precision,
            self.optimizer,
            self.shard,
            self.ways,
            self.gradient_precision,
            trained=trained,
            updated=updated,
            sums_from=self.sums_from,
            masters_alone=self.masters_alone,
            frozen_in_fp32=self.frozen_in_fp32,
        )
