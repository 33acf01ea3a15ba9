"""This rank's part of the state of training, as boxes of whole tensors: what it writes to a checkpoint, and reads.

Of several ranks that hold the same, one writes it. A parameter, and the states of an optimizer that are cut as it is,
lie as `core.checkpoint.boxes.Part` says: a shard along the tensor axis, and of that a run of entries along the data
axis.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.state.flat_shards import entries_of
from shardwright.backends.torch.state.ownership import Ownership, is_hollow
from shardwright.backends.torch.state.parts import Parts
from shardwright.core.checkpoint.boxes import Box, Part, Place
from shardwright.core.checkpoint.folder import Piece
from shardwright.core.checkpoint.saved_tensors import SavedState
from shardwright.core.checkpoint.writers import writers
from shardwright.core.errors import CheckpointError, MissingCapabilityError

DTYPES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
}  # fmt: skip
"""The name that a checkpoint's files have for each dtype."""
NUMBER = "#"
"""The end of the name of a state that is a number of Python's and no tensor."""
ON_DEVICE = ("fused", "capturable")
"""The options of torch's optimizers that keep the number of steps on the device."""
MODEL = "model"
"""The part of a checkpoint with parameters and buffers."""
_OF_NAME = {name: dtype for dtype, name in DTYPES.items()}
_AS_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Held:
    """What this rank holds of a parameter, and whether it is the one to write it."""

    part: Part
    places: list[Place]
    is_writer: bool

    @property
    def begins(self) -> bool:
        """Whether this is the part with the tensor's first entry: its holder writes what a parameter has once."""
        return any(not any(place.box.start) for place in self.places)

    @property
    def is_whole(self) -> bool:
        """Whether the whole tensor is held."""
        return sum(place.box.entries for place in self.places) == Box.whole(self.part.shape).entries


class SavedParts:
    """The parts of a model's parameters on one rank, as a checkpoint has them."""

    def __init__(self, ownership: Ownership, parts: Parts, bound: BoundMesh, *, are_alike: bool = True) -> None:
        """``are_alike``: whether replicas have the same values; else the first one writes them all."""
        self._are_alike = are_alike
        self.ownership, self.parts = ownership, parts
        self._stage, self._bound = bound.coordinate("pp"), bound
        held = [name for name in sorted(ownership.parameter_names) if ownership.holds(name)]
        self.of: dict[str, Held] = {}
        """What this rank holds of each parameter, by first name."""
        sizes = {name: ownership.tensor(name).nbytes for name in held if self._is_home(name)}
        kinds: dict[tuple[bool, bool], dict[str, int]] = {}
        for name, size in sizes.items():
            kinds.setdefault((self._is_split(name), self._is_flat(name)), {})[name] = size
        mine = {
            name
            for (split, flat), named in kinds.items()
            for name, copy in writers(named, self._copies(split, flat)[0]).items()
            if copy == self._copies(split, flat)[1]
        }
        for name in held:
            part = self._part(name)
            self.of[name] = Held(part, part.places(), name in mine)
        self.writes_buffers = not any(bound.coordinate(axis) for axis in bound.mesh.names if axis != "pp")

    def _is_home(self, name: str) -> bool:
        placement = self.ownership.placement
        return self._stage == (0 if placement is None else placement.holders(name)[0])

    def _is_split(self, name: str) -> bool:
        return self.parts.tensor is not None and name in self.parts.tensor.places

    def _is_flat(self, name: str) -> bool:
        flat = self.parts.flat
        return flat is not None and flat.is_shared and name in flat.group_of

    def _copies(self, is_split: bool, is_flat: bool) -> tuple[int, int]:
        """The number of ranks that hold the same part, and this one's number among them."""
        replicas, replica = self._bound.size("dp"), self._bound.coordinate("dp")
        if is_flat:
            assert self.parts.flat is not None
            replicas, replica = replicas // self.parts.flat.data.ways, replica // self.parts.flat.data.ways
        if not self._are_alike:
            replicas, replica = (1, replica)
        if is_split:
            return replicas, replica
        return replicas * self._bound.size("tp"), replica * self._bound.size("tp") + self._bound.coordinate("tp")

    def _part(self, name: str) -> Part:
        tensor, flat = self.parts.tensor, self.parts.flat
        own = self.ownership.tensor(name)
        shape = tuple(self.parts.whole_shape(name, own.shape))
        split = tensor.places[name] if tensor is not None and self._is_split(name) else None
        ways, coordinate = (tensor.axis.size, tensor.axis.coordinate) if tensor is not None and split else (1, 0)
        if not self._is_flat(name):
            return Part(shape, split, ways, coordinate, tuple(_dense(own.detach()).stride()))
        assert flat is not None
        group = flat.group_of[name]
        index = group.names.index(name)
        span = group.layout.span(index, flat.data.coordinate)
        return Part(shape, split, ways, coordinate, tuple(group.places[index][1]), span)

    def model_pieces(self) -> Iterator[Piece]:
        """The pieces of parameters, and of the buffers that state dicts hold, that this rank writes."""
        for name, held in self.of.items():
            if held.is_writer and Box.whole(held.part.shape).entries:
                yield from self.pieces(name, name, self.ownership.tensor(name))
            elif held.is_writer:
                yield empty_piece(name, self.ownership.tensor(name), held.part.shape)
        kept = set(self.ownership.model.state_dict(keep_vars=True))
        for name in sorted(self.ownership.buffer_names):
            is_mine = self.writes_buffers and self._is_home(name) and self.ownership.holds(name)
            if is_mine and name in kept:
                yield whole_piece(name, self.ownership.tensor(name))

    # Writing -----------------------------------------------------------------------------------------------------

    def pieces(self, label: str, name: str, tensor: torch.Tensor) -> Iterator[Piece]:
        """The pieces of a tensor that is cut as a parameter is, under a label of its own."""
        held = self.of[name]
        for place in held.places:
            yield Piece(label, name_of(tensor.dtype, label), held.part.shape, place.box,
                        partial(_bytes_of, tensor, held.part, place))  # fmt: skip

    def state_pieces(self, optimizer: torch.optim.Optimizer, names: Sequence[str]) -> Iterator[Piece]:
        """The pieces of an optimizer's states of parameters, labelled ``exp_avg/NAME``.

        Raises MissingCapabilityError: a state of a part has a shape of its own, and so cannot be put together;
        CheckpointError: a state is no tensor and no number.
        """
        for name in names:
            held = self.of.get(name)
            if held is None or not held.is_writer or not held.places:
                continue
            parameter = self.ownership.parameter(name)
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                label, entry = f"{key}/{name}", value
                if isinstance(value, bool | int | float):
                    dtype = torch.float64 if isinstance(value, float) else None
                    label, entry = f"{key}{NUMBER}/{name}", torch.tensor(value, dtype=dtype)
                if not isinstance(entry, torch.Tensor):
                    raise CheckpointError(
                        f"the state {key!r} of {name} in {type(optimizer).__name__} is of {type(value).__name__}: a "
                        f"checkpoint holds tensors and numbers"
                    )
                if entry.dim() and entry.shape == parameter.shape:
                    yield from self.pieces(label, name, entry)
                elif not entry.dim() or held.is_whole:
                    if held.begins:
                        yield whole_piece(label, entry)
                else:
                    raise MissingCapabilityError(
                        f"the optimizer's {key!r} of {name} has shape {tuple(entry.shape)} on this rank, whose part of "
                        f"the parameter has {tuple(parameter.shape)}: only states of the parameter's own shape can be "
                        f"put together"
                    )

    # Reading -----------------------------------------------------------------------------------------------------

    def read(self, reader: SavedState, label: str, name: str, into: torch.Tensor) -> None:
        """Read this rank's part of a tensor that is cut as a parameter is. Raises CheckpointError where its shape is
        another, or a file is damaged."""
        held, saved = self.of[name], reader.tensor(label)
        if saved.shape != held.part.shape:
            raise CheckpointError(f"{reader} has {label} of shape {saved.shape}: here it is {held.part.shape}")
        flat = _memory_of(into, held.part)
        for place in held.places:
            fill(reader, label, place.box, _view(flat, place))
        if flat.data_ptr() != into.data_ptr():
            into.detach().copy_(flat.as_strided(into.shape, _strides_like(into, held.part)))

    def read_states(
        self, reader: SavedState, section: str, optimizer: torch.optim.Optimizer, names: Sequence[str]
    ) -> None:
        """Read this rank's part of an optimizer's states. Raises as `read`, and MissingCapabilityError for a state of a
        shape of its own where only a part of its parameter is held."""
        saved: dict[str, list[str]] = {}
        for label in reader.names(section):
            key, _, name = label.partition("/")
            saved.setdefault(name, []).append(key)
        for name in names:
            held = self.of.get(name)
            if held is None:
                continue
            parameter = self.ownership.parameter(name)
            if parameter.is_meta or is_hollow(parameter):
                continue
            optimizer.state.pop(parameter, None)
            states: dict[str, Any] = {}
            for key in saved.get(name, []) if held.places else []:
                label = f"{section}/{key}/{name}"
                if key.endswith(NUMBER):
                    states[key.removesuffix(NUMBER)] = read_whole(reader, label).item()
                    continue
                record = reader.tensor(label)
                dtype = dtype_of(record.dtype, label)
                if record.shape and record.shape == held.part.shape:
                    states[key] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                    self.read(reader, label, name, states[key])
                elif not record.shape or held.is_whole:
                    entry = read_whole(reader, label)
                    stays = key == "step" and not any(_group_of(optimizer, parameter).get(o) for o in ON_DEVICE)
                    states[key] = entry if stays else entry.to(parameter.device)
                else:
                    raise MissingCapabilityError(
                        f"{label} has shape {record.shape}, and this rank holds a part of a parameter of shape "
                        f"{held.part.shape}: load it under a plan that does not cut the parameter"
                    )
            if states:
                optimizer.state[parameter] = states


def empty_piece(label: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> Piece:
    """A tensor without entries as a piece."""
    return Piece(label, name_of(tensor.dtype, label), shape, Box.whole(shape), lambda: np.empty(0, dtype=np.uint8))


def _group_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Mapping[str, Any]:
    found = (group for group in optimizer.param_groups if any(parameter is one for one in group["params"]))
    return next(found, {})


def whole_piece(label: str, tensor: torch.Tensor, place: str = "") -> Piece:
    """A whole tensor as a piece. ``place`` names it in errors. Raises CheckpointError for one that is not dense."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise CheckpointError(f"{place or label} is a tensor of {tensor.layout} on {tensor.device}: make it dense")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    shape = tuple(tensor.shape)
    return Piece(label, name_of(tensor.dtype, place or label), shape, Box.whole(shape), lambda: _as_bytes(tensor))


def read_whole(reader: SavedState, label: str) -> torch.Tensor:
    """A whole tensor on the CPU. Raises CheckpointError where a file is damaged."""
    record = reader.tensor(label)
    found = torch.empty(record.shape, dtype=dtype_of(record.dtype, label))
    fill(reader, label, Box.whole(record.shape), found)
    return found


def fill(reader: SavedState, label: str, box: Box, into: torch.Tensor) -> None:
    """Copy a box of a saved tensor into a tensor of the box's shape, in whatever dtype and place that is."""
    saved = dtype_of(reader.tensor(label).dtype, label)
    width = _AS_NUMBERS[saved.itemsize]
    for shared, data in reader.boxes(label, box):
        view = into[shared.inside(box)]
        numbers = _numbers(data, width)
        if view.device.type == "cpu" and view.dtype is saved:
            np.copyto(view.detach().view(width).numpy(), numbers)
        else:
            view.detach().copy_(torch.from_numpy(np.array(numbers)).view(saved))


def name_of(dtype: torch.dtype, label: str) -> str:
    """The name of a dtype in a checkpoint. Raises CheckpointError for one that its files cannot hold."""
    if dtype not in DTYPES:
        raise CheckpointError(f"{label} is of {dtype}: the files of a checkpoint hold {', '.join(DTYPES.values())}")
    return DTYPES[dtype]


def dtype_of(name: str, label: str) -> torch.dtype:
    """The dtype of a name. Raises CheckpointError where torch has none."""
    if name not in _OF_NAME:
        raise CheckpointError(f"{label} is of {name}, a dtype that torch does not have")
    return _OF_NAME[name]


def _numbers(data: NDArray[np.uint8], width: torch.dtype) -> NDArray[Any]:
    kind = {torch.uint8: np.uint8, torch.int16: np.int16, torch.int32: np.int32, torch.int64: np.int64}[width]
    found: NDArray[Any] = data.view(kind)[..., 0]
    return found


def _as_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The entries of a tensor, row by row, as bytes."""
    here = tensor.detach().to("cpu").contiguous().reshape(-1)
    numbers: NDArray[Any] = here.view(_AS_NUMBERS[here.dtype.itemsize]).numpy()
    return numbers.view(np.uint8)


def _bytes_of(tensor: torch.Tensor, part: Part, place: Place) -> NDArray[np.uint8]:
    return _as_bytes(_view(_memory_of(tensor.detach(), part), place))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy whose entries lie beside each other."""
    order = sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride()[dim], dim))
    expected = 1
    for dim in reversed(order):
        if tensor.shape[dim] > 1 and tensor.stride(dim) != expected:
            return tensor.contiguous()
        expected *= tensor.shape[dim]
    return tensor


def _memory_of(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """The entries of a part in the order of its memory: a view where the tensor lies so, else a copy."""
    if part.span is None or tensor.dim() == len(part.strides or ()) != 1:
        return entries_of(_dense(tensor.detach()), part.strides)
    return entries_of(tensor.detach().contiguous())


def _strides_like(tensor: torch.Tensor, part: Part) -> tuple[int, ...]:
    return (part.strides or ()) if tensor.dim() == len(part.strides or ()) else (1,)


def _view(flat: torch.Tensor, place: Place) -> torch.Tensor:
    return flat.as_strided(place.box.shape, place.strides, flat.storage_offset() + place.offset)


class SavedWeights(Mapping[str, torch.Tensor]):
    """The parameters and buffers of a checkpoint by name, each read when it is asked for."""

    def __init__(self, reader: SavedState, aliases: Mapping[str, str]) -> None:
        """``aliases``: other names of some of them."""
        self.reader = reader
        self._labels = {name: f"{MODEL}/{name}" for name in reader.names(MODEL)}
        self._labels |= {alias: self._labels[name] for alias, name in aliases.items() if name in self._labels}

    def __getitem__(self, name: str) -> torch.Tensor:
        return read_whole(self.reader, self._labels[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._labels)

    def __len__(self) -> int:
        return len(self._labels)

    def label(self, name: str) -> str:
        """The label under which a name is in the checkpoint."""
        return self._labels[name]
