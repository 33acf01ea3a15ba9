"""The batch of pipeline rank 0, given to the other ranks of its pipeline: only it counts in SageMaker's scripts, and
the others may pass anything of the same form."""

import json
from typing import Any

import torch
import torch.distributed as dist

from shardwright.backends.torch.capture.held_tensors import tensors_in
from shardwright.backends.torch.compat import pytree
from shardwright.core.errors import ShardwrightError
from shardwright.torch.session import Session, current
from shardwright.torch.sliced import can_be_sliced, with_tensors
from shardwright.torch.step import plain

_OWN, _VALUE, _TENSOR, _SLICED = "own", "value", "tensor", "sliced"


def of_first_stage(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a step with the tensors, numbers and texts that pipeline rank 0 was given. Of objects that have
    ``smp_slice`` the tensors are its; models and other objects stay each rank's own. Every rank of the run calls this.

    Raises ShardwrightError where the arguments have another form than on pipeline rank 0, DisagreementError on the
    other ranks then.
    """
    session = current()
    if session.bound.size("pp") == 1:
        return args, kwargs
    leaves, spec = pytree.tree_flatten(([plain(one) for one in args], {key: plain(one) for key, one in kwargs.items()}))
    form = str(spec)
    is_first = session.bound.coordinate("pp") == 0
    told = _told(session, json.dumps([form, [_described(leaf) for leaf in leaves]]) if is_first else "")
    of_first, described = json.loads(told)
    failure = None
    held = [(known, leaf) for (kind, known), leaf in zip(described, leaves, strict=False) if kind == _SLICED]
    if of_first != form or any(len(known) != len(tensors_in(leaf)) for known, leaf in held):
        failure = ShardwrightError(
            f"the arguments of the step have another form than on pipeline rank 0: {form[:200]} against "
            f"{of_first[:200]}; tensors may differ in shape and dtype, and nothing else"
        )
    session.agreement.meet("the step, for the batch of pipeline rank 0", failure=failure)
    found = [_taken(session, kind, known, leaf) for (kind, known), leaf in zip(described, leaves, strict=True)]
    taken = pytree.tree_unflatten(found, spec)
    return tuple(taken[0]), taken[1]


def _described(leaf: Any) -> list[Any]:
    if isinstance(leaf, torch.Tensor):
        return [_TENSOR, [str(leaf.dtype).removeprefix("torch."), list(leaf.shape), leaf.requires_grad]]
    if can_be_sliced(leaf):
        return [_SLICED, [_described(tensor)[1] for tensor in tensors_in(leaf)]]
    return [_VALUE, leaf] if leaf is None or type(leaf) in (bool, int, float, str) else [_OWN, None]


def _taken(session: Session, kind: str, known: Any, leaf: Any) -> Any:
    if kind == _SLICED:
        own = tensors_in(leaf)
        return with_tensors(leaf, [_taken(session, _TENSOR, *pair) for pair in zip(known, own, strict=True)])
    if kind != _TENSOR:
        return known if kind == _VALUE else leaf
    dtype, shape, requires_grad = known
    is_first = session.bound.coordinate("pp") == 0
    device = session.bound.device
    value = (
        leaf.detach().to(device).contiguous() if is_first
        else torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    )  # fmt: skip
    _broadcast(session, value.reshape(-1).view(torch.uint8))  # which every backend carries
    return leaf if is_first else value.requires_grad_(requires_grad)


def _told(session: Session, text: str) -> str:
    """The text of pipeline rank 0."""
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=session.bound.device)
    length = torch.tensor([data.numel()], device=session.bound.device)
    _broadcast(session, length)
    if session.bound.coordinate("pp"):
        data = torch.empty(int(length), dtype=torch.uint8, device=session.bound.device)
    _broadcast(session, data)
    return bytes(data.cpu().numpy()).decode()


def _broadcast(session: Session, value: torch.Tensor) -> None:
    ranks = session.bound.groups["pp"]
    with session.watchdog.waiting("the batch of pipeline rank 0", ranks):
        dist.broadcast(value, ranks[0], group=session.bound.handles["pp"])
