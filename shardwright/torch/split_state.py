"""The state dict of a split model: put together from the ranks, or this rank's part; and loaded again."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from shardwright.backends.torch.compat import IncompatibleKeys
from shardwright.backends.torch.state import checkpoint
from shardwright.backends.torch.state.extra_state import extra_keys, held_extra, is_extra, keys_elsewhere, set_extra
from shardwright.backends.torch.state.model_agreement import digest_of_state
from shardwright.core.errors import ShardwrightError
from shardwright.torch.model_run import ModelRun
from shardwright.torch.run_agreement import optimizers_claim
from shardwright.torch.session import Session


class SplitState:
    """The state of one model.

    Args:
        as_held: a context in which the module's state dict has the tensors of this rank alone.
    """

    def __init__(
        self, session: Session, run: ModelRun, module: nn.Module, as_held: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.session, self.model_run, self.module, self.as_held = session, run, module, as_held
        self.runtime = run.runtime

    def whole(self, *, rank0_only: bool) -> dict[str, Any]:
        """The whole state dict, by original names, on every rank or on rank 0 only. Every rank calls this."""
        ownership, bound = self.runtime.ownership, self.session.bound
        extra: dict[str, Any] = {}
        if max(bound.size("pp"), bound.size("tp")) > 1:
            failure: Exception | None = None
            try:
                extra = held_extra(ownership)
            except ShardwrightError as error:
                failure = error
            claims = [optimizers_claim(self.model_run)]
            call = self.model_run.of_model(f"model.state_dict({rank0_only=})")
            self.session.agreement.meet(call, claims, failure=failure, in_replica=True)
        self.runtime.split_model.make_values()
        with self.as_held():
            whole = checkpoint.gather(
                ownership, bound, self.session.watchdog, rank0_only=rank0_only, parts=self.runtime.split_model.parts
            )
        if bound.size("pp") > 1 and ownership.placement is not None and extra_keys(self.module):
            stages = [bound.peer("pp", stage) for stage in range(bound.size("pp"))]
            for held in self.session.messages.gather(extra, stages):
                whole.update({key: state for key, state in held.items() if key in whole})
        return whole

    def held(self) -> dict[str, Any]:
        """The part of the state dict that this rank holds."""
        self.runtime.split_model.make_values()
        ownership = self.runtime.ownership
        elsewhere = keys_elsewhere(ownership)
        with self.as_held():
            state = self.module.state_dict()
        return {
            key: entry
            for key, entry in state.items()
            if key not in elsewhere and (key not in ownership.first_name or ownership.holds(ownership.first_name[key]))
        }

    def load(self, state_dict: Mapping[str, Any], *, strict: bool) -> Any:
        """Load this rank's share of a whole state dict, or what `held` gave on this rank under the same plan. Raises
        PlanError for names and shapes that do not fit."""
        self.runtime.split_model.make_values()
        own = self.held()
        if self._is_divided(own) and _is_like(state_dict, own):
            with torch.no_grad():
                for key, entry in own.items():
                    if isinstance(entry, torch.Tensor) and not is_extra(key):
                        entry.detach().copy_(state_dict[key])
            set_extra(self.runtime.ownership, state_dict)
            self.session.note_loaded("what each rank holds")
            return IncompatibleKeys([], [])
        with self.as_held():
            missing, unexpected = checkpoint.load(
                self.runtime.ownership, state_dict, strict=strict, parts=self.runtime.split_model.parts
            )
        self.session.note_loaded(f"weights {digest_of_state(state_dict)}")
        return IncompatibleKeys(missing, unexpected)

    def _is_divided(self, own: Mapping[str, Any]) -> bool:
        """Whether what this rank holds is not the whole model."""
        parts, first_name = self.runtime.split_model.parts, self.runtime.ownership.first_name
        with self.as_held():
            names = self.module.state_dict().keys()
        return own.keys() != names or any(
            isinstance(entry, torch.Tensor) and entry.shape != parts.whole_shape(first_name.get(key, key), entry.shape)
            for key, entry in own.items()
        )


def _is_like(given: Any, own: Mapping[str, Any]) -> bool:
    """Whether a state dict has the names and the shapes of one rank's part."""
    return (
        isinstance(given, Mapping)
        and given.keys() == own.keys()
        and all(
            isinstance(given[key], torch.Tensor) and given[key].shape == entry.shape
            for key, entry in own.items()
            if isinstance(entry, torch.Tensor)
        )
    )
