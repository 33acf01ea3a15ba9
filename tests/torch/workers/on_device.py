"""Trains a small model with every kind of state on the given device, and compares with torch alone on the same device.

Usage: on_device.py cuda|cpu OUT.json. Gradients go in several buckets, so that their sums run beside the backward.
"""

import copy
import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from fp8_training import in_fp8_by_hand
from launched import leave
from torch import nn

import shardwright.torch as sw
from shardwright.backends.torch.memory.fp8_linear import CAPABILITY
from tests.comparison import Comparison

STEPS, MICROBATCHES, SAMPLES, WIDTH = 3, 2, 4, 256
CASES: dict[str, dict[str, Any]] = {
    f"{precision}, shard {shard}": {"shard": shard} | ({} if precision == "fp32" else {precision: True})
    for precision in ("fp32", "bf16", "fp16")
    for shard in (0, 1, 2, 3)
}
CASES |= {f"fp8, shard {shard}": {"shard": shard, "fp8": True, "cluster": "h100"} for shard in (0, 3)}
CASES |= {
    f"{precision}, {place} on the host": {"offload_states": place} | ({} if precision == "fp32" else {precision: True})
    for precision in ("fp32", "bf16")
    for place in ("optimizer", "parameters")
}
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x).float()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@sw.step
def train_step(model, tokens):
    loss = model(tokens)
    model.backward(loss, reduction="mean")
    return loss


def parts_of(step: int, device: torch.device) -> list[torch.Tensor]:
    """Every microbatch of all ranks."""
    count = dist.get_world_size() * MICROBATCHES
    tokens = torch.randint(0, 64, (count * SAMPLES, 16), generator=torch.Generator().manual_seed(step))
    return list(tokens.to(device).chunk(count))


def plain_run(model: nn.Module, half: torch.dtype | None, device: torch.device, in_fp8: bool = False) -> dict[str, Any]:
    """Torch alone on all microbatches: in 16 bits on copies of float32 parameters, with float32 sums; ``in_fp8``: with
    linear layers in 8 bits, by hand."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, gradients = [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        parts, total = parts_of(step, device), 0.0
        for part in parts:
            inside = model if half is None else copy.deepcopy(model).to(half)
            inside = in_fp8_by_hand(inside, "head") if in_fp8 else inside
            loss = inside(part)
            (loss / len(parts)).backward()
            total += float(loss)
            if inside is not model:
                for own, copied in zip(model.parameters(), inside.parameters(), strict=True):
                    added = copied.grad.float()
                    own.grad = added if own.grad is None else own.grad.add_(added)
                inside.zero_grad()
        losses.append(total / len(parts))
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    return {"losses": losses, "gradients": gradients}


def own_run(model: nn.Module, config: dict[str, Any], device: torch.device) -> dict[str, Any]:
    sw.init({"ddp": True, "microbatches": MICROBATCHES, "wait_timeout_s": 60.0, "log_every": 0} | config)
    wrapped = sw.DistributedModel(model)
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(wrapped.parameters(), lr=1e-3))
    losses, gradients = [], {}
    state = wrapped.runtime.split_model.parts
    for step in range(STEPS):
        optimizer.zero_grad()
        first = dist.get_rank() * MICROBATCHES
        own = torch.cat(parts_of(step, device)[first : first + MICROBATCHES])
        losses.append(float(train_step(wrapped, own).all_reduce_mean()))
        for name, p in sorted(wrapped.local_named_parameters()) if not step else ():
            grad = torch.empty(0, device=device) if p.grad is None else p.grad.clone()
            gradients[name] = state.whole(name, grad) if state.is_part(name) else grad
        optimizer.step()
    held = [p for p in wrapped.parameters() if p.numel()]
    assert all(p.device.type == ("cpu" if "offload_states" in config else device.type) for p in held)
    assert all(value.device == p.device for p in held for value in optimizer.state[p].values() if value.dim())
    sw.shutdown()
    return {"losses": losses, "gradients": gradients}


def main() -> None:
    warnings.simplefilter("ignore")
    kind, out = sys.argv[1:]
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    reports = []
    for case, config in CASES.items():
        half = next((dtype for name, dtype in HALF.items() if name in config), None)
        torch.manual_seed(0)
        model = Net().to(device)
        in_fp8 = "fp8" in config
        if in_fp8 and kind == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
            continue
        expected = plain_run(copy.deepcopy(model), half, device, in_fp8)
        found = own_run(model, config, device)
        # cuBLAS keeps sums in fewer bits, and what then rounds otherwise takes an 8-bit neighbour, up to an eighth off.
        narrow = 1e-1 if kind == "cuda" else 5e-2
        same, rough = Comparison(case), {} if half is None else {"relative": narrow if in_fp8 else 1e-2}
        same.losses(found["losses"], expected["losses"], **({} if half is None else {"relative": 2e-3}))
        same.gradients(found["gradients"], expected["gradients"], **rough)
        reports.append(same.report())
    leave(reports, out)


if __name__ == "__main__":
    main()
