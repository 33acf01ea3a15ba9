"""Sharding levels on 8, 64 and 512 devices, over fast and slow links: bytes, seconds of them alone, what is exposed.

    python benchmarks/sharding_levels.py [--write benchmarks/results/sharding_levels.md]

A GPT of 1.3 billion parameters, replicas alone (pp = tp = 1), each with four microbatches of two samples; as the
PyTorch runtime runs it. The bytes are those that come into a node at least: of N nodes, each takes in the share
(N - 1) / N of what is gathered or scattered, and of an all-reduce twice that. Exits with 1 where a plan moves more
through a node's ports than its step leaves time for, or where steps differ by anything but exposed traffic and
optimizer.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import claims
from megatron import gpt

import shardwright as sw

MACHINES = ((2, 4), (8, 8), (64, 8))
LINKS = ("ib-ndr400", "ethernet-25g")
MICROBATCH, MICROBATCHES = 2, 4
LAYERS, HIDDEN, WORDS = 24, 2048, 51200


@dataclass(frozen=True)
class Found:
    """One level on one cluster."""

    level: int
    step_s: float
    computing_s: float
    exposed_s: float
    hidden_s: float
    optimizer_s: float
    moved_bytes: float
    port_bytes_per_s: float
    gather_s: float
    """Of all parameters, alone."""
    sum_s: float
    """Of all gradients, alone."""

    @property
    def port_s(self) -> float:
        """Seconds that the port needs for the bytes, at its whole rate."""
        return self.moved_bytes / self.port_bytes_per_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    lines = [
        "# Sharding levels",
        "",
        "    python benchmarks/sharding_levels.py",
        "",
        f"GPT {LAYERS} × {HIDDEN}, bf16, {MICROBATCHES} microbatches of {MICROBATCH} samples on each H100; InfiniBand "
        "has a port for each device, Ethernet one for each node. Milliseconds; `ports alone` are the bytes over the "
        "ports' rate, `gather` and `sum` those of all parameters and gradients once, alone. The fastest comes first, "
        "each other is compared with the one above it.",
        "",
        "| devices | between nodes | shard | step | GB into a node | ports alone | gather | sum | exposed | hidden "
        "| optimizer | why |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    graph, rows = gpt(LAYERS, HIDDEN, 16, 2048, WORDS, fused_attention=True), {}
    for nodes, each in MACHINES:
        for link in LINKS:
            cluster = sw.Cluster("h100", nodes=nodes, devices_per_node=each, inter_node=link)
            found = sorted((_found(graph, cluster, level) for level in range(4)), key=lambda f: f.step_s)
            for place, one in enumerate(found):
                numbers = (one.port_s, one.gather_s, one.sum_s, one.exposed_s, one.hidden_s, one.optimizer_s)
                cells = " | ".join(f"{1e3 * seconds:.1f}" for seconds in numbers)
                lines.append(
                    f"| {nodes * each} | {link} | {one.level} | {1e3 * one.step_s:.1f} | {one.moved_bytes / 1e9:.1f} "
                    f"| {cells} | {_why(one, found[place - 1] if place else None)} |"
                )
                print(lines[-1], flush=True)
                rows[f"{nodes * each} devices, {link}, shard {one.level}"] = one
    if options.write:
        options.write.write_text("\n".join(lines) + "\n")
    judged = claims.sharding_levels(
        {
            name: (f.port_s / f.step_s, (f.computing_s + f.exposed_s + f.optimizer_s) / f.step_s)
            for name, f in rows.items()
        }
    )
    print(judged.verdict())
    return judged.exit_code


def _found(graph: sw.Graph, cluster: sw.Cluster, level: int) -> Found:
    world = cluster.world_size
    plan = sw.plan(
        graph, cluster, batch=world * MICROBATCH * MICROBATCHES, pp=1, tp=1, dp=world, microbatch=MICROBATCH,
        shard=level, shard_group=world if level else None, recompute="none", precision="bf16", like="torch",
        whole_below_bytes=0 if level == 3 else None, gathered_stages=0 if level == 3 else None, headroom=0,
    )  # fmt: skip
    p, d = plan.predicted, plan.decision
    size = 2.0 * plan.model.parameter_count
    kept = 2.0 * WORDS * HIDDEN  # the last unit's parameters stay for the backward
    sums = MICROBATCHES if d.reduces_each else 1
    passed = {
        0: 2 * size,
        1: 2 * size,
        2: (sums + 1) * size,
        3: MICROBATCHES * (2 * size - kept) + sums * size,
    }[level]
    group = cluster.group(list(range(world)))
    return Found(
        level,
        p.step_time_s,
        p.pipeline_s - p.passes_wait_s,
        p.data_parallel_s + p.passes_wait_s,
        p.data_parallel_hidden_s,
        p.optimizer_s,
        passed * (cluster.nodes - 1) / cluster.nodes,
        cluster.link_for_group(range(world)).effective_bandwidth_bytes_per_s,
        group.all_gather_s(size),
        group.reduce_scatter_s(size) if level else group.all_reduce_s(size),
    )


def _why(one: Found, above: Found | None) -> str:
    """One sentence on the step's place, from its figures."""
    traffic_ms = 1e3 * (one.exposed_s + one.hidden_s)
    share = one.hidden_s / (one.exposed_s + one.hidden_s)
    own = f"{share:.0%} of its {traffic_ms:.0f} ms of traffic lie beside {1e3 * one.computing_s:.0f} ms of computing"
    if above is None:
        return own
    exposed_ms, update_ms = 1e3 * (one.exposed_s - above.exposed_s), 1e3 * (one.optimizer_s - above.optimizer_s)
    ratio = one.moved_bytes / above.moved_bytes
    moved = "as many bytes" if abs(ratio - 1) < 0.005 else f"{ratio:.1f} times the bytes"
    return f"{moved}; {own}: {exposed_ms:+.1f} ms exposed, {update_ms:+.1f} ms of optimizer"


if __name__ == "__main__":
    sys.exit(main())
