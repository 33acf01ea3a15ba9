"""Measure this machine as torch uses it: products by size, memory, launches, collectives of the process group."""

import itertools
import os
import platform
from dataclasses import replace

import torch
import torch.distributed as dist

from shardwright.backends.torch.machine.blocks import attention_flops_per_s, dispatched_s
from shardwright.backends.torch.machine.measured_collectives import collective_runs, run_count
from shardwright.backends.torch.machine.process import choose_device, start, this_launch
from shardwright.backends.torch.machine.timing import device_s, quartile_s
from shardwright.core.cluster.hardware.device import MeasuredProduct
from shardwright.core.cluster.hardware.measurements import Measurements, MeasureProgress, operands_in_turn

SIDES = ((64, 64, 64), (128, 64, 256), (256, 64, 256), (256, 256, 64), (256, 256, 256), (512, 64, 512),
         (512, 512, 64), (256, 1024, 256), (256, 256, 1024), (512, 512, 512), (1024, 1024, 1024), (512, 3072, 768),
         (512, 768, 3072), (512, 8192, 512), (512, 512, 8192), (32, 1024, 512), (64, 512, 1024), (128, 1024, 512),
         (1024, 512, 32), (512, 1024, 128))  # fmt: skip
"""The sides (m, n, k) of the products measured: squares, the thin ones of attention, feed-forward and vocabulary, and
those of layers with few tokens, forward and for the gradient of a weight."""
CUDA_SIDES = (*SIDES, (4096, 4096, 4096), (8192, 8192, 1024), (2048, 12288, 4096), (4096, 1024, 8192),
              (8192, 1024, 4096), (8192, 4096, 1024), (8192, 3072, 1024), (16384, 2048, 2048),
              (8192, 50304, 1024), (256, 8192, 4096), (8192, 4096, 256))  # fmt: skip
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def profile(*, name: str, budget_s: float = 20.0, progress: MeasureProgress | None = None) -> Measurements:
    """Measure this process's device, and the collectives of all processes that the launcher started (torchrun, mpirun,
    srun), or of the process group that exists already. The processes stay joined, and all of them get the measurements
    of rank 0, so that they make the same plan."""
    launch = this_launch()
    device = choose_device(launch)
    if launch.world_size > 1 and not dist.is_initialized():
        start(launch, device, timeout_s=120.0)
    measured = [profile_device(device, name=name, budget_s=budget_s, progress=progress)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(measured, src=0)
        return replace(measured[0], rank=dist.get_rank())
    return measured[0]


def longest_s(seconds: float) -> float:
    """The largest ``seconds`` that any process of the group gives; all of them call this together."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return seconds
    largest = torch.tensor(seconds, dtype=torch.float64, device=choose_device(this_launch()))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def profile_device(
    device: torch.device, *, name: str, budget_s: float = 20.0, progress: MeasureProgress | None = None
) -> Measurements:
    """Measure ``device``, and the default process group where there is one, in about ``budget_s`` seconds.

    Every figure is the lower quartile of its runs after one to warm up. On GPUs it is the device's time alone, by CUDA
    graphs, and what the host takes to issue a model's ops is a figure of its own. All ranks of the group must call
    this together.
    """
    is_cuda = device.type == "cuda"
    sides = CUDA_SIDES if is_cuda else SIDES
    precisions = ("fp32", "bf16", "fp16") if is_cuda else ("fp32",)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    total = len(sides) * len(precisions) + (6 if is_cuda else 4) + run_count(ranks, device)
    each = budget_s / total
    done = 0

    def step(what: str) -> None:
        nonlocal done
        if progress is not None:
            progress(what, done, total)
        done += 1

    products = []
    for precision in precisions:
        for m, n, k in sides:
            step(f"{precision} product {m} × {k} × {n}")
            left = torch.randn(m, k, device=device, dtype=_DTYPES[precision])
            right = torch.randn(k, n, device=device, dtype=_DTYPES[precision])
            copies = operands_in_turn(right.nbytes)
            weights = itertools.cycle([right, *(right.clone() for _ in range(copies - 1))])
            seconds = device_s(lambda a=left, of=weights: a @ next(of), device, each)  # type: ignore[misc]
            products.append(MeasuredProduct(precision, m, n, k, 2.0 * m * n * k / seconds))
    step("memory")
    # On GPUs larger than what their caches hold, and than what a launch takes.
    large = torch.randn(1 << (27 if is_cuda else 24), device=device)
    target = torch.empty_like(large)

    def copied() -> None:  # on GPUs by a kernel, as ops are: a plain copy in a CUDA graph takes the copy engines
        if is_cuda:
            torch.neg(large, out=target)
        else:
            target.copy_(large)

    bandwidth = 2 * large.nbytes / device_s(copied, device, each)
    step("elementwise chains")
    values = torch.randn(65536 if is_cuda else 4096, 1024, device=device, requires_grad=True)
    seed = torch.ones_like(values)

    def both_ways() -> None:
        torch.autograd.grad(_chain(values), values, seed)

    # Forward, the value read twice and the result written; backward, counted as twice that.
    moved = 3 * 3 * values.nbytes
    vector = moved / device_s(both_ways, device, each) / bandwidth
    step("optimizer")
    optimizer = torch.optim.AdamW([torch.zeros_like(large[: len(large) // 4]).requires_grad_() for _ in range(4)])
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    updated = 7 * large.nbytes / quartile_s(optimizer.step, device, each) / bandwidth
    step("launches")
    small = torch.randn(2, 8, device=device)
    host, dispatch, attention = bandwidth / 2, None, None
    if is_cuda:
        launch = device_s(lambda: small + small, device, each)
        pinned = torch.empty(large.shape, dtype=large.dtype, pin_memory=True)
        host = large.nbytes / quartile_s(lambda: pinned.copy_(large), device, each)
        step("the host's part of a forward")
        dispatch = dispatched_s(device, each)
        step("attention")
        fastest = max(p.flops_per_s for p in products if p.precision == "bf16")
        attention = attention_flops_per_s(device, each) / fastest
    else:
        launch = quartile_s(lambda: _chain(small), device, each, whole=False)
    samples = []
    if ranks > 1:
        with collective_runs(device) as runs:
            for run in runs:
                step(f"{run.kind.replace('_', '-')} of {run.size_bytes >> 10} KiB over {run.ranks} ranks")
                # Every rank runs as often as every other: a time budget of its own would leave one waiting.
                samples.append(run.measured(quartile_s(run.prepare(), device, each, runs=7)))
    return Measurements(
        name=name,
        kind="gpu" if is_cuda else "cpu",
        measured_on=_machine(device, ranks),
        memory_bytes=_memory_bytes(device, ranks),
        products=tuple(products),
        memory_bandwidth_bytes_per_s=bandwidth,
        vector_efficiency=vector,
        optimizer_efficiency=updated,
        kernel_launch_s=launch,
        host_link_bandwidth_bytes_per_s=host,
        dispatch_s=dispatch,
        attention_efficiency=attention,
        rank=dist.get_rank() if ranks > 1 else 0,
        ranks=ranks,
        collectives=tuple(samples),
    )


def _chain(values: torch.Tensor) -> torch.Tensor:
    normal = torch.nn.functional.layer_norm(values, values.shape[-1:])
    return values + torch.nn.functional.gelu(normal)


def _memory_bytes(device: torch.device, ranks: int) -> int:
    """The device's memory in bytes; for a host, this rank's share of it."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) // ranks


def _machine(device: torch.device, ranks: int) -> str:
    """The machine that was measured, and the conditions."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    threads = f"{torch.get_num_threads()} {'thread' if torch.get_num_threads() == 1 else 'threads'}"
    at_work = f"{ranks} ranks of {threads} at work" if ranks > 1 else threads
    return f"{platform.machine()} with {os.cpu_count()} cores, {at_work}, torch {torch.__version__}"
