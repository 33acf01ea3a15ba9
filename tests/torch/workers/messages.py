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
from tests.comparison import Comparison

STEPS = 4
GLOBAL_MICROBATCHES = 4
SAMPLES = {"normed": 64}
"""Batch norm over two samples has gradients that are nothing but rounding."""


@sw.step
def train_step(model, batch):
    loss = model(**batch)
    model.backward(loss, reduction="mean")
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
    names = [key for key, _ in plain.named_parameters()]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    model = sw.DistributedModel(plain)
    distributed = sw.DistributedOptimizer(optimizer)
    same = Comparison(case)
    for step in range(STEPS):
        same.where = f"step {step}"
        distributed.zero_grad()
        own = {key: tensor.chunk(int(dp))[sw.dp_rank()] for key, tensor in batch(step, samples).items()}
        loss = float(train_step(model, own).all_reduce_mean())
        same.losses(loss, expected.losses[step])
        held = {key: parameter.grad for key, parameter in model.local_named_parameters()}
        same.gradients(held, {key: expected.gradients[step].get(key) for key in names}, part=True)
        distributed.step()
    same.values(model.state_dict(), expected.state, relative=0.0, absolute=1e-5, what="weights")
    every: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (same.report(), sum(p.numel() for p in model.local_parameters())))
    result = {
        "case": case,
        "same": [report for report, _ in every],
        "held": [size for _, size in every],
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
