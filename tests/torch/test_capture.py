"""Capture of PyTorch models, against torch's own flop counter, direct runs, and hand-written expectations."""

import copy
import math
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from shardwright.backends.torch import BACKEND
from shardwright.backends.torch.ops import coverage
from shardwright.core.errors import CaptureError
from shardwright.core.graph import Graph, Op

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


# -- Hugging Face models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("name", MODELS)
def test_matmul_flops_equal_the_flop_counter_at_every_batch(name: str, mask: bool) -> None:
    model = MODELS[name]("eager")
    graph = BACKEND.capture(model, tokens(4, mask=mask))
    for batch in (1, 4, 5):
        assert matmul_flops(graph, batch) == counted_flops(model, **tokens(batch, mask=mask))
    assert not kinds(graph, "attention")


@pytest.mark.parametrize("name", MODELS)
def test_sdpa_is_one_op_per_attention_layer(name: str) -> None:
    graph = BACKEND.capture(MODELS[name]("sdpa"), tokens(4))
    attention = kinds(graph, "attention")
    assert len(attention) == (3 * LAYERS if name == "t5" else LAYERS)  # T5: encoder, decoder, and decoder to encoder
    assert all("attn" in p or "attention" in p.lower() for p in (graph.calls[op.call].path for op in attention))
    assert not kinds(graph, "opaque")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_shapes_at_another_batch_equal_a_direct_run(name: str, attention: str) -> None:
    """Every core op's first output, against what the aten ops of a run at batch 5 return."""
    model = MODELS[name](attention)
    graph = BACKEND.capture(model, tokens(4))

    class Shapes(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: set[tuple[int, ...]] = set()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            self.seen.update(tuple(t.shape) for t in torch.utils._pytree.tree_leaves(out) if torch.is_tensor(t))
            return out

    with Shapes() as shapes, torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        model(**tokens(5))
    missing = [
        (op.name, graph.tensors[op.outputs[0]].shape(5))
        for op in graph.ops
        if graph.tensors[op.outputs[0]].has_batch and graph.tensors[op.outputs[0]].shape(5) not in shapes.seen
    ]
    # Values between the pieces of one op (a gather inside a loss) have shapes of their own, all [batch · length].
    assert not [m for m in missing if m[1] != (5 * LENGTH,)]
    assert any(graph.tensors[op.outputs[0]].has_batch for op in graph.ops)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_ties_and_calls(name: str) -> None:
    model = MODELS[name]("sdpa")
    graph = BACKEND.capture(model, tokens(4))
    named = dict(model.named_parameters())
    assert [p.name for p in graph.parameters] == list(named)
    assert graph.parameter_count() == sum(p.numel() for p in named.values())
    assert {n for p in graph.parameters for n in p.names} == {
        n for n, _ in model.named_parameters(remove_duplicate=False)
    }
    for parameter in graph.parameters:
        assert graph.tensors[parameter.tensor].shape(7) == tuple(named[parameter.name].shape)
        assert graph.tensors[parameter.tensor].role == "parameter"
    tied = {"gpt2": "lm_head.weight", "t5": "lm_head.weight", "bert": "cls.predictions.decoder.weight"}.get(name)
    aliases = [alias for p in graph.parameters for alias in p.aliases]
    assert (tied in aliases) if tied else not aliases
    paths = [c.path for c in graph.calls]
    for pattern in BLOCKS[name]:
        for i in range(LAYERS):
            assert paths.count(pattern.format(i)) == 1
    modules = dict(model.named_modules())
    assert all(c.path in modules for c in graph.calls)
    assert all(c.path.startswith(graph.calls[c.parent].path) for c in graph.calls)
    assert graph.calls[0].path == ""
    assert graph.calls[0].parent == 0


@pytest.mark.parametrize("name", MODELS)
def test_a_loss_and_all_parameters_are_in_the_graph(name: str) -> None:
    model = MODELS[name]("eager")
    graph = BACKEND.capture(model, tokens(4))
    (loss,) = graph.outputs
    assert graph.tensors[loss].shape(9) == ()
    reached, pending = set(), [loss]
    while pending:
        tensor = pending.pop()
        if tensor not in reached:
            reached.add(tensor)
            if tensor in graph.producer:
                pending.extend(graph.ops[graph.producer[tensor]].inputs)
    # The loss depends on every parameter that gets a gradient in a real run.
    model(**tokens(4)).loss.backward()
    for parameter in graph.parameters:
        has_gradient = model.get_parameter(parameter.name).grad is not None
        assert (parameter.tensor in reached) == has_gradient, parameter.name
    assert {graph.tensors[i].name for i in graph.inputs} == {"input_ids", "labels"}
    assert set(graph.inputs) <= reached


@pytest.mark.parametrize("name", MODELS)
def test_default_configurations_on_the_meta_device(name: str) -> None:
    configs = {
        "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config(), 124_439_808),
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(), 6_738_415_616),
        "bert": (transformers.BertForMaskedLM, transformers.BertConfig(), 109_514_298),
        "t5": (
            transformers.T5ForConditionalGeneration,
            transformers.T5Config(decoder_start_token_id=0),
            60_506_624,
        ),
    }
    kind, config, parameters = configs[name]
    with torch.device("meta"):
        model = kind(config)
    sample = tokens(8, device="meta")
    graph = BACKEND.capture(model, sample)
    assert graph.parameter_count() == parameters
    assert graph.sample_batch == 8
    assert all(p.is_meta for p in model.parameters())
    # Two FLOPs per weight and token, for every weight matrix that is multiplied by (attention itself is not counted).
    by_hand = 2 * sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and not _is_looked_up(n, name))
    assert matmul_flops(graph, 1) == by_hand * LENGTH
    assert not kinds(graph, "opaque")


def _is_looked_up(parameter: str, model: str) -> bool:
    """Embeddings that are not tied to a head."""
    only_looked_up = ("position_embeddings", "token_type", "wpe", "relative_attention_bias")
    return any(part in parameter for part in only_looked_up) or (model == "llama" and "embed_tokens" in parameter)


@pytest.mark.slow
def test_a_large_llama_is_captured_in_seconds() -> None:
    config = transformers.LlamaConfig(
        hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, intermediate_size=28672
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    sample = {name: torch.zeros(1, 4096, dtype=torch.long, device="meta") for name in ("input_ids", "labels")}
    started_s = time.process_time()  # of this process alone: other work beside it does not count
    graph = BACKEND.capture(model, sample)
    assert time.process_time() - started_s < 8
    assert len(kinds(graph, "attention")) == 80
    assert graph.parameter_count() == sum(p.numel() for p in model.parameters())


def test_repeated_blocks_are_recorded_alike() -> None:
    graph = BACKEND.capture(gpt2("sdpa"), tokens(4))

    def block(index: int) -> list[tuple[Any, ...]]:
        prefix = f"transformer.h.{index}"
        return [
            (op.kind, op.name, op.labels, op.special, graph.calls[op.call].path.removeprefix(prefix))
            for op in graph.ops
            if graph.calls[op.call].path.startswith(prefix)
        ]

    assert block(0) == block(1)
    assert len(block(0)) > 20


def test_labels_of_tiny_gpt2_have_one_size_each() -> None:
    graph = BACKEND.capture(gpt2("eager"), tokens(4))
    checked = 0
    for op in graph.ops:
        if op.kind not in ("contraction", "elementwise", "dropout", "softmax", "normalization", "reduction"):
            continue
        for batch in (2, 7):
            sizes: dict[int, set[int]] = {}
            for tensor, labels in zip((*op.inputs, *op.outputs), op.labels, strict=True):
                for label, size in zip(labels, graph.tensors[tensor].shape(batch), strict=True):
                    if label >= 0:
                        sizes.setdefault(label, set()).add(size)
            assert all(len(found) == 1 for found in sizes.values()), op
            checked += 1
    assert checked > 100


def test_products_over_flattened_dims_keep_the_dims() -> None:
    """GPT-2's Conv1D views [batch, length, k] as a matrix: the graph has the product of the three dims."""
    graph = BACKEND.capture(gpt2("sdpa"), tokens(4))
    weights = [p.tensor for p in graph.parameters if ".c_" in p.name and p.name.endswith("weight")]
    assert len(weights) == 4 * LAYERS
    for weight in weights:
        (product,) = [op for op in graph.ops if weight in op.inputs]
        assert product.labels == ((0, 1, 2), (2, 3), (0, 1, 3))
        (bias,) = [op for op in graph.ops if product.outputs[0] in op.inputs]
        assert bias.labels == ((0, 1, 2), (2,), (0, 1, 2)) or bias.labels == ((0, 1, 3), (3,), (0, 1, 3))
        assert graph.tensors[bias.outputs[0]].shape(7)[:2] == (7, LENGTH)
    used = {t for op in graph.ops for t in (*op.inputs, *op.outputs)}
    assert all(i in used for i, t in enumerate(graph.tensors) if t.role in ("activation", "constant"))


def test_a_flattened_value_that_something_else_uses_stays() -> None:
    class Flat(nn.Module):
        def __init__(self, *, both: bool) -> None:
            super().__init__()
            self.weight, self.bias, self.both = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(8)), both

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            flat = x.view(-1, 6)
            product = torch.addmm(self.bias, flat, self.weight)
            loss = product.view(*x.shape[:2], 8).mean()
            return loss + (product.sum() if self.both else flat.sum())

    first = BACKEND.capture(Flat(both=True), torch.randn(4, 3, 6))
    assert [op.labels for op in kinds(first, "contraction")] == [((0, 2), (2, 1), (0, 1))]
    second = BACKEND.capture(Flat(both=False), torch.randn(4, 3, 6))
    assert [op.labels for op in kinds(second, "contraction")] == [((0, 1, 2), (2, 3), (0, 1, 3))]
    assert [op.kind for op in second.ops] == [
        "view", "contraction", "elementwise", "reduction", "reduction", "elementwise",
    ]  # fmt: skip


def test_heads_can_be_followed_from_projection_to_output_projection() -> None:
    """The output dim of the query projection reaches attention's head dim, and from there the input dim of the output
    projection: what a tensor-parallel split needs."""
    graph = BACKEND.capture(llama("eager"), tokens(4))
    weight = {p.name: p.tensor for p in graph.parameters}
    start = next(op for op in graph.ops if weight["model.layers.0.self_attn.q_proj.weight"] in op.inputs)
    end = next(op for op in graph.ops if weight["model.layers.0.self_attn.o_proj.weight"] in op.inputs)
    marked = {(start.outputs[0], len(graph.tensors[start.outputs[0]].fixed) - 1)}
    for op in graph.ops[graph.ops.index(start) + 1 : graph.ops.index(end) + 1]:
        held = {
            labels[dim]
            for tensor, labels in zip(op.inputs, op.input_labels, strict=True)
            for dim in range(len(labels))
            if (tensor, dim) in marked and labels[dim] >= 0
        }
        for tensor, labels in zip(op.outputs, op.output_labels, strict=True):
            marked |= {(tensor, dim) for dim, label in enumerate(labels) if label in held}
    source = end.inputs[0]
    assert (source, len(graph.tensors[source].fixed) - 1) in marked


# -- the model is not changed ----------------------------------------------------------------------------------------


class Stateful(nn.Module):
    """Changes everything that a forward pass can change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.linear = nn.Linear(6, 3)
        self.register_buffer("count", torch.zeros(()))
        self.plain = torch.ones(6)
        self.calls = 0
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(x.shape)
        self.count += 1
        self.plain.add_(1)
        self.last = x
        noise = torch.rand(6) * random.random() * float(np.random.rand())
        return self.linear(F.dropout(self.norm(x) * self.plain + noise, 0.3)).mean()


@pytest.mark.parametrize("training", [True, False])
def test_a_model_is_left_exactly_as_it_was(training: bool) -> None:
    model = Stateful().train(training)
    hooked: list[torch.Size] = []
    handle = model.linear.register_forward_hook(lambda module, args, output: hooked.append(output.shape))
    before = copy.deepcopy(model.state_dict())
    objects = [id(t) for t in (*model.parameters(), *model.buffers(), model.plain)]
    attributes = set(vars(model))
    torch.manual_seed(7)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    flags = torch.is_grad_enabled(), torch._C._get_mkldnn_enabled()
    graph = BACKEND.capture(model, torch.randn(4, 6))
    torch.manual_seed(7)
    sample = torch.randn(4, 6)
    assert len(graph.ops) > 5
    assert set(vars(model)) == attributes
    assert [id(t) for t in (*model.parameters(), *model.buffers(), model.plain)] == objects
    after = model.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert torch.equal(model.plain, torch.ones(6))
    assert (model.calls, model.seen, model.training) == (0, [], training)
    assert all(m.training == training for m in model.modules())
    assert flags == (torch.is_grad_enabled(), torch._C._get_mkldnn_enabled())
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks
    assert len(hooked) == 2  # the model's own hooks run, as they do in training
    hooked.clear()
    model(sample)
    assert len(hooked) == 1
    handle.remove()


def test_random_state_is_left_as_it_was() -> None:
    sample, model = torch.randn(4, 6), Stateful()
    torch.manual_seed(7)
    BACKEND.capture(model, sample)
    drawn = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(3))


def test_a_failing_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(4, 3))
    objects = [id(p) for p in model.parameters()]
    with pytest.raises(CaptureError, match=r"aten.linear in '1'"):
        BACKEND.capture(model, torch.randn(4, 6), mean_of)
    assert [id(p) for p in model.parameters()] == objects
    assert not nn.modules.module._global_forward_pre_hooks


def test_models_without_values() -> None:
    real = gpt2("sdpa")
    graph = BACKEND.capture(real, tokens(4))
    with FakeTensorMode():
        fake = gpt2("sdpa")
    with torch.device("meta"):
        meta = gpt2("sdpa")
        of_meta = BACKEND.capture(meta, tokens(4))  # inside the context too
    assert BACKEND.capture(fake, tokens(4)) == graph == of_meta


# -- other models ----------------------------------------------------------------------------------------------------


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.group_norm = nn.GroupNorm(2, 8)
        self.grouped = nn.Conv2d(8, 16, 1, groups=2)
        self.up = nn.ConvTranspose2d(16, 4, 2, 2)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = F.relu_(self.norm(self.stem(x)))
        x = x + self.group_norm(self.depthwise(x))
        x = self.up(F.max_pool2d(self.grouped(x), 2))
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)), target)


@pytest.mark.parametrize("training", [True, False])
def test_convolutions(training: bool) -> None:
    model = ConvNet().train(training)
    sample = torch.randn(4, 3, 16, 16), torch.randint(0, 5, (4,))
    graph = BACKEND.capture(model, sample)
    assert matmul_flops(graph, 4) == counted_flops(model, *sample)
    assert not kinds(graph, "opaque")
    statistics = [dict(op.special) for op in kinds(graph, "normalization")]
    # Batch norm in training takes its statistics over the batch (dim 0); group norm never does.
    assert statistics == ([{0: "statistic", 2: "statistic", 3: "statistic"}] if training else []) + [
        {1: "statistic", 2: "statistic", 3: "statistic"}
    ]
    buffers = {t.name for t in graph.tensors if t.role == "buffer"}
    assert buffers == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_mlp_is_contractions_and_sums() -> None:
    model = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 2, bias=False))
    model[2].weight.requires_grad_(False)
    graph = BACKEND.capture(model, torch.randn(4, 6), mean_of)
    assert [(op.kind, op.name, graph.calls[op.call].path) for op in graph.ops] == [
        ("contraction", "aten.linear", "0"),
        ("elementwise", "aten.linear/bias", "0"),
        ("elementwise", "aten.relu", "1"),
        ("contraction", "aten.linear", "2"),
        ("reduction", "aten.mean", ""),
    ]
    assert graph.ops[0].labels == ((0, 1), (2, 1), (0, 2))
    assert [(p.name, p.trainable) for p in graph.parameters] == [
        ("0.weight", True), ("0.bias", True), ("2.weight", False),
    ]  # fmt: skip
    assert graph.parameter_count(trainable_only=True) == 49


@pytest.mark.parametrize("batch_first", [True, False])
def test_encoder_decoder(batch_first: bool) -> None:
    model = nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=batch_first)
    source, target = torch.randn(4, 5, 16), torch.randn(4, 6, 16)
    if not batch_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    graph = BACKEND.capture(model, (source, target), mean_of, batch_dims=None if batch_first else 1)
    assert graph.sample_batch == 4
    assert len(kinds(graph, "attention")) == 6
    with torch.no_grad():
        shape = tuple(model(source, target).shape)
    last = graph.ops[-1]
    assert graph.tensors[last.inputs[0]].shape(4) == shape
    assert graph.tensors[last.inputs[0]].per_sample == ((1, 0, 0) if batch_first else (0, 1, 0))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_are_seen_through(kind: type[nn.Module]) -> None:
    model = kind(8, 9, 2, batch_first=True)
    graph = BACKEND.capture(model, torch.randn(4, 5, 8), lambda output: output[0].mean())
    gates = 4 if kind is nn.LSTM else 3
    assert matmul_flops(graph, 4) == 2 * 4 * 5 * gates * 9 * (8 + 9 + 9 + 9)
    assert not kinds(graph, "opaque")


class Grouped(nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("key_heads", [1, 2, 6])
def test_grouped_key_heads(key_heads: int) -> None:
    sample = torch.randn(4, 6, 5, 8), torch.randn(4, key_heads, 7, 8), torch.randn(4, key_heads, 7, 8)
    (op,) = kinds(BACKEND.capture(Grouped(), sample, mean_of), "attention")
    query, key, value = op.input_labels
    assert op.output_labels == ((*query[:3], value[3]),)
    assert key[:3] == value[:3]
    assert key[0] == query[0]
    assert key[1] == (query[1] if key_heads > 1 else -1)
    assert {op.role(key[2]), op.role(query[3]), op.role(query[2])} == {"whole"}  # causal: queries know their place
    assert {op.role(label) for label in (query[0], query[1], value[3])} == {"map"}


def test_einsum_matmul_and_what_torch_sums_first() -> None:
    class Einsum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 6, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            w = self.weight
            return (
                torch.einsum("bi,hij->bhj", x, w).sum()
                + torch.einsum("bi,ci->", x, x)
                + torch.einsum("bi,hij,bj->b", x, w, x[:, :5]).sum()
                + torch.einsum("...i,hij->...h", x, w).sum()
                + (x @ w).sum()
                + torch.baddbmm(w, w @ w.transpose(1, 2), w).sum()
            )

    model = Einsum()
    graph = BACKEND.capture(model, torch.randn(4, 6))
    assert matmul_flops(graph, 4) == counted_flops(model, torch.randn(4, 6))
    assert graph.ops[0].labels == ((0, 1), (2, 1, 3), (0, 2, 3))


def test_one_module_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(6, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.inner(x)).mean()

    graph = BACKEND.capture(Twice(), torch.randn(4, 6))
    assert [(c.path, c.parent, c.occurrence) for c in graph.calls] == [
        ("", 0, 0), ("inner", 0, 0), ("inner.0", 1, 0), ("inner", 0, 1), ("inner.0", 3, 1),
    ]  # fmt: skip
    assert [op.call for op in kinds(graph, "contraction")] == [2, 4]


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_compiled_modules_are_captured_as_they_are_written() -> None:
    model = nn.Sequential(torch.compile(nn.Linear(6, 7)), nn.ReLU())
    graph = BACKEND.capture(model, torch.randn(4, 6), mean_of)
    assert [op.name for op in graph.ops] == ["aten.linear", "aten.linear/bias", "aten.relu", "aten.mean"]
    assert [p.name for p in graph.parameters] == ["0._orig_mod.weight", "0._orig_mod.bias"]


def test_a_cache_among_the_inputs_starts_every_run_anew() -> None:
    """What the forward pass writes into its arguments is gone before the next run, and never reaches the caller."""
    cache = transformers.DynamicCache()
    graph = BACKEND.capture(gpt2("sdpa"), {**tokens(4), "past_key_values": cache})
    assert len(graph.inputs) == 2
    assert len(kinds(graph, "attention")) == LAYERS
    assert cache.get_seq_length() == 0


def test_autocast_casts_are_in_every_run() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = BACKEND.capture(nn.Linear(6, 5), torch.randn(4, 6), mean_of)
    (product,) = kinds(graph, "contraction")
    assert {graph.tensors[i].dtype for i in product.inputs} == {"bfloat16"}
    assert graph.tensors[graph.parameters[0].tensor].dtype == "float32"


# -- writes in place -------------------------------------------------------------------------------------------------


def evaluate(graph: Graph, x: torch.Tensor) -> torch.Tensor:
    """Run the ops of a graph of the tests below, whose ops are few, by their names."""
    values: dict[int, Any] = {graph.inputs[0]: x}
    written = {"aten.slice": (slice(None), slice(1, 3)), "aten.select": (slice(None), 0)}
    for op in graph.ops:
        args = [values[i] for i in op.inputs]
        name, _, write = op.name.partition("/")
        shape = graph.tensors[op.outputs[0]].shape(len(x))
        if write and op.kind == "scatter":
            result = args[0].clone()
            result[written[name]] = args[1]
        elif write:
            result = args[0].t() if name == "aten.transpose" else args[0].reshape(shape)
        elif name in written:
            result = args[0][written[name]]
        elif name == "aten.transpose":
            result = args[0].t()
        elif name == "aten.view":
            result = args[0].reshape(shape)
        elif name in ("aten.mul", "aten.mul_", "aten.add_"):
            result = {"aten.mul": args[0] * 2, "aten.mul_": args[0] * 3, "aten.add_": args[0] + 1}[name]
        elif name == "aten.zero_":
            result = torch.zeros(shape)
        elif name == "aten.add":
            result = args[0] + args[1]
        else:
            assert name == "aten.sum", name
            result = args[0].sum()
        assert tuple(result.shape) == shape
        values[op.outputs[0]] = result
    return values[graph.outputs[0]]


class Writes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        early = x[:, 1:3]
        early.transpose(0, 1).add_(1)  # through two views
        x.view(-1).mul_(3)  # through another view: ``early`` sees it
        x[:, 0].zero_()
        return x.sum() + early.sum()


def test_writes_through_views_reach_everything_that_shares_the_memory() -> None:
    model, x = Writes(), torch.randn(4, 6)
    graph = BACKEND.capture(model, x)
    assert torch.allclose(evaluate(graph, x), model(x.clone()))
    produced = [t for op in graph.ops for t in op.outputs]
    assert len(produced) == len(set(produced))


def test_relative_bias_of_t5_is_looked_up_and_reaches_attention() -> None:
    graph = BACKEND.capture(t5("eager"), tokens(4))
    names = [p.name for p in graph.parameters if "relative_attention_bias" in p.name]
    assert len(names) == 2
    for name in names:
        tensor = next(p.tensor for p in graph.parameters if p.name == name)
        (user,) = [op for op in graph.ops if tensor in op.inputs]
        assert user.kind == "gather"
        assert user.role(user.labels[0][0]) == "index"


def test_shifted_labels_are_functional() -> None:
    """T5 makes its decoder's input by writing slices of an empty tensor."""
    graph = BACKEND.capture(t5("sdpa"), tokens(4))
    labels = next(i for i in graph.inputs if graph.tensors[i].name == "labels")
    scatters = kinds(graph, "scatter")
    assert len(scatters) == 2
    made_from_labels = {labels}
    for op in graph.ops:
        if made_from_labels & set(op.inputs):
            made_from_labels |= set(op.outputs)
    assert scatters[0].outputs[0] in made_from_labels
    embedded = [op for op in kinds(graph, "gather") if graph.tensors[op.inputs[0]].fixed == (VOCABULARY, 48)]
    assert any(op.inputs[1] in made_from_labels for op in embedded)


# -- values ----------------------------------------------------------------------------------------------------------


class NeedsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        if x.sum().item() > -1e9:
            x = x * 2
        return self.linear(x).mean()


def test_ops_that_need_values_are_recorded_on_real_tensors() -> None:
    model, sample = NeedsValues(), torch.randn(4, 6)
    before = sample.clone()
    graph = BACKEND.capture(model, sample)
    assert matmul_flops(graph, 5) == 2 * 5 * 6 * 3
    assert "aten.mul" in coverage(graph)
    assert model.runs.item() == 0
    assert torch.equal(sample, before)


def test_ops_that_need_values_are_refused_without_values() -> None:
    with torch.device("meta"):
        inner = NeedsValues()
    with pytest.raises(CaptureError, match=r"_local_scalar_dense in '0'.*depends on values"):
        BACKEND.capture(nn.Sequential(inner), torch.randn(4, 6))
    with pytest.raises(CaptureError, match="depends on values"):
        BACKEND.capture(NeedsValues(), torch.randn(4, 6, device="meta"))


# -- errors ----------------------------------------------------------------------------------------------------------


def test_no_loss() -> None:
    model = nn.Sequential(nn.Linear(6, 2))
    with pytest.raises(CaptureError, match=r"float32 tensor of shape \(2, 2\), and no loss.*loss="):
        BACKEND.capture(model, torch.randn(4, 6))
    graph = BACKEND.capture(model, torch.randn(4, 6), require_loss=False)
    assert [graph.tensors[i].shape(4) for i in graph.outputs] == [(4, 2)]
    with pytest.raises(CaptureError, match="expected a tensor with one entry"):
        BACKEND.capture(model, torch.randn(4, 6), lambda output: output)


def test_a_model_that_branches_on_the_batch() -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x if x.shape[0] == 2 else x.relu()).mean()

    with pytest.raises(CaptureError, match=r"aten.mean in '1' at batch 2 and aten.relu in '1' at batch 3.*batch_dims="):
        BACKEND.capture(nn.Sequential(nn.ReLU(), Branches()), torch.randn(4, 6))


def test_a_dim_that_grows_with_the_square_of_the_batch() -> None:
    class Pairs(nn.Module):
        def __init__(self, *, flat: bool) -> None:
            super().__init__()
            self.flat = flat

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pairs = x @ x.t()
            return (pairs.flatten() if self.flat else pairs).exp().mean()

    with pytest.raises(CaptureError, match=r"aten.flatten in 'the model itself'.*\(4,\) at batch 2 and \(9,\)"):
        BACKEND.capture(Pairs(flat=True), torch.randn(4, 6))
    graph = BACKEND.capture(Pairs(flat=False), torch.randn(4, 6))
    assert matmul_flops(graph, 5) == 2 * 5 * 5 * 6


def test_samples_that_disagree() -> None:
    model = llama("sdpa")
    sample = {**tokens(4), "position_ids": torch.arange(LENGTH)[None]}
    with pytest.raises(CaptureError, match=r"position_ids has 1.*batch_dims=\{'position_ids': None\}"):
        BACKEND.capture(model, sample)
    graph = BACKEND.capture(model, sample, batch_dims={"position_ids": None})
    positions = next(graph.tensors[i] for i in graph.inputs if graph.tensors[i].name == "position_ids")
    assert not positions.has_batch
    with pytest.raises(CaptureError, match="did you mean 'position_ids'"):
        BACKEND.capture(model, sample, batch_dims={"positions": None})
    with pytest.raises(CaptureError, match="no tensor of the sample has a batch dim"):
        BACKEND.capture(model, {"input_ids": 3})


def test_other_bad_input() -> None:
    with pytest.raises(CaptureError, match=r"expected a torch.nn.Module, given function"):
        BACKEND.capture(mean_of, torch.randn(4, 6))
    with pytest.raises(CaptureError, match=r"'0\.weight' has no shape yet"):
        BACKEND.capture(nn.Sequential(nn.LazyLinear(3)), torch.randn(4, 6), mean_of)
    with pytest.raises(CaptureError, match="dim 2 for input, which has 2 dims"):
        BACKEND.capture(nn.Linear(6, 3), torch.randn(4, 6), mean_of, batch_dims=2)


def test_unknown_ops_are_opaque_and_listed() -> None:
    class Transform(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.fft(x).real.mean()

    found = coverage(BACKEND.capture(Transform(), torch.randn(4, 6)))
    assert [name for name, kind in found.items() if kind == "opaque"] == ["aten._fft_r2c"]
    assert coverage()["aten.matmul"] == "contraction"


def test_a_sample_of_one() -> None:
    graph = BACKEND.capture(nn.Linear(6, 3), torch.randn(1, 6), mean_of)
    assert graph.sample_batch == 1
    assert matmul_flops(graph, 1) == 2 * 6 * 3
