"""Training under a plan: what each device holds, functions of every form, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import shardwright.jax as sw
from examples import gpt2_flax, gpt2_linen
from shardwright.core.errors import PlanError
from shardwright.core.model.graph import Graph
from tests.comparison import Comparison
from tests.jax.chains import named
from tests.jax.plans import BATCH, CONFIG, LENGTH, batches, create, gpt2_graph, megatron, plan_of

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def graph() -> Graph:
    return gpt2_graph()


# --- shares


def share(tree: Any, device: jax.Device) -> int:
    """Bytes of a pytree that a device holds."""
    return sum(
        piece.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for piece in leaf.addressable_shards
        if piece.device == device
    )


def test_every_device_holds_its_share(graph: Graph) -> None:
    plan = megatron(graph, 4, 2)
    train = sw.train_step(gpt2_flax.next_token_loss, optax.adamw(1e-3), plan)
    state, _ = train(train.init(create), batches(1)[0])
    split = {name for name, layout in plan.parameter_layouts("jax").items() if not layout.is_replicated}
    sizes = {name: leaf.nbytes for name, leaf in named(state.params).items()}
    expected = sum(size // 2 if name in split else size for name, size in sizes.items())
    assert expected < 0.6 * sum(sizes.values())
    for device in jax.devices():
        assert share(state.params, device) == expected
        assert share(state.optimizer[0].mu, device) == expected
        assert share(state.optimizer[0].nu, device) == expected
    kernel = dict(nnx.to_flat_state(state.params))["h", 0, "mlp", "c_fc", "kernel"].get_value()
    assert {s.data.shape for s in kernel.addressable_shards} == {(CONFIG.n_embd, 2 * CONFIG.n_embd)}


def test_an_init_function_never_makes_the_whole_on_one_device(graph: Graph) -> None:
    plan = megatron(graph, 4, 2)
    train = sw.train_step(gpt2_flax.next_token_loss, optax.adamw(1e-3), plan)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(create(), nnx.Param)))
    compiled = train.lower_init(create).compile()
    assert compiled.memory_analysis().output_size_in_bytes < 0.6 * whole
    program, width = compiled.as_text(), CONFIG.n_embd
    for shape in ((width, 4 * width), (4 * width, width), (width, 3 * width)):  # and no device makes one to cut it
        assert f"[{shape[0]},{shape[1]}]" not in program
    assert f"f32[{width},{2 * width}]" in program
    made, given = train.init(create), train.init(create())
    found, wanted = jax.tree.leaves(made.params), jax.tree.leaves(given.params)
    Comparison().values(found, wanted, relative=1e-5, absolute=1e-7).require()


# --- plain functions


def mlp(params: Any, batch: Any) -> Any:
    x = jnp.tanh(batch["x"] @ params["w0"]) @ params["w1"]
    return ((x - batch["y"]) ** 2).mean()


def mlp_params() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    return {"w0": jax.random.normal(keys[0], (8, 16)), "w1": jax.random.normal(keys[1], (16, 4))}


def mlp_batch(size: int = BATCH) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {"x": rng.standard_normal((size, 8)).astype(np.float32), "y": np.ones((size, 4), np.float32)}


@pytest.fixture(scope="module")
def mlp_graph() -> Graph:
    return sw.capture(mlp, (jax.eval_shape(mlp_params), mlp_batch()))


def test_a_plain_function_and_its_params(mlp_graph: Graph) -> None:
    train = sw.train_step(mlp, optax.sgd(0.1), plan_of(mlp_graph, 4, 2))
    given = mlp_params()
    state, loss = train(train.init(given), mlp_batch())
    expected, gradients = jax.value_and_grad(mlp)(given, mlp_batch())
    Comparison().losses(float(loss), float(expected)).require()
    wanted = {name: value - 0.1 * gradients[name] for name, value in given.items()}
    Comparison().values(train.params(state), wanted, relative=1e-4, absolute=1e-6).require()


def test_a_linen_module_and_its_variables() -> None:
    (module, shapes), sample, loss = gpt2_linen.model()
    graph = sw.capture((module, shapes), sample, loss)
    tokens = np.random.default_rng(0).integers(0, 256, (8, 32), np.int32)

    def loss_fn(variables: Any, batch: Any) -> Any:
        return loss(lambda ids: module.apply(variables, ids), batch)

    def create() -> Any:
        return module.init(jax.random.key(0), tokens)

    train = sw.train_step(loss_fn, optax.adamw(1e-3), plan_of(graph, 4, 2, 1, batch=8))
    state = train.init(create)
    expected = float(loss_fn(create(), tokens))
    state, first = train(state, tokens)
    state, second = train(state, tokens)
    assert float(first) == pytest.approx(expected, rel=1e-5)
    assert float(second) < float(first)


def test_a_function_of_a_linen_modules_variables_trains_as_captured() -> None:
    module = linen.Dense(4)
    batch = jnp.ones((4, 8))
    variables = module.init(jax.random.key(0), batch)

    def loss_fn(variables: Any, batch: Any) -> Any:
        return jnp.mean(module.apply(variables, batch) ** 2)

    train = sw.train_step(loss_fn, optax.sgd(0.1), plan_of(sw.capture(loss_fn, (variables, batch)), 4, 2, 1, batch=4))
    _, loss = train(train.init(variables), batch)
    assert float(loss) == pytest.approx(float(loss_fn(variables, batch)), rel=1e-5)


def test_random_keys_do_not_depend_on_the_split(mlp_graph: Graph) -> None:
    """A mask is a function of seed, step and global microbatch: any dp gives the losses of one device."""

    def noisy(params: Any, batch: Any, *, rngs: Any = None) -> Any:
        kept = jax.random.bernoulli(rngs, 0.5, batch["x"].shape)
        return mlp(params, batch | {"x": batch["x"] * kept})

    def losses(dp: int, tp: int, seed: int = 0) -> list[float]:
        train = sw.train_step(noisy, optax.sgd(0.0), plan_of(mlp_graph, dp, tp), devices=jax.devices()[: dp * tp])
        state = train.init(mlp_params(), seed=seed)
        found = []
        for _ in range(3):
            state, loss = train(state, mlp_batch())
            found.append(float(loss))
        return found

    alone = losses(1, 1)
    assert len(set(alone)) == 3, "every step draws anew"
    assert losses(1, 1, seed=1) != alone
    Comparison().losses(losses(4, 1), alone).require()
    Comparison().losses(losses(2, 2), alone).require()


def test_dropout_of_a_module_does_not_depend_on_the_split() -> None:
    config = gpt2_flax.Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16, dropout=0.3)
    sample = {"input_ids": jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)}
    graph = sw.capture(nnx.eval_shape(lambda: gpt2_flax.create(config)), sample, gpt2_flax.next_token_loss)
    batch = {"input_ids": batches(1)[0]["input_ids"] % 32}

    def losses(dp: int, tp: int) -> list[float]:
        plan = plan_of(graph, dp, tp)
        train = sw.train_step(gpt2_flax.next_token_loss, optax.sgd(0.0), plan, devices=jax.devices()[: dp * tp])
        state = train.init(lambda: gpt2_flax.create(config))
        found = []
        for _ in range(2):
            state, loss = train(state, batch)
            found.append(float(loss))
        return found

    alone = losses(1, 1)
    assert alone[0] != alone[1]
    Comparison().losses(losses(4, 2), alone).require()


class Normalised(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.5, rngs=rngs)
        self.last = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.norm(self.first(x)))


def test_batch_statistics_follow_the_microbatches() -> None:
    def loss_fn(model: Normalised, batch: Any) -> jax.Array:
        return ((model(batch["x"]) - batch["y"]) ** 2).mean()

    def create() -> Normalised:
        return Normalised(nnx.Rngs(0))

    graph = sw.capture(nnx.eval_shape(create), mlp_batch(), loss_fn)
    train = sw.train_step(
        loss_fn, optax.sgd(0.1), plan_of(graph, 2, 1, 4, loss_scope="replica"), devices=jax.devices()[:2]
    )
    state, _ = train(train.init(create), mlp_batch())
    replicas = []
    for rows in np.split(mlp_batch()["x"], 2):  # each replica sees its microbatches in turn; then their mean is kept
        alone = create()
        for x in np.split(rows, 2):
            alone(x)
        replicas.append(np.asarray(alone.norm.mean.get_value()))
    mean = train.params(state).norm.mean.get_value()
    Comparison().values(mean, np.mean(replicas, 0), relative=1e-4, absolute=1e-6).require()


def test_state_beside_the_parameters(mlp_graph: Graph) -> None:
    def counting(params: Any, batch: Any, *, state: Any = None) -> Any:
        return mlp(params, batch), {"seen": state["seen"] + 1, "mean": batch["x"].mean()}

    train = sw.train_step(counting, optax.sgd(0.1), plan_of(mlp_graph, 2, 1), devices=jax.devices()[:2])
    state = train.init(mlp_params(), state={"seen": jnp.zeros((), jnp.int32), "mean": jnp.zeros(())})
    state, _ = train(state, mlp_batch())
    assert int(state.other["seen"]) == 4
    last = np.concatenate([mlp_batch()["x"][6:8], mlp_batch()["x"][14:16]])
    Comparison().losses(float(state.other["mean"]), last.mean()).require()


def test_loss_scope_global_sees_all_replicas(mlp_graph: Graph) -> None:
    def contrast(params: Any, batch: Any) -> Any:
        x = batch["x"] @ params["w0"] @ params["w1"]
        return ((x[:, None] - x[None]) ** 2).mean()

    def loss(dp: int, microbatch: int, scope: Any) -> float:
        plan = plan_of(mlp_graph, dp, 1, microbatch, loss_scope=scope)
        reduction = "mean" if scope == "replica" else None  # each replica's microbatch by itself is what is meant
        train = sw.train_step(contrast, optax.sgd(0.1), plan, devices=jax.devices()[:dp], reduction=reduction)
        return float(train(train.init(mlp_params()), mlp_batch())[1])

    whole = float(contrast(mlp_params(), mlp_batch()))
    assert loss(4, 4, "global") == pytest.approx(whole, rel=1e-5)
    assert loss(4, 4, "replica") != pytest.approx(whole, rel=1e-2)
    assert loss(4, 4, "replica") == pytest.approx(loss(1, 4, "replica"), rel=1e-5)


def test_batch_dims_other_than_the_first(mlp_graph: Graph) -> None:
    def turned(params: Any, batch: Any) -> Any:
        return mlp(params, {"x": batch["x"].T, "y": batch["y"]})

    batch = mlp_batch()
    train = sw.train_step(turned, optax.sgd(0.1), plan_of(mlp_graph, 4, 2), batch_dims={"x": 1})
    _, loss = train(train.init(mlp_params()), batch | {"x": batch["x"].T})
    assert float(loss) == pytest.approx(float(mlp(mlp_params(), batch)), rel=1e-5)


def test_the_executable_of_the_backend(mlp_graph: Graph) -> None:
    from shardwright.backends import registry

    backend = registry.load("jax")
    run = backend.compile(plan_of(mlp_graph, 4, 2), mlp_params, loss=mlp, optimizer=optax.sgd(0.1))
    first = run.step(mlp_batch())
    assert first == pytest.approx(float(mlp(mlp_params(), mlp_batch())), rel=1e-5)
    assert run.step(mlp_batch()) < first
    assert {name: value.shape for name, value in run.whole_parameters().items()} == {"w0": (8, 16), "w1": (16, 4)}


# --- bad input


@pytest.mark.parametrize("dp", [1, 4])
def test_the_given_arrays_survive_and_a_donated_state_is_refused(mlp_graph: Graph, dp: int) -> None:
    given = mlp_params()
    train = sw.train_step(mlp, optax.sgd(0.1), plan_of(mlp_graph, dp), devices=jax.devices()[:dp])
    before = train.init(given)
    train(before, mlp_batch())
    assert np.isfinite(np.asarray(given["w0"])).all()
    with pytest.raises(sw.ShardwrightError, match=r"already given to a step.*go on with the state that the step"):
        train(before, mlp_batch())
    with pytest.raises(sw.ShardwrightError, match="already given to a step"):
        train.params(before)


def test_wrong_number_of_devices(mlp_graph: Graph) -> None:
    with pytest.raises(sw.ShardwrightError, match=r"for 4 devices \(pp 1 × dp 2 × tp 2\), and there are 8"):
        sw.train_step(mlp, optax.sgd(0.1), plan_of(mlp_graph, 2, 2))
    with pytest.raises(sw.ShardwrightError, match=r"for 4 devices .* and there are 3: plan for fewer"):
        sw.train_step(mlp, optax.sgd(0.1), plan_of(mlp_graph, 2, 2), devices=jax.devices()[:3])


def test_a_batch_of_another_size(mlp_graph: Graph) -> None:
    train = sw.train_step(mlp, optax.sgd(0.1), plan_of(mlp_graph, 4, 2))
    state = train.init(mlp_params())
    with pytest.raises(sw.ShardwrightError, match="a batch of 14 samples was given, and the plan is for 16"):
        train(state, mlp_batch(14))
    train(state, mlp_batch())


def test_parameters_of_another_model(mlp_graph: Graph) -> None:
    train = sw.train_step(mlp, optax.sgd(0.1), plan_of(mlp_graph, 4, 2))
    with pytest.raises(sw.ShardwrightError, match="w2") as error:
        train.init({"w0": jnp.ones((8, 16)), "w2": jnp.ones((16, 4))})
    assert "w1" in str(error.value)
    with pytest.raises(sw.ShardwrightError, match=r"w1.*\(16, 5\)"):
        train.init({"w0": jnp.ones((8, 16)), "w1": jnp.ones((16, 5))})
    with pytest.raises(sw.ShardwrightError, match="shapes without values"):
        train.init(jax.eval_shape(mlp_params))


def test_a_plain_functions_units_are_recomputed_too(mlp_graph: Graph) -> None:
    def trained(recompute: str) -> tuple[float, Any]:
        train = sw.train_step(mlp, optax.sgd(0.1), plan_of(mlp_graph, 4, 2, recompute=recompute))
        state, loss = train(train.init(mlp_params()), mlp_batch())
        return float(loss), train.params(state)

    (loss, params), (again, same) = trained("none"), trained("full")
    assert again == pytest.approx(loss, rel=1e-6)
    Comparison().values(same, params, relative=1e-5, absolute=0.0).require()


def test_a_state_of_another_process_is_computed_again_too(mlp_graph: Graph) -> None:
    """A plain function's units, where the step is given a state that was saved rather than one of its own init."""
    made, restored, without = (
        sw.train_step(mlp, optax.sgd(0.1), plan_of(mlp_graph, 4, 2, recompute=recompute))
        for recompute in ("full", "full", "none")
    )
    state = made.init(mlp_params())
    placed = restored.place(jax.device_get(state))
    assert restored.memory_bytes(placed, mlp_batch()) == made.memory_bytes(state, mlp_batch())
    own = without.init(mlp_params())
    assert without.memory_bytes(own, mlp_batch()) != made.memory_bytes(state, mlp_batch())
    assert float(restored(placed, mlp_batch())[1]) == pytest.approx(float(without(own, mlp_batch())[1]), rel=1e-6)


def test_another_optimizers_state_is_not_placed(mlp_graph: Graph) -> None:
    one, other = (sw.train_step(mlp, make, plan_of(mlp_graph, 4, 2)) for make in (optax.adamw(0.1), optax.sgd(0.1)))
    with pytest.raises(PlanError, match=r"the state has \d+ arrays where one of this plan and optimizer has 0"):
        other.place(jax.device_get(one.init(mlp_params())))


def test_a_loss_function_that_returns_no_number(mlp_graph: Graph) -> None:
    train = sw.train_step(lambda params, batch: batch["x"], optax.sgd(0.1), plan_of(mlp_graph, 4, 2))
    with pytest.raises(sw.ShardwrightError, match=r"a loss that is an array of shape \(2, 8\): expected one number"):
        train(train.init(mlp_params()), mlp_batch())
