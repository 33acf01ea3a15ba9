"""Gradients summed over the data axis while the pipeline still runs.

A parameter's gradient is whole after the last weight gradient of the stages that use it. Then it joins its bucket, and
a full bucket is sent. So the gradients of the last backward passes are exchanged while these go on, and while other
ranks of the pipeline still compute. Buckets leave in one fixed order, the same on all replicas, as in torch's
DistributedDataParallel (Li et al., VLDB 2020, section 3.2.3).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup, Work

from shardwright.backends.capabilities import TORCH_MEMORY
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.core.errors import ShardwrightError

BUCKET_BYTES = TORCH_MEMORY.bucket_bytes
"""The size in bytes of a bucket, about: gradients are reduced in buckets."""


class Bucket:
    """Parameters of one dtype whose gradients travel together, followed by a flag for each: whether it has a
    gradient."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        self.parameters = tuple(parameters)
        self._flat: torch.Tensor | None = None
        self._work: Work | None = None

    def send(self, group: ProcessGroup) -> None:
        """Begin the sum. The op is SUM, never AVG, which Gloo takes and does not compute; the scale is in the losses
        already."""
        pieces = [torch.zeros_like(p) if p.grad is None else p.grad for _, p in self.parameters]
        present = torch.tensor([float(p.grad is not None) for _, p in self.parameters], dtype=pieces[0].dtype)
        self._flat = torch.cat([*(piece.reshape(-1) for piece in pieces), present.to(pieces[0].device)])
        self._work = dist.all_reduce(self._flat, op=dist.ReduceOp.SUM, group=group, async_op=True)

    def receive(self) -> None:
        """Wait for the sum and put it in place. A parameter that has a gradient on no replica gets none."""
        assert self._flat is not None
        if self._work is not None:
            self._work.wait()
        sizes = [p.numel() for _, p in self.parameters]
        *pieces, present = self._flat.split([*sizes, len(sizes)])
        for (_, parameter), piece, anywhere in zip(self.parameters, pieces, present.tolist(), strict=True):
            if not anywhere:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(piece.view_as(parameter))
        self._flat = self._work = None


class Exchange:
    """One step's sums over the data axis.

    Args:
        order: the parameters that need a gradient, in the order in which these should become whole: the same on all
            replicas.
    """

    def __init__(self, order: Mapping[str, nn.Parameter], group: ProcessGroup, watchdog: Watchdog, peers: str) -> None:
        self._group, self._watchdog, self._peers = group, watchdog, peers
        self._buckets = [Bucket(held) for held in _grouped(order.items())]
        self._bucket_of = {name: i for i, bucket in enumerate(self._buckets) for name, _ in bucket.parameters}
        self._missing = [len(bucket.parameters) for bucket in self._buckets]
        self._done: set[str] = set()
        self._sent = 0

    def ready(self, name: str) -> None:
        """Note that the gradient of a parameter is whole."""
        number = self._bucket_of.get(name)
        if number is None or name in self._done:
            return
        self._done.add(name)
        self._missing[number] -= 1
        while self._sent < len(self._buckets) and not self._missing[self._sent]:
            with self._watchdog.waiting(f"the start of a sum over {self._peers}"):
                self._buckets[self._sent].send(self._group)
            self._sent += 1

    def _accumulated(self, name: str, _: torch.Tensor) -> None:
        if name in self._done:
            raise ShardwrightError(
                f"the gradient of {name} was added to twice in one backward pass, as by reentrant checkpoints that "
                f"share it: call torch.utils.checkpoint with use_reentrant=False"
            )
        self.ready(name)

    @contextmanager
    def closing(self, parameters: Iterable[tuple[str, nn.Parameter]], hooked: bool) -> Iterator[None]:
        """A context in which the last action runs that adds to the gradients of these parameters. ``hooked``: the
        action is a whole backward, in which the accumulation of each parameter's gradient tells that it is whole."""
        names = [name for name, _ in parameters]
        handles = []
        if hooked:
            for name, parameter in parameters:
                if parameter.requires_grad:
                    handles.append(parameter.register_post_accumulate_grad_hook(partial(self._accumulated, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for name in names:
            self.ready(name)

    def finish(self) -> None:
        """Wait for all sums; gradients that were never reported ready are sent now."""
        for bucket in self._buckets:
            for name, _ in bucket.parameters:
                self.ready(name)
        self._watchdog.doing("reducing gradients over dp")
        with self._watchdog.waiting(self._peers):
            for bucket in self._buckets:
                bucket.receive()


def _grouped(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[list[tuple[str, nn.Parameter]]]:
    """The buckets: parameters of one dtype, together at most BUCKET_BYTES unless one alone is larger."""
    found: list[list[tuple[str, nn.Parameter]]] = []
    open_of: dict[torch.dtype, tuple[list[tuple[str, nn.Parameter]], int]] = {}
    for name, parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        bucket, used = open_of.get(parameter.dtype, ([], 0))
        if not bucket or used + size > BUCKET_BYTES:
            bucket, used = [], 0
            found.append(bucket)
        bucket.append((name, parameter))
        open_of[parameter.dtype] = (bucket, used + size)
    return found
