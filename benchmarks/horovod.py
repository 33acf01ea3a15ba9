"""Horovod's densified gradients on CPU nodes (arXiv 1905.04035): published scaling beside predicted scaling.

    python benchmarks/horovod.py

The paper trains the large translation Transformer (210 M parameters, vocabulary 33,708) on Stampede2: nodes of 48 cores
on 100 Gb/s Omni-Path, data parallel, gradients made dense and reduced. Weak scaling: 5,000 tokens for each of four
processes on a node; strong scaling: 819,200 tokens in all, two processes on a node. Published: 91% to 300 nodes; 65% to
200 nodes. The prediction is of a decoder of the same width, parameters and vocabulary.
"""

import dataclasses
from functools import lru_cache

from predict import graph_of

import shardwright as sw
from shardwright.core.cluster.hardware import Link, load_device, load_link

WIDTH, HEADS, LAYERS, VOCABULARY, SEQUENCE = 1024, 16, 14, 33708, 50
CORES = 48


def cluster(nodes: int, processes: int) -> sw.Cluster:
    """Nodes whose processes share the cores and the port."""
    core = load_device("cpu")
    share = CORES // processes
    device = dataclasses.replace(
        core,
        name=f"{share} cores",
        memory_bytes=share * core.memory_bytes,
        memory_bandwidth_bytes_per_s=share * core.memory_bandwidth_bytes_per_s / 2.5,  # 48 cores share 230 GB/s
        peak_flops_per_s={name: share * peak for name, peak in core.peak_flops_per_s.items()},
    )
    port = Link("omni-path", bandwidth_bytes_per_s=12.5e9, latency_s=5e-6, sharing="node", efficiency=0.7)
    return sw.Cluster(
        device, nodes=nodes, devices_per_node=processes, intra_node=load_link("shared-memory"), inter_node=port
    )


@lru_cache(maxsize=64)
def samples_per_s(nodes: int, processes: int, batch: int) -> float:
    """Predicted, data parallel. All that a replica has runs as one microbatch."""
    ranks = nodes * processes
    plan = sw.plan(
        graph_of(WIDTH, HEADS, LAYERS, SEQUENCE, VOCABULARY), cluster(nodes, processes),
        batch=batch, pp=1, tp=1, dp=ranks, microbatch=batch // ranks, precision="fp32", recompute="none", shard=0,
    )  # fmt: skip
    return batch / plan.predicted.step_time_s


def horovod_lines() -> list[str]:
    """The section of the report."""
    lines = [
        "## Horovod's densified gradients on CPU nodes (arXiv 1905.04035)",
        "",
        "| scaling | nodes | processes | predicted efficiency | published |",
        "|---|---|---|---|---|",
    ]
    each = 5000 // SEQUENCE
    base = samples_per_s(1, 4, 4 * each)
    for nodes in (1, 4, 16, 75, 300):
        rate = samples_per_s(nodes, 4, 4 * nodes * each) / nodes
        said = "91%" if nodes == 300 else ""
        lines.append(f"| weak, 5,000 tokens a process | {nodes} | {4 * nodes} | {rate / base:.0%} | {said} |")
    batch = 819200 // SEQUENCE
    base = samples_per_s(16, 2, batch) / 16
    for nodes in (16, 32, 64, 128, 256):
        rate = samples_per_s(nodes, 2, batch) / nodes
        said = "65% (200 nodes)" if nodes == 256 else ""
        lines.append(f"| strong, 819,200 tokens | {nodes} | {2 * nodes} | {rate / base:.0%} | {said} |")
    return [*lines, "", "Efficiencies are against 1 and 16 nodes. The step's reduction is taken as not hidden.", ""]


if __name__ == "__main__":
    print("\n".join(horovod_lines()))
