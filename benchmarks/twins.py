"""Five models and their Flax twins, planned with nothing pinned on six clusters: where the plans are the same.

    python benchmarks/twins.py [--model NAME] [--write benchmarks/results/twins.md]

GPT-2, BERT and T5 of Hugging Face, NCF and a ResNet in plain PyTorch, each beside a twin in Flax NNX that was written
apart from it (`tests/twins`). GiB and milliseconds are predicted, of the fullest rank and of a step, PyTorch / JAX.
"""

import argparse
import sys
import warnings
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims

import shardwright as sw
from shardwright.core.cluster.hardware import load_profile
from tests.twins.models import TWINS

GIB = 2**30
SMALL = replace(load_profile("v100").device, memory_bytes=16 * GIB, reserved_memory_bytes=0)
CLUSTERS = {
    "4 a100": (sw.Cluster("a100-80gb", devices_per_node=4), 64),
    "2 × 8 h100": (sw.Cluster("h100", nodes=2, devices_per_node=8), 256),
    "4 × 8 a100, 25 Gbit/s": (sw.Cluster("a100-80gb", nodes=4, devices_per_node=8, inter_node="ethernet-25g"), 512),
    "8 v100 of 16 GiB": (sw.Cluster(SMALL, devices_per_node=8), 128),
    "2 × 4 t4": (sw.Cluster("t4", nodes=2, devices_per_node=4), 64),
    "2 × 4 tpu-v5e": (sw.Cluster("tpu-v5e", nodes=2, devices_per_node=4), 64),
}
"""Each with its batch."""
SAMPLES = {"ncf": 512, "resnet": 8}
"""How many times that batch, where samples are small."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(TWINS))
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    lines = [
        "# Twins",
        "",
        "    python benchmarks/twins.py",
        "",
        "| model | cluster | plan | GiB | of | ms | the twin's, where it differs |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    found: dict[str, bool] = {}
    for name in options.model or TWINS:
        graphs = TWINS[name]()
        for where, (cluster, batch) in CLUSTERS.items():
            plans = [
                sw.plan(graph, cluster, batch=batch * SAMPLES.get(name, 1), frameworks=["torch", "jax"])
                for graph in graphs
            ]
            alike = sw.compare(*plans).same_decision
            found[f"{name}, {where}"] = alike
            memory = " / ".join(f"{max(plan.predicted.peak_memory_bytes) / GIB:.2f}" for plan in plans)
            times = " / ".join(f"{plan.predicted.step_time_s * 1e3:.1f}" for plan in plans)
            room = f"{min(plans[0].provenance.device_memory_bytes) / GIB:.1f}"
            other = "" if alike else plans[1].summary()
            lines.append(f"| {name} | {where} | {plans[0].summary()} | {memory} | {room} | {times} | {other} |")
            print(lines[-1], flush=True)
    lines += ["", f"The same plan in {sum(found.values())} of {len(found)} cases."]
    print(lines[-1])
    if options.write:
        options.write.write_text("\n".join(lines) + "\n")
    judged = claims.twins(found, options.model is None)
    print(judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    sys.exit(main())
