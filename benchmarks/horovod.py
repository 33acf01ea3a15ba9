"""Horovod's densified gradients on CPU nodes (arXiv 1905.04035): published scaling beside predicted scaling.

    python benchmarks/horovod.py

The paper trains the large translation Transformer (210 M parameters, vocabulary 33,708) on Stampede2: nodes of 48 cores
on 100 Gb/s Omni-Path, data parallel, gradients made dense and reduced. Weak scaling: 5,000 tokens for each of four
processes on a node; strong scaling: 819,200 tokens in all, two processes on a node. Published: 91% at 300 nodes, and
65% at 200 nodes. The prediction is of a decoder of the same width, parameters and vocabulary.

Between nodes the network does not bound the exchange: one thread of each process runs Horovod's cycle and with it all
of MPI, which copies and sums on that core. The rate is the one that the same paper gives for one tensor, and neither of
the two judged points: with 64 processes the dense reduction of the tied embedding's gradient takes `REDUCED_S`. (That
figure is quoted from memory of the paper's timelines; the sentence's other one, 82 times fewer bytes, is what
`reduce_gradient` counts.) Within one node the exchange goes through shared memory, whose prior is that of every CPU
profile here. Nothing of this was run: PyTorch's wheels have no MPI backend
(`torch.distributed.is_mpi_available()` is False), and ranks on CPUs exchange over Gloo here.

Left out, as no rate of them is published: the coordinator, whose one thread takes in a request for every tensor from
every process and step (Horovod 0.15), and what processes wait for the slowest. Both only lower the efficiency of many
processes.
"""

import dataclasses
import sys
from functools import lru_cache

import claims
from predict import graph_of

import shardwright as sw
from shardwright.core.cluster.hardware import Link, load_device, load_link

WIDTH, HEADS, LAYERS, VOCABULARY, SEQUENCE = 1024, 16, 14, 33708, 50
CORES = 48
PORT_BYTES_PER_S = 12.5e9
"""Omni-Path, 100 Gb/s in one direction."""
REDUCED_BY, REDUCED_S = 64, 0.169
"""The processes, and the seconds, of the paper's dense reduction of one tensor of `VOCABULARY` rows."""
PUBLISHED = {"weak": 0.91, "strong": 0.65}
"""At 300 nodes of four processes, beside one node; at 200 nodes of two, beside 16."""


def exchange_bytes_per_s() -> float:
    """The bytes that a process passes on in a second of a reduction: each passes nearly twice the tensor's."""
    tensor_bytes = VOCABULARY * WIDTH * 4
    return 2 * (REDUCED_BY - 1) / REDUCED_BY * tensor_bytes / REDUCED_S


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
    reached = exchange_bytes_per_s() / PORT_BYTES_PER_S
    port = Link("omni-path", PORT_BYTES_PER_S, latency_s=5e-6, sharing="node", efficiency=reached)
    return sw.Cluster(
        device, nodes=nodes, devices_per_node=processes, intra_node=load_link("shared-memory"), inter_node=port
    )


@lru_cache(maxsize=64)
def samples_per_s(nodes: int, processes: int, each: int) -> float:
    """Predicted, data parallel, with ``each`` samples for a process, which run as one microbatch."""
    ranks = nodes * processes
    plan = sw.plan(
        graph_of(WIDTH, HEADS, LAYERS, SEQUENCE, VOCABULARY), cluster(nodes, processes),
        batch=each * ranks, pp=1, tp=1, dp=ranks, microbatch=each, precision="fp32", recompute="none", shard=0,
    )  # fmt: skip
    return each * ranks / plan.predicted.step_time_s


def weak(nodes: int) -> float:
    """The efficiency at that many nodes, of one node's."""
    each = 5000 // SEQUENCE
    return samples_per_s(nodes, 4, each) / nodes / samples_per_s(1, 4, each)


def strong(nodes: int) -> float:
    """The efficiency at that many nodes, of that of 16, at 819,200 tokens in all (rounded to whole samples)."""
    samples = 819200 / SEQUENCE
    per_node = [samples_per_s(n, 2, round(samples / (2 * n))) / n for n in (nodes, 16)]
    return per_node[0] / per_node[1]


def horovod_lines() -> list[str]:
    """The section of the report."""
    lines = [
        "## Horovod's densified gradients on CPU nodes (arXiv 1905.04035)",
        "",
        "| scaling | nodes | processes | predicted efficiency | published |",
        "|---|---|---|---|---|",
    ]
    for nodes in (1, 4, 16, 75, 300):
        said = f"{PUBLISHED['weak']:.0%}" if nodes == 300 else ""
        lines.append(f"| weak, 5,000 tokens a process | {nodes} | {4 * nodes} | {weak(nodes):.0%} | {said} |")
    for nodes in (16, 32, 64, 128, 200):
        said = f"{PUBLISHED['strong']:.0%}" if nodes == 200 else ""
        lines.append(f"| strong, 819,200 tokens | {nodes} | {2 * nodes} | {strong(nodes):.0%} | {said} |")
    return [
        *lines,
        "",
        "Efficiencies are against 1 and 16 nodes. The step's reduction is taken as not hidden. Between nodes a process "
        f"passes on {exchange_bytes_per_s() / 1e9:.2f} GB/s, as in the paper's reduction of one tensor by "
        f"{REDUCED_BY} processes in {REDUCED_S * 1e3:.0f} ms, which is neither of the points published here. Nothing "
        "of this was run: PyTorch's wheels have no MPI backend, which the paper's runs used.",
        "",
    ]


def main() -> int:
    print("\n".join(horovod_lines()))
    verdict = claims.horovod({"weak": weak(300) - PUBLISHED["weak"], "strong": strong(200) - PUBLISHED["strong"]})
    print(verdict.verdict())
    return verdict.exit_code


if __name__ == "__main__":
    sys.exit(main())
