"""How long capture and planning take for an 80-layer Llama on 512 devices, and how much memory.

    python benchmarks/planning.py [--layers 80] [--hidden 8192] [--nodes 64]

Runs in one process, whose peak resident memory is the operating system's own figure. Limits: 30 s and 2 GiB; aim: 10 s.
"""

import argparse
import resource
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardwright as sw

LIMIT_S, AIM_S, LIMIT_GIB = 30.0, 10.0, 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1024)
    options = parser.parse_args()
    config = LlamaConfig(
        num_hidden_layers=options.layers,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 7 // 2,
        num_attention_heads=options.hidden // 128,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        tokens = torch.empty(2, options.sequence, dtype=torch.long)
    started = time.perf_counter()
    graph = sw.capture(model, {"input_ids": tokens, "labels": tokens})
    captured = time.perf_counter()
    cluster = sw.Cluster("h100", nodes=options.nodes, devices_per_node=8)
    plan = sw.plan(graph, cluster, batch=options.batch)
    planned = time.perf_counter()
    memory_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    total_s = planned - started
    print(f"model: Llama, {options.layers} layers, hidden {options.hidden}: {graph.parameter_count():,} parameters")
    print(f"capture: {captured - started:.2f} s, {len(graph.ops)} ops")
    print(f"plan for {cluster}: {planned - captured:.2f} s: {plan.summary()}")
    print(f"total: {total_s:.2f} s (limit {LIMIT_S:.0f}, aim {AIM_S:.0f}); peak memory {memory_gib:.2f} GiB (limit 2)")
    return 0 if total_s <= LIMIT_S and memory_gib <= LIMIT_GIB else 1


if __name__ == "__main__":
    sys.exit(main())
