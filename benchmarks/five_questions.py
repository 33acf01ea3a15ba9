"""Five questions as users ask them, each with nothing pinned: the plan, its rates and memory, what is published beside.

    python benchmarks/five_questions.py [--only 8B] [--write benchmarks/results/five_questions.md]

Beside each answer stands the way in which the published run was set up, pinned on the same devices and counted for the
same runtime, so that what differs is the plan and nothing else. Published figures are those in the data folder and in
the papers that are named.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
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
    way: dict[str, Any] = field(default_factory=dict)
    """The published run's degrees and policy, with the degrees scaled to the question's devices over dp."""


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
        {"pp": 1, "dp": 8, "tp": 1, "microbatch": 2, "shard": 3, "gathered_stages": 0, "recompute": "alternate"},
    ),
    Question(
        "70B on 64 H100", llama(8192, 28672, 80, 64, 8, 128256, 8192),
        sw.Cluster("h100", nodes=8, devices_per_node=8), 256,
        "419.7 model TFLOP/s a GPU for a 70B GPT on 768 H100 (Megatron-Core: tp 8, pp 2, overlapped)",
        {"pp": 2, "dp": 4, "tp": 8, "microbatch": 1, "shard": 1, "recompute": "none"},
    ),
    Question(
        "175B on 1,024 A100", gpt_175b, sw.Cluster("a100-80gb", nodes=128, devices_per_node=8), 1536,
        "51.4% MFU on 64 A100 (arXiv 2205.05198: tp 8, pp 8, sequence parallel, selective recompute)",
        {"pp": 8, "dp": 16, "tp": 8, "microbatch": 1, "virtual_stages": 3, "schedule": "interleaved-1f1b",
         "recompute": "selective", "sequence_parallel": True},
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


HEAD = ("# Five questions", "", "    python benchmarks/five_questions.py", "")


def _tokens(sequence: int) -> dict[str, Any]:
    import torch

    tokens = torch.zeros(2, sequence, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    answers = _written(options.write) if options.write and options.write.exists() else {}
    for question in QUESTIONS:
        if options.only in question.name:
            answers[question.name] = _answer(question)
            print("\n".join(answers[question.name]), flush=True)
            if options.write:
                sections = [answers[each.name] for each in QUESTIONS if each.name in answers]
                options.write.write_text("\n".join([*HEAD, *(line for section in sections for line in section)]))
    return 0


def _written(path: Path) -> dict[str, list[str]]:
    """The answers in a file of results, by question: those that are asked again are exchanged."""
    _, *sections = path.read_text().split("\n## ")
    return {section.partition(",")[0]: f"## {section}".split("\n") for section in sections}


def _answer(question: Question) -> list[str]:
    started = time.process_time()
    graph = sw.capture(*question.model())
    captured_s = time.process_time() - started
    plan = sw.plan(graph, question.cluster, batch=question.batch, precision="bf16")
    took_s = time.process_time() - started
    p = plan.predicted
    peak, whole = max(p.peak_memory_bytes) / 2**30, min(plan.provenance.device_memory_bytes) / 2**30
    exposed, runs = p.data_parallel_s + p.passes_wait_s, plan.costs.execution
    lines = [
        f"## {question.name}, batch {question.batch}",
        "",
        f"- plan: {plan.summary()}",
        f"- step {p.step_time_s:.3f} s ± {p.error.step_time:.0%} ({p.error.basis}); {_rates(plan)}",
        f"- over the data axis {exposed / p.step_time_s:.1%} of the step exposed, "
        f"{p.data_parallel_hidden_s / p.step_time_s:.1%} hidden; tensor collectives "
        f"{p.tensor_collective_s / p.step_time_s:.1%}, idle {p.bubble_fraction:.1%}",
        f"- peak memory {peak:.1f} GiB of {whole:.1f}, of which {plan.provenance.headroom:.1%} are left free, by which "
        f"predictions were ever too low",
        f"- counted for: {plan.provenance.cluster}; bf16 with {plan.decision.optimizer}, states in fp32; kernels "
        f"{runs.kernels}, as {runs.system} runs them; FLOPs of matrix products, attention whole, without what is "
        f"computed again",
        f"- published for the like: {question.published}",
        *_published_way(question, graph, plan),
        f"- captured in {captured_s:.0f} s, planned in {took_s - captured_s:.0f} s of processor time",
    ]
    return [*lines, *(f"- not chosen: {a.summary}: {a.reason}" for a in plan.alternatives), ""]


def _rates(plan: sw.Plan) -> str:
    rate, parts = plan.throughput, []
    if rate.tokens_per_s:
        parts.append(f"{rate.tokens_per_s / plan.mesh.size:,.0f} tokens/s a device")
    else:
        parts.append(f"{rate.samples_per_s:,.1f} samples/s")
    parts += [f"{rate.flops_per_s / 1e12:.0f} TFLOP/s a device"] if rate.flops_per_s else []
    parts += [f"MFU {rate.mfu:.1%}"] if rate.mfu else []
    return ", ".join(parts)


def _published_way(question: Question, graph: sw.Graph, plan: sw.Plan) -> list[str]:
    """What the published run's degrees and policy would give here."""
    if not question.way:
        return []
    try:
        other = sw.plan(graph, question.cluster, batch=question.batch, precision="bf16", **question.way)
    except sw.ShardwrightError as error:
        return [f"- the published way, pinned here: {error}"]
    slower = other.predicted.step_time_s / plan.predicted.step_time_s - 1
    return [f"- the published way, pinned here: {other.summary()}: {_rates(other)}, a step {slower:+.1%}"]


if __name__ == "__main__":
    sys.exit(main())
