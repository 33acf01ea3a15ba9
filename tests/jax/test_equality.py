"""Training under a plan gives the unsplit model's losses and gradients."""

import jax
import jax.numpy as jnp
import optax
import pytest

import shardwright.jax as sw
from examples import gpt2_flax
from shardwright.core.model.graph import Graph
from tests.comparison import Comparison
from tests.jax.chains import Run, module_reference, named, recording, require_same_gradients
from tests.jax.plans import CONFIG, MICROBATCH, batches, create, gpt2_graph, megatron, plan_of, weighted_loss

LOSSES = {"mean": gpt2_flax.next_token_loss, "weighted": weighted_loss}


@pytest.fixture(scope="module")
def graph() -> Graph:
    return gpt2_graph()


@pytest.fixture(scope="module")
def references() -> dict[str, Run]:
    return {
        kind: module_reference(loss, create, optax.adamw(1e-3), batches(), MICROBATCH) for kind, loss in LOSSES.items()
    }


CASES = [
    (4, 2, "weighted"),
    *(pytest.param(dp, tp, "mean", marks=pytest.mark.slow) for dp, tp in ((2, 2), (2, 1), (1, 2), (4, 2))),
]


@pytest.mark.parametrize(("dp", "tp", "kind"), CASES)
def test_losses_of_twenty_steps_and_gradients_of_the_first(
    graph: Graph, references: dict[str, Run], dp: int, tp: int, kind: str
) -> None:
    """Losses 1e-5 relative; ‖g − g_ref‖ ≤ 1e-4 · ‖g_ref‖ + 1e-6 · ‖all g_ref‖ for every tensor."""
    plan = megatron(graph, dp, tp, MICROBATCH)
    train = sw.train_step(LOSSES[kind], recording(optax.adamw(1e-3)), plan, devices=jax.devices()[: dp * tp])
    state = train.init(create)
    losses: list[float] = []
    for batch in batches():
        state, loss = train(state, batch)
        if not losses:
            require_same_gradients(named(train.original(state).optimizer[1]), references[kind].gradients)
        losses.append(float(loss))
    Comparison().losses(losses, references[kind].losses, moving=1e-3).require()


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("shard", [*(pytest.param(level, marks=pytest.mark.slow) for level in (1, 2)), 3])
def test_sharded_states_change_nothing(graph: Graph, references: dict[str, Run], shard: int) -> None:
    plan = megatron(graph, 4, 2, MICROBATCH, shard=shard)
    assert plan.decision.shard == shard
    train = sw.train_step(gpt2_flax.next_token_loss, optax.adamw(1e-3), plan)
    state = train.init(create)
    moments = jax.tree.leaves(state.optimizer[0].mu)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in moments)
    assert held <= sum(leaf.nbytes for leaf in moments) / 4 * 1.1
    params = jax.tree.leaves(state.params)
    parameters = sum(leaf.addressable_shards[0].data.nbytes for leaf in params)
    assert (parameters < sum(leaf.nbytes for leaf in params) / 4 * 1.1) == (shard == 3)
    losses = []
    for batch in batches(5):
        state, loss = train(state, batch)
        losses.append(float(loss))
    Comparison().losses(losses, references["mean"].losses[:5]).require()


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("recompute", [pytest.param("selective", marks=pytest.mark.slow), "full"])
def test_recomputed_activations_change_nothing_but_are_not_kept(
    graph: Graph, references: dict[str, Run], recompute: str
) -> None:
    def step(recompute: str) -> tuple[sw.TrainStep, sw.TrainState, str]:
        plan = plan_of(graph, 2, 1, MICROBATCH, recompute=recompute)
        train = sw.train_step(gpt2_flax.next_token_loss, optax.adamw(1e-3), plan, devices=jax.devices()[:2])
        state = train.init(create)
        return train, state, train.lower(state, batches(1)[0]).as_text()

    train, state, program = step(recompute)
    losses = []
    for batch in batches(5):
        state, loss = train(state, batch)
        losses.append(float(loss))
    Comparison().losses(losses, references["mean"].losses[:5]).require()
    # Again in the backward pass: the two products of attention; or those and three of the block's four, as no gradient
    # needs what the last one makes.
    again = {"selective": 2, "full": 5}[recompute] * CONFIG.n_layer
    assert program.count("dot_general") == step("none")[2].count("dot_general") + again


@pytest.mark.usefixtures("quick_compilation")
def test_bf16_computes_in_bf16_and_keeps_fp32_parameters(graph: Graph, references: dict[str, Run]) -> None:
    train = sw.train_step(
        gpt2_flax.next_token_loss, optax.adamw(1e-3), plan_of(graph, precision="bf16"), devices=jax.devices()[:1]
    )
    state, loss = train(train.init(create), batches(1)[0])
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    exact = references["mean"].losses[0]
    assert 0 < abs(float(loss) - exact) < 2e-2 * exact
