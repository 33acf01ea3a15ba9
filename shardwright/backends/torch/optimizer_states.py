"""The states of an optimizer over the ranks of a pipeline, whole and by original names."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwright.backends.torch.holding import Holding
from shardwright.backends.torch.mesh import BoundMesh
from shardwright.backends.torch.watch import Watch
from shardwright.core.errors import PlanError, nearest


def gather_states(
    holding: Holding,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[str]],
    bound: BoundMesh,
    watch: Watch,
    rank0_only: bool,
) -> dict[str, Any]:
    """``{"state": …, "param_groups": …}`` over all parameters; each comes from its home. Every rank calls this.

    Args:
        groups: for every parameter group the names of its parameters, those of other ranks too.
    """
    me, placement = bound.coordinate("pp"), holding.placement
    own: dict[str, Any] = {}
    for names in groups:
        for name in names:
            parameter = holding.parameter(name)
            at_home = placement is None or placement.holders(name)[0] == me
            if at_home and parameter in optimizer.state:
                own[name] = {key: _on_cpu(entry) for key, entry in optimizer.state[parameter].items()}
    every: list[dict[str, Any] | None] = [own]
    watch.doing("gathering the states of the optimizer")
    if bound.size("pp") > 1:
        first = bound.peer("pp", 0)
        every = [None] * bound.size("pp")
        with watch.waiting(f"pp peers, ranks {list(bound.groups['pp'])}"):
            if rank0_only:
                dist.gather_object(own, every if me == 0 else None, first, group=bound.handles["pp"])
            else:
                dist.all_gather_object(every, own, group=bound.handles["pp"])
    watch.doing("between steps")
    if rank0_only and bound.rank != 0:
        return {}
    found = {name: state for states in every if states is not None for name, state in states.items()}
    return {
        "state": {name: found[name] for names in groups for name in names if name in found},
        "param_groups": [
            {key: entry for key, entry in group.items() if key != "params"} | {"params": list(names)}
            for group, names in zip(optimizer.param_groups, groups, strict=True)
        ],
    }


def load_states(
    holding: Holding, optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[str]], given: Mapping[str, Any]
) -> None:
    """Take this rank's share of what `gather_states` gave, under whatever plan that was.

    Raises PlanError when the groups hold other parameters.
    """
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
        own.update({key: entry for key, entry in group.items() if key != "params"})
        for name in names:
            if not holding.holds(name):
                continue
            parameter = holding.parameter(name)
            if name in given["state"]:
                state = given["state"][name].items()
                optimizer.state[parameter] = {key: _on_device_of(parameter, key, entry) for key, entry in state}
            else:
                optimizer.state.pop(parameter, None)


def _on_cpu(entry: Any) -> Any:
    return entry.detach().to("cpu", copy=True) if isinstance(entry, torch.Tensor) else entry


def _on_device_of(parameter: torch.Tensor, key: str, entry: Any) -> Any:
    """As torch's own loading has it: step counters stay on the CPU."""
    if not isinstance(entry, torch.Tensor):
        return entry
    return entry.clone() if key == "step" else entry.to(parameter.device, copy=True)
