"""A GPT of 6 billion parameters on one V100 of 16 GB: its shards, what lies on the host, the hidden share of copies.

    python benchmarks/large_job.py

It is planned, not trained: bytes and seconds are those of the plan. Limits: the shards fit the device beside the buffer
for the next one; the host has room for parameters, AdamW's states and what lies between shards; at
least 95% of the copies' time is hidden behind computing at a batch of 16 sequences of 1,024 tokens; planning takes at
most 60 s. The table also says what clipping by the global norm costs, what smaller batches hide, and what fp16 does,
whose updates wait too.
"""

import sys
import time
from dataclasses import replace
from typing import Any

import claims

LAYERS, HIDDEN, VOCABULARY, TOKENS = 30, 4096, 50257, 1024
BATCHES = (1, 2, 4, 8, 16)
GIB = 2**30


def graph() -> Any:
    """The captured model, which is never allocated."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import shardwright as sw

    config = GPT2Config(
        n_layer=LAYERS, n_embd=HIDDEN, n_head=HIDDEN // 128, n_positions=TOKENS, vocab_size=VOCABULARY, use_cache=False
    )
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
        tokens = torch.empty(2, TOKENS, dtype=torch.long)
    return sw.capture(model, {"input_ids": tokens, "labels": tokens})


def measured(model: Any) -> list[dict[str, Any]]:
    """A row for every batch, updated at once, and for the largest one clipped too."""
    import shardwright as sw
    from shardwright.core.cluster.hardware import load_profile

    device = replace(load_profile("v100").device, memory_bytes=16 * GIB, host_memory_bytes=488 * GIB)
    cluster = sw.Cluster(device)
    rows = []
    cases = [*(("fp32", batch, None) for batch in BATCHES), ("fp32", BATCHES[-1], 1.0), ("fp16", BATCHES[-1], None)]
    for precision, batch, clip_norm in cases:
        began = time.perf_counter()
        job = sw.Job(
            name="gpt", model=model, steps=10, batch=batch, microbatch=1, precision=precision, clip_norm=clip_norm
        )
        plan = sw.plan_jobs([job], cluster)
        took_s = time.perf_counter() - began
        (planned,) = plan.jobs
        alone = planned.alone()
        rows.append(
            {
                "precision": precision, "batch": batch, "clipped": clip_norm is not None,
                "parameters": planned.parameter_count,
                "shards": len(planned.shards), "device": plan.device_bytes, "budget": plan.budget_bytes,
                "host": planned.host, "copied": planned.copied_bytes, "step_s": alone.makespan_s,
                "hidden": alone.hidden_share, "waiting": planned.waiting, "planning_s": took_s,
            }
        )  # fmt: skip
    return rows


def main() -> int:
    """Print the table, and judge it."""
    model = graph()
    rows = measured(model)
    print(f"GPT-2 of {rows[0]['parameters'] / 1e9:.3g} billion parameters, AdamW, one V100 of 16 GB\n")
    print(
        "| precision | batch | clipped | shards | device GiB | host GiB | of it states | copied a step GiB | step s | "
        "hidden |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        host = row["host"]
        print(
            f"| {row['precision']} "
            f"| {row['batch']} | {'yes' if row['clipped'] else 'no'} | {row['shards']} | {row['device'] / GIB:.4g} | "
            f"{host.total / GIB:.4g} | {(host.parameters + host.optimizer) / GIB:.4g} | {row['copied'] / GIB:.4g} | "
            f"{row['step_s']:.4g} | {row['hidden']:.3f} |"
        )
    waiting = rows[-2]["waiting"]
    print(
        f"\nClipped by the global norm, a step takes {waiting.step_s:.3g} s more, copies "
        f"{waiting.copied_bytes / GIB:.3g} GiB more, and {waiting.host_bytes / GIB:.3g} GiB of gradients are on "
        f"the host.\n"
    )
    judged = claims.large_job(
        {
            "parameters": rows[0]["parameters"],
            "hidden": max(row["hidden"] for row in rows if not row["waiting"].reason and row["batch"] == BATCHES[-1]),
            "device": max(row["device"] / row["budget"] for row in rows),
            "host": max(row["host"].total for row in rows) / (488 * GIB),
            "planning_s": max(row["planning_s"] for row in rows),
        }
    )
    print(judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    sys.exit(main())
