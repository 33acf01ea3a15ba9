"""Pipelines of JAX models: every schedule gives the unsplit model's losses and gradients, and each device holds its own
stage."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardwright.jax as sw
from shardwright.core.model.graph import Graph
from shardwright.core.schedule import schedule_names
from shardwright.core.schedule.actions import Action, Kind
from tests.comparison import Comparison
from tests.jax.chains import (
    Chain,
    Run,
    batches,
    graph_of,
    loss_fn,
    maker,
    module_reference,
    named,
    plan_of,
    recording,
    require_same_run,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

BLOCKS = 4
STEPS = 3
create = maker(BLOCKS)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(create)


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(1e-2),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2)),
    "masked": lambda: optax.adamw(
        optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10),
        weight_decay=0.1,
        mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
    ),
    "several": lambda: optax.multi_transform(
        {"matrix": optax.adamw(1e-2), "vector": optax.sgd(1e-2, momentum=0.9)},
        lambda params: jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "vector", params),
    ),
    "factored": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.adafactor(1e-2, min_dim_size_to_factor=4)),
}


@cache
def expected(optimizer: str = "adamw") -> Run:
    return module_reference(loss_fn, create, OPTIMIZERS[optimizer](), batches(STEPS))


def run(plan: sw.Plan, optimizer: str = "adamw") -> tuple[sw.TrainStep, sw.TrainState]:
    """Train under the plan, and hold it against the reference."""
    devices = jax.devices()[: plan.mesh.size]
    train = sw.train_step(loss_fn, recording(OPTIMIZERS[optimizer]()), plan, devices=devices)
    return train, require_same_run(train, train.init(create), expected(optimizer), batches(STEPS))


ONE_STAGE = {"gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2", "simple", "interleaved"}
SCHEDULES = [
    *((name, 2, 1) for name in sorted(ONE_STAGE)),
    *((name, 2, 2) for name in sorted(set(schedule_names()) - ONE_STAGE - {"forward-only"})),
]
OFTEN = {"1f1b", "interleaved-1f1b", "dualpipev"}


@pytest.mark.parametrize(
    ("schedule", "pp", "virtual_stages"),
    [case if case[0] in OFTEN else pytest.param(*case, marks=pytest.mark.slow) for case in SCHEDULES],
)
def test_every_schedule(graph: Graph, schedule: str, pp: int, virtual_stages: int) -> None:
    run(plan_of(graph, pp, schedule=schedule, virtual_stages=virtual_stages))


def test_a_split_backward_on_four_stages(graph: Graph) -> None:
    """And stages that are alike are compiled once."""
    train, _ = run(plan_of(graph, 4, schedule="zb-h1", stage_starts=(0, 1, 3, 5)))
    assert train.compiled is not None
    assert train.compiled.compiled < train.compiled.programs


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_stages_are_meshes_of_dp_and_tp(graph: Graph, dp: int, tp: int) -> None:
    run(plan_of(graph, 2, dp, tp))


@pytest.mark.parametrize("recompute", [pytest.param("selective", marks=pytest.mark.slow), "full"])
def test_recomputed_activations_change_nothing(graph: Graph, recompute: str) -> None:
    run(plan_of(graph, 2, recompute=recompute))


def test_some_units_are_recomputed_and_others_kept(graph: Graph) -> None:
    plan = plan_of(graph, 2, recompute="full")
    kept = plan.recomputed_units[::2]
    assert 0 < len(kept) < len(plan.recomputed_units)
    run(replace(plan, decision=replace(plan.decision, kept_units=kept)))


@pytest.mark.parametrize("shard", [*(pytest.param(level, marks=pytest.mark.slow) for level in (1, 2)), 3])
def test_sharded_states_change_nothing(graph: Graph, shard: int) -> None:
    _, state = run(plan_of(graph, 2, 2, shard=shard))
    moments = jax.tree.leaves(state.optimizer[0][0].mu)
    assert sum(m.addressable_shards[0].data.nbytes for m in moments) < 0.6 * sum(m.nbytes for m in moments)


@pytest.mark.parametrize(
    "optimizer",
    ["clipped", *(pytest.param(name, marks=pytest.mark.slow) for name in ("masked", "several", "factored"))],
)
def test_optimizers_are_cut_with_the_model(graph: Graph, optimizer: str) -> None:
    train, state = run(plan_of(graph, 3, stage_starts=(0, 2, 4)), optimizer)
    after = named(nnx.state(train.params(state), nnx.Param))
    Comparison(optimizer).values(after, expected(optimizer).params, relative=2e-3, absolute=2e-5).require()


def test_every_device_holds_its_stage_alone(graph: Graph) -> None:
    plan = plan_of(graph, 4, 2)
    train, state = run(plan)
    stages = plan.parameter_stages("jax")
    for tree in (state.params, state.optimizer[0][0].mu, state.optimizer[0][0].nu):
        for path, variable in nnx.to_flat_state(tree):
            stage = stages[".".join(map(str, path))][0]
            held = {shard.device for shard in variable.get_value().addressable_shards}
            assert held == set(jax.devices()[2 * stage : 2 * stage + 2]), path
    given = train.params(state)
    assert isinstance(given, Chain)
    assert given.blocks[0].up.kernel.get_value().shape == (8, 16)


def test_an_init_function_is_run_by_each_stage_for_itself(graph: Graph) -> None:
    train = sw.train_step(loss_fn, optax.adamw(1e-3), plan_of(graph, 2), devices=jax.devices()[:2])
    made, given = train.init(create), train.init(create())
    for one, other in zip(jax.tree.leaves(made.params), jax.tree.leaves(given.params), strict=True):
        assert one.sharding == other.sharding
    found, wanted = jax.tree.leaves(made.params), jax.tree.leaves(given.params)
    Comparison().values(found, wanted, relative=1e-5, absolute=1e-7).require()


def test_dropout_does_not_depend_on_the_split() -> None:
    """A mask is a function of seed, step and global microbatch: any pipeline gives the losses of one device."""
    noisy = maker(2, 0.4)
    graph = graph_of(noisy)

    def losses(pp: int, dp: int, **pins: Any) -> list[float]:
        plan = plan_of(graph, pp, dp, **pins)
        train = sw.train_step(loss_fn, optax.sgd(0.1), plan, devices=jax.devices()[: pp * dp])
        state = train.init(noisy)
        found = []
        for batch in batches(3):
            state, loss = train(state, batch)
            found.append(float(loss))
        return found

    alone = losses(1, 1)
    Comparison().losses(losses(2, 1), alone).require()
    Comparison().losses(losses(2, 2, recompute="full"), alone).require()


@pytest.mark.parametrize(
    "axis_type", [pytest.param(jax.sharding.AxisType.Auto, marks=pytest.mark.slow), jax.sharding.AxisType.Explicit]
)
def test_a_mesh_of_the_users_is_theirs_alone(graph: Graph, axis_type: jax.sharding.AxisType) -> None:
    """Whatever its axis types: stages have meshes of their own. Parameters may come from it."""
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(axis_type, axis_type), devices=jax.devices()[:4])
    graphdef, params, rest = nnx.split(create(), nnx.Param, ...)
    params = jax.device_put(params, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    train = sw.train_step(loss_fn, optax.adamw(1e-2), plan_of(graph, 2), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        state = train.init(nnx.merge(graphdef, params, rest))
        state, loss = train(state, batches(1)[0])
        train.params(state)
        together = train.params(state, at=jax.devices()[0])
    assert all(leaf.devices() == {jax.devices()[0]} for leaf in jax.tree.leaves(nnx.state(together, nnx.Param)))
    Comparison().losses(float(loss), expected().losses[0]).require()


def test_a_step_is_few_dispatches(graph: Graph) -> None:
    """One for each action, one to start a stage's sums, two to update it: what stages have in common, and the rest; and
    one for the gradients' norm."""
    train, state = run(plan_of(graph, 2))
    train(state, batches(1)[0])
    assert train.counts is not None
    assert train.counts.dispatches == 2 * (8 + 8) + 2 + 2 * 2 + 1


def test_gradients_and_the_state_are_changed_in_place(graph: Graph) -> None:
    """What a backward adds to and what an update replaces is donated: their results take no memory of their own."""
    train = sw.train_step(loss_fn, optax.adamw(1e-3), plan_of(graph, 2), devices=jax.devices()[:2])
    first = train.init(create)
    old = jax.tree.leaves((first.params, first.optimizer))
    state, _ = train(first, batches(1)[0])
    assert all(leaf.is_deleted() for leaf in old)

    def reused(run: Any) -> int:
        return int(run.memory_analysis().alias_size_in_bytes)

    params = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
    assert sum(reused(stage[Kind.BACKWARD].run) for stage in train.pipeline.launches) >= params
    assert sum(reused(piece.run) for piece in train.pipeline.update.pieces) >= 3 * params  # and both moments


def test_a_measured_timeline_has_every_action_once(graph: Graph) -> None:
    """In the schedule's own order on every rank, each after what it reads."""
    plan = plan_of(graph, 2, schedule="zb-h1")
    train, state = run(plan)
    _, loss, timeline = train.measure(state, batches(1)[0])
    assert np.isfinite(float(loss))
    table = plan.build_schedule().table
    for rank in range(2):
        # Stage 0 sends no gradient further back, so its input gradients are nothing to run.
        expected = [a for a in table[rank] if not (rank == 0 and a.kind == "I")]
        assert list(timeline.actions[rank]) == expected
        assert (timeline.start_s[rank][1:] >= timeline.end_s[rank][:-1]).all()
    ends = [dict(zip(timeline.actions[r], timeline.end_s[r], strict=True)) for r in range(2)]
    starts = dict(zip(timeline.actions[1], timeline.start_s[1], strict=True))
    for m in range(plan.microbatches):
        assert starts[Action.parse(f"1F{m}")] >= ends[0][Action.parse(f"0F{m}")]
    assert 0 < timeline.makespan_s < 60


def test_the_given_arrays_survive(graph: Graph) -> None:
    """Also where one device of several that hold an array had it already."""
    plan = plan_of(graph, 2, 2, 2)
    train = sw.train_step(loss_fn, optax.sgd(0.1), plan, devices=jax.devices()[: plan.mesh.size])
    given = create()
    train(train.init(given), batches(1)[0])
    Comparison().equal(nnx.state(given, nnx.Param), nnx.state(create(), nnx.Param)).require()


# --- bad input


def test_a_donated_state_is_refused(graph: Graph) -> None:
    train = sw.train_step(loss_fn, optax.sgd(0.1), plan_of(graph, 2), devices=jax.devices()[:2])
    before = train.init(create)
    train(before, batches(1)[0])
    with pytest.raises(sw.ShardwrightError, match="go on with the state that the step returned"):
        train(before, batches(1)[0])


def test_wrong_number_of_devices(graph: Graph) -> None:
    with pytest.raises(sw.ShardwrightError, match=r"for 4 devices \(pp 2 × dp 2 × tp 1\), and there are 8: give 4"):
        sw.train_step(loss_fn, optax.sgd(0.1), plan_of(graph, 2, 2))


def test_a_schedule_that_does_not_train(graph: Graph) -> None:
    with pytest.raises(sw.ShardwrightError, match="no backward"):
        plan_of(graph, 2, schedule="forward-only")


def test_a_loss_that_closes_over_parameters(graph: Graph) -> None:
    other = create()

    def closed(model: Chain, batch: dict[str, jax.Array]) -> jax.Array:
        return loss_fn(other, batch).value + 0.0 * model.norm.scale.get_value().sum()

    train = sw.train_step(closed, optax.sgd(0.1), plan_of(graph, 2), devices=jax.devices()[:2])
    with pytest.raises(sw.ShardwrightError, match=r"closes over an array .* of parameter"):
        train(train.init(create), batches(1)[0])


def test_a_parameter_that_the_loss_leaves_out(graph: Graph) -> None:
    def without_norm(model: Chain, batch: dict[str, jax.Array]) -> jax.Array:
        first = x = model.embed(batch["x"])
        for block in model.blocks:
            x = block(x, first)
        return model.embed.attend(x).mean()

    train = sw.train_step(without_norm, optax.sgd(0.1), plan_of(graph, 2), devices=jax.devices()[:2])
    with pytest.raises(sw.ShardwrightError, match=r"no stage uses parameter norm\.(bias|scale).*leave it out"):
        train(train.init(create), batches(1)[0])


def test_side_effects_in_order_across_a_cut(graph: Graph) -> None:
    from jax.experimental import io_callback

    def noisy(model: Chain, batch: dict[str, jax.Array]) -> jax.Array:
        first = x = model.embed(batch["x"])
        for block in model.blocks:
            x = block(x, first)
            io_callback(lambda value: None, None, jax.lax.stop_gradient(x.sum()), ordered=True)
        return jnp.mean(model.embed.attend(model.norm(x)))

    train = sw.train_step(noisy, optax.sgd(0.1), plan_of(graph, 2), devices=jax.devices()[:2])
    with pytest.raises(sw.ShardwrightError, match=r"fixed order .* on stages \[0, 1\].*ordered=False"):
        train(train.init(create), batches(1)[0])


def test_a_step_that_does_not_compile_leaves_the_state_as_it_was(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says so again when it is asked again, whichever of its programs it was."""
    train = sw.train_step(loss_fn, OPTIMIZERS["adamw"](), plan_of(graph, 2), devices=jax.devices()[:2])
    state = train.init(create)
    (batch,) = batches(1)
    with monkeypatch.context() as broken:
        real = jax.stages.Lowered.compile

        def compile_(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
            if len(jax.tree.leaves(lowered.in_avals)) > 3 * len(jax.tree.leaves(state.params)) // 2:  # the update
                raise RuntimeError("out of registers")
            return real(lowered)

        broken.setattr(jax.stages.Lowered, "compile", compile_)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="out of registers"):
                train(state, batch)
    again = sw.train_step(loss_fn, OPTIMIZERS["adamw"](), plan_of(graph, 2), devices=jax.devices()[:2])
    _, loss = again(state, batch)
    assert float(loss) == pytest.approx(expected().losses[0], rel=1e-5)
