"""Live storages of a training step under torch's own MemTracker, also where several microbatches are under way. What
lies in a host store is not on the device, and is left out."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed._tools.mem_tracker import MemTracker, get_untyped_storages

from shardwright.backends.torch.machine.host_store import is_in_file


class _NoModules:
    """In place of the tracker of modules, which several microbatches under way confuse, and which keeps every leaf that
    enters a module, with its gradient, to the end of the step."""

    is_bw, parents = False, frozenset[str]()

    def register_user_hooks(self, *_: Any) -> None: ...
    def clear_user_hooks(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: Any) -> None: ...


class LiveStorages(MemTracker):
    """All live storages of this process: those that `track_external` is given, and what is made while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._mod_tracker = _NoModules()  # type: ignore[assignment]

    def _track(self, reftype: Any, t: torch.Tensor) -> None:
        if not _is_on_host(t):
            super()._track(reftype, t)

    def _update_and_maybe_create_winfos(self, t: torch.Tensor, *more: Any, **options: Any) -> Any:
        return set() if _is_on_host(t) else super()._update_and_maybe_create_winfos(t, *more, **options)

    def restart(self) -> None:
        """Forget the peak so far."""
        self._peak_mem_snap = self.get_tracker_snapshot()
        self._peak_mem = {device: _total({device: held}) for device, held in self._peak_mem_snap.items()}

    def now_bytes(self) -> int:
        return _total(self.get_tracker_snapshot())

    def peak_bytes(self, without: str | None = None) -> int:
        """The most at once. ``without``: a kind of device that does not count."""
        held = self.get_tracker_snapshot("peak")
        return _total({device: of for device, of in held.items() if device.type != without})


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and any(map(is_in_file, get_untyped_storages(tensor)))


def held_by(runtime: Any) -> list[torch.Tensor]:
    """The parameters and buffers that this rank of a plan's runtime holds, and where parameters are sharded, what they
    are gathered into."""
    flat = runtime.split_model.parts.flat
    gathered = [] if flat is None else [group.gathered for group in flat.groups]
    owned = runtime.ownership
    return [*owned.local_parameters().values(), *gathered, *owned.local_buffers().values()]


def _total(snapshot: dict[Any, dict[Any, int]]) -> int:
    """Of all devices."""
    return sum(
        int(v) for held in snapshot.values() for key, v in held.items() if str(getattr(key, "value", key)) == "Total"
    )


@contextmanager
def tracking(
    parameters: Iterable[torch.Tensor], optimizer: Any, batch: Iterable[torch.Tensor]
) -> Iterator[LiveStorages]:
    """Follows what is made in here, the parameters, the optimizer's states and the batch."""
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    tracker = LiveStorages()
    tracker.track_external(*parameters, *states, *batch)
    with tracker:
        yield tracker
