"""Memory that torch holds in a training step against what a plan predicts: live storages, by class.

    python benchmarks/memory.py [--write benchmarks/results/memory.md]

GPT-2, BERT and T5 of Hugging Face on the CPU in fp32, one rank, AdamW, gradients of an earlier microbatch in place.
Measured with torch's own MemTracker, which follows every live storage; nothing here counts with the library's code.
Aim: measured ≤ predicted ≤ 1.03 × measured.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

import shardwright as sw

LAYERS, WIDTH, HEADS, VOCABULARY, BATCH, SEQUENCE = 4, 256, 8, 4096, 4, 128
MIB = 2**20


def gpt2() -> torch.nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, vocab_size=VOCABULARY, n_positions=256)
    )


def bert() -> torch.nn.Module:
    return BertForMaskedLM(
        BertConfig(
            num_hidden_layers=LAYERS,
            hidden_size=WIDTH,
            num_attention_heads=HEADS,
            intermediate_size=4 * WIDTH,
            vocab_size=VOCABULARY,
            max_position_embeddings=256,
        )
    )


def t5() -> torch.nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            num_layers=LAYERS,
            d_model=WIDTH,
            num_heads=HEADS,
            d_kv=WIDTH // HEADS,
            d_ff=4 * WIDTH,
            vocab_size=VOCABULARY,
            decoder_start_token_id=0,
        )
    )


def measured_bytes(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Bytes at the peak of a step, by MemTracker's classes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()

    step()  # makes the optimizer's states and the gradients
    tracker = MemTracker()
    tracker.track_external(model, optimizer, *batch.values())
    with tracker:
        step()
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    return {str(getattr(key, "value", key)): int(value) for key, value in snapshot.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    lines = [
        "# Memory of a step against prediction",
        "",
        "    python benchmarks/memory.py",
        "",
        f"{LAYERS} layers of {WIDTH}, vocabulary {VOCABULARY}, batch {BATCH} × {SEQUENCE}, fp32, torch "
        f"{torch.__version__} on the CPU. MiB at the peak.",
        "",
        "| model | dropout | measured | predicted | ratio | measured, activations and temporary | predicted |",
        "|---|---|---|---|---|---|---|",
    ]
    builders: tuple[Callable[[], torch.nn.Module], ...] = (gpt2, bert, t5)
    for build in builders:
        for dropout in (False, True):
            model = build().train()
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout) and not dropout:
                    module.p = 0.0
            tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))
            batch: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
            found = measured_bytes(model, batch)
            plan = sw.plan(
                sw.capture(model, batch),
                sw.Cluster("cpu"),
                batch=2 * BATCH,
                microbatch=BATCH,
                precision="fp32",
                recompute="none",
                shard=0,
            )
            use = plan.predicted.memory[0]
            whole = found["Total"]
            passing = found["Activation"] + found["Temp"] if "Activation" in found else None
            shown = "" if passing is None else f"{passing / MIB:.1f}"
            lines.append(
                f"| {build.__name__} | {'0.1' if dropout else '0'} | {whole / MIB:.1f} | {use.total_bytes / MIB:.1f} "
                f"| {use.total_bytes / whole:.3f} | {shown} "
                f"| {(use.activations_bytes + use.buffers_bytes) / MIB:.1f} |"
            )
    lines += [
        "",
        "Short of the aim where torch's CPU kernels hold more than those of accelerators: attention with dropout runs "
        "as separate products that keep the scores three times over, and masks of dropout are kept in fp32, not in "
        "bytes; T5 also keeps keys and values in a cache.",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.write:
        options.write.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
