"""The optimizer over stages: what is alike is one program, and a norm of all gradients takes one exchange."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardwright.jax as sw
from shardwright.backends.jax.program.cross_mesh_sums import regrouped
from shardwright.backends.jax.program.equations import evaluate
from shardwright.backends.jax.program.flattening import flatten
from shardwright.core.errors import PlanError
from tests.comparison import Comparison
from tests.jax.chains import (
    batches,
    graph_of,
    maker,
    module_reference,
    plain_loss,
    plan_of,
    recording,
    require_same_run,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_stages_share_the_program_of_what_they_have_in_common() -> None:
    """Two blocks each; the first stage has the embedding beside them, the last the norm."""
    create = maker(6)
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    train = sw.train_step(plain_loss, optimizer, plan_of(graph_of(create), 3), devices=jax.devices()[:3])
    train(train.init(create), batches(1)[0])
    pieces = train.pipeline.update.pieces
    summing, scaling, updating = (
        [p for p in pieces if p.level == level] for level in sorted({p.level for p in pieces})
    )
    assert [len(piece.gives) for piece in summing] == [2, 2, 2]  # the sum to clip by, and that of the step's own norm
    assert [piece.stage for piece in scaling] == [0, 1, 2]
    shared = [next(p for p in updating if p.stage == stage) for stage in range(3)]
    assert [len(piece.results) for piece in shared] == [3 * 8] * 3  # of 8 arrays both moments and the parameter
    rest = [piece for piece in updating if piece not in shared]
    assert [(piece.stage, bool(piece.results)) for piece in rest] == [(0, True), (2, True)]
    assert train.compiled is not None
    assert train.compiled.programs - train.compiled.compiled == 2 + 2  # of three each one is compiled
    assert not any(" copy(" in piece.run.as_text() for piece in updating)  # each array's memory becomes its successor's


def test_sums_are_grouped_by_mesh() -> None:
    """Of ten numbers on three meshes in turn, the sum and the largest, one partial sum being read elsewhere too."""

    def run(values: list[jax.Array]) -> tuple[jax.Array, ...]:
        half = sum(values[:5], jnp.float32(0))
        largest = values[0]
        for value in values[1:]:
            largest = jnp.maximum(largest, value)
        return half, sum(values[5:], half), largest, values[0] + values[3]

    values = [jnp.float32(x) for x in np.random.default_rng(0).standard_normal(10)]
    flat = flatten(jax.make_jaxpr(run)(values))
    home: dict[int, int | None] = {value: position % 3 for position, value in enumerate(flat.arguments)}
    for equation in flat.equations:
        homes = {home[value] for value in equation.values}
        home.update(dict.fromkeys(equation.outputs, homes.pop() if len(homes) == 1 else None))
    grouped = regrouped(flat, home)
    known = dict(zip(grouped.arguments, values, strict=True)) | grouped.constants
    evaluate(grouped.equations, known)
    found = [known[atom] for atom in grouped.outputs if isinstance(atom, int)]
    Comparison().values(found, run(values), relative=1e-6, absolute=0.0).require()

    for value in grouped.avals[len(flat.avals) :]:
        assert value.shape == ()
    crossing = 0
    for equation in grouped.equations:
        homes = {home.get(value) for value in equation.values}
        home.setdefault(equation.outputs[0], next(iter(homes)) if len(homes) == 1 else None)
        crossing += len(homes) > 1
    assert crossing == 2 + 3 + 2  # three meshes each; the second sum begins with the first


def run(optimizer: optax.GradientTransformation, steps: int) -> sw.TrainState:
    """On two stages, compared with the unsplit run."""
    create = maker(2)
    optimizer = recording(optimizer)
    train = sw.train_step(plain_loss, optimizer, plan_of(graph_of(create), 2), devices=jax.devices()[:2])
    expected = module_reference(plain_loss, create, optimizer, batches(steps))
    return require_same_run(train, train.init(create), expected, batches(steps))


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.scale(-0.1), optax.clip_by_global_norm(0.01)),
        optax.chain(optax.clip_by_global_norm(0.5), optax.add_noise(1e-2, 0.55, 0), optax.sgd(1e-2)),
    ],
    ids=["two norms", "a norm and random keys"],
)
def test_what_follows_from_norms(optimizer: optax.GradientTransformation) -> None:
    """Whether to clip can be told on any mesh, in several pieces; keys are not packed with numbers."""
    run(optimizer, 3)


def watching(seen: list[tuple[str, float]], *, ordered: bool = False) -> optax.GradientTransformation:
    """Hands the norm of the gradients, one gradient's sum and a constant to the host."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        values = {"norm": optax.global_norm(updates), "last": jax.tree.leaves(updates)[-1].sum(), "one": 1.0}
        for name, value in values.items():
            jax.debug.callback(lambda x, name=name: seen.append((name, float(x))), value, ordered=ordered)
        return updates, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def test_an_optimizers_side_effects_happen_once_in_a_step() -> None:
    seen: list[tuple[str, float]] = []
    norms = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1))
    state = run(optax.chain(watching(seen), norms), 2)
    jax.block_until_ready(state)
    jax.effects_barrier()
    assert len(seen) == 2 * 2 * 3  # the unsplit run and this one
    unsplit, split = sorted(seen[:6]), sorted(seen[6:])
    assert [name for name, _ in split] == ["last"] * 2 + ["norm"] * 2 + ["one"] * 2
    Comparison().losses([x for _, x in split], [x for _, x in unsplit]).require()


def test_an_optimizers_side_effects_in_a_fixed_order_are_refused() -> None:
    create = maker(2)
    optimizer = optax.chain(watching([], ordered=True), optax.sgd(0.1))
    train = sw.train_step(plain_loss, optimizer, plan_of(graph_of(create), 2), devices=jax.devices()[:2])
    with pytest.raises(PlanError, match=r"optimizer has a side effect in a fixed order.*use ordered=False"):
        train(train.init(create), batches(1)[0])


def test_an_optimizer_whose_state_changes_its_dtype() -> None:
    """As optax.inject_hyperparams makes of moments of bfloat16 parameters beside others of float32."""

    def init(params: Any) -> Any:
        return {"trace": jax.tree.map(lambda p: jnp.zeros_like(p, jnp.bfloat16), params)}

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, {"trace": jax.tree.map(jnp.add, state["trace"], updates)}

    create = maker(2)
    optimizer = optax.GradientTransformation(init, update)
    train = sw.train_step(plain_loss, optimizer, plan_of(graph_of(create), 2), devices=jax.devices()[:2])
    message = r"state\['trace'\].* bfloat16 at first and .* float32 after an update, and \d+ others.*one dtype, or cast"
    with pytest.raises(PlanError, match=message):
        train(train.init(create), batches(1)[0])
