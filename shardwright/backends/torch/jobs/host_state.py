"""The state of one job on the host: parameters, buffers, gradients that wait, and the optimizer's states.

A shard's part of it is copied to the device for a pass, and what the pass has changed goes back behind it. Parameters
and buffers stay the objects that the user's model and optimizer hold: their memory is exchanged.
"""

import copy
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from shardwright.backends.torch.jobs.host_tensors import HostTensors, on_device
from shardwright.backends.torch.state.elementwise import require_no_hooks, require_separate
from shardwright.backends.torch.state.whole_norms import LocalNorms
from shardwright.core.errors import MissingCapabilityError, PlanError

_PLAIN = (bool, int, float, str, type(None))
"""What processes tell each other of an optimizer beside its tensors."""

_OF_TORCH = frozenset({"_opt_called", "_step_count", "_warned_capturable_if_run_uncaptured"})
"""Attributes by which PyTorch warns."""


class HostState:
    """The state of a model and its optimizer, on the host but for what passes use.

    Args:
        host: where tensors are on the host. What is there already, of another process, takes the place of the model's.

    Raises:
        PlanError: the optimizer has parameters that the model lacks, or another process has another model.
        MissingCapabilityError: an optimizer whose step on one parameter depends on the others, or that has hooks.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, host: HostTensors
    ) -> None:
        self.device, self.optimizer, self.host, self._model = device, optimizer, host, model
        self.parameters, self.buffers = dict(model.named_parameters()), dict(model.named_buffers())
        known = {id(parameter) for parameter in self.parameters.values()}
        if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
            raise PlanError("the optimizer of a job has parameters that its model lacks: make it of model.parameters()")
        require_separate(optimizer)
        require_no_hooks(optimizer)
        _require_memory_of_their_own(self.parameters | self.buffers)
        self._at_home: dict[str, torch.Tensor] = {}
        taken_up = host.read()
        found = {f"model:{name}": tensor for name, tensor in (*self.parameters.items(), *self.buffers.items())}
        _require_same({key: host.get(key) for key in taken_up if host.has(key) and key.startswith("model:")}, found)
        for key, tensor in found.items():
            home = host.get(key) if host.has(key) else host.put(key, tensor.detach())
            tensor.data = self._at_home[key.removeprefix("model:")] = home
            tensor.grad = None  # of what came before the job
        if taken_up:
            self.take_up(taken_up)
        else:
            self._keep_states(self.parameters)
        self._options: list[dict[str, Any]] = []
        self._attributes: dict[str, Any] = {}

    def take_up(self, keys: Iterable[str]) -> None:
        """Take up the optimizer's states and options that another process has put on the host under these keys."""
        for key in keys:
            kind, _, rest = key.partition(":")
            if kind == "state":
                state, _, name = rest.partition(":")
                held = self.host.get(key) if self.host.has(key) else self.host.noted(key)
                self.optimizer.state[self.parameters[name]][state] = held
            elif kind == "options":
                for group, changed in zip(self.optimizer.param_groups, self.host.noted(key), strict=True):
                    group |= changed

    def begin_step(self) -> None:
        """Note the optimizer's options and attributes, which one step of it counts on from: its parts begin alike."""
        self._options = [_without_parameters(group) for group in self.optimizer.param_groups]
        self._attributes = _plain_attributes(self.optimizer)

    @property
    def told_options(self) -> list[list[str]]:
        """The options with which a step begins, and the parameters that they are of, as processes compare them."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        return [
            [*(f"{key}={value!r}" for key, value in sorted(options.items())), *(names[id(p)] for p in group["params"])]
            for options, group in zip(self._options, self.optimizer.param_groups, strict=True)
        ]

    def keep_apart(self) -> None:
        """Let parameters, buffers and states be where the host's tensors are now."""
        for name in self._at_home:
            self._tensor(name).data = self._at_home[name] = self.host.get(f"model:{name}")
        for name, parameter in self.parameters.items():
            for state in self.optimizer.state.get(parameter, {}):
                if self.host.has(key := _state_key(state, name)):
                    self.optimizer.state[parameter][state] = self.host.get(key)

    # Passes ----------------------------------------------------------------------------------------------------------

    def load(self, names: Iterable[str]) -> None:
        """Copy parameters and buffers to the device."""
        for name in names:
            self._tensor(name).data = on_device(self._at_home[name], self.device)

    def load_gradients(self, names: Iterable[str]) -> None:
        """Copy the sums of gradients that later shards have made to the device, where those of this one are added."""
        for name in names:
            if self.host.has(key := f"gradient:{name}"):
                parameter = self.parameters[name]
                parameter.grad = self.host.taken(key, self.device).view(parameter.shape)

    def scale_gradients(self, names: Iterable[str], factor: float) -> None:
        """Multiply gradients that are on the device."""
        for name in names:
            if (gradient := self.parameters[name].grad) is not None:
                gradient.mul_(factor)

    def send_gradients(self, names: Iterable[str]) -> None:
        """Add gradients to their sums on the host."""
        for name in names:
            parameter = self.parameters[name]
            if parameter.grad is not None:
                self.host.add(f"gradient:{name}", parameter.grad.reshape(-1))
                parameter.grad = None

    def leave(self, names: Iterable[str], changed: Collection[str]) -> None:
        """Free parameters and buffers on the device, and copy those that have changed to the host first."""
        for name in names:
            tensor = self._tensor(name)
            if name in changed:
                self._at_home[name].copy_(tensor.detach())
            tensor.data = self._at_home[name]
            tensor.grad = None

    def settle(self, buffers: Iterable[str]) -> None:
        """Let buffers in whose place modules have put other tensors be what they were, with the new values.

        Raises MissingCapabilityError for one of another shape or dtype."""
        for name in buffers:
            path, _, own = name.rpartition(".")
            held, tensor = self._model.get_submodule(path)._buffers, self.buffers[name]
            if (now := held.get(own)) is tensor:
                continue
            held[own] = tensor
            if now is None or (now.shape, now.dtype) != (tensor.shape, tensor.dtype):
                given = "nothing" if now is None else f"{tuple(now.shape)} of {now.dtype}"
                raise MissingCapabilityError(
                    f"the forward puts {given} in the place of buffer {name}, which is {tuple(tensor.shape)} of "
                    f"{tensor.dtype}: buffers of jobs keep their shape and dtype"
                )
            tensor.data = now.detach()

    def changed_buffers(self, names: Iterable[str]) -> set[str]:
        """The buffers whose values on the device are not those on the host: versions do not tell, as batch norms write
        running statistics past them."""
        return {name for name in names if not torch.equal(self.buffers[name].cpu(), self._at_home[name].cpu())}

    def _tensor(self, name: str) -> torch.Tensor:
        return self.parameters[name] if name in self.parameters else self.buffers[name]

    # Updates ---------------------------------------------------------------------------------------------------------

    def norm(self) -> torch.Tensor:
        """The 2-norm of all gradients on the host together."""
        self.host.arrive()
        names = [name for name in self.parameters if self.host.has(f"gradient:{name}")]
        norms = LocalNorms()
        parameters = [self.parameters[name] for name in names]
        return norms.total(parameters, norms.each(parameters, [self.host.get(f"gradient:{name}") for name in names]))

    def update(self, names: Collection[str]) -> None:
        """The optimizer's step on parameters that are on the device with their gradients, which are gone behind it."""
        chosen = {id(self.parameters[name]) for name in names if self.parameters[name].grad is not None}
        before = [group["params"] for group in self.optimizer.param_groups]
        for name in names:
            states = self.optimizer.state.get(self.parameters[name], {})
            for state, value in states.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    states[state] = on_device(value, self.device)
        vars(self.optimizer).update(self._attributes)
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
        self._require_states_of_parameters()
        self._keep_states(names)
        if self.host.is_shared:
            self._tell_options(self._attributes)

    def _keep_states(self, names: Iterable[str]) -> None:
        """Put the states of parameters on the host."""
        for name in names:
            states = self.optimizer.state.get(self.parameters[name], {})
            for state, value in states.items():
                key = _state_key(state, name)
                if isinstance(value, torch.Tensor):
                    if value.dim() or self.host.is_shared:
                        states[state] = self.host.put(key, value)
                elif self.host.is_shared:
                    self._require_plain(f"the state {state!r} of {name}", value)
                    self.host.note(key, value)

    def _require_states_of_parameters(self) -> None:
        """Raise MissingCapabilityError for a state that is of no parameter: each shard's update would change it."""
        if odd := [key for key in self.optimizer.state if not isinstance(key, torch.Tensor)]:
            raise MissingCapabilityError(
                f"{type(self.optimizer).__name__} has a state {odd[0]!r} that is of no parameter, and the update of "
                f"each shard would change it: keep it as an option of the parameter groups"
            )

    def _tell_options(self, attributes: Mapping[str, Any]) -> None:
        """Let other processes know of options that the optimizer's step has changed. Raises MissingCapabilityError for
        an optimizer that keeps something elsewhere."""
        changed = []
        for group, options in zip(self.optimizer.param_groups, self._options, strict=True):
            other = {
                key: value for key, value in _without_parameters(group).items() if not _is_same(value, options.get(key))
            }
            for key, value in other.items():
                self._require_plain(f"the option {key!r}", value)
            changed.append(other)
        if any(changed):
            self.host.note("options:", changed)
        if (now := _plain_attributes(self.optimizer)) != attributes:
            names = sorted(key for key in now if now[key] != attributes.get(key))
            raise MissingCapabilityError(
                f"{type(self.optimizer).__name__} writes its attribute {names[0]!r} as it updates, which the other "
                f"processes that update it do not see: plan the jobs for one device"
            )

    def _require_plain(self, what: str, value: Any) -> None:
        if not isinstance(value, _PLAIN):
            raise MissingCapabilityError(
                f"{what} of {type(self.optimizer).__name__} is a {type(value).__name__}, which processes do not share: "
                f"plan the jobs for one device"
            )


def _require_memory_of_their_own(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise MissingCapabilityError for tensors that share memory without being one: each would be copied by itself."""
    owners: dict[int, str] = {}
    for name, tensor in tensors.items():
        if tensor.numel() and (other := owners.setdefault(tensor.untyped_storage().data_ptr(), name)) != name:
            raise MissingCapabilityError(
                f"{other} and {name} lie in the same memory, and shards copy each by itself: make them one parameter, "
                f"or clone one of them"
            )


def _require_same(known: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> None:
    """Raise PlanError where another process has another model."""
    forms = [{key: (tuple(of.shape), of.dtype) for key, of in each.items()} for each in (known, own)]
    if known and forms[0] != forms[1]:
        odd = sorted(key for key in forms[0] | forms[1] if forms[0].get(key) != forms[1].get(key))[0]
        theirs, here = (of.get(odd, "nothing") for of in forms)
        raise PlanError(
            f"{odd.removeprefix('model:')} is {here} here, and {theirs} in the model of another process: all processes "
            f"make the same models"
        )


def _state_key(state: str, name: str) -> str:
    return f"state:{state}:{name}"


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({key: value for key, value in group.items() if key != "params"})


def _plain_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Numbers and texts that an optimizer holds beside its states and options, but for PyTorch's own."""
    return {k: v for k, v in vars(optimizer).items() if isinstance(v, _PLAIN) and k not in _OF_TORCH}


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(value, other)
    return bool(type(value) is type(other) and value == other)
