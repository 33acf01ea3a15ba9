"""One model written in both frameworks gets one plan."""

import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
from flax import nnx
from transformers import GPT2Config, GPT2LMHeadModel

import shardwright as sw
import shardwright.jax
from shardwright.backends.torch.program.stage_map import StageMap, offloaded
from shardwright.core.cost.unit_work import WorkCounter, forward_flops
from shardwright.core.model.fold import fold
from tests.twins.capabilities import common

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import gpt2_flax

XL = {"n_layer": 48, "n_embd": 1600, "n_head": 25}
MEDIUM = {"n_layer": 24, "n_embd": 1024, "n_head": 16, "vocab_size": 50304}
SEQUENCE = 1024


def captures(sizes: dict[str, int]) -> tuple[sw.Graph, ...]:
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
        tokens = torch.empty(2, SEQUENCE, dtype=torch.long)
    twin = nnx.eval_shape(lambda: gpt2_flax.create(gpt2_flax.Config(**sizes)))
    batch = {"input_ids": jax.ShapeDtypeStruct((2, SEQUENCE), jnp.int32)}
    return common(
        sw.capture(model, {"input_ids": tokens, "labels": tokens}),
        sw.capture(twin, batch, gpt2_flax.next_token_loss),
    )


@pytest.fixture(scope="module")
def xl() -> tuple[sw.Graph, sw.Graph]:
    return captures(XL)


@pytest.fixture(scope="module")
def medium() -> tuple[sw.Graph, sw.Graph]:
    return captures(MEDIUM)


@pytest.mark.parametrize("batch", [1, 8])
def test_flops_parameters_and_traffic_agree(xl: tuple[sw.Graph, sw.Graph], batch: int) -> None:
    ours, twin = xl
    assert ours.parameter_count() == twin.parameter_count() == 1_557_611_200
    assert forward_flops(ours, batch) == forward_flops(twin, batch)
    totals = []  # in fp32: in 16 bits the one of transformers casts its logits back
    for graph in xl:
        counter = WorkCounter(graph)
        works = [counter.count(unit, batch, "fp32") for unit in fold(graph).units]
        totals.append(
            (sum(w.backward_flops for w in works), sum(w.vector_bytes for w in works), sum(w.kernels for w in works))
        )
    for mine, theirs in zip(*totals, strict=True):
        assert mine == pytest.approx(theirs, rel=0.01)


@pytest.mark.parametrize(
    ("nodes", "pins"),
    [
        pytest.param(64, {}, marks=pytest.mark.slow),
        pytest.param(64, {"pp": 8}, marks=pytest.mark.slow),
        pytest.param(64, {"pp": 4, "tp": 8}, marks=pytest.mark.slow),
        pytest.param(64, {"pp": 8, "tp": 2, "microbatch": 2}, marks=pytest.mark.slow),
        (64, {"pp": 4, "virtual_stages": 3, "schedule": "interleaved-1f1b", "tp": 4}),
        # They keep different activations: PyTorch's twin writes its GELU out, and JAX's attention keeps its scores. So
        # microbatches, schedules and recompute that need more memory would fit one of them.
        (3, {"pp": 12, "virtual_stages": 1, "schedule": "1f1b", "microbatch": 4, "recompute": "none"}),
    ],
)
def test_gpt2_xl_gets_the_same_cuts_and_layouts(xl: tuple[sw.Graph, sw.Graph], nodes: int, pins: dict) -> None:
    cluster = sw.Cluster("h100", nodes=nodes, devices_per_node=8)
    plans = [sw.plan(graph, cluster, batch=512, **pins, frameworks=["torch", "jax"]) for graph in xl]
    comparison = sw.compare(*plans)
    assert comparison.same_decision, comparison.unexpected
    assert not comparison.unexpected


def test_layouts_of_a_width_that_divides_are_megatrons_in_both(medium: tuple[sw.Graph, sw.Graph]) -> None:
    cluster = sw.Cluster("h100", nodes=2, devices_per_node=8)
    ours, twin = (sw.plan(graph, cluster, batch=64, pp=2, tp=8, frameworks=["torch", "jax"]) for graph in medium)
    assert ours.decision.layouts == twin.decision.layouts
    split = sw.Split(1, (1024, 1024, 1024))
    assert ours.parameter_layouts("torch")["transformer.h.0.attn.c_attn.weight"].on("tp") == split
    assert twin.parameter_layouts("jax")["h.0.attn.c_attn.kernel"].on("tp") == split
    assert ours.parameter_layouts("torch")["transformer.wte.weight"].on("tp") == sw.Split(0)
    assert twin.parameter_layouts("jax")["wte.embedding"].on("tp") == sw.Split(0)


def test_a_plan_made_in_one_framework_binds_the_other(medium: tuple[sw.Graph, sw.Graph], tmp_path: Path) -> None:
    ours, twin = medium
    plan = sw.plan(
        ours, sw.Cluster("h100", nodes=2, devices_per_node=8), batch=64, pp=4, tp=2, frameworks=["torch", "jax"]
    )
    plan.save(tmp_path / "plan.json")
    both = sw.Plan.load(tmp_path / "plan.json").rebind(twin)
    mine, theirs = both.stage_calls("torch"), both.stage_calls("jax")
    for a, b in zip(mine, theirs, strict=True):
        assert [c.path.removeprefix("transformer.") for c in a if ".h." in c.path] == [
            c.path for c in b if c.path.startswith("h.")
        ]
    assert len(both.parameter_stages("jax")) == len(both.parameter_stages("torch"))


def test_both_runtimes_take_a_plan_that_offloads(medium: tuple[sw.Graph, sw.Graph]) -> None:
    plan = sw.plan(
        medium[0],
        sw.Cluster("h100", devices_per_node=2),
        batch=8,
        pp=2,
        recompute="full",
        schedule="1f1b",
        frameworks=["torch", "jax"],
    )
    plan = replace(plan, decision=replace(plan.decision, offloaded_units=plan.recomputed_units[:1])).rebind(medium[1])
    (unit,) = plan.decision.offloaded_units
    calls = {(call.path, call.occurrence) for call in plan.binding("torch").units[unit].calls}
    assert offloaded(StageMap.of_plan(plan).policies) == calls
    shardwright.jax.train_step(gpt2_flax.next_token_loss, optax.sgd(0.1), plan, devices=jax.devices()[:2])


def test_a_twin_of_another_size_is_refused(medium: tuple[sw.Graph, sw.Graph], xl: tuple[sw.Graph, sw.Graph]) -> None:
    plan = sw.plan(medium[0], sw.Cluster("h100", devices_per_node=8), batch=8, frameworks=["torch", "jax"])
    with pytest.raises(sw.ShardwrightError, match="26 units against 50"):
        plan.rebind(xl[1])
