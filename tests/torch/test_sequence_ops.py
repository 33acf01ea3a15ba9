"""Which ops need which tokens, held against models whose last tokens are changed."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import shardwright as sw
from shardwright.core.slices.sequence_ops import sequence_inputs, sequence_ops

TOKENS, WIDTH, WORDS = 12, 16, 32
SMALL: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 32, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "tie_word_embeddings": True,
}  # fmt: skip
GPT = {"vocab_size": WORDS, "n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 32, "use_cache": False}
CAUSAL: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": GPT,
    "LlamaForCausalLM": SMALL | {"num_key_value_heads": 1},
    "Qwen2ForCausalLM": SMALL | {"num_key_value_heads": 1},
    "GPTNeoXForCausalLM": SMALL,
    "OPTForCausalLM": SMALL | {"ffn_dim": 32, "word_embed_proj_dim": WIDTH},
    "PhiForCausalLM": SMALL,
    "GemmaForCausalLM": SMALL | {"num_key_value_heads": 1, "head_dim": 8},
}
BOTH_WAYS = {"BertForMaskedLM": SMALL, "RobertaForMaskedLM": SMALL}


def made(name: str, settings: dict[str, Any]) -> nn.Module:
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    known = kind.config_class().to_dict()
    model: nn.Module = kind(kind.config_class(**{k: v for k, v in settings.items() if k in known or k in GPT}))
    return model


def graph_of(model: nn.Module, **more: torch.Tensor) -> Any:
    ids = torch.randint(0, WORDS, (2, TOKENS))
    return sw.capture(model, {"input_ids": ids, "labels": ids, **more})


def is_causal(model: nn.Module) -> bool:
    """Whether the outputs of the first half stay the same when the second half of the tokens changes."""
    model.eval()
    ids = torch.randint(3, WORDS, (2, TOKENS))
    other = torch.cat([ids[:, :6], (ids[:, 6:] + 7) % (WORDS - 3) + 3], 1)
    with torch.no_grad():
        one, two = (model(input_ids=x).logits[:, :6] for x in (ids, other))
    return torch.equal(one, two) or float((one - two).abs().max()) < 1e-6


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_models_run_in_slices(name: str) -> None:
    model = made(name, CAUSAL[name])
    assert is_causal(model)
    graph = graph_of(model)
    found = sequence_ops(graph)
    assert found.obstacles == ()
    attentions = [number for number, op in enumerate(graph.ops) if op.kind == "attention"]
    assert [n for n, need in enumerate(found.needs) if need == "causal"] == attentions == list(found.carried)
    assert len(attentions) == 2
    for number, op in enumerate(graph.ops):
        if op.kind == "contraction" and found.needs[number] != "constant":
            assert found.needs[number] == "local", op.name
        for tensor in op.outputs:
            if tensor in found.dims:
                size = graph.tensors[tensor].shape(2)[found.dims[tensor]]
                assert size == (2 * TOKENS if tensor in found.flat else TOKENS)
    (mean,) = (number for number, op in enumerate(graph.ops) if op.outputs == (graph.outputs[0],))
    assert found.needs[mean] == "all", "the mean over all tokens"


def test_masks_of_queries_by_keys_are_left_to_their_values() -> None:
    """What follows from the batch's own mask is there whole, whatever ops it took; each slice takes its rows."""
    model = made("LlamaForCausalLM", CAUSAL["LlamaForCausalLM"])
    graph = graph_of(model, attention_mask=torch.ones(2, TOKENS, dtype=torch.long))
    found = sequence_ops(graph)
    assert found.obstacles == ()
    assert set(found.masks) == set(found.carried)
    assert len(found.masks) == 2
    for mask in found.masks.values():
        assert graph.tensors[mask].fixed[-2:] == (TOKENS, TOKENS)


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_models_that_look_ahead_do_not(name: str) -> None:
    model = made(name, BOTH_WAYS[name])
    assert not is_causal(model)
    first = sequence_ops(graph_of(model)).obstacles[0]
    assert "scaled_dot_product_attention" in first.reason
    assert "attention.self" in first.reason
    assert "is_causal=True" in first.reason


class Row(nn.Module):
    """Blocks of one operation on [batch, tokens, width] between an embedding and a head."""

    def __init__(self, operation: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(operation) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return F.cross_entropy(logits.transpose(1, 2), input_ids)


class Block(nn.Module):
    def __init__(self, operation: Any) -> None:
        super().__init__()
        self.wide, self.narrow, self.operation = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH), operation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(self.operation(torch.tanh(self.wide(x))))


def masked(scores: torch.Tensor) -> torch.Tensor:
    """Scores [batch, queries, keys] with those of later keys hidden."""
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, torch.finfo(scores.dtype).min)


OPERATIONS: dict[str, tuple[Any, str]] = {
    "a mean over tokens": (lambda x: x - x.mean(1, keepdim=True), "adds up over the sequence"),
    "a norm over tokens": (lambda x: x / x.norm(dim=1, keepdim=True), "the sequence"),
    "a shift": (lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1], "sequence"),
    "a flip": (lambda x: x.flip(1), "sequence"),
    "attention": (lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x, "attends in both directions"),
    "a product of tokens": (lambda x: x @ (x.transpose(1, 2) @ x), "adds up over the sequence"),
    "tokens for keys": (lambda x: masked(x @ x.transpose(1, 2)) @ x[:, :, :1] * x, "attends in both directions"),
    "the last token": (lambda x: x[:, -1:].expand_as(x), "a part of the sequence"),
    "tokens in one row": (lambda x: x.flatten(1).tanh().view(x.shape), "sequence"),
    "a sort": (lambda x: x.sort(1).values, "sequence"),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_ops_between_tokens_are_named_with_their_module(name: str) -> None:
    operation, said = OPERATIONS[name]
    ids = torch.randint(0, WORDS, (2, TOKENS))
    found = sequence_ops(sw.capture(Row(operation), ids))
    assert found.obstacles
    assert said in found.obstacles[0].reason
    assert "in blocks.0" in found.obstacles[0].reason


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x * 2,
        lambda x: F.layer_norm(x, (24,)),
        lambda x: F.dropout(x, 0.1),
        lambda x: x * torch.arange(x.shape[1])[:, None].cos(),
        lambda x: torch.cat([x[..., 12:], -x[..., :12]], -1),
        lambda x: x.transpose(1, 2).tanh().transpose(1, 2),
        lambda x: F.layer_norm(x.reshape(-1, 24), (24,)).view(x.shape),
    ],
    ids=["scaled", "norm of a token", "dropout", "positions", "turned", "transposed", "tokens of all samples in rows"],
)
def test_ops_on_each_token_are_local(operation: Any) -> None:
    ids = torch.randint(0, WORDS, (2, TOKENS))
    graph = sw.capture(Row(operation), ids)
    found = sequence_ops(graph)
    assert found.obstacles == ()
    assert found.carried == {}
    for tensor, dim in found.constants.items():
        assert graph.tensors[tensor].fixed[dim] == TOKENS


def test_sums_of_all_tokens_so_far_are_causal() -> None:
    graph = sw.capture(Row(lambda x: x.cumsum(1)), torch.randint(0, WORDS, (2, TOKENS)))
    found = sequence_ops(graph)
    assert found.obstacles == ()
    assert [graph.ops[number].base_name for number in found.carried] == ["cumsum"] * 3


@pytest.mark.parametrize(
    "hide",
    [
        masked,
        lambda s: masked(s / 4) / 2 + torch.zeros(1, 1, TOKENS),
        lambda s: s + torch.full_like(s[0], -1e30).triu(1),
    ],
    ids=["filled", "filled and added to", "added to"],
)
def test_attention_that_is_written_out_is_causal(hide: Any) -> None:
    graph = sw.capture(
        Row(lambda x: F.dropout(hide(x @ x.transpose(1, 2)).softmax(-1), 0.1) @ x), torch.randint(0, WORDS, (2, TOKENS))
    )
    found = sequence_ops(graph)
    assert found.obstacles == ()
    assert [graph.ops[number].kind for number in found.carried] == ["contraction"] * 6
    assert len(found.hides) == 3
    for tensor, dim in found.keys.items():
        assert graph.tensors[tensor].fixed[dim] == TOKENS
        assert dim != found.dims[tensor]


def test_inputs_without_a_sequence() -> None:
    graph = sw.capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), torch.randn(2, 4), loss=lambda y: y.sum())
    with pytest.raises(sw.ShardwrightError, match="has no sequence among its inputs: expected tokens of shape"):
        sequence_inputs(graph)
