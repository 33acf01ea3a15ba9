"""Which products stay: planned by module, beside PyTorch's own two choices by a budget.

    pip install pulp
    python benchmarks/kept_products.py [--write benchmarks/results/kept_products.md]

Blocks of a transformer (attention as one kernel, no dropout) on one CPU thread, in float32. PyTorch's first choice is
that of `torch.compile` with its partitioner (`activation_memory_budget`) and without generated kernels (``aot_eager``):
a knapsack over the ops of all blocks. Its second is the integer program of its selective checkpointing tools
(`torch.distributed._tools.sac_ilp`) over the ops of a block, whose budget is a share of all that these make; it is
given FLOPs for times, since these are judged. Ours are the modes of the blocks that `plan(recompute="products")` comes
to as memory shrinks, one or two in a plan, run by the policy of our runtime. All are judged by the same two figures:
what the process holds more after a forward than before it, and the FLOPs of products and attention that the backward
runs again, as torch's `FlopCounterMode` counts them. Of every budget ours is the choice that recomputes least among
those that hold no more than PyTorch's. Plans are made for the peak of a step, at which the last blocks may keep
everything; here, where what a forward leaves is judged, these have the mode of the plan that keeps more. Exit code 0:
ours recompute no more at any budget.
"""

import argparse
import ctypes
import functools
import gc
import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP, SACEstimator, SACStats
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode, flop_registry, shape_wrapper

import shardwright as sw
from shardwright.backends.torch.memory.kept_results import KeptResults
from shardwright.core.cluster.hardware import load_profile
from shardwright.core.errors import PlanError

WIDTH, HEADS, TOKENS, SAMPLES, BLOCKS = 256, 8, 256, 8, 4
BUDGETS = (0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
SHARES = (0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05)
"""Budgets of the integer program, of all that a block's ops make, with what no backward reads."""
LITTLE = 1e-6
"""The cost of an op without FLOPs: the program's solver leaves out what costs nothing."""
ROOMS = 40
"""The device memories for which a plan is made, from the least that any plan takes to the most."""
MIB = 2**20


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(query) * key[2] + 2 * math.prod(query[:3]) * key[2] * value[3]


ATTENTION: dict[Any, Any] = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
"""The kernel on CPUs, which torch's counter does not know, by the formula that it has for others."""
NEAR_MIB = 0.5
"""What pages and small values may differ by."""
Modes = tuple[str, ...]
"""The mode of each block."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = *x.shape[:2], 3, HEADS, WIDTH // HEADS
        q, k, v = self.qkv(self.norm_1(x)).view(shape).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor, modes: Modes = ("none",) * BLOCKS) -> torch.Tensor:
        for block, mode in zip(self.blocks, modes, strict=True):
            x = block(x) if mode == "none" else _again(block, x, mode)
        return x.square().mean()


def _again(block: nn.Module, x: torch.Tensor, mode: str) -> torch.Tensor:
    if mode == "full":
        return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)

    return checkpoint(
        block, x, use_reentrant=False, preserve_rng_state=False, context_fn=KeptResults(mode, block).contexts
    )


@dataclass(frozen=True, slots=True)
class Point:
    """What one choice holds after a forward, in MiB, and the GFLOP that its backward takes."""

    choice: str
    held_mib: float
    gflop: float


def held_mib() -> float:
    gc.collect()
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def measured(choice: str, run: Callable[[], torch.Tensor], backward_gflop: Callable[[], float]) -> Point:
    run().backward()  # compiled, and gradients are there
    before = held_mib()
    loss = run()
    held = held_mib() - before
    loss.backward()
    del loss
    return Point(choice, held, backward_gflop())


def ours(model: Blocks, x: torch.Tensor, modes: Modes, forward_gflop: float) -> Point:
    def backward_gflop() -> float:
        with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
            model(x, modes).backward()
        return counter.get_total_flops() / 1e9 - forward_gflop

    return measured(in_words(modes), lambda: model(x, modes), backward_gflop)


def in_words(modes: Modes) -> str:
    """A mode for all blocks, or the modes of some blocks each."""
    counts = Counter(modes)
    if len(counts) == 1:
        return f"`{modes[0]}`"
    return " and ".join(f"{count} `{mode}`" for mode, count in counts.items())


def theirs(model: Blocks, x: torch.Tensor, budget: float) -> Point:
    torch._dynamo.reset()
    functorch.activation_memory_budget = budget
    compiled = torch.compile(model, backend="aot_eager")

    def backward_gflop() -> float:
        loss = compiled(x)
        with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
            loss.backward()
        return counter.get_total_flops() / 1e9

    return measured(f"budget {budget}", lambda: compiled(x), backward_gflop)


def by_integer_program(model: Blocks, x: torch.Tensor, budget: float, forward_gflop: float) -> Point:
    """The ops of a block that PyTorch's tools choose to keep."""
    from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module

    stats = _ops_of_a_block(x.shape)
    views = set(stats.view_like_ops)
    kept = get_optimal_checkpointing_policy_per_module(stats, budget)
    chosen = [(name, kept[n]) for n, name in enumerate(stats.func_names) if n not in views]
    names_of_views = {stats.func_names[n] for n in views}

    class Policy:
        def __init__(self) -> None:
            self.numbers = {False: 0, True: 0}

        def __call__(self, context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            if op in OPS_TO_ALWAYS_SKIP or op.overloadpacket.__name__ in names_of_views:
                return CheckpointPolicy.PREFER_RECOMPUTE
            number = self.numbers[context.is_recompute]
            self.numbers[context.is_recompute] = number + 1
            name, is_kept = chosen[number]
            assert name == op.overloadpacket.__name__
            return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    def run() -> torch.Tensor:
        y = x
        for block in model.blocks:
            y = checkpoint(
                block, y, use_reentrant=False, preserve_rng_state=False,
                context_fn=lambda: create_selective_checkpoint_contexts(Policy()),
            )  # fmt: skip
        return y.square().mean()

    def backward_gflop() -> float:
        with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
            run().backward()
        return counter.get_total_flops() / 1e9 - forward_gflop

    return measured(f"program {budget}", run, backward_gflop)


@functools.cache
def _ops_of_a_block(shape: torch.Size) -> SACStats:
    """The ops of a block's forward as PyTorch's tools see them, with seconds by their FLOPs."""
    flops = {**flop_registry, **{op: shape_wrapper(count) for op, count in ATTENTION.items()}}

    def timed(op: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        made = op(*args, **kwargs or {})
        count = flops.get(op.overloadpacket)
        gflop = count(*args, **kwargs or {}, out_val=made) / 1e9 if count else 0.0
        return made, gflop + LITTLE

    estimator = SACEstimator()
    with FakeTensorMode():
        block, given = Block(), torch.zeros(shape, requires_grad=True)
        with estimator("operator-level-cost-model"):
            estimator._estimate_runtime = timed
            block(given)
    return estimator.sac_mod_stats["Block"]


def planned(model: Blocks) -> list[Modes]:
    """The modes of the blocks that plans come to as memory shrinks."""
    graph = sw.capture(model, torch.ones(2, TOKENS, WIDTH))
    profile = load_profile("a100-80gb")

    def plan(memory_bytes: int, recompute: str) -> sw.Plan:
        device = replace(profile.device, memory_bytes=memory_bytes, reserved_memory_bytes=0)
        cluster = sw.Cluster(device, nodes=1, devices_per_node=1)
        return sw.plan(
            graph, cluster, batch=SAMPLES, microbatch=SAMPLES, precision="fp32", headroom=0.0, recompute=recompute
        )

    most, least = (plan(2**34, mode).predicted.peak_memory_bytes[0] for mode in ("none", "full"))
    found: dict[Modes, None] = {}
    for room in range(ROOMS + 1):
        try:
            made = plan(least + (most - least) * room // ROOMS, "products").decision
        except PlanError:
            continue
        other = made.other_recompute or made.recompute
        others = {*made.other_units, *made.kept_units}
        found[tuple(other if unit in others else made.recompute for unit in range(BLOCKS))] = None
    return list(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    ctypes.CDLL("libc.so.6").mallopt(-3, 2**17)  # large memory goes back to the system
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(SAMPLES, TOKENS, WIDTH)
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        model(x)
    forward = counter.get_total_flops() / 1e9
    ends = ("none",) * BLOCKS, ("full",) * BLOCKS
    points = [ours(model, x, each, forward) for each in dict.fromkeys([*planned(model), *ends])]
    once = next(p.gflop for p in points if p.choice == "`none`")
    rows = [
        "| PyTorch's | holds, MiB | recomputes, GFLOP | ours | holds, MiB | recomputes, GFLOP |",
        "|" + "---|" * 6,
    ]
    behind = []
    peers = [theirs(model, x, budget) for budget in BUDGETS]
    peers += [by_integer_program(model, x, budget, forward) for budget in SHARES]
    for peer in peers:
        own = min((p for p in points if p.held_mib <= peer.held_mib + NEAR_MIB), key=lambda p: p.gflop, default=None)
        if own is None:
            rows.append(f"| {peer.choice} | {peer.held_mib:.1f} | {peer.gflop - once:.2f} | none | | |")
            continue
        behind.append((own.gflop - peer.gflop) / forward)
        rows.append(
            f"| {peer.choice} | {peer.held_mib:.1f} | {peer.gflop - once:.2f} | {own.choice} | {own.held_mib:.1f} | "
            f"{own.gflop - once:.2f} |"
        )
    rows += [
        "",
        f"A forward takes {forward:.2f} GFLOP. Ours recompute at most {max(behind):.1%} of that more than PyTorch's.",
    ]
    rows += ["", "| ours | holds, MiB | recomputes, GFLOP |", "|---|---|---|"]
    rows += [
        f"| {p.choice} | {p.held_mib:.1f} | {p.gflop - once:.2f} |" for p in sorted(points, key=lambda p: p.held_mib)
    ]
    text = "\n".join(rows)
    print(text)
    if options.write:
        head = (
            "# Products that stay, by module and by PyTorch's own choice\n\n    python benchmarks/kept_products.py\n\n"
        )
        options.write.write_text(f"{head}{text}\n", encoding="utf-8")
    return 0 if behind and max(behind) <= 0.0 else 1


if __name__ == "__main__":
    sys.exit(main())
