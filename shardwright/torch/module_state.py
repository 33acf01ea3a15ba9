"""The state dict of the module inside of a split model: whole, as that of the model itself."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


class ModuleState:
    """Lets ``model.module.state_dict()``, as scripts for `DistributedDataParallel` save it, be the whole state dict:
    without it a part of the tensors would be on the meta device, and their values would be lost. With
    ``keep_vars=True`` it has the parameters of this rank, as ever.

    Args:
        module: the module; a hook is registered on it.
        gather: gives the whole state dict, when every rank calls it.
        is_divided: whether a state dict of the module lacks a part of the whole.
    """

    def __init__(
        self, module: nn.Module, gather: Callable[[], Mapping[str, Any]], is_divided: Callable[[], bool]
    ) -> None:
        self._gather, self._is_divided = gather, is_divided
        self._is_asked_for_held = False

        def fill(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            self._fill(state, prefix)

        module.register_state_dict_post_hook(fill)

    @contextmanager
    def as_held(self) -> Iterator[None]:
        """A context in which the module's state dict is that of the tensors which this rank holds."""
        before, self._is_asked_for_held = self._is_asked_for_held, True
        try:
            yield
        finally:
            self._is_asked_for_held = before

    def _fill(self, state: dict[str, Any], prefix: str) -> None:
        asks_for_variables = any(isinstance(entry, nn.Parameter) for entry in state.values())  # by keep_vars=True
        if self._is_asked_for_held or asks_for_variables or not self._is_divided():
            return
        for name, entry in self._gather().items():
            state[f"{prefix}{name}"] = entry
