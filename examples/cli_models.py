"""Models for the command line, each a function that returns (model, sample) or (model, sample, loss).

    shardwright plan examples/cli_models.py:gpt2_xl --cluster h100 --nodes 64 --devices-per-node 8 --batch 512

None but `gpt2_tiny` takes memory for its weights: torch's are on the meta device, Flax's are shapes. A framework is
imported by the functions that use it.
"""

from typing import Any


def gpt2() -> tuple[Any, Any]:
    """Hugging Face's GPT-2 small (124 million parameters)."""
    return _gpt2()


def gpt2_xl() -> tuple[Any, Any]:
    """Hugging Face's GPT-2 XL (1.6 billion parameters)."""
    return _gpt2(n_layer=48, n_embd=1600, n_head=25)


def llama_70b() -> tuple[Any, Any]:
    """Hugging Face's Llama with the sizes of Llama 2 70B: 80 layers, hidden 8192, 8 key-value heads."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=4096,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config), _tokens(4096)


def bert() -> tuple[Any, Any]:
    """Hugging Face's BERT base with its masked-token loss."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    with torch.device("meta"):
        return BertForMaskedLM(BertConfig()), _tokens(512)


def t5() -> tuple[Any, Any]:
    """Hugging Face's T5 small, an encoder and a decoder."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    with torch.device("meta"):
        return T5ForConditionalGeneration(T5Config(decoder_start_token_id=0)), _tokens(512)


def gpt2_flax() -> tuple[Any, Any, Any]:
    """The twin of `gpt2` in Flax NNX."""
    return _gpt2_flax()


def gpt2_xl_flax() -> tuple[Any, Any, Any]:
    """The twin of `gpt2_xl` in Flax NNX."""
    return _gpt2_flax(n_layer=48, n_embd=1600, n_head=25)


def gpt2_tiny() -> tuple[Any, Any]:
    """A GPT-2 with weights, for what runs it: `shardwright profile --model`."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = torch.zeros(2, 64, dtype=torch.long)
    sizes = {"n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 256, "n_positions": 64}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **ends)), {"input_ids": tokens, "labels": tokens}


def _gpt2(**sizes: int) -> tuple[Any, Any]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # as its twin, whose default is none
    with torch.device("meta"):
        return GPT2LMHeadModel(config), _tokens(1024)


def _tokens(length: int) -> dict[str, Any]:
    """Two samples; their number does not matter, the plan's batch does."""
    import torch

    tokens = torch.zeros(2, length, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def _gpt2_flax(**sizes: int) -> tuple[Any, Any, Any]:
    import gpt2_flax as twin  # beside this file
    import jax
    import jax.numpy as jnp
    from flax import nnx

    config = twin.Config(**sizes)
    model = nnx.eval_shape(lambda: twin.create(config))
    return model, {"input_ids": jax.ShapeDtypeStruct((2, config.n_positions), jnp.int32)}, twin.next_token_loss
