"""Mixed clusters: the plan found for the devices as they are, against the best plan of who takes them to be alike.

    python benchmarks/mixed_clusters.py [--only TEXT] [--write benchmarks/results/mixed_clusters.md]

Homogeneous-minded plans are the best free plan on as many devices that are all like the fast ones, the same for the
slow ones, each run (every choice pinned, the cut too) on the true cluster; and the best plan on the fast nodes alone.
The free plan uses as many of the devices as are worth it. Its gain is over the fastest of the three, in the same
simulator; the exit status is 1 where it is slower than any of them. ``--only`` plans the rows whose name has the text,
as "36 × 2048, h100 and v100"; the other rows of a file that is written stay.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import claims
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import shardwright as sw
from shardwright.core.cluster.cluster import NodeGroup
from shardwright.core.cluster.hardware import load_link, load_profile

PAIRS = (("h100", "a100-80gb"), ("h100", "v100"), ("a100-80gb", "v100"))
INSIDE = {"h100": None, "a100-80gb": None, "v100": "ethernet-100g"}
"""The link inside a node, None: the hardware's own."""
BETWEEN = ("ib-hdr200", "ethernet-25g")
GAIN = 8
"""The column of the gain."""
NEVER_SLOWER = (
    "",
    "The free plan is never slower than any of the three: where slow nodes, or the slow link to them, cost more than "
    "they bring, it leaves them out (`uses`), and says how much slower all would be (`Not chosen` in the plan). "
    "`--devices all` uses them nevertheless; `shardwright plan … --study` shows every number of devices with its time "
    "and its price.",
)


def gpt(layers: int, width: int, length: int = 1024) -> sw.Graph:
    with torch.device("meta"):
        config = GPT2Config(
            n_layer=layers, n_embd=width, n_head=width // 64, vocab_size=50304, n_positions=length, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        model, tokens = GPT2LMHeadModel(config), torch.empty(2, length, dtype=torch.long)
    return sw.capture(model, {"input_ids": tokens, "labels": tokens})


def group(name: str, nodes: int) -> NodeGroup:
    hardware = load_profile(name)
    inside = INSIDE[name]
    return NodeGroup(hardware.device, nodes, 4, load_link(inside) if inside else hardware.intra_node)


def pinned(plan: sw.Plan) -> dict[str, Any]:
    d = plan.decision
    return {
        "pp": d.pp, "dp": d.dp, "tp": d.tp, "microbatch": d.microbatch, "schedule": d.schedule,
        "virtual_stages": d.virtual_stages, "stage_starts": d.stage_starts, "recompute": d.recompute, "shard": d.shard,
        "shard_group": d.shard_group, "placement_order": d.placement_order,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    written = options.write.read_text().splitlines() if options.write and options.write.exists() else []
    lines = [
        "# Mixed clusters",
        "",
        "    python benchmarks/mixed_clusters.py",
        "",
        "Batch 256, fp16; two nodes of each kind, four devices in a node. Seconds of a step.",
        "",
        "| model | devices | between nodes | as if all fast | all slow | fast alone | aware | gain | uses | plan |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    found_s: dict[str, tuple[float, list[float | None]]] = {}
    for layers, width in ((24, 1024), (36, 2048)):
        graph = None
        for fast, slow in PAIRS:
            for between in BETWEEN:
                name = f"GPT {layers} × {width}, {fast} and {slow}, {between}"
                head = f"| GPT {layers} × {width} | 8 {fast} + 8 {slow} | {between} |"
                if options.only not in name:
                    lines += [line for line in written if line.startswith(head)]
                    continue
                graph = graph or gpt(layers, width)
                link = load_link(between)
                mixed = sw.Cluster.of_groups([group(fast, 2), group(slow, 2)], link)
                wanted = {"batch": 256, "precision": "fp16", "answer": "fastest"}
                times: list[float | None] = []
                for kind in (fast, slow):
                    thought = sw.Cluster.of_groups([group(kind, 4)], link)
                    try:
                        naive = sw.plan(graph, thought, **wanted)
                        done = sw.plan(graph, mixed, **wanted, **pinned(naive))
                        times.append(done.predicted.step_time_s)
                    except sw.ShardwrightError:
                        times.append(None)
                alone = sw.plan(graph, sw.Cluster.of_groups([group(fast, 2)], link), **wanted)
                times.append(alone.predicted.step_time_s)
                aware = sw.plan(graph, mixed, **wanted)
                best = min(time for time in times if time is not None)
                gain = best / aware.predicted.step_time_s - 1
                found_s[name] = (aware.predicted.step_time_s, times)
                cells = [f"{time:.3f}" if time is not None else "does not fit" for time in times]
                found = f"{aware.provenance.cluster} | {aware.summary()}"
                lines.append(
                    f"{head} {' | '.join(cells)} | {aware.predicted.step_time_s:.3f} | {gain:+.1%} | {found} |"
                )
                print(lines[-1], flush=True)
    gains = [float(line.split("|")[GAIN].strip().rstrip("%")) / 100 for line in lines if line.startswith("| GPT")]
    middle = sorted(gains)[len(gains) // 2]
    said = f"Faster than the best of the three by {min(gains):.1%} to {max(gains):.1%}, {middle:.1%} in the middle."
    print(said)
    lines += ["", said, *NEVER_SLOWER]
    text = "\n".join(lines) + "\n"
    if options.write:
        options.write.write_text(text)
    judged = claims.mixed_clusters(found_s)
    print(judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    sys.exit(main())
