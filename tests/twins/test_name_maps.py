"""The maps of names by which checkpoints cross put twins' parameters beside each other as their plans do."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import shardwright as sw
from shardwright.backends.torch.state.plain_states import saved_state
from shardwright.backends.torch.state.saved_parts import read_whole
from shardwright.core.checkpoint.name_map import NameMap, families
from shardwright.core.checkpoint.translated import Translated
from shardwright.core.errors import PlanError
from tests.comparison import Comparison
from tests.twins import models
from tests.twins.capabilities import common
from tests.twins.crossing import BERT, NAMES

SIZES: dict[str, dict[str, int]] = {
    "gpt2": {"layers": 2, "width": 64, "heads": 4, "length": 16},
    "bert": {"layers": 2, "width": 64, "heads": 4, "length": 16},
    "ncf": {"users": 64, "items": 32, "width": 8},
}


@cache
def plans(name: str) -> tuple[sw.Plan, ...]:
    graphs = common(*models.TWINS[name](**SIZES[name]))
    pins: dict[str, Any] = {"pp": 1, "dp": 1, "tp": 1, "microbatch": 2, "recompute": "none", "precision": "fp32"}
    return tuple(sw.plan(graph, sw.Cluster("cpu", devices_per_node=1), batch=2, shard=0, **pins) for graph in graphs)


def unaligned(name: str, names: Any) -> list[str]:
    return [each.field for each in sw.compare(*plans(name), names).differences if each.part == "names"]


@pytest.mark.parametrize("name", NAMES)
def test_a_map_is_the_alignment_of_the_plans(name: str) -> None:
    assert unaligned(name, NAMES[name]) == []


def test_what_a_map_relates_otherwise_is_named() -> None:
    swapped = {
        torch.replace("{part}", "query"): jax.replace("{part}", "key")
        for torch, jax in BERT.items()
        if "{part}" in torch
    }
    found = unaligned("bert", swapped | BERT)
    assert len(found) == 4  # weight and bias, of two layers


def test_a_parameter_that_a_map_lacks_is_named() -> None:
    assert len(unaligned("ncf", {"{side}_{kind}.weight": "{side}_{kind}.embedding"})) == 10


def test_models_that_are_no_twins_are_refused() -> None:
    with pytest.raises(PlanError, match="the models differ"):
        sw.compare(plans("gpt2")[0], plans("ncf")[1], "gpt2")
    with pytest.raises(PlanError, match="in jax"):
        sw.compare(plans("gpt2")[0], plans("gpt2")[0], "gpt2")


FAMILIES: dict[str, Any] = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=16)),
    "bert": lambda: BertForMaskedLM(
        BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    ),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=48,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", families())
def test_a_family_has_every_weight_of_hugging_faces_model(family: str) -> None:
    """There and back, every parameter is what it was, but for what the map says that the twin has not."""
    state = saved_state(FAMILIES[family]().state_dict())
    names = NameMap.family(family)
    names = replace(names, sizes={"head": 4}) if family == "bert" else names
    away = Translated(state, names)
    back = Translated(away, names)
    assert set(state.names("model")) - set(back.names("model")) <= {
        name for name in state.names("model") if names.is_only(name, "torch")
    }
    comparison = Comparison()
    for name in back.names("model"):
        label = f"model/{name}"
        comparison.equal({name: read_whole(back, label)}, {name: state.tensors[label]})
    comparison.require()
    assert len(away.names("model")) >= 12
