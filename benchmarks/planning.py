"""How long capture and the whole search take, and how much memory: Llama 70B on 512 devices, GPT of 1T on 3,072.

    python benchmarks/planning.py [--case llama|gpt-1t] [--sweep planning.svg]

Each case runs in a process of its own, whose peak resident memory is the operating system's own figure. Limits: 10 s
and 0.6 GiB for Llama 70B on 64 × 8 H100, 60 s and 2 GiB for GPT of one trillion parameters on 384 × 8 A100. The sweep
draws time against layers (on 512 devices) and against devices (of 32 layers).
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import claims

CASES: dict[str, dict[str, Any]] = {
    "llama": {"layers": 80, "hidden": 8192, "nodes": 64, "hardware": "h100", "batch": 1024, "family": "llama"},
    "gpt-1t": {"layers": 128, "hidden": 25600, "nodes": 384, "hardware": "a100-80gb", "batch": 3072, "family": "gpt"},
}
LAYERS, NODES = (8, 16, 32, 64, 128), (1, 4, 16, 64, 256)


def measured(case: dict[str, Any]) -> dict[str, Any]:
    """Run one case here and now."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    import shardwright as sw

    layers, hidden = case["layers"], case["hidden"]
    with torch.device("meta"):
        if case["family"] == "llama":
            config = LlamaConfig(
                num_hidden_layers=layers, hidden_size=hidden, intermediate_size=hidden * 7 // 2,
                num_attention_heads=hidden // 128, num_key_value_heads=8,
            )  # fmt: skip
            model: Any = LlamaForCausalLM(config)
            tokens = torch.empty(2, 4096, dtype=torch.long)
        else:
            sizes = {"n_layer": layers, "n_embd": hidden, "n_head": hidden // 160, "n_positions": 2048}
            model = GPT2LMHeadModel(GPT2Config(vocab_size=51200, **sizes))
            tokens = torch.empty(2, 2048, dtype=torch.long)
    started, began = time.perf_counter(), time.process_time()
    graph = sw.capture(model, {"input_ids": tokens, "labels": tokens})
    captured = time.perf_counter()
    cluster = sw.Cluster(case["hardware"], nodes=case["nodes"], devices_per_node=8)
    plan = sw.plan(graph, cluster, batch=case["batch"])
    done, ended = time.perf_counter(), time.process_time()
    return {
        "parameters": graph.parameter_count(),
        "capture_s": captured - started,
        "search_s": done - captured,
        "cpu_s": ended - began,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "plan": plan.summary(),
        "cluster": str(cluster),
    }


def apart(case: dict[str, Any]) -> dict[str, Any]:
    """Run one case in a process of its own."""
    command = [sys.executable, __file__, "--measure", json.dumps(case)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=3600)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def chart(title: str, label: str, points: list[tuple[int, float, float]], left: float) -> str:
    """One plain chart: capture and search on logarithmic x, linear y."""
    import math

    width, height, top = 360.0, 200.0, 40.0
    most = max(capture + search for _, capture, search in points)
    low, high = math.log2(points[0][0]), math.log2(points[-1][0])

    def place(x: int, y: float) -> str:
        across = left + 40 + (math.log2(x) - low) / (high - low) * width
        return f"{across:.1f},{top + height - y / most * height:.1f}"

    parts = [f'<text x="{left + 40}" y="24" font-weight="bold">{title}</text>']
    for share in (0.0, 0.5, 1.0):
        y = top + height * (1 - share)
        parts.append(f'<line x1="{left + 40}" x2="{left + 40 + width}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{left + 34}" y="{y + 4}" text-anchor="end">{most * share:.1f} s</text>')
    for x, _, _ in points:
        across = place(x, 0.0).split(",")[0]
        parts.append(f'<text x="{across}" y="{top + height + 16}" text-anchor="middle">{x}</text>')
    parts.append(f'<text x="{left + 40 + width / 2}" y="{top + height + 34}" text-anchor="middle">{label}</text>')
    lines = (
        ("capture", "#888", [(x, c) for x, c, _ in points]),
        ("capture and search", "#06c", [(x, c + s) for x, c, s in points]),
    )
    for row, (name, colour, values) in enumerate(lines):
        path = " ".join(place(x, y) for x, y in values)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{left + 50}" y="{top + 14 + 16 * row}" fill="{colour}">{name}</text>')
    return "".join(parts)


def sweep(path: Path) -> None:
    """Time against layers and against devices, as SVG."""
    base = {"hidden": 4096, "hardware": "a100-80gb", "family": "gpt"}
    by_layers, by_devices = [], []
    for layers in LAYERS:
        found = apart(base | {"hidden": 4000, "layers": layers, "nodes": 64, "batch": 1024})
        by_layers.append((layers, found["capture_s"], found["search_s"]))
        print(f"{layers} layers on 512 devices: {found['capture_s']:.1f} + {found['search_s']:.1f} s", flush=True)
    for nodes in NODES:
        found = apart(base | {"hidden": 4000, "layers": 32, "nodes": nodes, "batch": max(1024, 8 * nodes)})
        by_devices.append((8 * nodes, found["capture_s"], found["search_s"]))
        print(f"32 layers on {8 * nodes} devices: {found['capture_s']:.1f} + {found['search_s']:.1f} s", flush=True)
    body = chart("Time against layers, 512 devices", "layers", by_layers, 20)
    body += chart("Time against devices, 32 layers", "devices", by_devices, 460)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="880" height="300" font-family="sans-serif" font-size="11">'
        f'<rect width="880" height="300" fill="white"/>{body}</svg>\n'
    )
    print(f"drawn: {path}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), action="append")
    parser.add_argument("--sweep", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measured(json.loads(options.measure))))
        return 0
    measured_of: dict[str, dict[str, float]] = {}
    for name in options.case or ([] if options.sweep else CASES):
        found = apart(CASES[name])
        total = found["capture_s"] + found["search_s"]
        print(f"{name}: {found['parameters']:,} parameters on {found['cluster']}: {found['plan']}")
        print(
            f"  capture {found['capture_s']:.1f} s + search {found['search_s']:.1f} s = {total:.1f} s; "
            f"{found['cpu_s']:.1f} s of processor time; peak memory {found['peak_gib']:.2f} GiB",
            flush=True,
        )
        measured_of[name] = {"time_s": total, "peak_gib": found["peak_gib"]}
    if options.sweep:
        sweep(options.sweep)
    if not measured_of:
        return 0
    judged = claims.planning(measured_of)
    print(judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    sys.exit(main())
