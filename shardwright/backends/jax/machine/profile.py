"""Measure this machine as JAX uses it: products by size, memory, launches, collectives over the local devices."""

import itertools
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.core.cluster.hardware.collective_table import CollectiveKind, MeasuredCollective
from shardwright.core.cluster.hardware.device import Kind, MeasuredProduct
from shardwright.core.cluster.hardware.measurements import Measurements, MeasureProgress, operands_in_turn

SIDES = ((64, 64, 64), (256, 64, 256), (256, 256, 64), (256, 256, 256), (512, 512, 64), (256, 1024, 256),
         (256, 256, 1024), (512, 512, 512), (1024, 1024, 1024), (512, 3072, 768), (512, 768, 3072), (32, 1024, 512),
         (64, 512, 1024), (128, 1024, 512), (1024, 512, 32), (512, 1024, 128))  # fmt: skip
"""The (m, n, k) of the products measured: squares, the thin ones of attention and feed-forward, and those of layers
with few tokens, forward and for the gradient of a weight."""
MESSAGES = (1 << 12, 1 << 16, 1 << 20, 1 << 23)
"""The bytes of the collectives measured: what every device has to reduce or to scatter, or has gathered in the end."""
COLLECTIVES: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")
CHAIN = 50
"""The number of small ops in one compiled function, for the time of one."""
_KINDS: dict[str, Kind] = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "tpu": "tpu"}
_DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


def profile(*, name: str, budget_s: float = 20.0, progress: MeasureProgress | None = None) -> Measurements:
    """Measure the first local device, and collectives over all of them and over groups of fewer that run at once, in
    about ``budget_s`` seconds.

    Every figure is the median of its runs after one that compiles. The devices of a CPU share its cores and memory, so
    there all of them run the same at the same time.
    """
    _give_devices_a_thread_each()
    devices = jax.local_devices()
    kind: Kind = _KINDS.get(devices[0].platform, "gpu")
    busy = devices if kind == "cpu" else devices[:1]
    precisions = ("fp32",) if kind == "cpu" else ("fp32", "bf16")
    groups = [ranks for ranks in range(2, len(devices) + 1) if len(devices) % ranks == 0]
    total = len(SIDES) * len(precisions) + 4 + len(groups) * len(COLLECTIVES) * len(MESSAGES)
    each, done = budget_s / total, 0

    def step(what: str) -> None:
        nonlocal done
        if progress is not None:
            progress(what, done, total)
        done += 1

    products = []
    multiply = jax.jit(lambda a, b: a @ b)
    for precision in precisions:
        for m, n, k in SIDES:
            step(f"{precision} product {m} × {k} × {n}")
            left, right = jnp.ones((m, k), _DTYPES[precision]), jnp.ones((k, n), _DTYPES[precision])
            copies = operands_in_turn(right.nbytes)
            operands = [(left, right), *((left, jnp.copy(right)) for _ in range(copies - 1))]
            seconds = _median_s(multiply, operands, busy, each)
            products.append(MeasuredProduct(precision, m, n, k, 2.0 * m * n * k / seconds))
    step("memory")
    large = jnp.ones(1 << 24, jnp.float32)
    bandwidth = 2 * large.nbytes / _median_s(jax.jit(lambda x: x + 1), [(large,)], busy, each)
    step("elementwise chains")
    values = jnp.ones((4096, 1024), jnp.float32)
    vector = 3 * values.nbytes / _median_s(jax.jit(_chain), [(values,)], busy, each) / bandwidth
    step("optimizer")
    adamw = optax.adamw(1e-3)
    states = adamw.init(large)
    update = jax.jit(lambda p, s, g: _updated(adamw, p, s, g))
    updated = 7 * large.nbytes / _median_s(update, [(large, states, large)], busy, each) / bandwidth
    step("launches")
    small = jnp.ones((8, 8), jnp.float32)
    launch = _median_s(jax.jit(_many), [(small,)], busy, each) / CHAIN
    samples = []
    for ranks, kind_of, size in itertools.product(groups, COLLECTIVES, MESSAGES):
        step(f"{kind_of.replace('_', '-')} of {size >> 10} KiB over {ranks} devices")
        samples.append(_collective(kind_of, ranks, size, devices, each))
    return Measurements(
        name=name,
        kind=kind,
        measured_on=_machine(devices),
        memory_bytes=_memory_bytes(devices),
        products=tuple(products),
        memory_bandwidth_bytes_per_s=bandwidth,
        vector_efficiency=vector,
        optimizer_efficiency=updated,
        kernel_launch_s=launch,
        host_link_bandwidth_bytes_per_s=bandwidth / 2 if kind == "cpu" else large.nbytes / _host_copy_s(large, each),
        ranks=len(devices),
        collectives=tuple(samples),
    )


def _give_devices_a_thread_each() -> None:
    """Let the CPU client have one thread for every virtual device, unless ``NPROC`` says otherwise.

    XLA takes as many threads as the host has cores, at least one for every device, or as many as ``NPROC`` says. All of
    its devices share them: products and other large kernels are divided among all threads, whichever device runs them.
    With more threads than devices one device works on several cores, and with more threads than cores the parts of a
    product wait for each other's thread to get a core. This has an effect only before JAX's first use of its devices.
    """
    forced = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    devices = max(int(forced.group(1)) if forced else 1, getattr(jax.config, "jax_num_cpu_devices", 1))
    if devices > 1:
        os.environ.setdefault("NPROC", str(devices))


def _chain(values: jax.Array) -> jax.Array:
    centred = values - values.mean(-1, keepdims=True)
    return values + jax.nn.gelu(centred * jax.lax.rsqrt(centred.var(-1, keepdims=True) + 1e-5))


def _updated(optimizer: optax.GradientTransformation, params: Any, state: Any, gradients: Any) -> Any:
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def _many(values: jax.Array) -> jax.Array:
    for _ in range(CHAIN):
        values = values @ values * 0.1  # a product between keeps the ops apart
    return values


def _collective(
    kind: CollectiveKind, ranks: int, size_bytes: int, devices: list[Any], budget_s: float
) -> MeasuredCollective:
    """A collective of neighbouring devices, ``ranks`` in each group, all groups at once."""
    mesh = Mesh(np.array(devices).reshape(-1, ranks), ("groups", "ranks"))
    whole = size_bytes // 4 // ranks * ranks
    entries = whole // ranks if kind == "all_gather" else whole
    split = PartitionSpec("groups", "ranks")
    data = jax.device_put(jnp.ones((len(devices) // ranks, ranks * entries), jnp.float32), NamedSharding(mesh, split))

    def run(x: jax.Array) -> jax.Array:
        if kind == "all_reduce":
            total: jax.Array = jax.lax.psum(x, "ranks")
        elif kind == "all_gather":
            total = jax.lax.all_gather(x, "ranks", axis=1, tiled=True)
        else:
            total = jax.lax.psum_scatter(x, "ranks", scatter_dimension=1, tiled=True)
        return total

    mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))
    return MeasuredCollective(kind, ranks, whole * 4, _timed_s(mapped, [(data,)], budget_s))


Arguments = Sequence[tuple[Any, ...]]
"""What the calls of a function take in turns."""


def _median_s(run: Callable[..., Any], arguments: Arguments, devices: list[Any], budget_s: float) -> float:
    """The median seconds of a call that every one of the devices makes over and over, as the mean over devices."""

    def on(device: Any) -> float:
        return _timed_s(run, [jax.device_put(each, device) for each in arguments], budget_s)

    with ThreadPoolExecutor(len(devices)) as threads:
        return statistics.mean(threads.map(on, devices))


def _timed_s(run: Callable[..., Any], arguments: Arguments, budget_s: float) -> float:
    """The median seconds of a call, of as many as the budget allows, at least 3."""
    jax.block_until_ready(run(*arguments[0]))
    jax.block_until_ready(arguments)
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - began < budget_s and len(times) < 200):
        taken = arguments[(len(times) + 1) % len(arguments)]
        started = time.perf_counter()
        jax.block_until_ready(run(*taken))
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]


def _host_copy_s(large: jax.Array, budget_s: float) -> float:
    """The seconds to bring an array to the host: a new one each time, as an array that was brought once is kept."""
    fresh = jax.jit(lambda x: x + 1)
    times = []
    for _ in range(3):
        value = jax.block_until_ready(fresh(large))
        started = time.perf_counter()
        jax.device_get(value)
        times.append(time.perf_counter() - started)
    return sorted(times)[1]


def _machine(devices: list[Any]) -> str:
    """The device that was measured, and the conditions of the measurement."""
    said = f"{devices[0].device_kind} ({platform.machine()}), jax {jax.__version__}"
    if devices[0].platform != "cpu":
        return said
    threads = os.environ.get("NPROC") or max(os.cpu_count() or 1, len(devices))
    return f"{said}, {len(devices)} devices at work on {os.cpu_count()} cores, {threads} threads for all of them"


def _memory_bytes(devices: list[Any]) -> int:
    """The device's memory; of a host, one virtual device's share of it."""
    stats = devices[0].memory_stats() if devices[0].platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) // len(devices)
