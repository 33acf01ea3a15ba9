"""A framework's runtime: what it can do, outside which the solver chooses nothing, and how its memory behaves."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.core.errors import MissingCapabilityError, ShardwrightError


@dataclass(frozen=True, slots=True)
class Capabilities:
    """A backend's abilities. It travels inside the captured graph."""

    framework: str
    axes: tuple[str, ...]
    """The plan axes that this version's runtime realises."""
    split_backward: bool
    """Input and weight gradients can run as separate actions."""
    uneven_shards: bool
    partial_layouts: bool
    block_layouts: bool
    """`Split(dim, blocks=…)` is realised as such."""
    point_to_point: bool
    single_controller: bool
    """One process drives all devices."""
    reduce_ops: tuple[str, ...] = ("sum",)
    sequence_parallel: bool = False
    """Values between units can be divided along the sequence on the tensor axis."""
    recomputes: tuple[str, ...] = ("none", "selective", "full")
    """Which activations can be computed again."""
    shard_levels: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO's stages: nothing, optimizer states, gradients, parameters."""
    shard_groups: bool = True
    """Shards can be shared by a part of the data axis."""
    offload: bool = False
    """Activations of units can go to the host's memory and come back."""

    def lack(self, *, recompute: str, shard: int, shard_group: int | None, dp: int) -> str | None:
        """What the runtime lacks for a memory policy, as a user would pin it, or None."""
        if recompute not in self.recomputes:
            return f"recompute={recompute!r}"
        if shard not in self.shard_levels:
            return f"shard={shard}"
        if shard and shard_group not in (None, dp) and not self.shard_groups:
            return f"shard_group={shard_group}"
        return None

    def require_on_device(self, offloaded_units: Sequence[int]) -> None:
        """Raise MissingCapabilityError for units that go to the host where the runtime cannot send them."""
        if offloaded_units and not self.offload:
            raise MissingCapabilityError(
                f"the plan offloads {len(offloaded_units)} units to the host's memory, which the {self.framework} "
                f"runtime of this version does not do: plan again without offload=True"
            )

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
    """How a runtime's memory behaves: which bytes a rank holds, and when. It travels inside the captured graph, beside
    the capabilities.

    Raises:
        ShardwrightError: ``bucket_bytes`` is negative.
    """

    gradients_when_made: bool = False
    """Gradients take memory from the first backward on, and not all through the step."""
    bucket_bytes: int = 0
    """Gradients travel over the data axis in copies, which stay until all are summed; one is made when about so many
    bytes are complete, and at the end of the step. 0: without copies."""
    ties_have_one_home: bool = False
    """Of a parameter that several pipeline ranks use, the one of its first stage alone holds the optimizer's states."""
    stages_are_programs: bool = False
    """A stage's backward is one compiled program, which adds the gradients to their sums when all are there."""
    replicas_norm_apart: bool = False
    """Each replica norms by its own samples, and remembers in fp64 the running statistics that it began a step with."""

    def __post_init__(self) -> None:
        if self.bucket_bytes < 0:
            raise ShardwrightError(f"bucket_bytes={self.bucket_bytes}: expected 0 or more, 0 for no copies")


PLAIN_MEMORY = MemoryTraits()
"""A runtime whose gradients stay all through the step and are summed in place."""
