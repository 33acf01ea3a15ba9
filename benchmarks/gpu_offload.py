"""Steps of a Llama whose blocks' activations go to the host and back, on one GPU in PyTorch.

    python benchmarks/gpu_offload.py [--write benchmarks/results/gpu_offload.md]
    python benchmarks/gpu_offload.py --device cpu --tiny        # the same code: nothing is judged

Three plans of each form: all kept, every block on the host, and the one that is planned (``offload=True``) for a
quarter of the memory that lies between these two. Steps of 4 microbatches with AdamW, the median of 5 between CUDA
events after 3. Bytes are those that the runtime sent, and bandwidths those of copies between the device and pinned
memory, a direction at a time, taken here first. What a step cannot be faster than: its computing, which is the step
with all kept, or its transfers. Closer is the bound by phase: what goes out has the forwards for cover, and what comes
back the backwards, which take two thirds of the computing. Aim: a step at most 1.05 of the larger of computing and
transfers, where nothing is recomputed beside.

Exit code 2 where there is no such device.
"""

import argparse
import gc
import math
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims
import torch
from gpu import NO_DEVICE, refusal
from gpu_steps import BUDGET_S, MICROBATCHES, train_step
from step_models import llama, tokens

import shardwright as sw
import shardwright.torch as swt
from shardwright.backends.torch.machine import host_store
from shardwright.backends.torch.machine.profile import profile
from shardwright.core.errors import PlanError

MIB, GB = 2**20, 1e9
WARM, STEPS = 2, 5
BLOCKS = "model.layers.*"
FORMS = {
    "bf16, 12 blocks of 2,048": ("bf16", 12, 2048),
    "bf16, 8 blocks of 4,096": ("bf16", 8, 4096),
    "fp32, 4 blocks of 4,096": ("fp32", 4, 4096),
}
"""The precision, and the number and width of blocks."""
KEPT, AWAY, PLANNED = "all kept", "every block on the host", "planned for a quarter between"
NEAR = 1e-2
"""What losses of a few steps may differ by: gradients add up in any order on a GPU. `tests/torch/test_cuda.py` compares
gradients to the bit."""
FORWARDS = 1 / 3
"""The forwards' share of a step's computing."""


@dataclass(frozen=True)
class Found:
    """One plan: seconds of a step, bytes at its peak, bytes that go out and back in a step, and what was predicted."""

    step_s: float
    peak_bytes: int
    out_bytes: int
    back_bytes: int
    predicted_s: float
    predicted_bytes: int
    modes: str
    """The counts of units kept, recomputed and offloaded."""
    recomputed: int
    losses: tuple[float, ...]


class Machine:
    def __init__(self, device: torch.device, tiny: bool) -> None:
        self.device, self.tiny, self.is_cuda = device, tiny, device.type == "cuda"
        self.profile = profile(name="here", budget_s=0.5 if tiny else BUDGET_S).profile()
        self.out_bandwidth, self.in_bandwidth = self._bandwidth(out=True), self._bandwidth(out=False)

    def _bandwidth(self, out: bool) -> float:
        """Bytes per second between the device and pinned memory."""
        if not self.is_cuda:
            return 1e9
        nbytes = 256 * MIB
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        source, target = (there, host) if out else (host, there)
        return nbytes / statistics.median(
            self.seconds(lambda: target.copy_(source, non_blocking=True)) for _ in range(9)
        )

    def seconds(self, run: Callable[[], Any]) -> float:
        if not self.is_cuda:
            run()
            return 1e-3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def plan(self, form: str, memory_bytes: int | None = None, **pins: Any) -> sw.Plan:
        precision = FORMS[form][0]
        device = self.profile.device
        if memory_bytes is not None:
            device = replace(device, memory_bytes=memory_bytes, reserved_memory_bytes=0)
        model, sample = self.model(form), self.sample()
        count = len(sample["input_ids"])
        asked = {"pp": 1, "tp": 1, "dp": 1, "shard": 0, "loss_scope": "replica", "headroom": 0.0} | pins
        asked["precision"] = precision if self.is_cuda else "fp32"
        cluster = sw.Cluster(replace(self.profile, device=device))
        return sw.plan(sw.capture(model, sample), cluster, batch=MICROBATCHES * count, microbatch=count, **asked)

    def model(self, form: str) -> torch.nn.Module:
        torch.manual_seed(0)
        _, layers, width = FORMS[form]
        return (llama(2, 64, 2, 128) if self.tiny else llama(layers, width, width // 128, 32000)).train()

    def sample(self) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        return tokens(2, 16, 128) if self.tiny else tokens(2, 2048, 32000)

    def run(self, form: str, plan: sw.Plan) -> Found:
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"] if self.is_cuda else 0
        swt.init({"log_every": 0}, plan=plan)
        model = swt.DistributedModel(self.model(form))
        optimizer = swt.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
        batch = {key: torch.cat([value] * MICROBATCHES).to(self.device) for key, value in self.sample().items()}

        def step() -> Any:
            optimizer.zero_grad()
            loss = train_step(model, **batch)
            optimizer.step()
            return loss

        losses = tuple(float(step().reduce_mean()) for _ in range(WARM))
        with Sent() as sent:
            step()
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        taken = [self.seconds(step) for _ in range(STEPS)]
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before if self.is_cuda else 1
        swt.shutdown()
        modes = plan.unit_modes
        counts = ", ".join(str(modes.count(mode)) for mode in ("none", "full", "offload"))
        predicted = plan.predicted
        return Found(
            statistics.median(taken),
            peak,
            sent.out_bytes,
            sent.back_bytes,
            predicted.step_time_s,
            predicted.peak_memory_bytes[0],
            counts,
            modes.count("full"),
            losses,
        )


class Sent:
    """The bytes that go to the host meanwhile, and those that are copied back."""

    def __init__(self) -> None:
        self.out_bytes = self.back_bytes = 0
        self.plain = host_store.PinnedMemory.send, host_store._Pinned.begin

    def __enter__(self) -> "Sent":
        send, begin = self.plain

        def counted_send(store: Any, tensor: torch.Tensor) -> Any:
            self.out_bytes += tensor.untyped_storage().nbytes()
            return send(store, tensor)

        def counted_begin(away: Any) -> None:
            was_here = away._back is not None
            begin(away)
            self.back_bytes += 0 if was_here or away._arrives is None else away.nbytes

        host_store.PinnedMemory.send, host_store._Pinned.begin = counted_send, counted_begin
        return self

    def __exit__(self, *_: object) -> None:
        host_store.PinnedMemory.send, host_store._Pinned.begin = self.plain


def measured(machine: Machine, form: str) -> dict[str, Found]:
    found = {KEPT: machine.run(form, machine.plan(form, recompute="none"))}
    found[AWAY] = machine.run(form, machine.plan(form, recompute={BLOCKS: "offload"}))
    most, least = (found[label].predicted_bytes for label in (KEPT, AWAY))
    try:
        found[PLANNED] = machine.run(form, machine.plan(form, least + (most - least) // 4, offload=True))
    except PlanError as error:
        print(f"{form}, {PLANNED}: {error}", file=sys.stderr)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--tiny", action="store_true", help="models of two small layers")
    parser.add_argument("--write", type=Path)
    parser.set_defaults(ranks=None)
    options = parser.parse_args()
    if (why := refusal(options, torch.cuda.device_count())) is not None:
        print(why, file=sys.stderr)
        return NO_DEVICE
    warnings.simplefilter("ignore")
    machine = Machine(torch.device(options.device), options.tiny)
    title = torch.cuda.get_device_name() if machine.is_cuda else "CPU"
    lines = [
        f"# Activations on the host, on {title}", "", "    python benchmarks/gpu_offload.py", "",
        f"torch {torch.__version__}; {machine.out_bandwidth / GB:.1f} GB/s out, {machine.in_bandwidth / GB:.1f} back.",
        "", "| model | plan | units kept, recomputed, offloaded | step, ms | computing | transfers | over the larger | "
        "over the bound by phase | predicted | peak, MiB | predicted | out and back in a step, MiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    print("\n".join(lines), flush=True)
    over: dict[str, float] = {}
    for form in options.forms:
        found = measured(machine, form)
        computing, wanted = found[KEPT].step_s, found[KEPT].losses
        for label, one in found.items():
            out, back = one.out_bytes / machine.out_bandwidth, one.back_bytes / machine.in_bandwidth
            by_phase = max(FORWARDS * computing, out) + max((1 - FORWARDS) * computing, back)
            ratio = one.step_s / max(computing, out + back)
            if label != KEPT and not one.recomputed:
                over[f"{form}, {label}"] = ratio
            if not all(math.isclose(a, b, rel_tol=NEAR, abs_tol=NEAR) for a, b in zip(one.losses, wanted, strict=True)):
                raise SystemExit(f"{form}, {label}: losses {one.losses}, and with all kept {wanted}")
            lines.append(
                f"| {form} | {label} | {one.modes} | {1e3 * one.step_s:.1f} | {1e3 * computing:.1f} | "
                f"{1e3 * (out + back):.1f} | {ratio:.3f} | {one.step_s / by_phase:.3f} | "
                f"{one.predicted_s / one.step_s - 1:+.1%} | {one.peak_bytes / MIB:.0f} | "
                f"{one.predicted_bytes / one.peak_bytes - 1:+.1%} | {one.out_bytes / MIB:.0f}, "
                f"{one.back_bytes / MIB:.0f} |"
            )
            print(lines[-1], flush=True)
    verdict = claims.gpu_offload(over, timed=machine.is_cuda)
    print(verdict.verdict())
    if options.write:
        options.write.write_text("\n".join([*lines, "", verdict.verdict()]) + "\n")
    return verdict.exit_code


if __name__ == "__main__":
    sys.exit(main())
