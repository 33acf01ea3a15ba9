"""The causal transformer of `sliced_steps.py` and `sliced_memory.py`, in PyTorch and in Flax, with its loss; and small
models of Hugging Face."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model: tokens of a sequence, width, heads, layers and words."""

    tokens: int = 1024
    width: int = 384
    heads: int = 6
    layers: int = 8
    words: int = 1024


def torch_model(sizes: Sizes) -> Any:
    """The model of (tokens, wanted), whose output is the loss."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = sizes.width
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, s, w = x.shape
            q, k, v = self.qkv(self.first(x)).view(b, s, 3, sizes.heads, w // sizes.heads).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).reshape(b, s, w))
            return x + self.down(F.gelu(self.up(self.second(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.Embedding(sizes.words, sizes.width)
            self.layers = nn.ModuleList(Layer() for _ in range(sizes.layers))
            self.norm, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.words)

        def forward(self, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), wanted.flatten())

    return Model()


def hugging_face(kind: str, sizes: Sizes) -> Any:
    """A model of Transformers of (input_ids, labels): "gpt2", "llama", or "llama, one key head", whose queries share
    keys and values."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(
            n_layer=sizes.layers, n_embd=sizes.width, n_head=sizes.heads, vocab_size=sizes.words,
            n_positions=sizes.tokens, bos_token_id=0, eos_token_id=0, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return GPT2LMHeadModel(config)
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=sizes.layers,
            hidden_size=sizes.width,
            num_attention_heads=sizes.heads,
            num_key_value_heads=1 if kind.endswith("one key head") else sizes.heads,
            intermediate_size=2 * sizes.width,
            vocab_size=sizes.words,
            max_position_embeddings=sizes.tokens,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )


def jax_model(sizes: Sizes) -> tuple[Any, Any]:
    """A function that makes the same model, and the loss of (model, batch)."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            width = sizes.width
            self.first, self.second = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
            self.qkv, self.out = nnx.Linear(width, 3 * width, rngs=rngs), nnx.Linear(width, width, rngs=rngs)
            self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            b, s, w = x.shape
            q, k, v = (
                each.reshape(b, s, sizes.heads, w // sizes.heads)
                for each in jnp.split(self.qkv(self.first(x)), 3, axis=-1)
            )
            x = x + self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, s, w))
            return x + self.down(jax.nn.gelu(self.up(self.second(x))))

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embedding = nnx.Embed(sizes.words, sizes.width, rngs=rngs)
            self.layers = nnx.List([Layer(rngs) for _ in range(sizes.layers)])
            self.norm, self.head = (
                nnx.LayerNorm(sizes.width, rngs=rngs),
                nnx.Linear(sizes.width, sizes.words, rngs=rngs),
            )

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.head(self.norm(x))

    def loss(model: Model, batch: dict[str, jax.Array]) -> jax.Array:
        scores = model(batch["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch["wanted"]).mean()

    return lambda: Model(nnx.Rngs(0)), loss
