"""The optimizer of a split model: the user's own, over the parameters that this rank holds."""

from collections.abc import Callable
from typing import Any

import torch

from shardwright.core.errors import ShardwrightError
from shardwright.torch import session as sessions


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer made from the model's parameters, before or after the model was wrapped or split.

    Parameters are matched by identity: those of other ranks leave the groups, those of a model on the meta device are
    replaced by the ones with data. Learning-rate schedulers take the wrapper.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # Deliberately not torch's own __init__: the groups and the state are those of the wrapped optimizer.
        session = sessions.current()
        if session.model is None:
            raise ShardwrightError("wrap the model first: sw.DistributedModel(model), then the optimizer")
        self.optimizer = optimizer
        self._holding = session.model.runtime.holding
        self._names: list[list[str | torch.Tensor]] = []
        self._note_groups()
        self._rebind()
        session.model.runtime.listeners.append(self._rebind)

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
        return self.optimizer.step()

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
