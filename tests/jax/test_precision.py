"""16 bits beside float32 parameters: as a loop written by hand computes them, in every form of training."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import shardwright.jax as sw
from shardwright.core.errors import PlanWarning
from tests.comparison import Comparison
from tests.jax import chains, spmd_model
from tests.jax.chains import BATCH, Run, batches, graph_of, maker, module_reference, named, plain_loss, plan_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

COMPUTE = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
STEPS, MICROBATCH, LEARNING_RATE = 20, 2, 1e-2


def by_hand(
    loss: Callable[[Any, Any], jax.Array], params: Any, steps: Sequence[dict[str, np.ndarray]], kind: str, scale: float,
    microbatch: int = MICROBATCH,
) -> Run:  # fmt: skip
    """20 AdamW steps of a plain loop: parameters cast to 16 bits, gradients of microbatches added up in float32,
    parameters updated in float32. ``loss(params, batch)``."""
    optimizer = optax.adamw(LEARNING_RATE)

    def scaled(params: Any, batch: Any) -> Any:
        value = loss(jax.tree.map(lambda p: p.astype(COMPUTE[kind]), params), batch).astype(jnp.float32)
        return value * scale, value

    gradient, update = jax.jit(jax.grad(scaled, has_aux=True)), jax.jit(optimizer.update)
    state, losses, first = optimizer.init(params), [], None
    for batch in steps:
        size = len(next(iter(batch.values())))
        summed, total, count = jax.tree.map(jnp.zeros_like, params), 0.0, size // microbatch
        for start in range(0, size, microbatch):
            found, value = gradient(params, {k: v[start : start + microbatch] for k, v in batch.items()})
            summed, total = jax.tree.map(jnp.add, summed, found), total + float(value)
        mean = jax.tree.map(lambda g: g / (count * scale), summed)  # noqa: B023
        first = first or named(mean)
        updates, state = update(mean, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(total / count)
    return Run(losses, first or {}, named(params))


SCALE = {"bf16": 1.0, "fp16": 2.0**10}
SCALING: dict[str, dict[str, Any]] = {
    "bf16": {}, "fp16": {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": SCALE["fp16"]}},
}  # fmt: skip


@cache
def chain(kind: str) -> Run:
    model = maker(4)()
    model.embed.dtype = COMPUTE[kind]  # that of its results, which is its table's unless it is said
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, batch: Any) -> jax.Array:
        return plain_loss(nnx.merge(graphdef, params, jax.tree.map(lambda leaf: leaf, rest)), batch)

    return by_hand(loss, params, batches(STEPS), kind, SCALE[kind])


@cache
def chain_in_fp32() -> Run:
    return module_reference(plain_loss, maker(4), optax.adamw(LEARNING_RATE), batches(STEPS))


def distance(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    assert one.keys() == other.keys()
    return float(np.sqrt(sum(np.square(one[name].astype(np.float64) - other[name]).sum() for name in one)))


ULP = {"bf16": 2**-7, "fp16": 2**-10}
"""The distance of a number of 16 bits from the next, beside the number, at most."""
NEAR = {"bf16": 0.05, "fp16": 0.3}
"""How far apart parameters may be, in distances of 16 bits from float32. Sums in 16 bits give 0.48 in bf16 and 0.38 in
fp16, the latter less on processors with AVX-512 that have no fp16 of their own, where XLA rounds other values: 0.12."""


def require_as_by_hand(
    kind: str, losses: list[float], params: dict[str, np.ndarray], wanted: Run, exact: Run, *, is_rounded: bool = False
) -> None:
    """Losses and parameters. A loss is a number of 16 bits, and may be the next one. Parameters are much nearer than 16
    bits are to float32, so that no sum and no state is in 16 bits; but no nearer where values are ``is_rounded``: where
    a tensor axis adds up parts of products in 16 bits, or where values are computed again (XLA rounds a value to 16
    bits only where it is not read at once)."""
    assert {array.dtype for array in params.values()} == {np.dtype(np.float32)}
    Comparison().losses(losses, wanted.losses, relative=ULP[kind], moving=1e-2).require()
    found = distance(params, wanted.params) / distance(wanted.params, exact.params)
    assert found < (1.5 if is_rounded else NEAR[kind]), found


CASES: dict[str, dict[str, Any]] = {
    "one device": {"pp": 1},
    "dp 4": {"pp": 1, "dp": 4},
    "dp 4 in groups, shard 1": {"pp": 1, "dp": 4, "shard": 1, "shard_group": 2},
    "dp 4, shard 3": {"pp": 1, "dp": 4, "shard": 3},
    "dp 2 × tp 2, shard 2": {"pp": 1, "dp": 2, "tp": 2, "shard": 2},
    "pp 2": {"pp": 2},
    "pp 2 × dp 4 in groups, shard 3": {"pp": 2, "dp": 4, "shard": 3, "shard_group": 2},
    "pp 2 × dp 2 × tp 2, shard 1, zb-h1": {"pp": 2, "dp": 2, "tp": 2, "shard": 1, "schedule": "zb-h1"},
    "dp 4, recompute": {"pp": 1, "dp": 4, "recompute": "full"},
    "pp 2 × dp 2, recompute": {"pp": 2, "dp": 2, "recompute": "full"},
}
FAST = {
    "bf16": ["dp 4 in groups, shard 1", "dp 4, shard 3", "pp 2 × dp 4 in groups, shard 3", "dp 2 × tp 2, shard 2"],
    "fp16": ["pp 2 × dp 2 × tp 2, shard 1, zb-h1"],
}


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        pytest.param(kind, case, marks=() if case in FAST[kind] else pytest.mark.slow)
        for kind in COMPUTE
        for case in CASES
    ],
)
def test_a_run_in_16_bits_is_the_loop_by_hand(kind: str, case: str) -> None:
    plan = plan_of(chains_graph(), precision=kind, **CASES[case])
    train = sw.train_step(
        plain_loss, optax.adamw(LEARNING_RATE), plan, devices=jax.devices()[: plan.mesh.size], **SCALING[kind]
    )
    state = train.init(maker(4))
    losses = []
    for batch in batches(STEPS):
        state, loss = train(state, batch)
        losses.append(float(loss))
    assert float(state.loss_scale) == SCALE[kind]
    trained = nnx.state(train.params(state, at=jax.devices()[0]), nnx.Param)
    is_rounded = plan.decision.tp > 1 or plan.decision.recompute != "none"
    require_as_by_hand(kind, losses, named(trained), chain(kind), chain_in_fp32(), is_rounded=is_rounded)
    if plan.decision.shard:
        ways = plan.decision.shard_group or plan.decision.dp
        leaf = max(jax.tree.leaves(state.params), key=lambda leaf: leaf.size)
        assert leaf.addressable_shards[0].data.nbytes * ways <= leaf.nbytes, "parameters are sharded between steps"


@cache
def chains_graph() -> Any:
    return graph_of(maker(4))


@pytest.mark.parametrize(("kind", "virtual_stages"), [("bf16", 1), pytest.param("fp16", 2, marks=pytest.mark.slow)])
def test_stages_in_one_program_compute_as_the_loop_by_hand(kind: str, virtual_stages: int) -> None:
    steps = spmd_model.batches(STEPS)
    pp = 4 // virtual_stages
    graph = sw.capture(spmd_model.plain_loss, (jax.eval_shape(spmd_model.plain_params), steps[0]))
    plan = sw.plan(
        graph, sw.Cluster("cpu", devices_per_node=2 * pp), batch=BATCH, pp=pp, dp=2, tp=1, microbatch=MICROBATCH,
        precision=kind, recompute="none", shard=0, virtual_stages=virtual_stages,
        schedule="gpipe" if virtual_stages == 1 else "looped-bfs",
    )  # fmt: skip
    train = sw.train_step(
        spmd_model.plain_loss, optax.adamw(LEARNING_RATE), plan, devices=jax.devices()[: 2 * pp], one_program=True,
        **SCALING[kind],
    )  # fmt: skip
    state = train.init(spmd_model.plain_params())
    losses = []
    for batch in steps:
        state, loss = train(state, batch)
        losses.append(float(loss))
    wanted = by_hand(spmd_model.plain_loss, spmd_model.plain_params(), steps, kind, SCALE[kind])
    exact = chains.reference(
        spmd_model.plain_loss, spmd_model.plain_params(), optax.adamw(LEARNING_RATE), steps, MICROBATCH
    )
    require_as_by_hand(kind, losses, named(train.params(state)), wanted, exact)


def stacked_loss(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
    def layer(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ weights["up"]) @ weights["down"], None

    x, _ = jax.lax.scan(layer, batch["x"] @ params["first"], params["layers"])
    return jnp.square(x @ params["last"] - batch["y"]).mean()


def test_layers_in_one_stack_are_summed_over_replicas_in_float32() -> None:
    """Stages hold rows of the stack, and take copies of those."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"first": (4, 4), "up": (4, 4, 4), "down": (4, 4, 4), "last": (4, 4)}
    made = {name: np.asarray(jax.random.normal(key, shapes[name])) / 3 for name, key in zip(shapes, keys, strict=True)}
    params = {"layers": {name: made.pop(name) for name in ("up", "down")}, **made}
    rng = np.random.default_rng(0)
    batch = {name: rng.standard_normal((8, 4)).astype(np.float32) for name in ("x", "y")}
    found = []
    for pp, dp, pins in ((1, 1, {}), (2, 2, {"shard": 3, "schedule": "1f1b", "virtual_stages": 1})):
        graph = sw.capture(stacked_loss, (params, batch))
        given: dict[str, Any] = {"shard": 0, "recompute": "none", "precision": "bf16"} | pins
        plan = sw.plan(
            graph, sw.Cluster("cpu", devices_per_node=pp * dp), batch=8, pp=pp, dp=dp, tp=1, microbatch=2, **given
        )
        train = sw.train_step(stacked_loss, optax.adamw(LEARNING_RATE), plan, devices=jax.devices()[: pp * dp])
        state = train.init(params)
        for _ in range(5):
            state, loss = train(state, batch)
        found.append((float(loss), named(train.params(state, at=jax.devices()[0]))))
    same = Comparison().losses(found[1][0], found[0][0])
    same.values(found[1][1], found[0][1], relative=1e-5, absolute=1e-6).require()


# --- what is cast


class Seen(nnx.Module):
    """A linear layer with an offset that is float32 and no parameter."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear, self.offset = nnx.Linear(4, 4, rngs=rngs), nnx.Variable(jnp.zeros(4))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(self.linear(x) + self.offset[...])


def seen_loss(model: Seen, batch: dict[str, jax.Array]) -> Any:
    made, count = model(batch["x"]), batch["y"].sum()
    return sw.weighted(jnp.square(made - batch["y"]).sum() / count, count), {"made": made, "y": batch["y"]}


def seen_function(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> Any:
    made = batch["x"] @ params["w"]
    return jnp.square(made - batch["y"]).mean(), {"made": made, "y": batch["y"]}


def seen_linen(params: Any, batch: dict[str, jax.Array]) -> Any:
    made = linen.Dense(4).apply(params, batch["x"])
    return jnp.square(made - batch["y"]).mean(), {"made": made, "y": batch["y"]}


SAMPLE = {"x": np.ones((8, 4), np.float32), "y": np.ones((8, 4), np.float32)}
MODELS: dict[str, tuple[Callable[..., Any], Callable[[], Any], str]] = {
    "module": (seen_loss, lambda: Seen(nnx.Rngs(0)), "float32"),
    "function": (seen_function, lambda: {"w": jnp.ones((4, 4))}, "bfloat16"),
    "linen": (seen_linen, lambda: linen.Dense(4).init(jax.random.key(0), SAMPLE["x"]), "float32"),
}


def small_plan(loss: Callable[..., Any], model: Any, dp: int = 2, microbatch: int = 2, **pins: Any) -> sw.Plan:
    def alone(*given: Any) -> Any:
        found = loss(*given)
        return found[0] if isinstance(found, tuple) else found

    def of_outputs(made: Any) -> Any:
        return jnp.square(made).mean()

    is_module = isinstance(model, nnx.Module)
    graph = sw.capture(model, {"x": SAMPLE["x"]}, of_outputs) if is_module else sw.capture(alone, (model, SAMPLE))
    given = {"recompute": "none", "shard": 0, "precision": "bf16", "pp": 1, "tp": 1} | pins
    return sw.plan(graph, sw.Cluster("cpu", devices_per_node=dp), batch=8, dp=dp, microbatch=microbatch, **given)


@pytest.mark.parametrize("form", list(MODELS))
def test_inputs_of_modules_are_cast_and_the_whole_batch_of_a_plain_function(form: str) -> None:
    """Not the targets that a module does not see, so that losses, counts and other state are as wide as they were."""
    loss, make, targets = MODELS[form]
    train = sw.train_step(loss, optax.sgd(0.1), small_plan(loss, make()), devices=jax.devices()[:2], has_aux=True)
    state, _, aux = train(train.init(make()), SAMPLE)
    assert (aux["made"].dtype, aux["y"].dtype) == (jnp.dtype(jnp.bfloat16), jnp.dtype(targets))
    assert {leaf.dtype for leaf in jax.tree.leaves((state.params, state.other))} <= {jnp.dtype("float32")}


def test_all_products_are_in_16_bits() -> None:
    train = sw.train_step(
        plain_loss, optax.adamw(1e-3), plan_of(chains_graph(), 1, 4, precision="bf16"), devices=jax.devices()[:4]
    )
    program = train.lower(train.init(maker(4)), batches(1)[0]).as_text()
    products = [line for line in program.splitlines() if "dot_general" in line]
    assert products
    assert all("bf16" in line and "f32>" not in line for line in products)


def test_double_precision_and_what_is_not_trained_stay_as_they_are() -> None:
    """Parameters in 16 bits that are trained are float32 between steps; those that are not keep their dtype."""

    def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.square(batch["x"] @ (params["w"] + params["frozen"])).mean()

    params = {"w": jnp.ones((4, 4), jnp.bfloat16), "frozen": jnp.ones((4, 4), jnp.bfloat16)}
    chosen = {"w": True, "frozen": False}
    train = sw.train_step(loss, optax.sgd(0.1), small_plan(loss, params), devices=jax.devices()[:2], wrt=chosen)
    state, _ = train(train.init(params), SAMPLE)
    assert (state.params["w"].dtype, state.params["frozen"].dtype) == (jnp.float32, jnp.bfloat16)
    made = train.init(lambda: params)
    assert (made.params["w"].dtype, made.params["frozen"].dtype) == (jnp.float32, jnp.bfloat16)


def test_a_model_in_its_own_precision_stays_in_it() -> None:
    def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.square(batch["x"].astype(jnp.bfloat16) @ params["w"]).mean()

    params = {"w": jnp.ones((4, 4), jnp.bfloat16)}
    train = sw.train_step(loss, optax.sgd(0.1), small_plan(loss, params, precision="fp32"), devices=jax.devices()[:2])
    state, _ = train(train.init(params), SAMPLE)
    assert state.params["w"].dtype == jnp.bfloat16


def bare(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.square(batch["x"] @ params["w"] - batch["y"]).mean()


def is_narrow(train: sw.TrainStep) -> bool:
    program = train.lower(train.init({"w": jnp.ones((4, 4))}), SAMPLE).as_text()
    return all("xbf16>" in line for line in program.splitlines() if "dot_general" in line)


def test_a_state_with_parameters_in_16_bits_is_another_plans() -> None:
    def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.square(batch["x"] @ params["w"]).mean()

    params = {"w": jnp.ones((4, 4), jnp.bfloat16)}
    own, wide = (
        sw.train_step(loss, optax.adam(0.1), small_plan(loss, params, precision=kind), devices=jax.devices()[:2])
        for kind in ("fp32", "bf16")
    )
    state = own.init(params)
    for go_on in (lambda: wide.held(own.original(state)), lambda: wide.place(state), lambda: wide(state, SAMPLE)):
        with pytest.raises(sw.ShardwrightError, match="parameter w of the state is bfloat16, and this plan computes"):
            go_on()
    _, loss_value = wide(wide.init(own.params(state)), SAMPLE)
    assert np.isfinite(loss_value)


def test_what_nobody_pinned_runs_as_planned_and_is_said() -> None:
    graph = sw.capture(bare, ({"w": jnp.ones((4, 4))}, SAMPLE))
    pins = {"batch": 8, "pp": 1, "dp": 1, "tp": 1, "microbatch": 8}
    plan = sw.plan(graph, sw.Cluster("h100", devices_per_node=1), **pins)
    assert plan.decision.precision == "bf16"
    with pytest.warns(PlanWarning, match="steps compute in bf16, as the plan's devices are faster in it"):
        train = sw.train_step(bare, optax.sgd(0.1), plan, devices=jax.devices()[:1])
    assert is_narrow(train)
    assert sw.plan(graph, sw.Cluster("cpu"), **pins).decision.precision == "fp32"


def test_a_plan_file_computes_in_what_it_says(tmp_path: Any) -> None:
    small_plan(bare, {"w": jnp.ones((4, 4))}).save(tmp_path / "plan.json")
    train = sw.train_step(bare, optax.sgd(0.1), sw.Plan.load(tmp_path / "plan.json"), devices=jax.devices()[:2])
    assert is_narrow(train)


def test_products_in_float32_are_said_with_their_line() -> None:
    def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.square((batch["x"] * jnp.ones(4)) @ params["w"]).mean()

    params = {"w": jnp.ones((4, 4))}
    train = sw.train_step(loss, optax.sgd(0.1), small_plan(loss, params), devices=jax.devices()[:2])
    with pytest.warns(PlanWarning, match=r"1 matrix products of loss are computed in float32.*test_precision\.py:\d+"):
        train(train.init(params), SAMPLE)


def test_a_model_that_does_not_run_in_16_bits_is_refused_and_a_fault_of_the_users_own_is_not() -> None:
    def strict(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        if params["w"].dtype != jnp.float32:
            raise TypeError("w must be float32")
        return jnp.square(batch["x"] @ params["w"]).mean()

    params = {"w": jnp.ones((4, 4))}
    train = sw.train_step(strict, optax.sgd(0.1), small_plan(strict, params), devices=jax.devices()[:2])
    with pytest.raises(sw.ShardwrightError, match=r"strict does not run in bfloat16, .*: w must be float32; .*'fp32'"):
        train(train.init(params), SAMPLE)
    train = sw.train_step(bare, optax.sgd(0.1), small_plan(bare, params), devices=jax.devices()[:2])
    with pytest.raises(KeyError, match="y"):
        train(train.init(params), {"x": SAMPLE["x"]})


def test_a_weight_that_counts_in_16_bits_is_refused() -> None:
    def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> sw.Weighted:
        return sw.weighted(jnp.square(batch["x"] @ params["w"]).sum() / batch["y"].sum(), batch["y"].sum())

    params = {"w": jnp.ones((4, 4))}
    train = sw.train_step(loss, optax.sgd(0.1), small_plan(loss, params), devices=jax.devices()[:2])
    with pytest.raises(sw.ShardwrightError, match="weight in bfloat16, which counts no further than 256"):
        train(train.init(params), SAMPLE)


# --- other models


class Normed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dropout: float):
        self.first, self.second = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.dropout(jax.nn.relu(self.norm(self.first(x)))))


def normed_loss(model: Normed, batch: dict[str, jax.Array]) -> Any:
    found = jnp.square(model(batch["x"]) - batch["y"])
    return found.mean(), {"worst": found.max(-1), "mean": found.mean()}


@pytest.mark.parametrize(("pp", "dp"), [pytest.param(1, 2, marks=pytest.mark.slow), (2, 1)])
def test_batch_norm_dropout_and_metrics(pp: int, dp: int) -> None:
    """Statistics and metrics stay float32; masks are those of the run on one device, whatever the split."""
    rng = np.random.default_rng(0)
    batch = {name: rng.standard_normal((8, 4)).astype(np.float32) for name in ("x", "y")}
    made = []
    for ways in ((1, 1), (pp, dp)):
        model = Normed(nnx.Rngs(0), 0.5)
        graph = sw.capture(model, {"x": SAMPLE["x"]}, lambda made: jnp.square(made).mean())
        plan = sw.plan(
            graph, sw.Cluster("cpu", devices_per_node=ways[0] * ways[1]), batch=8, pp=ways[0], dp=ways[1], tp=1,
            microbatch=4, precision="bf16", recompute="none", shard=0, loss_scope="replica",
        )  # fmt: skip
        train = sw.train_step(
            normed_loss, optax.sgd(0.1), plan, devices=jax.devices()[: ways[0] * ways[1]], has_aux=True
        )
        state = train.init(model)
        for _ in range(3):
            state, loss, aux = train(state, batch)
        trained = train.params(state, at=jax.devices()[0])
        assert trained.norm.mean[...].dtype == jnp.float32
        assert aux["worst"].shape == (8,)
        made.append((float(loss), float(aux["mean"]), np.asarray(trained.norm.scale[...])))
    Comparison("batch norm").values(made[1], made[0], relative=2**-7, absolute=0.0).require()


def test_values_that_change_after_the_first_step_are_followed() -> None:
    factor = 1.0

    def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        return factor * jnp.square(batch["x"] @ params["w"] - 1.0).mean()

    params = {"w": jnp.ones((4, 4))}
    train = sw.train_step(loss, optax.sgd(0.0), small_plan(loss, params), devices=jax.devices()[:2])
    state = train.init(params)
    state, before = train(state, SAMPLE)
    factor = 2.0
    state, after = train(state, SAMPLE)
    assert float(after) == 2 * float(before)


def test_the_first_bad_op_is_named_in_16_bits() -> None:
    def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.log(batch["x"] @ params["w"] - 100.0).mean()

    params = {"w": jnp.ones((4, 4))}
    train = sw.train_step(
        loss, optax.sgd(0.1), small_plan(loss, params), devices=jax.devices()[:2], nonfinite="error", debug="numerics"
    )
    with pytest.raises(sw.ShardwrightError, match="the first NaN was made by log"):
        train(train.init(params), SAMPLE)
