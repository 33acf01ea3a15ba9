"""Trains causal models in slices of their sequences, and compares every step with the plain, unsplit model.

Usage: slices.py OUT.json CASE...; a case is model:pp:dp:schedule:lengths, as gpt2:2:1:1f1b:5+4+3.
"""

import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from equality import GLOBAL_MICROBATCHES, Reference
from launched import leave
from models import batch, build

import shardwright as core
import shardwright.torch as sw
from tests.comparison import Comparison


def run(case: str, reference: Reference) -> dict[str, object]:
    name, pp, dp, schedule, given = case.split(":")
    lengths = [int(length) for length in given.split("+")]
    plain = build(name)
    whole = batch(name, 0)
    samples = len(next(iter(whole.values())))
    graph = core.capture(plain, {key: tensor[:2] for key, tensor in whole.items()})
    cluster = core.Cluster("cpu", nodes=1, devices_per_node=int(pp) * int(dp))
    plan = core.plan(
        graph, cluster, batch=samples, pp=int(pp), tp=1, dp=int(dp), microbatch=samples // GLOBAL_MICROBATCHES,
        schedule=schedule, recompute="none", shard=0, 
    )  # fmt: skip
    plan = replace(plan, decision=replace(plan.decision, slice_lengths=tuple(lengths)))
    sw.init(plan=plan)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    model = sw.DistributedModel(plain)
    distributed = sw.DistributedOptimizer(optimizer)

    @sw.step
    def train_step(model, batch):
        loss = model(**batch).loss
        model.backward(loss)
        return loss

    same = Comparison(case)
    for step in range(len(reference.losses)):
        same.where = f"step {step}"
        distributed.zero_grad()
        whole = batch(name, step)
        own = {key: tensor.chunk(int(dp))[sw.dp_rank()] for key, tensor in whole.items()}
        loss = float(train_step(model, own).all_reduce_mean())
        same.losses(loss, reference.losses[step])
        held = {key: parameter.grad for key, parameter in model.local_named_parameters()}
        same.gradients(held, reference.gradients[step], part=True)
        distributed.step()
    every: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(every, same.report())
    sw.shutdown()
    return {"case": case, "same": every}


def main() -> None:
    dist.init_process_group("gloo")
    out, *cases = sys.argv[1:]
    results = []
    references: dict[str, Reference] = {}
    for case in cases:
        name = case.split(":")[0]
        if name not in references:
            references[name] = Reference(name)
        results.append(run(case, references[name]))
    leave(results, out)


if __name__ == "__main__":
    main()
