"""What the keys of a DCP folder mean: names of the model's tensors, states and options of optimizers, other values.

DCP flattens nested state dicts and keeps the path of each key. Scripts nest as they like: ``{"model": …, "optim": …}``,
also inside of another dict; TorchTitan writes the names of parameters as they are, and a flattened optimizer.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwright.backends.torch.compat import EXTRA_STATE_KEY
from shardwright.backends.torch.state.dcp_metadata import DcpMetadata, DcpTensor, Entry
from shardwright.backends.torch.state.saved_parts import MODEL

KeyPath = tuple[str | int, ...]
MODELS = ("model", "module", "state_dict", "model_state_dict", "model_state")
"""The keys under which scripts put a model's state dict."""
OPTIMIZER = re.compile(r"optim(izer)?s?\d*(_state(_dict)?)?")
"""A pattern for those of an optimizer's."""
STATE, GROUPS = "state", "param_groups"
USER, EXTRA = "user", "extra"


@dataclass
class Places:
    """The content of a folder by its meaning. Labels are those of a saved state: ``model/NAME``,
    ``optimizer0/KEY/NAME``, ``user/KEY``."""

    tensors: dict[str, DcpTensor] = field(default_factory=dict)
    states: dict[str, Entry] = field(default_factory=dict)
    """States of parameters that are no tensors, by label."""
    groups: dict[int, dict[KeyPath, Entry]] = field(default_factory=dict)
    """Options of the groups of each optimizer, by (group or parameter, option)."""
    extra: dict[str, dict[KeyPath, Entry | str]] = field(default_factory=dict)
    """Extra states of the model's modules, by name: what each has, by its path there, a value or the label of a
    tensor."""
    user: dict[str, Entry] = field(default_factory=dict)
    """Other values, by key."""


def placed(metadata: DcpMetadata) -> Places:
    """The place of every key of a folder."""
    found = Places()
    paths = _paths(metadata)
    extra = {key: place for key, path in paths.items() if (place := _extra_place(path)) is not None}
    name_of = _model_names({k: path for k, path in paths.items() if k in metadata.tensors and k not in extra})
    numbers: dict[KeyPath, int] = {}
    for key, path in paths.items():
        tensor, entry = metadata.tensors.get(key), metadata.values.get(key)
        prefix = _optimizer_prefix(path)
        if prefix is not None:
            number = numbers.setdefault(prefix, len(numbers))
            options = found.groups.setdefault(number, {})
            kind, *rest = _split(path[len(prefix) :])
            if kind == GROUPS and entry is not None:
                options[tuple(rest)] = entry
            elif kind == STATE and len(rest) == 2:
                label = f"optimizer{number}/{rest[1]}/{rest[0]}"
                if tensor is not None:
                    found.tensors[label] = tensor
                elif entry is not None:
                    found.states[label] = entry
        elif key in extra:
            name, inside = extra[key]
            held = found.extra.setdefault(name, {})
            if tensor is not None:
                label = f"{EXTRA}/{name}/{len(held)}"
                found.tensors[label] = tensor
                held[inside] = label
            elif entry is not None:
                held[inside] = entry
        elif tensor is not None:
            found.tensors[f"{MODEL}/{name_of[key]}" if key in name_of else f"{USER}/{key}"] = tensor
        elif entry is not None:
            found.user[key] = entry
    return found


def _paths(metadata: DcpMetadata) -> dict[str, KeyPath]:
    """The path of each key; of a folder without paths, as its dots tell."""
    keys = (*metadata.tensors, *metadata.values)
    if metadata.paths:
        return {key: metadata.paths.get(key, (key,)) for key in keys}
    found: dict[str, KeyPath] = {}
    for key in keys:
        first, _, rest = key.partition(".")
        is_optimizers = OPTIMIZER.fullmatch(first) and rest.startswith((f"{STATE}.", f"{GROUPS}."))
        found[key] = (first, rest) if is_optimizers else (key,)
    begun = {key.partition(".")[0] for key in metadata.tensors if len(found[key]) == 1}
    if len(begun) == 1 and begun <= set(MODELS):  # else the first part is one of the model's own names
        (first,) = begun
        found |= {key: (first, key[len(first) + 1 :]) for key in metadata.tensors if len(found[key]) == 1}
    return found


def _model_names(paths: Mapping[str, KeyPath]) -> dict[str, str]:
    """The names of the model's tensors among the keys of tensors: those under a key for models; where there are none,
    the keys that are not nested; where there are none of these either, all under one key of whatever name."""
    own = {key: path for key, path in paths.items() if _optimizer_prefix(path) is None}
    under = {key: name for key, path in own.items() if (name := _model_name(path)) is not None}
    if under:
        return under
    flat = {key: str(path[0]) for key, path in own.items() if len(path) == 1}
    if flat or len({path[0] for path in own.values()}) > 1:
        return flat
    return {key: ".".join(map(str, path[1:])) for key, path in own.items()}


def _model_name(path: KeyPath) -> str | None:
    """The name in the model's state dict that a path leads to; None where it leads to none."""
    for at, part in enumerate(path[:-1]):
        if part in MODELS:
            return ".".join(map(str, path[at + 1 :]))
    return None


def _extra_place(path: KeyPath) -> tuple[str, KeyPath] | None:
    """The name of the extra state of a module that a path leads to, and the path inside of it, since DCP flattens it
    too; None where it leads to none."""
    if _optimizer_prefix(path) is not None:
        return None
    begins = next((at + 1 for at, part in enumerate(path[:-1]) if part in MODELS), 0)
    parts = path[begins:]
    for at, part in enumerate(parts):
        text = str(part)
        if text.rpartition(".")[2] == EXTRA_STATE_KEY:
            return ".".join(map(str, parts[: at + 1])), parts[at + 1 :]
        around, is_inside, inside = f".{text}".partition(f".{EXTRA_STATE_KEY}.")
        if is_inside:  # of a folder without paths
            name = ".".join([*map(str, parts[:at]), f"{around}.{EXTRA_STATE_KEY}"[1:]])
            return name, (*inside.split("."), *parts[at + 1 :])
    return None


def nested(held: Mapping[KeyPath, Any]) -> Any:
    """The value whose parts have these paths: numbers are places in lists, and texts keys of dicts."""
    if () in held:
        return held[()]
    below: dict[str | int, dict[KeyPath, Any]] = {}
    for path, value in held.items():
        below.setdefault(path[0], {})[path[1:]] = value
    if all(isinstance(key, int) for key in below):
        return [nested(below[key]) for key in sorted(below)]
    return {key: nested(value) for key, value in below.items()}


def _optimizer_prefix(path: KeyPath) -> KeyPath | None:
    """The part of a path that leads to an optimizer's state dict; None where it leads to none."""
    for at, part in enumerate(path[:-1]):
        if not (isinstance(part, str) and OPTIMIZER.fullmatch(part)):
            continue
        end = at + 1
        while end < len(path) - 1 and isinstance(path[end], int):
            end += 1
        if str(path[end]).partition(".")[0] in (STATE, GROUPS):
            return path[:end]
    return None


def _split(path: KeyPath) -> KeyPath:
    """The path inside of an optimizer's state dict: (``state``, parameter, state) or (``param_groups``, group, option);
    flattened state dicts have it in one text."""
    if len(path) > 1:
        first, second, *rest = path
        return (first, second, ".".join(map(str, rest))) if rest else path
    kind, _, rest_text = str(path[0]).partition(".")
    name, _, last = rest_text.rpartition(".")
    return (kind, int(name) if kind == GROUPS and name.isdigit() else name, last)
