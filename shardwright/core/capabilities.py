"""The runtime of a framework: its abilities, outside which the solver chooses nothing, and the traits of its memory."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shardwright.core.errors import MissingCapabilityError, ShardwrightError
from shardwright.core.values.recompute_modes import is_computed_again, kind_of


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of a backend. They travel inside the captured graph."""

    framework: str
    axes: tuple[str, ...]
    """The plan axes that this version's runtime realises."""
    split_backward: bool
    """Whether input and weight gradients can run as separate actions."""
    uneven_shards: bool
    partial_layouts: bool
    block_layouts: bool
    """Whether `Split(dim, blocks=…)` is realised as such."""
    point_to_point: bool
    single_controller: bool
    """Whether one process drives all devices."""
    reduce_ops: tuple[str, ...] = ("sum",)
    sequence_parallel: bool = False
    """Whether values between units can be divided along the sequence on the tensor axis."""
    recomputes: tuple[str, ...] = ("none", "selective", "full")
    """The recompute policies that the runtime carries out."""
    shard_levels: tuple[int, ...] = (0, 1, 2, 3)
    """The stages of ZeRO that the runtime carries out: nothing, optimizer states, gradients, parameters."""
    shard_groups: bool = True
    """Whether shards can be shared by a part of the data axis."""
    exchanges_as_planned: bool = False
    """Whether the plan says when parameters are gathered and gradients summed: whole stages kept gathered while they
    run, small units all through a step, divided gradients summed once a step, buckets of a given size. Else a compiler
    does as it likes."""
    mixes_recompute: bool = False
    """Whether units can be computed again in two modes in one plan."""
    fp8: bool = False
    """Whether linear products can compute in fp8."""
    fp8_by_module: bool = False
    """Whether these are the products of linear layers alone: of modules that hold the weight."""
    offload: bool = False
    """Whether activations of units can go to the host's memory and come back."""
    states_on_host: tuple[str, ...] = ()
    """What of the state can lie on the host between its uses, as in `Decision.offload_states`."""
    recomputes_in_halves: bool = False
    """Whether units can be computed again, or be on the host, under schedules whose backward is split: the forward runs
    again, or the activations come back, for the input gradient, and the weight gradient is made later of what that
    leaves."""
    hosts_are_alike: bool = False
    """Whether every host of a run must have as many devices as the others."""
    not_in_slices: tuple[str, ...] = ()
    """What the runtime does not do slice by slice of a sequence: ``windows`` (shifts, convolutions, cumulative sums),
    ``experts`` (rows of tokens in the order of their experts), ``sinks`` (scores of attention beside those of keys)."""

    def lack_of_hosts(self, devices_per_host: Collection[int]) -> str | None:
        """The reason why the runtime does not run on hosts with so many devices, with the fix, or None."""
        sizes = sorted(set(devices_per_host))
        if not self.hosts_are_alike or len(sizes) < 2:
            return None
        return (
            f"the {self.framework} runtime takes as many devices of every host, and the cluster has hosts with "
            f"{' and '.join(map(str, sizes))} devices: plan for hosts of one size (without devices=, a plan takes the "
            f"fastest of them whose number of devices the degrees divide), or describe {sizes[0]} devices of each"
        )

    def lack(self, *, recompute: str, shard: int, shard_group: int | None, dp: int) -> str | None:
        """The part of a memory policy that the runtime lacks, as a user would pin it, or None."""
        if kind_of(recompute) not in self.recomputes:
            return f"recompute={recompute!r}"
        if shard not in self.shard_levels:
            return f"shard={shard}"
        if shard and shard_group not in (None, dp) and not self.shard_groups:
            return f"shard_group={shard_group}"
        return None

    def lack_of_modes(self, other_recompute: str | None) -> str | None:
        """The second mode of recompute that the runtime lacks, as a user would pin it, or None."""
        if other_recompute is None or (self.mixes_recompute and kind_of(other_recompute) in self.recomputes):
            return None
        return f"other_recompute={other_recompute!r}"

    def require_modes(self, other_recompute: str | None) -> None:
        """Raise MissingCapabilityError for a second mode of recompute that the runtime does not carry out."""
        if (lack := self.lack_of_modes(other_recompute)) is not None:
            known = [mode for mode in self.recomputes if is_computed_again(mode)]
            ways = f"does not: it has {', '.join(known)}" if self.mixes_recompute else "does so in one mode"
            raise MissingCapabilityError(
                f"the plan has {lack}, in which some of its units are computed again, and the {self.framework} runtime "
                f"of this version {ways}; plan again without it"
            )

    def lack_of_pins(self, recompute: str, other_recompute: str | None) -> str | None:
        """The reason why the runtime does not carry out pinned modes of recompute, with the fix, or None."""
        if kind_of(recompute) in self.recomputes:
            lack = self.lack_of_modes(other_recompute)
        else:
            lack = f"recompute={recompute!r}"
        if lack is None:
            return None
        known = ", ".join(map(repr, self.recomputes))
        mixed = "two of them in one plan" if self.mixes_recompute else "one of them in a plan"
        return f"{lack}: the {self.framework} runtime of this version has the modes {known}, and {mixed}"

    def goes_with(self, recompute: str, *, split: bool) -> bool:
        """Whether the runtime carries out a recompute policy under a schedule, whose backward may be ``split``."""
        return recompute == "none" or not split or self.recomputes_in_halves

    def lack_of_residency(self, shard: int, gathered_stages: int | None, reduce_after: str | None) -> str | None:
        """The choice of what is whole when that the runtime lacks, as a user would pin it, or None."""
        if self.exchanges_as_planned:
            return None
        if gathered_stages is not None:
            return f"gathered_stages={gathered_stages}"
        return f"reduce_after={reduce_after!r} with shard={shard}" if shard >= 2 and reduce_after == "last" else None

    def require_residency(self, shard: int, gathered_stages: int | None, reduce_after: str | None) -> None:
        """Raise MissingCapabilityError for stages kept gathered, or for divided gradients that are summed once a step,
        where the runtime does neither."""
        if (lack := self.lack_of_residency(shard, gathered_stages, reduce_after)) is not None:
            raise MissingCapabilityError(
                f"the plan has {lack}, which the {self.framework} runtime of this version does not do: plan again "
                f"without it"
            )

    def require_on_device(self, offloaded_units: Sequence[int]) -> None:
        """Raise MissingCapabilityError for units that go to the host where the runtime cannot send them."""
        if offloaded_units and not self.offload:
            raise MissingCapabilityError(
                f"the plan offloads {len(offloaded_units)} units to the host's memory, which the {self.framework} "
                f"runtime of this version does not do: plan again without offload=True"
            )

    def lack_of_host(self, offloaded_units: Sequence[int], offload_states: str) -> str | None:
        """What lies on the host that the runtime does not keep there, as a user would pin it, or None."""
        if offloaded_units and not self.offload:
            return "offload=True"
        return None if offload_states in ("none", *self.states_on_host) else f"offload_states={offload_states!r}"

    def require_states(self, offload_states: str) -> None:
        """Raise MissingCapabilityError for state on the host where the runtime keeps none there."""
        if offload_states not in ("none", *self.states_on_host):
            raise MissingCapabilityError(
                f"the plan has offload_states={offload_states!r}, and the {self.framework} runtime of this version "
                f"keeps its state on the device: plan again without it"
            )

    def lack_of_precision(self, precision: str) -> str | None:
        """The reason why the runtime does not compute in a precision, with the fix, or None."""
        if precision != "fp8" or self.fp8:
            return None
        return (
            f"precision='fp8': the {self.framework} runtime of this version does not compute products in 8 bits; plan "
            f"for 'bf16'"
        )

    def require_precision(self, precision: str) -> None:
        """Raise MissingCapabilityError for a precision in which the runtime does not compute."""
        if (lack := self.lack_of_precision(precision)) is not None:
            raise MissingCapabilityError(lack)

    def require_axes(self, degrees: dict[str, int]) -> None:
        """Raise MissingCapabilityError for a degree above 1 on an axis that the runtime does not realise."""
        for axis, degree in degrees.items():
            if degree > 1 and axis not in self.axes:
                raise MissingCapabilityError(
                    f"the plan has {axis}={degree}, but the {self.framework} runtime of this version runs "
                    f"{' × '.join(self.axes)}: plan again with {axis}=1"
                )


@dataclass(frozen=True, slots=True)
class MemoryTraits:
    """The behaviour of a runtime's memory: the bytes that a rank holds, and when. It travels inside the captured graph,
    beside the capabilities.

    Raises:
        ShardwrightError: ``bucket_bytes`` is negative.
    """

    gradients_when_made: bool = False
    """Whether gradients take memory only from the first backward on, and not all through the step."""
    bucket_bytes: int = 0
    """The largest size of a bucket, in which small gradients travel over the data axis, and which is there from the
    first of them on. Large ones are summed where they are, and with 0 all are."""
    bucket_bytes_on_cpu: int = 0
    """The same where devices are CPUs, whose copies are dear and whose messages are cheap."""
    ties_have_one_home: bool = False
    """Whether the rank of its first stage alone holds the optimizer's states of a parameter that several pipeline ranks
    use."""
    stages_are_programs: bool = False
    """Whether a stage's backward is one compiled program, whose operands stay until it is done, and which adds the
    gradients to their sums when all are there."""
    adds_in_turn_on_cpu: bool = False
    """Whether such a program on CPUs adds each gradient to its sum before it makes the next one."""
    replicas_norm_apart: bool = False
    """Whether each replica norms by its own samples, and remembers in fp64 the running statistics that it began a step
    with."""

    gathers_units: bool = False
    """Whether sharded parameters are gathered, and their gradients summed, unit by unit while a pass runs."""
    gradients_in_fp32: bool = False
    """Whether gradients of 16 bits add up in fp32, whatever a plan says."""

    updates_make_values: bool = False
    """Whether optimizers make values for a while, such as roots of second moments: of one parameter after the other
    where devices are CPUs, of all parameters at once elsewhere (`core.tables.optimizers`)."""

    added_from_entries: int = 0
    """The entries of a weight from which a linear layer adds its gradient to the sum of earlier microbatches as it
    makes it, where it is not exchanged; 0: it never does."""
    slices_draw_whole: bool = False
    """Whether each slice of a sequence draws the masks of dropout for all of it, and keeps its part in the precision of
    the values."""

    def __post_init__(self) -> None:
        for name in ("bucket_bytes", "bucket_bytes_on_cpu"):
            if (size := getattr(self, name)) < 0:
                raise ShardwrightError(f"{name}={size}: expected 0 or more, 0 for no buckets")

    def bucket_bytes_on(self, kind: str) -> int:
        """The size of a bucket on devices of a kind, ``cpu`` or another."""
        return self.bucket_bytes_on_cpu if kind == "cpu" else self.bucket_bytes


PLAIN_MEMORY = MemoryTraits()
"""The traits of a runtime whose gradients stay all through the step and are summed in place."""
