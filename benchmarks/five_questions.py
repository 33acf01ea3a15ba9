"""Five questions as users ask them, each with nothing pinned: the plan, its rates and memory, what is published beside.

python benchmarks/five_questions.py [--only 8B] [--write benchmarks/results/five_questions.md]
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shardwright as sw

Model = Callable[[], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Question:
    """A model, the devices, and the batch that a user has."""

    name: str
    model: Model
    cluster: sw.Cluster
    batch: int
    published: str
    like: str | None = None


def llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, words: int, sequence: int) -> Model:
    def build() -> tuple[Any, ...]:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=kv_heads, vocab_size=words, max_position_embeddings=sequence,
            attn_implementation="sdpa",
        )  # fmt: skip
        with torch.device("meta"):
            return LlamaForCausalLM(config), _tokens(sequence)

    return build


def gpt_175b() -> tuple[Any, ...]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 96, "n_embd": 12288, "n_head": 96, "vocab_size": 51200, "n_positions": 2048}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, attn_implementation="sdpa")
    with torch.device("meta"):
        return GPT2LMHeadModel(config), _tokens(2048)


def mixtral() -> tuple[Any, ...]:
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(max_position_embeddings=4096, attn_implementation="sdpa")
    with torch.device("meta"):
        return MixtralForCausalLM(config), _tokens(4096)


def vit_22b() -> tuple[Any, ...]:
    """ViT-22B (arXiv 2302.05442, section 2): parallel blocks without biases in q, k, v, norms of queries and keys."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    hidden, inner, layers, heads, patch = 6144, 24576, 48, 48, 14

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norm = nnx.LayerNorm(hidden, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(
                heads, hidden, hidden, decode=False, normalize_qk=True, use_bias=False, rngs=rngs
            )
            self.up = nnx.Linear(hidden, inner, rngs=rngs)
            self.down = nnx.Linear(inner, hidden, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            y = self.norm(x)
            return x + self.attention(y) + self.down(jax.nn.gelu(self.up(y)))

    class ViT(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.patches = nnx.Conv(3, hidden, (patch, patch), (patch, patch), rngs=rngs)
            self.positions = nnx.Param(jnp.zeros((256, hidden)))
            self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
            self.norm = nnx.LayerNorm(hidden, rngs=rngs)
            self.head = nnx.Linear(hidden, 1000, rngs=rngs)

        def __call__(self, images: jax.Array) -> jax.Array:
            x = self.patches(images)
            x = x.reshape(x.shape[0], 256, hidden) + self.positions[...]
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x).mean(axis=1))

    def loss(model: ViT, batch: dict[str, jax.Array]) -> jax.Array:
        logits = jax.nn.log_softmax(model(batch["images"]))
        return -jnp.mean(jnp.take_along_axis(logits, batch["labels"][:, None], axis=1))

    model = nnx.eval_shape(lambda: ViT(nnx.Rngs(0)))
    sample = {
        "images": jax.ShapeDtypeStruct((2, 224, 224, 3), jnp.float32),
        "labels": jax.ShapeDtypeStruct((2,), jnp.int32),
    }
    return model, sample, loss


QUESTIONS = (
    Question(
        "8B on 8 H100", llama(4096, 14336, 32, 32, 8, 128256, 8192), sw.Cluster("h100", devices_per_node=8), 64,
        "5,762 tokens/s a GPU eager, 6,667 compiled, on H100 held to 500 W with 2.4 TB/s (torchtitan, FSDP2)",
    ),
    Question(
        "70B on 64 H100", llama(8192, 28672, 80, 64, 8, 128256, 8192),
        sw.Cluster("h100", nodes=8, devices_per_node=8), 256,
        "419.7 model TFLOP/s a GPU for a 70B GPT on 768 H100 (Megatron-Core: tp 8, pp 2, overlapped)",
    ),
    Question(
        "175B on 1,024 A100", gpt_175b, sw.Cluster("a100-80gb", nodes=128, devices_per_node=8), 1536,
        "51.4% MFU on 64 A100 (arXiv 2205.05198: tp 8, pp 8, sequence parallel, selective recompute)",
    ),
    Question(
        "Mixtral 8x7B on 64 H100", mixtral, sw.Cluster("h100", nodes=8, devices_per_node=8), 256,
        "nothing in the data folder",
    ),
    Question(
        "ViT-22B on 256 TPU v5e", vit_22b, sw.Cluster("tpu-v5e", nodes=64, devices_per_node=4), 4096,
        "54.9% MFU on TPU v4 (arXiv 2302.05442, section 3)",
    ),
)  # fmt: skip


def _tokens(sequence: int) -> dict[str, Any]:
    import torch

    tokens = torch.zeros(2, sequence, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    lines = ["# Five questions", "", "    python benchmarks/five_questions.py", ""]
    for question in QUESTIONS:
        if options.only in question.name:
            lines += _answer(question)
    text = "\n".join(lines) + "\n"
    print(text)
    if options.write:
        options.write.write_text(text)
    return 0


def _answer(question: Question) -> list[str]:
    started = time.perf_counter()
    graph = sw.capture(*question.model())
    captured_s = time.perf_counter() - started
    plan = sw.plan(graph, question.cluster, batch=question.batch, precision="bf16", like=question.like)
    took_s = time.perf_counter() - started
    p, rate = plan.predicted, plan.throughput
    peak, whole = max(p.peak_memory_bytes) / 2**30, min(plan.provenance.device_memory_bytes) / 2**30
    exposed = p.data_parallel_s + p.passes_wait_s
    lines = [
        f"## {question.name}, batch {question.batch}",
        "",
        f"- plan: {plan.summary()}",
        f"- step {p.step_time_s:.3f} s; {rate.samples_per_s:.1f} samples/s"
        + (f", {rate.tokens_per_s / plan.mesh.size:.0f} tokens/s a device" if rate.tokens_per_s else "")
        + (f"; {rate.flops_per_s / 1e12:.0f} TFLOP/s a device" if rate.flops_per_s else "")
        + (f", MFU {rate.mfu:.1%}" if rate.mfu else ""),
        f"- over the data axis {exposed / p.step_time_s:.1%} of the step exposed, "
        f"{p.data_parallel_hidden_s / p.step_time_s:.1%} hidden; tensor collectives "
        f"{p.tensor_collective_s / p.step_time_s:.1%}, idle {p.bubble_fraction:.1%}",
        f"- peak memory {peak:.1f} GiB of {whole:.1f}",
        f"- published for the like: {question.published}",
        f"- captured in {captured_s:.1f} s, planned in {took_s - captured_s:.1f} s",
    ]
    return [*lines, *(f"- not chosen: {a.summary}: {a.reason}" for a in plan.alternatives), ""]


if __name__ == "__main__":
    sys.exit(main())
