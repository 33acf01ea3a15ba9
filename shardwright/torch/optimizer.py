"""The optimizer of a split model: the user's own, over the parameters that this rank holds."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwright.backends.torch.model_claims import plain_text
from shardwright.backends.torch.optimizer_states import gather_states, load_states
from shardwright.core.errors import MissingCapabilityError, ShardwrightError
from shardwright.torch import session as sessions


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer made from the model's parameters, before or after the model was wrapped or split.

    Parameters are matched by identity: those of other ranks leave the groups, those of a model on the meta device are
    replaced by the ones with data. Learning-rate schedulers take the wrapper.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # Deliberately not torch's own __init__: the groups and the state are those of the wrapped optimizer.
        session = sessions.current()
        runtime = session.runtime
        if runtime is None:
            raise ShardwrightError("wrap the model first: sw.DistributedModel(model), then the optimizer")
        self.optimizer = optimizer
        self._holding, self._bound, self._watch = runtime.holding, session.bound, session.watch
        self._gradients = runtime.gradients
        self._names: list[list[str | torch.Tensor]] = []
        self._note_groups()
        self._rebind()
        self._steps = 0
        runtime.listeners.append(self._rebind)
        session.optimizers.append(weakref.ref(self))

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters of this rank from their gradients, which the step has reduced already."""
        if closure is not None:
            raise ShardwrightError("a closure would run part of a model only: call the step function, then step()")
        self._steps += 1
        return self.optimizer.step()

    def said(self, name: str) -> dict[str, str]:
        """How the optimizer is set, by what it is: what every rank must have alike."""
        found = {name: type(self.optimizer).__name__, f"the steps of {name}": str(self._steps)}
        for number, group in enumerate(self.param_groups):
            for key, value in group.items():
                if key != "params" and (text := plain_text(value)) is not None:
                    found[f"{key} of {name}, group {number}"] = text
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)
        self._note_groups()
        self._rebind()

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's parameters."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave on this rank, under the same plan."""
        self.optimizer.load_state_dict(state_dict)

    def whole_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """The state of all parameters, by their original names, whatever the split: what `load_whole_state_dict` takes
        under any other. On every rank, or with ``rank0_only`` on rank 0 and empty elsewhere. Every rank calls this.

        Returns:
            ``{"state": {name: {...}}, "param_groups": [{"params": [names], ...}]}``, tensors on the CPU.
        """
        self._require_whole_parameters()
        current = sessions.current()
        current.agreement.meet(f"optimizer.whole_state_dict({rank0_only=})", in_replica=True)
        return gather_states(self._holding, self.optimizer, self._named_groups(), self._bound, self._watch, rank0_only)

    def load_whole_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's share of what `whole_state_dict` gave. Raises PlanError for names that do not fit."""
        self._require_whole_parameters()
        load_states(self._holding, self.optimizer, self._named_groups(), state_dict)

    def _require_whole_parameters(self) -> None:
        if self._gradients.shards is not None:
            raise MissingCapabilityError(
                "the states of an optimizer lie in pieces along the tensor axis, and this version puts those of a "
                "pipeline together alone: save state_dict() on every rank, and load it under the same plan"
            )

    def _named_groups(self) -> list[list[str]]:
        foreign = [p for names in self._names for p in names if not isinstance(p, str)]
        if foreign:
            raise ShardwrightError(
                f"the optimizer has a parameter of shape {tuple(foreign[0].shape)} that is none of the model's, and so "
                f"has no name: give it an optimizer of its own"
            )
        return [[str(name) for name in names] for names in self._names]

    def _note_groups(self) -> None:
        """Remember every group by names; parameters that are not the model's by themselves."""
        for group in self.param_groups[len(self._names) :]:
            self._names.append([self._holding.name_of(p) or p for p in group["params"]])

    def _rebind(self) -> None:
        old = {self._holding.name_of(p): p for group in self.param_groups for p in group["params"]}
        for group, names in zip(self.param_groups, self._names, strict=True):
            kept: list[torch.Tensor] = []
            for name in names:
                parameter = self._holding.parameter(name) if isinstance(name, str) else name
                before = old.get(name) if isinstance(name, str) else None
                if before is not None and before is not parameter and before in self.state:
                    state = self.state.pop(before)
                    if not parameter.is_meta:
                        self.state[parameter] = state
                if not parameter.is_meta:
                    kept.append(parameter)
            group["params"] = kept

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"
