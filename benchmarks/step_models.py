"""The PyTorch models of `step_time.py`, and networks and samples that other benchmarks share.

Sizes as in `memory.py`, whose models these are too: 4 layers of 256, vocabulary 4096, batches of 4 × 128.
"""

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import memory
import torch
from memory import BATCH, HEADS, LAYERS, SEQUENCE, VOCABULARY, WIDTH
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

CLASSES = 1000


class Mixer(nn.Module):
    """An MLP-mixer (Tolstikhin et al. 2021): products along patches and along channels take turns."""

    def __init__(self, depth: int, patches: int, width: int, classes: int) -> None:
        super().__init__()
        self.patch = nn.Linear(3 * 16 * 16, width)
        self.blocks = nn.ModuleList(MixerBlock(patches, width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, patches: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.patch(patches)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x).mean(1)), labels)


class MixerBlock(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.along_patches = nn.Sequential(nn.Linear(patches, width // 2), nn.GELU(), nn.Linear(width // 2, patches))
        self.along_channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.along_patches(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.along_channels(self.norms[1](x))


class Lstm(nn.Module):
    """Stacks of layers, one after the other: a stack is one module, which no cut of a pipeline divides."""

    def __init__(self, stacks: int, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.stacks = nn.ModuleList(nn.LSTM(width, width, layers, batch_first=True) for _ in range(stacks))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for stack in self.stacks:
            x, _ = stack(x)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def llama(layers: int, width: int, heads: int, vocabulary: int) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=width, intermediate_size=11 * width // 4, num_hidden_layers=layers, num_attention_heads=heads,
            vocab_size=vocabulary, max_position_embeddings=2048, use_cache=False,
        )
    )  # fmt: skip


def vit(layers: int, width: int, heads: int, side: int, patch: int) -> nn.Module:
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * width,
            image_size=side, patch_size=patch, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            num_labels=CLASSES,
        )
    )  # fmt: skip


def tokens(samples: int, length: int, vocabulary: int, *, labels: bool = True) -> dict[str, torch.Tensor]:
    drawn = torch.randint(0, vocabulary, (samples, length))
    return {"input_ids": drawn, "labels": drawn} if labels else {"tokens": drawn}


def images(samples: int, *shape: int, name: str = "pixel_values") -> dict[str, torch.Tensor]:
    return {name: torch.randn(samples, *shape), "labels": torch.randint(0, CLASSES, (samples,))}


MORE: dict[str, tuple[Callable[[int], nn.Module], Callable[[], dict[str, torch.Tensor]]]] = {
    "llama": (lambda width: llama(LAYERS, width, HEADS, VOCABULARY), lambda: tokens(BATCH, SEQUENCE, VOCABULARY)),
    "vit": (lambda width: vit(LAYERS, width, HEADS, 64, 8), lambda: images(8, 3, 64, 64)),
    "mixer": (lambda width: Mixer(LAYERS, 64, width, CLASSES), lambda: images(8, 64, 768, name="patches")),
    "lstm": (lambda width: Lstm(LAYERS, 1, width, VOCABULARY), lambda: tokens(16, 32, VOCABULARY, labels=False)),
}
"""Those that `memory.py` does not have: the model of a width, and a microbatch."""


def made(name: str, width: int = WIDTH) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model, and one microbatch of it."""
    torch.manual_seed(0)
    if name in MORE:
        build, sample = MORE[name]
        return build(width), sample()
    return memory.BUILDERS[name](width), memory.batch_of(name)
