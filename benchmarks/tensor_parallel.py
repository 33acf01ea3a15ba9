"""Transformer blocks on the tensor axis: ours beside blocks split by hand, and torch's `parallelize_module`.

    python benchmarks/tensor_parallel.py [--ranks 2] [--hidden 512] [--length 256] [--batch 4] [--layers 2]

All run the same blocks, forward and backward, in one launch of Gloo processes with one thread each. Rounds are taken in
turn, so that the machine's moods hit all alike, and the median of each is given. By hand means Megatron's column and
row parallel products (arXiv 1909.08053, section 3) with an all-reduce after each sublayer forward, and one before it
backward. All are checked against each other first. --compile adds ours with the units compiled by `torch.compile`;
--overlap adds ours without the overlap of a column-parallel product's sum with its weight's gradient, and what the same
overlap gains by hand.
"""

import argparse
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import shardwright as sw
from shardwright.backends.torch.machine.tensor_axis import Axis
from shardwright.backends.torch.machine.tensor_shards import piece_of
from shardwright.backends.torch.tensor_parallel import split_compute as compute
from shardwright.backends.torch.tensor_parallel.lowered_model import lower_all
from shardwright.backends.torch.tensor_parallel.trace import trace
from shardwright.backends.torch.tensor_parallel.unit_layouts import of_realised
from shardwright.core.layout.placements import Split
from shardwright.core.plan.realised_layouts import realise
from tests.comparison import Comparison

Contender = Callable[[torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """A pre-norm decoder block; ``heads`` are those that a rank holds."""

    def __init__(self, hidden: int, heads: int, inner: int | None = None) -> None:
        super().__init__()
        own = inner or hidden
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v = (nn.Linear(hidden, own) for _ in range(3))
        self.o = nn.Linear(own, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * own), nn.Linear(4 * own, hidden)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(*x.shape[:2], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.o(self.attend(self.norm1(x)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Blocks(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class _Before(torch.autograd.Function):
    """Megatron's f: the gradient is summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class _After(torch.autograd.Function):
    """Megatron's g: the value is summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class HandBlock(Block):
    """The same block on a rank's share of heads and inner width."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = _Before.apply(self.norm1(x))
        x = x + (_After.apply(F.linear(self.attend(h), self.o.weight)) + self.o.bias)
        h = F.gelu(self.up(_Before.apply(self.norm2(x))))
        return x + (_After.apply(F.linear(h, self.down.weight)) + self.down.bias)


class _Overlapped(torch.autograd.Function):
    """A column-parallel product whose backward sums the gradient of its input while it makes that of its weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_input = gradient @ weight
        work = dist.all_reduce(of_input, async_op=True)
        flat = gradient.flatten(0, 1)
        of_weight, of_bias = flat.t() @ x.flatten(0, 1), flat.sum(0)
        work.wait()
        return of_input, of_weight, of_bias


class _Apart(_Overlapped):
    """The same one after the other."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_input = gradient @ weight
        dist.all_reduce(of_input)
        flat = gradient.flatten(0, 1)
        return of_input, flat.t() @ x.flatten(0, 1), flat.sum(0)


class OverlappedBlock(Block):
    """`HandBlock` whose three products of attention are one, so that each sublayer's backward has one sum."""

    product: type[torch.autograd.Function] = _Overlapped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = torch.cat([self.q.weight, self.k.weight, self.v.weight])
        bias = torch.cat([self.q.bias, self.k.bias, self.v.bias])
        q, k, v = (
            t.view(*x.shape[:2], self.heads, -1).transpose(1, 2)
            for t in self.product.apply(self.norm1(x), weight, bias).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(*x.shape[:2], -1)
        x = x + (_After.apply(F.linear(mixed, self.o.weight)) + self.o.bias)
        h = F.gelu(self.product.apply(self.norm2(x), self.up.weight, self.up.bias))
        return x + (_After.apply(F.linear(h, self.down.weight)) + self.down.bias)


class ApartBlock(OverlappedBlock):
    product = _Apart


def whole(arguments: argparse.Namespace) -> Blocks:
    torch.manual_seed(1)
    return Blocks([Block(arguments.hidden, arguments.heads) for _ in range(arguments.layers)])


def by_hand(arguments: argparse.Namespace, rank: int, block: type[Block] = HandBlock) -> Contender:
    ranks = arguments.ranks
    own = arguments.hidden // ranks
    model = Blocks([block(arguments.hidden, arguments.heads // ranks, own) for _ in range(arguments.layers)])
    state = whole(arguments).state_dict()
    for name, parameter in model.named_parameters():
        value = state[name]
        for dim in range(value.dim()):
            if value.shape[dim] != parameter.shape[dim]:
                value = value.chunk(ranks, dim)[rank]
        parameter.data = value.clone()
    return model


def by_dtensor(arguments: argparse.Namespace) -> Contender:
    model = whole(arguments)
    mesh = init_device_mesh("cpu", (arguments.ranks,))
    for layer in model.layers:
        plan = {**dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel()),
                **dict.fromkeys(("o", "down"), RowwiseParallel())}  # fmt: skip
        parallelize_module(layer, mesh, plan)
        layer.heads = arguments.heads // arguments.ranks
    return model


def ours(
    arguments: argparse.Namespace, axis: Axis, *, compiled: bool = False, overlapped: bool = True
) -> tuple[Contender, Callable[[], int]]:
    model = whole(arguments)
    sample = (torch.zeros(arguments.batch, arguments.length, arguments.hidden),)
    traced = trace(model, sample)
    cluster = sw.Cluster("cpu", devices_per_node=arguments.ranks)
    plan = sw.plan(
        traced.graph, cluster, batch=arguments.batch, pp=1, tp=arguments.ranks, dp=1, microbatch=arguments.batch,
        recompute="none", shard=0, precision="fp32", sequence_parallel=False,
    )  # fmt: skip
    layouts = of_realised(traced.graph, realise(traced.graph, plan))
    apart = mock.patch.object(compute, "_columns", return_value=False)
    with nullcontext() if overlapped else apart:
        replay = lower_all(traced, layouts, axis, arguments.batch, torch.device("cpu"), lambda context: None)
    for name, place in replay.parameters.items():
        if isinstance(place, Split):
            parameter = model.get_parameter(name)
            parameter.data = piece_of(parameter.detach(), place, axis.size, axis.coordinate).clone()
    held = replay.held(model)
    functions = [torch.compile(u.function) if compiled else u.function for u in replay.units]

    def run(x: torch.Tensor) -> torch.Tensor:
        values = {traced.graph.inputs[0]: x}
        for unit, function in zip(replay.units, functions, strict=True):
            made = function(*[values[t] for t in unit.entering], *[held(t) for t in unit.held])
            values.update(zip(unit.leaves, made, strict=True))
        return values[traced.graph.outputs[0]]

    return run, lambda: sum(axis.traffic.calls.values())


def work(rank: int, arguments: argparse.Namespace, port: int, found: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=arguments.ranks)
    group = dist.group.WORLD
    assert group is not None
    axis = Axis(group, range(arguments.ranks), rank)
    mine, calls = ours(arguments, axis)
    contenders: dict[str, Contender] = {"by hand": by_hand(arguments, rank), "shardwright": mine}
    if arguments.compile:
        contenders["shardwright, compiled"], _ = ours(arguments, axis, compiled=True)
    if arguments.overlap:
        contenders["shardwright, not overlapped"], _ = ours(arguments, axis, overlapped=False)
        contenders["by hand, one q|k|v"] = by_hand(arguments, rank, ApartBlock)
        contenders["the same, overlapped"] = by_hand(arguments, rank, OverlappedBlock)
    contenders["parallelize_module"] = by_dtensor(arguments)
    x = torch.randn(arguments.batch, arguments.length, arguments.hidden, generator=torch.Generator().manual_seed(2))
    losses = {name: run(x).item() for name, run in contenders.items()}
    Comparison("the contenders").losses(losses, dict.fromkeys(losses, losses["by hand"]), relative=1e-4).require()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():  # once to warm up
        run(x).backward()
    axis.traffic.clear()
    mine(x).backward()
    sent = calls()
    for _ in range(arguments.rounds):
        for name, run in contenders.items():
            dist.barrier()
            started = time.perf_counter()
            run(x).backward()
            seconds[name].append(time.perf_counter() - started)
    if rank == 0:
        base = statistics.median(seconds["by hand"])
        print(f"{arguments.layers} blocks, hidden {arguments.hidden}, {arguments.batch} × {arguments.length} tokens, "
              f"{arguments.ranks} Gloo ranks of one thread; collectives of ours: {sent}")  # fmt: skip
        print(f"{'':28} {'median ms':>10} {'by hand = 1':>12}")
        for name, taken in seconds.items():
            median = statistics.median(taken)
            print(f"{name:28} {median * 1e3:10.1f} {median / base:12.3f}", flush=True)
        found.put(statistics.median(seconds["shardwright"]) / base)
    dist.barrier()  # no rank closes its connections while another still talks
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("ranks", 2), ("hidden", 512), ("heads", 8), ("length", 256), ("batch", 4), ("layers", 2),
                          ("rounds", 10)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--overlap", action="store_true", help="with and without sums of gradients beside products")
    arguments = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = mp.get_context("spawn").SimpleQueue()
    mp.spawn(work, (arguments, port, found), nprocs=arguments.ranks)
    judged = claims.tensor_parallel(found.get())
    print(judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    sys.exit(main())
