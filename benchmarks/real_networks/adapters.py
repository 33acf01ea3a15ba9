"""Adapters of `peft` in models of `transformers`."""

from typing import Any

import torch

from benchmarks.real_networks.registry import LENGTH, VOCABULARY, Made, built_by, tokens


def gpt2() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(n_layer=3, n_head=2, n_embd=32, vocab_size=VOCABULARY, n_positions=32, use_cache=False)
    )


def llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2,
            vocab_size=VOCABULARY, use_cache=False,
        )
    )  # fmt: skip


def bert() -> torch.nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
                   vocab_size=VOCABULARY)
    )  # fmt: skip


def adapted(model: torch.nn.Module, config: Any) -> Made:
    from peft import get_peft_model

    ids = tokens(LENGTH, VOCABULARY)
    model = get_peft_model(model, config)
    with torch.no_grad():  # some adapters begin as zeros, of which many gradients are zero
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model, {"input_ids": ids, "labels": ids}, lambda model, batch: model(**batch).loss


@built_by("peft")
def lora_gpt2() -> Made:
    from peft import LoraConfig

    return adapted(gpt2(), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn", "c_proj"]))


@built_by("peft")
def lora_llama() -> Made:
    from peft import LoraConfig

    return adapted(llama(), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", lora_dropout=0.1))


@built_by("peft")
def lora_bert() -> Made:
    from peft import LoraConfig

    return adapted(bert(), LoraConfig(r=4, target_modules=["query", "value"], modules_to_save=["cls"]))


@built_by("peft")
def dora_llama() -> Made:
    from peft import LoraConfig

    return adapted(llama(), LoraConfig(task_type="CAUSAL_LM", r=4, use_dora=True, target_modules=["q_proj", "v_proj"]))


@built_by("peft")
def ia3_llama() -> Made:
    from peft import IA3Config

    return adapted(llama(), IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"],
                                      feedforward_modules=["down_proj"]))  # fmt: skip


@built_by("peft")
def prompt_tuning_gpt2() -> Made:
    from peft import PromptTuningConfig

    return adapted(gpt2(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


@built_by("peft")
def prefix_tuning_gpt2() -> Made:
    from peft import PrefixTuningConfig

    model = gpt2()
    model.config.use_cache = True
    return adapted(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


@built_by("peft")
def vera_llama() -> Made:
    from peft import VeraConfig

    return adapted(llama(), VeraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]))


@built_by("peft")
def loha_llama() -> Made:
    from peft import LoHaConfig

    return adapted(llama(), LoHaConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]))


@built_by("peft")
def fourier_llama() -> Made:
    from peft import FourierFTConfig

    return adapted(llama(), FourierFTConfig(task_type="CAUSAL_LM", n_frequency=20, target_modules=["q_proj", "v_proj"]))
