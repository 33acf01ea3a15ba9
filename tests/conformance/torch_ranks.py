"""Trains the network of `test_backends` by plan files, one after the other, on ranks that torchrun or the like started.

Usage: torch_ranks.py OUT.npz STEPS PLAN.json...
"""

import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist

import shardwright as sw
from tests.conformance.test_backends import torch_case


def main() -> None:
    out, steps, files = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    dist.init_process_group("gloo")
    found: dict[str, np.ndarray] = {}
    for number, file in enumerate(files):
        case, plan = torch_case(), sw.Plan.load(file)
        run = case.backend.compile(plan, case.model, **case.options)
        dp = plan.decision.dp
        own = case.given.chunk(dp)[dist.get_rank() % dp]  # the other axes have one rank where there are replicas
        found[f"{number} losses"] = np.array([run.step(own) for _ in range(steps)])
        found |= {f"{number} {name}": value.detach().numpy() for name, value in run.whole_parameters().items()}
    if dist.get_rank() == 0:
        np.savez(out, **found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
