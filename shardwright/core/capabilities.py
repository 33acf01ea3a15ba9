"""What a framework's runtime can do: the solver chooses nothing outside it."""

from dataclasses import dataclass

from shardwright.core.errors import MissingCapabilityError


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

    def require_axes(self, degrees: dict[str, int]) -> None:
        """Raise MissingCapabilityError for a degree above 1 on an axis that the runtime does not realise."""
        for axis, degree in degrees.items():
            if degree > 1 and axis not in self.axes:
                raise MissingCapabilityError(
                    f"the plan has {axis}={degree}, but the {self.framework} runtime of this version runs "
                    f"{' × '.join(self.axes)}: plan again with {axis}=1"
                )
