"""One small GPT-2 twice, Hugging Face's in PyTorch and `gpt2_flax` in JAX, and the text that both read.

Both begin with the same weights and see the same batches, so every run of the demo can be held against every other.
Imports neither framework until one is asked for.
"""

from pathlib import Path
from typing import Any

import numpy as np

LAYERS, HEADS, WIDTH, LENGTH = 4, 4, 128, 64
VOCABULARY = 256  # bytes
BATCH, MICROBATCH = 16, 2
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.01
EPSILON = 1e-6
"""AdamW's. The gradient of a key bias is nothing but rounding, and the usual 1e-8 would let AdamW magnify it to whole
steps: then even two unsplit runs that add in another order drift apart by more than these runs do."""


def batches(steps: int, seed: int = 0) -> np.ndarray:
    """Token ids [steps, BATCH, LENGTH]: pieces of the English text that explains Python, as bytes."""
    from pydoc_data.topics import topics

    text = np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), dtype=np.uint8)
    starts = np.random.default_rng(seed).integers(0, len(text) - LENGTH, size=(steps, BATCH))
    return text[starts[..., None] + np.arange(LENGTH)].astype(np.int32)


def microbatches(batch: np.ndarray) -> list[np.ndarray]:
    """A batch as the reference run takes it: one microbatch after the other."""
    return [batch[start : start + MICROBATCH] for start in range(0, BATCH, MICROBATCH)]


def torch_model() -> Any:
    """Hugging Face's GPT-2, small, without dropout, with weights from a fixed seed."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def torch_batch(tokens: np.ndarray) -> dict[str, Any]:
    """What the model is called with; it makes its own loss from the labels."""
    import torch

    ids = torch.from_numpy(tokens.astype(np.int64))
    return {"input_ids": ids, "labels": ids}


def flax_config() -> Any:
    import gpt2_flax

    return gpt2_flax.Config(n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, vocab_size=VOCABULARY, n_positions=LENGTH)


def save_weights(model: Any, path: Path) -> None:
    """Write a torch model's weights as plain arrays."""
    np.savez(path, **{name: tensor.numpy() for name, tensor in model.state_dict().items()})


def flax_model(weights: Path) -> Any:
    """The twin, with the weights that `save_weights` wrote."""
    import gpt2_flax

    with np.load(weights, allow_pickle=False) as arrays:
        return gpt2_flax.from_torch(flax_config(), arrays)
