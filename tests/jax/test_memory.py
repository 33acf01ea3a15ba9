"""Bytes of a training step in JAX: what plans say before, what the compiler says after, what devices hold."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardwright.jax as sw
from examples import gpt2_flax
from shardwright.backends.jax.memory.step_constants import scaled_sums_bytes
from shardwright.backends.jax.program.flattening import flatten
from shardwright.backends.jax.train import TrainStep
from shardwright.core.model.graph import Graph
from shardwright.core.schedule.actions import Action, Kind

CONFIG = gpt2_flax.Config(n_layer=4, n_head=4, n_embd=64, vocab_size=512, n_positions=64)
LENGTH, MICROBATCH, MICROBATCHES = 64, 4, 4


def create() -> gpt2_flax.GPT2:
    return gpt2_flax.create(CONFIG, seed=0)


@cache
def graph() -> Graph:
    sample = {"input_ids": jax.ShapeDtypeStruct((MICROBATCH, LENGTH), jnp.int32)}
    return sw.capture(nnx.eval_shape(create), sample, gpt2_flax.next_token_loss)


def training(**pins: Any) -> tuple[sw.Plan, TrainStep, Any, dict[str, np.ndarray]]:
    fixed = {"precision": "fp32", "recompute": "none", "shard": 0, "dp": 1, "tp": 1, "microbatch": MICROBATCH}
    devices = pins["pp"]
    cluster = sw.Cluster("cpu", devices_per_node=devices)
    plan = sw.plan(graph(), cluster, batch=MICROBATCH * MICROBATCHES, frameworks=["jax"], **(fixed | pins))
    train = sw.train_step(gpt2_flax.next_token_loss, optax.adamw(1e-3), plan, devices=jax.devices()[:devices])
    batch = np.random.default_rng(0).integers(0, 512, (MICROBATCH * MICROBATCHES, LENGTH)).astype(np.int32)
    return plan, train, train.init(create), {"input_ids": batch}


class Held:
    """Bytes of the live arrays on each device after every action, each buffer once, and what the action's program took
    beside what lay there before."""

    def __init__(self, train: TrainStep, devices: list[jax.Device]) -> None:
        self.train, self.devices = train, devices
        self.before = self.now()
        self.peak = list(self.before)

    def now(self) -> list[int]:
        buffers: list[dict[int, int]] = [{} for _ in self.devices]
        for array in jax.live_arrays():
            for shard in [] if array.is_deleted() else array.addressable_shards:
                if shard.device in self.devices:
                    place = buffers[self.devices.index(shard.device)]
                    place[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
        return [sum(held.values()) for held in buffers]

    def __call__(self, action: Action, rank: int, mark: jax.Array) -> None:
        taken = self.train.pipeline.launches[action.stage][action.kind].run.memory_analysis()
        more = taken.temp_size_in_bytes + taken.output_size_in_bytes - taken.alias_size_in_bytes
        self.peak[rank] = max(self.peak[rank], self.before[rank] + more)
        mark.block_until_ready()
        self.before = self.now()
        self.peak = [max(pair) for pair in zip(self.peak, self.before, strict=True)]


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.slow)])
def test_a_pipeline_holds_what_the_plan_and_the_compiled_step_say(schedule: str) -> None:
    plan, train, state, batch = training(pp=2, schedule=schedule)
    after = train.memory_bytes(state, batch)
    devices = jax.devices()[:2]
    step, leaves = train._step_for(state, batch)
    held = Held(train, devices)
    others = [now - own for now, own in zip(held.before, _bytes_of(state, devices), strict=True)]  # of other tests
    step(state, leaves, held)
    measured = [peak - other for peak, other in zip(held.peak, others, strict=True)]
    for before, said, found in zip(plan.predicted.peak_memory_bytes, after, measured, strict=True):
        assert found <= said <= 1.03 * found
        assert 0.85 * found <= before <= 1.15 * found


def _bytes_of(state: Any, devices: list[jax.Device]) -> list[int]:
    found = dict.fromkeys(devices, 0)
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            found[shard.device] += shard.data.nbytes
    return [found[device] for device in devices]


@cache
def of_one_program(recompute: str) -> tuple[sw.Plan, int]:
    """The plan, and the bytes of the compiled step."""
    plan, train, state, batch = training(pp=1, recompute=recompute)
    (after,) = train.memory_bytes(state, batch)
    return plan, after


@pytest.mark.parametrize(
    "recompute", ["full", *(pytest.param(r, marks=pytest.mark.slow) for r in ("none", "selective"))]
)
def test_a_step_of_one_program_takes_what_the_plan_says(recompute: str) -> None:
    plan, after = of_one_program(recompute)
    assert 0.85 * after <= plan.predicted.peak_memory_bytes[0] <= 1.15 * after


@pytest.mark.slow
def test_what_a_step_takes_is_what_its_compiled_program_says() -> None:
    _, train, state, batch = training(pp=1)
    taken = train.lower(state, batch).compile().memory_analysis()
    assert of_one_program("none")[1] >= taken.argument_size_in_bytes + taken.temp_size_in_bytes


@pytest.mark.parametrize("recompute", [pytest.param("selective", marks=pytest.mark.slow), "full"])
def test_one_program_keeps_nothing_of_what_it_computes_again(recompute: str) -> None:
    """Whose layers are no loop: XLA's CPU compiler computes them again late, and does not keep the first results."""
    plans, held = [], []
    for choice in ("none", recompute):
        plan, after = of_one_program(choice)
        plans.append(plan.predicted.memory_by_stage_rank[0].activations_bytes)
        held.append(after)
    assert held[0] - held[1] > 0.75 * (plans[0] - plans[1]) > 0.25 * held[0]


class Pooled(nnx.Module):
    """Two convolutions with maxima over windows."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Conv(3, 8, (3, 3), rngs=rngs), nnx.Conv(8, 16, (3, 3), rngs=rngs)])
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = nnx.max_pool(nnx.relu(layer(x)), (2, 2), (2, 2))
        return self.head(x.mean((1, 2)))


def test_a_gradient_of_maxima_takes_arrays_of_places() -> None:
    def loss(model: Pooled, batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.square(model(batch["x"])).mean()

    batch = {"x": jnp.ones((8, 32, 32, 3))}
    graph = sw.capture(nnx.eval_shape(lambda: Pooled(nnx.Rngs(0))), batch, loss)
    pins = {"pp": 1, "dp": 1, "tp": 1, "precision": "fp32", "recompute": "none", "loss_scope": "replica"}
    plan = sw.plan(graph, sw.Cluster("cpu"), batch=8, microbatch=8, optimizer="sgd", **pins)  # type: ignore[arg-type]
    train = sw.train_step(loss, optax.sgd(0.1), plan, devices=jax.devices()[:1], log_every=0)
    (after,) = train.memory_bytes(train.init(lambda: Pooled(nnx.Rngs(0))), batch)
    assert 0.97 * after <= plan.predicted.peak_memory_bytes[0] <= 1.05 * after


class Residual(nnx.Module):
    """Two convolutions with the norms of their batch, beside an identity."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.convs = nnx.List([nnx.Conv(16, 16, (3, 3), use_bias=False, rngs=rngs) for _ in range(2)])
        self.norms = nnx.List([nnx.BatchNorm(16, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norms[0](self.convs[0](x)))
        return nnx.relu(x + self.norms[1](self.convs[1](y)))


class ResidualNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.head = nnx.Conv(3, 16, (3, 3), rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
        self.blocks = nnx.List([Residual(rngs) for _ in range(4)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


@pytest.mark.usefixtures("quick_compilation")
def test_steps_of_residual_networks_take_what_plans_say() -> None:
    """Inputs of blocks are made again in the backward, each where it is read, and not all of them as it begins."""

    def loss(model: ResidualNet, batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.square(model(batch["x"])).mean()

    batch = {"x": jnp.ones((8, 32, 32, 3))}
    graph = sw.capture(nnx.eval_shape(lambda: ResidualNet(nnx.Rngs(0))), batch, loss)
    pins = {"pp": 1, "dp": 1, "tp": 1, "precision": "fp32", "loss_scope": "replica", "optimizer": "sgd"}
    for recompute in ("none", "full"):
        plan = sw.plan(graph, sw.Cluster("cpu"), batch=8, microbatch=8, recompute=recompute, **pins)  # type: ignore[arg-type]
        train = sw.train_step(loss, optax.sgd(0.1), plan, devices=jax.devices()[:1], log_every=0)
        (after,) = train.memory_bytes(train.init(lambda: ResidualNet(nnx.Rngs(0))), batch)
        assert after <= plan.predicted.peak_memory_bytes[0] <= 1.05 * after, recompute


@pytest.mark.usefixtures("quick_compilation")
def test_units_keep_what_the_runtime_hands_from_forward_to_backward() -> None:
    """Every unit as a stage: residuals and arrivals of the compiled backward."""
    assert graph().footprints
    units = len(sw.plan(graph(), sw.Cluster("cpu"), batch=MICROBATCH).model.unit_classes)
    _, train, state, batch = training(
        pp=1, virtual_stages=units, stage_starts=range(units), schedule="interleaved-1f1b"
    )  # fmt: skip
    train(state, batch)
    classes = train.plan.model.unit_classes
    for unit, launch in enumerate(train.pipeline.launches):
        backward = launch[Kind.BACKWARD].function
        read = zip(backward.reads, backward.avals, strict=True)
        kept = sum(aval.size * aval.dtype.itemsize for key, aval in read if key[0] in ("kept", "arrival"))
        fixed, each = graph().footprints[classes[unit]].kept
        assert kept == pytest.approx(fixed + each * MICROBATCH, rel=1e-3)  # single numbers: counts, weights of the loss


@pytest.mark.usefixtures("quick_compilation")
def test_stages_in_16_bits_keep_what_the_plan_counts() -> None:
    """Attention keeps its scores in float32 all the same; the parameters of a step are beside those of the state."""
    plan, train, state, batch = training(pp=2, schedule="gpipe", precision="bf16")
    train.memory_bytes(state, batch)
    for use, launches in zip(plan.predicted.memory_by_stage_rank, train.pipeline.launches, strict=True):
        backward = launches[Kind.BACKWARD].function
        read = list(zip(backward.reads, backward.avals, strict=True))
        kept = sum(aval.size * aval.dtype.itemsize for key, aval in read if key[0] in ("kept", "arrival"))
        assert use.activations_bytes == pytest.approx(MICROBATCHES * kept, rel=1e-3)
        summed = sum(aval.size * aval.dtype.itemsize for key, aval in read if key[0] == "gradient")
        assert use.gradients_bytes == pytest.approx(summed, rel=0.01)
    on_both = CONFIG.vocab_size * CONFIG.n_embd  # the embedding, which is the head too
    halves = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params)) // 2 + 2 * on_both
    assert sum(use.parameters_bytes for use in plan.predicted.memory_by_stage_rank) == halves


class Untied(nnx.Module):
    """A head of its own, whose logits are most of what its stage holds."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed, self.head = nnx.Embed(1024, 32, rngs=rngs), nnx.Linear(32, 1024, use_bias=False, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(4)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return self.head(x)


def shifted_loss(model: Untied, batch: dict[str, jax.Array]) -> jax.Array:
    logits, wanted = model(batch["tokens"])[:, :-1], batch["tokens"][:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean()


def test_a_gradient_of_shifted_logits_is_there_in_two_orders_and_before_it_is_padded() -> None:
    given = {"tokens": jnp.zeros((4, 64), jnp.int32)}
    captured = sw.capture(nnx.eval_shape(Untied), given, shifted_loss)
    cluster = sw.Cluster("cpu", devices_per_node=2)
    pins = {"precision": "fp32", "recompute": "none", "shard": 0, "dp": 1, "tp": 1, "schedule": "1f1b"}
    plan = sw.plan(captured, cluster, batch=16, microbatch=4, pp=2, **pins)
    train = sw.train_step(shifted_loss, optax.adamw(1e-3), plan, devices=jax.devices()[:2])
    after = train.memory_bytes(train.init(Untied), {"tokens": np.zeros((16, 64), np.int32)})
    said = plan.predicted.peak_memory_bytes
    logits = 4 * 64 * 1024 * 4
    assert after[1] > 4 * logits
    assert 0.97 * after[1] <= said[1] <= 1.06 * after[1], (said, after)


def test_one_program_computes_the_loss_first_and_its_gradient_in_place() -> None:
    """Neither the logits nor the scatter of the loss are beside the gradient of the logits, padded and in two orders:
    with any of them the step would hold a fourth array of that size."""
    given = {"tokens": jnp.zeros((4, 64), jnp.int32)}
    captured = sw.capture(nnx.eval_shape(Untied), given, shifted_loss)
    cluster = sw.Cluster("cpu", devices_per_node=1)
    pins = {"precision": "fp32", "recompute": "none", "shard": 0, "dp": 1, "tp": 1, "pp": 1, "microbatch": 4}
    plan = sw.plan(captured, cluster, batch=16, **pins)
    train = sw.train_step(shifted_loss, optax.adamw(1e-3), plan, devices=jax.devices()[:1])
    state = train.init(Untied)
    (after,) = train.memory_bytes(state, {"tokens": np.zeros((16, 64), np.int32)})
    logits, weights = 4 * 64 * 1024 * 4, sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
    assert after - 4 * weights < 3.5 * logits
    (said,) = plan.predicted.peak_memory_bytes
    assert 0.99 * after <= said <= 1.03 * after, (said, after)


class Tower(nnx.Module):
    def __init__(self) -> None:
        self.layers = nnx.List([nnx.Linear(32, 32, rngs=nnx.Rngs(layer)) for layer in range(6)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return x


class Wide(nnx.Module):
    """Weights are most of what a step holds."""

    def __init__(self) -> None:
        self.layers = nnx.List([nnx.Linear(512, 512, rngs=nnx.Rngs(layer)) for layer in range(4)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return x


def wide_loss(model: Wide, batch: dict[str, jax.Array]) -> jax.Array:
    return (model(batch["x"]) ** 2).mean()


@pytest.mark.parametrize(
    ("dp", "shard", "microbatches"),
    [
        (2, 0, 4),
        (2, 3, 4),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 0, 1), (1, 0, 4), (2, 1, 4), (2, 2, 4))),
    ],
)
def test_one_program_of_large_weights_takes_what_the_plan_says(dp: int, shard: int, microbatches: int) -> None:
    """The sums of gradients and one gradient on its way; at shard=3 no weight stays whole."""
    captured = sw.capture(nnx.eval_shape(Wide), {"x": jnp.ones((8, 512))}, wide_loss)
    pins = {"precision": "fp32", "recompute": "none", "microbatch": 8, "pp": 1, "tp": 1, "loss_scope": "replica"}
    cluster = sw.Cluster("cpu", devices_per_node=dp)
    plan = sw.plan(captured, cluster, batch=8 * dp * microbatches, dp=dp, shard=shard, optimizer="adamw", **pins)
    train = sw.train_step(wide_loss, optax.adamw(1e-3), plan, devices=jax.devices()[:dp])
    after = train.memory_bytes(train.init(Wide), {"x": np.ones((8 * dp * microbatches, 512), np.float32)})
    for before, found in zip(plan.predicted.peak_memory_bytes, after, strict=True):
        assert 0.98 * found <= before <= 1.03 * found


@pytest.mark.usefixtures("quick_compilation")
def test_neighbours_in_one_stage_keep_what_passes_between_them_once() -> None:
    """A layer for itself keeps what enters it and what its relu makes of that; together, the latter alone."""

    def loss(model: Tower, batch: dict[str, jax.Array]) -> jax.Array:
        return (model(batch["x"]) ** 2).mean()

    captured = sw.capture(Tower(), {"x": jnp.ones((64, 32))}, loss)
    assert captured.kept_twice
    pins = {"precision": "fp32", "recompute": "none", "shard": 0, "dp": 1, "tp": 1, "microbatch": 64, "pp": 2}
    plan = sw.plan(captured, sw.Cluster("cpu", devices_per_node=2), batch=128, schedule="gpipe", **pins)
    train = sw.train_step(loss, optax.sgd(1e-3), plan, devices=jax.devices()[:2])
    train(train.init(Tower()), {"x": jnp.ones((128, 32))})
    for use, launches in zip(plan.predicted.memory_by_stage_rank, train.pipeline.launches, strict=True):
        backward = launches[Kind.BACKWARD].function
        read = zip(backward.reads, backward.avals, strict=True)
        kept = sum(aval.size * aval.dtype.itemsize for key, aval in read if key[0] in ("kept", "arrival"))
        assert use.activations_bytes == pytest.approx(2 * kept, rel=0.1)


def test_what_the_next_stage_has_read_is_on_its_way_no_more() -> None:
    """A gradient that comes back was made after the last forward's message came: the backward is not beside both.
    Messages are most of what the first stage of this model holds."""

    def loss(model: Tower, batch: dict[str, jax.Array]) -> jax.Array:
        return (model(batch["x"]) ** 2).mean()

    devices = jax.devices()[:2]
    captured = sw.capture(Tower(), {"x": jnp.ones((1024, 32))}, loss)
    pins = {"precision": "fp32", "recompute": "none", "shard": 0, "dp": 1, "tp": 1, "microbatch": 1024, "pp": 2}
    plan = sw.plan(captured, sw.Cluster("cpu", devices_per_node=2), batch=2048, schedule="gpipe", **pins)
    train = sw.train_step(loss, optax.sgd(1e-3), plan, devices=devices)
    state, batch = train.init(Tower()), {"x": np.ones((2048, 32), np.float32)}
    after = train.memory_bytes(state, batch)
    step, leaves = train._step_for(state, batch)
    held = Held(train, devices)
    others = [now - own for now, own in zip(held.before, _bytes_of(state, devices), strict=True)]  # of other tests
    step(state, leaves, held)
    for said, peak, other in zip(after, held.peak, others, strict=True):
        assert peak - other <= said <= 1.03 * (peak - other)


def test_what_a_model_computes_in_16_bits_is_counted_as_it_is() -> None:
    """Parameters in fp32, activations in bf16: a plan in bf16 makes nothing of them smaller."""

    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        for name in ("first", "second", "third"):
            with jax.named_scope(name):
                x = jax.nn.gelu(x @ params[name].astype(jnp.bfloat16))
        return x.astype(jnp.float32).mean()

    params = {name: jnp.zeros((64, 64)) for name in ("first", "second", "third")}
    captured = {
        kind: sw.capture(loss, (params, jnp.zeros((8, 64), kind))).footprints for kind in (jnp.bfloat16, jnp.float32)
    }
    assert all(each.wide_share < 0.2 for each in captured[jnp.bfloat16])
    assert max(each.wide_share for each in graph().footprints) > 0.8


@pytest.mark.usefixtures("quick_compilation")
def test_the_memory_of_stages_in_one_program_is_refused_by_name() -> None:
    plan, _, _, batch = training(pp=2, schedule="gpipe")
    train = sw.train_step(
        gpt2_flax.next_token_loss, optax.adamw(1e-3), plan, devices=jax.devices()[:2], one_program=True
    )
    with pytest.raises(sw.ShardwrightError, match="one SPMD program"):
        train.memory_bytes(train.init(create()), batch)


class Recurrent(nnx.Module):
    """Layers that are loops over time."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.RNN(nnx.OptimizedLSTMCell(64, 64, rngs=rngs), rngs=rngs) for _ in range(4)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


def squares(model: Recurrent, batch: dict[str, jax.Array]) -> jax.Array:
    return (model(batch["x"]) ** 2).mean()


@pytest.mark.parametrize("pp", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_loops_over_time_that_are_computed_again_are_so_one_by_one(pp: int) -> None:
    """In the order by time, XLA's CPU compiler runs all of them at once, and a step holds as much as without."""
    taken, predicted = {}, {}
    batch = {"x": np.ones((64, 16, 64), np.float32)}
    sample = {"x": jax.ShapeDtypeStruct((16, 16, 64), jnp.float32)}
    captured = sw.capture(nnx.eval_shape(lambda: Recurrent(nnx.Rngs(0))), sample, squares)
    for recompute in ("none", "full"):
        pins = {"pp": pp, "dp": 1, "tp": 1, "microbatch": 16, "recompute": recompute, "precision": "fp32", "shard": 0}
        cluster = sw.Cluster("cpu", devices_per_node=pp)
        plan = sw.plan(captured, cluster, batch=64, schedule="1f1b", frameworks=["jax"], **pins)
        train = sw.train_step(squares, optax.sgd(0.1), plan, devices=jax.devices()[:pp])
        taken[recompute] = train.memory_bytes(train.init(lambda: Recurrent(nnx.Rngs(0))), batch)[0]
        predicted[recompute] = plan.predicted.peak_memory_bytes[0]
    layer = predicted["none"] - predicted["full"]
    assert taken["none"] - taken["full"] > 0.6 * layer > 0
    assert predicted["full"] > 0.85 * taken["full"]


@pytest.mark.parametrize("masked", [False, True])
def test_a_number_that_scales_what_a_sum_is_part_of_is_an_array(masked: bool) -> None:
    """The gradient of scores behind their softmax, scaled before a product reads it; a choice ends the kernel."""

    def backward(given: jax.Array, softmax: jax.Array, keys: jax.Array) -> jax.Array:
        of_scores = given * softmax - softmax * (given * softmax).sum(-1, keepdims=True)
        if masked:
            of_scores = jnp.where(softmax > 0, of_scores, 0.0)
        return (of_scores.T * 0.25) @ keys

    shapes = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 2 + [jax.ShapeDtypeStruct((8, 4), jnp.float32)]
    program = flatten(jax.make_jaxpr(backward)(*shapes), opens_rules=True)
    assert scaled_sums_bytes(program) == (0 if masked else 8 * 8 * 4)
