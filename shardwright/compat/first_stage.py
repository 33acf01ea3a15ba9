"""The batch of pipeline rank 0, given to the other ranks of its pipeline: only it counts in SageMaker's scripts, and
the others may pass anything of the same form."""

import json
import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardwright.backends.torch.capture.held_tensors import tensors_in
from shardwright.backends.torch.compat import pytree
from shardwright.core.errors import ShardwrightError
from shardwright.torch.session import Session, current
from shardwright.torch.sliced import can_be_sliced, with_tensors
from shardwright.torch.step_arguments import plain

_OWN, _VALUE, _TENSOR, _SLICED, _ARRAY, _REFUSED = "own", "value", "tensor", "sliced", "array", "refused"
_ALIGNED = 16
"""The bytes to which each tensor of a message is aligned."""


def of_first_stage(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a step with the tensors, NumPy arrays, numbers and texts that pipeline rank 0 was given. Of
    objects that have ``smp_slice`` the tensors are its; models and other objects stay each rank's own. Every rank of
    the run calls this.

    Raises ShardwrightError where the arguments have another form than on pipeline rank 0, DisagreementError on the
    other ranks then; and for arrays that hold more than their entries, as masked ones do.
    """
    session = current()
    if session.bound.size("pp") == 1:
        return args, kwargs
    leaves, spec = pytree.tree_flatten(([plain(one) for one in args], {key: plain(one) for key, one in kwargs.items()}))
    form = str(spec)
    is_first = session.bound.coordinate("pp") == 0
    text = json.dumps([form, [_described(leaf) for leaf in leaves]]) if is_first else ""
    told, data = _told(session, text, [tensor for leaf in leaves for tensor in _tensors_of(leaf)] if is_first else [])
    of_first, described = json.loads(told)
    failure = None
    refused = next((known for kind, known in described if kind == _REFUSED), None)
    held = [(known, leaf) for (kind, known), leaf in zip(described, leaves, strict=False) if kind == _SLICED]
    if of_first != form or any(len(known) != len(tensors_in(leaf)) for known, leaf in held):
        failure = ShardwrightError(
            f"the arguments of the step have another form than on pipeline rank 0: {form[:200]} against "
            f"{of_first[:200]}; tensors may differ in shape and dtype, and nothing else"
        )
    elif refused is not None:
        failure = ShardwrightError(
            f"the step is given a {refused}, of which pipeline rank 0 cannot send what it holds: pass a plain array "
            f"(np.asarray, .filled() of a masked one) or a tensor"
        )
    session.agreement.meet("the step, for the batch of pipeline rank 0", failure=failure)
    if not is_first:
        sent = _Bytes(data)
        leaves = [_taken(sent, kind, known, leaf) for (kind, known), leaf in zip(described, leaves, strict=True)]
    taken = pytree.tree_unflatten(leaves, spec)
    return tuple(taken[0]), taken[1]


def _described(leaf: Any) -> list[Any]:
    if isinstance(leaf, torch.Tensor):
        return [_TENSOR, [str(leaf.dtype).removeprefix("torch."), list(leaf.shape), leaf.requires_grad]]
    if can_be_sliced(leaf):
        return [_SLICED, [_described(tensor)[1] for tensor in tensors_in(leaf)]]
    if isinstance(leaf, np.ndarray) and type(leaf) is not np.ndarray:
        return [_REFUSED, f"{type(leaf).__module__}.{type(leaf).__name__}"]
    if _is_array(leaf):
        return [_ARRAY, [leaf.dtype.str, list(leaf.shape), isinstance(leaf, np.ndarray)]]
    return [_VALUE, leaf] if leaf is None or type(leaf) in (bool, int, float, str) else [_OWN, None]


def _tensors_of(leaf: Any) -> list[torch.Tensor]:
    """The tensors of an argument that are sent."""
    if isinstance(leaf, torch.Tensor):
        return [leaf]
    if _is_array(leaf):
        return [torch.from_numpy(np.frombuffer(leaf.tobytes(), dtype=np.uint8).copy())]
    return tensors_in(leaf) if can_be_sliced(leaf) else []


def _is_array(leaf: Any) -> bool:
    """Whether an argument is an array of NumPy's itself, or one number of its types."""
    return (type(leaf) is np.ndarray or isinstance(leaf, np.generic)) and leaf.dtype.kind in "biufc"


class _Bytes:
    """The tensors of pipeline rank 0, one after the other."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data, self._at = data, 0

    def take(self, dtype: str, shape: list[int]) -> torch.Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        size = math.prod(shape) * kind.itemsize
        found = self._data[self._at : self._at + size].view(kind).view(shape).clone()
        self._at += _aligned(size)
        return found


def _taken(data: _Bytes, kind: str, known: Any, leaf: Any) -> Any:
    if kind == _SLICED:
        own = tensors_in(leaf)
        return with_tensors(leaf, [_taken(data, _TENSOR, *pair) for pair in zip(known, own, strict=True)])
    if kind == _ARRAY:
        form, sizes, is_array = known
        size = math.prod(sizes) * np.dtype(form).itemsize
        found = np.frombuffer(data.take("uint8", [size]).cpu().numpy().tobytes(), dtype=form).reshape(sizes).copy()
        return found if is_array else found[()]
    if kind != _TENSOR:
        return known if kind == _VALUE else leaf
    dtype, shape, requires_grad = known
    return data.take(dtype, shape).requires_grad_(requires_grad)


def _told(session: Session, text: str, tensors: list[torch.Tensor]) -> tuple[str, torch.Tensor]:
    """The text and the bytes of the tensors of pipeline rank 0, in two messages: their sizes first."""
    device = session.bound.device
    parts = [torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)]
    for tensor in tensors:  # as bytes, which every backend carries
        own = tensor.detach().to(device).contiguous()
        parts.append(own.reshape(-1).view(torch.uint8) if own.numel() else own.new_empty(0, dtype=torch.uint8))
    sizes = torch.tensor([len(parts[0]), sum(_aligned(len(part)) for part in parts)], device=device)
    _broadcast(session, sizes)
    length, total = sizes.tolist()
    data = torch.zeros(total, dtype=torch.uint8, device=device)
    at = 0
    if session.bound.coordinate("pp") == 0:
        for part in parts:
            data[at : at + len(part)] = part
            at += _aligned(len(part))
    _broadcast(session, data)
    return bytes(data[:length].cpu().numpy()).decode(), data[_aligned(length) :]


def _aligned(size: int) -> int:
    """The bytes that a part of this size takes, so that the next one begins where every dtype may."""
    return -(-size // _ALIGNED) * _ALIGNED


def _broadcast(session: Session, value: torch.Tensor) -> None:
    ranks = session.bound.groups["pp"]
    with session.watchdog.waiting("the batch of pipeline rank 0", ranks):
        dist.broadcast(value, ranks[0], group=session.bound.handles["pp"])
