"""Hugging Face's models in the form of SageMaker's distributed modules, and their state dicts."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.compat import nn as smp_nn
from shardwright.compat.nn.huggingface.forms import FAMILIES
from shardwright.core.errors import MissingCapabilityError, ShardwrightError
from tests.comparison import Comparison
from tests.torch.launch import ROOT
from tests.torch.workers import nn_models


def named(family: str) -> Any:
    """The module of a family, as scripts import it, and the end of its functions' names."""
    end = family.replace("_", "")
    return importlib.import_module(f"shardwright.compat.nn.huggingface.{end}"), end


OTHER_CONFIGURATIONS: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True}),
    ("gpt2", {"scale_attn_weights": False, "activation_function": "relu", "n_inner": 24}),
    ("bert", {"hidden_act": "gelu_new", "type_vocab_size": 3}),
    ("gptj", {"rotary_dim": 8, "tie_word_embeddings": True}),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    ("gpt_neox", {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 1.0}}),
    ("gpt_neo", {"attention_types": [[["local"], 2]], "window_size": 3}),
]


@pytest.mark.parametrize(
    ("family", "more"), [*((family, {}) for family in nn_models.FAMILIES), *OTHER_CONFIGURATIONS], ids=str
)
def test_the_distributed_form_gives_what_the_original_gives(family: str, more: dict[str, Any]) -> None:
    original = nn_models.build(family, **more).eval()
    form = smp_nn.huggingface.distributed_form(original)
    assert any(isinstance(module, smp_nn.DistributedTransformer) for module in form.modules())
    batch = nn_models.batch(0)
    wanted, found = original(**batch), form(**batch)
    assert float(wanted.logits.detach().std()) > 0.1, "an output of no size would be near any other"
    same = Comparison(family)
    same.values(found.logits, wanted.logits, relative=1e-5, absolute=1e-5, what="logits")
    same.losses([found.loss.item()], [wanted.loss.item()])
    places = {"input_ids": batch["input_ids"], "position_ids": torch.arange(4)[:, None] + torch.arange(11, -1, -1)}
    moved = original(**places).logits
    same.values(form(**places).logits, moved, relative=1e-5, absolute=1e-5, what="logits of other positions")
    same.require()
    assert float((moved - original(input_ids=batch["input_ids"]).logits).detach().abs().max()) > 0.01


def test_the_distributed_form_drops_as_the_original_does() -> None:
    gpt2 = nn_models.build("gpt2", embd_pdrop=0.3, resid_pdrop=0.2, attn_pdrop=0.1).train()
    form: Any = smp_nn.huggingface.distributed_form(gpt2)
    assert form.training
    assert not smp_nn.huggingface.distributed_form(gpt2.eval()).training
    layer = form.transformer.seq_layers[1]
    assert (form.dropout.p, layer.attention.dropout2.p, layer.output.dropout.p) == (0.3, 0.2, 0.2)
    assert layer.attention.arguments.attention_dropout_prob == 0.1
    for one in (form.dropout, layer.attention.dropout2, layer.output.dropout):
        one.p = 0.0
    ids = nn_models.batch(0)["input_ids"]
    assert not torch.equal(form(ids).logits, form(ids).logits), "the attention drops"
    form.eval()
    assert torch.equal(form(ids).logits, form(ids).logits)
    bert: Any = smp_nn.huggingface.distributed_form(
        nn_models.build("bert", hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.1)
    )
    given = bert.bert.encoder.seq_layers[0].arguments
    assert (given.hidden_dropout_prob, given.attention_dropout_prob) == (0.2, 0.1)


@pytest.mark.parametrize("family", nn_models.FAMILIES)
def test_state_dicts_are_translated_bit_for_bit(family: str) -> None:
    original = nn_models.build(family)
    module, end = named(family)
    back = getattr(module, f"translate_state_dict_to_hf_{end}")
    there = getattr(module, f"translate_hf_state_dict_to_smdistributed_{end}")
    state = original.state_dict()
    own = there(state)
    form = smp_nn.huggingface.distributed_form(nn_models.build(family))
    form.load_state_dict(own)  # all of its names, and no other
    for given in (back(own), back(own, 1024), back(form.state_dict(), max_seq_len=1024)):
        assert given.keys() == state.keys()
        assert all(torch.equal(given[name], state[name]) for name in state)
        assert all(tensor.is_contiguous() for tensor in given.values())
    assert own.keys() == form.state_dict().keys() != state.keys()
    assert all(tensor.is_contiguous() for tensor in own.values())
    assert all(torch.equal(own[name], tensor) for name, tensor in there(back(own)).items())
    for translate, kept in ((back, state), (there, own)):  # which has those names already
        assert {name: id(tensor) for name, tensor in translate(kept).items()} == {k: id(v) for k, v in kept.items()}


def test_names_that_scripts_have() -> None:
    gpt2, roberta, gptj = (named(family)[0] for family in ("gpt2", "roberta", "gptj"))
    assert gpt2.translate_hf_state_dict_to_smdistributed is gpt2.translate_hf_state_dict_to_smdistributed_gpt2
    assert roberta.translate_state_dict_to_smdistributed is roberta.translate_hf_state_dict_to_smdistributed_roberta
    assert gptj.translate_hf_gptj_state_dict_to_smdistributed_gptj is gptj.translate_hf_state_dict_to_smdistributed_gptj
    assert gptj.translate_hf_gptj_state_dict_to_smdistributed is gptj.translate_hf_state_dict_to_smdistributed_gptj


def test_scripts_import_the_modules_by_sagemakers_names() -> None:
    script = """
import shardwright.compat
shardwright.compat.install()
from smdistributed.modelparallel.torch.nn import DistributedLinear, FusedLayerNorm
from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import translate_state_dict_to_hf_gpt2
import smdistributed.modelparallel.torch.nn.huggingface.gptneox as gptneox
import smdistributed.modelparallel.torch as smp
assert smp.nn.DistributedLinear is DistributedLinear
assert smp.nn.huggingface.gpt2.translate_state_dict_to_hf_gpt2 is translate_state_dict_to_hf_gpt2
assert smp.nn.huggingface.gptneox is gptneox
import smdistributed.modelparallel.torch.nn.transformer as transformer
assert transformer.DistributedTransformer is smp.nn.DistributedTransformer, "no module is loaded twice"
assert gptneox.__name__ == "shardwright.compat.nn.huggingface.gptneox"
import shardwright.compat.nn as own
assert own is smp.nn and own.DistributedLinear is DistributedLinear
try:
    from smdistributed.modelparallel.torch.nn import DistributedLiner
except ImportError:
    print("refused")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=180, cwd=ROOT,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr[-3000:]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"transformer.h.0.attn.c_attm.weight": torch.zeros(1)}, r"c_attm\.weight is no name of GPT-2's state dict"),
        ({"score.weight": torch.zeros(1)}, r"score\.weight is no name of GPT-2's state dict: known: transformer\.wte"),
    ],
)
def test_names_that_a_family_does_not_have_are_refused(change: dict[str, torch.Tensor], said: str) -> None:
    gpt2 = smp_nn.huggingface.gpt2
    state = nn_models.build("gpt2").state_dict()
    own = gpt2.translate_hf_state_dict_to_smdistributed_gpt2(state)
    for translate in (gpt2.translate_hf_state_dict_to_smdistributed_gpt2, gpt2.translate_state_dict_to_hf_gpt2):
        with pytest.raises(ShardwrightError, match=said):
            translate(state | change)
    with pytest.raises(ShardwrightError, match="is no name of GPT-2's state dict"):
        gpt2.translate_state_dict_to_hf_gpt2(own | {"transformer.seq_layers.0.attention.kee.weight": torch.zeros(1)})
    own.pop("transformer.seq_layers.1.attention.key.bias")
    with pytest.raises(ShardwrightError, match=r"lacks transformer\.seq_layers\.1\.attention\.key\.bias beside it"):
        gpt2.translate_state_dict_to_hf_gpt2(own)


def test_masks_of_older_versions_are_no_weights() -> None:
    gpt2 = smp_nn.huggingface.gpt2
    state = nn_models.build("gpt2").state_dict()
    masks = {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4), "transformer.h.0.attn.masked_bias": torch.tensor(-1)}
    translate = gpt2.translate_hf_state_dict_to_smdistributed_gpt2
    assert translate(state | masks).keys() == translate(state).keys()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: nn_models.build("gpt2", add_cross_attention=True), "add_cross_attention=True: the distributed form"),
        (lambda: nn_models.build("gpt2", reorder_and_upcast_attn=True), "reorder_and_upcast_attn=True"),
        (lambda: nn_models.build("gpt2", activation_function="silu"), "activation 'silu': the distributed form has"),
        (lambda: nn_models.build("bert", is_decoder=True), "is_decoder=True"),
        (lambda: nn_models.build("gpt2").transformer, "no distributed form of GPT2Model, but of GPT2LMHeadModel"),
        (
            lambda: nn_models.build(
                "gpt_neox", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
            ),
            "rope_type='linear': the distributed form has the default one",
        ),
        (lambda: nn.Linear(2, 2), "no distributed form of Linear"),
    ],
    ids=["cross", "upcast", "silu", "decoder", "body", "rope", "other"],
)
def test_models_without_a_distributed_form_are_refused(make: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(MissingCapabilityError, match=said) as refused:
        smp_nn.huggingface.distributed_form(make())
    assert "Take the original model, which is divided as it is" in str(refused.value)


def test_every_family_is_shown_to_be_the_same() -> None:
    assert set(FAMILIES) == set(nn_models.FAMILIES)
