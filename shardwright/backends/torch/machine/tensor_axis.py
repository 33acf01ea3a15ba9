"""This rank's place on the tensor axis, and the collectives along it.

A change of placement is the one that `core.layout.conversion_bytes` counts, carried out over torch.distributed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwright.backends.torch.compat import functional_collectives as functional
from shardwright.backends.torch.machine.pipeline_messages import as_carried
from shardwright.backends.torch.machine.tensor_shards import piece_of, whole_of
from shardwright.backends.torch.machine.watchdog import LONGEST_WAIT_S, Watchdog
from shardwright.core.errors import LayoutError
from shardwright.core.layout.conversion_bytes import table_bytes
from shardwright.core.layout.placements import Partial, Placement, Replicate, Split

Change = tuple[Placement, Placement]
"""The placements before and after."""


@dataclass(slots=True)
class Traffic:
    """Calls and bytes on the wire since the last `clear`, by (unit, direction) where direction is forward, backward,
    inner (statistics inside an op) or parameters. Bytes are the sum over all ranks' sends, as `table_bytes` counts."""

    calls: dict[tuple[str, str], int] = field(default_factory=dict)
    moved_bytes: dict[tuple[str, str], float] = field(default_factory=dict)

    def note(self, key: tuple[str, str], size_bytes: float) -> None:
        self.calls[key] = self.calls.get(key, 0) + 1
        self.moved_bytes[key] = self.moved_bytes.get(key, 0.0) + size_bytes

    def clear(self) -> None:
        self.calls.clear()
        self.moved_bytes.clear()


class Axis:
    """This rank's place on the tensor axis, and the collectives along it."""

    def __init__(
        self, group: ProcessGroup, ranks: Sequence[int], coordinate: int, watchdog: Watchdog | None = None
    ) -> None:
        """``ranks`` are the group's global ranks in order of their coordinate."""
        self.group, self.ranks, self.coordinate = group, tuple(ranks), coordinate
        self.watchdog = watchdog or Watchdog("this rank", LONGEST_WAIT_S)
        self.name = group.group_name
        self._peers = f"tp peers, ranks {list(self.ranks)}"
        self.traffic = Traffic()

    @property
    def size(self) -> int:
        return len(self.ranks)

    def note(self, key: tuple[str, str], size_bytes: float) -> None:
        """Count a collective; collectives inside compiled code are not counted."""
        if not torch.compiler.is_compiling():
            self.traffic.note(key, size_bytes)

    def _waiting(self, what: str, key: tuple[str, str] = ("", "")) -> Watchdog:
        where = f" of the {key[1]} of {key[0]}" if key[0] else ""
        return self.watchdog.waiting(f"{self._peers}, in the {what}{where}", self.ranks)

    def all_reduce(self, tensor: torch.Tensor, reduction: str, key: tuple[str, str]) -> torch.Tensor:
        """The sum or maximum over all ranks; ``tensor`` is overwritten."""
        if torch.compiler.is_compiling():
            return _functional(functional.all_reduce(tensor, reduction, self.name))
        tensor = _own_memory(tensor)
        self.note(key, 2 * (self.size - 1) * tensor.numel() * tensor.element_size())
        op = dist.ReduceOp.SUM if reduction == "sum" else dist.ReduceOp.MAX
        with self._waiting("all-reduce", key):
            dist.all_reduce(as_carried(tensor), op=op, group=self.group)
        return tensor

    def begin_sum(self, tensor: torch.Tensor, key: tuple[str, str]) -> tuple[torch.Tensor, Callable[[], Any]]:
        """The sum over all ranks, and a function after whose call it is there; ``tensor`` is overwritten."""
        tensor = _own_memory(tensor)
        self.note(key, 2 * (self.size - 1) * tensor.numel() * tensor.element_size())
        with self._waiting("start of an all-reduce", key):
            work = dist.all_reduce(tensor, group=self.group, async_op=True)

        def arrive() -> None:
            with self._waiting("all-reduce", key):
                work.wait()

        return tensor, arrive

    def all_gather(self, tensor: torch.Tensor, key: tuple[str, str] = ("", "")) -> list[torch.Tensor]:
        """The tensors of all ranks, in order."""
        if torch.compiler.is_compiling():
            whole = _functional(functional.all_gather_tensor(tensor.unsqueeze(0).contiguous(), 0, self.name))
            return list(whole.unbind(0))
        received = list(tensor.new_empty((self.size, *tensor.shape)).unbind(0))
        with self._waiting("all-gather", key):
            dist.all_gather([as_carried(t) for t in received], as_carried(tensor), group=self.group)
        return received

    def convert(self, tensor: torch.Tensor, change: Change, key: tuple[str, str]) -> torch.Tensor:
        """This rank's part of the tensor in its new placement."""
        before, after = change
        if before == after:
            return tensor
        if isinstance(before, Replicate):
            return self._from_whole(tensor, after)
        if isinstance(after, Partial):
            return self._as_term(tensor, before)
        size = tensor.numel() * tensor.element_size() * (self.size if isinstance(before, Split) else 1)
        if isinstance(before, Partial):
            if isinstance(after, Replicate):
                return self.all_reduce(tensor.clone(), "sum", key)
            self.note(key, table_bytes(before, after, self.size, size))
            return self._reduce_scatter(tensor, after, key)
        self.note(key, table_bytes(before, after, self.size, size))
        if isinstance(after, Replicate):
            return whole_of(self.all_gather(tensor, key), before)
        if before.dim == after.dim:  # other blocks of one dim
            return piece_of(whole_of(self.all_gather(tensor, key), before), after, self.size, self.coordinate)
        return self._all_to_all(tensor, before, after, key)

    def _from_whole(self, tensor: torch.Tensor, after: Placement) -> torch.Tensor:
        if isinstance(after, Split):
            piece = piece_of(tensor, after, self.size, self.coordinate)
            return piece.clone(memory_format=torch.contiguous_format)  # a view would hold the whole
        if isinstance(after, Partial) and after.op == "sum":
            return tensor if self.coordinate == 0 else torch.zeros_like(tensor)
        raise LayoutError(f"a replicated value is made no {after} here: the solver uses sums alone")

    def _as_term(self, tensor: torch.Tensor, before: Placement) -> torch.Tensor:
        if not isinstance(before, Split):
            raise LayoutError(f"a value that is {before} is made no other partial value")
        empty = torch.zeros_like(tensor)
        return whole_of([tensor if r == self.coordinate else empty for r in range(self.size)], before)

    def _reduce_scatter(self, tensor: torch.Tensor, after: Split, key: tuple[str, str]) -> torch.Tensor:
        sent = [_own_memory(piece_of(tensor, after, self.size, r)) for r in range(self.size)]
        if torch.compiler.is_compiling():
            summed = functional.reduce_scatter_tensor(torch.stack(sent), "sum", 0, self.name)
            return _functional(summed).squeeze(0)
        received = torch.empty_like(sent[self.coordinate])
        with self._waiting("reduce-scatter", key):
            dist.reduce_scatter(as_carried(received), [as_carried(t) for t in sent], group=self.group)
        return received

    def _all_to_all(self, tensor: torch.Tensor, before: Split, after: Split, key: tuple[str, str]) -> torch.Tensor:
        sent = torch.stack([piece_of(tensor, after, self.size, r) for r in range(self.size)])
        if torch.compiler.is_compiling():
            return whole_of(
                list(_functional(functional.all_to_all_single(sent, None, None, self.name)).unbind(0)), before
            )
        received = torch.empty_like(sent)
        with self._waiting("all-to-all", key):
            dist.all_to_all_single(as_carried(received), as_carried(sent), group=self.group)
        return whole_of(list(received.unbind(0)), before)


def _own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor, with every conjugate and minus that torch puts off carried out: the memory is sent."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def _functional(made: torch.Tensor) -> torch.Tensor:
    """The result of a functional collective, once it is there. Compiled code uses these collectives, which it can
    follow."""
    arrived: torch.Tensor = functional.wait_tensor(made)
    return arrived
