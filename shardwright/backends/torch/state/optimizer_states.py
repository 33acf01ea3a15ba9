"""The states of an optimizer over the ranks of a pipeline and of the tensor axis, whole and by original names."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.backends.torch.state.ownership import Ownership
from shardwright.backends.torch.state.parts import Parts
from shardwright.core.errors import MissingCapabilityError, PlanError, nearest

LOCAL = "of_this_rank"
"""The key that marks the states of one rank."""


def gather_states(
    ownership: Ownership,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[str]],
    bound: BoundMesh,
    watchdog: Watchdog,
    rank0_only: bool,
    parts: Parts,
) -> dict[str, Any]:
    """The states ``{"state": …, "param_groups": …}`` of all parameters; each comes from its home. Every rank calls
    this.

    Args:
        groups: for every parameter group the names of its parameters, those of other ranks too.
        parts: the parts of parameters that this rank holds.

    Raises:
        MissingCapabilityError: a state of a sharded parameter has another shape than the parameter's shard.
    """
    me, placement = bound.coordinate("pp"), ownership.placement
    own: dict[str, Any] = {}
    at_home = [n for names in groups for n in names if placement is None or placement.holders(n)[0] == me]
    held = {name: _states_of(optimizer, ownership.parameter(name)) for name in at_home}
    for name, states in _of_all_pieces(held, parts, watchdog).items():
        parameter = ownership.parameter(name)
        if states:
            own[name] = {key: _on_cpu(_whole(name, key, entry, parameter, parts)) for key, entry in states.items()}
    every: list[dict[str, Any] | None] = [own]
    watchdog.doing("gathering the states of the optimizer")
    if bound.size("pp") > 1:
        first = bound.peer("pp", 0)
        every = [None] * bound.size("pp")
        with watchdog.waiting(f"pp peers, ranks {list(bound.groups['pp'])}"):
            if rank0_only:
                dist.gather_object(own, every if me == 0 else None, first, group=bound.handles["pp"])
            else:
                dist.all_gather_object(every, own, group=bound.handles["pp"])
    watchdog.doing("between steps")
    if rank0_only and bound.rank != 0:
        return {}
    found = {name: state for states in every if states is not None for name, state in states.items()}
    return _by_names(found, optimizer, groups)


def put_states_together(
    ownership: Ownership,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[str | torch.Tensor]],
    parts: Parts,
) -> None:
    """Make the states whole whose parameters are about to be, along the tensor axis. Every rank of it calls this.

    Raises MissingCapabilityError: a sharded parameter has a state of another shape.
    """
    for names in groups:
        for name in names:
            if isinstance(name, str) and (parameter := ownership.parameter(name)) in optimizer.state:
                states = optimizer.state[parameter]
                for key in sorted(states):
                    states[key] = _whole(name, key, states[key], parameter, parts)


def local_states(
    ownership: Ownership, optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """The states of this rank's parameters, or of its shards of them, by names; marked as a part."""
    own = {
        name: {key: _on_cpu(entry) for key, entry in optimizer.state[parameter].items()}
        for names in groups
        for name in names
        if ownership.holds(name) and (parameter := ownership.parameter(name)) in optimizer.state
    }
    held = [[name for name in names if ownership.holds(name)] for names in groups]
    return _by_names(own, optimizer, held) | {LOCAL: True}


def is_local(given: Any) -> bool:
    """Whether a state dict is one of `local_states`."""
    return isinstance(given, Mapping) and bool(given.get(LOCAL))


def _by_names(
    states: Mapping[str, Any], optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[str]]
) -> dict[str, Any]:
    return {
        "state": {name: states[name] for names in groups for name in names if name in states},
        "param_groups": [
            {key: entry for key, entry in group.items() if key != "params"} | {"params": list(names)}
            for group, names in zip(optimizer.param_groups, groups, strict=True)
        ],
    }


def _states_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    """The states of a parameter on this rank; none where an empty piece of it is here, which no step moves on."""
    return dict(optimizer.state.get(parameter, {})) if parameter.numel() else {}


def _of_all_pieces(held: Mapping[str, dict[str, Any]], parts: Parts, watchdog: Watchdog) -> dict[str, dict[str, Any]]:
    """The states with those that other ranks of the shard group have: values are taken from them, and in place of
    their pieces stand empty ones, so that all ranks put together the same states in the same order."""
    flat = parts.flat
    if flat is None or not flat.is_shared:
        return dict(held)
    told: list[Any] = [None] * flat.data.ways
    cut = not flat.holds_whole_parameters
    mine = {
        name: {key: entry.dtype if cut and _is_cut(entry) else entry for key, entry in states.items()}
        for name, states in held.items()
        if name in flat.group_of
    }
    with watchdog.waiting(flat.data.said()):
        dist.all_gather_object(told, mine, group=flat.data.group)
    found: dict[str, dict[str, Any]] = {}
    for name in held:
        if name not in flat.group_of:
            found[name] = held[name]
            continue
        known: dict[str, Any] = {}
        for states in told:
            for key, entry in states[name].items():
                known.setdefault(key, entry)
        found[name] = {}
        for key, entry in sorted(known.items()):
            if isinstance(entry, torch.dtype):
                entry = torch.empty(0, dtype=entry, device=flat.data_device)
            found[name][key] = held[name].get(key, entry)
    return found


def _is_cut(entry: Any) -> bool:
    """Whether a state is cut as its parameter is: a tensor, but for counts."""
    return isinstance(entry, torch.Tensor) and entry.dim() > 0


def _whole(name: str, key: str, entry: Any, parameter: torch.Tensor, parts: Parts) -> Any:
    """A state of a parameter, put together where this rank holds a part of the parameter."""
    if not parts.is_part(name) or not _is_cut(entry) or (entry.numel() == 1 and parts.flat is None):
        return entry
    flat, tensor = parts.flat, parts.tensor
    shape, put_together = parameter.shape, partial(parts.whole, name)
    if flat is not None and flat.holds_whole_parameters and name in flat.group_of:
        if tensor is None or name not in tensor.places:
            return entry  # of the rank that holds the parameter
        shape, put_together = flat.shape(name), partial(tensor.whole, name)
    if entry.shape != shape:
        raise MissingCapabilityError(
            f"the optimizer's {key!r} of {name} has shape {tuple(entry.shape)} on this rank, whose part of the "
            f"parameter has {tuple(parameter.shape)}: only states of the parameter's own shape can be put together; "
            f"save optimizer.local_state_dict() on every rank, and load it under the same plan"
        )
    return put_together(entry)


def load_states(
    ownership: Ownership,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[str]],
    given: Mapping[str, Any],
    parts: Parts | None,
    *,
    with_options: bool = True,
) -> None:
    """Load this rank's share of a state dict from `gather_states`, under whatever plan that was; of one from an
    optimizer of torch for the unsplit model, whose parameters have numbers in the order of the groups; or of one from
    `local_states`. The options of groups, learning rates among them, are loaded if ``with_options``.

    Raises PlanError when the groups hold other parameters.
    """
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= set(given):
        raise PlanError(
            f"expected the state dict of an optimizer, with 'state' and 'param_groups': given {type(given).__name__}"
            + (f" with {', '.join(map(repr, given))}" if isinstance(given, Mapping) else "")
        )
    if is_local(given):
        groups, parts = [[name for name in names if ownership.holds(name)] for names in groups], None
    given = _named(given, groups)
    saved = given["param_groups"]
    if len(saved) != len(groups):
        raise PlanError(f"{len(saved)} parameter groups were saved, and the optimizer has {len(groups)}")
    for number, (names, group) in enumerate(zip(groups, saved, strict=True)):
        for name in names:
            if name not in group["params"]:
                raise PlanError(f"group {number} was saved without {name!r}: {nearest(name, group['params'])}")
        if len(names) != len(group["params"]):
            lacking = sorted(set(group["params"]) - set(names))
            raise PlanError(f"group {number} was saved with {lacking[0]!r}, which the optimizer does not have there")
    for names, group, own in zip(groups, saved, optimizer.param_groups, strict=True):
        if with_options:
            own.update({key: entry for key, entry in group.items() if key != "params"})
        for name in names:
            if not ownership.holds(name):
                continue
            parameter = ownership.parameter(name)
            if name in given["state"] and parameter.numel():
                state = given["state"][name].items()
                optimizer.state[parameter] = {
                    key: _on_device_of(parameter, key, _own_part(name, key, entry, parameter, parts))
                    for key, entry in state
                }
            else:
                optimizer.state.pop(parameter, None)


def _named(given: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> Mapping[str, Any]:
    """A state dict of torch's own, with names in place of numbers."""
    saved = given["param_groups"]
    without = next((number for number, group in enumerate(saved) if "params" not in group), None)
    if without is not None:
        raise PlanError(f"group {without} was saved without the parameters that it has: expected them under 'params'")
    numbers = [number for group in saved for number in group["params"]]
    by_number = [isinstance(number, int) for number in numbers]
    if any(by_number) and not all(by_number):
        raise PlanError("the state dict has some parameters by number and some by name: expected one kind")
    if not any(by_number):
        return given
    sizes, own = [len(group["params"]) for group in saved], [len(names) for names in groups]
    if sizes != own:
        raise PlanError(
            f"the state dict numbers its parameters, as an optimizer of the unsplit model does, in groups of {sizes}, "
            f"and this optimizer has groups of {own}: make it from the same parameters, in the same groups"
        )
    names = dict(zip(numbers, [name for group in groups for name in group], strict=True))
    return {
        "state": {names[number]: state for number, state in given["state"].items() if number in names},
        "param_groups": [{**group, "params": [names[number] for number in group["params"]]} for group in saved],
    }


def _own_part(name: str, key: str, entry: Any, parameter: torch.Tensor, parts: Parts | None) -> Any:
    """This rank's part of a state. Raises PlanError for a state of a shape that does not fit."""
    if not isinstance(entry, torch.Tensor) or entry.dim() == 0:
        return entry
    if parts is not None and parts.is_part(name) and entry.shape == parts.whole_shape(name, parameter.shape):
        return parts.part(name, entry)
    pairs = zip(entry.shape, parameter.shape, strict=False)
    if entry.dim() == parameter.dim() and any(of not in (1, size) for of, size in pairs):  # 1: of a factored state
        raise PlanError(
            f"the saved {key!r} of {name} has shape {tuple(entry.shape)}, and the parameter has "
            f"{tuple(parameter.shape)} here: these are states of another model or split"
        )
    return entry


def _on_cpu(entry: Any) -> Any:
    return entry.detach().to("cpu", copy=True) if isinstance(entry, torch.Tensor) else entry


def _on_device_of(parameter: torch.Tensor, key: str, entry: Any) -> Any:
    """The entry on the parameter's device. Step counters stay where they are, on the CPU, as in torch's own loading."""
    if not isinstance(entry, torch.Tensor):
        return entry
    return entry.clone() if key == "step" else entry.to(parameter.device, copy=True)
