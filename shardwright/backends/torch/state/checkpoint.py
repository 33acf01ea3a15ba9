"""Whole state dicts of a split model, by the names of the unsplit one."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.machine.pipeline_messages import as_carried
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.backends.torch.state.extra_state import set_extra
from shardwright.backends.torch.state.ownership import Ownership
from shardwright.backends.torch.state.parts import Parts
from shardwright.core.errors import PlanError, nearest


def gather(
    ownership: Ownership,
    bound: BoundMesh,
    watchdog: Watchdog,
    *,
    parts: Parts,
    rank0_only: bool = False,
) -> "OrderedDict[str, Any]":
    """The state dict of the unsplit model: same keys, same order, tied names sharing one tensor.

    Tensors are copies on the CPU when the model is split over pp, else the model's own. Every rank calls this at the
    same time. With ``rank0_only`` rank 0 alone gets it and the others an empty one.
    """
    own: OrderedDict[str, Any] = OrderedDict(ownership.model.state_dict())
    placement = ownership.placement
    first = bound.rank == 0
    _put_together(own, ownership, parts)
    if placement is None or bound.size("pp") == 1:
        return own if first or not rank0_only else OrderedDict()
    if rank0_only and any(bound.coordinate(axis) for axis in bound.mesh.names if axis != "pp"):
        return OrderedDict()
    watchdog.doing("gathering the state dict")
    me, group = bound.coordinate("pp"), bound.handles["pp"]
    whole: OrderedDict[str, Any] = OrderedDict()
    gathered: dict[str, torch.Tensor] = {}
    for key, entry in own.items():
        name = ownership.first_name.get(key)
        if name is None or not isinstance(entry, torch.Tensor):
            whole[key] = entry
            continue
        if name not in gathered:
            home = placement.holders(name)[0]
            held = me == home
            tensor = torch.empty(entry.shape, dtype=entry.dtype, device=bound.device)
            if held:
                tensor = entry.detach().contiguous()
            source = bound.peer("pp", home)
            with watchdog.waiting(f"{name} from rank {source}"):
                if not rank0_only:
                    dist.broadcast(as_carried(tensor), source, group=group)
                elif me == 0 and not held:
                    dist.recv(as_carried(tensor), source)
                elif held and me != 0:
                    dist.send(as_carried(tensor), bound.peer("pp", 0))
            if first or not rank0_only:
                gathered[name] = tensor.to("cpu", copy=held)
        if name in gathered:
            whole[key] = gathered[name]
    watchdog.doing("between steps")
    return whole if first or not rank0_only else OrderedDict()


def _put_together(state: "OrderedDict[str, Any]", ownership: Ownership, parts: Parts) -> None:
    """Replace shards by whole tensors: copies for those held here, shapes for the others."""
    known: dict[str, torch.Tensor] = {}
    for key, entry in state.items():
        name = ownership.first_name.get(key)
        if name is None or not parts.is_part(name):
            continue
        if name not in known:
            shape = parts.whole_shape(name, entry.shape)
            held = ownership.holds(name) and not entry.is_meta
            known[name] = parts.whole(name, entry) if held else torch.empty(shape, dtype=entry.dtype, device="meta")
        state[key] = known[name]


def load(
    ownership: Ownership, state: Mapping[str, Any], *, parts: Parts, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Copy this rank's share of a whole state dict into the model. Returns the missing and the unexpected names.

    Raises PlanError, with ``strict``, for missing and unexpected names (the nearest is named), and for shapes that
    differ. Nothing is copied then.
    """
    expected = ownership.model.state_dict()
    missing = [key for key in expected if key not in state]
    unexpected = [key for key in state if key not in expected]
    if strict and (missing or unexpected):
        said = []
        if missing:
            said.append(f"it lacks {_listed(missing)} ({_hint(missing[0], state)})")
        if unexpected:
            said.append(f"it has {_listed(unexpected)}, which the model lacks ({_hint(unexpected[0], expected)})")
        raise PlanError(f"the state dict does not fit the model: {'; '.join(said)}. strict=False loads what fits")
    for key, tensor in expected.items():
        given = state.get(key)
        if not isinstance(tensor, torch.Tensor) or not isinstance(given, torch.Tensor):
            continue
        shape = parts.whole_shape(ownership.first_name.get(key, key), tensor.shape)
        if given.shape != shape:
            raise PlanError(f"the state dict has {key!r} of shape {tuple(given.shape)}: the model's is {tuple(shape)}")
    with torch.no_grad():
        for key in expected:
            name = ownership.first_name.get(key)
            if name is not None and key in state and ownership.holds(name):
                ownership.tensor(name).copy_(parts.part(name, state[key]))
    set_extra(ownership, state)
    return missing, unexpected


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _hint(name: str, known: Mapping[str, Any]) -> str:
    near, _, _ = nearest(name, known).partition("known:")
    return near.strip() or "no near name"
