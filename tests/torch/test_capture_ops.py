"""Capture of single ops and of modules that do unusual things, against direct runs and by hand."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.backends.torch import BACKEND
from shardwright.backends.torch.capture.ops import coverage
from shardwright.core.errors import CaptureError
from shardwright.core.model.graph import Graph
from tests.comparison import Comparison
from tests.torch.captured import (
    LAYERS,
    LENGTH,
    VOCABULARY,
    counted_flops,
    gpt2,
    kinds,
    llama,
    matmul_flops,
    mean_of,
    t5,
    tokens,
)

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

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
    Comparison().losses(evaluate(graph, x), model(x.clone())).require()
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
