"""Plain values beside the tensors of a checkpoint, as JSON: nothing is pickled, and nothing is lost.

JSON has no tuples, no sets, no keys but text, and no NaN. Such values are written as an object with one key that begins
with ``$``. Tensors are written to the files of tensors, and are named here.
"""

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shardwright.core.errors import CheckpointError

DEEPEST = 64
"""The most levels of values inside of each other."""
_KINDS: Mapping[str, type] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_SEQUENCES: Mapping[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def encoded(value: Any, tensor: Callable[[Any, str], str | None], path: str, depth: int = 0) -> Any:
    """The value as JSON. ``tensor`` gives the name under which a leaf is written as a tensor; None: it is none.

    Raises CheckpointError for values of other classes, which only a pickle would take; ``path`` names them.
    """
    if depth > DEEPEST:
        raise CheckpointError(f"{path}: values lie more than {DEEPEST} levels inside of each other")
    if value is None or type(value) in (bool, int):
        return value
    if type(value) is str:
        if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise CheckpointError(f"{path} holds half of a character, which is no text: {value!r:.80}")
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if type(value) is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.generic) and isinstance(value.item(), bool | int | float | str):
        return encoded(value.item(), tensor, path, depth)
    if (name := tensor(value, path)) is not None:
        return {"$tensor": name}
    if type(value) is list:
        return [encoded(held, tensor, f"{path}/{number}", depth + 1) for number, held in enumerate(value)]
    kind = type(value).__name__
    if isinstance(value, tuple | set | frozenset) and _SEQUENCES.get(kind) is type(value):
        ordered = value if isinstance(value, tuple) else sorted(value, key=repr)
        return {f"${kind}": [encoded(one, tensor, f"{path}/{number}", depth + 1) for number, one in enumerate(ordered)]}
    if isinstance(value, dict) and _KINDS.get(kind) is type(value):
        is_plain = kind == "dict" and all(type(key) is str and not key.startswith("$") for key in value)
        if is_plain:
            return {key: encoded(held, tensor, f"{path}/{key}", depth + 1) for key, held in value.items()}
        items = [
            [encoded(key, _no_tensor, path), encoded(held, tensor, f"{path}/{key}", depth + 1)]
            for key, held in value.items()
        ]
        return {f"${kind}": items}
    raise CheckpointError(
        f"{path} is of class {type(value).__module__}.{type(value).__qualname__}, which only a pickle would hold: give "
        f"its state instead, in tensors, numbers, texts, lists, tuples and dicts (as by its state_dict())"
    )


def decoded(value: Any, tensor: Callable[[str], Any]) -> Any:
    """The value that `encoded` wrote. Raises CheckpointError for JSON that it does not write."""
    if isinstance(value, list):
        return [decoded(held, tensor) for held in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if not (isinstance(kind, str) and kind.startswith("$")):
        return {key: decoded(held, tensor) for key, held in value.items()}
    held = value[kind]
    try:
        match kind[1:]:
            case "float":
                return float(held)
            case "bytes":
                return base64.b64decode(held, validate=True)
            case "tensor":
                return tensor(held)
            case name if name in _SEQUENCES:
                return _SEQUENCES[name](decoded(held, tensor))
            case name if name in _KINDS:
                return _KINDS[name]({decoded(key, tensor): decoded(one, tensor) for key, one in held})
    except (TypeError, ValueError) as failed:
        raise CheckpointError(f"the checkpoint holds a value {kind} that cannot be read: {failed}") from failed
    raise CheckpointError(f"the checkpoint holds a value of the kind {kind!r}, which this version does not know")


def _no_tensor(value: Any, path: str) -> None:
    return None
