"""Memory of jobs in shards: GPT-2, BERT, T5 and ResNet, each on a third of what it takes trained whole.

    python benchmarks/jobs_memory.py [--write benchmarks/results/jobs_memory.md]

Every pass of a step is run from the host and followed by torch's own MemTracker: parameters, gradients, the optimizer's
states, activations and values on their way. Limits: no pass holds more than the plan says of it, nor than the budget;
the fullest pass of each model is predicted at most 3% too high. Beside it the largest error of any pass.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.torch.job_cases import BATCH, CASES, made, peaks_of_steps

WIDTH, TOKENS, WORDS = 128, 64, 256


def texts() -> torch.Tensor:
    return torch.randint(0, WORDS, (BATCH, TOKENS))


def gpt2() -> tuple[nn.Module, list[torch.Tensor]]:
    sizes = {"n_layer": 6, "n_embd": WIDTH, "n_head": 4, "n_positions": TOKENS, "vocab_size": WORDS}
    return GPT2LMHeadModel(GPT2Config(use_cache=False, **sizes)).train(), [texts(), texts()]


def bert() -> tuple[nn.Module, list[torch.Tensor]]:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 4 * WIDTH}
    config = BertConfig(max_position_embeddings=TOKENS, vocab_size=WORDS, **sizes)
    return BertForMaskedLM(config).train(), [texts(), texts()]


def t5() -> tuple[nn.Module, list[torch.Tensor]]:
    sizes = {"num_layers": 3, "num_decoder_layers": 3, "d_model": WIDTH, "d_ff": 4 * WIDTH, "num_heads": 4, "d_kv": 32}
    config = T5Config(use_cache=False, decoder_start_token_id=0, vocab_size=WORDS, **sizes)
    return T5ForConditionalGeneration(config).train(), [texts(), texts()]


def resnet() -> tuple[nn.Module, list[torch.Tensor]]:
    sizes = {"embedding_size": 32, "hidden_sizes": [32, 64, 128], "depths": [2, 2, 2], "num_labels": 10}
    model = ResNetForImageClassification(ResNetConfig(layer_type="basic", **sizes)).train()
    return model, [torch.randn(BATCH, 3, 64, 64), torch.randint(0, 10, (BATCH,))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="append the table to this file")
    options = parser.parse_args()
    lines = [
        "| model | shards | budget MiB | fullest pass MiB | predicted | any pass at most |",
        "|---|---|---|---|---|---|",
    ]
    rows: dict[str, dict[str, float]] = {}
    for name, make in {"gpt2": gpt2, "bert": bert, "t5": t5, "resnet": resnet}.items():
        CASES[name] = replace(CASES[name], make=make)
        jobs = made([name], devices=2)
        (job,), peaks = jobs.plan.jobs, peaks_of_steps(jobs, name)
        ratios = [own.device_bytes / peaks[name, own.kind, own.shard] for own in job.passes]
        fullest, budget = max(peaks.values()), jobs.plan.budget_bytes
        rows[name] = {"fullest": job.device_bytes / fullest, "least": min(ratios), "budget": fullest / budget}
        cells = (
            f"{budget / 2**20:.2f} | {fullest / 2**20:.2f} | {rows[name]['fullest'] - 1:+.1%} | {max(ratios) - 1:+.0%}"
        )
        lines.append(f"| {name} | {len(job.shards)} | {cells} |")
    print("\n".join(lines))
    if options.write is not None:
        with options.write.open("a") as file:
            file.write("\n".join(lines) + "\n")
    judged = claims.jobs_memory(rows)
    print(judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    sys.exit(main())
