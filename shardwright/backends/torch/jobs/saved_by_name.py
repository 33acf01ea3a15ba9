"""What the forward of a shard saves for its backward: parameters by their names, so that their memory is freed between
the passes, and where the plan says so all else on the host."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from shardwright.backends.torch.machine.host_store import HostStore

Unpack = Callable[[], torch.Tensor]


class SavedByName:
    """The saving of one shard's activations. ``parameters`` and ``buffers`` are those that are loaded, by name;
    ``store``: where all other tensors go, None: they stay."""

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], store: HostStore | None
    ) -> None:
        self._parameters, self._buffers, self._store = parameters, buffers, store
        self._saved: list[tuple[str, list[torch.Tensor]]] = []
        """The buffers that were saved, by name."""

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A context in which a forward runs whose backward comes in a later pass."""
        storages, buffers = (
            {tensor.untyped_storage().data_ptr(): name for name, tensor in each.items()}
            for each in (self._parameters, self._buffers)
        )

        def pack(tensor: torch.Tensor) -> Any:
            name = storages.get(tensor.untyped_storage().data_ptr())
            if name is not None:
                place = tensor.shape, tensor.stride(), tensor.storage_offset()
                return lambda: self._parameters[name].detach().as_strided(*place)
            if self._store is None and (name := buffers.get(tensor.untyped_storage().data_ptr())) is not None:
                held = [tensor.detach()]
                self._saved.append((name, held))
                return lambda: held[0]
            if self._store is None:
                return lambda: tensor
            return self._on_host(tensor.detach())

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda unpack: unpack()):
            yield

    def keep(self, changed: Collection[str]) -> None:
        """Keep copies of the saved ones of these buffers, which change again with the next microbatch."""
        for name, held in self._saved:
            if name in changed:
                held[0] = held[0].clone()

    def _on_host(self, tensor: torch.Tensor) -> Unpack:
        assert self._store is not None
        device, away = tensor.device, self._store.kept(tensor)
        return lambda: torch.empty_like(away, device=device).copy_(away)
