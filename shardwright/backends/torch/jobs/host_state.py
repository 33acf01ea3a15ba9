"""The state of one job on the host: parameters, buffers, gradients that wait, and the optimizer's states.

A shard's part of it is copied to the device for a pass, and what the pass has changed goes back behind it. Parameters
and buffers stay the objects that the user's model and optimizer hold: their memory is exchanged.
"""

import copy
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from shardwright.backends.torch.machine.host_store import store_of
from shardwright.backends.torch.state.elementwise import require_no_hooks, require_separate
from shardwright.backends.torch.state.whole_norms import LocalNorms
from shardwright.core.errors import PlanError


class HostState:
    """The state of a model and its optimizer, on the host but for what passes use.

    Raises:
        PlanError: the optimizer has parameters that the model lacks.
        MissingCapabilityError: an optimizer whose step on one parameter depends on the others, or that has hooks.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.device, self.optimizer, self.store = device, optimizer, store_of(device)
        self.parameters, self.buffers = dict(model.named_parameters()), dict(model.named_buffers())
        known = {id(parameter) for parameter in self.parameters.values()}
        if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
            raise PlanError("the optimizer of a job has parameters that its model lacks: make it of model.parameters()")
        require_separate(optimizer)
        require_no_hooks(optimizer)
        self.gradients: dict[str, torch.Tensor] = {}
        """Gradients on the host, flat, by the names of their parameters."""
        self._at_home: dict[str, torch.Tensor] = {}
        for name, tensor in (*self.parameters.items(), *self.buffers.items()):
            tensor.data = self._at_home[name] = self.store.kept(tensor.detach())
        self._keep_states(self.parameters)
        self._options: list[dict[str, Any]] = []

    def begin_step(self) -> None:
        """Note the optimizer's options, which one step of it counts on from: its parts begin alike."""
        self._options = [_without_parameters(group) for group in self.optimizer.param_groups]
        self.gradients.clear()

    # Passes ----------------------------------------------------------------------------------------------------------

    def load(self, names: Iterable[str]) -> None:
        """Copy parameters and buffers to the device."""
        for name in names:
            self._tensor(name).data = _on(self._at_home[name], self.device)

    def load_gradients(self, names: Iterable[str]) -> None:
        """Copy the sums of gradients that later shards have made to the device, where those of this one are added."""
        for name in names:
            if (waiting := self.gradients.pop(name, None)) is not None:
                parameter = self.parameters[name]
                parameter.grad = _on(waiting, self.device).view(parameter.shape)

    def send_gradients(self, names: Iterable[str]) -> None:
        """Add gradients to their sums on the host."""
        for name in names:
            parameter = self.parameters[name]
            if parameter.grad is not None:
                flat = parameter.grad.reshape(-1)
                self.gradients[name] = self.store.collect(self.gradients.get(name), flat)
                parameter.grad = None

    def leave(self, names: Iterable[str], changed: Collection[str]) -> None:
        """Free parameters and buffers on the device, and copy those that have changed to the host first."""
        for name in names:
            tensor = self._tensor(name)
            if name in changed:
                self._at_home[name].copy_(tensor.detach())
            tensor.data = self._at_home[name]

    def changed_buffers(self, names: Iterable[str]) -> set[str]:
        """The buffers whose values on the device are not those on the host: versions do not tell, as batch norms write
        running statistics past them."""
        return {name for name in names if not torch.equal(self.buffers[name].cpu(), self._at_home[name].cpu())}

    def _tensor(self, name: str) -> torch.Tensor:
        return self.parameters[name] if name in self.parameters else self.buffers[name]

    # Updates ---------------------------------------------------------------------------------------------------------

    def norm(self) -> torch.Tensor:
        """The 2-norm of all gradients on the host together."""
        self.store.arrive()
        names = list(self.gradients)
        norms = LocalNorms()
        parameters = [self.parameters[name] for name in names]
        return norms.total(parameters, norms.each(parameters, [self.gradients[name] for name in names]))

    def update(self, names: Collection[str]) -> None:
        """The optimizer's step on parameters that are on the device with their gradients, which are gone behind it."""
        chosen = {id(self.parameters[name]) for name in names if self.parameters[name].grad is not None}
        before = [group["params"] for group in self.optimizer.param_groups]
        for name in names:
            for key, state in self.optimizer.state.get(self.parameters[name], {}).items():
                self.optimizer.state[self.parameters[name]][key] = _moved(state, self.device)
        try:
            for group, params, options in zip(self.optimizer.param_groups, before, self._options, strict=True):
                group |= copy.deepcopy(options) | {"params": [p for p in params if id(p) in chosen]}
            if chosen:
                self.optimizer.step()
        finally:
            for group, params in zip(self.optimizer.param_groups, before, strict=True):
                group["params"] = params
        for name in names:
            self.parameters[name].grad = None
        self._keep_states(names)

    def _keep_states(self, names: Iterable[str]) -> None:
        """Put the states of parameters on the host."""
        for name in names:
            states = self.optimizer.state.get(self.parameters[name], {})
            for key, state in states.items():
                if isinstance(state, torch.Tensor) and state.dim():
                    states[key] = self.store.kept(state)


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({key: value for key, value in group.items() if key != "params"})


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device, as it lies."""
    found = torch.empty_like(tensor, device=device)
    return found.copy_(tensor)


def _moved(state: Any, device: torch.device) -> Any:
    return _on(state, device) if isinstance(state, torch.Tensor) and state.dim() else state
