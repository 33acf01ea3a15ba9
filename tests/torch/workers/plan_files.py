"""Makes a plan file, and trains from it as this version's solver would choose and as one with other prices would.

Usage: plan_files.py PLAN.json, then plan_files.py PLAN.json OUT.json on two ranks
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launched import leave
from tp_models import batch, build

import shardwright.torch as sw
from shardwright import Cluster, Plan, capture, plan
from shardwright.core.model.fold import fold
from shardwright.core.model.structure import structure_of
from shardwright.core.plan.realised_layouts import program_for
from shardwright.core.solver.op_prices import Prices


@sw.step
def train_step(model, batch):
    loss = model(**batch).loss
    model.backward(loss, reduction="mean")
    return loss


def make() -> Plan:
    whole = batch("gpt2", 0)
    samples = len(next(iter(whole.values())))
    graph = capture(build("gpt2", 0.1), whole)
    cluster = Cluster("cpu", devices_per_node=2)
    return plan(graph, cluster, batch=samples, pp=1, dp=1, tp=2, precision="fp32", microbatch=samples // 2)


def train(plan: Plan) -> dict[str, Any]:
    """Losses of two steps, the digest of the layouts on this rank, and that of what the solver would choose now."""
    sw.init(plan=plan)
    sw.set_seed(5)
    model = sw.DistributedModel(build("gpt2", 0.1))
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for step in range(2):
        optimizer.zero_grad()
        losses.append(float(train_step(model, batch("gpt2", step)).all_reduce_mean()))
        optimizer.step()
    tensor = model.runtime.tensor
    graph = tensor.replays[-1].traced.graph
    solved = program_for(graph, structure_of(fold(graph))[0], plan.decision, plan.costs.rates)
    sw.shutdown()
    return {"losses": losses, "layouts": tensor.layouts_digest, "solved": solved.digest}


def main() -> None:
    if len(sys.argv) == 2:
        make().save(sys.argv[1])
        return
    planned, out = Plan.load(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    found = [train(planned)]
    Prices.edge_s = lambda *_: 0.0  # type: ignore[method-assign, assignment]
    seconds = Prices.seconds
    Prices.seconds = lambda self, op, chosen: seconds(self, op, chosen) / 1e6  # type: ignore[method-assign]
    found.append(train(planned))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    leave(every, out)


if __name__ == "__main__":
    main()
