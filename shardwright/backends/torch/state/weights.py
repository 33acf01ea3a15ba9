"""Initial weights for a model on the meta device: each rank makes only the tensors that it holds."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from shardwright.backends.torch.state.ownership import Ownership, buffer_names, parameter_names
from shardwright.backends.torch.state.saved_parts import SavedWeights
from shardwright.backends.torch.state.weight_files import FileWeights, opened, read_part, shape_in
from shardwright.core.checkpoint.boxes import Part
from shardwright.core.errors import PlanError, ShardwrightError, nearest
from shardwright.core.layout.placements import Split

Weights = str | Path | Mapping[str, torch.Tensor] | Callable[[nn.Module], Any]


class Cutter(Protocol):
    """A cutter of weights for the tensor axis. All ranks of the axis call it, in the same order."""

    def keep(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """The part that this rank keeps of a whole tensor, given by name."""

    def keep_read(self, name: str, read: "ReadShard") -> torch.Tensor:
        """The part that this rank keeps of a tensor, given by name, of which every rank can read its own."""

    def anywhere(self, here: bool) -> bool:
        """Whether ``here`` is true on any rank."""


ReadShard = Callable[[Split | None, int, int], torch.Tensor]
"""A function that reads a shard of a tensor: how it is split, into how many shards, and the number of the shard."""


def materialize(
    ownership: Ownership,
    wanting: Sequence[str],
    weights: Weights | None,
    device: torch.device,
    seed: int,
    cutter: Cutter | None = None,
) -> None:
    """Give data to the tensors that this rank holds on the meta device.

    Args:
        wanting: first names of parameters and buffers that have none.
        weights: a file or folder as `weight_files.opened` takes them, of which each rank reads its part; a state dict;
            or a function that is called with every module that owns such tensors, children first, as by
            ``nn.Module.apply``; random numbers that it draws depend on the seed and the module's name, not on the
            split.
        cutter: cuts each tensor as soon as it has its data, so that no more than one is there whole.

    Raises:
        ShardwrightError: no weights were given, or the file does not exist or holds no state dict.
        PlanError: the weights lack a name (the nearest is named), or a shape differs.
    """
    if not wanting:
        return
    if weights is None:
        raise ShardwrightError(
            f"the model is on the meta device ({len(wanting)} tensors without data, {wanting[0]} first): pass "
            f"sw.DistributedModel(model, weights=...) a file or folder, a state dict or an init function"
        )
    if callable(weights) and not isinstance(weights, Mapping):
        if cutter is not None and _initialize(ownership, wanting, weights, device, seed, cutter):
            return
        _initialize(ownership, wanting, weights, device, seed, None)
        if cutter is not None:
            for name in wanting:
                ownership.put(name, cutter.keep(name, ownership.tensor(name).detach()))
        return
    source = NamedWeights(ownership, weights)
    persistent = set(ownership.model.state_dict(keep_vars=True))
    left = []
    for name in wanting:
        if name in ownership.buffer_names and name not in persistent and name not in source:
            left.append(name)
            continue
        expected = ownership.tensor(name)
        if cutter is not None and source.is_in_files:
            ownership.put(name, cutter.keep_read(name, partial(source.shard, name, expected, device)))
            continue
        # A copy: the tensor may be a view of a mapped file or belong to the caller.
        copied = source.shard(name, expected, device, None, 1, 0)
        ownership.put(name, copied if cutter is None else cutter.keep(name, copied))
    _rebuild_buffers(ownership, left, device)


class NamedWeights:
    """Weights that can be read one by one: those of files, of a state dict, or of a deferred initialisation."""

    def __init__(self, ownership: Ownership, weights: str | Path | Mapping[str, torch.Tensor]) -> None:
        self._weights: Mapping[str, torch.Tensor] = opened(weights)
        self._known = set(self._weights)
        self._aliases = parameter_names(ownership.model) | buffer_names(ownership.model)
        self._shapes = {name: ownership.tensor(name).shape for name in self._aliases}
        self._prefix = _base_prefix(ownership.model)
        self.is_in_files = isinstance(self._weights, FileWeights | SavedWeights)
        """Whether every rank can read its own part of each."""

    def __contains__(self, name: str) -> bool:
        return any(alias in self._known for alias in self._names(name))

    def _names(self, name: str) -> Iterator[str]:
        """The names under which a tensor may be there: those that the model has for it, and those of a model with or
        without a head, in the files of a Hugging Face model of the other kind."""
        yield from self._aliases[name]
        for alias in self._aliases[name] if self._prefix else ():
            yield alias.removeprefix(self._prefix) if alias.startswith(self._prefix) else self._prefix + alias

    def require(self, name: str) -> str:
        """The weights' own name for a first name. Raises PlanError where they lack it, the nearest is named; and where
        its shape differs."""
        given = next((alias for alias in self._names(name) if alias in self._known), None)
        if given is None:
            raise PlanError(f"the weights have no {name!r}: {_few(nearest(name, self._known))}")
        expected = self._shapes[name]
        if isinstance(self._weights, FileWeights | SavedWeights) and shape_in(self._weights, given) != expected:
            raise _other_shape(given, shape_in(self._weights, given), expected)
        return given

    def read(self, name: str) -> torch.Tensor:
        """The tensor of a first name. Raises PlanError as `require`, and where its shape differs."""
        given = self.require(name)
        tensor, expected = self._weights[given], self._shapes[name]
        if tensor.shape != expected:
            raise _other_shape(given, tensor.shape, expected)
        return tensor

    def shard(
        self, name: str, like: torch.Tensor, device: torch.device, split: Split | None, ways: int, coordinate: int
    ) -> torch.Tensor:
        """A shard of the tensor of a first name, in memory of its own, in the dtype of ``like`` and, where it is whole,
        the order of its memory. Raises as `read`."""
        if not self.is_in_files and split is None:
            return self.read(name).detach().to(device=device, dtype=like.dtype, copy=True)
        given, shape = self.require(name), list(self._shapes[name])
        if split is not None:
            shape[split.dim] //= ways
        made = torch.empty_like(like, device=device) if split is None else None
        into = torch.empty(shape, dtype=like.dtype, device=device) if made is None else made
        part = Part(tuple(self._shapes[name]), split, ways, coordinate, tuple(into.stride()))
        read_part(self._weights, given, part, into.detach())
        return into.detach()

    def read_part(self, name: str, part: Part, into: torch.Tensor) -> None:
        """Copy a part of the tensor of a first name to where it belongs; see `weight_files.read_part`. Raises as
        `read`."""
        if not self.is_in_files:
            self.read(name)
        read_part(self._weights, self.require(name), part, into)


def require_named(ownership: Ownership, weights: Mapping[str, torch.Tensor]) -> None:
    """Raise PlanError where weights lack a tensor that the model has no data for, or one in files has another shape,
    whichever rank will hold it."""
    source = NamedWeights(ownership, weights)
    persistent = set(ownership.model.state_dict(keep_vars=True))
    for name in (*sorted(ownership.parameter_names), *sorted(ownership.buffer_names)):
        if ownership.tensor(name).is_meta and (name in ownership.parameter_names or name in persistent):
            source.require(name)


def _other_shape(name: str, given: torch.Size, expected: torch.Size) -> PlanError:
    return PlanError(f"the weights have {name!r} of shape {tuple(given)}: expected {tuple(expected)}")


def _base_prefix(model: nn.Module) -> str:
    """The prefix that the names of a Hugging Face model with a head have, and those of one without do not; empty for
    other models."""
    prefix = getattr(model, "base_model_prefix", "")
    return f"{prefix}." if isinstance(prefix, str) and prefix else ""


def _initialize(
    ownership: Ownership,
    wanting: Sequence[str],
    init: Callable[[nn.Module], Any],
    device: torch.device,
    seed: int,
    cutter: Cutter | None,
) -> bool:
    """Make the data by an init function, one module after the other. False when, on any rank, the call of an outer
    module wrote to a tensor that was cut already, or failed: the tensor must be whole for that."""
    own: dict[str, list[str]] = {}
    for name in wanting:
        own.setdefault(name.rpartition(".")[0], []).append(name)
    shapes = {name: torch.empty_like(ownership.tensor(name), device="meta") for name in wanting}
    if cutter is None:
        for name in wanting:
            ownership.put(name, torch.empty_like(shapes[name], device=device))
    cut: dict[str, str] = {}
    state = torch.get_rng_state()
    try:
        for path in _children_first(ownership.model):
            if path not in own:
                continue
            if cutter is not None:
                for name in own[path]:
                    ownership.put(name, torch.empty_like(shapes[name], device=device))
            text = hashlib.blake2b(f"{seed}/init/{path}".encode(), digest_size=8).digest()
            torch.manual_seed(int.from_bytes(text, "big") >> 1)
            inside = [name for name in cut if not path or name.startswith(f"{path}.")]
            failed = False
            try:
                with torch.no_grad():
                    init(ownership.modules[path])
            except (RuntimeError, IndexError):
                if not inside:
                    raise
                failed = True
            if cutter is None:
                continue
            written = failed or any(_mark(ownership.tensor(name)) != cut[name] for name in inside)
            if inside and cutter.anywhere(written):
                for name in wanting:
                    ownership.put(name, shapes[name])
                return False
            for name in own[path]:
                ownership.put(name, cutter.keep(name, ownership.tensor(name).detach()))
                cut[name] = _mark(ownership.tensor(name))
    finally:
        torch.set_rng_state(state)
    return True


def _mark(tensor: torch.Tensor) -> str:
    """A text that changes when somebody writes to a tensor; its version does not count writes by ``.data``."""
    entries = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    if not entries.dtype.is_floating_point:
        return str(int(entries.sum()))
    norm = torch.linalg.vector_norm(entries, dtype=torch.float64)
    return f"{float(entries.sum(dtype=torch.float64))} {float(norm)}"  # as text, in which nan is equal to nan


def _rebuild_buffers(ownership: Ownership, names: Sequence[str], device: torch.device) -> None:
    """Make buffers that no checkpoint holds (rotary frequencies, masks) by the model's own initialisation."""
    if not names:
        return
    init = getattr(ownership.model, "_init_weights", None)
    modules = dict.fromkeys(name.rpartition(".")[0] for name in names)
    made = {}
    for name in names:
        ownership.put(name, torch.zeros_like(ownership.tensor(name), device=device))
        made[name] = (ownership.tensor(name), ownership.tensor(name)._version)
    if callable(init):
        for path in modules:
            if next(ownership.modules[path].parameters(recurse=False), None) is None:
                init(ownership.modules[path])
    missing = [
        name for name, (tensor, version) in made.items()
        if ownership.tensor(name) is tensor and tensor._version == version
    ]  # fmt: skip
    if missing:
        raise ShardwrightError(
            f"buffers that checkpoints do not hold have no data: {', '.join(missing[:5])}. Build the model with its "
            f"buffers on a real device (sw.delay_param_initialization()), or pass an init function as weights"
        )


def _children_first(model: nn.Module) -> list[str]:
    """Module paths in the order of ``nn.Module.apply``."""
    found: list[str] = []

    def visit(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            visit(child, f"{path}.{name}" if path else name)
        found.append(path)

    visit(model, "")
    return list(dict.fromkeys(found))


def _few(text: str, most: int = 300) -> str:
    return text if len(text) <= most else text[:most] + " …"
