"""Predicted times of collectives against published tables of nccl-tests.

    python benchmarks/collectives.py

Each cell is predicted over measured. The exit status is 1 where large messages (64 MiB and more), which the bandwidth
decides, are off by more than a third.
"""

import sys

import numpy as np
from published_collectives import MIB, TABLES, Table

from shardwright import Cluster

LARGE, MOST_ERROR = 64 * MIB, 1 / 3


def ratios(table: Table) -> dict[int, float]:
    """Predicted over measured, by bytes."""
    cluster = Cluster(
        table.device,
        nodes=table.nodes,
        devices_per_node=table.per_node,
        intra_node=table.intra_node,
        inter_node=table.inter_node,
    )
    group = cluster.group(range(cluster.world_size))
    seconds = {
        "all_reduce": group.all_reduce_s,
        "all_gather": group.all_gather_s,
        "reduce_scatter": group.reduce_scatter_s,
    }[table.collective]
    return {size: (seconds(size) * 1e6 + table.launch_us) / measured for size, measured in table.microseconds.items()}


def size_text(size: int) -> str:
    return f"{size >> 20} MiB" if size >= MIB else f"{size >> 10} KiB" if size >= 1024 else f"{size} B"


def main() -> int:
    print(f"{len(TABLES)} tables, {sum(len(table.microseconds) for table in TABLES)} cells: predicted over measured\n")
    missed = 0
    for table in TABLES:
        found = ratios(table)
        error = np.mean([abs(ratio - 1) for ratio in found.values()])
        large = max(abs(ratio - 1) for size, ratio in found.items() if size >= LARGE)
        missed += sum(not abs(ratio - 1) <= MOST_ERROR for size, ratio in found.items() if size >= LARGE)  # NaN too
        cells = "  ".join(f"{size_text(size)} {ratio:.2f}" for size, ratio in found.items())
        said = " (constants fitted on it)" if table.fitted else ""
        print(f"{table.collective}, {table.nodes} × {table.per_node} {table.device}; {table.source}{said}")
        print(f"    {cells}\n    MAPE {error:.1%}, largest of 64 MiB and more {large:.1%}\n")
    print(f"{missed} cells of 64 MiB and more are off by more than {MOST_ERROR:.0%}")
    return 0 if TABLES and not missed else 1


if __name__ == "__main__":
    sys.exit(main())
