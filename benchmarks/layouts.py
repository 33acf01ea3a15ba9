"""What the layout solver finds on well-known models, beside Megatron's formula: bytes per block on a tensor axis.

    python benchmarks/layouts.py [--ranks 4] [--models gpt2 bert t5 llama vit mixtral]
    python benchmarks/layouts.py --large

Megatron (arXiv 1909.08053, section 3) all-reduces the activation [batch, sequence, hidden] once per sublayer forward
and once backward; a ring moves 2(n-1)·|T| bytes for each. The memory limit lets a rank hold 30% more than the
lightest layouts need (ViT: 5%), so that weights are split. Fails if a block moves more than the formula.
"""

import argparse
import sys
import time

import torch
import transformers
from claims import Claims

import shardwright as sw
from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.layout.conversion_bytes import table_bytes
from shardwright.core.model.fold import fold
from shardwright.core.solver import AxisCost, Setting, Solution, lightest_bytes, solve

LENGTH, BATCH, HIDDEN = 512, 2, 1024


def tokens() -> torch.Tensor:
    return torch.empty(2, LENGTH, dtype=torch.long)


def gpt2() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = transformers.GPT2Config(n_layer=3, n_embd=HIDDEN, n_head=16, vocab_size=50304)
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens(), "labels": tokens()}


def bert() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = transformers.BertConfig(num_hidden_layers=3, hidden_size=HIDDEN, num_attention_heads=16,
                                     intermediate_size=4 * HIDDEN, vocab_size=30592)  # fmt: skip
    return transformers.BertForMaskedLM(config), {"input_ids": tokens(), "labels": tokens()}


def t5() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = transformers.T5Config(num_layers=3, d_model=HIDDEN, d_ff=4 * HIDDEN, num_heads=16, vocab_size=32128,
                                   decoder_start_token_id=0)  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), {"input_ids": tokens(), "labels": tokens()}


def llama() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = transformers.LlamaConfig(num_hidden_layers=3, hidden_size=HIDDEN, intermediate_size=3584,
                                      num_attention_heads=16, num_key_value_heads=8)  # fmt: skip
    return transformers.LlamaForCausalLM(config), {"input_ids": tokens(), "labels": tokens()}


def vit() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = transformers.ViTConfig(num_hidden_layers=3, hidden_size=HIDDEN, num_attention_heads=16,
                                    intermediate_size=4 * HIDDEN, num_labels=1000)  # fmt: skip
    images, labels = torch.empty(2, 3, 224, 224), torch.empty(2, dtype=torch.long)
    return transformers.ViTForImageClassification(config), {"pixel_values": images, "labels": labels}


def mixtral() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = transformers.MixtralConfig(num_hidden_layers=3, hidden_size=HIDDEN, intermediate_size=3584,
                                        num_attention_heads=16, num_key_value_heads=8, num_local_experts=8)  # fmt: skip
    return transformers.MixtralForCausalLM(config), {"input_ids": tokens(), "labels": tokens()}


MODELS = {"gpt2": gpt2, "bert": bert, "t5": t5, "llama": llama, "vit": vit, "mixtral": mixtral}
ALL_REDUCES = {"t5": 7}
"""Of the block shown, both ways: four unless named. A T5 decoder block has three sublayers, and sums the gradient of
what the encoder gave it as well."""
NOT_JUDGED = {"mixtral"}
"""Megatron's formula is for dense blocks: an expert block handles every token twice."""
SLACK = {"vit": 1.05}
"""Of the bytes of the lightest layouts, what a rank may hold: 1.3 unless named. That lets one matrix of ViT stay whole.
"""


def solved(name: str, ranks: int) -> tuple[sw.Graph, Solution, float]:
    """The capture, the layouts and the seconds that the solver took."""
    with torch.device("meta"):
        model, sample = MODELS[name]()
    graph = sw.capture(model, sample)
    folded, counter = fold(graph), WorkCounter(graph)
    setting = Setting((AxisCost("tp", ranks, 2e11, 5e-6),), flops_per_s=4e14, memory_bytes_per_s=1.5e12, batch=BATCH)
    started = time.perf_counter()
    limit = SLACK.get(name, 1.3) * lightest_bytes(folded, setting, counter)
    found = solve(folded, setting, memory_limit_bytes=limit, counter=counter)
    return graph, found, time.perf_counter() - started


def llama_70b() -> tuple[Solution, float]:
    """The layouts of an 80-layer Llama on a mesh of 8 × 8, and the seconds that the solver took."""
    config = transformers.LlamaConfig(num_hidden_layers=80, hidden_size=8192, intermediate_size=28672,
                                      num_attention_heads=64, num_key_value_heads=8)  # fmt: skip
    with torch.device("meta"):
        model, long = transformers.LlamaForCausalLM(config), torch.empty(2, 4096, dtype=torch.long)
    graph = sw.capture(model, {"input_ids": long, "labels": long})
    folded, counter = fold(graph), WorkCounter(graph)
    axes = AxisCost("inner", 8, 2e11, 5e-6), AxisCost("outer", 8, 2.5e10, 1e-5)
    started = time.perf_counter()
    found = solve(folded, Setting(axes, 4e14, 2e12), counter=counter)
    return found, time.perf_counter() - started


def block_bytes(graph: sw.Graph, found: Solution, ranks: int) -> tuple[int, float, int]:
    """(unit, bytes that its ranks together move, collectives) of the busiest repeated block."""
    busiest = (0, 0.0, 0)
    seen: dict[int, int] = {}
    for unit in fold(graph).units:
        seen[unit.fold_class] = seen.get(unit.fold_class, 0) + 1
    for unit in fold(graph).units:
        if seen[unit.fold_class] < 2:
            continue
        moves = [m for m in found.units[unit.index].moves if not m.is_parameter]
        moved = sum(table_bytes(m.before, m.after, ranks, m.size_bytes) for m in moves)
        if moved > busiest[1]:
            busiest = (unit.index, moved, len(moves))
    return busiest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--large", action="store_true", help="time an 80-layer Llama on 8 × 8 instead (limit 2 s)")
    options = parser.parse_args()
    if options.large:
        _, seconds = llama_70b()
        print(f"Llama, 80 layers of 8192, on 8 × 8: {seconds:.2f} s, {seconds / 2:.2f} of the limit")
        return 0 if seconds <= 2 else 1
    print(f"{'model':10}{'block moves':>14}{'Megatron':>12}{'ratio':>8}{'collectives':>13}{'border':>10}{'solver':>10}")
    judged = Claims()
    for name in options.models:
        graph, found, seconds = solved(name, options.ranks)
        unit, moved, count = block_bytes(graph, found, options.ranks)
        length = 197 if name == "vit" else LENGTH
        activation = BATCH * length * HIDDEN * 2
        megatron = ALL_REDUCES.get(name, 4) * 2 * (options.ranks - 1) * activation
        if name not in NOT_JUDGED:
            judged.at_most(f"{name}: moves over Megatron's formula", moved / megatron, 1.001)
        border = str(found.units[unit].enters.on("tp"))
        print(
            f"{name:10}{moved / 1e6:11.1f} MB{megatron / 1e6:9.1f} MB{moved / megatron:8.3f}{count:13d}{border:>10}"
            f"{seconds:8.2f} s"
        )
    print(judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    sys.exit(main())
