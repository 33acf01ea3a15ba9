"""Batch norm over several replicas, under either loss scope.

The result of batch norm depends on which samples it sees together. Under ``loss_scope="replica"`` those are one
microbatch of one replica: the reference run has all microbatches one after the other, so its running statistics have
seen them all, and so have ours, after every step. Under ``"global"`` they are the m-th microbatches of all replicas
together.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwright.backends.torch.compat import BatchNorm
from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.machine.watchdog import Watchdog


def batch_norms(model: nn.Module) -> dict[str, BatchNorm]:
    """The batch norms of this rank, by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, BatchNorm) and not any(t.is_meta for t in (*module.parameters(), *module.buffers()))
    }


class RunningStatistics:
    """The running statistics of this replica, brought to the values that all microbatches of all replicas, in order,
    would have given them.

    An update is r ← (1 - a)·r + a·x, so k of them in a row are r ← (1 - a)^k·r + b, and the updates of each replica are
    known from where it began and ended. Without a momentum r is the mean of all x so far.
    """

    def __init__(self, model: nn.Module, bound: BoundMesh, watchdog: Watchdog) -> None:
        self.bound, self.watchdog = bound, watchdog
        self._norms = {
            path: m
            for path, m in batch_norms(model).items()
            if m.track_running_stats and m.running_mean is not None and m.running_var is not None
        }
        self._before: dict[str, tuple[int, torch.Tensor]] = {}

    def begin(self) -> None:
        self._before = {
            path: (_count(module), _packed(module)) for path, module in self._norms.items() if module.training
        }

    def finish(self) -> None:
        """Combine the running statistics of all replicas. Every replica calls this at the end of a step."""
        if not self._before:
            return
        counts = torch.tensor([_count(self._norms[p]) - n for p, (n, _) in self._before.items()], dtype=torch.int64)
        own = torch.cat([_packed(self._norms[path]) for path in self._before])
        counts = counts.to(own.device)
        size = self.bound.size("dp")
        every = [torch.empty_like(own) for _ in range(size)]
        times = [torch.empty_like(counts) for _ in range(size)]
        self.watchdog.doing("combining running statistics over dp")
        with self.watchdog.waiting(f"dp peers, ranks {list(self.bound.groups['dp'])}"):
            dist.all_gather(times, counts, group=self.bound.handles["dp"])
            dist.all_gather(every, own, group=self.bound.handles["dp"])
        sizes = [before.numel() for _, before in self._before.values()]
        ends = [row.split(sizes) for row in every]
        for number, (path, (seen, before)) in enumerate(self._before.items()):
            module, now, done = self._norms[path], before, 0
            for replica in range(size):
                steps, end = int(times[replica][number]), ends[replica][number]
                if module.momentum is None:
                    gained = end * (seen + steps) - before * seen
                    now = (now * (seen + done) + gained) / max(1, seen + done + steps)
                else:
                    kept = math.pow(1.0 - module.momentum, steps)
                    now = kept * now + (end - kept * before)
                done += steps
            _unpack(module, now)
            if module.num_batches_tracked is not None:
                module.num_batches_tracked.fill_(seen + done)
        self._before = {}


def _count(module: BatchNorm) -> int:
    return 0 if module.num_batches_tracked is None else int(module.num_batches_tracked)


def _packed(module: BatchNorm) -> torch.Tensor:
    assert module.running_mean is not None
    assert module.running_var is not None
    return torch.cat([module.running_mean, module.running_var]).double()


def _unpack(module: BatchNorm, packed: torch.Tensor) -> None:
    assert module.running_mean is not None
    assert module.running_var is not None
    mean, variance = packed.chunk(2)
    module.running_mean.copy_(mean)
    module.running_var.copy_(variance)


def norm_over_replicas(
    model: nn.Module, bound: BoundMesh, watchdog: Watchdog, recording: Callable[[], bool]
) -> Callable[[], None]:
    """Let the batch norms of this rank norm by the microbatches of all replicas together, where they train. While
    ``recording`` is true they work as before. Returns the function that undoes it."""
    found = list(batch_norms(model).values())
    for module in found:
        module.forward = _Synchronized(module, bound, watchdog, recording)  # type: ignore[method-assign,assignment]

    def undo() -> None:
        for module in found:
            module.__dict__.pop("forward", None)

    return undo


class _Synchronized:
    def __init__(self, module: BatchNorm, bound: BoundMesh, watchdog: Watchdog, recording: Callable[[], bool]) -> None:
        self.module, self.group, self.watchdog, self.recording = module, bound.handles["dp"], watchdog, recording
        self.peers = f"dp peers, ranks {list(bound.groups['dp'])}, to norm by the batch of all"
        self.plain = module.forward

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        module = self.module
        if not module.training or self.recording():
            made: torch.Tensor = self.plain(given)
            return made
        module._check_input_dim(given)
        factor = 0.0 if module.momentum is None else module.momentum
        if module.track_running_stats and module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)
            if module.momentum is None:
                factor = 1.0 / float(module.num_batches_tracked)
        normed, mean, variance, count = _Normed.apply(given, module.eps, self._sum)  # type: ignore[no-untyped-call]
        if module.track_running_stats and module.running_mean is not None and module.running_var is not None:
            with torch.no_grad():
                total = float(count)
                module.running_mean.lerp_(mean.to(module.running_mean.dtype), factor)
                unbiased = variance * (total / max(1.0, total - 1))
                module.running_var.lerp_(unbiased.to(module.running_var.dtype), factor)
        if not module.affine:
            out: torch.Tensor = normed
            return out
        shape = [1, -1, *[1] * (given.dim() - 2)]
        scaled: torch.Tensor = normed * module.weight.view(shape) + module.bias.view(shape)
        return scaled

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.watchdog.waiting(self.peers):
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self.group)
        return tensor


class _Normed(torch.autograd.Function):
    """Batch norm, (x - mean) / sqrt(variance + eps) per channel, by the samples of all replicas. Ioffe and Szegedy,
    ICML 2015, section 3, with the sums of forward and backward taken over all replicas."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, eps: float, summed: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        dims = [d for d in range(given.dim()) if d != 1]
        shape = [1, -1, *[1] * (given.dim() - 2)]
        wide = given.double() if given.dtype is torch.float64 else given.float()
        channels = given.shape[1]
        count = torch.tensor([given.numel() / channels], dtype=wide.dtype, device=wide.device)
        sums = summed(torch.cat([wide.sum(dims), count]))
        total = sums[channels]
        mean = sums[:channels] / total
        centred = wide - mean.view(shape)
        variance = summed(centred.pow(2).sum(dims)) / total
        scale = (variance + eps).rsqrt()
        normed = (centred * scale.view(shape)).to(given.dtype)
        ctx.save_for_backward(normed, scale, total)
        ctx.summed, ctx.dims, ctx.shape = summed, dims, shape
        ctx.mark_non_differentiable(mean, variance, total)
        return normed, mean, variance, total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:
        normed, scale, total = ctx.saved_tensors
        wide, channels = gradient.to(scale.dtype), scale.shape[0]
        sums = torch.cat([wide.sum(ctx.dims), (wide * normed).sum(ctx.dims)])
        mean, slope = (ctx.summed(sums) / total).split(channels)
        back = scale.view(ctx.shape) * (wide - mean.view(ctx.shape) - normed * slope.view(ctx.shape))
        return back.to(gradient.dtype), None, None
