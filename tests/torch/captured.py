"""Small models to capture, and what graphs of them are asked."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shardwright.core.model.graph import Graph, Op

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

VOCABULARY, LENGTH, LAYERS = 101, 10, 2


def gpt2(attention: str) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=LAYERS, n_embd=48, n_head=4, vocab_size=VOCABULARY, n_positions=32, attn_implementation=attention,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def llama(attention: str) -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=LAYERS, hidden_size=48, num_attention_heads=6, num_key_value_heads=2,
            intermediate_size=80, vocab_size=VOCABULARY, attn_implementation=attention,
        )
    )  # fmt: skip


def bert(attention: str) -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            num_hidden_layers=LAYERS, hidden_size=48, num_attention_heads=4, intermediate_size=80,
            vocab_size=VOCABULARY, attn_implementation=attention,
        )
    )  # fmt: skip


def t5(attention: str) -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            num_layers=LAYERS, d_model=48, d_kv=12, num_heads=4, d_ff=80, vocab_size=VOCABULARY,
            attn_implementation=attention, decoder_start_token_id=0,
        )
    )  # fmt: skip


MODELS = {"gpt2": gpt2, "llama": llama, "bert": bert, "t5": t5}
BLOCKS = {
    "gpt2": ["transformer.h.{}"],
    "llama": ["model.layers.{}"],
    "bert": ["bert.encoder.layer.{}"],
    "t5": ["encoder.block.{}", "decoder.block.{}"],
}


def tokens(batch: int, *, mask: bool = False, device: str = "cpu") -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (batch, LENGTH), device=device)
    sample = {"input_ids": ids, "labels": ids.clone()}
    if mask:
        sample["attention_mask"] = torch.ones(batch, LENGTH, dtype=torch.long, device=device)
    return sample


def matmul_flops(graph: Graph, batch: int) -> int:
    return sum(2 * math.prod(graph.label_sizes(op, batch).values()) for op in graph.ops if op.kind == "contraction")


def counted_flops(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*args, **kwargs)
    return counter.get_total_flops()


def kinds(graph: Graph, kind: str) -> list[Op]:
    return [op for op in graph.ops if op.kind == kind]


def mean_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().mean()
