"""SageMaker's distributed modules, and Hugging Face's models in their form."""

import inspect
import math
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright.torch as sw
from shardwright.backends.torch.tensor_parallel.registry import replace_registered
from shardwright.compat import nn as smp_nn
from shardwright.core.errors import ShardwrightError
from tests.comparison import Comparison
from tests.torch.launch import Outcome, checks_in, on_ranks

SMALL: dict[str, Any] = {
    "num_attention_heads": 4, "attention_head_size": 4, "hidden_size": 16, "attention_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
}  # fmt: skip
LAYER = SMALL | {"intermediate_size": 24}
MODULES = {
    "DistributedLinear": {"in_features": 3, "out_features": 5},
    "DistributedEmbedding": {"num_embeddings": 5, "embedding_dim": 3},
    "DistributedAttentionLayer": SMALL,
    "DistributedTransformerOutputLayer": {"hidden_size": 16, "intermediate_size": 24},
    "DistributedTransformerLayer": LAYER,
    "DistributedTransformer": LAYER | {"num_layers": 2},
    "DistributedTransformerLMHead": LAYER | {"num_layers": 2, "vocab_size": 20, "num_positions": 8},
    "FlashAttentionLayer": {"attention_head_size": 4, "attention_dropout_prob": 0.0},
}


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)], ids=["pp2", "tp2"])
def run(request: pytest.FixtureRequest) -> Outcome:
    return on_ranks("sagemaker_nn.py", 2, *map(str, request.param), timeout_s=150)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("check", checks_in("sagemaker_nn.py"))
def test_a_split_model_trains_as_the_whole_one(run: Outcome, check: str) -> None:
    assert f"ok {check}" in run.text, run.text[-5000:]


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    Comparison("distributed module").values(found, wanted, relative=1e-5, absolute=1e-5).require()


class ReferenceAttention(nn.Module):
    """Attention as SageMaker's documentation defines it, in plain sums."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.dense = (nn.Linear(16, 16) for _ in range(4))
        self.layernorm = nn.LayerNorm(16, eps=1e-5)

    def forward(self, inputs: Any, *, is_causal: bool = False) -> torch.Tensor:
        hidden, *cross, mask = inputs
        source = cross[0] if cross else hidden
        query, key, value = (
            one.reshape(*one.shape[:2], 4, 4).permute(0, 2, 1, 3)
            for one in (self.query(hidden), self.key(source), self.value(source))
        )
        scores = query @ key.transpose(2, 3) / 2 + mask
        if is_causal:
            scores = scores + torch.full(scores.shape[2:], -math.inf).triu(1)
        context = (scores.softmax(-1) @ value).permute(0, 2, 1, 3).reshape(hidden.shape)
        result: torch.Tensor = self.layernorm(self.dense(context) + hidden)
        return result


def states(tokens: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, tokens, 16, generator=torch.Generator().manual_seed(seed))


def masked(tokens: int = 6) -> torch.Tensor:
    mask = torch.zeros(2, 1, 1, tokens)
    mask[0, ..., -2:] = -10000.0
    return mask


@pytest.mark.parametrize("causal_mask_size", [None, 8])
@pytest.mark.parametrize("cross_attention", [False, True])
def test_attention_is_that_of_the_documentation(causal_mask_size: int | None, cross_attention: bool) -> None:
    torch.manual_seed(0)
    reference = ReferenceAttention()
    layer = smp_nn.DistributedAttentionLayer(
        **SMALL, causal_mask_size=causal_mask_size, cross_attention=cross_attention
    )
    layer.load_state_dict(reference.state_dict())
    inputs = (states(), states(9, 1), masked(9)) if cross_attention else (states(), masked())
    found = layer(inputs)
    wanted = reference(inputs, is_causal=causal_mask_size is not None and not cross_attention)
    same(found, wanted)
    if not cross_attention and causal_mask_size is not None:
        with pytest.raises(ShardwrightError, match="9 tokens is longer than causal_mask_size=8"):
            layer((states(9), None))


def test_a_layer_is_attention_other_attention_and_output() -> None:
    layer = smp_nn.DistributedTransformerLayer(**LAYER, add_cross_attention=True, activation="relu")
    hidden, cross, mask, cross_mask = states(), states(9, 1), masked(), masked(9)
    found = layer((hidden, cross, mask, cross_mask))
    inner = layer.cross_attention((layer.attention((hidden, mask)), cross, cross_mask))
    output = layer.output
    wanted = output.layernorm(output.dense2(F.relu(output.dense1(inner))) + inner)
    same(found[0], wanted)
    assert found[1:] == (cross, mask, cross_mask)
    assert {name for name, _ in layer.named_children()} == {"attention", "cross_attention", "output"}


def test_both_layer_norms() -> None:
    output = smp_nn.DistributedTransformerOutputLayer(16, 24, hidden_dropout_prob=0.0, pre_layernorm=True)
    hidden = states()
    inner = output.dense2(F.gelu(output.dense1(output.pre_layernorm(hidden))))
    same(output(hidden), output.layernorm(inner + hidden))
    bare = smp_nn.DistributedTransformerOutputLayer(
        16, 24, hidden_dropout_prob=0.0, pre_layernorm=True, post_layernorm=False, add_residual=False
    )
    bare.load_state_dict({name: t for name, t in output.state_dict().items() if not name.startswith("layernorm")})
    same(bare(hidden), inner)


def test_linear_biases_are_those_of_the_distance() -> None:
    """Scores fall by 2 ** (-8h / heads) for each key between, whatever the number of heads."""
    layer = smp_nn.DistributedAttentionLayer(**SMALL | {"num_attention_heads": 3}, use_alibi=True, causal_mask_size=8)
    plain = smp_nn.DistributedAttentionLayer(**SMALL | {"num_attention_heads": 3}, causal_mask_size=8)
    plain.load_state_dict(layer.state_dict())
    places = torch.arange(6.0)
    distance = (places[:, None] - places).clamp(min=0)
    slopes = torch.tensor([2.0 ** (-8 * head / 3) for head in (1, 2, 3)])
    wanted = plain((states(), -slopes[:, None, None] * distance))
    same(layer((states(), None)), wanted)
    assert float((plain((states(), None)) - wanted).detach().abs().max()) > 1e-3


def test_flash_attention() -> None:
    qkv = torch.randn(2, 6, 3, 4, 8, generator=torch.Generator().manual_seed(0))
    query, key, value = (one.permute(0, 2, 1, 3) for one in qkv.unbind(2))
    later = torch.full((6, 6), -math.inf).triu(1)

    def wanted(factor: float, added: Any) -> torch.Tensor:
        return ((query @ key.transpose(2, 3)) * factor + added).softmax(-1) @ value

    layer = smp_nn.FlashAttentionLayer(0.0, attention_head_size=4, scale_attn_by_layer_idx=True, layer_idx=2)
    same(layer(qkv), wanted(1 / 6, 0.0))
    same(layer(qkv, causal=True), wanted(1 / 6, later))
    same(smp_nn.FlashAttentionLayer(0.0, scale=0.3)(qkv), wanted(0.3, 0.0))
    unscaled = smp_nn.FlashAttentionLayer(0.0, scale_attention_scores=False)
    same(unscaled(qkv), wanted(1.0, 0.0))
    biased = smp_nn.FlashAttentionLayer(0.0, 4, triton_flash_attention=True, use_alibi=True)
    mask = torch.randn(2, 1, 1, 6, generator=torch.Generator().manual_seed(1))
    same(biased(qkv, mask, causal=True), wanted(0.5, mask + later))
    with pytest.raises(ShardwrightError, match="attn_mask needs triton_flash_attention=True and use_alibi=True"):
        layer(qkv, mask)
    with pytest.raises(ShardwrightError, match=r"expected \[N, S, 3, heads, head size\]"):
        layer(query)


def test_a_language_model() -> None:
    def made(**more: Any) -> Any:
        torch.manual_seed(0)
        return smp_nn.DistributedTransformerLMHead(**MODULES["DistributedTransformerLMHead"] | more)

    ids = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    model = made(num_token_types=2)
    assert model.lm_head.weight is model.word_embedding.weight
    assert not hasattr(model, "layernorm")
    hidden = model.word_embedding(ids) + model.position_embedding.weight[:5]
    plain = (ids, None, None, None, None)
    same(model(plain), model.lm_head(model.transformer((hidden, None))[0]))
    types = model.transformer((hidden + model.token_type_embedding.weight[1], None))[0]
    same(model((ids, None, torch.ones_like(ids), None, None)), model.lm_head(types))
    hidden_of = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]])  # 1: not seen
    cut = model((ids, hidden_of, None, None, None))
    same(cut[:1, :3], model((ids[:1, :3], None, None, None, None)))
    same(cut[1], model(plain)[1])
    labels = torch.tensor([[3, -100, 4, 1, 5], [9, 2, 6, 5, 3]])
    loss, logits = model((ids, None, None, None, labels))
    same(logits, model(plain))
    same(loss, F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    causal = made(causal_mask_size=8, pre_layernorm=True, post_layernorm=False)
    loss, logits = causal((ids, None, None, None, labels))
    same(loss, F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))
    bare = made(causal_mask_size=8, pre_layernorm=True, post_layernorm=False, add_lm_head=False)
    same(causal.lm_head(bare(plain)), logits)
    same(bare(plain).mean(-1), torch.zeros(2, 5))  # the last layer norm
    crossed = made(add_cross_attention=True)
    cross = states(9)
    rest = (None, None, None)
    first, second = (crossed((ids, *rest, cross, mask, None)) for mask in (None, masked(9)))
    assert not torch.equal(first[0], second[0])
    same(first[1], second[1])
    for wrong, said in (
        ((ids,), r"takes one tuple, \(input_ids, attention_mask, token_type_ids, position_ids, labels\): given 1 inp"),
        (ids, "given Tensor"),
        ((ids, None, None, None, None, None), "given 6 inputs"),
        ((torch.ones(1, 9).long(), None, None, None, None), "9 tokens is longer than num_positions=8"),
    ):
        with pytest.raises(ShardwrightError, match=said):
            model(wrong)
    with pytest.raises(ShardwrightError, match="token_type_ids were given to a model with num_token_types=0"):
        causal((ids, None, ids, None, None))
    with pytest.raises(ShardwrightError, match="labels were given to a model with add_lm_head=False"):
        bare((ids, None, None, None, labels))


def test_how_weights_begin() -> None:
    torch.manual_seed(0)
    assert 0.018 < float(smp_nn.DistributedEmbedding(100, 50).weight.detach().std()) < 0.022
    padded = smp_nn.DistributedEmbedding(100, 50, padding_idx=3, initializer_range=0.5)
    assert 0.45 < float(padded.weight.detach().std()) < 0.55
    assert float(padded.weight[3].detach().abs().max()) == 0
    kept = torch.ones(4, 2)
    assert torch.equal(smp_nn.DistributedEmbedding(4, 2, _weight=kept).weight, kept)
    normal = smp_nn.DistributedTransformer(**LAYER, num_layers=1, use_normal_initialization=True, initializer_range=0.3)
    uniform = smp_nn.DistributedTransformer(**LAYER, num_layers=1)
    for name, module in normal.named_modules():
        if isinstance(module, nn.Linear):
            assert 0.25 < float(module.weight.detach().std()) < 0.35, name
            assert float(uniform.get_submodule(name).weight.abs().max()) <= module.in_features**-0.5


DOCUMENTED = {
    "DistributedTransformer":
    "num_layers=12, num_attention_heads=32, attention_head_size=32, hidden_size=1024, intermediate_size=4096, "
    "attention_dropout_prob=0.1, hidden_dropout_prob=0.1, activation='gelu', layernorm_epsilon=1e-05, "
    "initializer_range=0.02, use_normal_initialization=False, causal_mask_size=None, add_cross_attention=False, "
    "pre_layernorm=False, post_layernorm=True, use_alibi=False, alibi_bias_max=8",
    "DistributedTransformerLMHead":
    "num_layers=12, num_attention_heads=32, attention_head_size=32, hidden_size=1024, intermediate_size=4096, "
    "vocab_size=30522, num_positions=1024, attention_dropout_prob=0.1, hidden_dropout_prob=0.1, activation='gelu', "
    "layernorm_epsilon=1e-05, num_token_types=0, causal_mask_size=None, add_cross_attention=False, add_lm_head=True, "
    "initializer_range=0.02, use_normal_initialization=False, pre_layernorm=False, post_layernorm=True",
    "DistributedAttentionLayer":
    "num_attention_heads=32, attention_head_size=32, hidden_size=1024, attention_dropout_prob=0.1, "
    "hidden_dropout_prob=0.1, layernorm_epsilon=1e-05, initializer_range=0.02, use_normal_initialization=False, "
    "cross_attention=False, causal_mask_size=None, pre_layernorm=False, post_layernorm=True",
    "DistributedTransformerOutputLayer":
    "hidden_size=1024, intermediate_size=4096, hidden_dropout_prob=0.1, activation='gelu', layernorm_epsilon=1e-05, "
    "initializer_range=0.02, use_normal_initialization=False, pre_layernorm=False, post_layernorm=True, "
    "fp32_residual_addition=False",
    "DistributedEmbedding":
    "num_embeddings, embedding_dim, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, "
    "sparse=False, _weight=None, initializer_range=0.02, _skip_allgather=False, _skip_scatter_and_merge=False",
    "DistributedLinear": "in_features, out_features",
    "FlashAttentionLayer":
    "attention_dropout_prob=0.1, attention_head_size=None, scale_attention_scores=True, "
    "scale_attn_by_layer_idx=False, layer_idx=None, scale=None, triton_flash_attention=False, use_alibi=False",
}  # fmt: skip
DOCUMENTED["DistributedTransformerLayer"] = DOCUMENTED["DistributedTransformer"].removeprefix("num_layers=12, ")


@pytest.mark.parametrize("name", MODULES)
def test_arguments_are_those_of_the_documentation(name: str) -> None:
    module: Any = getattr(smp_nn, name)
    shown = [
        parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
        for parameter in inspect.signature(module).parameters.values()
    ]
    assert ", ".join(shown).startswith(DOCUMENTED[name])
    known = [one.name for one in fields(module.Arguments)]
    module(**MODULES[name])
    with pytest.raises(ShardwrightError, match=rf"{name} has no argument {known[0]}s: did you mean '{known[0]}'"):
        module(**MODULES[name], **{f"{known[0]}s": 1})


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("DistributedLinear", {"out_features": None}, "DistributedLinear: out_features=None: expected a whole number"),
        ("DistributedEmbedding", {"_skip_allgather": True}, "_skip_allgather=True is about messages between ranks"),
        ("DistributedAttentionLayer", {"post_layernorm": False}, "at least one of them must be True"),
        ("DistributedAttentionLayer", {"attention_dropout_prob": 1.5}, "expected a probability"),
        ("DistributedAttentionLayer", {"rotary_dim": 6}, "an even number of at most attention_head_size=4"),
        ("DistributedAttentionLayer", {"scale_attn_by_layer_idx": True}, "needs layer_idx"),
        ("DistributedAttentionLayer", {"rotary_dim": 2, "cross_attention": True}, "has no rotary_dim"),
        ("DistributedAttentionLayer", {"rotary_pairs": "thirds"}, "expected 'adjacent' or 'halves'"),
        ("DistributedAttentionLayer", {"attention_window": 4}, "attention_window needs causal_mask_size"),
        ("DistributedTransformer", {"attention_windows": (4,)}, "attention_windows has 1 entries"),
        ("DistributedTransformerOutputLayer", {"fp32_residual_addition": True}, "take bf16"),
        ("DistributedTransformerOutputLayer", {"activation": "tanh"}, "expected one of 'gelu', 'relu'"),
        ("DistributedTransformerLayer", {"post_layernorm": False}, "at least one of them must be True"),
        ("DistributedTransformerLayer", {"shared_layernorm": True}, "needs parallel_residual=True"),
        ("DistributedTransformerLayer", {"parallel_residual": True, "pre_layernorm": True}, "post_layernorm=False"),
        ("DistributedTransformer", {"num_layers": 0}, "num_layers=0: expected a whole number of at least 1"),
        ("DistributedTransformerLMHead", {"num_positions": -1}, "num_positions=-1"),
        ("FlashAttentionLayer", {"attention_head_size": None}, "needs attention_head_size"),
        ("FlashAttentionLayer", {"use_alibi": True}, "use_alibi=True needs triton_flash_attention=True"),
        (
            "FlashAttentionLayer",
            {"triton_flash_attention": True, "attention_dropout_prob": 0.1},
            "give attention_dropout_prob=0.0",
        ),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(name: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ShardwrightError, match=said):
        getattr(smp_nn, name)(**MODULES[name] | given)


def test_arguments_by_place() -> None:
    assert smp_nn.DistributedAttentionLayer(4, 4, 16).query.weight.shape == (16, 16)
    with pytest.raises(ShardwrightError, match="DistributedLinear was given in_features twice"):
        smp_nn.DistributedLinear(3, 5, in_features=3)
    with pytest.raises(ShardwrightError, match="DistributedLinear was given 4 arguments by place, and has 3"):
        smp_nn.DistributedLinear(3, 5, True, None)
    with pytest.raises(ShardwrightError, match="DistributedLinear needs out_features"):
        smp_nn.DistributedLinear(3)


def test_a_module_of_ones_own_is_registered_with_a_distributed_one() -> None:
    """As SageMaker's documentation shows it: names of the reference are those of the distributed module."""

    class Own(ReferenceAttention):
        pass

    sw.tp_register_with_module(Own, smp_nn.DistributedAttentionLayer, init_hook=lambda: ((), SMALL))
    model = nn.Sequential(Own())
    wanted = model((states(), masked()))
    assert replace_registered(model) == ["0"]
    assert isinstance(model[0], smp_nn.DistributedAttentionLayer)
    same(model((states(), masked())), wanted)
