"""Stages that are alike are traced and lowered once; what differs in anything is not taken for alike."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardwright.jax as sw
from shardwright.backends.jax.pipeline import deduplication
from shardwright.backends.jax.pipeline.deduplication import signature
from shardwright.backends.jax.pipeline.stage_functions import FunctionsOfStage
from shardwright.backends.jax.pipeline.stage_programs import StagePrograms
from shardwright.backends.jax.program.flattening import flatten
from tests.jax.chains import (
    Chain,
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


def of(run: Callable[..., Any], *shapes: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
    flat = flatten(jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)))
    return signature(flat, flat.equations, flat.arguments, flat.outputs)


def base(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
    return (x @ y + 1.0).sum(0), x * 2.0


def test_the_same_on_other_values_has_the_same_signature() -> None:
    def after_others(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        unused = jnp.tanh(y).sum()
        del unused
        return base(x, y)

    one = of(base, (4, 4), (4, 4))
    assert one is not None
    assert one == of(lambda x, y: base(x, y), (4, 4), (4, 4)) == of(after_others, (4, 4), (4, 4))


@pytest.mark.parametrize(
    "other",
    [
        lambda x, y: ((x @ y + 1.5).sum(0), x * 2.0),
        lambda x, y: ((x @ y - 0.0).sum(0), x * 2.0),
        lambda x, y: ((x @ y + 1.0).sum(1), x * 2.0),
        lambda x, y: ((y @ x + 1.0).sum(0), x * 2.0),
        lambda x, y: ((x @ y + 1.0).sum(0), y * 2.0),
        lambda x, y: base(x, y)[::-1],
        lambda x, y: (*base(x, y), x),
        lambda x, y: base(x, y)[:1],
    ],
)
def test_what_differs_has_another_signature(other: Any) -> None:
    assert of(other, (4, 4), (4, 4)) != of(base, (4, 4), (4, 4))


def test_other_shapes_and_dtypes_have_another_signature() -> None:
    found = {of(lambda x: (x + x,), (4,), dtype=dtype) for dtype in (jnp.float32, jnp.int32, jnp.bfloat16)}
    assert len({*found, of(lambda x: (x + x,), (5,)), of(lambda x: (x + x,), (1, 4))}) == 5


def test_precision_and_other_surroundings_are_part_of_it() -> None:
    def precise(x: jax.Array) -> tuple[jax.Array]:
        with jax.default_matmul_precision("highest"):
            return (x @ x,)

    assert of(precise, (4, 4)) != of(lambda x: (x @ x,), (4, 4))


def told(x: jax.Array) -> tuple[jax.Array]:
    jax.debug.print("{}", x.sum())
    return (x,)


def ruled(scale: float) -> Callable[[jax.Array], tuple[jax.Array]]:
    """Prints as any other, and has a derivative of its own."""

    @jax.custom_vjp
    def run(x: jax.Array) -> jax.Array:
        return jnp.tanh(x)

    run.defvjp(lambda x: (jnp.tanh(x), None), lambda _, g: (g * scale,))
    return lambda x: (run(x),)


def test_what_cannot_be_told_is_like_nothing() -> None:
    table = jnp.asarray(np.arange(4, dtype=np.float32))
    assert of(told, (4,)) is None
    assert of(lambda x: (x + table,), (4,)) is None
    assert of(ruled(1.0), (4,)) != of(ruled(2.0), (4,))


class Scaled(Chain):
    """Every block's result is scaled by a number of its own, or with a derivative of its own."""

    def __init__(self, scales: list[float], rngs: nnx.Rngs, *, derivative: bool):
        super().__init__(len(scales), rngs)
        self.scales = tuple(scales)
        self.derivative = derivative

    def __call__(self, ids: jax.Array) -> jax.Array:
        first = x = self.embed(ids)
        for block, scale in zip(self.blocks, self.scales, strict=True):
            made = block(x, first)
            x = ruled(scale)(made)[0] if self.derivative else scale * made
        return self.embed.attend(self.norm(x))


SCALES = [1, 0.5, 0.25, 1]


@pytest.mark.parametrize(
    ("create", "traced", "pins"),
    [
        (maker(4), 3, {}),  # the first has the embedding, the last the norm
        (lambda: Scaled(SCALES, nnx.Rngs(1), derivative=False), 4, {}),
        pytest.param(lambda: Scaled(SCALES, nnx.Rngs(1), derivative=True), 4, {}, marks=pytest.mark.slow),
        pytest.param(maker(4), 3, {"recompute": "full"}, marks=pytest.mark.slow),
        pytest.param(maker(4), 3, {"schedule": "zb-h1"}, marks=pytest.mark.slow),
    ],
    ids=["alike", "scales", "derivatives", "recomputed", "split"],
)
def test_stages_that_are_alike_are_traced_once(
    create: Callable[[], nnx.Module], traced: int, pins: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four blocks, what enters the first being read by all: on four stages, the middle two may be alike."""
    stages: list[int] = []
    lowered: list[int] = []
    lower = StagePrograms._lower

    def tracing(cut: Any, stage: int, *given: Any, **options: Any) -> Any:
        stages.append(stage)
        return FunctionsOfStage(cut, stage, *given, **options)

    def lowering(self: Any, stage: int, function: Any) -> Any:
        lowered.append(stage)
        return lower(self, stage, function)

    monkeypatch.setattr(deduplication, "FunctionsOfStage", tracing)
    monkeypatch.setattr(StagePrograms, "_lower", lowering)
    optimizer = recording(optax.adam(1e-2))
    train = sw.train_step(plain_loss, optimizer, plan_of(graph_of(create), 4, **pins), devices=jax.devices()[:4])
    expected = module_reference(plain_loss, create, optimizer, batches(1))
    require_same_run(train, train.init(create), expected, batches(1))
    assert len(stages) == traced
    assert set(lowered) == set(stages)
