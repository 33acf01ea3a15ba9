"""A model's units, lowered for one rank of the tensor axis, and the sharded parameters that they run on."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardwright.backends.torch.machine.tensor_axis import Axis
from shardwright.backends.torch.program.program import Context
from shardwright.backends.torch.tensor_parallel.trace import NotReplayableError, Traced
from shardwright.backends.torch.tensor_parallel.unit_call import Lowering
from shardwright.backends.torch.tensor_parallel.unit_layouts import UnitLayout
from shardwright.backends.torch.tensor_parallel.unit_lowering import Lowered, lower_unit, summed_parameters
from shardwright.core.layout.placements import Placement, Replicate

Held = Callable[[int], torch.Tensor]
"""A function from a graph tensor to the parameter, buffer or constant that this rank holds for it now."""


@dataclass(frozen=True, slots=True)
class Replay:
    """All units of a model."""

    traced: Traced
    batch: int
    units: tuple[Lowered, ...]
    leaving: Mapping[int, Placement]
    """Graph tensor → its placement on its way from one unit to others."""
    parameters: Mapping[str, Placement]
    """First name → the placement of the parameter; replicated ones too."""
    summed: frozenset[str]
    """First names of the replicated parameters of which every rank has a term of the gradient."""

    def held(self, model: nn.Module) -> Held:
        """A function that finds the tensors that the units read in the model's modules, as they are at each call."""
        graph = self.traced.graph
        modules = dict(model.named_modules())
        constants = self.traced.constants

        def find(tensor: int) -> torch.Tensor:
            if tensor in constants:
                return constants[tensor]
            path, _, last = graph.tensors[tensor].name.rpartition(".")
            found: torch.Tensor = getattr(modules[path], last)
            return found

        return find

    def parameters_of(self, unit: Lowered) -> tuple[int, ...]:
        """The graph's tensors of the parameters that a unit reads."""
        return tuple(t for t in unit.held if self.traced.graph.tensors[t].role == "parameter")

    def holders(self, model: nn.Module, unit: Lowered) -> list[nn.Module]:
        """The modules whose buffers a unit reads or writes."""
        return self.holders_of(model, unit.held)

    def holders_of(self, model: nn.Module, held: Collection[int]) -> list[nn.Module]:
        """The modules whose buffers are among the graph's tensors ``held``."""
        tensors = self.traced.graph.tensors
        buffers = [t for t in held if tensors[t].role == "buffer" and t not in self.traced.constants]
        paths = dict.fromkeys(tensors[t].name.rpartition(".")[0] for t in buffers)
        return [model.get_submodule(path) for path in paths]


def lower_all(
    traced: Traced,
    layouts: Sequence[UnitLayout],
    axis: Axis,
    batch: int,
    device: torch.device,
    seed: Callable[[Context], None],
    prefix: str = "",
    fp8: Collection[str] = (),
) -> Replay:
    """All units as functions of local tensors, at ``batch`` samples; their names begin with ``prefix``. The products
    with the parameters ``fp8`` are computed in fp8.

    Raises NotReplayableError.
    """
    summed, places = summed_parameters(layouts, traced), places_of(traced, layouts)
    name_of = {p.tensor: p.name for p in traced.graph.parameters}
    narrow = frozenset(tensor for tensor, name in name_of.items() if name in fp8)
    units = tuple(
        lower_unit(
            Lowering(traced, layout, axis, batch, f"{prefix}unit {layout.unit.index}", device, seed, summed, narrow)
        )
        for layout in layouts
    )
    leaving = {t: place for layout in layouts for t, (place, _) in layout.leaves.items()}
    return Replay(traced, batch, units, leaving, places, frozenset(name_of[t] for t in summed))


def places_of(traced: Traced, layouts: Sequence[UnitLayout]) -> dict[str, Placement]:
    """The placement of every parameter, by first name. Raises NotReplayableError for one that is placed in two ways."""
    places: dict[str, Placement] = {p.name: Replicate() for p in traced.graph.parameters}
    name_of = {p.tensor: p.name for p in traced.graph.parameters}
    for layout in layouts:
        for tensor, place in layout.parameters.items():
            if places[name_of[tensor]] not in (place, Replicate()):
                raise NotReplayableError(f"{name_of[tensor]} is placed in two ways: {places[name_of[tensor]]}, {place}")
            places[name_of[tensor]] = place
    return places
