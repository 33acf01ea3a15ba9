"""PyTorch on one or several GPUs: overhead, compiled units, what communication costs, and memory.

    python benchmarks/gpu.py [--ranks 1 2 4] [--parts overhead memory] [--write benchmarks/results/gpu.md]
    python benchmarks/gpu.py --device cpu --tiny        # the same code on CPUs over Gloo: nothing timed is judged

One process for each GPU, started by torchrun for every number of ranks (default: 1, and all GPUs). A small-batch GPT-2
of 24 layers, 4 microbatches on each rank. In every round each way runs its steps, in an order drawn by a seed that all
ranks share; figures are medians of the rounds' ratios, timed by CUDA events, the slowest rank's.

- overhead: a step of ours over the plain model's: on one rank the same microbatches, on several those of
  `DistributedDataParallel`. Aim: at most 1.01.
- compiled: `compile=True` beside `torch.compile` of the plain model. Aim: at least 0.95 of its speed.
- fp8: linear layers in 8 bits, compiled, beside the plain model in bf16, compiled: the speed, and the memory as below,
  where the device has such products. The speed is reported.
- hidden: whole replicas (sums) and `shard=3` (gathers and sums), beside the plain model without communication: the
  share of the time of these collectives by themselves by which a step is not longer. Reported.
- memory: `torch.cuda.max_memory_allocated` of a step beside the plan's, fp32 and bf16, whole and sharded, by rank.
  Aim: measured ≤ predicted ≤ 1.03 × measured.

Exit code 2 where there is no such device.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims
import torch
import torch.distributed as dist
import tracked
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

import shardwright as sw
import shardwright.torch as swt

MICROBATCHES, RATE, NO_DEVICE = 4, 1e-4, 2
PARTS = "overhead", "compiled", "fp8", "hidden", "memory"
MEMORY: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32", "shard": 0},
    "fp32, shard 3": {"precision": "fp32", "shard": 3},
    "bf16": {"precision": "bf16", "shard": 0},
    "bf16, shard 3": {"precision": "bf16", "shard": 3},
}
FP8 = {"precision": "fp8", "shard": 0}
FP8_CAPABILITY = (8, 9)
Step = Callable[[], None]


class Setting:
    """The model, the batch and the clock of one rank."""

    def __init__(self, device: torch.device, tiny: bool) -> None:
        self.device, self.tiny, self.is_cuda = device, tiny, device.type == "cuda"
        self.layers, self.width, self.vocabulary = (2, 64, 128) if tiny else (24, 1024, 50304)
        self.samples, self.length = (2, 16) if tiny else (4, 1024)
        self.rounds, self.steps = (2, 1) if tiny else (9, 5)
        self.order = random.Random(1)
        self.has_fp8 = not self.is_cuda or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        sizes = {"n_layer": self.layers, "n_embd": self.width, "n_head": self.width // 16 if self.tiny else 16}
        config = GPT2Config(
            **sizes, vocab_size=self.vocabulary, n_positions=self.length, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return GPT2LMHeadModel(config).train().to(self.device)

    def batch(self, microbatches: int = MICROBATCHES) -> dict[str, torch.Tensor]:
        """This rank's whole batch."""
        drawn = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
        tokens = torch.randint(0, self.vocabulary, (microbatches * self.samples, self.length), generator=drawn)
        return {"input_ids": tokens.to(self.device), "labels": tokens.to(self.device)}

    def microbatches(self) -> list[dict[str, torch.Tensor]]:
        split = zip(*(whole.split(self.samples) for whole in self.batch().values()), strict=True)
        return [dict(zip(("input_ids", "labels"), each, strict=True)) for each in split]

    def seconds(self, run: Step, times: int) -> float:
        """Seconds of one of so many runs, on the slowest rank; all ranks begin together."""
        dist.barrier()
        if self.is_cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            for _ in range(times):
                run()
            end.record()
            end.synchronize()
            taken = begin.elapsed_time(end) / 1e3
        else:
            begun = time.perf_counter()
            for _ in range(times):
                run()
            taken = time.perf_counter() - begun
        slowest = torch.tensor([taken / times], device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)

    def rounds_of(self, ways: dict[str, Step]) -> dict[str, list[float]]:
        """Seconds of every way in every round, after one that does not count."""
        found: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(self.rounds + 1):
            order = list(ways)
            self.order.shuffle(order)
            for name in order:
                taken = self.seconds(ways[name], self.steps)
                if number:
                    found[name].append(taken)
        return found


@swt.step
def train_step(model: Any, **batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    model.backward(loss, reduction="mean")
    return loss


def ours(setting: Setting, model: nn.Module, **config: Any) -> Step:
    swt.init({"ddp": True, "microbatches": MICROBATCHES, "log_every": 0} | config)
    wrapped = swt.DistributedModel(model)
    optimizer = swt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE))
    batch = setting.batch()

    def step() -> None:
        optimizer.zero_grad()
        train_step(wrapped, **batch)
        optimizer.step()

    return step


def plain(setting: Setting, model: nn.Module, called: Any = None) -> Step:
    """The model's own steps, or those of what wraps it (``called``), which sums in the last microbatch."""
    called = model if called is None else called
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    parts = setting.microbatches()

    def step() -> None:
        optimizer.zero_grad()
        for number, part in enumerate(parts, 1):
            if hasattr(called, "require_backward_grad_sync"):
                called.require_backward_grad_sync = number == len(parts)
            (called(**part).loss / len(parts)).backward()
        optimizer.step()

    return step


def median_ratio(one: list[float], other: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def overhead(setting: Setting) -> float:
    """A step of ours over one of the plain model, or of DistributedDataParallel."""
    own = setting.model()
    peer: Any = None
    if dist.get_world_size() > 1:
        peer = DistributedDataParallel(own, gradient_as_bucket_view=True)
    times = setting.rounds_of({"ours": ours(setting, setting.model()), "plain": plain(setting, own, peer)})
    swt.shutdown()
    return median_ratio(times["ours"], times["plain"])


def compiled(setting: Setting) -> float:
    """The speed of compiled units over that of the plain model, compiled."""
    backend = "aot_eager" if setting.tiny else "inductor"
    own = setting.model()
    whole: Any = torch.compile(own, backend=backend)
    ways = {"ours": ours(setting, setting.model(), compile=backend), "plain": plain(setting, own, whole)}
    times = setting.rounds_of(ways)
    swt.shutdown()
    return 1 / median_ratio(times["ours"], times["plain"])


def in_fp8(setting: Setting) -> float | None:
    """The speed of compiled units with linear layers in fp8 over that of the plain model in bf16, compiled; None where
    the device has no such products."""
    if not setting.has_fp8:
        return None
    backend = "aot_eager" if setting.tiny else "inductor"
    own = setting.model().to(torch.bfloat16)
    whole: Any = torch.compile(own, backend=backend)
    asked = {"fp8": True, "cluster": "h100", "compile": backend}
    times = setting.rounds_of({"ours": ours(setting, setting.model(), **asked), "plain": plain(setting, own, whole)})
    swt.shutdown()
    return 1 / median_ratio(times["ours"], times["plain"])


def collectives(setting: Setting, model: nn.Module, shard: int) -> Step:
    """What a step sends, by itself: a sum of all gradients; or two gathers of all parameters and a sum into shards for
    each microbatch."""
    entries, ranks = sum(p.numel() for p in model.parameters()), dist.get_world_size()
    entries += -entries % ranks
    whole = torch.zeros(entries, device=setting.device)
    part = torch.zeros(entries // ranks, device=setting.device)

    def step() -> None:
        if shard == 0:
            dist.all_reduce(whole)
            return
        for _ in range(MICROBATCHES):
            for _ in range(2):
                dist.all_gather_into_tensor(whole, part)
            dist.reduce_scatter_tensor(part, whole)

    return step


def hidden(setting: Setting, shard: int) -> float:
    """The share of the time of collectives by themselves by which a step is not longer for them."""
    own = setting.model()
    ways = {"ours": ours(setting, setting.model(), shard=shard), "plain": plain(setting, own),
            "alone": collectives(setting, own, shard)}  # fmt: skip
    times = setting.rounds_of(ways)
    swt.shutdown()
    rows = zip(times["ours"], times["plain"], times["alone"], strict=True)
    return statistics.median(1 - max(0.0, a - b) / c for a, b, c in rows)


def memory(setting: Setting, pins: dict[str, Any]) -> list[float]:
    """Predicted over measured peak of every rank."""
    ranks = dist.get_world_size()
    device = "h100" if pins["precision"] == "fp8" else "a100-80gb" if setting.is_cuda else "cpu"
    cluster = sw.Cluster(device, devices_per_node=ranks)
    sample = {name: whole[: setting.samples] for name, whole in setting.batch().items()}
    fixed = {"pp": 1, "tp": 1, "dp": ranks, "recompute": "none", "microbatch": setting.samples, "loss_scope": "replica"}
    count = MICROBATCHES * setting.samples * ranks
    plan = sw.plan(sw.capture(setting.model(), sample), cluster, batch=count, **fixed, **pins)
    if setting.is_cuda:
        left = torch.randn(64, 64, device=setting.device, requires_grad=True)
        (left @ left).sum().backward()  # makes the workspaces of the library, which are no model's
        del left
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() if setting.is_cuda else 0
    swt.init(plan=plan)
    built, batch = setting.model(), setting.batch()
    model = swt.DistributedModel(built)
    adam = torch.optim.AdamW(model.parameters(), lr=RATE)
    optimizer = swt.DistributedOptimizer(adam)
    del built

    def step() -> None:
        optimizer.zero_grad()
        train_step(model, **batch)
        optimizer.step()

    step()
    step()
    if setting.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    else:
        flat = model.runtime.split_model.parts.flat
        there = [p for _, p in model.local_named_parameters()] + [b for _, b in model.local_named_buffers()]
        there += [group.gathered for group in flat.groups] if flat is not None else []
        with tracked.tracking(there, adam, batch.values()) as tracker:
            step()
        peak = tracker.peak_bytes()
    swt.shutdown()
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, peak)
    return [predicted / measured for predicted, measured in zip(plan.predicted.peak_memory_bytes, every, strict=True)]


def rank(options: argparse.Namespace) -> None:
    """What every process runs; rank 0 writes the figures."""
    warnings.simplefilter("ignore")
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    setting = Setting(device, options.tiny)
    found: dict[str, Any] = {"overhead": None, "compiled": None, "fp8": None, "hidden": None, "memory": None}
    for part, measure in (("overhead", overhead), ("compiled", compiled), ("fp8", in_fp8)):
        if part in options.parts:
            found[part] = measure(setting)
    if dist.get_world_size() > 1 and "hidden" in options.parts:
        found["hidden"] = {f"shard {shard}": hidden(setting, shard) for shard in (0, 3)}
    # On CPUs products in fp8 are computed in float32, whose copies no plan counts.
    cases = MEMORY | ({"fp8": FP8} if setting.is_cuda and setting.has_fp8 else {})
    if "memory" in options.parts:
        there = (case for case, pins in cases.items() if dist.get_world_size() > 1 or not pins["shard"])
        found["memory"] = {case: memory(setting, cases[case]) for case in there}
    if dist.get_rank() == 0:
        Path(options.rank_to).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def launched(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """The figures of so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__,
            "--device", options.device, "--rank-to", str(out), *(["--tiny"] if options.tiny else []),
            "--parts", *options.parts,
        ]  # fmt: skip
        paths = os.pathsep.join(p for p in (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")) if p)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        if options.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        subprocess.run(command, check=True, timeout=3600, env=environment, stdout=sys.stderr)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def refusal(options: argparse.Namespace, there: int) -> str | None:
    """Why this machine cannot run it, or None."""
    if options.device == "cpu":
        return None if options.tiny else "--device cpu goes with --tiny: the models are for GPUs"
    if not there:
        return "there is no CUDA device: run it where there is one, or with --device cpu --tiny"
    most = max(options.ranks or [1])
    return None if most <= there else f"--ranks {most}, and there are {there} CUDA devices"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", nargs="+", type=int, help="numbers of processes (default: 1, and one for each GPU)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tiny", action="store_true", help="a model of two small layers")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--rank-to", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_to:
        rank(options)
        return 0
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (why := refusal(options, there)) is not None:
        print(why, file=sys.stderr)
        return NO_DEVICE
    counts = options.ranks or sorted({1, 2 if options.device == "cpu" else there})
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    lines = [
        f"# On {name}", "", "    python benchmarks/gpu.py", "", f"torch {torch.__version__}.", "",
        "| ranks | step over plain | compiled, speed over plain | fp8, speed over bf16 | hidden: sums | "
        "gathers and sums | predicted over measured memory, by case and rank |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    figures = {}
    for ranks in counts:
        found = figures[ranks] = launched(options, ranks)
        hides = found["hidden"] or {}
        shares = (f"{hides[c]:.0%}" if c in hides else "–" for c in ("shard 0", "shard 3"))
        held = "; ".join(f"{case}: {' '.join(f'{r:.3f}' for r in rs)}" for case, rs in (found["memory"] or {}).items())
        speeds = " | ".join("–" if found[p] is None else f"{found[p]:.3f}" for p in ("overhead", "compiled", "fp8"))
        lines.append(f"| {ranks} | {speeds} | {' | '.join(shares)} | {held} |")
    verdict = claims.gpu(figures, timed=not options.tiny)
    text = "\n".join([*lines, "", verdict.verdict()]) + "\n"
    print(text)
    if options.write:
        options.write.write_text(text)
    return verdict.exit_code


if __name__ == "__main__":
    sys.exit(main())
