"""Memory that a training step holds against what a plan predicts.

    python benchmarks/memory.py [--write benchmarks/results/memory.md]
    python benchmarks/memory.py --framework jax [--models gpt2 t5]

torch: GPT-2, BERT, T5 and ResNet of Hugging Face and an NCF on the CPU in fp32, one rank, AdamW, gradients of an
earlier microbatch in place.
Measured with torch's own MemTracker, which follows every live storage; nothing here counts with the library's code.
Aim: measured ≤ predicted ≤ 1.03 × measured.

JAX (`memory_jax.py`): the models of `jax_models.py` on virtual devices, before and after anything is compiled.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch.distributed._tools.mem_tracker import MemTracker
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
from transformers.utils import ModelOutput

import shardwright as sw

LAYERS, WIDTH, HEADS, VOCABULARY, BATCH, SEQUENCE = 4, 256, 8, 4096, 4, 128
MIB = 2**20


def gpt2(width: int = WIDTH) -> torch.nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(n_layer=LAYERS, n_embd=width, n_head=HEADS, vocab_size=VOCABULARY, n_positions=256)
    )


def bert(width: int = WIDTH) -> torch.nn.Module:
    return BertForMaskedLM(
        BertConfig(
            num_hidden_layers=LAYERS,
            hidden_size=width,
            num_attention_heads=HEADS,
            intermediate_size=4 * width,
            vocab_size=VOCABULARY,
            max_position_embeddings=256,
        )
    )


def t5(width: int = WIDTH) -> torch.nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            num_layers=LAYERS,
            d_model=width,
            num_heads=HEADS,
            d_kv=width // HEADS,
            d_ff=4 * width,
            vocab_size=VOCABULARY,
            decoder_start_token_id=0,
        )
    )


def resnet(width: int = WIDTH) -> torch.nn.Module:
    sizes = [width // 8, width // 4, width // 2]
    return ResNetForImageClassification(
        ResNetConfig(embedding_size=sizes[0], hidden_sizes=sizes, depths=[2, 2, 2], layer_type="basic", num_labels=10)
    )


class NeuralCollaborativeFiltering(torch.nn.Module):
    """NeuMF (arXiv 1708.05031): a product of embeddings beside a network on others."""

    def __init__(self, users: int = 4096, items: int = 8192, width: int = 64) -> None:
        super().__init__()
        self.user, self.item = torch.nn.Embedding(users, 2 * width), torch.nn.Embedding(items, 2 * width)
        self.network = torch.nn.Sequential(
            torch.nn.Linear(2 * width, 2 * width), torch.nn.ReLU(), torch.nn.Dropout(0.1),
            torch.nn.Linear(2 * width, width), torch.nn.ReLU(), torch.nn.Dropout(0.1),
        )  # fmt: skip
        self.score = torch.nn.Linear(2 * width, 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor, labels: torch.Tensor) -> ModelOutput:
        (product_u, network_u), (product_i, network_i) = self.user(users).chunk(2, -1), self.item(items).chunk(2, -1)
        joined = torch.cat([product_u * product_i, self.network(torch.cat([network_u, network_i], -1))], -1)
        scores = self.score(joined).squeeze(-1)
        return ModelOutput(loss=torch.nn.functional.binary_cross_entropy_with_logits(scores, labels))


def ncf(width: int = WIDTH) -> torch.nn.Module:
    return NeuralCollaborativeFiltering(width=width // 4)


BUILDERS: dict[str, Callable[..., torch.nn.Module]] = {
    "gpt2": gpt2, "bert": bert, "t5": t5, "resnet": resnet, "ncf": ncf,
}  # fmt: skip
"""Each takes a width."""


def batch_of(name: str) -> dict[str, torch.Tensor]:
    if name == "resnet":
        return {"pixel_values": torch.randn(8, 3, 64, 64), "labels": torch.randint(0, 10, (8,))}
    if name == "ncf":
        users, items = torch.randint(0, 4096, (4096,)), torch.randint(0, 8192, (4096,))
        return {"users": users, "items": items, "labels": torch.rand(4096)}
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))
    return {"input_ids": tokens, "labels": tokens}


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
    parser.add_argument("--framework", choices=("torch", "jax"), default="torch")
    parser.add_argument("--models", nargs="+", choices=BUILDERS, default=list(BUILDERS))
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    if options.framework == "jax":
        import memory_jax

        return memory_jax.run(options.models, options.write)
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
    for name in options.models:
        build = BUILDERS[name]
        for dropout in (False, True):
            model = build().train()
            dropped = [module for module in model.modules() if isinstance(module, torch.nn.Dropout)]
            if dropout and not dropped:
                continue
            for module in dropped:
                module.p = module.p if dropout else 0.0
            batch = batch_of(name)
            found = measured_bytes(model, batch)
            size = len(batch["labels"])
            plan = sw.plan(
                sw.capture(model, batch),
                sw.Cluster("cpu"),
                batch=2 * size,
                microbatch=size,
                precision="fp32",
                recompute="none",
                shard=0,
            )
            use = plan.predicted.memory[0]
            whole = found["Total"]
            lines.append(
                f"| {name} | {'0.1' if dropout else '0'} | {whole / MIB:.1f} | {use.total_bytes / MIB:.1f} "
                f"| {use.total_bytes / whole:.3f} | {(found['Activation'] + found['Temp']) / MIB:.1f} "
                f"| {(use.activations_bytes + use.buffers_bytes) / MIB:.1f} |"
            )
    text = "\n".join(lines) + "\n"
    print(text)
    if options.write:
        options.write.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
