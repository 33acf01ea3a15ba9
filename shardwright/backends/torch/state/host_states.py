"""The states of an optimizer on the host, and its step there.

An optimizer makes its states in its first step, of all parameters at once: beside parameters on a device of a CPU they
would all be in the device's memory before they could go. So that step goes group by group of `flat_shards`, and the
states of each go to the host before those of the next are made.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch

from shardwright.backends.torch.machine.host_store import HostStore
from shardwright.backends.torch.state.elementwise import require_separate
from shardwright.backends.torch.state.flat_shards import FlatShards

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def step_on_host(optimizer: torch.optim.Optimizer, flat: FlatShards) -> Any:
    """Update the parameters of an optimizer, whose states are on the host afterwards. Returns what its step does.

    Raises MissingCapabilityError for an optimizer that needs all parameters at once, before it has any states.
    """
    assert flat.store is not None
    every = [p for group in optimizer.param_groups for p in group["params"]]
    _keep(optimizer, every, flat.store)
    if any(optimizer.state.get(p) for p in every) or any(getattr(optimizer, hooks, None) for hooks in _HOOKS):
        found = optimizer.step()
    else:
        require_separate(optimizer)
        found = _first_step(optimizer, flat)
    _keep(optimizer, every, flat.store)
    return found


def _first_step(optimizer: torch.optim.Optimizer, flat: FlatShards) -> Any:
    assert flat.store is not None
    together = [{id(p) for p in group.parameters.values()} for group in flat.groups]
    before = [list(group["params"]) for group in optimizer.param_groups]
    apart = {id(p) for params in before for p in params}.difference(*together)
    # A counter of steps in a group's options counts one step, not one for each part.
    options = [_options(group) for group in optimizer.param_groups]
    found = None
    try:
        for part in filter(None, (*together, apart)):
            chosen = [[p for p in params if id(p) in part] for params in before]
            if not any(chosen):
                continue
            for group, params, own in zip(optimizer.param_groups, chosen, options, strict=True):
                group |= copy.deepcopy(own) | {"params": params}
            found = optimizer.step()
            _keep(optimizer, (p for params in chosen for p in params), flat.store)
    finally:
        for group, params in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params
    return found


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}


def _keep(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor], store: HostStore) -> None:
    """Bring the states of parameters to the host. Scalars, as numbers of steps, stay as they are."""
    for parameter in parameters:
        states = optimizer.state.get(parameter, {})
        for key, value in states.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.layout is torch.strided:
                states[key] = store.kept(value)
