"""The optimizer over stages: what is alike is one program, and a norm of all gradients takes one exchange."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardwright.jax as sw
from shardwright.backends.jax.equations import evaluate, flatten
from shardwright.backends.jax.regroup import regrouped
from tests.jax.chains import batches, graph_of, maker, plain_loss, plan_of


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
    assert [len(piece.gives) for piece in summing] == [1, 1, 1]
    assert [piece.stage for piece in scaling] == [0, 1, 2]
    shared = [next(p for p in updating if p.stage == stage) for stage in range(3)]
    assert [len(piece.results) for piece in shared] == [3 * 8] * 3  # of 8 arrays both moments and the parameter
    rest = [piece for piece in updating if piece not in shared]
    assert [(piece.stage, bool(piece.results)) for piece in rest] == [(0, True), (2, True)]
    assert train.compiled is not None
    assert train.compiled.programs - train.compiled.compiled == 2 + 2  # of three each one is compiled


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
    np.testing.assert_allclose(found, run(values), rtol=1e-6)

    for value in grouped.avals[len(flat.avals) :]:
        assert value.shape == ()
    crossing = 0
    for equation in grouped.equations:
        homes = {home.get(value) for value in equation.values}
        home.setdefault(equation.outputs[0], next(iter(homes)) if len(homes) == 1 else None)
        crossing += len(homes) > 1
    assert crossing == 2 + 3 + 2  # three meshes each; the second sum begins with the first
