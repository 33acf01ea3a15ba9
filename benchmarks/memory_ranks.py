"""Peak memory of every rank of PyTorch plans over 4 processes against prediction, by torch's own MemTracker.

    python benchmarks/memory_ranks.py

The model and the way of measuring are those of `found_plans.py`; here the degrees and the schedule are pinned. Aim:
measured ≤ predicted ≤ 1.03 × measured, on every rank.
"""

import sys

import found_plans
import torch

import shardwright as sw

CASE = "4 ranks, batch 16"
PLANS: dict[str, dict[str, object]] = {
    "pp 4, 1f1b": {"pp": 4, "dp": 1, "tp": 1, "schedule": "1f1b", "virtual_stages": 1},
    "pp 4, gpipe": {"pp": 4, "dp": 1, "tp": 1, "schedule": "gpipe", "virtual_stages": 1},
    "pp 2 × dp 2, 1f1b": {"pp": 2, "dp": 2, "tp": 1, "schedule": "1f1b", "virtual_stages": 1},
    "pp 2 × tp 2, 1f1b": {"pp": 2, "dp": 1, "tp": 2, "schedule": "1f1b", "virtual_stages": 1},
    "dp 2 × tp 2": {"pp": 1, "dp": 2, "tp": 2},
}


def main() -> int:
    ids = torch.zeros((2, found_plans.LENGTH), dtype=torch.long)
    graph = sw.capture(found_plans.torch_model(), {"input_ids": ids, "labels": ids})
    cluster = found_plans.CASES[CASE].cluster()
    print("| plan | measured, MiB by rank | predicted | predicted / measured |\n|---|---|---|---|", flush=True)
    within = True
    for name, pins in PLANS.items():
        usual = {"batch": 16, "microbatch": 2, "recompute": "none", "shard": 0, "precision": "fp32"}
        plan = sw.plan(graph, cluster, **usual, **pins)  # type: ignore[arg-type]
        measured, predicted = found_plans.run_torch(CASE, plan)["peaks"], plan.predicted.peak_memory_bytes
        ratios = [p / m for p, m in zip(predicted, measured, strict=True)]
        within &= all(0.999 <= ratio <= 1.03 for ratio in ratios)
        cells = (" ".join(f"{size / 2**20:.2f}" for size in sizes) for sizes in (measured, predicted))
        print(f"| {name} | {' | '.join(cells)} | {' '.join(f'{ratio:.3f}' for ratio in ratios)} |", flush=True)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
