"""Every partitioner on the named networks: how even, how much is sent, how long it takes to solve.

    python benchmarks/partitioners.py [--stages 8] [--only bert_large] [--write benchmarks/results/partitioners.md]

Largest over mean is of stage times (forward and backward with messages, one microbatch); 1 is even. The objective is
largest forward + largest backward, over the exact one. Bytes are those of activations that cross the cuts, forward.
Branching graphs are among them: two towers, and encoders with decoders, whose memory every decoder layer reads.
The exit status is 1 where RaNNC's cut is more than 5% behind the exact one, or there is none.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwright as sw
from shardwright.core.search.partitioner_comparison import contest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "networks"))
import own_models as own
import transformers_models as hf

NETWORKS = (
    hf.bert_large, hf.roberta_large, hf.t5_11b, hf.gpt2_xl, hf.gpt3_175b, hf.megatron_8b, hf.turing_nlg_17b,
    hf.megatron_turing_530b, hf.speech_t5, own.vit_g,
)  # fmt: skip


class TwoTowers(nn.Module):
    """Encoders of unlike width whose results meet in one product."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.ModuleList(own.Block(512, 8, 2048) for _ in range(12))
        self.document = nn.ModuleList(own.Block(1024, 16, 4096) for _ in range(12))
        self.narrow = nn.Linear(1024, 512)

    def forward(self, query: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
        for block in self.query:
            query = block(query)
        for block in self.document:
            document = block(document)
        return (query.mean(1) * self.narrow(document.mean(1))).sum(-1)


def two_towers() -> tuple[Any, Any, Any]:
    with torch.device("meta"):
        model = TwoTowers()
    sample = {"query": torch.zeros(2, 64, 512), "document": torch.zeros(2, 256, 1024)}
    return model, sample, lambda score: score.mean()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--only", action="append")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    lines = [
        "# Partitioners",
        "",
        f"    python benchmarks/partitioners.py --stages {options.stages}",
        "",
        "| network | partitioner | largest / mean | objective / exact | MiB cut | GiB on the fullest | solved in ms |",
        "|---|---|---|---|---|---|---|",
    ]
    behind = 0
    for network in (*NETWORKS, two_towers):
        if options.only and network.__name__ not in options.only:
            continue
        model, sample, *loss = network()
        graph = sw.capture(model, sample, *loss)
        # States are divided over 64 replicas, so that the largest fit; tensor groups as large as the node.
        tp = 8 if graph.parameter_count() > 5e9 else 1
        # Beyond 300 billion parameters twice the stages: RaNNC's way leaves a tenth of the memory free.
        stages = options.stages * (2 if graph.parameter_count() > 3e11 else 1)
        label = network.__name__ + (f", {stages} stages" if stages != options.stages else "")
        cluster = sw.Cluster("a100-80gb", nodes=8 * stages * tp, devices_per_node=8)
        found = contest(graph, cluster, stages, shard=1, tp=tp)
        least = dict(found.judged)["pareto"]
        for name, judged in found.judged:
            if judged is None or least is None:
                lines.append(f"| {label} | {name} | no cut fits | | | | |")
                print(lines[-1], flush=True)
                behind += name == "blocks"
                continue
            over = judged.objective_s / least.objective_s
            behind += name == "blocks" and over > 1.05
            lines.append(
                f"| {label} | {name} | {judged.imbalance:.3f} | {over:.3f} "
                f"| {judged.sent_bytes / 2**20:.1f} | {judged.peak_bytes / 2**30:.2f} | {judged.solve_s * 1e3:.1f} |"
            )
            print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    if options.write:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(text)
    return 1 if behind else 0


if __name__ == "__main__":
    sys.exit(main())
