"""Tiny Hugging Face models of the families whose distributed form is known, and their batches."""

from typing import Any

import torch
from torch import nn

VOCABULARY, LENGTH = 40, 12
FAMILIES = ("gpt2", "bert", "roberta", "gptj", "gpt_neo", "gpt_neox")


def build(family: str, **more: Any) -> nn.Module:
    """A model with random weights, biases and norms among them, without dropout: with what all families call alike."""
    import transformers as hf

    torch.manual_seed(0)
    gpt = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4, **_NONE_OF_GPT}
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    encoder = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48, "max_position_embeddings": 20, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    made: nn.Module
    if family == "gpt2":
        made = hf.GPT2LMHeadModel(hf.GPT2Config(**gpt | ids | more))
    elif family == "gptj":
        made = hf.GPTJForCausalLM(hf.GPTJConfig(**gpt | ids | {"rotary_dim": 4} | more))
    elif family == "gpt_neo":
        config = {
            "vocab_size": VOCABULARY, "max_position_embeddings": 16, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
            "attention_types": [[["global", "local"], 1]], "window_size": 4, "attention_dropout": 0.0,
            "embed_dropout": 0.0, "resid_dropout": 0.0,
        }  # fmt: skip
        made = hf.GPTNeoForCausalLM(hf.GPTNeoConfig(**config | ids | more))
    elif family == "gpt_neox":
        config = {
            "vocab_size": VOCABULARY, "max_position_embeddings": 16, "hidden_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4, "intermediate_size": 48, "rotary_pct": 0.5,
        }  # fmt: skip
        made = hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**config | ids | more))
    elif family == "bert":
        made = hf.BertForMaskedLM(hf.BertConfig(**encoder | more))
    else:
        made = hf.RobertaForMaskedLM(hf.RobertaConfig(**encoder | more))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


_NONE_OF_GPT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


def batch(step: int, samples: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCABULARY, (samples, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
