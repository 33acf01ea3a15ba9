"""Capture of PyTorch models, against torch's own flop counter, direct runs, and hand-written expectations."""

import copy
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
from transformers import GPT2Config, GPT2LMHeadModel

import shardwright as sw
from shardwright.backends.torch import BACKEND
from shardwright.core.errors import CaptureError
from shardwright.core.model.graph_document import GraphDocument
from tests.torch.captured import (
    BLOCKS,
    LAYERS,
    LENGTH,
    MODELS,
    counted_flops,
    gpt2,
    kinds,
    llama,
    matmul_flops,
    mean_of,
    tokens,
)

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

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


class CastsItself(nn.Module):
    """A softmax in float32 by the model's own code, a residual in the model's dtype, and a cast that only a model in 16
    bits makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.first(x)
        shares = torch.softmax(scores.float(), -1).type_as(scores)
        found = self.last(scores + shares)
        if found.dtype != torch.float32:
            found = found.float()
        return found.pow(2).mean()


def test_values_that_a_model_casts_to_float32_are_marked() -> None:
    whole = BACKEND.capture(CastsItself(), torch.randn(4, 8))
    graph = whole.for_precision("bf16")
    assert [(op.base_name, graph.tensors[op.outputs[0]].stays_wide) for op in graph.ops] == [
        ("linear", False), ("linear/bias", False), ("to", True), ("softmax", True), ("to", False), ("add", False),
        ("linear", False), ("linear/bias", False), ("to", True), ("pow", True), ("mean", True),
    ]  # fmt: skip
    assert {t.dtype for t in graph.tensors} == {"float32"}
    assert [op.base_name for op in whole.ops if op.kind != "contraction"] == [
        "linear/bias", "softmax", "add", "linear/bias", "pow", "mean",
    ]  # fmt: skip
    assert whole.for_precision("fp32") is whole


class OtherOps(nn.Module):
    """Runs other ops in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return (x.float() if x.dtype == torch.float32 else x.clamp(-1, 1).float()).mean()


def test_a_model_that_runs_other_ops_in_16_bits_is_captured_as_it_is() -> None:
    graph = BACKEND.capture(OtherOps(), torch.randn(4, 8))
    assert "aten.clamp" not in {op.name for op in graph.ops}
    assert not any(tensor.stays_wide for tensor in graph.tensors)
    assert graph.for_precision("bf16") is graph


def test_keys_and_values_that_a_cache_holds_are_marked_and_stay_beside_what_is_computed_again() -> None:
    """The second run of a block is given the cache once more, and makes keys and values anew: those of a block stay
    where one behind it runs again, and of the last block nobody holds them."""
    ids = torch.zeros(2, 16, dtype=torch.long)
    peaks = {}
    for cached in (True, False):
        shape = {"n_layer": 4, "n_head": 2, "n_embd": 32, "vocab_size": 50, "n_positions": 16}
        model = GPT2LMHeadModel(GPT2Config(use_cache=cached, **shape))
        graph = BACKEND.capture(model, {"input_ids": ids, "labels": ids})
        left = [tensor.shape(2) for tensor in graph.tensors if tensor.is_left]
        assert left == ([(2, 2, 16, 16)] * 2 * 4 if cached else [])
        assert GraphDocument.of(graph).graph().tensors == graph.tensors
        pins = {"batch": 4, "microbatch": 2, "pp": 1, "dp": 2, "tp": 1, "recompute": "full", "precision": "fp32"}
        plan = sw.plan(graph, sw.Cluster("cpu", devices_per_node=2), **pins)
        peaks[cached] = plan.predicted.memory[0].activations_bytes
    assert peaks[True] - peaks[False] == 3 * 2 * (2 * 2 * 16 * 16 * 4)


def test_a_single_number_selects_one_entry() -> None:
    class Selecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).index_select(1, torch.tensor(1)).square().mean()

    (op,) = (op for op in sw.capture(Selecting(), torch.zeros(2, 4)).ops if "index_select" in op.name)
    assert op.kind == "gather"
