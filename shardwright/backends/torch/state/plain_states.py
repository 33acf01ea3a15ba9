"""State dicts of plain torch, of the unsplit model and its optimizer, as saved states, and saved states as them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwright.backends.torch.state.saved_parts import MODEL, NUMBER, name_of, read_whole, whole_piece
from shardwright.core.checkpoint.boxes import Box
from shardwright.core.checkpoint.saved_tensors import Entry, SavedState, SavedTensor
from shardwright.core.checkpoint.tensor_file import ITEM_BYTES, Bytes
from shardwright.core.errors import CheckpointError, nearest

PARAMS = "params"
_CLASSES: Sequence[tuple[str, Callable[[Mapping[str, Any]], bool]]] = (
    ("AdamW", lambda group: "betas" in group and group.get("decoupled_weight_decay") is True),
    ("Adam", lambda group: "betas" in group and "amsgrad" in group),
    ("SGD", lambda group: "nesterov" in group and "dampening" in group),
    ("RMSprop", lambda group: "centered" in group),
    ("Adagrad", lambda group: "lr_decay" in group),
    ("Adadelta", lambda group: "rho" in group),
)
"""The classes of torch's optimizers and how the options of their groups tell them apart: state dicts do not say."""


def class_of(groups: Sequence[Mapping[str, Any]]) -> str:
    """The class of optimizer whose groups have such options, where they tell; else an empty text."""
    first = groups[0] if groups else {}
    return next((name for name, fits in _CLASSES if fits(first)), "")


def told_of(groups: Sequence[Mapping[str, Any]], steps: int, optimizer_class: str | None = None) -> dict[str, Any]:
    """An optimizer without its states, as a checkpoint has it. ``groups`` hold options, and the names of parameters."""
    known = class_of(groups) if optimizer_class is None else optimizer_class
    return {"class": known, "groups": [dict(group) for group in groups], "steps": steps, "loss_scale": None}


def content_of(optimizers: Sequence[Mapping[str, Any]], steps: int, user: Any = None) -> dict[str, Any]:
    """The values beside the tensors of a checkpoint, for a state that has no more of them."""
    return {
        "optimizers": list(optimizers), "user": user, "ties": {}, "seed": 0, "steps": steps, "steps_begun": steps,
        "samples": 0, "extra": {},
    }  # fmt: skip


def named_by_position(
    groups: Sequence[Mapping[str, Any]], names: Sequence[str] | None, what: str
) -> tuple[list[dict[str, Any]], dict[Any, str]]:
    """The groups of an optimizer's state dict with names in place of numbers, and the name of each number; both as they
    are where there are names.

    Args:
        names: the parameters in the order in which the optimizer got them.

    Raises:
        CheckpointError: there are numbers, and no names for them or another count of them.
    """
    numbers = [number for group in groups for number in group[PARAMS]]
    if all(isinstance(number, str) and not number.isdigit() for number in numbers):
        return [dict(group) for group in groups], {name: name for name in numbers}
    if names is None:
        raise CheckpointError(
            f"{what} numbers its {len(numbers)} parameters, in the order in which the optimizer got them: give their "
            f"names in that order, as [name for name, _ in model.named_parameters()]"
        )
    if len(names) != len(numbers):
        raise CheckpointError(
            f"{what} numbers {len(numbers)} parameters, and {len(names)} names are given: expected a name for each, in "
            f"the order in which the optimizer got them"
        )
    found = dict(zip(numbers, names, strict=True))
    return [{**group, PARAMS: [found[number] for number in group[PARAMS]]} for group in groups], found


@dataclass
class HeldState:
    """A saved state whose tensors are in memory, or mapped: a `SavedState`."""

    said: str
    tensors: Mapping[str, torch.Tensor]
    values: Any
    framework: str = "torch"
    step: int = 0
    _bytes: dict[str, Bytes] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return self.said

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self.tensors

    def names(self, part: str) -> list[str]:
        """The names of a part's tensors."""
        return [name[len(part) + 1 :] for name in self.tensors if name.startswith(f"{part}/")]

    def tensor(self, name: str) -> SavedTensor:
        """What is known of a tensor. Raises CheckpointError where there is none of that name."""
        if name not in self.tensors:
            raise CheckpointError(f"{self} has no tensor {name!r}: {nearest(name, self.tensors)[:300]}")
        held = self.tensors[name]
        return Entry(name_of(held.dtype, name), tuple(held.shape))

    def boxes(self, name: str, box: Box) -> Iterator[tuple[Box, Bytes]]:
        """The box of a tensor."""
        told = self.tensor(name)
        held = self.tensors[name][box.inside(Box.whole(told.shape))]
        data: Bytes = whole_piece(name, held).bytes()
        yield box, data.reshape(*box.shape, ITEM_BYTES[told.dtype])

    def content(self, tensors: Callable[[str], Any]) -> Any:
        """The values that are no tensors."""
        return self.values


def saved_state(
    model: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, Any] | None = None,
    names: Sequence[str] | None = None,
    *,
    optimizer_class: str | None = None,
    said: str = "the state dicts",
) -> HeldState:
    """The saved state in a model's state dict and in that of a plain torch optimizer, by position or by name.

    Args:
        names: the parameters in the order in which the optimizer got them, where its state dict numbers them.
        optimizer_class: as ``AdamW``; None: as the options of the groups tell.

    Raises:
        CheckpointError: names are missing, or something is none of torch's state dicts.
    """
    if not isinstance(model, Mapping) or not all(isinstance(tensor, torch.Tensor) for tensor in model.values()):
        raise CheckpointError(f"{said}: expected a model's state dict, names and tensors")
    memory: dict[tuple[Any, ...], str] = {}
    ties: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.items():
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape)
        first = memory.setdefault(place, name) if tensor.numel() and not tensor.is_meta else name
        if first != name:
            ties[name] = first
        else:
            tensors[f"{MODEL}/{name}"] = tensor.detach()
    if optimizer is None:
        return HeldState(said, tensors, content_of([], 0) | {"ties": ties})
    if not isinstance(optimizer, Mapping) or not {"state", "param_groups"} <= set(optimizer):
        raise CheckpointError(f"{said}: expected an optimizer's state dict, with 'state' and 'param_groups'")
    groups, name_at = named_by_position(optimizer["param_groups"], names, said)
    steps = 0
    for number, states in optimizer["state"].items():
        for key, value in states.items():
            if isinstance(value, bool | int | float):
                dtype = torch.float64 if isinstance(value, float) else None
                tensors[f"optimizer0/{key}{NUMBER}/{name_at[number]}"] = torch.tensor(value, dtype=dtype)
            elif isinstance(value, torch.Tensor):
                tensors[f"optimizer0/{key}/{name_at[number]}"] = value.detach()
            elif value is not None:
                raise CheckpointError(f"{said}: the state {key!r} of {name_at[number]} is of {type(value).__name__}")
            if key == "step":
                steps = max(steps, int(value))
    told = told_of(groups, steps, optimizer_class)
    return HeldState(said, tensors, content_of([told], steps) | {"ties": ties}, step=steps)


def optimizer_states(state: SavedState, number: int = 0) -> dict[str, dict[str, str]]:
    """The labels of the states of an optimizer, by the parameter's name and the state's."""
    found: dict[str, dict[str, str]] = {}
    for label in state.names(f"optimizer{number}"):
        key, _, name = label.partition("/")
        found.setdefault(name, {})[key] = f"optimizer{number}/{label}"
    return found


def plain_optimizer_state(state: SavedState, names: Sequence[str] | None = None, number: int = 0) -> dict[str, Any]:
    """The state dict of a plain torch optimizer of the unsplit model, by position, whole and on the CPU.

    Args:
        names: the order in which that optimizer gets the parameters; None: as the saved one got them.
        number: which of the saved optimizers.

    Raises:
        CheckpointError: there is no such optimizer, or ``names`` are not those of its parameters.
    """
    content = state.content(lambda name: read_whole(state, name))
    if number >= len(content["optimizers"]):
        raise CheckpointError(f"{state} has {len(content['optimizers'])} optimizers, and none of number {number}")
    groups = content["optimizers"][number]["groups"]
    held = [name for group in groups for name in group[PARAMS]]
    if names is not None:
        if sorted(names) != sorted(held):
            other = next(iter(set(names) ^ set(held)), held[0] if held else "")
            raise CheckpointError(f"{state} has {len(held)} parameters in its optimizer, which do not fit: {other!r}")
        place = {name: at for at, name in enumerate(names)}
        groups = [{**group, PARAMS: sorted(group[PARAMS], key=place.__getitem__)} for group in groups]
    position = {name: at for at, name in enumerate(name for group in groups for name in group[PARAMS])}
    labels = optimizer_states(state, number)
    return {
        "state": {
            position[name]: {
                key.removesuffix(NUMBER): state_value(state, label) for key, label in sorted(labels[name].items())
            }
            for name in position
            if name in labels
        },
        "param_groups": [{**group, PARAMS: [position[name] for name in group[PARAMS]]} for group in groups],
    }


def state_value(state: SavedState, label: str) -> Any:
    """The value of a state: a tensor on the CPU, or a number of Python's."""
    found = read_whole(state, label)
    return found.item() if label.split("/")[1].endswith(NUMBER) else found
