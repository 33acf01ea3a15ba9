"""The tensors of one job on the host, by keys: of its model and optimizer, values between shards, gradient sums."""

from abc import ABC, abstractmethod
from typing import Any

import torch

from shardwright.backends.torch.machine.host_store import HostStore


class HostTensors(ABC):
    """The tensors of a job in the host's memory, by key, and values that are no tensors."""

    is_shared: bool
    """Whether other processes run passes of the job too."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}
        self._noted: dict[str, Any] = {}

    @abstractmethod
    def put(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """The same values on the host under a key; the tensor itself where it is there already."""

    @abstractmethod
    def add(self, key: str, flat: torch.Tensor) -> None:
        """Add a flat tensor to a sum on the host, which begins with it. It may be read after `arrive`."""

    @abstractmethod
    def arrive(self) -> None:
        """Wait until all sums are there."""

    @abstractmethod
    def drop(self, key: str) -> None:
        """Free the tensor of a key, if there is one."""

    @abstractmethod
    def note(self, key: str, value: Any) -> None:
        """Note a value, which JSON can hold, under a key."""

    @abstractmethod
    def read(self) -> list[str]:
        """Take up what other processes have put and noted; returns the keys."""

    @abstractmethod
    def tell(self) -> None:
        """Let other processes know what was put and noted here."""

    def noted(self, key: str, default: Any = None) -> Any:
        """The value that was noted under a key."""
        return self._noted.get(key, default)

    def has(self, key: str) -> bool:
        return key in self._held

    def get(self, key: str) -> torch.Tensor:
        return self._held[key]

    def copied(self, key: str, device: torch.device) -> torch.Tensor:
        """A copy on a device."""
        return on_device(self._held[key], device)

    def taken(self, key: str, device: torch.device) -> torch.Tensor:
        """A copy on a device; there is none on the host any more."""
        found = self.copied(key, device)
        self.drop(key)
        return found

    def drop_all(self, prefix: str) -> None:
        """Free the tensors whose keys begin so."""
        for key in [key for key in self._held if key.startswith(prefix)]:
            self.drop(key)


class OwnTensors(HostTensors):
    """The tensors of a job that runs in one process. ``store``: where they are."""

    is_shared = False

    def __init__(self, store: HostStore) -> None:
        super().__init__()
        self._store = store

    def put(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        self._held[key] = self._store.kept(tensor)
        return self._held[key]

    def add(self, key: str, flat: torch.Tensor) -> None:
        self._held[key] = self._store.collect(self._held.get(key), flat)

    def arrive(self) -> None:
        self._store.arrive()

    def drop(self, key: str) -> None:
        self._held.pop(key, None)

    def note(self, key: str, value: Any) -> None:
        self._noted[key] = value

    def read(self) -> list[str]:
        return []

    def tell(self) -> None:
        """There are no others."""


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on a device, as it lies."""
    return torch.empty_like(tensor, device=device).copy_(tensor)
