"""The tensor axis in JAX: what the compiled program sends is what the plan says, and what a device holds too."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shardwright.jax as sw
from examples import gpt2_flax
from shardwright.core.errors import PlanError
from shardwright.core.layout.placements import Layout, Split
from shardwright.core.model.fold import fold
from shardwright.core.model.structure import structure_of
from shardwright.core.plan.realised_layouts import program_for, realise
from shardwright.core.solver.op_prices import Prices
from tests.comparison import Comparison
from tests.jax import collectives, zoo_dropout
from tests.jax.chains import named
from tests.jax.plans import BATCH, CONFIG, batches, create, gpt2_graph, megatron, plan_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

ACTIVATION_BYTES = 4 * zoo_dropout.BATCH * zoo_dropout.LENGTH * zoo_dropout.WIDTH


def captured(create: Callable[[], Any], loss: Any, batch: dict[str, np.ndarray]) -> sw.Graph:
    sample = {key: jax.ShapeDtypeStruct(value.shape, value.dtype) for key, value in batch.items()}
    return sw.capture(nnx.eval_shape(create), sample, loss)


def zoo_plan(graph: sw.Graph, tp: int, dp: int = 1, pp: int = 1, **pins: Any) -> sw.Plan:
    given = {"precision": "fp32", "recompute": "none", "shard": 0, "microbatch": zoo_dropout.BATCH // dp} | pins
    cluster = sw.Cluster("h100", nodes=1, devices_per_node=pp * tp * dp)
    return sw.plan(graph, cluster, batch=zoo_dropout.BATCH, pp=pp, tp=tp, dp=dp, **given)


def compiled(train: sw.TrainStep, create: Callable[[], Any], batch: Any) -> str:
    text: str = train.lower(train.init(create), batch).compile().as_text()
    return text


def of_model(name: str, tp: int, dp: int = 1, pp: int = 1, **pins: Any) -> tuple[Counter[Any], Counter[Any], str]:
    """What the compiled step of a model of the zoo sends, what its plan says, and the program: of pipelines those of
    all stages."""
    make, loss = zoo_dropout.MODELS[name]
    batch = zoo_dropout.batches(name, 1)[0]
    graph = captured(make, loss, batch)
    plan = zoo_plan(graph, tp, dp, pp, **pins)
    train = sw.train_step(loss, optax.sgd(0.1), plan, devices=jax.devices()[: pp * tp * dp])
    if pp == 1:
        text = compiled(train, make, batch)
    else:
        train(train.init(make), batch)
        text = "\n".join(launch.run.as_text() for stage in train.pipeline.launches for launch in stage.values())
    planned = collectives.of_units(graph, realise(graph, plan), zoo_dropout.BATCH // dp)
    return collectives.of_program(text), planned, text


# --- the program


def test_a_plan_file_compiles_to_the_same_program_after_a_change_of_prices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    graph, batch = gpt2_graph(), batches(1)[0]
    plan = plan_of(graph, 1, 2)
    plan.save(tmp_path / "plan.json")
    texts, seconds = [], Prices.seconds
    for prices in (False, True):
        if prices:
            monkeypatch.setattr(Prices, "edge_s", lambda *_: 0.0)
            monkeypatch.setattr(Prices, "seconds", lambda *given: seconds(*given) / 1e6)
        loaded = sw.Plan.load(tmp_path / "plan.json")
        train = sw.train_step(gpt2_flax.next_token_loss, optax.sgd(0.1), loaded, devices=jax.devices()[:2])
        texts.append(train.lower(train.init(create), batch).as_text())
    assert texts[0] == texts[1]
    solved = program_for(graph, structure_of(fold(graph))[0], plan.decision, plan.costs.rates)
    assert solved != dict(plan.programs)["jax"]


# --- on the wire


@pytest.mark.parametrize(
    ("pp", "tp", "dp"),
    [(1, 2, 2), *(pytest.param(*d, marks=pytest.mark.slow) for d in ((1, 2, 1), (2, 2, 1), (1, 4, 1), (2, 2, 2)))],
)
def test_a_block_of_gpt2_sends_what_the_plan_says(monkeypatch: pytest.MonkeyPatch, pp: int, tp: int, dp: int) -> None:
    """Of a model with one block more, compiled (on every stage, where there are stages): its collectives are the
    plan's, in number and bytes, and no others."""
    found = []
    for layers in (pp, 2 * pp):
        config = replace(zoo_dropout.GPT, n_layer=layers)
        monkeypatch.setitem(
            zoo_dropout.MODELS, "gpt2", (lambda config=config: gpt2_flax.create(config), gpt2_flax.next_token_loss)
        )
        found.append(of_model("gpt2", tp, dp, pp))
    block = found[1][0] - found[0][0]
    planned = found[1][1] - found[0][1]
    assert planned == {("all-reduce", ACTIVATION_BYTES // dp): 4 * pp}
    over_tp = {key: count for key, count in block.items() if key in planned}
    assert over_tp == planned
    # The norm has one number more for each array, in as many messages. With replicas the gradients of the block's
    # parameters are summed over them. Nothing else moves.
    others = [(kind, size) for kind, size in block if (kind, size) not in planned]
    assert {kind for kind, _ in others} <= {"all-reduce"}
    if dp == 1:
        assert all(size < 64 * 4 for _, size in others)
        assert found[1][0].total() - found[0][0].total() == planned.total()
    # The look-ups of words and positions are summed together, not each by itself.
    if dp == 1:
        assert ("all-reduce", 4 * zoo_dropout.LENGTH * zoo_dropout.WIDTH) not in found[1][0]
    assert "all-gather" not in found[1][2]


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("llama", 2),
        pytest.param("bert", 2, marks=pytest.mark.slow),
        pytest.param("t5", 2, marks=pytest.mark.slow),
        pytest.param("vit", 2, marks=pytest.mark.slow),
        pytest.param("llama", 4, marks=pytest.mark.slow),
        pytest.param("bert", 4, marks=pytest.mark.slow),
    ],
)
def test_models_send_what_the_plan_says(name: str, tp: int) -> None:
    """Query, key and value apart share one reduction of their gradients; fused ones with blocks of different sizes move
    nothing. On a CPU a reduce-scatter is compiled as an all-reduce and a cut."""
    sent, planned, _ = of_model(name, tp)
    length = 5 if name == "vit" else zoo_dropout.LENGTH
    size = 4 * zoo_dropout.BATCH * length * zoo_dropout.WIDTH

    def large(counted: Counter[Any]) -> Counter[str]:
        kinds: Counter[str] = Counter()
        for (kind, bytes_), count in counted.items():
            if bytes_ == size:
                kinds[kind.replace("reduce-scatter", "all-reduce")] += count
        return kinds

    assert large(sent) == large(planned)
    assert planned[("all-reduce", size)] >= 4
    # What is left are statistics of the loss and the look-up of positions, all of them small.
    assert all(bytes_ <= size // 4 for (_, bytes_) in sent if bytes_ != size)


@pytest.mark.slow
def test_selective_recompute_keeps_products_with_weights() -> None:
    """Its policy goes by batch dims, so products are left as they were written."""
    make, loss = zoo_dropout.MODELS["bert"]
    batch = zoo_dropout.batches("bert", 1)[0]
    graph = captured(make, loss, batch)

    def products(tp: int, recompute: str) -> int:
        plan = zoo_plan(graph, tp, recompute=recompute)
        train = sw.train_step(loss, optax.sgd(0.1), plan, devices=jax.devices()[:tp])
        return train.lower(train.init(make), batch).as_text().count("dot_general")

    assert products(2, "selective") - products(2, "none") == products(1, "selective") - products(1, "none")


REMATERIALISES = "Involuntary full rematerialization"


def test_the_compilers_warning_is_seen(capfd: pytest.CaptureFixture[str]) -> None:
    """A change of layout that the partitioner cannot make in pieces: the next test would see it."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))

    def change(x: jax.Array) -> jax.Array:
        flat = NamedSharding(mesh, PartitionSpec(("x", "y")))
        x = jnp.sin(jax.lax.with_sharding_constraint(x, flat))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(None, "y")))

    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    jax.jit(change, in_shardings=NamedSharding(mesh, PartitionSpec("x", "y"))).lower(shape).compile()
    assert REMATERIALISES in capfd.readouterr().err


@pytest.mark.parametrize(("dp", "sequence"), [pytest.param(2, False, marks=pytest.mark.slow), (1, True)])
def test_no_stage_gathers_to_cut_again(dp: int, sequence: bool, capfd: pytest.CaptureFixture[str]) -> None:
    of_model("llama", 2, dp, 2, sequence_parallel=sequence)
    assert REMATERIALISES not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("name", zoo_dropout.MODELS)
def test_nothing_is_gathered_to_be_cut_again(name: str, sequence: bool, capfd: pytest.CaptureFixture[str]) -> None:
    of_model(name, 2, 2, sequence_parallel=sequence)
    of_model(name, 4, 2, sequence_parallel=sequence)
    assert REMATERIALISES not in capfd.readouterr().err


# --- what a device holds


@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_shares_are_as_predicted(tp: int) -> None:
    """Parameters, gradients and optimizer states of every device: at most 1.15 times an even share of what can be
    split, and what the plan says to the byte."""
    config = gpt2_flax.Config(n_layer=2, n_head=4, n_embd=64, vocab_size=512, n_positions=16)

    def make() -> gpt2_flax.GPT2:
        return gpt2_flax.create(config)

    batch = {"input_ids": np.zeros((8, 16), np.int32)}
    plan = zoo_plan(captured(make, gpt2_flax.next_token_loss, batch), tp, optimizer="adamw")

    def keep(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
        def update(gradients: Any, state: Any, params: Any = None) -> Any:
            updates, inner = optimizer.update(gradients, state[0], params)
            return updates, (inner, gradients)

        return optax.GradientTransformation(
            lambda params: (optimizer.init(params), jax.tree.map(jnp.zeros_like, params)), update
        )

    train = sw.train_step(gpt2_flax.next_token_loss, keep(optax.adamw(1e-3)), plan, devices=jax.devices()[:tp])
    state, _ = train(train.init(make), batch)
    inner, gradients = state.optimizer
    predicted = plan.predicted.memory[0]
    for device in jax.devices()[:tp]:
        params = held_bytes(state.params, device)
        assert params == held_bytes(gradients, device) == predicted.parameters_bytes == predicted.gradients_bytes
        moments = held_bytes((inner[0].mu, inner[0].nu), device)
        assert moments == predicted.optimizer_bytes == 2 * params
        whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
        assert params <= 1.15 * whole / tp


def held_bytes(tree: Any, device: jax.Device) -> int:
    pieces = (piece for leaf in jax.tree.leaves(tree) for piece in leaf.addressable_shards)
    return sum(piece.data.nbytes for piece in pieces if piece.device == device)


# --- fused matrices


def test_states_in_the_models_own_order() -> None:
    """Fused matrices are held by their blocks; parameters and states come out as the model has them, and go back."""
    plan = megatron(gpt2_graph(), 1, 2)
    train = sw.train_step(gpt2_flax.next_token_loss, optax.adamw(1e-3), plan, devices=jax.devices()[:2])
    model = create()
    kernel = np.asarray(model.h[0].attn.c_attn.kernel.get_value())
    state = train.init(model)
    held = named(state.params)["h.0.attn.c_attn.kernel"]
    width = CONFIG.n_embd
    half = width // 2
    order = [block * width + piece * half + i for piece in (0, 1) for block in (0, 1, 2) for i in range(half)]
    Comparison().equal(held, kernel[:, order]).require()
    Comparison().equal(train.params(state).h[0].attn.c_attn.kernel.get_value(), kernel).require()
    Comparison().equal(named(train.original(state).params)["h.0.attn.c_attn.kernel"], kernel).require()

    first, second = batches(2)
    state, _ = train(state, first)
    saved = jax.tree.map(jnp.copy, train.original(state))
    expected, loss = train(state, second)
    found, again = train(train.held(saved), second)
    assert float(loss) == float(again)
    Comparison().equal(jax.tree.leaves(found.params), jax.tree.leaves(expected.params)).require()
    # The same state goes on under another plan: the moments of the fused matrix are in its own order too.
    whole = plan_of(gpt2_graph())
    alone = sw.train_step(gpt2_flax.next_token_loss, optax.adamw(1e-3), whole, devices=jax.devices()[:1])
    elsewhere, _ = alone(alone.held(saved), second)
    require_close(elsewhere.params, train.original(expected).params)


def test_a_state_held_for_another_tensor_axis_is_refused() -> None:
    """Wherever it is given, as it was saved: nothing in its arrays shows that their columns are in another order."""
    graph, (batch,) = gpt2_graph(), batches(1)

    def trained(plan: sw.Plan) -> sw.TrainStep:
        return sw.train_step(
            gpt2_flax.next_token_loss, optax.adamw(1e-3), plan, devices=jax.devices()[: plan.mesh.size]
        )

    two, alone, stages = (trained(plan) for plan in (megatron(graph, 1, 2), plan_of(graph),
                                                     plan_of(graph, pp=2)))  # fmt: skip
    saved = jax.device_get(two.init(create()))
    other = r"in the order for a tensor axis of 2, and this plan's in the model's own.*other\.params\(state\)"
    for refuse in (alone.place, stages.place, alone.params, stages.params, alone.original, lambda s: alone(s, batch)):
        with pytest.raises(PlanError, match=other):
            refuse(saved)
    with pytest.raises(PlanError, match=r"model's own order, and this plan's in the order for a tensor axis of 2"):
        two.place(jax.device_get(alone.init(create)))
    with pytest.raises(PlanError, match="held takes a state in the model's own order"):
        two.held(saved)
    again = two.params(two.place(saved))
    Comparison().equal(nnx.state(again, nnx.Param), nnx.state(create(), nnx.Param)).require()


def require_close(found: Any, expected: Any) -> None:
    """Of the matrices: a key bias has a gradient that is zero but for rounding, which an optimizer that scales makes
    large."""
    matrices = [[leaf for leaf in jax.tree.leaves(tree) if leaf.ndim > 1] for tree in (found, expected)]
    Comparison().values(*matrices, relative=2e-3, absolute=1e-4).require()


@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
        pytest.param(lambda: optax.lamb(1e-2), marks=pytest.mark.slow),
    ],
)
def test_optimizers_that_see_whole_matrices(make: Callable[[], optax.GradientTransformation]) -> None:
    """Factored moments and norms of layers do not depend on the order of a fused dim."""

    def run(plan: sw.Plan) -> Any:
        train = sw.train_step(gpt2_flax.next_token_loss, make(), plan, devices=jax.devices()[: plan.mesh.size])
        state = train.init(create)
        for batch in batches(2):
            state, _ = train(state, batch)
        saved = train.original(state)
        return saved.params, saved.optimizer

    graph = gpt2_graph()
    require_close(jax.device_get(run(megatron(graph, 1, 2))), jax.device_get(run(plan_of(graph))))


# --- meshes of the caller's


@pytest.mark.parametrize(
    "types", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)], ids=["auto", "explicit"]
)
def test_meshes_and_arrays_of_either_axis_type(types: AxisType) -> None:
    """A batch and a model on a mesh of the caller's, which is also set, give the same step."""
    plan = megatron(gpt2_graph(), 2, 2, BATCH // 2)
    devices, batch = jax.devices()[:4], batches(1)[0]
    plain = sw.train_step(gpt2_flax.next_token_loss, optax.sgd(0.1), plan, devices=devices)
    expected_state, expected = plain(plain.init(create), batch)
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(types, types), devices=devices)
    with jax.set_mesh(mesh):
        given = {name: jax.device_put(value, NamedSharding(mesh, PartitionSpec("dp"))) for name, value in batch.items()}
        train = sw.train_step(gpt2_flax.next_token_loss, optax.sgd(0.1), plan, devices=devices)
        state, loss = train(train.init(create()), given)
        after = train.params(state)
        kernel = after.h[0].attn.c_attn.kernel.get_value()
        norm = float(jnp.linalg.norm(jax.device_put(kernel, NamedSharding(mesh, PartitionSpec()))))
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert norm == pytest.approx(float(np.linalg.norm(np.asarray(kernel))), rel=1e-5)
    held, wanted = jax.tree.leaves(state.params), jax.tree.leaves(expected_state.params)
    Comparison().values(held, wanted, relative=1e-5, absolute=1e-7).require()


# --- bad input


def test_the_function_was_changed_after_planning() -> None:
    """Another tree is named; so is a function that uses the same parameters otherwise."""
    graph = gpt2_graph()
    plan = megatron(graph, 1, 2)
    train = sw.train_step(gpt2_flax.next_token_loss, optax.sgd(0.1), plan, devices=jax.devices()[:2])
    deeper = gpt2_flax.create(replace(CONFIG, n_layer=3))
    with pytest.raises(sw.ShardwrightError, match=r"h\.2\..*plan this model anew"):
        train.init(deeper)
    wider = gpt2_flax.create(replace(CONFIG, n_embd=64))
    with pytest.raises(sw.ShardwrightError, match=r"has shape .*64.*capture this model and plan again"):
        train.init(wider)

    def untied(model: gpt2_flax.GPT2, batch: Any) -> jax.Array:
        return model.wte(batch["input_ids"]).mean() + model.h[0].mlp(model.wte(batch["input_ids"])).mean()

    other = sw.train_step(untied, optax.sgd(0.1), plan, devices=jax.devices()[:2])
    with pytest.raises(sw.ShardwrightError, match=r"for GPT2, which untied in jax does not match: .*units"):
        other(other.init(create), batches(1)[0])


def test_a_width_that_no_device_count_divides() -> None:
    """It stays whole, with the reason in the plan; asked for, it is refused with the nearest that works."""
    config = gpt2_flax.Config(n_layer=1, n_head=3, n_embd=33, vocab_size=47, n_positions=16)

    def make() -> gpt2_flax.GPT2:
        return gpt2_flax.create(config)

    graph = captured(make, gpt2_flax.next_token_loss, {"input_ids": np.zeros((8, 16), np.int32)})
    plan = zoo_plan(graph, 2)
    reasons = " ".join(reason for _, reason in plan.unsplit)
    assert "2 does not divide 33: pad it to 34, or use a degree that divides it" in reasons
    with pytest.raises(sw.ShardwrightError, match=r"\(47, 33\).*does not divide: use a size that divides 47"):
        replace(plan, decision=replace(plan.decision, layouts=(("0/w0", Layout.of(tp=Split(0))),)))


def test_a_tied_weight_with_two_layouts() -> None:
    """In a plan file the slots of its two uses disagree; asked for by its two names, when planning."""
    plan = megatron(gpt2_graph(), 1, 2)
    tied = plan.model.ties[0]
    assert tied == ("0/w0", "3/w0")
    other = tuple((slot, Layout.of(tp=Split(0)) if slot == "2/w0" else at) for slot, at in plan.decision.layouts)
    with pytest.raises(
        sw.ShardwrightError,
        match=r"tied parameter wte\.embedding has two layouts: slot 0/w0 .* at tp: S0 .* slot 2/w0 at tp: S1: .* write "
        r"tp: S1 for 2/w0, or change 0/w0",
    ):
        replace(plan, decision=replace(plan.decision, layouts=other))
