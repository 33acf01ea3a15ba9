"""Trains models whose control flow depends on values and compares every step with the plain model.

Usage: messages.py OUT.json CASE...; a case is model:pp:dp:pipeline.
"""

import sys
import warnings

import torch
import torch.distributed as dist
from dynamic import batch, build, reference
from launched import leave

import shardwright.torch as sw

STEPS = 4
GLOBAL_MICROBATCHES = 4
SAMPLES = {"normed": 64}
"""Batch norm over two samples has gradients that are nothing but rounding."""


@sw.step
def train_step(model, batch):
    loss = model(**batch)
    model.backward(loss)
    return loss


warnings.simplefilter("always")


def run(case: str) -> dict[str, object]:
    name, pp, dp, pipeline = case.split(":")
    samples = SAMPLES.get(name, 8)
    expected = reference(name, STEPS, GLOBAL_MICROBATCHES, samples)
    sw.init(
        {
            "pipeline_parallel_degree": int(pp),
            "microbatches": GLOBAL_MICROBATCHES // int(dp),
            "pipeline": pipeline,
            "ddp": int(dp) > 1,
            "wait_timeout_s": 60.0,
        }
    )
    plain = build(name)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    model = sw.DistributedModel(plain)
    distributed = sw.DistributedOptimizer(optimizer)
    worst_loss, worst_gradient = 0.0, 0.0
    missing: list[str] = []
    for step in range(STEPS):
        distributed.zero_grad()
        own = {key: tensor.chunk(int(dp))[sw.dp_rank()] for key, tensor in batch(step, samples).items()}
        loss = float(train_step(model, own).reduce_mean())
        worst_loss = max(worst_loss, abs(loss - expected.losses[step]) / abs(expected.losses[step]))
        wanted = expected.gradients[step]
        everything = torch.stack([g.norm() for g in wanted.values()]).norm()
        for key, parameter in model.local_named_parameters():
            if (parameter.grad is None) != (key not in wanted):
                missing.append(key)
                continue
            if parameter.grad is not None:
                allowed = 1e-4 * wanted[key].norm() + 1e-6 * everything
                worst_gradient = max(worst_gradient, float((parameter.grad - wanted[key]).norm() / allowed))
        distributed.step()
    state = model.state_dict()
    state_error = max(float((state[k].float() - t.float()).abs().max()) for k, t in expected.state.items())
    held = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(held, torch.tensor([sum(p.numel() for p in model.local_parameters())]))
    worst = [torch.zeros(3, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(worst, torch.tensor([worst_loss, worst_gradient, len(missing)], dtype=torch.float64))
    loss_error, gradient_error, lacking = torch.stack(worst).max(dim=0).values.tolist()
    result = {
        "case": case,
        "loss": loss_error,
        "gradient": gradient_error,
        "missing": lacking,
        "names": missing,
        "state_error": state_error,
        "held": [int(size) for size in held],
        "whole": sum(t.numel() for t in plain.parameters()),
        "by_messages": model.runtime.messages is not None,
        "crossings": 0 if model.runtime.messages is None else model.runtime.messages.calls.crossings,
    }
    sw.shutdown()
    return result


def main() -> None:
    dist.init_process_group("gloo")
    results = [run(case) for case in sys.argv[2:]]
    leave(results, sys.argv[1])


if __name__ == "__main__":
    main()
