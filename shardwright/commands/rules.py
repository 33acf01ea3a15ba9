"""`shardwright doctor --rules`: every op of the example models, its kind, and what has no rule."""

import json as json_format
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardwright.commands.output import PlainConsole
from shardwright.core.model.graph import Graph
from shardwright.core.rules.coverage import Coverage, coverage

FALLBACK_LIMIT = 0.01
"""The share of FLOPs and of bytes that may be on ops without a rule."""


def rules_command(json: bool = False) -> None:
    """Print which kind every op of the example models is, how many rules it has, and the share of work without a rule;
    exit with 1 when that is above 1%."""
    found: dict[str, Coverage] = {}
    missing: list[str] = []
    with Console(stderr=True).status("Capturing the example models …"):
        for framework, capture in (("torch", torch_graphs), ("jax", jax_graphs)):
            try:
                found[framework] = coverage(capture().values())
            except ImportError as error:
                missing.append(f"{framework}: {error}")
    if json:
        rows = {
            framework: {
                "ops": [asdict(op) for op in of.ops],
                "fallback_flops_share": of.fallback_flops_share,
                "fallback_bytes_share": of.fallback_bytes_share,
            }
            for framework, of in found.items()
        }
        typer.echo(json_format.dumps({**rows, "missing": missing}, indent=2))
    else:
        _show(found, missing, PlainConsole())
    if any(max(of.fallback_flops_share, of.fallback_bytes_share) > FALLBACK_LIMIT for of in found.values()):
        raise typer.Exit(1)


def torch_graphs() -> dict[str, Graph]:
    """The example models of PyTorch's side, by name. Raises ImportError without torch or transformers."""
    import torch
    import transformers as hf

    import shardwright as sw

    small: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    wide = small | {"intermediate_size": 128}
    heads = wide | {"num_key_value_heads": 2}
    tokens = torch.empty(2, 32, dtype=torch.long, device="meta")
    text = {"input_ids": tokens, "labels": tokens}
    images = {"pixel_values": torch.empty(2, 3, 32, 32, device="meta"), "labels": tokens[:, 0]}
    t5: dict[str, Any] = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16}
    t5["decoder_start_token_id"] = 0
    models: dict[str, tuple[Callable[[], torch.nn.Module], dict[str, torch.Tensor]]] = {
        "gpt2": (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=64, n_layer=2, n_head=4)), text),
        "bert": (lambda: hf.BertForMaskedLM(hf.BertConfig(**wide)), text),
        "t5": (lambda: hf.T5ForConditionalGeneration(hf.T5Config(**t5)), text),
        "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**heads)), text),
        "mixtral": (lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**heads, num_local_experts=4)), text),
        "vit": (lambda: hf.ViTForImageClassification(hf.ViTConfig(**wide, image_size=32, patch_size=8)), images),
        "resnet": (
            lambda: hf.ResNetForImageClassification(
                hf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1])
            ),
            images,
        ),
    }
    found = {}
    for name, (build, sample) in models.items():
        with torch.device("meta"):
            model = build()
        found[name] = sw.capture(model, sample)
    return found


def jax_graphs() -> dict[str, Graph]:
    """The example models of JAX's side, by name. Raises ImportError without JAX or Flax."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import shardwright as sw

    tokens = jax.ShapeDtypeStruct((2, 32), jnp.int32)

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first, self.second = nnx.LayerNorm(64, rngs=rngs), nnx.RMSNorm(64, rngs=rngs)
            self.attend = nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(64, 128, rngs=rngs), nnx.Linear(128, 64, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = x + self.attend(self.first(x))
            return x + self.down(jax.nn.gelu(self.up(self.second(x))))

    class Decoder(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.table = nnx.Embed(256, 64, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])

        def __call__(self, ids: jax.Array) -> jax.Array:
            x = self.table(ids)
            for block in self.blocks:
                x = block(x)
            return self.table.attend(x)

    class Images(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.conv, self.norm = nnx.Conv(3, 16, (3, 3), rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
            self.out = nnx.Linear(16, 10, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = nnx.max_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), (2, 2))
            return self.out(x.mean((1, 2)))

    def loss(model: nnx.Module, batch: Any) -> jax.Array:
        scores = jax.nn.log_softmax(model(batch["x"]))
        return -jnp.take_along_axis(scores, batch["y"][..., None], -1).mean()

    pictures = {"x": jax.ShapeDtypeStruct((2, 16, 16, 3), jnp.float32), "y": jax.ShapeDtypeStruct((2,), jnp.int32)}
    return {
        "decoder": sw.capture(nnx.eval_shape(lambda: Decoder(nnx.Rngs(0))), {"x": tokens, "y": tokens}, loss),
        "images": sw.capture(nnx.eval_shape(lambda: Images(nnx.Rngs(0))), pictures, loss),
    }


def _show(found: dict[str, Coverage], missing: list[str], console: Console) -> None:
    for framework, of in found.items():
        title = f"Rules of {framework}'s ops in the example models"
        table = Table("op", "kind", "times", "rules", "FLOPs", "bytes", title=title, title_justify="left")
        for op in of.ops:
            mark = " [yellow](whole only)[/]" if op.is_fallback else ""
            row = (str(op.count), str(op.rules), f"{op.flops:.3g}" if op.flops else "", f"{op.moved_bytes:.3g}")
            table.add_row(escape(op.name), op.kind + mark, *row)
        console.print(table)
        flops, moved = of.fallback_flops_share, of.fallback_bytes_share
        console.print(f"Without a rule: {flops:.2%} of FLOPs, {moved:.2%} of bytes (at most 1% each)", highlight=False)
    for reason in missing:
        console.print(f"Not looked at: {escape(reason)}")
