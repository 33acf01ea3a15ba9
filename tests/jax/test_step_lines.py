"""The lines of training steps in JAX: losses, norms, samples and FLOPs are those of the whole model and batch."""

import logging
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import shardwright.jax as sw
from shardwright.core.values.step_line import LINES, StepLine

WIDTH, LENGTH, WORDS, BATCH = 16, 6, 29, 8
FORWARD = 2 * BATCH * LENGTH * (WIDTH * 32 * 2 + WIDTH * WORDS)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 32, rngs=rngs), nnx.Linear(32, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, WORDS, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embedding(tokens)
        return self.head(x + self.down(jax.nn.relu(self.up(x))))


def loss_fn(model: Net, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["tokens"][:, 1:]).mean()


def batch_of(step: int, length: int = LENGTH) -> dict[str, jax.Array]:
    return {"tokens": jax.random.randint(jax.random.key(step), (BATCH, length), 0, WORDS)}


@pytest.fixture
def lines() -> Iterator[list[StepLine]]:
    found: list[StepLine] = []
    original = StepLine.text

    def text(line: StepLine) -> str:
        found.append(line)
        return original(line)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepLine, "text", text)
        yield found


def trained(log_every: int, steps: int, lengths: tuple[int, ...] = (), **given: Any) -> tuple[list[float], list[float]]:
    model = Net(nnx.Rngs(0))
    graph = sw.capture(model, batch_of(0), loss_fn)
    wrt = given.pop("wrt", None)
    plan = sw.plan(graph, sw.Cluster("cpu", devices_per_node=2), batch=BATCH, precision="fp32", **given)
    train = sw.train_step(loss_fn, optax.adamw(1e-2), plan, devices=jax.devices()[:2], log_every=log_every, wrt=wrt)
    state = train.init(model)
    losses, norms = [], []
    for step in range(steps):
        state, loss = train(state, batch_of(step, lengths[step] if lengths else LENGTH))
        losses.append(float(loss))
        norms.append(float(train.grad_norm))
    train.settle()
    return losses, norms


@pytest.mark.parametrize(("pp", "dp", "tp"), [(1, 2, 1), pytest.param(1, 1, 2, marks=pytest.mark.slow), (2, 1, 1)])
def test_a_line_says_what_its_steps_did(lines: list[StepLine], pp: int, dp: int, tp: int) -> None:
    losses, norms = trained(2, 4, pp=pp, dp=dp, tp=tp, microbatch=4 // dp)
    assert [line.step for line in lines] == [1, 2, 4]
    for line, steps in zip(lines, (1, 1, 2), strict=True):
        assert line.loss == pytest.approx(losses[line.step - 1], rel=1e-6)
        assert line.grad_norm == pytest.approx(norms[line.step - 1], rel=1e-6)
        assert (line.work.samples, line.work.tokens) == (steps * BATCH, steps * BATCH * LENGTH)
        assert line.work.flops == {"fp32": 3 * steps * FORWARD}
        assert line.work.devices == 2
        assert line.mfu is not None


def test_parameters_that_are_not_trained_have_no_gradient_products(lines: list[StepLine]) -> None:
    """The head is trained alone: one product more than forward for its weight, none for what it is given."""
    trained(1, 1, pp=1, dp=2, tp=1, wrt=lambda path, value: "head" in path)
    assert lines[0].work.flops == {"fp32": FORWARD + 2 * BATCH * LENGTH * WIDTH * WORDS}


def test_longer_sequences_count_by_their_own_length(lines: list[StepLine]) -> None:
    trained(1, 2, (LENGTH, 2 * LENGTH), pp=1, dp=2, tp=1)
    assert [line.work.tokens for line in lines] == [BATCH * LENGTH, 2 * BATCH * LENGTH]
    assert lines[1].work.flops == {"fp32": 2 * 3 * FORWARD}


def test_flops_of_plans_with_recompute_are_the_models(lines: list[StepLine]) -> None:
    trained(1, 1, pp=1, dp=2, tp=1, recompute="full")
    assert lines[0].work.flops == {"fp32": 3 * FORWARD}


def test_lines_are_said_without_waiting_and_none_is_lost() -> None:
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    LINES.addHandler(handler)
    try:
        trained(1, 3, pp=1, dp=2, tp=1)
    finally:
        LINES.removeHandler(handler)
    assert "tps counts the entries of batch['tokens']" in texts[0]
    assert [text[:8] for text in texts[1:]] == ["step:  1", "step:  2", "step:  3"]


def test_no_lines_where_none_are_asked_for(lines: list[StepLine]) -> None:
    trained(0, 2, pp=1, dp=2, tp=1)
    assert lines == []
    with pytest.raises(sw.ShardwrightError, match="log_every=-1"):
        trained(-1, 1, pp=1, dp=2, tp=1)


def test_a_loss_that_cannot_be_traced_at_two_sizes_has_no_flops(lines: list[StepLine]) -> None:
    """The step itself is run all the same."""
    table = jnp.ones((BATCH, 1))

    def fixed(params: jax.Array, batch: jax.Array) -> jax.Array:
        return (batch @ params * table).mean()

    graph = sw.capture(lambda params, batch: (batch @ params).mean(), (jnp.ones((4, 4)), jnp.ones((BATCH, 4))))
    plan = sw.plan(graph, sw.Cluster("cpu", devices_per_node=1), batch=BATCH, precision="fp32")
    train = sw.train_step(fixed, optax.sgd(0.1), plan, devices=jax.devices()[:1], log_every=1)
    state = train.init(jnp.ones((4, 4)))
    train(state, jnp.ones((BATCH, 4)))
    train.settle()
    assert lines[0].loss == pytest.approx(4.0)
    assert lines[0].work.flops is None
