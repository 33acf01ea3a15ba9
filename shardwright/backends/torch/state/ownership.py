"""The ownership of parameters and buffers by ranks, and the module tree that is kept whole but for its memory.

Every rank keeps the whole tree of modules, under the original names. A tensor that it does not hold is replaced by one
on the meta device, which has a shape and no memory.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn

Slot = tuple[nn.Module, str]


@dataclass(frozen=True, slots=True)
class Placement:
    """The pp coordinates that hold each parameter and each buffer, by first name, in order; the first is its home.

    Attributes:
        modules: those that run each module with extra state, by first path.
    """

    parameters: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, tuple[int, ...]]
    modules: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def holders(self, name: str) -> tuple[int, ...]:
        return self.parameters[name] if name in self.parameters else self.buffers[name]

    def with_needs(self, needs: Mapping[int, Iterable[str]]) -> "Placement":
        """This placement with holders added: for every pp coordinate the names that it turned out to need."""
        parameters, buffers = dict(self.parameters), dict(self.buffers)
        for rank in sorted(needs):
            for name in sorted(needs[rank]):
                store = parameters if name in parameters else buffers
                if rank not in store[name]:
                    store[name] = (*store[name], rank)
        return Placement(parameters, buffers, self.modules)


def place(
    model: nn.Module,
    calls: Sequence[Sequence[str]],
    parameter_stages: Mapping[str, Sequence[int]],
    stage_to_rank: Callable[[int], int],
    ranks: int,
) -> Placement:
    """The placement of parameters and buffers.

    A parameter goes where the plan uses it, and where a module that has it, under any of its names, is called. One that
    nobody uses goes to rank 0; a buffer of a module that no single stage holds goes to every rank. The extra state of a
    module is where the module is called; where no single stage calls it, with its own parameters, or on rank 0.

    Args:
        calls: for every stage, the paths of the modules called on it.
    """

    def stages_of(names: Sequence[str]) -> set[int]:
        return {
            stage
            for stage, paths in enumerate(calls)
            for path in paths
            if any(path == "" or name.startswith(path + ".") for name in names)
        }

    names = parameter_names(model)
    parameters = {}
    for first, all_names in names.items():
        stages = stages_of(all_names)
        for name in all_names:
            stages |= set(parameter_stages.get(name, ()))
        parameters[first] = tuple(dict.fromkeys(stage_to_rank(s) for s in sorted(stages))) or (0,)
    buffers = {}
    for first, all_names in buffer_names(model).items():
        stages = stages_of(all_names)
        buffers[first] = tuple(dict.fromkeys(stage_to_rank(s) for s in sorted(stages))) or tuple(range(ranks))
    modules = {}
    for path, all_paths in extra_state_paths(model).items():
        stages = stages_of([f"{one}." for one in all_paths])
        own = next((first for first in parameters if first.rpartition(".")[0] in all_paths), None)
        called = tuple(dict.fromkeys(stage_to_rank(s) for s in sorted(stages)))
        modules[path] = called or ((0,) if own is None else parameters[own][:1])
    return Placement(parameters, buffers, modules)


def parameter_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """All names of every parameter, by its first name."""
    return _names(model.named_parameters(remove_duplicate=False))


def buffer_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """All names of every buffer, by its first name."""
    return _names(model.named_buffers(remove_duplicate=False))


def extra_state_paths(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """All paths of every module that has extra state (`get_extra_state`), by its first path."""
    first: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            found.setdefault(first.setdefault(id(module), path), []).append(path)
    return {path: tuple(paths) for path, paths in found.items()}


def _names(items: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[str, ...]]:
    first: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    for name, tensor in items:
        found.setdefault(first.setdefault(id(tensor), name), []).append(name)
    return {name: tuple(names) for name, names in found.items()}


def is_hollow(tensor: torch.Tensor) -> bool:
    """Whether a tensor on a device has entries and no memory for them."""
    return not tensor.is_meta and bool(tensor.numel()) and not tensor.untyped_storage().nbytes()


def hollow_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the same shape, without memory."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    made.untyped_storage().resize_(0)
    return made


class Ownership:
    """The tensors of a model on one rank.

    Attributes:
        first_name: the first name of every parameter and buffer, by each of its names.
        placement: None until the model is split.
    """

    def __init__(self, model: nn.Module, rank: int) -> None:
        self.model, self.rank = model, rank
        self.placement: Placement | None = None
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        """The name of every parameter that the model has or had, by id; ids are given again once a tensor is gone."""
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.first_name: dict[str, str] = {}
        self._slots: dict[str, list[Slot]] = {}
        for names in (parameter_names(model), buffer_names(model)):
            for first, all_names in names.items():
                for name in all_names:
                    path, _, last = name.rpartition(".")
                    self.first_name[name] = first
                    self._slots.setdefault(first, []).append((self.modules[path], last))
        # Tuples, since order counts: that of the model.
        self._parameter_order, self._buffer_order = tuple(parameter_names(model)), tuple(buffer_names(model))
        self._held_under: tuple[Placement | None, list[tuple[str, nn.Module, str]]] | None = None
        self._tied_under: tuple[Placement | None, list[tuple[str, tuple[int, ...]]]] | None = None
        self._parameters, self._buffers = frozenset(self._parameter_order), frozenset(self._buffer_order)
        for name in self._parameters:
            self._know(self.tensor(name), name)

    @property
    def parameter_names(self) -> frozenset[str]:
        return self._parameters

    @property
    def buffer_names(self) -> frozenset[str]:
        return self._buffers

    def tensor(self, name: str) -> torch.Tensor:
        module, last = self._slots[name][0]
        tensor: torch.Tensor = getattr(module, last)
        return tensor

    def parameter(self, name: str) -> nn.Parameter:
        tensor = self.tensor(name)
        assert isinstance(tensor, nn.Parameter)
        return tensor

    def holds(self, name: str) -> bool:
        return self.placement is None or self.rank in self.placement.holders(name)

    def local_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank holds, by first name, in the model's order."""
        found = {name: module._parameters[last] for name, module, last in self._held()}
        return cast(dict[str, nn.Parameter], found)

    @property
    def ties(self) -> list[tuple[str, tuple[int, ...]]]:
        """The parameters with several holders: each name with the holders."""
        placement = self.placement
        if self._tied_under is None or self._tied_under[0] is not placement:
            held = {} if placement is None else placement.parameters
            tied = sorted((name, tuple(holders)) for name, holders in held.items() if len(holders) > 1)
            self._tied_under = (placement, tied)
        return self._tied_under[1]

    def _held(self) -> list[tuple[str, nn.Module, str]]:
        """The slots of the parameters that this rank holds; placements are values, so each is gone through once."""
        if self._held_under is None or self._held_under[0] is not self.placement:
            slots = [(name, *self._slots[name][0]) for name in self._parameter_order if self.holds(name)]
            self._held_under = (self.placement, slots)
        return self._held_under[1]

    def local_buffers(self) -> dict[str, torch.Tensor]:
        return {name: self.tensor(name) for name in self._buffer_order if self.holds(name)}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Replace a parameter or buffer in every module that has it."""
        old = self.tensor(name)
        if isinstance(old, nn.Parameter):
            parameter = nn.Parameter(tensor.detach(), requires_grad=old.requires_grad)
            self._know(parameter, name)
            new: torch.Tensor = parameter
            store = "_parameters"
        else:
            new, store = tensor, "_buffers"
        for module, last in self._slots[name]:
            getattr(module, store)[last] = new

    def drop(self, name: str) -> None:
        """Free the memory of a parameter or buffer."""
        old = self.tensor(name)
        if old.is_meta:
            return
        placeholder: torch.Tensor = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device="meta")
        store = "_buffers"
        if isinstance(old, nn.Parameter):
            placeholder, store = nn.Parameter(placeholder, requires_grad=old.requires_grad), "_parameters"
            self._know(placeholder, name)
        for module, last in self._slots[name]:
            getattr(module, store)[last] = placeholder

    def split(self, placement: Placement) -> list[str]:
        """Keep the tensors that this rank holds and drop the rest. Returns the names of those held that have no data
        yet."""
        self.placement = placement
        wanting = []
        for name in self._slots:
            if not self.holds(name):
                self.drop(name)
            elif self.tensor(name).is_meta:
                wanting.append(name)
        return wanting

    def to(self, device: torch.device) -> None:
        """Move the tensors that this rank holds to its device; parameters keep their identity."""
        for name in self._slots:
            tensor = self.tensor(name)
            if tensor.is_meta or tensor.device == device or not self.holds(name):
                continue
            if isinstance(tensor, nn.Parameter):
                tensor.data = tensor.data.to(device)
            else:
                self.put(name, tensor.to(device))

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """The first name of a parameter that the model has or had; None for one of another model."""
        entry = self._known.get(id(parameter))
        return entry[1] if entry is not None and entry[0]() is parameter else None

    def _know(self, parameter: torch.Tensor, name: str) -> None:
        self._known[id(parameter)] = (weakref.ref(parameter), name)
