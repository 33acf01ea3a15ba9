"""Which ops need which tokens, held against models whose last tokens are changed."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import shardwright as sw
from shardwright.backends.torch.slices.routing_checks import require_routing
from shardwright.backends.torch.slices.traces import require_same_numbers
from shardwright.backends.torch.tensor_parallel.trace import NotReplayableError, trace
from shardwright.core.errors import CaptureError
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


def convolved(x: torch.Tensor, size: int, **how: Any) -> torch.Tensor:
    """A depthwise convolution of [batch, tokens, width]."""
    width = x.shape[-1]
    return F.conv1d(x.mT, torch.ones(width, 1, size), groups=width, **how).mT


def routed(
    x: torch.Tensor,
    *,
    choices: int = 2,
    divisor: int = 2,
    experts: Any = lambda scores: scores.topk(2).indices,
    order: Any = lambda ids: ids.sort(),
    counted: Any = lambda ids: torch.histc(ids.float(), bins=4, min=0, max=3),
    between: Any = lambda rows, order, counts: rows,
    back: Any = lambda rows, order: rows[torch.empty_like(order).index_put_((order,), torch.arange(len(order)))],
) -> torch.Tensor:
    """A mixture of four experts of [batch, tokens, width]: rows in the order of their experts, and back."""
    flat = x.reshape(-1, x.shape[-1])
    chosen = experts(flat[:, :4])
    ids = chosen.reshape(-1)
    sorted_ids, which = order(ids)
    counts = counted(sorted_ids)
    rows = flat[which // divisor]
    rows = torch._grouped_mm(rows, torch.ones(4, 24, 24), counts.cumsum(0, dtype=torch.int32))
    rows = between(rows, which, counts)
    return back(rows, which).view(len(flat), choices, -1).sum(1).view(x.shape)


OPERATIONS: dict[str, tuple[Any, str]] = {
    "a mean over tokens": (lambda x: x - x.mean(1, keepdim=True), "adds up over the sequence"),
    "a norm over tokens": (lambda x: x / x.norm(dim=1, keepdim=True), "the sequence"),
    "a shift ahead": (lambda x: F.pad(x, (0, 0, -1, 1)), "sequence"),
    "a shift ahead by a cut": (lambda x: F.pad(x, (0, 0, 0, 1))[:, 1:], "pads the sequence behind its end"),
    "the end of a longer one": (lambda x: F.pad(x, (0, 0, 2, 0))[:, 1:-1], "reads later tokens"),
    "a shift behind ones": (lambda x: torch.cat([torch.ones_like(x[:, :1]), x[:, :-1]], 1), "sequence"),
    "a shift ahead of zeros": (lambda x: torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1), "sequence"),
    "a later part behind zeros": (lambda x: torch.cat([torch.zeros_like(x[:, :1]), x[:, 1:]], 1), "sequence"),
    "all but the last tokens": (lambda x: x + x[:, :-1].mean(1, keepdim=True), "a part of the sequence"),
    "a pad by reflection": (lambda x: F.pad(x.mT, (2, 0), mode="reflect")[..., :-2].mT, "sequence"),
    "a convolution of both sides": (lambda x: convolved(x, 3, padding=1), "reads later tokens"),
    "a convolution of the same size": (lambda x: convolved(x, 3, padding="same"), "needs the sequence whole"),
    "a convolution cut too far behind": (lambda x: convolved(x, 3, padding=2)[:, 1:-1], "reads later tokens"),
    "a dilated convolution with too little padding": (
        lambda x: convolved(x, 3, padding=2, dilation=2)[:, :TOKENS],
        "reads later tokens",
    ),
    "a convolution in steps": (
        lambda x: x + convolved(x, 2, padding=1, stride=2).mean(),
        "in steps of more than one token",
    ),
    "two convolutions with too little padding": (
        lambda x: x + convolved(convolved(F.pad(x, (0, 0, 2, 0)), 2), 3).mean(1, keepdim=True),
        "reads later tokens",
    ),
    "two convolutions with too much padding": (
        lambda x: x + convolved(convolved(F.pad(x, (0, 0, 4, 0)), 2), 3).mean(1, keepdim=True),
        "windows",
    ),
    "a padded convolution with padding": (
        lambda x: convolved(F.pad(x, (0, 0, 2, 0)), 5, padding=1),
        "reads later tokens",
    ),
    "what is cut off is read": (lambda x: x + convolved(x, 3, padding=2).mean(1, keepdim=True), "windows"),
    "sums of what is cut off": (lambda x: convolved(x, 3, padding=2).cumsum(1)[:, :TOKENS], "windows"),
    "sums of zeros in front": (lambda x: convolved(F.pad(x, (0, 0, 2, 0)).cumsum(1), 3), "windows"),
    "a longer one, summed": (lambda x: x + F.pad(x, (0, 0, 2, 0)).cumsum(1)[:, 2:], "windows"),
    "the largest so far": (lambda x: x.cummax(1).values, "needs the sequence whole"),
    "a flip": (lambda x: x.flip(1), "sequence"),
    "attention": (lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x, "attends in both directions"),
    "a product of tokens": (lambda x: x @ (x.transpose(1, 2) @ x), "adds up over the sequence"),
    "tokens for keys": (lambda x: masked(x @ x.transpose(1, 2)) @ x[:, :, :1] * x, "attends in both directions"),
    "the last token": (lambda x: x[:, -1:].expand_as(x), "a part of the sequence"),
    "tokens in one row": (lambda x: x.flatten(1).tanh().view(x.shape), "sequence"),
    "a sort": (lambda x: x.sort(1).values, "sequence"),
    "experts that choose tokens": (lambda x: x + x.topk(2, dim=1).values.sum(), "sequence"),
    "room in experts": (
        lambda x: x * (x[..., :4].softmax(-1).round().reshape(-1, 4).cumsum(0) < 5).any(-1).view(*x.shape[:2], 1),
        "needs the sequence whole",
    ),
    "experts by numbers below 0": (
        lambda x: routed(x, experts=lambda s: s.topk(2).indices - 1),
        "not known to be numbers from 0 on",
    ),
    "experts by their load": (
        lambda x: routed(x, between=lambda rows, order, counts: rows / counts.max()),
        "how many tokens go to each",
    ),
    "a number for each place": (
        lambda x: routed(x, between=lambda rows, order, counts: rows * torch.arange(len(rows))[:, None]),
        "takes a constant along tokens in the order",
    ),
    "dropout in experts": (
        lambda x: routed(x, between=lambda rows, order, counts: F.dropout(rows, 0.5)),
        "draws random numbers",
    ),
    "sums in the order of experts": (
        lambda x: routed(x, between=lambda rows, order, counts: rows.cumsum(0)),
        "needs the sequence whole",
    ),
    "rows by the order itself": (
        lambda x: routed(x, between=lambda rows, order, counts: rows + order[:, None]),
        "another order",
    ),
    "rows in the wrong order": (lambda x: routed(x, back=lambda rows, order: rows), "sequence"),
    "keys behind a zero": (
        lambda x: F.scaled_dot_product_attention(x, *[F.pad(x, (0, 0, 1, 0))] * 2, is_causal=True),
        "needs windows of the sequence",
    ),
    "attention among as many heads": (
        lambda x: F.scaled_dot_product_attention(
            *[x.unflatten(-1, (TOKENS, 2))] * 3, attn_mask=torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        ).flatten(2),
        "attends in both directions",
    ),
    "rows in both orders": (
        lambda x: routed(x, between=lambda rows, order, counts: rows + rows[order.argsort()]),
        "in another order",
    ),
    "back by the order": (lambda x: routed(x, back=lambda rows, order: rows[order]), "another order"),
    "experts in no order": (lambda x: routed(x, order=lambda ids: (ids, ids)), "brings tokens together"),
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


@pytest.mark.parametrize(
    ("operation", "tail"),
    [
        (lambda x: x.cumsum(1), 1),
        (lambda x: x.logcumsumexp(1), 1),
        (lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1], 1),
        (lambda x: F.pad(x, (0, 0, 2, -2)), 2),
        (lambda x: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1), 1),
        (lambda x: convolved(torch.cat([x.new_zeros(len(x), 2, 24), x], 1), 3), 2),
        (lambda x: convolved(F.pad(x, (0, 0, 3, 0)), 4), 3),
        (lambda x: convolved(F.silu(convolved(F.pad(x, (0, 0, 3, 0)), 2)), 3), 3),
        (lambda x: F.silu(convolved(x, 4, padding=3))[:, :TOKENS], 3),
        (lambda x: convolved(x, 3, padding=4, dilation=2)[:, :-4], 4),
    ],
    ids=[
        "sums",
        "sums of powers",
        "a shift",
        "a shift by two",
        "a shift behind zeros",
        "zeros in front",
        "a padded convolution",
        "two of them",
        "a cut one",
        "a dilated one",
    ],
)
def test_what_reads_a_few_tokens_before_is_causal(operation: Any, tail: int) -> None:
    found = sequence_ops(sw.capture(Row(operation), torch.randint(0, WORDS, (2, TOKENS))))
    assert found.obstacles == ()
    assert [entries for _, entries in found.tails.values()] == [tail] * 3
    assert found.carried == {}


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"counted": lambda ids: torch.bincount(ids, minlength=4)},
        {"back": lambda rows, order: rows[order.argsort()]},
        {"experts": lambda s: s.argmax(-1, keepdim=True), "choices": 1, "divisor": 1},
    ],
    ids=["as transformers has it", "counted whole", "back by a sort", "one expert"],
)
def test_mixtures_of_experts_are_local(how: Any) -> None:
    graph = sw.capture(Row(lambda x: routed(x, **how)), torch.randint(0, WORDS, (2, TOKENS)))
    found = sequence_ops(graph)
    assert found.obstacles == ()
    assert found.carried == {}
    assert len(found.routed.grouped) == 3
    assert set(found.routed.divisors.values()) == {how.get("divisor", 2)}
    for tensor, rows in found.flat.items():
        assert graph.tensors[tensor].shape(3)[found.dims[tensor]] == 3 * TOKENS * rows


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another divisor": ({"divisor": 3}, r"other=3: expected whole division by 2, the rows of each token"),
    "a descending order": ({"order": lambda ids: ids.sort(descending=True)}, "descending=True: expected an ascending"),
    "counts from 1 on": (
        {"counted": lambda ids: torch.histc(ids.float(), bins=4, min=1, max=4)}, "min=1: expected bounds from 0 on"),
    "counts between the least and the largest": (
        {"counted": lambda ids: torch.histc(ids.float(), bins=4)}, "min=0: expected bounds from 0 on"),
    "places from 1 on": (
        {"back": lambda rows, order: rows[
            torch.empty_like(order).index_put_((order,), torch.arange(1, 1 + len(order))).clone()]},
        "start=1: expected numbers from 0 on"),
    "places that add up": (
        {"back": lambda rows, order: rows[
            torch.zeros_like(order).index_put_((order,), torch.arange(len(order)), accumulate=True)]},
        "expected rows that are put by one index, each in its place"),
    "the borders of other experts": (
        {"counted": lambda ids: torch.histc(torch.zeros_like(ids).float(), bins=4, min=0, max=3)},
        "expected the borders of the experts by which the rows were sorted"),
}  # fmt: skip


@pytest.mark.parametrize("how", REFUSED)
def test_experts_are_told_by_what_ops_compute_with(how: str) -> None:
    given, said = REFUSED[how]
    traced = trace(Row(lambda x: routed(x, **given)), torch.randint(0, WORDS, (2, TOKENS)))
    with pytest.raises(NotReplayableError, match=said):
        require_routing(traced, sequence_ops(traced.graph))


def test_experts_as_transformers_has_them_are_routed() -> None:
    traced = trace(Row(routed), torch.randint(0, WORDS, (2, TOKENS)))
    require_routing(traced, sequence_ops(traced.graph))


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.unsqueeze(2).expand(-1, -1, x.shape[1], -1).sum(2),
        lambda x: x.repeat(1, 1, x.shape[1]).view(*x.shape[:2], -1, x.shape[2]).sum(2),
        lambda x: F.pad(x, (0, x.shape[1])).mean(-1, keepdim=True) * x,
    ],
    ids=["expanded", "repeated", "padded"],
)
def test_dims_as_long_as_the_sequence_are_named(operation: Any) -> None:
    """In slices they would be shorter, and a sum over them another one."""
    model, ids = Row(operation), torch.randint(0, WORDS, (2, TOKENS))
    whole, other = trace(model, ids), trace(model, ids[:, :5])
    with pytest.raises(CaptureError, match=r"in blocks\.0 gives a tensor with another dim as long as the sequence"):
        require_same_numbers(whole, other, sequence_ops(whole.graph), 5)


class Clamped(nn.Module):
    """A model that bounds its weight before it uses it, as Gemma 3n does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer.weight.data.clamp_(-1, 1)
        return self.layer(x).sum()


def test_a_model_that_writes_to_its_parameters_is_not_run_op_by_op() -> None:
    """Its ops would read what was written, through which no gradient flows."""
    with pytest.raises(NotReplayableError, match=r"it writes to its parameter layer\.weight in its forward pass"):
        trace(Clamped(), torch.randn(2, 8))


def test_what_nothing_reads_may_need_all_tokens() -> None:
    """The states that a cache would keep."""

    def kept(x: torch.Tensor) -> torch.Tensor:
        F.pad(x, (0, 0, 20 - TOKENS, 0)).flip(1)
        return x

    found = sequence_ops(sw.capture(Row(kept), torch.randint(0, WORDS, (2, TOKENS))))
    assert found.obstacles == ()


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


def with_sinks(x: torch.Tensor, *, end: int = -1, before: bool = False) -> torch.Tensor:
    """Attention with a score beside those of the keys."""
    scores = masked(x @ x.mT)
    sinks = torch.ones(1, 1, 1).expand(len(x), x.shape[1], 1)
    scores = torch.cat([sinks, scores] if before else [scores, sinks], -1)
    return (scores - scores.amax(-1, keepdim=True)).softmax(-1)[..., :end] @ x


def test_scores_beside_those_of_keys_are_causal() -> None:
    ids = torch.randint(0, WORDS, (2, TOKENS))
    found = sequence_ops(sw.capture(Row(with_sinks), ids))
    assert found.obstacles == ()
    assert set(found.more_keys.values()) == {1}
    scaled = Row(lambda x: masked(x @ x.mT).softmax(-1) @ x * masked(x @ x.mT).logsumexp(-1, keepdim=True).sigmoid())
    assert sequence_ops(sw.capture(scaled, ids)).obstacles == ()


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: with_sinks(torch.cat([x, x[:, :1]], 1))[:, :TOKENS],
        lambda x: with_sinks(x, before=True),
        lambda x: (x @ x.mT).logsumexp(-1, keepdim=True) * x,
        lambda x: torch.cat([masked(x @ x.mT), x @ x.mT], 1).softmax(-1)[:, :TOKENS] @ x,
    ],
    ids=["more tokens", "in front", "all scores", "beside scores of all keys"],
)
def test_scores_beside_others_are_named(operation: Any) -> None:
    assert sequence_ops(sw.capture(Row(operation), torch.randint(0, WORDS, (2, TOKENS)))).obstacles


def test_inputs_without_a_sequence() -> None:
    graph = sw.capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), torch.randn(2, 4), loss=lambda y: y.sum())
    with pytest.raises(sw.ShardwrightError, match="has no sequence among its inputs: expected tokens of shape"):
        sequence_inputs(graph)
