"""Tiny Hugging Face models and batches for them, the same in every process."""

from typing import Any

import torch
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils import logging

logging.set_verbosity_error()

VOCABULARY = 64


def build(name: str, dropout: float = 0.0, layers: int = 4) -> nn.Module:
    """A model with the same weights in every process."""
    torch.manual_seed(3)
    if name == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                n_layer=layers, n_embd=32, n_head=2, vocab_size=VOCABULARY, n_positions=32, bos_token_id=0,
                eos_token_id=0, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
            )
        )  # fmt: skip
    if name == "bert":
        return BertForMaskedLM(
            BertConfig(
                num_hidden_layers=layers, hidden_size=32, num_attention_heads=2, intermediate_size=64,
                vocab_size=VOCABULARY, max_position_embeddings=32, hidden_dropout_prob=dropout,
                attention_probs_dropout_prob=dropout,
            )
        )  # fmt: skip
    if name == "t5":
        return T5ForConditionalGeneration(
            T5Config(
                num_layers=layers // 2, d_model=32, num_heads=2, d_ff=64, d_kv=16, vocab_size=VOCABULARY,
                dropout_rate=dropout, decoder_start_token_id=0, pad_token_id=0, tie_word_embeddings=True,
            )
        )  # fmt: skip
    if name == "llama":
        return LlamaForCausalLM(
            LlamaConfig(
                num_hidden_layers=layers, hidden_size=32, num_attention_heads=2, num_key_value_heads=1,
                intermediate_size=64, vocab_size=VOCABULARY, max_position_embeddings=32, bos_token_id=0,
                eos_token_id=0, attention_dropout=dropout,
            )
        )  # fmt: skip
    if name == "albert":  # one block, called once for every layer
        return AlbertForMaskedLM(
            AlbertConfig(
                vocab_size=VOCABULARY, embedding_size=16, hidden_size=32, num_hidden_layers=layers,
                num_attention_heads=2, intermediate_size=64, max_position_embeddings=32, hidden_dropout_prob=dropout,
                attention_probs_dropout_prob=dropout,
            )
        )  # fmt: skip
    if name == "mixtral":  # routing that depends on values, inside units
        return MixtralForCausalLM(
            MixtralConfig(
                vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=layers, num_attention_heads=2,
                num_key_value_heads=2, intermediate_size=32, num_local_experts=4, max_position_embeddings=32,
                bos_token_id=0, eos_token_id=0, pad_token_id=0, attention_dropout=dropout,
            )
        )  # fmt: skip
    raise ValueError(name)


def batch(name: str, step: int, samples: int = 8, length: int = 12) -> dict[str, Any]:
    """The whole batch of a step: for every replica and microbatch, in order."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(1, VOCABULARY, (samples, length), generator=generator)
    found = {"input_ids": ids, "labels": ids.clone()}
    if name in ("bert", "t5"):
        mask = torch.ones_like(ids)
        mask[:, -2:] = torch.randint(0, 2, (samples, 2), generator=generator)
        found["attention_mask"] = mask
    return found
