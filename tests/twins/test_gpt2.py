"""GPT-2 in both frameworks: one set of weights, one loss, one plan."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import shardwright as sw  # noqa: E402
from examples import gpt2_flax  # noqa: E402
from shardwright.core.model.graph import Graph  # noqa: E402
from tests.comparison import Comparison  # noqa: E402

CONFIG = gpt2_flax.Config(n_layer=3, n_head=4, n_embd=32, vocab_size=128, n_positions=32)
LENGTH, BATCH = 24, 4


@pytest.fixture(scope="module")
def torch_model() -> Any:
    config = transformers.GPT2Config(
        n_layer=CONFIG.n_layer,
        n_head=CONFIG.n_head,
        n_embd=CONFIG.n_embd,
        vocab_size=CONFIG.vocab_size,
        n_positions=CONFIG.n_positions,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, CONFIG.vocab_size, (BATCH, LENGTH))


@pytest.fixture(scope="module")
def jax_model(torch_model: Any) -> gpt2_flax.GPT2:
    return gpt2_flax.from_torch(CONFIG, {name: value.numpy() for name, value in torch_model.state_dict().items()})


def test_first_losses_agree(torch_model: Any, jax_model: gpt2_flax.GPT2, ids: np.ndarray) -> None:
    tokens = torch.from_numpy(ids)
    expected = float(torch_model(input_ids=tokens, labels=tokens).loss.detach())
    found = float(gpt2_flax.next_token_loss(jax_model, {"input_ids": jnp.asarray(ids)}))
    Comparison().losses(found, expected).require()


def test_first_gradients_agree(torch_model: Any, jax_model: gpt2_flax.GPT2, ids: np.ndarray) -> None:
    tokens = torch.from_numpy(ids)
    torch_model.zero_grad()
    torch_model(input_ids=tokens, labels=tokens).loss.backward()
    gradients = nnx.grad(gpt2_flax.next_token_loss)(jax_model, {"input_ids": jnp.asarray(ids)})
    pairs = (
        (gradients["wte"]["embedding"], torch_model.transformer.wte.weight),
        (gradients["h"][1]["attn"]["c_attn"]["kernel"], torch_model.transformer.h[1].attn.c_attn.weight),
        (gradients["h"][2]["ln_2"]["scale"], torch_model.transformer.h[2].ln_2.weight),
    )
    found, expected = [gradient for gradient, _ in pairs], [weight.grad for _, weight in pairs]
    Comparison().values(found, expected, relative=1e-3, absolute=1e-5).require()


def test_weights_that_do_not_fit_are_refused(torch_model: Any) -> None:
    weights = {name: value.numpy() for name, value in torch_model.state_dict().items()}
    with pytest.raises(KeyError, match=r"transformer\.h\.1\.mlp\.c_fc\.bias"):
        gpt2_flax.from_torch(CONFIG, {k: v for k, v in weights.items() if k != "transformer.h.1.mlp.c_fc.bias"})
    with pytest.raises(ValueError, match=r"wpe\.weight has shape \(3, 32\), expected \(32, 32\)"):
        gpt2_flax.from_torch(CONFIG, weights | {"transformer.wpe.weight": np.zeros((3, 32), np.float32)})


@pytest.fixture(scope="module")
def graphs(torch_model: Any) -> tuple[Graph, Graph]:
    tokens = torch.zeros((BATCH, LENGTH), dtype=torch.long)
    of_torch = sw.capture(torch_model, {"input_ids": tokens, "labels": tokens})
    abstract = nnx.eval_shape(lambda: gpt2_flax.create(CONFIG))
    sample = {"input_ids": jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)}
    return of_torch, sw.capture(abstract, sample, gpt2_flax.next_token_loss)


def test_captured_products_agree(graphs: tuple[Graph, Graph]) -> None:
    def flops(graph: Graph) -> int:
        return sum(2 * math.prod(graph.label_sizes(op, BATCH).values()) for op in graph.ops if op.kind == "contraction")

    of_torch, of_jax = graphs
    assert flops(of_jax) == pytest.approx(flops(of_torch), rel=0.01)
    assert of_jax.parameter_count() == of_torch.parameter_count()
    assert [sum(op.kind == "attention" for op in g.ops) for g in graphs] == [CONFIG.n_layer] * 2


@pytest.mark.parametrize("degrees", [{"pp": 1, "dp": 4, "tp": 2}, {"pp": 2, "dp": 2, "tp": 2}])
def test_one_plan_serves_both(graphs: tuple[Graph, Graph], degrees: dict[str, int]) -> None:
    cluster = sw.Cluster("h100", nodes=1, devices_per_node=8)
    plans = [
        sw.plan(graph, cluster, batch=64, microbatch=2, frameworks=["torch", "jax"], **degrees) for graph in graphs
    ]
    assert plans[0].decision == plans[1].decision
    bound = plans[0].rebind(graphs[1])
    assert bound.decision == plans[1].decision
    assert bound.parameter_layouts("jax") == plans[1].parameter_layouts("jax")


def test_both_compute_the_same_matrices_in_fp8(graphs: tuple[Graph, Graph]) -> None:
    pins = {"batch": 64, "microbatch": 2, "pp": 1, "dp": 8, "tp": 1, "precision": "fp8"}
    cluster = sw.Cluster("h100", nodes=1, devices_per_node=8)
    plans = [sw.plan(graph, cluster, frameworks=["torch", "jax"], **pins) for graph in graphs]
    assert plans[0].decision == plans[1].decision
    assert plans[0].not_in_fp8 == plans[1].not_in_fp8
    bound = plans[0].rebind(graphs[1])
    of_torch, of_jax = (bound.fp8_parameters(name) for name in ("torch", "jax"))
    assert len(of_torch) == len(of_jax) == 4 * CONFIG.n_layer
    assert {name.split(".")[-2] for name in of_torch} == {"c_attn", "c_proj", "c_fc"}
