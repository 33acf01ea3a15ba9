"""Offload: units whose activations are on the host between their forward and their backward.

Autograd hands every tensor that an op of the unit saves to a hook, which sends its storage to the host. The first of
them that the backward asks for brings the unit's storages back, and where copies run beside computing, begins to bring
those of the units before it. Parameters, buffers and what the unit was given without a gradient, or from another rank,
stay where they are: they are on the device anyway.

A storage is sent once, however many views of it are saved. It is told by its version too: a value saved before a write
in place and one saved after it are two.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shardwright.backends.torch.compat import StorageWeakRef
from shardwright.backends.torch.machine.host_store import Away, store_of
from shardwright.backends.torch.program.program import Step
from shardwright.backends.torch.program.stage_map import Call
from shardwright.core.errors import MissingCapabilityError

SMALL = 1024
"""The bytes of a storage below which it stays: sending it back and forth takes longer than anything gained."""


class Trip:
    """The storages of one unit's forward that are on the host, of one microbatch."""

    def __init__(self, before: "Trip | None") -> None:
        self.before = before
        """Those of the unit before, which a backward needs next."""
        self.aways: list[_Sent] = []

    def come(self, ahead: int) -> None:
        """Begin to bring back the storages of this unit, and of as many before it."""
        trip: Trip | None = self
        for _ in range(ahead + 1):
            if trip is None:
                return
            for sent in reversed(trip.aways):
                sent.begin()
            trip = trip.before


class _Sent:
    """One storage on the host, and the tensors saved in it."""

    __slots__ = ("away", "left", "users")

    def __init__(self, away: Away) -> None:
        self.away = away
        self.users = self.left = 0
        """The tensors saved in it, and those of them that have not asked for it yet."""

    def begin(self) -> None:
        """Begin to bring it back, unless every tensor has asked: others of the unit ask after that."""
        if self.left:
            self.away.begin()

    def fetch(self) -> torch.UntypedStorage:
        """The storage on the device. It is let go of with the last of its tensors that asks: a backward asks once for
        each, and one that keeps its graph may ask again."""
        storage = self.away.fetch()
        self.left = (self.left or self.users) - 1
        if self.left == 0:
            self.away.drop()
        return storage


class _Saved:
    """A saved tensor: a view of a storage on the host."""

    __slots__ = ("dtype", "is_conj", "is_neg", "offset", "sent", "shape", "strides", "trip")

    def __init__(self, tensor: torch.Tensor, sent: _Sent, trip: Trip) -> None:
        self.sent, self.trip, self.dtype = sent, trip, tensor.dtype
        self.shape, self.strides, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        self.is_conj, self.is_neg = tensor.is_conj(), tensor.is_neg()

    def tensor(self, device: torch.device) -> torch.Tensor:
        found = torch.empty(0, dtype=self.dtype, device=device)
        found.set_(self.sent.fetch(), self.offset, self.shape, self.strides)
        if self.is_conj:
            found = found.conj()
        return found.neg() if self.is_neg else found


class Offload:
    """The offloaded calls of a plan.

    Args:
        calls: the calls whose activations go to the host.
        ahead: the number of units whose activations are brought back before they are needed, where copies run beside
            computing.
    """

    def __init__(self, calls: frozenset[Call], device: torch.device, ahead: int = 1) -> None:
        self.calls, self._device = calls, device
        self._store = store_of(device) if calls else None
        self._ahead = ahead if self._store is not None and self._store.copies_beside else 0

    def names(self, step: Step) -> bool:
        """Whether the plan names a step."""
        return (step.path, step.occurrence) in self.calls

    def settle(self) -> None:
        """Let what follows on the device wait until all that was sent is on the host."""
        if self._store is not None:
            self._store.settle(0)

    @contextmanager
    def sending(
        self, name: str, module: nn.Module, given: Iterable[torch.Tensor], before: Trip | None
    ) -> Iterator[Trip]:
        """A context for the forward of a unit.

        Args:
            given: the tensors among its arguments.
            before: of the offloaded unit before it in this microbatch.
        """
        assert self._store is not None
        store, device = self._store, self._device
        trip, sent = Trip(before), dict[tuple[StorageWeakRef, int], _Sent]()
        staying = {_key(tensor)[0] for tensor in _staying(module, given)}

        def send(tensor: torch.Tensor) -> "_Saved | torch.Tensor":
            if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
                raise MissingCapabilityError(
                    f"{name} saves a {type(tensor).__name__} of layout {tensor.layout} for its backward, and plain "
                    f"strided tensors alone can go to the host: plan again without offloading {name}"
                )
            key = _key(tensor)
            stays = key[0] in staying or isinstance(tensor, nn.Parameter) or tensor.device != device
            if stays or tensor.untyped_storage().nbytes() < SMALL:
                return tensor
            found = sent.get(key)
            if found is None:
                found = sent[key] = _Sent(store.send(tensor))
                trip.aways.append(found)
            found.users += 1
            found.left = found.users
            return _Saved(tensor, found, trip)

        def bring(saved: "_Saved | torch.Tensor") -> torch.Tensor:
            if isinstance(saved, torch.Tensor):
                return saved
            saved.trip.come(self._ahead)
            return saved.tensor(device)

        with torch.autograd.graph.saved_tensors_hooks(send, bring):
            yield trip
        store.settle(sum(sent.away.nbytes for sent in trip.aways))


def _staying(module: nn.Module, given: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    held = getattr(module, "held_parameters", None)
    yield from module.parameters() if held is None else held()
    yield from module.buffers()
    # A leaf that has a gradient came from another rank, and stays until its gradient goes back there.
    yield from (tensor for tensor in given if not tensor.requires_grad or tensor.is_leaf)


def _key(tensor: torch.Tensor) -> tuple[StorageWeakRef, int]:
    """A storage and its version. As long as the key is held, no other storage is taken for it."""
    return StorageWeakRef(tensor.untyped_storage()), tensor._version
