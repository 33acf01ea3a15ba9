"""Capture of NNX modules, Linen modules and plain functions."""

import gc
import math
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import shardwright
from examples import gpt2_flax, gpt2_linen
from shardwright.backends.jax import BACKEND
from shardwright.core.errors import CaptureError
from shardwright.core.model.graph import Graph

CONFIG = gpt2_flax.Config(n_layer=3, n_head=4, n_embd=32, vocab_size=96, n_positions=24)
LENGTH = 20

capture = BACKEND.capture


def tokens(batch: int = 4, length: int = LENGTH) -> dict[str, jax.ShapeDtypeStruct]:
    return {"input_ids": jax.ShapeDtypeStruct((batch, length), jnp.int32)}


def gpt2(config: gpt2_flax.Config = CONFIG, length: int = LENGTH) -> Graph:
    model = nnx.eval_shape(lambda: gpt2_flax.create(config))
    return capture(model, tokens(length=length), gpt2_flax.next_token_loss)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return gpt2()


def product_flops(graph: Graph, batch: int) -> int:
    return sum(2 * math.prod(graph.label_sizes(op, batch).values()) for op in graph.ops if op.kind == "contraction")


def test_parameters_have_the_models_names_and_sizes(graph: Graph) -> None:
    model = gpt2_flax.create(CONFIG)
    expected = {
        ".".join(map(str, path)): variable.shape for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
    assert {p.name: graph.tensors[p.tensor].shape(1) for p in graph.parameters} == expected
    assert "h.2.attn.c_attn.kernel" in expected


def test_products_count_the_closed_form(graph: Graph) -> None:
    width, positions = CONFIG.n_embd, 4 * LENGTH
    block = 2 * positions * (3 * width * width + width * width + 8 * width * width)
    head = 2 * positions * width * CONFIG.vocab_size
    assert product_flops(graph, 4) == CONFIG.n_layer * block + head


def test_flops_agree_with_the_compilers_count() -> None:
    """XLA counts what it compiles, elementwise arithmetic too: wide products leave that under 1%."""
    config = gpt2_flax.Config(n_layer=1, n_head=2, n_embd=512, vocab_size=2048, n_positions=16)
    graph = gpt2(config, length=16)
    model = nnx.eval_shape(lambda: gpt2_flax.create(config))
    graphdef, state = nnx.split(model)

    def loss(state: Any, batch: Any) -> Any:
        return gpt2_flax.next_token_loss(nnx.merge(graphdef, state), batch)

    counted = jax.jit(loss).lower(state, tokens(length=16)).cost_analysis()["flops"]
    assert product_flops(graph, 4) == pytest.approx(counted, rel=0.01)


def test_attention_is_one_op_per_block(graph: Graph) -> None:
    found = [op for op in graph.ops if op.kind == "attention"]
    assert [graph.calls[op.call].path for op in found] == ["h.0.attn", "h.1.attn", "h.2.attn"]
    assert not any(t.elements(1) >= LENGTH * LENGTH and t.shape(1)[-2:] == (LENGTH, LENGTH) for t in graph.tensors)


def test_every_op_says_which_module_call_it_ran_in(graph: Graph) -> None:
    paths = {graph.calls[op.call].path for op in graph.ops}
    assert {"wte", "wpe", "h.0.ln_1", "h.1.mlp.c_fc", "h.2.attn.c_proj", "ln_f"} <= paths
    call = next(c for c in graph.calls if c.path == "h.1.mlp.c_fc")
    assert graph.calls[call.parent].path == "h.1.mlp"
    for op in graph.ops:
        for tensor in op.inputs:
            name = graph.tensors[tensor].name
            if graph.tensors[tensor].role == "parameter" and graph.calls[op.call].path:
                assert name.startswith(graph.calls[op.call].path + "."), f"{name} in {graph.calls[op.call].path}"


def test_blocks_are_alike(graph: Graph) -> None:
    def shape_of(block: int) -> list[Any]:
        return [
            (op.kind, op.name, op.labels, [graph.tensors[t].shape(5) for t in op.outputs])
            for op in graph.ops
            if graph.calls[op.call].path.startswith(f"h.{block}")
        ]

    assert len(shape_of(0)) > 10
    assert shape_of(0) == shape_of(1) == shape_of(2)


def test_sizes_are_linear_in_the_batch(graph: Graph) -> None:
    bigger = capture(nnx.eval_shape(lambda: gpt2_flax.create(CONFIG)), tokens(7), gpt2_flax.next_token_loss)
    assert bigger.tensors == graph.tensors
    assert (graph.sample_batch, bigger.sample_batch) == (4, 7)
    logits = next(t for t in graph.tensors if t.shape(9) == (9, LENGTH, CONFIG.vocab_size))
    assert logits.per_sample == (1, 0, 0)


def test_the_loss_is_the_output(graph: Graph) -> None:
    (loss,) = graph.outputs
    assert graph.tensors[loss].shape(8) == ()
    assert loss in graph.producer


def test_capture_leaves_the_model_and_the_libraries_as_they_were() -> None:
    before = (jax.nn.dot_product_attention, jax.nn.softmax, nnx.Linear.__call__, nnx.dot_product_attention)
    model = gpt2_flax.create(CONFIG)
    keys = set(vars(model.h[0]))
    capture(model, tokens(), gpt2_flax.next_token_loss)
    assert (jax.nn.dot_product_attention, jax.nn.softmax, nnx.Linear.__call__, nnx.dot_product_attention) == before
    assert set(vars(model.h[0])) == keys
    with pytest.raises(CaptureError, match="RuntimeError: inside the model"):
        capture(model, tokens(), lambda _: (_ for _ in ()).throw(RuntimeError("inside the model")))
    assert (jax.nn.dot_product_attention, jax.nn.softmax, nnx.Linear.__call__, nnx.dot_product_attention) == before


def test_a_model_larger_than_memory_is_read_from_its_shapes() -> None:
    """65 billion parameters in fp32: 260 GB, were they made."""
    config = gpt2_flax.Config(n_layer=20, n_head=128, n_embd=16384, vocab_size=50304, n_positions=2048)
    graph = gpt2(config, length=2048)
    assert graph.parameter_count() > 60_000_000_000


class Everything(nnx.Module):
    """Attention with dropout, batch statistics, a scanned stack, a rematerialised block, tied weights."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def stack(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(8, 8, rngs=rngs)

        self.mixer = nnx.MultiHeadAttention(2, 8, dropout_rate=0.1, deterministic=False, decode=False, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.statistics = nnx.BatchNorm(8, rngs=rngs)
        self.layers = stack(rngs)
        self.once = nnx.Linear(8, 8, rngs=rngs)
        self.again = nnx.Linear(8, 8, rngs=rngs)
        self.again.kernel = self.once.kernel

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def through(layer: nnx.Linear, x: jax.Array) -> jax.Array:
            return layer(x)

        x = self.statistics(self.drop(self.mixer(x)))
        x = through(self.layers, x)
        x = nnx.remat(lambda module, x: module(x))(self.once, x)
        return jnp.square(self.again(nnx.relu(x))).mean()


@pytest.fixture(scope="module")
def everything() -> Graph:
    return capture(nnx.eval_shape(lambda: Everything(nnx.Rngs(0))), jax.ShapeDtypeStruct((4, 5, 8), jnp.float32))


def test_tied_parameters_are_one(everything: Graph) -> None:
    tied = [p for p in everything.parameters if p.aliases]
    assert [p.names for p in tied] == [("again.kernel", "once.kernel")]
    users = {everything.calls[op.call].path for op in everything.ops if tied[0].tensor in op.inputs}
    assert users == {"once", "again"}


def test_random_and_batch_state_are_buffers(everything: Graph) -> None:
    roles = {t.name: t.role for t in everything.tensors if t.name}
    assert roles["drop.rngs.key"] == "buffer"
    assert roles["statistics.scale"] == "parameter"
    assert not any(p.name.startswith("statistics.mean") for p in everything.parameters)


def test_dropout_is_one_op(everything: Graph) -> None:
    (op,) = [op for op in everything.ops if op.kind == "dropout"]
    assert everything.calls[op.call].path == "drop"
    assert everything.tensors[op.inputs[0]].shape(4) == (4, 5, 8)


def test_attention_given_as_a_default_argument_is_one_op(everything: Graph) -> None:
    assert [everything.calls[op.call].path for op in everything.ops if op.kind == "attention"] == ["mixer"]


def test_a_scan_is_unrolled_and_its_iterations_are_calls(everything: Graph) -> None:
    calls = [c for c in everything.calls if c.path == "layers"]
    assert [c.occurrence for c in calls] == [0, 1, 2]
    products = [op for op in everything.ops if op.kind == "contraction" and everything.calls[op.call].path == "layers"]
    assert [everything.calls[op.call].occurrence for op in products] == [0, 1, 2]
    kernel = next(p.tensor for p in everything.parameters if p.name == "layers.kernel")
    slices = [op for op in everything.ops if kernel in op.inputs]
    assert [(op.kind, op.offsets) for op in slices] == [("slice", (0,)), ("slice", (1,)), ("slice", (2,))]


def test_linen_paths_and_names() -> None:
    graph = capture(*gpt2_linen.model())
    module, sample, _ = gpt2_linen.model()
    count = sum(leaf.size for leaf in jax.tree.leaves(module[1]["params"]))
    assert graph.parameter_count() == count
    assert {"h_1.c_attn.kernel", "wte.embedding"} <= {p.name for p in graph.parameters}
    assert {"h_0", "h_0.ln_1", "h_1.fc_in", "head"} <= {c.path for c in graph.calls}
    assert sum(op.kind == "attention" for op in graph.ops) == 2
    assert graph.sample_batch == sample.shape[0]


class Shared(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        layer = linen.Dense(8, name="layer")
        x = linen.BatchNorm(use_running_average=True)(layer(layer(x)))
        return linen.MultiHeadDotProductAttention(2, name="mixer")(x).sum()


def test_linen_modules_called_twice_and_their_other_collections() -> None:
    x = jax.ShapeDtypeStruct((4, 5, 8), jnp.float32)
    module = Shared()
    graph = capture((module, jax.eval_shape(module.init, jax.random.key(0), x)), x)
    assert [c.occurrence for c in graph.calls if c.path == "layer"] == [0, 1]
    assert {t.name for t in graph.tensors if t.role == "buffer"} == {
        "batch_stats.BatchNorm_0.mean",
        "batch_stats.BatchNorm_0.var",
    }
    assert [graph.calls[op.call].path for op in graph.ops if op.kind == "attention"] == ["mixer"]


def mlp(params: Any, batch: Any) -> Any:
    x = batch["x"]
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return ((x - batch["y"]) ** 2).mean(), x.shape[0]


def mlp_params() -> Any:
    return {"layers": [{"w": np.ones((8, 8), np.float32), "b": np.ones(8, np.float32)} for _ in range(3)]}


def test_a_plain_function() -> None:
    batch = {"x": np.ones((6, 8), np.float32), "y": np.ones((6, 8), np.float32)}

    def weighted(params: Any, batch: Any) -> Any:
        loss, count = mlp(params, batch)
        return loss, jnp.float32(count)

    graph = capture(weighted, (mlp_params(), batch))
    assert [p.name for p in graph.parameters] == [f"layers.{i}.{k}" for i in range(3) for k in "bw"]
    assert len(graph.calls) == 1
    assert [graph.tensors[t].name for t in graph.inputs] == ["x", "y"]
    assert product_flops(graph, 6) == 3 * 2 * 6 * 8 * 8


def test_loops_that_cannot_be_unrolled_are_opaque() -> None:
    def model(params: Any, x: Any) -> Any:
        x = jax.lax.while_loop(lambda v: v.sum() < 0, lambda v: v + params, x)
        x, _ = jax.lax.scan(lambda v, _: (v * params, None), x, None, length=300)
        return x.sum()

    graph = capture(model, (np.float32(2), np.ones((4, 3), np.float32)))
    opaque = [op.name for op in graph.ops if op.kind == "opaque"]
    assert opaque == ["while", "scan of 300 iterations, not unrolled"]


def test_batch_dims_other_than_the_first() -> None:
    def model(params: Any, batch: Any) -> Any:
        return (batch["x"].transpose(1, 0, 2) * batch["scale"]).sum()

    batch = {"x": np.ones((5, 4, 3), np.float32), "scale": np.ones((3,), np.float32)}
    with pytest.raises(CaptureError, match=r"disagree on the batch size.*batch_dims"):
        capture(model, ({}, batch))
    graph = capture(model, ({}, batch), batch_dims={"x": 1, "scale": None})
    assert [graph.tensors[t].per_sample for t in graph.inputs] == [(0,), (0, 1, 0)]
    with pytest.raises(CaptureError, match="names \\['z'\\]"):
        capture(model, ({}, batch), batch_dims={"z": 1})
    with pytest.raises(CaptureError, match="gives x dim 3"):
        capture(model, ({}, batch), batch_dims={"x": 3, "scale": None})


def test_losses_are_found_or_asked_for() -> None:
    x = np.ones((4, 8), np.float32)
    layer = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
    with pytest.raises(CaptureError, match=r"Linear returns no loss but arrays of shapes .*: give capture a loss="):
        capture(layer, x)
    assert capture(layer, x, require_loss=False).tensors[-1].shape(4) == (4, 2)
    by_output = capture(layer, x, lambda y: y.sum())
    by_model = capture(layer, x, lambda model, batch: model(batch).sum())
    assert [op.name for op in by_output.ops] == [op.name for op in by_model.ops]
    by_key = capture(lambda p, b: {"loss": (b * p).sum(), "logits": b}, (np.float32(1), x))
    assert by_key.tensors[by_key.outputs[0]].shape(4) == ()


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(CaptureError, match="captured with its variables"):
        capture(linen.Dense(3), np.ones((4, 8)))
    with pytest.raises(CaptureError, match="the collection 'params'"):
        capture((linen.Dense(3), {}), np.ones((4, 8)))
    with pytest.raises(CaptureError, match="the sample \\(params, batch\\)"):
        capture(mlp, np.ones((4, 8)))
    with pytest.raises(CaptureError, match="a str is no JAX model"):
        capture("gpt2", np.ones((4, 8)))
    with pytest.raises(CaptureError, match="neither an array nor a shape"):
        capture(mlp, (mlp_params(), {"x": "text"}))
    with pytest.raises(CaptureError, match="no array of the sample has a batch dim"):
        capture(mlp, (mlp_params(), {"x": np.float32(1)}))


def test_a_model_that_looks_at_the_batch_size_is_refused() -> None:
    def model(params: Any, x: Any) -> Any:
        for _ in range(x.shape[0]):
            x = x * params
        return x.sum()

    with pytest.raises(CaptureError, match=r"model does not run the same ops.*batch 2"):
        capture(model, (np.float32(2), np.ones((4, 3), np.float32)))


def test_a_graph_keeps_no_array_of_the_model() -> None:
    def begun() -> tuple[Graph, Any]:
        model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        kernel = model.kernel.get_raw_value()
        graph = shardwright.capture(model, jnp.ones((2, 4)), lambda output: (output**2).mean())
        shardwright.plan(graph, shardwright.Cluster("cpu"), batch=2)
        return graph, weakref.ref(kernel)

    graph, kernel = begun()
    gc.collect()
    assert graph.footprints is not None
    assert kernel() is None
