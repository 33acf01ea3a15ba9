"""Sharded parameters: cut from whole weights once, put together again for whole state dicts."""

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.machine.pipeline_messages import as_carried
from shardwright.backends.torch.machine.tensor_axis import Axis
from shardwright.backends.torch.machine.tensor_shards import piece_of, whole_of
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.backends.torch.state.ownership import Ownership, hollow_like, is_hollow
from shardwright.core.errors import PlanError
from shardwright.core.layout.placements import Placement, Replicate, Split

BUCKET_ENTRIES = 1 << 22
"""The number of entries, about, of a message in which gradients of replicated parameters are summed."""


class Shards:
    """The parameters of a model that are sharded along the tensor axis, and this rank's shards.

    ``planned``: first name → placement, for parameters that have no data yet and need never be whole.
    """

    def __init__(
        self, ownership: Ownership, bound: BoundMesh, watchdog: Watchdog, planned: Mapping[str, Placement] | None = None
    ) -> None:
        self.ownership, self.watchdog, self.planned = ownership, watchdog, planned or {}
        self.device = bound.device
        self.axis = Axis(bound.handles["tp"], bound.groups["tp"], bound.coordinate("tp"), watchdog)
        self.places: dict[str, Split] = {}
        """First name → placement, of the parameters that are split."""
        self.summed: frozenset[str] = frozenset()
        """The replicated parameters of whose gradients, in the step that runs, every rank has a term."""
        self._is_cut = False

    def keep(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """The part that this rank keeps of a weight that just got its data: the planned shard of the weight of the
        axis's first rank. Every rank of the axis calls this."""
        place = self.planned.get(name)
        if not isinstance(place, Split):
            return whole
        whole = whole.contiguous()
        with self.watchdog.waiting(f"tp peers, ranks {list(self.axis.ranks)}"):
            dist.broadcast(as_carried(whole), self.axis.ranks[0], group=self.axis.group)
        self.places[name] = place
        piece = piece_of(whole, place, self.axis.size, self.axis.coordinate)
        return piece.clone(memory_format=torch.contiguous_format)

    def keep_read(self, name: str, read: Callable[[Split | None, int, int], torch.Tensor]) -> torch.Tensor:
        """The part that this rank keeps of a weight that all ranks can read: the planned shard, and no more is read."""
        place = self.planned.get(name)
        if not isinstance(place, Split):
            return read(None, 1, 0)
        self.places[name] = place
        return read(place, self.axis.size, self.axis.coordinate)

    def anywhere(self, here: bool) -> bool:
        """Whether ``here`` is true on any rank of the axis; every rank of it calls this."""
        flag = torch.tensor([int(here)], dtype=torch.int32, device=self.device)
        with self.watchdog.waiting(f"tp peers, ranks {list(self.axis.ranks)}"):
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.axis.group)
        return bool(flag)

    def restore(self) -> None:
        """Put every weight and its gradient together again, for steps that need them whole on each rank of the axis;
        every rank calls this."""
        for name in sorted(self.places):
            tensor = self.ownership.tensor(name)
            gradient, tensor.grad = tensor.grad, None
            tensor.data = self.whole(name, tensor)
            if gradient is not None:
                tensor.grad = self.whole(name, gradient)
        self.places, self._is_cut, self.summed = {}, False, frozenset()

    def cut(self, places: Mapping[str, Placement]) -> None:
        """Keep this rank's shards; all ranks of the axis start from the tensors of its first one. Raises PlanError when
        a step has cut the parameters already, in another way."""
        wanted = {name: place for name, place in places.items() if isinstance(place, Split)}
        if self._is_cut:
            different = [n for n in places if wanted.get(n) != self.places.get(n)]
            if different:
                raise PlanError(
                    f"{different[0]} lies {self.places.get(different[0], 'whole')} already, and this step wants it "
                    f"{wanted.get(different[0], 'whole')}, as it calls the model's parts otherwise: run this step, or "
                    f"one that calls the model as it does, before the others, whose parameters lie as the first step "
                    f"has cut them"
                )
            return
        self.watchdog.doing("cutting parameters for the tensor axis")
        for name in (*sorted(self.ownership.parameter_names), *sorted(self.ownership.buffer_names)):
            tensor = self.ownership.tensor(name)
            if name in self.places:  # as it was planned when it got its data
                if self.places[name] == wanted.get(name):
                    continue
                tensor.data = self.whole(name, tensor)
            elif self.ownership.holds(name) and not (tensor.is_meta or is_hollow(tensor)):
                carried = as_carried(tensor.detach())
                with self.watchdog.waiting(f"tp peers, ranks {list(self.axis.ranks)}"):
                    dist.broadcast(carried, self.axis.ranks[0], group=self.axis.group)
                if carried.data_ptr() != tensor.data_ptr():
                    tensor.detach().copy_(carried.view_as(tensor))
            if name in wanted and is_hollow(tensor):
                shape = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                piece = piece_of(shape, wanted[name], self.axis.size, self.axis.coordinate)
                tensor.data = hollow_like(piece.contiguous(), tensor.device)
            elif name in wanted:
                piece = piece_of(tensor.detach(), wanted[name], self.axis.size, self.axis.coordinate)
                tensor.data = piece.clone(memory_format=torch.contiguous_format)
        self.places, self._is_cut = wanted, True
        self.watchdog.doing("between steps")

    @property
    def is_cut(self) -> bool:
        """Whether the parameters are sharded by now: the first step cuts them."""
        return self._is_cut

    def place(self, name: str) -> Placement:
        """The placement of a parameter, by its first name."""
        return self.places.get(name, Replicate())

    def counts(self, name: str) -> bool:
        """Whether this rank's part of a parameter belongs in a sum over the axis: shards do, copies once."""
        return name in self.places or self.axis.coordinate == 0

    def whole(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        """The whole tensor of a parameter (or of something that is split like it), on every rank of the axis."""
        place = self.places.get(name)
        if place is None:
            return piece
        with self.watchdog.waiting(f"tp peers, ranks {list(self.axis.ranks)}"):
            return whole_of(self.axis.all_gather(piece.detach()), place)

    def piece(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a whole tensor."""
        place = self.places.get(name)
        return whole if place is None else piece_of(whole, place, self.axis.size, self.axis.coordinate)

    def whole_shape(self, name: str, shape: torch.Size) -> torch.Size:
        """The shape of the whole tensor, from that of a shard."""
        place = self.places.get(name)
        if place is None:
            return shape
        found = list(shape)
        found[place.dim] *= self.axis.size
        return torch.Size(found)

    def sum_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum the terms of the gradients of replicated parameters. Every rank of the axis calls this."""
        terms = [p.grad for name, p in sorted(parameters.items()) if name in self.summed and p.grad is not None]
        if not terms:
            return
        self.watchdog.doing("summing gradients of replicated parameters over tp")
        with self.watchdog.waiting(f"tp peers, ranks {list(self.axis.ranks)}"):
            for bucket in _buckets(terms):
                flat = torch.cat([g.reshape(-1) for g in bucket]).to(self.device)
                flat = self.axis.all_reduce(flat, "sum", ("all units", "parameters"))
                for gradient, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                    gradient.copy_(piece.view_as(gradient))


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Tensors of one dtype, about BUCKET_ENTRIES together."""
    of_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        held = of_dtype.setdefault(tensor.dtype, [])
        held.append(tensor)
        if sum(t.numel() for t in held) >= BUCKET_ENTRIES:
            yield of_dtype.pop(tensor.dtype)
    yield from of_dtype.values()
